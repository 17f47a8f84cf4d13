//! A comparison in words and pictures.

use super::super::cluster::Report;
use super::super::page::Page;
use super::super::plot::{Line, Plot};
use super::evictors::HitDifference;
use super::{CacheSide, Capacity, Chose, Comparison, Decisions, Diff, Difference, Evictors, Requests, Side};
use crate::calendar::moment;
use crate::text::printable;
use comfy_table::{Table, presets};

/// Longest answer or name in a table: a recording may say anything, and victims are many.
const LINE_BYTES: usize = 120;

impl Comparison {
    /// For a terminal.
    pub fn text(&self) -> String {
        match self {
            Self::Evictors(evictors) => evictors.text(),
            Self::Requests(requests) => requests.text(),
            Self::Decisions(decisions) => decisions.text(),
        }
    }

    /// The same with plots.
    pub fn page(&self) -> Page {
        let (slot, trace, candidate, baseline) = match self {
            Self::Evictors(e) => (e.slot, &e.trace, &e.candidate, &e.baseline),
            Self::Requests(r) => (r.slot, &r.trace, r.name(&r.candidate), r.name(&r.baseline)),
            Self::Decisions(d) => (d.slot, &d.recording, &d.candidate.name, &d.baseline.name),
        };
        let mut page = Page::new(&format!("{slot} {candidate} against {baseline}"));
        let kind = if matches!(self, Self::Decisions(_)) { "recorded decisions" } else { "trace" };
        page.paragraph(&format!("Over the {kind} {trace}."));
        for (name, faults) in [(candidate, self.candidate_faults()), (baseline, self.baseline_faults())] {
            faults.iter().for_each(|fault| page.warning(&format!("{name} failed: {fault}")));
        }
        match self {
            Self::Evictors(evictors) => evictors.draw(&mut page),
            Self::Requests(requests) => requests.draw(&mut page),
            Self::Decisions(decisions) => decisions.draw(&mut page),
        }
        page
    }
}

fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(head);
    rows.iter().for_each(|row| {
        table.add_row(row);
    });
    let lines = table.to_string();
    lines.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

const EVICTOR_HEAD: [&str; 7] =
    ["blocks", "candidate", "baseline", "lru", "above baseline", "above lru", "requests that differ"];

impl Evictors {
    fn text(&self) -> String {
        let Self { trace, candidate, baseline, requests, block_references, .. } = self;
        let mut text = format!(
            "trace      {trace}: {requests} requests, {block_references} block references\ncandidate  {candidate}\nbaseline   \
             {baseline}\n\nhit rate, per cent, by the size of the cache:\n"
        );
        text += &table(&EVICTOR_HEAD, &self.rows());
        let told = self.capacities.iter().filter_map(|c| Some((c.capacity_blocks, c.first?, &c.costliest)));
        for (blocks, first, costliest) in told {
            text += &format!("\n{blocks} blocks: first, and where the candidate lost most:\n");
            let rows: Vec<_> = std::iter::once(&first).chain(costliest).map(hit_row).collect();
            text += &table(&HIT_HEAD, &rows);
        }
        text
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |c: &Capacity| {
            let rate = |side: &CacheSide| format!("{:.2}", side.hit_rate_percent);
            let above = c.candidate.hit_rate_percent - c.baseline.hit_rate_percent;
            vec![
                c.capacity_blocks.to_string(),
                rate(&c.candidate),
                rate(&c.baseline),
                rate(&c.lru),
                format!("{above:+.2}"),
                format!("{:+.2}", c.candidate.above_lru),
                format!("{} (+{} −{} blocks)", c.differ, c.blocks_gained, c.blocks_lost),
            ]
        };
        self.capacities.iter().map(row).collect()
    }

