//! What a trace contains: counts, lengths, rates, reuse.

use super::chains::{Chains, Node, TooMany};
use super::classes::Classes;
use super::trace::Request;
use serde::Serialize;
use std::collections::BTreeMap;

/// The JSON of `kvasir trace stats`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub requests: u64,
    pub block_references: u64,
    pub distinct_blocks: u64,
    pub span_s: f64,
    pub rate_rps: f64,
    pub input_tokens_mean: f64,
    pub input_tokens_max: u32,
    pub output_tokens_mean: f64,
    /// Prefix hits of a cache that never evicts, percent of references.
    pub best_hit_rate_percent: f64,
    /// Share of requests that continue an earlier one (classes of turn 2 and above), not counting system
    /// prompts. Means nothing where the trace names classes of its own.
    pub later_turn_share: f64,
    /// Requests by class (see DESIGN, "classes"): (class, requests), classes without requests left out.
    pub classes: Vec<(u16, u64)>,
}

/// Collects [`Report`] over the requests of one trace.
#[derive(Default)]
pub struct Stats {
    chains: Chains,
    classes: Classes,
    path: Vec<Node>,
    report: Report,
    input_tokens: u64,
    output_tokens: u64,
    hits: u64,
    first_us: u64,
    last_us: u64,
    by_class: BTreeMap<u16, u64>,
}

impl Stats {
    /// Of a trace whose blocks have so many tokens.
    pub fn of_blocks(block_size_tokens: u32) -> Self {
        Self { classes: Classes::default().of_blocks(block_size_tokens), ..Self::default() }
    }

    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn add(&mut self, request: &Request) -> Result<(), TooMany> {
        let seen = self.chains.len() as u32;
        let mut path = std::mem::take(&mut self.path);
        self.chains.walk_of(request.tenant, &request.blocks, &mut path)?;
        *self.by_class.entry(self.classes.assign(request, &path)).or_default() += 1;
        self.hits += path.iter().take_while(|&&node| node < seen).count() as u64;
        if self.report.requests == 0 {
            self.first_us = request.time_us;
        }
        self.last_us = request.time_us;
        self.report.requests += 1;
        self.report.block_references += path.len() as u64;
        self.report.input_tokens_max = self.report.input_tokens_max.max(request.input_tokens);
        self.input_tokens += u64::from(request.input_tokens);
        self.output_tokens += u64::from(request.output_tokens);
        self.path = path;
        Ok(())
    }

    pub fn report(&self) -> Report {
        let requests = self.report.requests.max(1) as f64;
        let span_s = (self.last_us - self.first_us) as f64 / 1e6;
        let later: u64 = self.by_class.range(5..=16).map(|(_, requests)| requests).sum();
        Report {
            distinct_blocks: self.chains.len() as u64,
            span_s,
            rate_rps: if span_s > 0.0 { requests / span_s } else { 0.0 },
            input_tokens_mean: self.input_tokens as f64 / requests,
            output_tokens_mean: self.output_tokens as f64 / requests,
            best_hit_rate_percent: 100.0 * self.hits as f64 / self.report.block_references.max(1) as f64,
            later_turn_share: later as f64 / requests,
            classes: self.by_class.iter().map(|(&class, &requests)| (class, requests)).collect(),
            ..self.report.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_hand() {
        let mut stats = Stats::default();
        for (time_us, blocks) in [(1_000_000, vec![0, 1]), (3_000_000, vec![0, 1, 2]), (5_000_000, vec![3])] {
            let input_tokens = blocks.len() as u32 * 512;
            stats
                .add(&Request { time_us, input_tokens, output_tokens: 10, blocks, ..Request::default() })
                .unwrap();
        }
        let report = stats.report();
        let expected = Report {
            requests: 3,
            block_references: 6,
            distinct_blocks: 4,
            span_s: 4.0,
            rate_rps: 0.75,
            input_tokens_mean: 1024.0,
            input_tokens_max: 1536,
            output_tokens_mean: 10.0,
            best_hit_rate_percent: 200.0 / 6.0,
            later_turn_share: 1.0 / 3.0,
            classes: vec![(1, 2), (5, 1)],
        };
        assert_eq!(report, expected);
        assert_eq!(Stats::default().report().rate_rps, 0.0);
    }
}
