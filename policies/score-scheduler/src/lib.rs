//! Filter, score, pick, as llm-d's scheduler does it: each candidate gets a weighted sum of scores from 0 to 1, and the
//! largest wins.
//!
//! Scorers: prefix held, load (queue of a prefill, sequences of a decode instance, each beside the others'), the session's
//! last instances (kept in its memo by identity, so that another instance in the slot does not inherit them), and the
//! request's adapter. Decode is chosen first. Where it can do the prefill itself and misses no more than `local-tokens`
//! of the prompt, the request stays there; else a prefill instance is chosen.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Placement, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

/// See the module documentation.
pub struct Score {
    weights: Weights,
    local_tokens: u32,
}

#[derive(Clone, Copy)]
struct Weights {
    prefix: f32,
    load: f32,
    session: f32,
    adapter: f32,
}

impl Default for Score {
    fn default() -> Self {
        Self { weights: Weights { prefix: 3.0, load: 2.0, session: 1.0, adapter: 1.0 }, local_tokens: 256 }
    }
}

/// What is known of one candidate, before it is seen beside the others.
#[derive(Clone, Copy)]
struct Candidate {
    slot: usize,
    /// Blocks of the prompt held.
    prefix: u32,
    load: f32,
    /// The session's last request was here.
    session: bool,
    adapter: bool,
}

impl Scheduler for Score {
    fn describe(&self) -> Description {
        let Self { weights: Weights { prefix, load, session, adapter }, local_tokens } = Self::default();
        Description::scheduler("score", env!("CARGO_PKG_VERSION"))
            .setting("prefix-weight", prefix, "weight of the part of the prompt that is stored there")
            .setting("load-weight", load, "weight of being the least loaded")
            .setting("session-weight", session, "weight of having served the session's last request")
            .setting("adapter-weight", adapter, "weight of having the request's adapter loaded")
            .setting(
                "local-tokens",
                local_tokens,
                "tokens that a decode instance may prefill itself, if it can",
            )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        let weight = |name: &str| settings.number(name, 0.0..=1e6).map(|weight| weight as f32);
        self.weights = Weights {
            prefix: weight("prefix-weight")?,
            load: weight("load-weight")?,
            session: weight("session-weight")?,
            adapter: weight("adapter-weight")?,
        };
        self.local_tokens = settings.number("local-tokens", 0.0..=4e9)? as u32;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let Some(decode) = self.best(request, cluster, decodes(cluster, request, candidates)) else {
            return cluster.no_decode(candidates);
        };
        let held = candidates.prefix_of_decode(decode).saturating_mul(cluster.block_size_tokens);
        let missing = request.prompt_tokens.saturating_sub(held);
        let own = cluster.decode.peer_of(decode).filter(|&peer| can_prefill(cluster, candidates, peer));
        let prefill = match own.filter(|_| missing <= self.local_tokens) {
            Some(peer) => Some(peer),
            None => self.best(request, cluster, prefills(cluster, request, candidates)),
        };
        let Some(prefill) = prefill else { return Decision::reject(Reason::NoInstance, 1_000) };
        Decision::Run(Placement {
            prefill: prefill as u32,
            decode: decode as u32,
            session_memo: memo(cluster.prefill.identity[prefill], cluster.decode.identity[decode]),
            ..Placement::default()
        })
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let mut scores = vec![f32::INFINITY; cluster.prefill.len() + cluster.decode.len()];
        let (prefill, decode) = scores.split_at_mut(cluster.prefill.len());
        for (table, found) in [
            (prefill, prefills(cluster, request, candidates)),
            (decode, decodes(cluster, request, candidates)),
        ] {
            // Smaller is better here.
            self.scores(request, cluster, &found).for_each(|(slot, score)| table[slot] = -score);
        }
        scores
    }
}

impl Score {
    /// The first slot with the largest score.
    fn best(&self, request: &Request, cluster: &Cluster, candidates: Vec<Candidate>) -> Option<usize> {
        let scores = self.scores(request, cluster, &candidates);
        scores
            .fold(None, |best: Option<(usize, f32)>, next| best.filter(|b| next.1 <= b.1).or(Some(next)))
            .map(|b| b.0)
    }

    fn scores<'a>(
        &self,
        request: &Request,
        cluster: &Cluster,
        candidates: &'a [Candidate],
    ) -> impl Iterator<Item = (usize, f32)> + use<'a> {
        let w = self.weights;
        let blocks = request.prompt_tokens.div_ceil(cluster.block_size_tokens.max(1)).max(1) as f32;
        let loads = candidates.iter().map(|c| c.load);
        let (least, most) =
            loads.fold((f32::MAX, 0.0f32), |(least, most), load| (least.min(load), most.max(load)));
        candidates.iter().map(move |c| {
            let load = if most > least { (most - c.load) / (most - least) } else { 1.0 };
            let score = w.prefix * (c.prefix as f32 / blocks).min(1.0)
                + w.load * load
                + w.session * f32::from(u8::from(c.session))
                + w.adapter * f32::from(u8::from(c.adapter));
            (c.slot, score)
        })
    }
}

/// The session's last instances: identities of prefill and decode, which are below 2^24 and not 0.
fn memo(prefill: f32, decode: f32) -> u64 {
    u64::from(prefill as u32) << 32 | u64::from(decode as u32)
}

fn can_prefill(cluster: &Cluster, candidates: Candidates<'_>, slot: usize) -> bool {
    cluster.prefill.available.get(slot) == Some(&1.0) && candidates.can_prefill(slot)
}

fn prefills(cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<Candidate> {
    let t = &cluster.prefill;
    let last = (request.session_memo >> 32) as u32;
    let candidate = |slot| Candidate {
        slot,
        prefix: candidates.prefix_of(slot),
        load: cluster.queue_ms(slot),
        session: last != 0 && t.identity[slot] as u32 == last,
        adapter: candidates.prefill_has_adapter(slot),
    };
    (0..t.len()).filter(|&slot| can_prefill(cluster, candidates, slot)).map(candidate).collect()
}

fn decodes(cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<Candidate> {
    let t = &cluster.decode;
    let last = request.session_memo as u32;
    let candidate = |slot| Candidate {
        slot,
        prefix: candidates.prefix_of_decode(slot),
        load: (t.sequences[slot] + t.arriving_sequences[slot]).max(0.0),
        session: last != 0 && t.identity[slot] as u32 == last,
        adapter: candidates.decode_has_adapter(slot),
    };
    cluster.decodes(request, candidates).map(candidate).collect()
}

kvasir_policy::export_scheduler!(Score);

#[cfg(test)]
mod tests;
