//! What the `kvasir bench` commands share: rows, the report, and how things are timed.

pub mod attached;
mod beside_events;
pub mod contest;
pub mod conversation;
mod engine;
mod evictor_swap;
mod first_layer;
pub mod index;
mod local;
pub mod policy;
pub mod rpc;
pub mod store;
pub mod tiers;
pub mod transfer;

use comfy_table::{Table, presets};
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::time::{Duration, Instant};

/// One measured quantity; what was not measured is null in JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub value: f64,
    pub unit: &'static str,
    pub p50: Option<f64>,
    pub p99: Option<f64>,
    /// Measured in the same run for comparison: memcpy, plain socket, native twin.
    pub reference: Option<f64>,
    /// `value / reference`.
    pub ratio: Option<f64>,
}

impl Row {
    pub fn new(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { name: name.into(), value, unit, p50: None, p99: None, reference: None, ratio: None }
    }

    /// A row whose value is the median.
    pub fn of_times(name: impl Into<String>, times: &Times) -> Self {
        let (p50, p99) = (times.ns(0.5), times.ns(0.99));
        Self { p50: Some(p50), p99: Some(p99), ..Self::new(name, p50, "ns") }
    }

    #[must_use]
    pub fn beside(self, reference: f64) -> Self {
        let ratio = (reference != 0.0).then(|| self.value / reference);
        Self { reference: Some(reference), ratio, ..self }
    }
}

/// The machine a report was taken on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// As the kernel names the processor, or "unknown" if it does not.
    pub cpu: String,
    pub cores: usize,
    pub memory_bytes: u64,
    pub kernel: String,
    /// Debug builds measure the compiler's mood, not the code.
    pub optimized: bool,
}

impl Machine {
    pub fn here() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let named = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let system = rustix::system::uname();
        let memory = rustix::system::sysinfo();
        Self {
            cpu: named.map_or("unknown", |(_, name)| name).trim().to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory.totalram as u64 * u64::from(memory.mem_unit),
            kernel: system.release().to_string_lossy().into_owned(),
            optimized: !cfg!(debug_assertions),
        }
    }
}

/// Everything one `kvasir bench` run measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub bench: &'static str,
    pub machine: Machine,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn new(bench: &'static str, rows: Vec<Row>) -> Self {
        Self { bench, machine: Machine::here(), rows }
    }

    /// Prints to standard output: one JSON object, or a table.
    ///
    /// # Errors
    /// A value that JSON cannot hold.
    pub fn print(&self, json: bool) -> serde_json::Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
        } else {
            println!("{}", self.table());
        }
        Ok(())
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header([self.bench, "value", "unit", "p50", "p99", "reference", "ratio"]);
        let optional = |value: Option<f64>| value.map_or(String::new(), short);
        for row in &self.rows {
            table.add_row([
                row.name.clone(),
                short(row.value),
                row.unit.to_owned(),
                optional(row.p50),
                optional(row.p99),
                optional(row.reference),
                optional(row.ratio),
            ]);
        }
        let machine = &self.machine;
        let build = if machine.optimized { "" } else { ", debug build: not a measurement" };
        format!("{table}\n{} × {}, Linux {}{build}", machine.cores, machine.cpu, machine.kernel)
    }
}

/// Three digits, or more if the integer part has more.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Single calls, one time each.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

impl Times {
    /// Nanoseconds at a quantile of 0 to 1.
    pub fn ns(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64
    }

    /// Takes in calls that were timed elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("all have the same bounds");
    }

    pub fn mean_ns(&self) -> f64 {
        self.0.mean()
    }
}

/// Times `calls` calls after a tenth as many to warm up. The cost of reading the clock is subtracted.
pub fn time_calls(calls: usize, mut call: impl FnMut(usize)) -> Times {
    time_prepared(calls, |i| i, |&i| call(i))
}

/// The same for calls that need untimed preparation.
pub fn time_prepared<T>(
    calls: usize,
    mut prepare: impl FnMut(usize) -> T,
    mut call: impl FnMut(&T),
) -> Times {
    let longest = Duration::from_secs(60).as_nanos() as u64;
    let mut histogram = Histogram::new_with_bounds(1, longest, 3).expect("bounds are valid");
    let clock_ns = clock_cost_ns();
    for i in 0..calls / 10 {
        call(&prepare(i));
    }
    for i in 0..calls {
        let prepared = prepare(i);
        let start = Instant::now();
        call(&prepared);
        let ns = start.elapsed().as_nanos() as u64;
        histogram.saturating_record(ns.saturating_sub(clock_ns).max(1));
    }
    Times(histogram)
}

/// Median of two readings of the clock one after the other.
fn clock_cost_ns() -> u64 {
    let mut costs: Vec<u64> = (0..1_000)
        .map(|_| {
            let start = Instant::now();
            start.elapsed().as_nanos() as u64
        })
        .collect();
    costs.sort_unstable();
    costs[costs.len() / 2]
}

/// CPU time this thread spends in `work`.
pub fn cpu_time<R>(work: impl FnOnce() -> R) -> (R, Duration) {
    let start = thread_cpu_time();
    let result = work();
    (result, thread_cpu_time().saturating_sub(start))
}

/// CPU time this thread has used so far.
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_have_the_published_shape() {
        let times = time_calls(50, |i| {
            std::hint::black_box(i);
        });
        let rows = vec![Row::of_times("a", &times), Row::new("b", 3.0, "bytes").beside(2.0)];
        let report = Report::new("index", rows);
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(json["bench"], "index");
        assert!(json["machine"]["cores"].as_u64() >= Some(1));
        assert!(json["machine"]["memory_bytes"].as_u64() > Some(0));
        assert_eq!(json["rows"][0]["value"], json["rows"][0]["p50"]);
        assert_eq!((&json["rows"][1]["ratio"], &json["rows"][1]["unit"]), (&1.5.into(), &"bytes".into()));
        assert!(json["rows"][1]["p99"].is_null(), "not measured");
        assert!(report.table().contains("1.50"));
        assert_eq!(Row::new("c", 1.0, "").beside(0.0).ratio, None);
    }

    #[test]
    fn cpu_time_counts_work() {
        let (sum, spent) = cpu_time(|| (0..3_000_000u64).fold(0, |a, b| std::hint::black_box(a ^ b)));
        assert!(spent > Duration::ZERO, "{sum}");
    }
}
