//! Network-aware choice of the decode instance: NetKV (Ojewale, arXiv 2606.03910).
//!
//! The prompt's KV crosses the network before decode begins, so what that costs on the way from the chosen prefill
//! instance decides together with the load: the decode instance is the one with the least time from the end of prefill to
//! the next token, over the links between their domains as they are now. One pass over the decode instances. The prefill
//! instance is the one with the least TTFT, where a longer prefix is fetched if the way to it is shorter than computing it.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

/// Scores by slot, kept to spare an allocation per decision.
pub struct NetKv {
    /// How many steps of decode count beside the hand-over.
    steps: f32,
    prefill: Vec<f32>,
    decode: Vec<f32>,
}

impl Default for NetKv {
    fn default() -> Self {
        Self { steps: 1.0, prefill: Vec::new(), decode: Vec::new() }
    }
}

impl Scheduler for NetKv {
    fn describe(&self) -> Description {
        Description::scheduler("netkv", env!("CARGO_PKG_VERSION")).setting(
            "decode-steps",
            1,
            "steps of decode that are weighed against the hand-over; more spreads load, fewer spare the network",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.steps = settings.number("decode-steps", 0.0..=1e6)? as f32;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let longest = longest_prefix(cluster, candidates);
        let slots = 0..cluster.prefill.len();
        self.prefill.clear();
        self.prefill.extend(slots.map(|slot| ttft(cluster, request, candidates, longest, slot).0));
        let Some(p) = least(&self.prefill) else { return Decision::reject(Reason::NoInstance, 1_000) };
        let slots = 0..cluster.decode.len();
        self.decode.clear();
        self.decode.extend(slots.map(|slot| next_token(cluster, request, candidates, self.steps, p, slot)));
        let Some(d) = least(&self.decode) else { return cluster.no_decode(candidates) };
        if let Some(rejection) = Decision::missed_slo(request, self.prefill[p], cluster.tbt_ms(d, request)) {
            return rejection;
        }
        let (_, fetched) = ttft(cluster, request, candidates, longest, p);
        Decision::run(p as u32, d as u32).fetching(longest.1 as u32, fetched)
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let longest = longest_prefix(cluster, candidates);
        let slots = 0..cluster.prefill.len();
        let mut scores: Vec<f32> =
            slots.map(|slot| ttft(cluster, request, candidates, longest, slot).0).collect();
        let Some(p) = least(&scores) else { return scores };
        let decode = 0..cluster.decode.len();
        scores.extend(decode.map(|slot| next_token(cluster, request, candidates, self.steps, p, slot)));
        scores
    }
}

/// Blocks of the longest prefix at an instance that can send it, and its slot.
fn longest_prefix(cluster: &Cluster, candidates: Candidates<'_>) -> (u32, usize) {
    let available = |slot: &usize| cluster.prefill.available[*slot] == 1.0;
    let held = (0..cluster.prefill.len()).filter(available).map(|slot| (candidates.prefix_of(slot), slot));
    held.fold((0, 0), |longest, next| if next.0 > longest.0 { next } else { longest })
}

/// Time to the first token at a prefill slot, ms, and the blocks that it fetches for it.
fn ttft(
    cluster: &Cluster,
    request: &Request,
    candidates: Candidates<'_>,
    (longest, source): (u32, usize),
    slot: usize,
) -> (f32, u32) {
    let alone = cluster.ttft_ms(slot, request, candidates);
    let missing = longest.saturating_sub(candidates.prefix_of(slot));
    if missing == 0 || alone == f32::INFINITY {
        return (alone, 0);
    }
    // What is on its way does not wait for the queue.
    let until_there = cluster.queue_ms(slot).max(cluster.fetch_ms(source, slot, missing));
    let fetched = until_there + cluster.prefill_ms(slot, request, longest);
    if fetched < alone { (fetched, missing) } else { (alone, 0) }
}

/// Time from the end of the prefill in slot `p` to the next token out of a decode slot, ms.
fn next_token(
    cluster: &Cluster,
    request: &Request,
    candidates: Candidates<'_>,
    steps: f32,
    p: usize,
    slot: usize,
) -> f32 {
    if !cluster.has_room(slot, request) || !candidates.can_decode(slot) {
        return f32::INFINITY;
    }
    let prompt = request.prompt_tokens.div_ceil(cluster.block_size_tokens.max(1));
    let moved = prompt.saturating_sub(candidates.prefix_of_decode(slot));
    cluster.handover_ms(p, slot, moved) + steps * cluster.tbt_ms(slot, request)
}

/// The first slot with the least score that is not infinite.
fn least(scores: &[f32]) -> Option<usize> {
    kvasir_policy::columns::argmin(scores)
}

kvasir_policy::export_scheduler!(NetKv);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, Link, PrefillRow, Question};
    use kvasir_policy_testing::{asked, chooses_what_is_there};
    use proptest::prelude::*;

    /// Instance 0 does both, in domain 0; 1 decodes in domain 0, 2 in domain 1 behind a slow link.
    fn cluster(link: Link) -> Kept<NetKv> {
        let mut kept = Kept::new(Box::<NetKv>::default());
        kept.open(&Layout { domains: 2, ..Layout::of(2, 3, 16) }.encode());
        let prefill = |slot, peer, domain| PrefillRow {
            slot,
            available: true,
            cost_per_token: 1.0,
            transfer_per_block: 2.0,
            peer,
            domain,
            ..PrefillRow::default()
        };
        let decode = |slot, peer, domain| DecodeRow {
            slot,
            available: true,
            free_blocks: 1_000,
            step_fixed: 20.0,
            step_per_sequence: 1.0,
            handover_per_block: 1.0,
            peer,
            domain,
            ..DecodeRow::default()
        };
        kept.update_prefill(&[prefill(0, Some(0), 0).encode(), prefill(1, None, 1).encode()].concat());
        let rows = [decode(0, Some(0), 0), decode(1, None, 0), decode(2, None, 1)];
        kept.update_decode(&rows.map(|row| row.encode()).concat());
        kept.update_links(&[link.encode(0, 1), link.encode(1, 0)].concat());
        kept
    }

    fn ask(kept: &mut Kept<NetKv>, prefix: [u32; 2], at_decode: [u32; 3]) -> Decision {
        let request = Request { prompt_tokens: 160, output_tokens: 10, ..Request::default() };
        let question = Question::new(0.0, &request, 2, 3)
            .with(Column::Prefix, &prefix)
            .with(Column::PrefixAtDecode, &at_decode);
        kept.schedule(0.0, question.words())
    }

    fn busy(kept: &mut Kept<NetKv>, slot: u16, peer: Option<u16>, domain: u32, sequences: u32) {
        let row = DecodeRow {
            slot,
            available: true,
            free_blocks: 1_000,
            step_fixed: 20.0,
            step_per_sequence: 1.0,
            handover_per_block: 1.0,
            sequences,
            peer,
            domain,
            ..DecodeRow::default()
        };
        kept.update_decode(&row.encode());
    }

    #[test]
    fn decode_is_near_unless_it_is_much_busier() {
        let slow = Link { fixed: 5.0, factor: 3.0, under_way: 2 };
        let mut kept = cluster(slow);
        assert_eq!(ask(&mut kept, [10, 0], [0; 3]), Decision::run(0, 0), "it stays where it is");
        busy(&mut kept, 0, Some(0), 0, 11);
        assert_eq!(ask(&mut kept, [10, 0], [0; 3]), Decision::run(0, 1), "10 blocks to the neighbour");
        busy(&mut kept, 1, None, 0, 35);
        assert_eq!(ask(&mut kept, [10, 0], [0; 3]), Decision::run(0, 0), "the far one costs 35 on the way");
        busy(&mut kept, 0, Some(0), 0, 36);
        assert_eq!(ask(&mut kept, [10, 0], [0; 3]), Decision::run(0, 2));
        busy(&mut kept, 0, Some(0), 0, 11);
        assert_eq!(ask(&mut kept, [10, 0], [0, 0, 9]), Decision::run(0, 2), "one block is missing there");
    }

    #[test]
    fn a_prefix_is_fetched_if_the_way_is_shorter_than_computing_it() {
        let free = Link::default();
        let mut kept = cluster(free);
        let prefill = PrefillRow {
            slot: 0,
            available: true,
            busy_until: 500.0,
            cost_per_token: 1.0,
            ..PrefillRow::default()
        };
        kept.update_prefill(&prefill.encode());
        let Decision::Run(placement) = ask(&mut kept, [8, 0], [0; 3]) else { panic!("instances are there") };
        assert_eq!((placement.prefill, placement.transfer.map(|t| (t.source, t.blocks))), (1, Some((0, 8))));
        kept.update_links(&Link { factor: 9.0, ..free }.encode(0, 1));
        let Decision::Run(placement) = ask(&mut kept, [8, 0], [0; 3]) else { panic!("instances are there") };
        assert_eq!((placement.prefill, placement.transfer), (1, None), "144 ms on the way, 128 to compute");
    }

    proptest! {
        #[test]
        fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
            chooses_what_is_there(NetKv::default(), &asked);
        }
    }
}
