//! `kvasir replay`: a trace through the components that run in production.

mod cache;

use self::cache::CacheFlags;
use super::cluster_flags::ClusterFlags;
use crate::config::Size;
use crate::policy::SlotKind;
use crate::replay::caches::{OPTIMUM, Table};
use crate::replay::cluster::{self, Choice, Choices, Cluster, Names, Policies, Setup, Swap};
use crate::replay::contender::Contender;
use crate::replay::page::Page;
use crate::replay::store::{self, Pace, Session};
use crate::replay::trace::{self, Format, MAX_BLOCK_SIZE_TOKENS, Reader, Request};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kvasir_client::control::{Control, ControlAddr, ControlError};
use kvasir_client::data::{Client, Endpoint, Options};
use kvasir_proto as proto;
use serde::Serialize;
use std::fs::File;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// Replay a trace and report hit rates.
#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// Trace to replay, plain or gzip.
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    #[command(flatten)]
    pub layout: LayoutFlags,
    /// What the trace runs through.
    #[arg(long, value_enum, default_value_t = Mode::Cache)]
    pub mode: Mode,
    /// Mode cache and mode cluster: evictor, a built-in name or a component file [default: workload-aware]. Mode cache: may
    /// be given several times, or as a list with commas; `optimum` knows the future, and no evictor can beat it.
    #[arg(long = "evictor", value_name = "NAME|FILE.wasm", value_delimiter = ',')]
    pub evictors: Vec<String>,
    /// Run a built-in evictor as the component or as its native twin.
    #[arg(long, value_enum, default_value_t = EngineKind::Wasm)]
    pub engine: EngineKind,
    /// A setting of the evictor; may be given several times. Among several evictors it says whose: EVICTOR:NAME=VALUE.
    #[arg(long = "evictor-setting", value_name = "[EVICTOR:]NAME=VALUE", value_parser = super::setting)]
    pub evictor_settings: Vec<(String, String)>,
    #[command(flatten)]
    pub cache: CacheFlags,
    /// Mode store: the data plane of the running host [default: $KVASIR_HOST].
    #[arg(long, value_name = "unix:PATH|tcp:ADDR")]
    pub host: Option<Endpoint>,
    /// Mode store: the host's clock follows the times of the trace, so that its policies see gaps as long as they were, although nothing
    /// waits. Takes a host that runs with `--movable-clock`, and its control in `--grpc`.
    #[arg(long, conflicts_with = "speed")]
    pub trace_time: bool,
    /// Mode store with --trace-time: control of the host [default: $KVASIR_GRPC].
    #[arg(long, value_name = "unix:PATH|HOST:PORT", requires = "trace_time")]
    pub grpc: Option<ControlAddr>,
    /// Mode store: bytes of a block.
    #[arg(long, value_name = "SIZE", default_value = "16KiB")]
    pub block_bytes: Size,
    /// Mode cluster: scheduler, a built-in name or a file [default: mooncake].
    #[arg(long, value_name = "NAME|FILE")]
    pub scheduler: Option<String>,
    /// A setting of the scheduler; may be given several times.
    #[arg(long = "scheduler-setting", value_name = "NAME=VALUE", value_parser = super::setting, requires = "scheduler")]
    pub scheduler_settings: Vec<(String, String)>,
    /// Mode cluster: admitter, a built-in name or a file [default: slo].
    #[arg(long, value_name = "NAME|FILE")]
    pub admitter: Option<String>,
    /// A setting of the admitter; may be given several times.
    #[arg(long = "admitter-setting", value_name = "NAME=VALUE", value_parser = super::setting, requires = "admitter")]
    pub admitter_settings: Vec<(String, String)>,
    /// Mode cluster: balancer, a built-in name or a file [default: static].
    #[arg(long, value_name = "NAME|FILE")]
    pub balancer: Option<String>,
    /// A setting of the balancer; may be given several times.
    #[arg(long = "balancer-setting", value_name = "NAME=VALUE", value_parser = super::setting, requires = "balancer")]
    pub balancer_settings: Vec<(String, String)>,
    #[command(flatten)]
    pub cluster: ClusterFlags,
    /// Mode cluster: another scheduler, admitter or balancer takes over that long after the first request, in virtual time; may
    /// be given several times.
    #[arg(long = "swap", value_name = "TIME:SLOT=NAME|FILE", value_parser = swap)]
    pub swaps: Vec<SwapFlag>,
    /// Modes cache and cluster: also write a page of HTML with plots, which needs nothing else.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Replay the first N requests only.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Print one JSON object and nothing else on standard output.
    #[arg(long)]
    pub json: bool,
}

