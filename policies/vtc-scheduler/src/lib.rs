//! Fairness between tenants by virtual token counters (Sheng et al., OSDI '24).
//!
//! Each tenant has a counter of the tokens served, those of output at a larger weight; while instances are busy, a tenant
//! that is far ahead of the one least served waits. A tenant that comes back is lifted to the least counter of those that
//! are there, so that idling saves nothing up.
//!
//! The counters are the tenants' memos: the host adds the charge when a decision is booked, so they are exact over all
//! workers and however often one is asked. What an instance keeps itself is only what it was told last.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Placement, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

/// Tenants that an instance remembers; of more, the one that it heard of longest ago is forgotten.
const TENANTS: usize = 64;

/// See the module documentation.
pub struct Vtc {
    output_weight: u64,
    lead_tokens: u64,
    busy_ms: f32,
    active_requests: u64,
    /// Those heard of last are last.
    tenants: Vec<Tenant>,
    requests: u64,
}

#[derive(Clone, Copy)]
struct Tenant {
    tenant: u32,
    counter: u64,
    /// Number of the request in which it was heard of.
    heard: u64,
}

impl Default for Vtc {
    fn default() -> Self {
        Self {
            output_weight: 2,
            lead_tokens: 20_000,
            busy_ms: 1_000.0,
            active_requests: 200,
            tenants: Vec::new(),
            requests: 0,
        }
    }
}

impl Scheduler for Vtc {
    fn describe(&self) -> Description {
        let Self { output_weight, lead_tokens, busy_ms, active_requests, .. } = Self::default();
        Description::scheduler("vtc", env!("CARGO_PKG_VERSION"))
            .setting("output-weight", output_weight, "tokens of a prompt that one token of output counts as")
            .setting("lead-tokens", lead_tokens, "tokens that a tenant may be ahead of the one least served")
            .setting(
                "busy-ms",
                busy_ms,
                "shortest prefill queue, ms, from which on tenants that lead must wait",
            )
            .setting("active-requests", active_requests, "requests after which a silent tenant is away")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.output_weight = settings.number("output-weight", 0.0..=1e6)? as u64;
        self.lead_tokens = settings.number("lead-tokens", 0.0..=1e15)? as u64;
        self.busy_ms = settings.number("busy-ms", 0.0..=1e9)? as f32;
        self.active_requests = settings.number("active-requests", 1.0..=1e9)? as u64;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let least_served = self.least_served_beside(request.tenant);
        // A tenant that comes back, or is new, has what the others have at least. If the answer is not booked, and it asks
        // again, it was heard of with just that.
        let lifted = self.counter_of(request.tenant).or(least_served).unwrap_or(0);
        let counter = request.tenant_memo.max(lifted);
        self.hear_of(request.tenant, counter);
        let Some(prefill) = shortest_queue(cluster, candidates) else {
            return Decision::reject(Reason::NoInstance, 1_000);
        };
        let queue_ms = cluster.queue_ms(prefill);
        let leads = least_served.is_some_and(|least| counter > least.saturating_add(self.lead_tokens));
        if leads && queue_ms > self.busy_ms && !request.must_run() {
            return Decision::reject(Reason::Policy, queue_ms.min(60_000.0) as u32);
        }
        let Some(decode) = smallest_batch(cluster, request, candidates) else {
            let any = cluster.decode.available.contains(&1.0);
            return Decision::reject(if any { Reason::NoMemory } else { Reason::NoInstance }, 1_000);
        };
        let tokens = u64::from(request.prompt_tokens) + self.output_weight * u64::from(request.output_tokens);
        let lift = counter - request.tenant_memo;
        Decision::Run(Placement {
            prefill: prefill as u32,
            decode: decode as u32,
            tenant_charge: lift.saturating_add(tokens),
            session_memo: request.session_memo,
            ..Placement::default()
        })
    }

    fn explain(&self, cluster: &Cluster, _: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        (0..cluster.prefill.len()).map(|slot| queue(cluster, candidates, slot)).collect()
    }
}

impl Vtc {
    fn active(&self) -> impl Iterator<Item = &Tenant> {
        let since = self.requests.saturating_sub(self.active_requests);
        self.tenants.iter().filter(move |known| known.heard >= since)
    }

    /// Of a tenant that is there.
    fn counter_of(&self, tenant: u32) -> Option<u64> {
        self.active().find(|known| known.tenant == tenant).map(|known| known.counter)
    }

    /// The least counter of the other tenants that are there.
    fn least_served_beside(&self, tenant: u32) -> Option<u64> {
        self.active().filter(|known| known.tenant != tenant).map(|known| known.counter).min()
    }

    fn hear_of(&mut self, tenant: u32, counter: u64) {
        self.requests += 1;
        self.tenants.retain(|known| known.tenant != tenant);
        if self.tenants.len() == TENANTS {
            self.tenants.remove(0);
        }
        self.tenants.push(Tenant { tenant, counter, heard: self.requests });
    }
}

/// Prefill queue, ms; +infinity for a slot that cannot be chosen.
fn queue(cluster: &Cluster, candidates: Candidates<'_>, slot: usize) -> f32 {
    let free_at = if candidates.can_prefill(slot) { cluster.prefill.free_at[slot] } else { f32::INFINITY };
    (free_at - cluster.now).max(0.0)
}

fn shortest_queue(cluster: &Cluster, candidates: Candidates<'_>) -> Option<usize> {
    least((0..cluster.prefill.len()).map(|slot| queue(cluster, candidates, slot)))
}

fn smallest_batch(cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Option<usize> {
    let t = &cluster.decode;
    let tokens = request.prompt_tokens as f32 + request.output_tokens as f32;
    let blocks = (tokens / (cluster.block_size_tokens as f32).max(1.0)).ceil();
    least((0..t.len()).map(|slot| {
        let fits = t.room[slot] >= blocks && candidates.can_decode(slot);
        if fits { t.sequences[slot] + t.arriving_sequences[slot] } else { f32::INFINITY }
    }))
}

/// The first slot with the least value that is finite.
fn least(values: impl Iterator<Item = f32>) -> Option<usize> {
    let finite = values.enumerate().filter(|(_, value)| value.is_finite());
    finite.reduce(|best, next| if next.1 < best.1 { next } else { best }).map(|(slot, _)| slot)
}

kvasir_policy::export_scheduler!(Vtc);

#[cfg(test)]
mod tests;
