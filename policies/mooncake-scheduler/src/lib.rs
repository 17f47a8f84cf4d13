//! KVCache-centric scheduling: Algorithm 1 of the Mooncake paper (FAST '25).
//!
//! The prefill instance is the one with the least estimated TTFT, the sum of transfer, queue and
//! prefill time. An instance whose own prefix is much shorter than the best one is considered with
//! a transfer of the difference; fetching it there is what replicates hot prefixes. A request whose
//! TTFT or TBT would miss its SLO is rejected before prefill.

use kvasir_policy::columns::{argmin, max};
use kvasir_policy::scheduler::{Cluster, Decision, PrefillTable, Prefix, Reason, Request, Transfer};
use kvasir_policy::{Description, Scheduler};

/// Scratch columns, kept to spare an allocation per decision.
#[derive(Default)]
pub struct Mooncake {
    ttft: Vec<f32>,
    tbt: Vec<f32>,
    /// Stands in for a prefix column that the host did not send.
    nothing: Vec<u32>,
}

impl Scheduler for Mooncake {
    fn describe(&self) -> Description {
        Description::scheduler("mooncake", env!("CARGO_PKG_VERSION"))
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, prefix: Prefix<'_>) -> Decision {
        let matched = column(prefix, cluster.prefill.len(), &mut self.nothing);
        let (best, source) = best_prefix(&cluster.prefill, matched);
        estimate_ttft(cluster, request, matched, best, &mut self.ttft);
        estimate_tbt(cluster, request, &mut self.tbt);
        let Some(p) = argmin(&self.ttft) else {
            return Decision::reject(Reason::NoInstance, 1_000);
        };
        let Some(d) = argmin(&self.tbt) else {
            let any = cluster.decode.available.contains(&1.0);
            return Decision::reject(if any { Reason::NoMemory } else { Reason::NoInstance }, 1_000);
        };
        if !request.must_run() {
            if self.ttft[p] > request.ttft_slo {
                return Decision::reject(Reason::Ttft, (self.ttft[p] - request.ttft_slo) as u32);
            }
            if self.tbt[d] > request.tbt_slo {
                return Decision::reject(Reason::Tbt, 1_000);
            }
        }
        let own = matched[p];
        let fetch = needs_transfer(best, own, cluster.thresholds.kvcache_balancing);
        let transfer = fetch.then(|| Transfer {
            source: source as u16,
            blocks: (best - own).min(u32::from(u16::MAX)) as u16,
        });
        Decision::Run { prefill: p as u16, decode: d as u16, transfer }
    }

    fn explain(&self, cluster: &Cluster, request: &Request, prefix: Prefix<'_>) -> Vec<f32> {
        let mut nothing = Vec::new();
        let matched = column(prefix, cluster.prefill.len(), &mut nothing);
        let (best, _) = best_prefix(&cluster.prefill, matched);
        let mut ttft = Vec::new();
        estimate_ttft(cluster, request, matched, best, &mut ttft);
        ttft
    }
}

/// One value per slot, also where the host sent none.
fn column<'a>(prefix: Prefix<'a>, slots: usize, nothing: &'a mut Vec<u32>) -> &'a [u32] {
    let matched = prefix.any_tier();
    if matched.len() == slots {
        return matched;
    }
    nothing.clear();
    nothing.resize(slots, 0);
    nothing
}

/// Line 3, `FindBestPrefixMatch`, among the instances that can serve it.
fn best_prefix(prefill: &PrefillTable, matched: &[u32]) -> (u32, usize) {
    match max(matched) {
        Some((best, slot)) if best > 0 && prefill.available[slot] == 1.0 => (best, slot),
        Some((best, _)) if best > 0 => best_usable_prefix(&prefill.available, matched),
        _ => (0, 0),
    }
}