/// How a trace is written, and cut into blocks.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct LayoutFlags {
    /// Format of the trace.
    #[arg(long, value_enum, default_value_t = Format::Mooncake)]
    pub format: Format,
    /// Tokens of a block of the trace [default: 512; of format bailian: 16].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_BLOCK_SIZE_TOKENS)))]
    block_size_tokens: Option<u32>,
}

impl LayoutFlags {
    pub(crate) fn block_size_tokens(&self) -> u32 {
        self.block_size_tokens.unwrap_or(self.format.block_size_tokens())
    }
}

/// A swap as a flag says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapFlag {
    after: Duration,
    slot: SlotKind,
    policy: String,
}

fn swap(text: &str) -> Result<SwapFlag> {
    let parsed = text.split_once(':').and_then(|(time, rest)| {
        let (slot, policy) = rest.split_once('=').filter(|(_, policy)| !policy.is_empty())?;
        let after = humantime::parse_duration(time).ok()?;
        Some(SwapFlag { after, slot: slot.parse().ok()?, policy: policy.to_owned() })
    });
    let swap = parsed.with_context(|| format!("`{text}` is no swap, such as 10m:scheduler=random"))?;
    if swap.slot == SlotKind::Evictor {
        bail!("evictors are not swapped here, because each pool has its own; compare them with --mode cache");
    }
    Ok(swap)
}

/// What runs a built-in policy.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// The component, in the sandbox it has in production.
    Wasm,
    /// The same source, compiled into this binary.
    Native,
}

/// What a trace runs through.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Block slots and an evictor; no bytes.
    Cache,
    /// A cluster in virtual time: requests are scheduled, computed and decoded by instances that are a cost model.
    Cluster,
    /// A running host: blocks are stored and read, and every byte read is compared.
    Store,
}

/// The environment counts only in mode store: mode cache refuses a host that it would ignore.
fn named<A>(flag: &Option<A>, variable: &str, missing: &'static str) -> Result<A>
where
    A: Clone + FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    if let Some(addr) = flag {
        return Ok(addr.clone());
    }
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty()).context(missing)?;
    text.parse().with_context(|| format!("{variable} `{text}`"))
}

/// The clock of a running host, which it lets operators move.
struct HostClock {
    runtime: Runtime,
    control: Control,
    /// What it showed when the replay began.
    began_ms: u64,
}

impl HostClock {
    fn open(addr: &ControlAddr, token: &str) -> Result<Self> {
        // With a thread of its own: the host asks now and then whether anybody is there.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let mut control = runtime.block_on(Control::connect(addr, token))?;
        let asked = proto::MoveClockRequest { to_ms: 0 };
        let answer = runtime.block_on(control.node.move_clock(asked)).map_err(ControlError::from)?;
        Ok(Self { runtime, control, began_ms: answer.into_inner().now_ms })
    }

    fn move_to(&mut self, after_first: Duration) -> Result<(), ControlError> {
        let to_ms = self.began_ms + after_first.as_millis() as u64;
        self.runtime.block_on(self.control.node.move_clock(proto::MoveClockRequest { to_ms }))?;
        Ok(())
    }
}

impl ReplayArgs {
    /// # Errors
    /// The trace cannot be read; mode cache: the evictor is unknown or failed, or the capacity is out of range; mode
    /// store: the host cannot be reached, went away, or returned bytes other than those it was given.
    pub fn run(self) -> Result<()> {
        self.check_page()?;
        match self.mode {
            Mode::Cache => {
                let table = self.cache()?;
                self.print_table(&table)?;
                self.write_page(|| table.page())?;
                check_evictors(&table)
            }
            Mode::Cluster => {
                let report = self.clustered()?;
                self.print(&report, cluster_table)?;
                self.write_page(|| report.page())?;
                check_policies(&report)?;
                self.check_swaps(&report)
            }
            Mode::Store => {
                let report = self.store()?;
                self.print(&report, store_table)?;
                check_bytes(&report)
            }
        }
    }

