//! Caches in words, and as comma-separated values.

use super::super::cache::Report;
use super::super::tally::Hits;
use super::super::tiers::TierReport;
use super::Table;
use comfy_table::{CellAlignment, presets};

pub(super) const HEAD: [&str; 8] =
    ["blocks", "evictor", "engine", "hit rate %", "gap closed %", "evictions", "ns mean", "ns p99"];
const PARTS_HEAD: [&str; 7] =
    ["blocks", "evictor", "part", "requests", "block references", "prefix hits", "hit rate %"];
const CSV_HEAD: &str = "trace,evictor,engine,capacity_blocks,part,requests,block_references,prefix_hits,hit_rate_percent,\
    gap_closed_percent,evictions,evict_ns_mean,evict_ns_p99,fallback_evictions,invalid_victims,fault,moved_in\n";
const TIERS_HEAD: [&str; 7] =
    ["evictor", "tier", "blocks", "prefix hits", "hit rate %", "moved in", "evictions"];

impl Report {
    /// For a terminal.
    pub fn text(&self) -> String {
        let mut rows = vec![
            ("trace", self.trace.clone()),
            ("evictor", format!("{} ({})", self.evictor, self.engine)),
            ("capacity", format!("{} blocks", self.capacity_blocks)),
            ("requests", self.requests.to_string()),
            ("block references", self.block_references.to_string()),
            ("prefix hits", format!("{} ({:.2} %)", self.prefix_hits, self.hit_rate_percent)),
        ];
        for (part, hits) in self.parts() {
            let Hits { requests, block_references, prefix_hits, hit_rate_percent } = hits;
            rows.push((
                part.kind,
                format!(
                    "{}{prefix_hits} of {block_references} ({hit_rate_percent:.2} %), {requests} requests",
                    part.number.map(|number| format!("{number}: ")).unwrap_or_default()
                ),
            ));
        }
        rows.extend(self.gap_closed_percent.map(|gap| ("gap closed", format!("{gap:.1} %"))));
        rows.push(("evictions", self.evictions.to_string()));
        if self.is_timed() {
            let (mean, p99) = (self.evict_ns_mean, self.evict_ns_p99);
            rows.push(("time per eviction", format!("{mean:.0} ns mean, {p99} ns p99")));
        }
        rows.extend(self.not_its_own().map(|told| ("not the policy's", told)));
        rows.extend(self.fault.clone().map(|fault| ("policy failed", fault)));
        let mut text: String = rows.iter().map(|(name, value)| format!("{name:18}{value}\n")).collect();
        if self.tiers.is_some() {
            text += &format!("\n{}", tiers_text(std::slice::from_ref(self)));
        }
        text
    }

    /// The optimum is not asked by anybody.
    fn is_timed(&self) -> bool {
        self.evict_ns_p99 > 0
    }

    fn not_its_own(&self) -> Option<String> {
        let Self { fallback_evictions, invalid_victims, .. } = self;
        (fallback_evictions + invalid_victims > 0).then(|| {
            format!("{fallback_evictions} by the native fallback, {invalid_victims} invalid victims")
        })
    }

    fn parts(&self) -> impl Iterator<Item = (Part, &Hits)> {
        let one = |kind, number| Part { kind, number };
        let warm_up = self.warm_up.iter().map(move |hits| (one("warm-up", None), hits));
        let classes = self.by_class.iter().flatten().map(move |(&n, hits)| (one("class", Some(n)), hits));
        let tenants = self.by_tenant.iter().flatten().map(move |(&n, hits)| (one("tenant", Some(n)), hits));
        warm_up.chain(classes).chain(tenants)
    }
}

/// What some of the hits belong to.
struct Part {
    kind: &'static str,
    number: Option<u16>,
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.number {
            Some(number) => write!(f, "{} {number}", self.kind),
            None => f.write_str(self.kind),
        }
    }
}

