//! The load as a whole: who has booked how much of it, and how it will be at decode.

use super::{Decode, Fleet, InFlight, Phase};
use hashbrown::HashMap;

/// Requests over which the mean output is taken, about.
const OUTPUTS_REMEMBERED: u32 = 256;
/// One sequence, of which parts are expected to be there. Sums of whole numbers are the same in any order.
const ONE: u64 = 1 << 20;

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

/// How long outputs were of late, for requests that do not say how long theirs will be.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    mean_tokens: f64,
    seen: u32,
}

impl Outputs {
    /// A request ended after so many tokens of decode.
    pub(super) fn add(&mut self, tokens: u32) {
        self.seen = (self.seen + 1).min(OUTPUTS_REMEMBERED);
        self.mean_tokens += (f64::from(tokens) - self.mean_tokens) / f64::from(self.seen);
    }

    /// Part of a sequence that is expected to be there after `tokens` more, of [`ONE`]: what is left of an output is taken to
    /// be the same however much of it there was, so it goes by the mean alone. All of it, before any has ended.
    fn left_after(&self, tokens: u64) -> u64 {
        let left = if self.mean_tokens > 0.0 { (-(tokens as f64) / self.mean_tokens).exp() } else { 1.0 };
        (left * ONE as f64) as u64
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
    /// leave, and those whose prefill ends arrive. Of sequences that do not say how long they will be, as many leave as by the
    /// mean output of late. Visits every request in flight: for control ticks, not for decisions.
    pub fn decode_step_forecast_ms(&self, ahead_ms: f64, now_ms: u64) -> f64 {
        let mut batches = vec![(0u64, 0u64); self.decode.len()];
        for request in self.requests.values() {
            let slot = request.admission.decode;
            let Some(d) = self.decode.get(slot).filter(|d| d.epoch == request.decode_epoch) else { continue };
            let (sequences, context_tokens) = match request.phase {
                Phase::Prefill => self.arriving(request, now_ms as f64 + ahead_ms),
                Phase::Decode => self.remaining(request, d, ahead_ms),
            };
            let batch = &mut batches[usize::from(slot)];
            *batch = (batch.0 + sequences, batch.1.saturating_add(sequences.saturating_mul(context_tokens)));
        }
        let steps = self.decode.iter().filter(|(_, d)| d.available).map(|(slot, d)| {
            let whole = |parts: u64| (parts + ONE / 2) / ONE;
            let (sequences, context_tokens) = batches[usize::from(slot)];
            d.spec.cost.step_ms(whole(sequences) as u32, whole(context_tokens))
        });
        steps.reduce(f64::min).unwrap_or(0.0)
    }

    /// Whether a request in prefill gets to decode by `end_ms`, [`ONE`] or 0, and the context that it brings.
    fn arriving(&self, request: &InFlight, end_ms: f64) -> (u64, u64) {
        let prefill = self.prefill.get(request.admission.prefill);
        let prefill = prefill.filter(|p| p.epoch == request.prefill_epoch);
        let shifted_ms = prefill.map_or(0.0, |p| p.shifted_ms);
        let arrives = request.prefill_end_ms + shifted_ms <= end_ms;
        (if arrives { ONE } else { 0 }, request.context_tokens)
    }

    /// How much of a sequence is expected to be there after `ahead_ms` more of decode, 0 to [`ONE`], and its context then.
    fn remaining(&self, request: &InFlight, decode: &Decode, ahead_ms: f64) -> (u64, u64) {
        let step_ms = decode.spec.cost.step_ms(decode.sequences, decode.context_tokens);
        let grown = if step_ms > 0.0 { u64::from((ahead_ms / step_ms) as u32) } else { 0 };
        let left = u64::from(request.output_tokens.saturating_sub(request.decoded_tokens));
        let there = match request.output_tokens {
            0 => self.outputs.left_after(grown),
            _ if left > grown => ONE,
            _ => 0,
        };
        (there, request.context_tokens + grown)
    }
}