/// The same where the longest prefix stands at an instance that is gone: rare, so not for speed.
fn best_usable_prefix(available: &[f32], matched: &[u32]) -> (u32, usize) {
    let usable = matched.iter().zip(available).enumerate().filter(|(_, (_, a))| **a == 1.0);
    let longest = usable.map(|(slot, (&blocks, _))| (blocks, std::cmp::Reverse(slot))).max();
    longest.filter(|(blocks, _)| *blocks > 0).map_or((0, 0), |(blocks, slot)| (blocks, slot.0))
}

/// Line 5: `best / own > threshold`, without dividing by an empty prefix.
fn needs_transfer(best: u32, own: u32, threshold: f32) -> bool {
    best > own && best as f32 > threshold * own as f32
}

/// Lines 4 to 16: estimated TTFT per prefill slot, +infinity where unavailable.
///
/// Written for the vectoriser, which is most of the speed in Wasm: slices of one length; selections
/// instead of `max` and `min`, which have no vector form there; and two passes, because one that reads
/// all columns exceeds the number of pointers the compiler checks for overlap.
fn estimate_ttft(cluster: &Cluster, request: &Request, matched: &[u32], best: u32, ttft: &mut Vec<f32>) {
    let table = &cluster.prefill;
    let n = table.len();
    let best = best as f32;
    let prompt = request.prompt_tokens as f32;
    let block = cluster.block_size_tokens as f32;
    let threshold = cluster.thresholds.kvcache_balancing;
    let fetches = |own: f32| (best > own) & (best > threshold * own);
    ttft.resize(n, 0.0);
    let (ttft, matched) = (&mut ttft[..n], &matched[..n]);

    let (busy, t0, t1) = (&table.busy_until[..n], &table.transfer_fixed[..n], &table.transfer_per_block[..n]);
    for i in 0..n {
        let own = matched[i] as f32;
        let fetch = t0[i] + t1[i] * (best - own);
        let transfer = if fetches(own) { fetch } else { 0.0 };
        let ahead = busy[i] - request.now;
        ttft[i] = transfer + if ahead > 0.0 { ahead } else { 0.0 };
    }

    let available = &table.available[..n];
    let (c0, c1, c2) = (&table.cost_fixed[..n], &table.cost_per_token[..n], &table.cost_per_pair[..n]);
    for i in 0..n {
        let own = matched[i] as f32;
        let held = if fetches(own) { best } else { own } * block;
        let cached = if held < prompt { held } else { prompt };
        let computed = prompt - cached;
        let prefill = c0[i] + c1[i] * computed + c2[i] * computed * (cached + computed * 0.5);
        let sum = ttft[i] + prefill;
        ttft[i] = if available[i] == 1.0 { sum } else { f32::INFINITY };
    }
}

/// Line 17, `SelectDecodingInstance`: predicted time between tokens per decode slot once this
/// request has joined, +infinity where unavailable or without room for its blocks.
fn estimate_tbt(cluster: &Cluster, request: &Request, tbt: &mut Vec<f32>) {
    let table = &cluster.decode;
    let n = table.len();
    let tokens = request.prompt_tokens as f32 + request.output_tokens as f32;
    let blocks = (tokens / (cluster.block_size_tokens as f32).max(1.0)).ceil();
    let prompt = request.prompt_tokens as f32;
    tbt.resize(n, 0.0);
    let tbt = &mut tbt[..n];

    let (d0, d1) = (&table.step_fixed[..n], &table.step_per_sequence[..n]);
    let (sequences, arriving) = (&table.sequences[..n], &table.arriving_sequences[..n]);
    for i in 0..n {
        tbt[i] = d0[i] + d1[i] * (sequences[i] + arriving[i] + 1.0);
    }

    let (available, free, d2) = (&table.available[..n], &table.free_blocks[..n], &table.step_per_token[..n]);
    let (context, arriving) = (&table.context_tokens[..n], &table.arriving_tokens[..n]);
    for i in 0..n {
        let step = tbt[i] + d2[i] * (context[i] + arriving[i] + prompt);
        let fits = (available[i] == 1.0) & (free[i] >= blocks);
        tbt[i] = if fits { step } else { f32::INFINITY };
    }
}

kvasir_policy::export_scheduler!(Mooncake);

#[cfg(test)]
mod tests;