    fn draw(&self, page: &mut Page) {
        page.heading("Hit rate, per cent");
        page.table(&EVICTOR_HEAD, &self.rows());
        let names = [self.candidate.clone(), self.baseline.clone(), "lru".to_owned()];
        let sides = |c: &Capacity| [c.candidate.clone(), c.baseline.clone(), c.lru.clone()];
        let by_size = |side: usize| {
            self.capacities
                .iter()
                .map(|c| (c.capacity_blocks.into(), sides(c)[side].hit_rate_percent))
                .collect()
        };
        let line = |name: &String, points, dots| Line { name: name.clone(), points, dots };
        page.plot(&Plot {
            title: "Hit rate by the size of the cache".into(),
            x: "blocks",
            y: "per cent",
            lines: names.iter().enumerate().map(|(n, name)| line(name, by_size(n), true)).collect(),
            ..Plot::default()
        });
        for capacity in &self.capacities {
            let curves = sides(capacity).map(|side| side.hits.curve());
            page.plot(&Plot {
                title: format!("Hit rate over time, {} blocks", capacity.capacity_blocks),
                x: "seconds",
                y: "per cent",
                lines: names.iter().zip(curves).map(|(name, curve)| line(name, curve, false)).collect(),
                ..Plot::default()
            });
            if let Some(first) = &capacity.first {
                page.paragraph("The first request that differs, and where the candidate lost most:");
                let rows: Vec<_> = std::iter::once(first).chain(&capacity.costliest).map(hit_row).collect();
                page.table(&HIT_HEAD, &rows);
            }
        }
    }
}

const HIT_HEAD: [&str; 5] = ["request", "at", "blocks", "candidate found", "baseline found"];

fn hit_row(d: &HitDifference) -> Vec<String> {
    let at = format!("{:.3} s", d.time_ms as f64 / 1e3);
    let numbers = [d.blocks, d.candidate_hits, d.baseline_hits].map(|n| n.to_string());
    [d.request.to_string(), at].into_iter().chain(numbers).collect()
}

impl Requests {
    /// Name of the policy in which the two sides differ.
    fn name<'r>(&self, report: &'r Report) -> &'r String {
        match self.slot {
            "admitter" => &report.admitter,
            "balancer" => &report.balancer,
            "evictor" => &report.evictor,
            _ => &report.scheduler,
        }
    }

    fn text(&self) -> String {
        let mut text = format!("trace {}\n\n", self.trace);
        text += &table(&["", "candidate", "baseline"], &self.rows());
        text += &format!("\n{}\n", summary(&self.diff));
        let rows = differences(&self.diff);
        if !rows.is_empty() {
            text += &format!("the first, and where the candidate lost most:\n{}", table(&DIFF_HEAD, &rows));
        }
        text
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let (candidate, baseline) = (self.candidate.rows(), self.baseline.rows());
        let beside = candidate.iter().zip(&baseline).take_while(|(a, b)| a.0 == b.0);
        let mut rows: Vec<_> = beside.map(|(a, b)| vec![a.0.to_owned(), a.1.clone(), b.1.clone()]).collect();
        let common = rows.len();
        rows.extend(
            candidate.into_iter().skip(common).map(|(name, value)| vec![name.into(), value, "".into()]),
        );
        rows.extend(
            baseline.into_iter().skip(common).map(|(name, value)| vec![name.into(), "".into(), value]),
        );
        rows
    }

    fn draw(&self, page: &mut Page) {
        page.table(&["", "candidate", "baseline"], &self.rows());
        let names = [&self.candidate, &self.baseline].map(|report| self.name(report).clone());
        let named = ["candidate", "baseline"];
        let lines = |points: [Vec<(f64, f64)>; 2], dots: bool| -> Vec<Line> {
            let named = named.iter().zip(&names).zip(points);
            named
                .map(|((side, name), points)| Line { name: format!("{side}: {name}"), points, dots })
                .collect()
        };
        let curves = [&self.candidate.curves, &self.baseline.curves];
        page.plot(&Plot {
            title: "Time to the first token".into(),
            x: "seconds",
            y: "share of requests within",
            logarithmic: true,
            lines: lines(curves.map(|side| side.ttft.curve()), false),
            ..Plot::default()
        });
        page.plot(&Plot {
            title: "Hit rate over time".into(),
            x: "seconds",
            y: "per cent",
            lines: lines(curves.map(|side| side.hits.curve()), false),
            ..Plot::default()
        });
        for (n, role) in self.candidate.load.iter().enumerate() {
            let load = [&self.candidate, &self.baseline].map(|report| {
                let instances = report.load.get(n).map_or(&[][..], |load| &load.instances);
                (1..).zip(instances).map(|(rank, percent): (u32, _)| (f64::from(rank), *percent)).collect()
            });
            page.plot(&Plot {
                title: format!("Load of each instance: {}", role.role),
                x: "instances, busiest first",
                y: "per cent of the time",
                lines: lines(load, true),
                ..Plot::default()
            });
        }
        page.heading("Decisions that differ");
        page.paragraph(&summary(&self.diff));
        let rows = differences(&self.diff);
        if !rows.is_empty() {
            page.paragraph("The first, and where the candidate lost most:");
            page.table(&DIFF_HEAD, &rows);
        }
    }
}

