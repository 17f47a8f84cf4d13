//! Prefill where decode is, or elsewhere: conditional disaggregation as NVIDIA Dynamo's router has it.
//!
//! The decode instance is chosen first: least time until its next token, over the hand-over of what it lacks. Where it can
//! do the prefill itself, it does so if no more than `local-tokens` of the prompt are left to compute there, which
//! disturbs those it decodes little and moves nothing, or if all others have a longer queue than `queue-ms` and than
//! itself. Otherwise the prefill runs where its first token is at the decode instance soonest, on an instance made for
//! that if there is one.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

/// See the module documentation.
pub struct LocalOrRemote {
    local_tokens: u32,
    queue_ms: f32,
}

impl Default for LocalOrRemote {
    fn default() -> Self {
        Self { local_tokens: 512, queue_ms: 2_000.0 }
    }
}

impl Scheduler for LocalOrRemote {
    fn describe(&self) -> Description {
        let Self { local_tokens, queue_ms } = Self::default();
        Description::scheduler("local-or-remote", env!("CARGO_PKG_VERSION"))
            .setting("local-tokens", local_tokens, "tokens that a decode instance computes itself, if it can")
            .setting(
                "queue-ms",
                queue_ms,
                "queue elsewhere, ms, from which on it computes longer prompts too",
            )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.local_tokens = settings.number("local-tokens", 0.0..=4e9)? as u32;
        self.queue_ms = settings.number("queue-ms", 0.0..=1e7)? as f32;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let asked = Asked { cluster, request, candidates };
        let Some(decode) = asked.decode() else { return cluster.no_decode(candidates) };
        let Some(prefill) = self.prefill(&asked, decode) else {
            return Decision::reject(Reason::NoInstance, 1_000);
        };
        let ttft_ms = asked.queue(prefill) + asked.compute(prefill);
        let rejection = Decision::missed_slo(request, ttft_ms, asked.step(decode));
        rejection.unwrap_or(Decision::run(prefill as u32, decode as u32))
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let asked = Asked { cluster, request, candidates };
        let Some(decode) = asked.decode() else { return Vec::new() };
        let chosen = self.prefill(&asked, decode);
        let cost = |slot| if asked.can_prefill(slot) { asked.cost(slot, decode) } else { f32::INFINITY };
        // The rule comes before the cost: what it chose is the least.
        let score = |slot| if Some(slot) == chosen { 0.0 } else { cost(slot) };
        (0..cluster.prefill.len()).map(score).collect()
    }
}

impl LocalOrRemote {
    /// The prefill slot for a request that is decoded in slot `decode`.
    fn prefill(&self, asked: &Asked<'_>, decode: usize) -> Option<usize> {
        let own = asked.cluster.decode.peer_of(decode).filter(|&own| asked.can_prefill(own));
        if own.is_some_and(|own| asked.computed(own) <= self.local_tokens as f32) {
            return own;
        }
        let alone = |slot: &usize| asked.cluster.prefill.peer_of(*slot).is_none();
        let others =
            || (0..asked.cluster.prefill.len()).filter(|&slot| Some(slot) != own && asked.can_prefill(slot));
        let soonest = |a: &usize, b: &usize| asked.cost(*a, decode).total_cmp(&asked.cost(*b, decode));
        let remote = others().filter(alone).min_by(soonest).or_else(|| others().min_by(soonest));
        match (own, remote) {
            (Some(own), Some(remote)) => {
                let queue = asked.queue(remote);
                let local = queue > self.queue_ms && queue > asked.queue(own);
                Some(if local { own } else { remote })
            }
            (own, remote) => remote.or(own),
        }
    }
}

/// One question, with what follows from it for each slot. Times in ms.
struct Asked<'a> {
    cluster: &'a Cluster,
    request: &'a Request,
    candidates: Candidates<'a>,
}

impl Asked<'_> {
    fn can_prefill(&self, slot: usize) -> bool {
        self.cluster.prefill.available.get(slot) == Some(&1.0) && self.candidates.can_prefill(slot)
    }

    fn decode(&self) -> Option<usize> {
        let t = &self.cluster.decode;
        let cost = |slot: &usize| self.step(*slot) + self.missing(*slot) as f32 * t.handover_per_block[*slot];
        self.cluster.decodes(self.request, self.candidates).min_by(|a, b| cost(a).total_cmp(&cost(b)))
    }

    /// Blocks of the prompt that are not at a decode slot.
    fn missing(&self, decode: usize) -> u32 {
        let prompt = self.request.prompt_tokens.div_ceil(self.cluster.block_size_tokens.max(1));
        prompt.saturating_sub(self.candidates.prefix_of_decode(decode))
    }

    /// Time between tokens once the request has joined.
    fn step(&self, decode: usize) -> f32 {
        self.cluster.tbt_ms(decode, self.request)
    }

    /// Tokens that a prefill slot would compute.
    fn computed(&self, prefill: usize) -> f32 {
        let stored = self.candidates.prefix_of(prefill) as f32 * self.cluster.block_size_tokens as f32;
        (self.request.prompt_tokens as f32 - stored).max(0.0)
    }

    fn queue(&self, prefill: usize) -> f32 {
        self.cluster.queue_ms(prefill)
    }

    fn compute(&self, prefill: usize) -> f32 {
        let t = &self.cluster.prefill;
        let (computed, prompt) = (self.computed(prefill), self.request.prompt_tokens as f32);
        let per_pair = t.half_cost_per_pair[prefill] * (2.0 * prompt - computed);
        t.cost_fixed[prefill] + computed * (t.cost_per_token[prefill] + per_pair)
    }

    /// Until the prompt is at the decode slot.
    fn cost(&self, prefill: usize, decode: usize) -> f32 {
        let moved = self.cluster.handover_ms(prefill, decode, self.missing(decode));
        self.queue(prefill) + self.compute(prefill) + moved
    }
}

kvasir_policy::export_scheduler!(LocalOrRemote);

#[cfg(test)]
mod tests;
