//! The load as a whole: who has booked how much of it, and how it will be at decode.

use super::{Decode, Fleet, InFlight, Phase};
use hashbrown::HashMap;

/// Tokens in flight by tenant. A tenant without any has no entry, so there are no more entries than
/// requests.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    tokens: HashMap<u32, u64>,
    total: u64,
    /// Tokens that a tenant is meant to have in flight at most; none is 0.
    quotas: HashMap<u32, u64>,
}

impl Tenants {
    pub(super) fn add(&mut self, tenant: u32, tokens: u64) {
        *self.tokens.entry(tenant).or_default() += tokens;
        self.total += tokens;
    }

    pub(super) fn remove(&mut self, tenant: u32, tokens: u64) {
        self.total -= tokens;
        let Some(left) = self.tokens.get_mut(&tenant) else { return };
        *left -= tokens;
        if *left == 0 {
            self.tokens.remove(&tenant);
        }
    }

    fn share(&self, tenant: u32) -> f64 {
        let own = self.tokens.get(&tenant).copied().unwrap_or(0);
        match self.quotas.get(&tenant).copied().unwrap_or(self.total) {
            0 => 0.0,
            whole => own as f64 / whole as f64,
        }
    }
}

impl Fleet {
    /// With these quotas of tokens in flight, by tenant.
    #[must_use]
    pub fn with_quotas(mut self, quotas: impl IntoIterator<Item = (u32, u64)>) -> Self {
        self.tenants.quotas = quotas.into_iter().collect();
        self
    }

    /// Part of its quota that the tenant has in flight (prompt and expected output), more than 1 beyond it; of a tenant without
    /// one, its part of all tokens in flight.
    pub fn tenant_share(&self, tenant: u32) -> f64 {
        self.tenants.share(tenant)
    }

    /// Part of the KV memory of available decode instances that is in use, 0 to 1.
    pub fn decode_memory_used(&self) -> f64 {
        let sizes = |d: &Decode| (u64::from(d.free_blocks), u64::from(d.spec.capacity_blocks));
        let (free, capacity) = self
            .decode
            .iter()
            .filter(|(_, d)| d.available)
            .map(|(_, d)| sizes(d))
            .fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
        if capacity == 0 { 0.0 } else { 1.0 - free as f64 / capacity as f64 }
    }

    /// Decode step time, ms, at the available instance where it will be least in `ahead_ms`; 0 if there
    /// is none.
    ///
    /// Until then each sequence grows by a token per step of now, those that reach their expected output
    /// leave, and those whose prefill ends arrive. A sequence of unknown output stays. Visits every
    /// request in flight: for control ticks, not for decisions.
    pub fn decode_step_forecast_ms(&self, ahead_ms: f64, now_ms: u64) -> f64 {
        let mut batches = vec![(0u32, 0u64); self.decode.len()];
        for request in self.requests.values() {
            let slot = request.admission.decode;
            let Some(d) = self.decode.get(slot).filter(|d| d.epoch == request.decode_epoch) else { continue };
            let context_tokens = match request.phase {
                Phase::Prefill => self.arriving(request, now_ms as f64 + ahead_ms),
                Phase::Decode => remaining(request, d, ahead_ms),
            };
            if let Some(tokens) = context_tokens {
                let batch = &mut batches[usize::from(slot)];
                *batch = (batch.0 + 1, batch.1 + tokens);
            }
        }
        let steps = self.decode.iter().filter(|(_, d)| d.available).map(|(slot, d)| {
            let (sequences, context_tokens) = batches[usize::from(slot)];
            d.spec.cost.step_ms(sequences, context_tokens)
        });
        steps.reduce(f64::min).unwrap_or(0.0)
    }

    /// Context that a request in prefill brings to decode, if it gets there by `end_ms`.
    fn arriving(&self, request: &InFlight, end_ms: f64) -> Option<u64> {
        let prefill = self.prefill.get(request.admission.prefill);
        let prefill = prefill.filter(|p| p.epoch == request.prefill_epoch);
        let shifted_ms = prefill.map_or(0.0, |p| p.shifted_ms);
        (request.prefill_end_ms + shifted_ms <= end_ms).then_some(request.context_tokens)
    }
}

/// Context of a sequence after `ahead_ms` more of decode, if it is still there.
fn remaining(request: &InFlight, decode: &Decode, ahead_ms: f64) -> Option<u64> {
    let step_ms = decode.spec.cost.step_ms(decode.sequences, decode.context_tokens);
    let grown = if step_ms > 0.0 { u64::from((ahead_ms / step_ms) as u32) } else { 0 };
    let left = u64::from(request.output_tokens.saturating_sub(request.decoded_tokens));
    (request.output_tokens == 0 || left > grown).then_some(request.context_tokens + grown)
}