    fn print<R: Serialize>(&self, report: &R, table: impl Fn(&R) -> String) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string(report)?);
        } else {
            print!("{}", table(report));
        }
        Ok(())
    }

    /// Before the work, not behind it.
    fn check_page(&self) -> Result<()> {
        let folder = self.report.as_deref().and_then(Path::parent).filter(|dir| !dir.as_os_str().is_empty());
        if let Some(missing) = folder.filter(|folder| !folder.is_dir()) {
            bail!("--report: there is no folder {}; make it first", missing.display());
        }
        Ok(())
    }

    fn write_page(&self, page: impl Fn() -> Page) -> Result<()> {
        let Some(path) = &self.report else { return Ok(()) };
        page().write(path).with_context(|| format!("cannot write {}", path.display()))
    }

    fn store(&self) -> Result<store::Report> {
        self.no_cluster("store")?;
        if self.report.is_some() {
            bail!("mode store has no page; leave out --report");
        }
        if self.cache.any() || !self.evictors.is_empty() {
            bail!(
                "mode store: the host has its own capacity and evictor; leave out --evictor, {}",
                CacheFlags::NAMES
            );
        }
        let host = self.host()?;
        let block_bytes = u32::try_from(self.block_bytes.0).unwrap_or(u32::MAX);
        store::check_block_bytes(block_bytes)?;
        let (trace, progress) = self.open()?;
        let token = std::env::var("KVASIR_TOKEN").unwrap_or_default();
        let options = Options { namespace: "replay".into(), token, ..Options::default() };
        let mut clock =
            self.trace_time.then(|| HostClock::open(&self.control()?, &options.token)).transpose()?;
        let mut session = Session::new(Client::connect(&host, options)?, block_bytes)?;
        let mut move_to = clock.as_mut().map(|clock| |after_first| clock.move_to(after_first));
        let pace = match (&mut move_to, self.cluster.speed) {
            (Some(move_to), _) => Pace::HostClock(move_to),
            (None, Some(speed)) => Pace::Speed(speed),
            (None, None) => Pace::Unpaced,
        };
        let mut report = store::replay(&mut session, trace, self.layout.block_size_tokens(), pace)?;
        progress.finish_and_clear();
        self.check_requests(report.requests)?;
        report.trace = self.trace.display().to_string();
        report.host = host.to_string();
        Ok(report)
    }

    fn host(&self) -> Result<Endpoint> {
        named(&self.host, "KVASIR_HOST", "mode store: name the running host, --host unix:PATH or tcp:ADDR")
    }

    fn control(&self) -> Result<ControlAddr> {
        named(
            &self.grpc,
            "KVASIR_GRPC",
            "--trace-time: name the host's control, --grpc unix:PATH or HOST:PORT",
        )
    }

    fn open(&self) -> Result<(impl Iterator<Item = Result<Request, trace::Error>>, ProgressBar)> {
        let (trace, progress) = open_trace(&self.trace, &self.layout)?;
        Ok((trace.take(self.limit.unwrap_or(usize::MAX)), progress))
    }

    fn check_requests(&self, requests: u64) -> Result<()> {
        if requests == 0 && self.limit != Some(0) {
            bail!("trace {} holds no requests", self.trace.display());
        }
        Ok(())
    }

    fn no_cluster(&self, mode: &str) -> Result<()> {
        let policies = [&self.scheduler, &self.admitter, &self.balancer].iter().any(|name| name.is_some());
        if policies || !self.swaps.is_empty() || self.cluster.any_but_speed() {
            bail!(
                "mode {mode} has no cluster; leave out --scheduler, --admitter, --balancer, --swap and the flags of instances, or \
                 give --mode cluster"
            );
        }
        Ok(())
    }

    fn clustered(&self) -> Result<cluster::Report> {
        if self.host.is_some() || self.trace_time || self.cache.any() {
            bail!(
                "mode cluster needs no host and has --pool-blocks; leave out --host, --trace-time, {}",
                CacheFlags::NAMES
            );
        }
        let setup = self.cluster.setup(self.layout.block_size_tokens())?;
        let mut policies = Policies::open(&setup, &self.choices()?)?;
        let swaps = self.planned_swaps(&setup)?;
        let names = Names::of(&policies);
        let mut cluster = Cluster::new(&setup, &mut policies)?;
        swaps.into_iter().for_each(|swap| cluster.plan_swap(swap));
        let (trace, progress) = self.open()?;
        let start = Instant::now();
        for request in trace {
            cluster.offer(&request?)?;
            cluster.take_ended();
        }
        cluster.finish()?;
        progress.finish_and_clear();
        self.check_requests(cluster.tally().offered)?;
        if !self.json {
            // Not for standard output, which is the same for the same trace, policies and seed.
            eprintln!("{}", simulated(cluster.events(), start.elapsed()));
        }
        Ok(cluster::Report::new(&self.trace.display().to_string(), &names, &cluster))
    }

    /// # Errors
    /// The replay ended before one of the swaps.
    fn check_swaps(&self, report: &cluster::Report) -> Result<()> {
        let left = self.swaps.len() - report.swaps.len();
        if left > 0 {
            bail!(
                "all requests had ended after {:.3} s, before {left} of the swaps; give --swap earlier",
                report.span_s
            );
        }
        Ok(())
    }

    /// Each is tried in a cluster of its own first, so that one that does not start is known before the replay.
    fn planned_swaps(&self, setup: &Setup) -> Result<Vec<Swap>> {
        let planned = self.swaps.iter().map(|SwapFlag { after, slot, policy }| {
            let choice = self.choice(policy, *slot, Vec::new())?;
            Policies::open(setup, &Choices::default().with(*slot, choice.clone()))?;
            let at_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
            Ok(Swap { at_us, slot: *slot, choice })
        });
        planned.collect()
    }

    fn choice(&self, name: &str, slot: SlotKind, settings: Vec<(String, String)>) -> Result<Choice> {
        let contender = Contender::find(name, Some(slot), settings)?;
        let native = self.engine == EngineKind::Native;
        Ok(if native { contender.native().choice } else { contender.choice })
    }

    fn choices(&self) -> Result<Choices> {
        let evictor = match self.evictors.as_slice() {
            [] if !self.evictor_settings.is_empty() => {
                bail!("--evictor-setting has no evictor; give --evictor, too")
            }
            [] => None,
            [one] if one == OPTIMUM => {
                bail!("`{OPTIMUM}` knows the future of one cache; it is for mode cache")
            }
            [one] => Some(one.clone()),
            several => bail!("mode cluster takes one --evictor, not {}; give --mode cache", several.len()),
        };
        let named = [
            (SlotKind::Scheduler, &self.scheduler, &self.scheduler_settings),
            (SlotKind::Evictor, &evictor, &self.evictor_settings),
            (SlotKind::Admitter, &self.admitter, &self.admitter_settings),
            (SlotKind::Balancer, &self.balancer, &self.balancer_settings),
        ];
        let mut choices = Choices::default();
        for (slot, name, settings) in named {
            let Some(name) = name else { continue };
            choices = choices.with(slot, self.choice(name, slot, settings.clone())?);
        }
        Ok(choices)
    }
}

