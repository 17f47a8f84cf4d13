//! Writes numbers in the Prometheus text format, version 0.0.4.
//!
//! A family is its name, its help and its type, given together with its rows, so that none lacks them. Counters and gauges are
//! the exporter's; histograms are written here, since the exporter makes its own from single samples, and what is
//! counted on a path of two microseconds comes as buckets.

use kvasir_dataplane::metrics::Histogram;
use kvasir_dataplane::times::TimesTaken;
use metrics::{Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use num_traits::AsPrimitive;
use std::collections::HashMap;
use std::fmt::{Display, Write};

/// A page of metrics in the making.
pub(super) struct Page {
    /// Label of every row.
    node: String,
    /// Counters and gauges.
    recorder: PrometheusRecorder,
    /// Text of each histogram, in the order of their first rows.
    histograms: Vec<String>,
    places: HashMap<&'static str, usize>,
}

/// Takes the rows of one counter or gauge.
pub(super) struct Rows<'a> {
    recorder: &'a PrometheusRecorder,
    kind: Kind,
    name: &'static str,
}

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
}

/// Takes the rows of one histogram.
pub(super) struct Buckets<'a> {
    name: &'static str,
    node: &'a str,
    text: &'a mut String,
}

impl Page {
    pub(super) fn new(node: &str) -> Self {
        let recorder = PrometheusBuilder::new().add_global_label("node", node).build_recorder();
        let (histograms, places) = Default::default();
        Self { node: node.to_owned(), recorder, histograms, places }
    }

    /// A number that only grows while the host runs; the name ends in `_total`.
    pub(super) fn counter(&mut self, name: &'static str, help: &'static str) -> Rows<'_> {
        self.recorder.describe_counter(KeyName::from_const_str(name), None, help.into());
        Rows { recorder: &self.recorder, kind: Kind::Counter, name }
    }

    /// A number as it is now.
    pub(super) fn gauge(&mut self, name: &'static str, help: &'static str) -> Rows<'_> {
        self.recorder.describe_gauge(KeyName::from_const_str(name), None, help.into());
        Rows { recorder: &self.recorder, kind: Kind::Gauge, name }
    }

    /// How long something took, and how often; the name ends in `_seconds`.
    pub(super) fn histogram(&mut self, name: &'static str, help: &'static str) -> Buckets<'_> {
        let Self { node, histograms, places, .. } = self;
        let place = *places.entry(name).or_insert_with(|| {
            histograms.push(format!("# HELP {name} {help}\n# TYPE {name} histogram\n"));
            histograms.len() - 1
        });
        Buckets { name, node, text: &mut histograms[place] }
    }

    pub(super) fn text(self) -> String {
        self.recorder.handle().render() + &self.histograms.concat()
    }
}

impl Rows<'_> {
    /// The one row of a family without labels.
    pub(super) fn is(self, value: impl AsPrimitive<f64>) {
        self.with(&[], value);
    }

    /// The row where `label` has the value `of`.
    pub(super) fn by(self, label: &'static str, of: &str, value: impl AsPrimitive<f64>) -> Self {
        self.with(&[(label, of)], value)
    }

    /// Counters are whole; beyond 2^53 they lose their last digits.
    pub(super) fn with(self, labels: &[(&'static str, &str)], value: impl AsPrimitive<f64>) -> Self {
        const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);
        let labels: Vec<Label> = labels.iter().map(|&(label, of)| Label::new(label, of.to_owned())).collect();
        let key = Key::from_parts(self.name, labels);
        match self.kind {
            Kind::Counter => self.recorder.register_counter(&key, &METADATA).absolute(value.as_() as u64),
            Kind::Gauge => self.recorder.register_gauge(&key, &METADATA).set(value.as_()),
        }
        self
    }
}

impl Buckets<'_> {
    /// The rows of one histogram of times.
    pub(super) fn times(self, labels: &[(&str, &str)], times: &TimesTaken) -> Self {
        let bounds = (0..times.buckets.len()).map(|i| TimesTaken::bound_ns(i).map(|ns| ns as f64 / 1e9));
        self.buckets(labels, bounds.zip(times.buckets), times.sum_ns as f64 / 1e9)
    }

    /// The rows of one histogram of milliseconds, whose bucket `i` ends at 2^i of them.
    pub(super) fn long_times(self, labels: &[(&str, &str)], times: &Histogram) -> Self {
        let last = times.buckets.len() - 1;
        let bounds = (0..=last).map(|i| (i < last).then(|| 2f64.powi(i as i32) / 1e3));
        self.buckets(labels, bounds.zip(times.buckets), times.sum_ms as f64 / 1e3)
    }

    /// Turns counts of each bucket alone into counts up to each bound. `None` is the bound of the last.
    fn buckets(
        mut self,
        labels: &[(&str, &str)],
        buckets: impl Iterator<Item = (Option<f64>, u64)>,
        sum: f64,
    ) -> Self {
        let mut below = 0;
        for (bound, count) in buckets {
            below += count;
            let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| bound.to_string());
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            self.row("_bucket", &labels, below);
        }
        self.row("_sum", labels, sum);
        self.row("_count", labels, below);
        self
    }

    fn row(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let Self { name, node, text } = self;
        let _ = write!(text, "{name}{suffix}{{node=\"{}\"", escaped(node));
        for (label, value) in labels {
            let _ = write!(text, ",{label}=\"{}\"", escaped(value));
        }
        let _ = writeln!(text, "}} {value}");
    }
}

/// Writes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rows_of_a_family_stand_together_under_its_help_and_type() {
        let mut page = Page::new("a");
        page.counter("x_total", "Things").by("of", "one", 1);
        page.gauge("y_ratio", "A \"share\"\nof").is(0.5);
        page.counter("x_total", "Things").by("of", "t\"w\\o", 2);
        let text = page.text();
        let (help, rows) = text.split_once("# TYPE x_total counter\n").unwrap();
        assert!(help.ends_with("# HELP x_total Things\n"), "{text}");
        let rows: Vec<_> = rows.lines().take(2).collect();
        for row in ["x_total{node=\"a\",of=\"one\"} 1", "x_total{node=\"a\",of=\"t\\\"w\\\\o\"} 2"] {
            assert!(rows.contains(&row), "{row}: {text}");
        }
        let gauge = "# HELP y_ratio A \"share\"\\nof\n# TYPE y_ratio gauge\ny_ratio{node=\"a\"} 0.5\n";
        assert!(text.contains(gauge), "{text}");
    }

    #[test]
    fn a_histogram_counts_up_to_each_bound() {
        let times = kvasir_dataplane::times::Times::default();
        [0, 2, 100_000_000].into_iter().for_each(|us| times.record(Duration::from_micros(us)));
        let mut page = Page::new("a");
        page.histogram("x_seconds", "Times").times(&[("of", "one")], &times.taken());
        let text = page.text();
        for row in [
            "x_seconds_bucket{node=\"a\",of=\"one\",le=\"0.000001024\"} 1\n",
            "x_seconds_bucket{node=\"a\",of=\"one\",le=\"0.000002048\"} 2\n",
            "x_seconds_bucket{node=\"a\",of=\"one\",le=\"17.179869184\"} 2\n",
            "x_seconds_bucket{node=\"a\",of=\"one\",le=\"+Inf\"} 3\n",
            "x_seconds_sum{node=\"a\",of=\"one\"} 100.000002\n",
            "x_seconds_count{node=\"a\",of=\"one\"} 3\n",
        ] {
            assert!(text.contains(row), "{row}{text}");
        }
    }
}