impl Table {
    /// For a terminal.
    pub fn text(&self) -> String {
        let Some(first) = self.rows.first() else { return String::new() };
        let Report { requests, block_references, .. } = first;
        let mut text = format!(
            "trace {}: {requests} requests, {block_references} block references\n\n{}",
            self.trace,
            aligned(&HEAD, self.rows.iter().map(cells))
        );
        let parts: Vec<_> =
            self.rows.iter().flat_map(|row| row.parts().map(|part| part_cells(row, part))).collect();
        if !parts.is_empty() {
            text += &format!("\n{}", aligned(&PARTS_HEAD, parts.into_iter()));
        }
        if self.rows.iter().any(|row| row.tiers.is_some()) {
            text += &format!("\n{}", tiers_text(&self.rows));
        }
        for row in &self.rows {
            for told in row.not_its_own().into_iter().chain(row.fault.clone()) {
                text += &format!("\n{} at {} blocks: {told}\n", row.evictor, row.capacity_blocks);
            }
        }
        text
    }

    /// One line for each row, and for each part of it, below a line with the names of the columns (RFC 4180, lines end
    /// in a line feed).
    pub fn csv(&self) -> String {
        let mut text = CSV_HEAD.to_owned();
        for row in &self.rows {
            let all = Hits {
                requests: row.requests,
                block_references: row.block_references,
                prefix_hits: row.prefix_hits,
                hit_rate_percent: row.hit_rate_percent,
            };
            let gap = row.gap_closed_percent.map(|gap| gap.to_string()).unwrap_or_default();
            text += &format!(
                "{},{gap},{},{},{},{},{},{},\n",
                csv_start(row, "all", &all),
                row.evictions,
                row.evict_ns_mean,
                row.evict_ns_p99,
                row.fallback_evictions,
                row.invalid_victims,
                quoted(row.fault.as_deref().unwrap_or_default())
            );
            for (part, hits) in row.parts() {
                text += &format!("{},,,,,,,,\n", csv_start(row, &part.to_string(), hits));
            }
            for tier in row.tiers.iter().flatten() {
                let TierReport { prefix_hits, hit_rate_percent, .. } = *tier;
                let start =
                    csv_start(row, tier.tier.as_str(), &Hits { prefix_hits, hit_rate_percent, ..all });
                text += &format!("{start},,{},,,,,,{}\n", tier.evictions, tier.moved_in);
            }
        }
        text
    }
}

fn csv_start(row: &Report, part: &str, hits: &Hits) -> String {
    let Hits { requests, block_references, prefix_hits, hit_rate_percent } = hits;
    let (trace, evictor) = (quoted(&row.trace), quoted(&row.evictor));
    let (engine, blocks) = (row.engine, row.capacity_blocks);
    format!(
        "{trace},{evictor},{engine},{blocks},{part},{requests},{block_references},{prefix_hits},{hit_rate_percent}"
    )
}

fn quoted(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.into()
    }
}

pub(super) fn cells(row: &Report) -> Vec<String> {
    let timed = |text: String| if row.is_timed() { text } else { "-".into() };
    vec![
        row.capacity_blocks.to_string(),
        row.evictor.clone(),
        row.engine.into(),
        format!("{:.2}", row.hit_rate_percent),
        row.gap_closed_percent.map_or("-".into(), |gap| format!("{gap:.1}")),
        row.evictions.to_string(),
        timed(format!("{:.0}", row.evict_ns_mean)),
        timed(row.evict_ns_p99.to_string()),
    ]
}

fn part_cells(row: &Report, (part, hits): (Part, &Hits)) -> Vec<String> {
    vec![
        row.capacity_blocks.to_string(),
        row.evictor.clone(),
        part.to_string(),
        hits.requests.to_string(),
        hits.block_references.to_string(),
        hits.prefix_hits.to_string(),
        format!("{:.2}", hits.hit_rate_percent),
    ]
}

fn tiers_text(rows: &[Report]) -> String {
    let cells = |row: &Report, tier: &TierReport| {
        vec![
            row.evictor.clone(),
            tier.tier.as_str().into(),
            tier.capacity_blocks.to_string(),
            tier.prefix_hits.to_string(),
            format!("{:.2}", tier.hit_rate_percent),
            tier.moved_in.to_string(),
            tier.evictions.to_string(),
        ]
    };
    let of_row =
        |row: &Report| -> Vec<_> { row.tiers.iter().flatten().map(|tier| cells(row, tier)).collect() };
    aligned(&TIERS_HEAD, rows.iter().flat_map(of_row))
}

/// Columns of numbers end together.
fn aligned(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(head);
    rows.for_each(|row| _ = table.add_row(row));
    for (column, name) in table.column_iter_mut().zip(head) {
        if !["evictor", "engine", "part", "tier"].contains(name) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
