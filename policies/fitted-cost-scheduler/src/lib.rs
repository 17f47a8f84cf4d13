//! Learns what a prefill costs at each instance instead of believing what the instance registered.
//!
//! The learner fits c0, c1 and c2 of every instance to the times of prefills, where instances measure them, else to those times to
//! first token that seem to be without a wait ([`kvasir_policy::fit`]). Those that decide take the instance with the least expected time by these; where too little is known
//! they take the registered costs, and no fit leads further away from them than `most-times`. Of the decode
//! instances the one with the least time between tokens is chosen. Nothing is fetched.
//!
//! Nothing is exported: identities of instances do not outlast the host, and a dozen outcomes teach a cost again. The native
//! twin hears of no outcomes and believes what is registered.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::fit::{Fit, terms};
use kvasir_policy::learning::{End, Outcomes, Times};
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Learner, Scheduler, Settings};
use std::collections::BTreeMap;

/// Instances of which a fit is kept; beyond that, the one with the lowest identity, which registered first, is forgotten.
const INSTANCES: usize = 1_024;
/// An instance that had no part in so many outcomes is tried again as if nothing was known of it.
const STALE: u64 = 400;
const VERSION: u8 = 1;
/// Of one instance in what is published: identity, then three costs and the mean as floats.
const RECORD: usize = 20;

/// See the module documentation.
pub struct FittedCost {
    most_times: f32,
    /// By identity; the learner's.
    fits: BTreeMap<u32, Fit>,
    /// What was adopted, by identity.
    known: BTreeMap<u32, Known>,
    ttft: Vec<f32>,
    outcomes: u64,
}

#[derive(Clone, Copy)]
struct Known {
    costs: [f32; 3],
    mean_ms: f32,
}

impl Default for FittedCost {
    fn default() -> Self {
        let (fits, known) = Default::default();
        Self { most_times: 10.0, fits, known, ttft: Vec::new(), outcomes: 0 }
    }
}

impl Scheduler for FittedCost {
    fn describe(&self) -> Description {
        Description::scheduler("fitted-cost", env!("CARGO_PKG_VERSION")).setting(
            "most-times",
            Self::default().most_times,
            "how many times larger or smaller than registered a cost is believed to be at most",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.most_times = settings.number("most-times", 1.0..=1e3)? as f32;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let mut ttft = std::mem::take(&mut self.ttft);
        ttft.clear();
        ttft.extend((0..cluster.prefill.len()).map(|slot| self.expected(cluster, request, candidates, slot)));
        let decision = cluster.fastest(request, candidates, &ttft);
        self.ttft = ttft;
        decision
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        (0..cluster.prefill.len()).map(|slot| self.expected(cluster, request, candidates, slot)).collect()
    }
}

impl FittedCost {
    /// Time to first token, ms; +infinity for a slot that cannot be chosen.
    fn expected(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>, slot: usize) -> f32 {
        let t = &cluster.prefill;
        if t.available[slot] != 1.0 || !candidates.can_prefill(slot) {
            return f32::INFINITY;
        }
        let prompt = request.prompt_tokens as f32;
        let cached = (candidates.prefix_of(slot) as f32 * cluster.block_size_tokens as f32).min(prompt);
        let computed = prompt - cached;
        let registered = cluster.prefill_ms(slot, request, candidates.prefix_of(slot));
        let queue = cluster.queue_ms(slot);
        let Some(known) = self.known.get(&(t.identity[slot] as u32)) else { return queue + registered };
        let costs = terms(computed.into(), cached.into()).into_iter().zip(known.costs);
        let fitted = costs.map(|(term, cost)| term * f64::from(cost)).sum::<f64>() as f32;
        let most = self.most_times;
        let prefill = fitted.max(registered / most).min(registered * most);
        // The host moves the end of the queue when a prefill ends, but until then a slow one stands in no queue.
        prefill + queue.max((t.queued[slot] - 0.5) * known.mean_ms)
    }
}

impl Learner for FittedCost {
    fn observe(&mut self, outcomes: Outcomes<'_>) {
        for outcome in outcomes.iter() {
            let Times { predicted: Some(predicted_ms), measured } = outcome.prefill_ms else { continue };
            let ttft_ms = outcome.ttft_ms.measured.filter(|_| outcome.fetched_blocks == 0);
            let nothing = measured.or(ttft_ms).is_none();
            if nothing || outcome.end != End::Finished || outcome.prefill == 0 {
                continue;
            }
            let computed = outcome.prompt_tokens.saturating_sub(outcome.cached_tokens);
            let terms = terms(computed.into(), outcome.cached_tokens.into());
            self.outcomes += 1;
            let fit = self.fits.entry(outcome.prefill).or_default();
            match (measured, ttft_ms) {
                (Some(ms), _) => fit.learn_measured(&terms, predicted_ms.into(), ms.into()),
                (None, Some(ms)) => fit.learn(&terms, predicted_ms.into(), ms.into()),
                (None, None) => {}
            }
            fit.last = self.outcomes;
            if self.fits.len() > INSTANCES {
                self.fits.pop_first();
            }
        }
        let since = self.outcomes.saturating_sub(STALE);
        self.fits.retain(|_, fit| fit.last >= since);
    }

    fn publish(&mut self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        for (identity, fit) in self.fits.iter().filter(|(_, fit)| fit.is_enough()) {
            bytes.extend(identity.to_le_bytes());
            let values = fit.costs.iter().chain([&fit.mean_ms]);
            bytes.extend(values.flat_map(|&value| (value as f32).to_le_bytes()));
        }
        bytes
    }

    fn adopt(&mut self, knowledge: &[u8]) {
        let Some((&VERSION, records)) = knowledge.split_first() else { return };
        self.known.clear();
        for record in records.as_chunks::<RECORD>().0 {
            let word = |at: usize| [0, 1, 2, 3].map(|byte| record[4 * at + byte]);
            let value = |at: usize| f32::from_le_bytes(word(at)).max(0.0);
            let known = Known { costs: [1, 2, 3].map(value), mean_ms: value(4) };
            self.known.insert(u32::from_le_bytes(word(0)), known);
        }
    }
}

kvasir_policy::export_learning_scheduler!(FittedCost);

#[cfg(test)]
mod tests;
