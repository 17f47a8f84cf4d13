//! KVCache-centric scheduling: Algorithm 1 of the Mooncake paper (FAST '25).
//!
//! The prefill instance is the one with the least estimated TTFT, the sum of transfer, queue and
//! prefill time. An instance whose own prefix is much shorter than the best one is considered with
//! a transfer of the difference; fetching it there is what replicates hot prefixes. A request whose
//! TTFT or TBT would miss its SLO is rejected before prefill. Instances that do not serve the request's model are none of
//! its candidates.
//!
//! What a fetch takes is the slower end of it: a hot prefix is not fetched from an instance whose port is busy with sending.
//!
//! The paper's network is the same everywhere. Where links between domains are named, a fetch takes as long as on its way, and of
//! decode instances the one with the least time from the end of the prefill to the next token is taken, which counts the hand-over
//! (NetKV, arXiv 2606.03910).
#![deny(clippy::disallowed_methods)]

use kvasir_policy::columns::{Lanes, Numbers, map_argmin, mask, max};
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, PrefillTable, Reason, Request, eligibility};
use kvasir_policy::{Description, Scheduler};

/// Scratch columns, kept to spare an allocation per decision.
#[derive(Default)]
pub struct Mooncake {
    /// Zeros, used if the host sent no prefix column.
    none: Vec<u32>,
    ttft: Vec<f32>,
    next_token: Vec<f32>,
    ways: Ways,
    /// Columns without the instances that cannot serve the request; used if there are such.
    free_at: Vec<f32>,
    room: Vec<f32>,
}

/// Columns of costs that go by the way between two instances; used if there are links.
#[derive(Default)]
struct Ways {
    fetch_fixed: Vec<f32>,
    fetch_per_block: Vec<f32>,
    handed_over: Vec<f32>,
}

impl Scheduler for Mooncake {
    fn describe(&self) -> Description {
        Description::scheduler("mooncake", env!("CARGO_PKG_VERSION"))
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let matched = per_slot(candidates, cluster.prefill.len(), &mut self.none);
        let (best, source) = best_prefix(&cluster.prefill, matched);
        let free_at = eligible(
            &cluster.prefill.free_at,
            candidates.eligible_prefill(),
            f32::INFINITY,
            &mut self.free_at,
        );
        let fetch = self.ways.fetch(cluster, source);
        let Some(p) =
            fastest_prefill(cluster, request, matched, (best, source), free_at, fetch, &mut self.ttft)
        else {
            return Decision::reject(Reason::NoInstance, 1_000);
        };
        let room = eligible(&cluster.decode.room, candidates.eligible_decode(), -1.0, &mut self.room);
        let joined = self.ways.joined(cluster, request, candidates, p);
        let Some(d) = fastest_decode(cluster, request, room, joined, &mut self.next_token) else {
            return cluster.no_decode(candidates);
        };
        if let Some(rejection) = Decision::missed_slo(request, self.ttft[p], cluster.tbt_ms(d, request)) {
            return rejection;
        }
        let own = matched[p];
        let fetch = needs_transfer(best, own, cluster.thresholds.kvcache_balancing);
        let blocks = if fetch { best - own } else { 0 };
        Decision::run(p as u32, d as u32).fetching(source as u32, blocks)
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let (mut none, mut masked, mut ways, mut ttft) =
            (Vec::new(), Vec::new(), Ways::default(), Vec::new());
        let matched = per_slot(candidates, cluster.prefill.len(), &mut none);
        let (best, source) = best_prefix(&cluster.prefill, matched);
        let free_at =
            eligible(&cluster.prefill.free_at, candidates.eligible_prefill(), f32::INFINITY, &mut masked);
        let fetch = ways.fetch(cluster, source);
        fastest_prefill(cluster, request, matched, (best, source), free_at, fetch, &mut ttft);
        ttft
    }
}

impl Ways {
    /// What fetching over the way from a slot costs each prefill slot: its fixed part, and a block.
    fn fetch<'a>(&'a mut self, cluster: &'a Cluster, source: usize) -> (&'a [f32], &'a [f32]) {
        let t = &cluster.prefill;
        if cluster.links.is_empty() || t.is_empty() {
            return (&t.transfer_fixed, &t.transfer_per_block);
        }
        self.fetch_fixed.clear();
        self.fetch_per_block.clear();
        for slot in 0..t.len() {
            let link = cluster.links.between(t.domain[source], t.domain[slot]);
            self.fetch_fixed.push(link.fixed + t.transfer_fixed[slot]);
            self.fetch_per_block.push(link.factor * t.transfer_per_block[slot]);
        }
        (&self.fetch_fixed, &self.fetch_per_block)
    }

    /// A step of each decode slot with one more sequence, and before it the hand-over from prefill slot `p`.
    fn joined<'a>(
        &'a mut self,
        cluster: &'a Cluster,
        request: &Request,
        candidates: Candidates<'_>,
        p: usize,
    ) -> &'a [f32] {
        let t = &cluster.decode;
        if cluster.links.is_empty() {
            return &t.joined_step;
        }
        let prompt = request.prompt_tokens.div_ceil(cluster.block_size_tokens.max(1));
        let moved = |slot| prompt.saturating_sub(candidates.prefix_of_decode(slot));
        let joined = |slot| t.joined_step[slot] + cluster.handover_ms(p, slot, moved(slot));
        self.handed_over.clear();
        self.handed_over.extend((0..t.len()).map(joined));
        &self.handed_over
    }
}

