//! What a trace contains, as a page to look at.

use super::{Report, Skew, Stats};
use crate::replay::page::Page;
use crate::replay::plot::{Line, Plot};

impl Stats {
    /// A page about the trace of that name, and what `report` makes of it.
    pub fn page(&self, trace: &str, report: &Report) -> Page {
        let mut page = Page::new(&format!("The trace {trace}"));
        page.table(
            &["", ""],
            &rows(report).map(|(name, value)| vec![name.into(), value]).collect::<Vec<_>>(),
        );
        page.plot(&over_time(report));
        page.plot(&self.lengths_plot());
        page.plot(&self.reuse_plot(report));
        page.plot(&self.classes_plot());
        page.paragraph(
            "Time from one use of a block to the next, by the class of the earlier use; of all classes, the three with most reuses.",
        );
        page.heading("Classes");
        let head = [
            "class",
            "requests",
            "reuses",
            "used again",
            "mean",
            "half within",
            "90 % within",
            "from exponential",
        ];
        page.table(&head, &class_rows(report));
        page.paragraph(
            "Used again: share of the uses that were followed by another. From exponential: the largest distance between the \
             distribution of these times and the exponential one of the same mean, which is what workload-aware fits.",
        );
        page
    }

    fn lengths_plot(&self) -> Plot {
        let line = |name: &str, points| Line { name: name.into(), points, dots: false };
        Plot {
            title: "Lengths".into(),
            x: "tokens",
            y: "share of the requests",
            logarithmic: true,
            lines: vec![
                line("input", self.input_tokens.cdf(1.0)),
                line("output", self.output_tokens.cdf(1.0)),
            ],
            ..Plot::default()
        }
    }

    fn reuse_plot(&self, report: &Report) -> Plot {
        let [measured, fitted] = self.uses.curves();
        let error = report.reuse.exponential_error;
        let line = |name: String, points| Line { name, points, dots: false };
        Plot {
            title: "Time until a block is used again".into(),
            x: "seconds",
            y: "share of the reuses",
            logarithmic: true,
            lines: vec![
                line("measured".into(), measured),
                line(format!("exponential, off by {error:.2} at most"), fitted),
            ],
            ..Plot::default()
        }
    }

    fn classes_plot(&self) -> Plot {
        let lines = self.uses.class_curves(3).into_iter();
        let lines = lines.map(|(class, points)| Line { name: format!("class {class}"), points, dots: false });
        Plot {
            title: "The same, by class".into(),
            x: "seconds",
            y: "share of the reuses",
            logarithmic: true,
            lines: lines.collect(),
            ..Plot::default()
        }
    }
}

fn over_time(report: &Report) -> Plot {
    let slices = report.slices.iter().filter(|slice| slice.block_references > 0);
    let points = slices.map(|slice| {
        let rate_percent = 100.0 * slice.prefix_hits as f64 / slice.block_references as f64;
        (slice.from_s + slice.seconds / 2.0, rate_percent)
    });
    Plot {
        title: "Hit rate with unlimited space, over time".into(),
        x: "seconds",
        y: "% of the blocks",
        lines: vec![Line { name: "prefix hits".into(), points: points.collect(), dots: false }],
        ..Plot::default()
    }
}

fn class_rows(report: &Report) -> Vec<Vec<String>> {
    let requests =
        |class: u16| report.classes.iter().find(|(of, _)| *of == class).map_or(0, |(_, requests)| *requests);
    let row = |of: &super::ClassReuse| {
        vec![
            of.class.to_string(),
            requests(of.class).to_string(),
            of.reuses.to_string(),
            format!("{:.1} %", 100.0 * of.reused_share),
            format!("{:.1} s", of.seconds.mean),
            format!("{:.1} s", of.seconds.p50),
            format!("{:.1} s", of.seconds.p90),
            format!("{:.2}", of.exponential_error),
        ]
    };
    report.reuse.classes.iter().map(row).collect()
}

fn spread_over(name: &'static str, skew: Option<Skew>) -> Option<(&'static str, String)> {
    let skew = skew?;
    let half = 100.0 * skew.share_for_half_of_requests;
    let most = 100.0 * skew.share_for_90_percent_of_requests;
    let hits = 100.0 * skew.share_for_90_percent_of_hits;
    let of = skew.of;
    Some((
        name,
        format!(
            "{of}; {half:.1} % send half of the requests, {most:.1} % send 90 %, {hits:.1} % have 90 % of the hits"
        ),
    ))
}

/// What is told in words: name and value.
pub(crate) fn rows(report: &Report) -> impl Iterator<Item = (&'static str, String)> {
    let (input, output, reuse) = (&report.input_tokens, &report.output_tokens, &report.reuse);
    let [seconds, life] = [&reuse.seconds, &reuse.life_seconds];
    let classes = report.classes.iter().map(|(class, requests)| format!("{class}: {requests}"));
    let turns = report.turns.map(|turns| {
        ("turns", format!("{:.1} mean, {:.0} at 90 %, {:.0} max", turns.mean, turns.p90, turns.max))
    });
    [
        ("requests", format!("{} in {:.0} s ({:.2} /s)", report.requests, report.span_s, report.rate_rps)),
        (
            "input",
            format!(
                "{:.0} tokens mean, {:.0} p50, {:.0} p90, {:.0} p99, {} max",
                report.input_tokens_mean, input.p50, input.p90, input.p99, report.input_tokens_max
            ),
        ),
        (
            "output",
            format!(
                "{:.0} tokens mean, {:.0} p50, {:.0} p90, {:.0} p99",
                report.output_tokens_mean, output.p50, output.p90, output.p99
            ),
        ),
        ("blocks", format!("{} references, {} distinct", report.block_references, report.distinct_blocks)),
        ("best hit rate", format!("{:.2} % with unlimited space", report.best_hit_rate_percent)),
        (
            "ideal capacity",
            format!("{} blocks: as many hits, for who knows the future", report.reuse.ideal_capacity_blocks),
        ),
        (
            "later turns",
            format!(
                "{:.1} % of the requests, {:.1} % of the hits",
                100.0 * report.later_turn_share,
                100.0 * report.later_turn_hit_share
            ),
        ),
        (
            "reuse",
            format!(
                "{:.1} % of the blocks, {:.1} uses mean, {:.0} max",
                100.0 * reuse.blocks_reused_share,
                reuse.uses.mean,
                reuse.uses.max
            ),
        ),
        (
            "reused after",
            format!(
                "{:.1} s mean, {:.1} p50, {:.1} p90, {:.1} p99; {:.2} from exponential",
                seconds.mean, seconds.p50, seconds.p90, seconds.p99, reuse.exponential_error
            ),
        ),
        (
            "life",
            format!(
                "{:.1} s mean, {:.1} p50, {:.1} p90, from first to last use",
                life.mean, life.p50, life.p90
            ),
        ),
        ("classes", classes.collect::<Vec<_>>().join(", ")),
    ]
    .into_iter()
    .chain(turns)
    .chain(spread_over("tenants", report.tenants))
    .chain(spread_over("conversations", report.conversations))
}