/// "unknown evictor `lur`; did you mean `lru`? built in: …"
pub(crate) fn unknown_name(kind: &str, name: &str, known: impl Iterator<Item = &'static str>) -> String {
    let known: Vec<_> = known.collect();
    let nearest = known.iter().min_by_key(|known| strsim::damerau_levenshtein(known, name));
    let hint = nearest
        .filter(|near| strsim::damerau_levenshtein(near, name) <= 1 + near.len() / 3)
        .map_or(String::new(), |near| format!("did you mean `{near}`? "));
    format!("unknown {kind} `{name}`; {hint}built in: {}", known.join(", "))
}

/// Opens a trace; the bar follows the bytes read and shows only on a terminal.
pub(crate) fn open_trace(path: &Path, layout: &LayoutFlags) -> Result<(Reader, ProgressBar)> {
    let file = File::open(path).with_context(|| format!("cannot open trace {}", path.display()))?;
    let length = file.metadata().map(|m| m.len()).unwrap_or(0);
    let progress =
        if std::io::stderr().is_terminal() { ProgressBar::new(length) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % of the trace, {elapsed} ({eta} left)");
    progress.set_style(style.expect("the template is constant"));
    Ok((
        Reader::new(path, progress.wrap_read(file))?
            .of_format(layout.format)
            .of_blocks(layout.block_size_tokens()),
        progress,
    ))
}

fn store_table(report: &store::Report) -> String {
    let moved = &report.moved;
    let size = Size(report.block_bytes.into());
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let rows = [
        ("trace", report.trace.clone()),
        ("host", report.host.clone()),
        ("requests", format!("{} in {:.1} s", report.requests, report.seconds)),
        ("block references", format!("{} of {size}", moved.block_references)),
        ("prefix hits", format!("{} ({:.2} %)", moved.prefix_hits, report.hit_rate_percent)),
        ("put", format!("{} blocks, {}", moved.blocks_put, mib(moved.bytes_put))),
        ("read", format!("{}, {} verified", mib(moved.bytes_read), mib(moved.bytes_verified))),
        ("checksum failures", moved.checksum_failures.to_string()),
        ("wrong bytes", moved.wrong_bytes.to_string()),
        ("retries", format!("{}, {} blocks found no room", moved.retries, moved.blocks_refused)),
    ];
    rows.iter().map(|(name, value)| format!("{name:18}{value}\n")).collect()
}

/// How fast a simulation was, and the most memory that this process had.
fn simulated(events: u64, took: Duration) -> String {
    let rate = events as f64 / took.as_secs_f64().max(1e-3);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    let memory = peak.map(|kib: u64| format!("; {} MiB of memory at most", kib >> 10)).unwrap_or_default();
    format!("simulated {events} events in {:.1} s, {rate:.0} a second{memory}", took.as_secs_f64())
}

fn cluster_table(report: &cluster::Report) -> String {
    let rows = std::iter::once(("trace", report.trace.clone())).chain(report.rows());
    rows.map(|(name, value)| format!("{name:18}{value}\n")).collect()
}

/// # Errors
/// A policy failed, so that the figures are not its own.
fn check_policies(report: &cluster::Report) -> Result<()> {
    let faults: Vec<_> = report.faults.iter().map(ToString::to_string).collect();
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("; ")) }
}

