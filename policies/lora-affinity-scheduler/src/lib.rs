//! Sends requests to instances that have their LoRA adapter loaded, and lets an adapter spread as its traffic grows.
//!
//! Loading an adapter costs time, so an instance without it is as good as one with it whose first token comes `load-ms`
//! later: a queue of that length where the adapter is makes the next instance load it too, and when the traffic
//! has gone, requests gather again where they are served first. Where an instance has as many adapters as it can hold, another one
//! has to go, and may have to come back: that costs `evict-ms` more. Which instance loads it next is the same for all workers: each
//! adapter has an order of its own over the instances (rendezvous hashing; Thaler and Ravishankar, 1998), worth up
//! to `home-ms`, so that adapters spread evenly. Requests without an adapter go where the first token comes first.
//!
//! A request stays on an instance that does both, if its decode half has room; otherwise decode is chosen by the hand-over,
//! the time between tokens, and the adapter.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::draw::mix;
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings, columns};

/// See the module documentation.
pub struct LoraAffinity {
    load_ms: f32,
    home_ms: f32,
    evict_ms: f32,
    prefill: Vec<f32>,
    decode: Vec<f32>,
}

impl Default for LoraAffinity {
    fn default() -> Self {
        Self { load_ms: 500.0, home_ms: 100.0, evict_ms: 500.0, prefill: Vec::new(), decode: Vec::new() }
    }
}

impl Scheduler for LoraAffinity {
    fn describe(&self) -> Description {
        let Self { load_ms, home_ms, evict_ms, .. } = Self::default();
        Description::scheduler("lora-affinity", env!("CARGO_PKG_VERSION"))
            .setting(
                "load-ms",
                load_ms,
                "time to load an adapter, ms; what a queue may cost before it spreads",
            )
            .setting("home-ms", home_ms, "how much an adapter's own order of the instances is worth, ms")
            .setting("evict-ms", evict_ms, "what it costs where another adapter has to go for it, ms")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.load_ms = settings.number("load-ms", 0.0..=1e7)? as f32;
        self.home_ms = settings.number("home-ms", 0.0..=1e7)? as f32;
        self.evict_ms = settings.number("evict-ms", 0.0..=1e7)? as f32;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let mut costs = std::mem::take(&mut self.prefill);
        costs.clear();
        costs.extend(self.prefill_costs(cluster, request, candidates));
        let prefill = columns::argmin(&costs);
        self.prefill = costs;
        let Some(prefill) = prefill else { return Decision::reject(Reason::NoInstance, 1_000) };
        let ttft = self.prefill[prefill];
        if ttft > request.ttft_slo && !request.must_run() {
            return Decision::reject(Reason::Ttft, (ttft - request.ttft_slo) as u32);
        }
        let has_room = |decode| cluster.has_room(decode, request) && candidates.can_decode(decode);
        let peer =
            cluster.prefill.peer_of(prefill).filter(|&peer| peer < cluster.decode.len() && has_room(peer));
        let mut costs = std::mem::take(&mut self.decode);
        costs.clear();
        costs.extend(self.decode_costs(cluster, request, candidates, prefill));
        let decode = peer.or_else(|| columns::argmin(&costs));
        self.decode = costs;
        let Some(decode) = decode else { return cluster.no_decode(candidates) };
        if cluster.tbt_ms(decode, request) > request.tbt_slo && !request.must_run() {
            return Decision::reject(Reason::Tbt, 1_000);
        }
        Decision::run(prefill as u32, decode as u32)
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let mut costs: Vec<f32> = self.prefill_costs(cluster, request, candidates).collect();
        if let Some(prefill) = columns::argmin(&costs) {
            costs.extend(self.decode_costs(cluster, request, candidates, prefill));
        }
        costs
    }
}

impl LoraAffinity {
    /// Time to first token by prefill slot, ms, with what the adapter costs there; +infinity for one that cannot be chosen.
    fn prefill_costs(
        &self,
        cluster: &Cluster,
        request: &Request,
        candidates: Candidates<'_>,
    ) -> impl Iterator<Item = f32> {
        let t = &cluster.prefill;
        (0..t.len()).map(move |slot| {
            let has_adapter = candidates.prefill_has_adapter(slot);
            let adapter_ms =
                self.adapter_ms(request, has_adapter, t.holds_no_more_adapters(slot), t.identity[slot]);
            cluster.ttft_ms(slot, request, candidates) + adapter_ms
        })
    }

    /// What a request costs on a decode slot, ms.
    fn decode_costs(
        &self,
        cluster: &Cluster,
        request: &Request,
        candidates: Candidates<'_>,
        prefill: usize,
    ) -> impl Iterator<Item = f32> {
        (0..cluster.decode.len()).map(move |slot| {
            if !cluster.has_room(slot, request) || !candidates.can_decode(slot) {
                return f32::INFINITY;
            }
            let prompt = request.prompt_tokens.div_ceil(cluster.block_size_tokens.max(1));
            let moved = prompt.saturating_sub(candidates.prefix_of_decode(slot));
            let has_adapter = candidates.decode_has_adapter(slot);
            let is_full = cluster.decode.holds_no_more_adapters(slot);
            cluster.handover_ms(prefill, slot, moved)
                + cluster.tbt_ms(slot, request)
                + self.adapter_ms(request, has_adapter, is_full, cluster.decode.identity[slot])
        })
    }

    /// What it costs that the adapter is not there, ms. `is_full`: another one would have to go.
    fn adapter_ms(&self, request: &Request, has_adapter: bool, is_full: bool, identity: f32) -> f32 {
        if request.adapter == 0 || has_adapter {
            return 0.0;
        }
        let evict_ms = if is_full { self.evict_ms } else { 0.0 };
        self.load_ms + evict_ms + self.home_ms * order(request.adapter, identity as u32)
    }
}

/// Where an instance stands in the order of an adapter, from 0 to 1.
fn order(adapter: u32, identity: u32) -> f32 {
    let hash = mix(u64::from(adapter) << 32 | u64::from(identity));
    (hash >> 40) as f32 / (1u64 << 24) as f32
}

kvasir_policy::export_scheduler!(LoraAffinity);

#[cfg(test)]
mod tests;
