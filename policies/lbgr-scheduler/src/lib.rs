//! Greedy routing that learns (LBGR; Wu, Silwal and Zhang, arXiv 2601.18999): the instance with the least expected time to first token,
//! where expectations are put right by what they lacked there of late.
//!
//! Expected are the queue, the prefill of what is not stored there, and the instance's residual: the mean of measured less predicted time,
//! in which an outcome counts `memory` times as much as the one after it. That is recursive least squares of a constant with
//! forgetting. Of the decode instances the one with the least time between tokens is chosen. Nothing is fetched.
//!
//! The native twin hears of no outcomes, so it is greedy alone.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::learning::{End, Outcomes, Times};
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Learner, Scheduler, Settings};
use std::collections::BTreeMap;

/// Instances of which a residual is kept; beyond that, the one with the lowest identity, which registered first, is forgotten.
const INSTANCES: usize = 1_024;
const VERSION: u8 = 1;
/// Of one instance in what is published: identity and residual.
const RECORD: usize = 8;
/// No outcome is believed to be further from what was predicted, ms.
const MOST_MS: f64 = 3_600_000.0;

/// See the module documentation.
pub struct Lbgr {
    memory: f64,
    /// By identity; the learner's.
    residuals: BTreeMap<u32, Residual>,
    /// What was adopted: ms by identity.
    known: BTreeMap<u32, f32>,
    ttft: Vec<f32>,
}

#[derive(Clone, Copy, Default)]
struct Residual {
    ms: f64,
    /// Of all outcomes so far, the last one having 1.
    weight: f64,
}

impl Default for Lbgr {
    fn default() -> Self {
        Self { memory: 0.95, residuals: BTreeMap::new(), known: BTreeMap::new(), ttft: Vec::new() }
    }
}

impl Scheduler for Lbgr {
    fn describe(&self) -> Description {
        Description::scheduler("lbgr", env!("CARGO_PKG_VERSION")).setting(
            "memory",
            Self::default().memory,
            "how much an outcome counts beside the next one of its instance; 1 forgets nothing",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.memory = settings.number("memory", 0.0..=1.0)?;
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

impl Lbgr {
    /// Time to first token, ms; +infinity for a slot that cannot be chosen.
    fn expected(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>, slot: usize) -> f32 {
        let residual = self.known.get(&(cluster.prefill.identity[slot] as u32)).copied().unwrap_or(0.0);
        cluster.ttft_ms(slot, request, candidates) + residual
    }
}

impl Learner for Lbgr {
    fn observe(&mut self, outcomes: Outcomes<'_>) {
        for outcome in outcomes.iter().filter(|outcome| outcome.end == End::Finished && outcome.prefill != 0)
        {
            let Times { predicted: Some(predicted), measured: Some(measured) } = outcome.ttft_ms else {
                continue;
            };
            let lacked = f64::from(measured) - f64::from(predicted);
            if !lacked.is_finite() {
                continue;
            }
            let residual = self.residuals.entry(outcome.prefill).or_default();
            residual.weight = residual.weight * self.memory + 1.0;
            residual.ms += (lacked.clamp(-MOST_MS, MOST_MS) - residual.ms) / residual.weight;
            if self.residuals.len() > INSTANCES {
                self.residuals.pop_first();
            }
        }
    }

    fn publish(&mut self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        for (identity, residual) in &self.residuals {
            bytes.extend(identity.to_le_bytes());
            bytes.extend((residual.ms as f32).to_le_bytes());
        }
        bytes
    }

    fn adopt(&mut self, knowledge: &[u8]) {
        let Some((&VERSION, records)) = knowledge.split_first() else { return };
        let record = |&[a, b, c, d, e, f, g, h]: &[u8; RECORD]| {
            (u32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]))
        };
        self.known = records.as_chunks().0.iter().map(record).filter(|(_, ms)| ms.is_finite()).collect();
    }
}

kvasir_policy::export_learning_scheduler!(Lbgr);

#[cfg(test)]
mod tests;