/// # Errors
/// A policy failed, so that its figures are mostly another's.
fn check_evictors(table: &Table) -> Result<()> {
    let faults = table.faults();
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("; ")) }
}

/// # Errors
/// Bytes came back that were not stored, or blocks did not match their checksums.
fn check_bytes(report: &store::Report) -> Result<()> {
    let store::RequestReport { wrong_bytes, checksum_failures, .. } = report.moved;
    if wrong_bytes > 0 {
        bail!("{} served {wrong_bytes} B that are not what was stored; distrust this host", report.host);
    }
    if checksum_failures > 0 {
        bail!(
            "{checksum_failures} blocks of {} did not match their checksums; they were dropped and not served",
            report.host
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::generate::{self, Generator, Plan, Workload};
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        replay: ReplayArgs,
    }

    fn parse(line: &str) -> ReplayArgs {
        Command::try_parse_from(std::iter::once("kvasir").chain(line.split(' '))).unwrap().replay
    }

    /// A trace of 300 requests, in a folder that goes with it.
    fn generated(workload: Workload) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("t.jsonl.gz");
        let plan = Plan { workload, requests: 300, rate_rps: 5.0, seed: 3 };
        generate::write(Generator::new(&plan).unwrap(), &trace, || ()).unwrap();
        (folder, trace)
    }

    #[test]
    fn speed_and_memory_of_a_simulation_are_told() {
        let told = simulated(3_000, Duration::from_millis(1_500));
        let mib = told.strip_prefix("simulated 3000 events in 1.5 s, 2000 a second; ").expect(&told);
        let mib = mib.strip_suffix(" MiB of memory at most").and_then(|mib| mib.parse::<u64>().ok());
        assert!(mib.is_some_and(|mib| mib > 1), "{told}");
    }

    #[test]
    fn json_has_the_published_keys() {
        let (_folder, trace) = generated(Workload::Chat);
        let args = parse(&format!("--trace {} --evictor lru --capacity-blocks 200", trace.display()));
        let table = args.cache().unwrap();
        let report = &table.rows[0];
        let json = serde_json::to_value(report).unwrap();
        let mut keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        let mut expected = [
            "mode",
            "trace",
            "evictor",
            "engine",
            "capacity_blocks",
            "requests",
            "block_references",
            "prefix_hits",
            "hit_rate_percent",
            "evictions",
            "evict_ns_mean",
            "evict_ns_p99",
        ];
        expected.sort_unstable();
        assert_eq!(keys, expected);
        assert_eq!((report.requests, report.evictor.as_str()), (300, "lru"));
        assert!(report.evictions > 0 && report.prefix_hits > 0, "{report:?}");
        assert!(report.text().contains("capacity          200 blocks"), "{}", report.text());
    }

    #[test]
    fn several_evictors_and_capacities_are_rows() {
        let (_folder, trace) = generated(Workload::Chat);
        let line = format!(
            "--trace {} --evictor lru,s3fifo --evictor optimum --capacity-blocks 100,200 --capacity-blocks 300 \
             --evictor-setting s3fifo:small=50 --warm-up 10% --by class,tenant --engine native",
            trace.display()
        );
        let table = parse(&line).cache().unwrap();
        let json = serde_json::to_value(&table).unwrap();
        let rows = json["rows"].as_array().unwrap();
        assert_eq!((&json["mode"], rows.len()), (&serde_json::json!("cache"), 9));
        for (row, n) in rows.iter().zip(0..) {
            assert_eq!(row["capacity_blocks"], 100 * (1 + n / 3));
            assert_eq!(row["evictor"], ["lru", "s3fifo", "optimum"][n as usize % 3]);
            assert_eq!((&row["requests"], &row["warm_up"]["requests"]), (&270.into(), &30.into()));
            assert!(row["by_class"]["1"]["prefix_hits"].is_u64() && row["by_tenant"]["0"]["requests"] == 270);
            assert!(row["gap_closed_percent"].is_f64(), "{row}");
        }
        let tiers = line
            .replace("--capacity-blocks 100,200 --capacity-blocks 300", "--tiers hbm=50,dram=200,nvme=500");
        let table = parse(&tiers).cache().unwrap();
        assert_eq!(table.rows.len(), 3);
        let json = serde_json::to_value(&table.rows[0]).unwrap();
        assert_eq!((&json["capacity_blocks"], &json["tiers"][2]["tier"]), (&750.into(), &"nvme".into()));
        assert!(table.rows[2].tiers.is_none(), "the optimum has all room as one");
        let (text, csv) = (table.text(), table.csv());
        assert!(text.contains("moved in") && csv.contains("s3fifo,native,750,dram,"), "{text}{csv}");
        for bad in ["hbm", "ram=3", "hbm=-1", "hbm=1 --capacity-blocks 3"] {
            let line = format!("kvasir --trace t --tiers {bad}");
            assert!(Command::try_parse_from(line.split(' ')).is_err(), "{bad}");
        }
        let html = table.page().html();
        for expected in ["Hit rate over time, 750 blocks", "s3fifo", "<polyline"] {
            assert!(html.contains(expected), "{html}");
        }
        for more in ["", " --json", " --csv"] {
            parse(&format!("{line}{more}")).run().unwrap();
        }
        assert!(Command::try_parse_from(format!("kvasir {line} --json --csv").split(' ')).is_err());
    }

    #[test]
    fn mode_cluster_has_the_published_keys_and_is_the_same_again() {
        let (_folder, trace) = generated(Workload::Agent);
        let line = format!(
            "--trace {} --mode cluster --prefill 2 --decode 1 --both 1 --scheduler random --evictor lru --speed 2",
            trace.display()
        );
        let report = parse(&line).clustered().unwrap();
        assert_eq!(report, parse(&line).clustered().unwrap());
        assert_eq!(
            (report.requests, report.scheduler.as_str(), report.evictor.as_str()),
            (300, "random", "lru")
        );
        let json = serde_json::to_value(&report).unwrap();
        for key in [
            "scheduler",
            "ttft_s",
            "tbt_s",
            "hit_rate_percent",
            "rejected",
            "turned_away",
            "goodput_rps",
            "slo_attainment_percent",
        ] {
            assert!(!json[key].is_null(), "{key}");
        }
        for key in ["mean", "p50", "p90", "p99"] {
            assert!(json["ttft_s"][key].as_f64().is_some_and(|seconds| seconds > 0.0), "{key}");
        }
        let loads = json["load"].as_array().unwrap().iter();
        let instances = loads.map(|of| of["busy_percent_by_instance"].as_array().map_or(0, Vec::len));
        assert_eq!(instances.collect::<Vec<_>>(), [2, 1, 1]);
        assert!(cluster_table(&report).contains("hit rate"), "{}", cluster_table(&report));
    }

    #[test]
    fn a_faster_machine_and_a_stricter_admitter_show() {
        let (_folder, trace) = generated(Workload::Agent);
        let report = |flags: &str| {
            let line = format!("--trace {} --mode cluster --engine native {flags}", trace.display());
            parse(&line).clustered().unwrap()
        };
        let (slow, fast) = (
            report("--model llama3-70b --hardware a800 --ttft-slo none"),
            report("--model llama3-70b --hardware h800 --ttft-slo none"),
        );
        assert!(
            fast.ttft_s.mean < slow.ttft_s.mean && fast.tbt_s.mean < slow.tbt_s.mean,
            "{fast:?} {slow:?}"
        );
        assert!(cluster_table(&slow).contains("4 prefill, 4 decode: llama3-70b on 8 × a800"));
        let blocks = slow.blocks_fetched + slow.blocks_handed_over;
        assert!((slow.gb_moved - blocks as f64 * f64::from(160 << 20) / 1e9).abs() < 1e-3, "{slow:?}");
        let copies: Vec<_> = slow.replicas.iter().map(|of| of.mean).collect();
        assert!(copies.iter().all(|mean| (0.0..=4.0).contains(mean)) && copies[0] > 1.0, "{copies:?}");
        let strict = report("--admitter slo --admitter-setting slack=0.01 --ttft-slo 1s");
        assert!(strict.rejected > report("--ttft-slo 1s").rejected, "{strict:?}");
        let none = cluster_table(&report("--ttft-slo 1ms"));
        let times = ["TTFT", "TBT", "a request"].map(|row| none.contains(row));
        assert_eq!((times, none.contains("rejected)")), ([false; 3], true), "{none}");
    }

    #[test]
    fn a_page_shows_a_cluster_and_what_took_over() {
        let (folder, trace) = generated(Workload::Agent);
        let page = folder.path().join("p.html");
        let line =
            format!("--trace {} --mode cluster --engine native --report {}", trace.display(), page.display());
        let line = format!("{line} --swap 20s:scheduler=random --swap 30s:admitter=slo");
        let report = parse(&line).clustered().unwrap();
        let swaps: Vec<_> =
            report.swaps.iter().map(|swap| (swap.at_s, swap.slot, swap.to.as_str())).collect();
        assert_eq!(swaps, [(20.0, "scheduler", "random"), (30.0, "admitter", "slo")]);
        assert_eq!(report, parse(&line).clustered().unwrap());
        parse(&line).run().unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        for expected in ["Time to the first token", "Load of each instance", "scheduler: random", "decode-3 "]
        {
            assert!(html.contains(expected), "{expected}: {html}");
        }
        std::fs::remove_file(&page).unwrap();
        let late = parse(&format!("{line} --swap 9h:balancer=static")).run().unwrap_err().to_string();
        assert!(late.contains("before 1 of the swaps"), "{late}");
        assert!(page.exists(), "what was measured is told all the same");
        for bad in ["20s:scheduler", "20s:scheduler=", "soon:scheduler=random", "1s:x=y", "1s:evictor=lru"] {
            let line = format!("kvasir --trace t --mode cluster --swap {bad}");
            assert!(Command::try_parse_from(line.split(' ')).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_policy_that_fails_fails_the_replay() {
        let folder = tempfile::tempdir().unwrap();
        let (trace, policy) = (folder.path().join("t.jsonl.gz"), folder.path().join("bad.wasm"));
        let plan = Plan { workload: Workload::Chat, requests: 300, rate_rps: 5.0, seed: 3 };
        generate::write(Generator::new(&plan).unwrap(), &trace, || ()).unwrap();
        std::fs::write(&policy, kvasir_tests::guest("evictor")).unwrap();
        for (mode, fault) in [("trap", "trapped"), ("loop", "deadline")] {
            let line = format!(
                "--trace {} --evictor {} --capacity-blocks 200 --evictor-setting mode={mode} --evictor-setting after=9",
                trace.display(),
                policy.display()
            );
            let error = parse(&line).run().unwrap_err().to_string();
            assert!(error.contains("failed after ") && error.contains(fault), "{error}");
        }
    }

    #[test]
    fn what_cannot_run_says_why() {
        let rows = [
            (
                "--trace /none --evictor lur --capacity-blocks 5",
                "did you mean `lru`? built in: workload-aware",
            ),
            ("--trace /none --evictor zzzzzzzz --capacity-blocks 5", "`zzzzzzzz`; built in: "),
            ("--trace /none --evictor lru --capacity-blocks 0", "capacity of 0 blocks"),
            ("--trace /none --evictor lru --capacity-blocks 5", "cannot open trace /none"),
            ("--trace /dev/null --evictor lru --capacity-blocks 5", "/dev/null holds no requests"),
            ("--trace /none --capacity-blocks 5 --evictor-setting forget=0", "outside 1 to"),
            ("--trace /none --evictor lru", "give --capacity-blocks N"),
            ("--trace /none --evictor lru,optimun --capacity-blocks 5", "did you mean `optimum`?"),
            ("--trace /none --evictor lru,fifo --capacity-blocks 5,0", "capacity of 0 blocks"),
            (
                "--trace /none --evictor lru,fifo --capacity-blocks 5 --evictor-setting a=1",
                "whose setting `a` is",
            ),
            ("--trace /none --evictor optimum --capacity-blocks 5 --evictor-setting a=1", "has no settings"),
            ("--trace /none --mode cluster --evictor optimum", "it is for mode cache"),
            ("--trace /none --mode cluster --evictor lru,fifo", "takes one --evictor, not 2"),
            ("--trace /none --tiers dram=5,hbm=2", "fastest first: hbm, dram"),
            ("--trace /none --tiers hbm=0", "tiers: capacity of 0 blocks"),
            ("--trace /none --mode cluster --swap 1s:scheduler=randum", "did you mean `random`?"),
            ("--trace /none --mode cluster --evictor-setting depth=1", "give --evictor, too"),
            ("--trace /none --mode cluster --admitter slo --admitter-setting slak=1", "slak"),
            ("--trace /none --mode cluster --model gpt --hardware a800", "no model `gpt`: built in are"),
            ("--trace /none --capacity-blocks 5 --model qwen2-7b --hardware a40", "has no cluster"),
            ("--trace /none --capacity-blocks 5 --swap 1s:scheduler=random", "has no cluster"),
            ("--trace /none --mode store --host tcp:127.0.0.1:1 --report p.html", "has no page"),
            ("--trace /none --mode cluster --csv", "leave out --host, --trace-time, --capacity-blocks"),
            ("--trace /none --mode cluster --trace-time", "leave out --host, --trace-time"),
            ("--trace /none --capacity-blocks 5 --host 127.0.0.1:1", "leave out --host"),
            ("--trace /none --capacity-blocks 5 --speed 2", "leave out --host, --speed"),
            ("--trace /none --capacity-blocks 5 --trace-time", "--trace-time, or give --mode store"),
            ("--trace /none --mode store --host tcp:127.0.0.1:1 --capacity-blocks 5", "its own capacity"),
            ("--trace /none --mode store --host tcp:127.0.0.1:1 --block-bytes 0", "blocks of 0 B"),
            ("--trace /none --mode store --host tcp:127.0.0.1:1", "cannot open trace /none"),
            ("--trace /dev/null --mode store --host unix:/none", "no Kvasir host at unix:/none"),
            ("--trace /none --evictor lru --capacity-blocks 5 --evictor-setting a=1", "unknown setting `a`"),
            (
                "--trace /none --capacity-blocks 5 --prefill 2",
                "mode cache has no cluster; leave out --scheduler",
            ),
            ("--trace /none --mode store --host unix:/none --balancer static", "mode store has no cluster"),
            ("--trace /none --mode cluster --capacity-blocks 5", "has --pool-blocks"),
            ("--trace /none --mode cluster --prefill 0", "0 prefill, 4 decode"),
            ("--trace /none --mode cluster --speed 1e9", "speed 1000000000 is outside"),
            ("--trace /none --mode cluster --scheduler moncake", "did you mean `mooncake`?"),
            ("--trace /none --mode cluster --scheduler lru", "`lru` is for the slot evictor, not scheduler"),
            ("--trace /none --mode cluster", "cannot open trace /none"),
            ("--trace /dev/null --mode cluster", "/dev/null holds no requests"),
        ];
        for (line, expected) in rows {
            let error = format!("{:#}", parse(line).run().unwrap_err());
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(super::super::setting("novalue").is_err());
    }
}