/// The prefix column, or zeros if the host sent none.
fn per_slot<'a>(candidates: Candidates<'a>, slots: usize, none: &'a mut Vec<u32>) -> &'a [u32] {
    candidates.prefix().unwrap_or_else(|| {
        none.clear();
        none.resize(slots, 0);
        none
    })
}

/// `column`, with `never` for instances that cannot serve the request; no pass over it if all can.
fn eligible<'a>(
    column: &'a [f32],
    eligible: Option<&[u32]>,
    never: f32,
    masked: &'a mut Vec<f32>,
) -> &'a [f32] {
    let Some(eligible) = eligible else { return column };
    masked.clear();
    let fits = column.iter().zip(eligible);
    masked.extend(fits.map(|(&value, &fit)| if fit == eligibility::CANNOT { never } else { value }));
    masked
}

/// Line 3, `FindBestPrefixMatch`, among the instances that can send it.
fn best_prefix(prefill: &PrefillTable, matched: &[u32]) -> (u32, usize) {
    match max(matched) {
        Some((best, slot)) if best > 0 && prefill.available[slot] == 1.0 => (best, slot),
        Some((best, _)) if best > 0 => best_usable_prefix(&prefill.available, matched),
        _ => (0, 0),
    }
}

/// The same if the longest prefix is at an instance that is gone: rare, so it need not be fast.
fn best_usable_prefix(available: &[f32], matched: &[u32]) -> (u32, usize) {
    let usable = matched.iter().zip(available).enumerate().filter(|(_, (_, a))| **a == 1.0);
    let longest = usable.map(|(slot, (&blocks, _))| (blocks, std::cmp::Reverse(slot))).max();
    longest.filter(|(blocks, _)| *blocks > 0).map_or((0, 0), |(blocks, slot)| (blocks, slot.0))
}

/// Line 5: `best / own > threshold`, without dividing by an empty prefix.
fn needs_transfer(best: u32, own: u32, threshold: f32) -> bool {
    best > own && best as f32 > threshold * own as f32
}

/// The same for all instances: those whose own prefix is shorter than this need one.
fn transfer_below(best: u32, threshold: f32) -> u32 {
    if threshold <= 1.0 {
        return best;
    }
    // The quotient may be off by its rounding.
    let mut own = ((best as f32 / threshold) as u32).min(best);
    while needs_transfer(best, own, threshold) {
        own += 1;
    }
    while own > 0 && !needs_transfer(best, own - 1, threshold) {
        own -= 1;
    }
    own
}

/// Lines 4 to 16: estimated TTFT per prefill slot, +infinity if unavailable, and the slot with the least.
fn fastest_prefill(
    cluster: &Cluster,
    request: &Request,
    matched: &[u32],
    (best, source): (u32, usize),
    free_at: &[f32],
    (transfer_fixed, transfer_per_block): (&[f32], &[f32]),
    ttft: &mut Vec<f32>,
) -> Option<usize> {
    let t = &cluster.prefill;
    let below = transfer_below(best, cluster.thresholds.kvcache_balancing);
    let [best, below, block, prompt] = [best, below, cluster.block_size_tokens, request.prompt_tokens]
        .map(|n| Numbers::splat(n.cast_signed()));
    let now = Lanes::splat(cluster.now);
    let sent = Lanes::splat(t.send_per_block.get(source).copied().unwrap_or(0.0));
    let columns: [&[f32]; 6] = [
        free_at,
        transfer_fixed,
        transfer_per_block,
        &t.cost_fixed,
        &t.cost_per_token,
        &t.half_cost_per_pair,
    ];
    map_argmin([matched], columns, ttft, |[own], [free_at, t0, t1, c0, c1, half_c2]| {
        let fetches = own.simd_lt(below);
        let missing = Lanes::from_i32x4(best - own);
        let transfer = mask(fetches) & (t0 + t1.fast_max(sent) * missing);
        let ahead = free_at - now;
        let queue = ahead.simd_gt(Lanes::ZERO) & ahead;
        let cached = (fetches.select(best, own) * block).min(prompt);
        let [computed, attended] = [prompt - cached, prompt + cached].map(Lanes::from_i32x4);
        // Each computed token attends to the cached tokens and to half of the computed ones.
        let prefill = c0 + computed * (c1 + half_c2 * attended);
        transfer + queue + prefill
    })
}

/// Line 17, `SelectDecodingInstance`: predicted time between tokens per decode slot once this request has joined, with what comes
/// before it in `joined`; +infinity if unavailable or without room for its blocks. Returns the slot with the least.
fn fastest_decode(
    cluster: &Cluster,
    request: &Request,
    room: &[f32],
    joined: &[f32],
    next_token: &mut Vec<f32>,
) -> Option<usize> {
    let t = &cluster.decode;
    let prompt = request.prompt_tokens as f32;
    let tokens = prompt + request.output_tokens as f32;
    let blocks = Lanes::splat((tokens / (cluster.block_size_tokens as f32).max(1.0)).ceil());
    let columns: [&[f32]; 3] = [room, joined, &t.step_per_token];
    map_argmin([], columns, next_token, |[], [room, step, per_token]| {
        room.simd_ge(blocks).select(step + per_token * prompt, Lanes::splat(f32::INFINITY))
    })
}

kvasir_policy::export_scheduler!(Mooncake);

#[cfg(test)]
mod tests;