const DECISION_HEAD: [&str; 6] = ["decision", "at", "recorded by", "recorded", "candidate", "baseline"];

impl Decisions {
    fn text(&self) -> String {
        let Self { recording, slot, .. } = self;
        let mut text = format!("recording {recording}: decisions of the {slot}\n\n");
        text += &table(&["", "candidate", "baseline"], &self.sides());
        text += &format!("\n{}\n", self.summary());
        if !self.differing.is_empty() {
            text += &format!("the first that differ:\n{}", table(&DECISION_HEAD, &self.rows()));
        }
        text
    }

    fn sides(&self) -> Vec<Vec<String>> {
        let row = |what: &str, of: &dyn Fn(&Side) -> String| {
            vec![what.to_owned(), of(&self.candidate), of(&self.baseline)]
        };
        let share = |side: &Side| {
            let percent = 100.0 * side.as_recorded as f64 / self.decisions as f64;
            format!("{} ({percent:.1} %)", side.as_recorded)
        };
        vec![
            row("policy", &|side| side.name.clone()),
            row("as recorded", &share),
            row("failed", &|side| side.failed.to_string()),
        ]
    }

    fn summary(&self) -> String {
        let Self { decisions, agree, natively, others, .. } = self;
        let percent = 100.0 * *agree as f64 / *decisions as f64;
        format!(
            "Both answer {agree} of {decisions} decisions alike ({percent:.1} %). {natively} of them were recorded from a \
             native twin. {others} decisions of other slots were passed over. Each is asked of fresh instances, so a policy \
             that remembers earlier decisions may differ from itself."
        )
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |d: &super::Differing| {
            let at = moment(d.at_ms);
            let said =
                [&d.policy, &d.recorded, &d.candidate, &d.baseline].map(|text| printable(text, LINE_BYTES));
            [d.id.to_string(), at].into_iter().chain(said).collect()
        };
        self.differing.iter().map(row).collect()
    }

    fn draw(&self, page: &mut Page) {
        page.table(&["", "candidate", "baseline"], &self.sides());
        page.heading("Decisions that differ");
        page.paragraph(&self.summary());
        if !self.differing.is_empty() {
            page.paragraph("The first:");
            page.table(&DECISION_HEAD, &self.rows());
        }
    }
}

fn summary(diff: &Diff) -> String {
    let Diff { requests, differ, rejected_by_candidate_only, rejected_by_baseline_only, .. } = diff;
    format!(
        "{differ} of {requests} decisions differ; {rejected_by_candidate_only} requests were rejected by the candidate only, \
         {rejected_by_baseline_only} by the baseline only. Each side goes on with what it decided, so later decisions \
         differ because of earlier ones."
    )
}

const DIFF_HEAD: [&str; 5] = ["request", "at", "tokens", "candidate", "baseline"];

fn differences(diff: &Diff) -> Vec<Vec<String>> {
    let row = |d: &Difference| {
        vec![
            d.request.to_string(),
            format!("{:.3} s", d.time_ms as f64 / 1e3),
            d.prompt_tokens.to_string(),
            chose(&d.candidate),
            chose(&d.baseline),
        ]
    };
    diff.first.iter().chain(&diff.costliest).map(row).collect()
}

fn chose(chose: &Chose) -> String {
    let (Some(prefill), Some(decode)) = (&chose.prefill, &chose.decode) else { return "rejected".into() };
    let fetched = match chose.fetched_blocks {
        0 => String::new(),
        blocks => format!(", {blocks} blocks fetched"),
    };
    let ttft = chose.ttft_s.map_or(String::new(), |s| format!(": {s:.3} s"));
    format!("{prefill} → {decode}{fetched}{ttft}")
}
