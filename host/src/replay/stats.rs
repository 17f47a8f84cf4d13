//! What a trace contains: counts, lengths, rates, and reuse as "KVCache Cache in the Wild" (USENIX ATC 2025, section 3) looks at it.

mod page;
mod reuse;
mod skew;
mod slices;
mod spread;

pub(crate) use self::page::rows;
pub use self::reuse::{ClassReuse, Reuse};
pub use self::skew::Skew;
pub use self::slices::Slice;
pub use self::spread::Quantiles;

use self::reuse::Uses;
use self::skew::Shares;
use self::slices::Slices;
use self::spread::Spread;
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
    /// Share of requests that continue an earlier one: as the trace says, or as found by their blocks, not counting system
    /// prompts.
    pub later_turn_share: f64,
    /// Share of those hits that are of such requests.
    pub later_turn_hit_share: f64,
    /// Requests by class (see DESIGN, "classes"): (class, requests), classes without requests left out.
    pub classes: Vec<(u16, u64)>,
    pub input_tokens: Quantiles,
    pub output_tokens: Quantiles,
    /// Turns of a conversation, where the trace names conversations.
    pub turns: Option<Quantiles>,
    /// Over tenants and over conversations, where there are several.
    pub tenants: Option<Skew>,
    pub conversations: Option<Skew>,
    pub reuse: Reuse,
    /// The trace in parts of the same time.
    pub slices: Vec<Slice>,
}

/// Collects [`Report`] over the requests of one trace.
#[derive(Default)]
pub struct Stats {
    chains: Chains,
    classes: Classes,
    path: Vec<Node>,
    requests: u64,
    references: u64,
    hits: u64,
    later_turns: u64,
    later_turn_hits: u64,
    first_us: u64,
    last_us: u64,
    by_class: BTreeMap<u16, u64>,
    input_tokens: Spread,
    output_tokens: Spread,
    tenants: Shares<u16>,
    conversations: Shares<(u16, u64)>,
    uses: Uses,
    slices: Slices,
}

impl Stats {
    /// The statistics of a trace with blocks of `block_size_tokens`.
    pub fn of_blocks(block_size_tokens: u32) -> Self {
        Self { classes: Classes::default().of_blocks(block_size_tokens), ..Self::default() }
    }

    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn add(&mut self, request: &Request) -> Result<(), TooMany> {
        let seen = self.chains.len() as u32;
        let mut path = std::mem::take(&mut self.path);
        self.chains.walk_of(request.tenant, &request.blocks, &mut path)?;
        let (class, turn) = self.classes.assign_with_turn(request, &path);
        let hits = path.iter().take_while(|&&node| node < seen).count() as u64;
        if self.requests == 0 {
            self.first_us = request.time_us;
        }
        self.last_us = request.time_us;
        self.requests += 1;
        self.references += path.len() as u64;
        self.hits += hits;
        *self.by_class.entry(class).or_default() += 1;
        if turn > 1 {
            self.later_turns += 1;
            self.later_turn_hits += hits;
        }
        self.input_tokens.add(request.input_tokens.into());
        self.output_tokens.add(request.output_tokens.into());
        self.tenants.add(request.tenant, hits);
        if let Some(session) = request.session {
            self.conversations.add((request.tenant, session), hits);
        }
        self.uses.add(request.time_us, class, &path);
        self.slices.add(request.time_us - self.first_us, path.len() as u64, hits);
        self.path = path;
        Ok(())
    }

    pub fn report(&self) -> Report {
        let requests = self.requests.max(1) as f64;
        let (input, output) = (self.input_tokens.quantiles(1.0), self.output_tokens.quantiles(1.0));
        let span_s = (self.last_us - self.first_us) as f64 / 1e6;
        Report {
            requests: self.requests,
            block_references: self.references,
            distinct_blocks: self.chains.len() as u64,
            span_s,
            rate_rps: if span_s > 0.0 { requests / span_s } else { 0.0 },
            input_tokens_mean: input.mean,
            input_tokens_max: input.max as u32,
            output_tokens_mean: output.mean,
            best_hit_rate_percent: 100.0 * self.hits as f64 / self.references.max(1) as f64,
            later_turn_share: self.later_turns as f64 / requests,
            later_turn_hit_share: self.later_turn_hits as f64 / self.hits.max(1) as f64,
            classes: self.by_class.iter().map(|(&class, &requests)| (class, requests)).collect(),
            input_tokens: input,
            output_tokens: output,
            turns: self.conversations.requests(),
            tenants: self.tenants.skew(),
            conversations: self.conversations.skew(),
            reuse: self.uses.report(),
            slices: self.slices.report(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats_of(requests: &[Request]) -> Stats {
        let mut stats = Stats::default();
        requests.iter().for_each(|request| stats.add(request).unwrap());
        stats
    }

    fn request(time_us: u64, blocks: &[u64]) -> Request {
        let input_tokens = blocks.len() as u32 * 512;
        Request { time_us, input_tokens, output_tokens: 10, blocks: blocks.to_vec(), ..Request::default() }
    }

    #[test]
    fn counts_by_hand() {
        let requests =
            [request(1_000_000, &[0, 1]), request(3_000_000, &[0, 1, 2]), request(5_000_000, &[3])];
        let report = stats_of(&requests).report();
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
            later_turn_hit_share: 1.0,
            classes: vec![(1, 2), (5, 1)],
            ..report.clone()
        };
        assert_eq!(report, expected);
        assert_eq!((report.turns, report.tenants, report.conversations), (None, None, None));
        assert_eq!((report.input_tokens.max, report.output_tokens.p50), (1536.0, 10.0));
        assert_eq!(Stats::default().report().rate_rps, 0.0);
    }

    #[test]
    fn what_the_trace_says_of_turns_and_conversations_is_taken() {
        let told = |session, turn, at: Request| Request { session: Some(session), turn: Some(turn), ..at };
        let requests = [
            told(7, 1, request(0, &[0, 1])),
            told(8, 3, request(1, &[5])),
            told(7, 2, request(2, &[0, 1])),
            told(7, 3, request(3, &[0])),
        ];
        let report = stats_of(&requests).report();
        assert_eq!((report.later_turn_share, report.later_turn_hit_share), (0.75, 1.0));
        assert_eq!(report.turns.map(|turns| (turns.mean, turns.max)), Some((2.0, 3.0)));
        assert_eq!(report.conversations.map(|skew| skew.of), Some(2));
    }
}
