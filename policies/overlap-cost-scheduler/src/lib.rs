//! The cost function of Dynamo's KV router: `overlap-weight` × blocks to prefill + blocks in use for decode, and a choice
//! by softmax of a temperature, 0 being the least cost.
//!
//! A block that is stored but not in HBM has to be brought there. Where instances say in which tier their blocks lie, it saves
//! `dram-weight` of a block to prefill if it is in DRAM, and `below-weight` if it is below.
//!
//! An instance that does both is weighed as a whole, and a request stays on it. Elsewhere the prefill instance is chosen
//! by the blocks that wait and those that are new there, and the decode instance by its blocks in use.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::draw::split_mix;
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings, math};

/// Costs by slot, kept to spare an allocation per decision.
pub struct OverlapCost {
    weights: Weights,
    temperature: f64,
    costs: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Weights {
    overlap: f32,
    /// By tier: in HBM, in DRAM, below.
    tiers: [f32; 3],
}

impl Default for OverlapCost {
    fn default() -> Self {
        let weights = Weights { overlap: 1.0, tiers: [1.0; 3] };
        Self { weights, temperature: 0.0, costs: Vec::new() }
    }
}

impl Scheduler for OverlapCost {
    fn describe(&self) -> Description {
        Description::scheduler("overlap-cost", env!("CARGO_PKG_VERSION"))
            .setting("overlap-weight", 1, "weight of a block to prefill beside a block in use for decode")
            .setting(
                "dram-weight",
                1,
                "part of a block to prefill that is saved by one stored in DRAM, 0 to 1",
            )
            .setting("below-weight", 1, "the same of one stored below DRAM")
            .setting("temperature", 0, "0 takes the least cost; larger values choose more at random")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.weights.overlap = settings.number("overlap-weight", 0.0..=1e6)? as f32;
        let saved = |name: &str| settings.number(name, 0.0..=1.0).map(|part| part as f32);
        self.weights.tiers = [1.0, saved("dram-weight")?, saved("below-weight")?];
        self.temperature = settings.number("temperature", 0.0..=1e6)?;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let none = Decision::reject(Reason::NoInstance, 1_000);
        let weights = self.weights;
        self.costs.clear();
        let slots = 0..cluster.prefill.len();
        self.costs.extend(slots.map(|slot| prefill_cost(cluster, request, candidates, weights, slot)));
        let Some(prefill) = pick(&mut self.costs, self.temperature, uniform(request.seed)) else {
            return none;
        };
        let has_room = |decode: usize| candidates.can_decode(decode) && cluster.has_room(decode, request);
        if let Some(peer) = cluster.prefill.peer_of(prefill).filter(|&peer| peer < cluster.decode.len())
            && has_room(peer)
        {
            return Decision::run(prefill as u32, peer as u32);
        }
        self.costs.clear();
        let in_use = |slot| if has_room(slot) { blocks_in_use(cluster, slot) } else { f32::INFINITY };
        self.costs.extend((0..cluster.decode.len()).map(in_use));
        match pick(&mut self.costs, self.temperature, uniform(!request.seed)) {
            Some(decode) => Decision::run(prefill as u32, decode as u32),
            None if cluster.decode.available.contains(&1.0) => Decision::reject(Reason::NoMemory, 1_000),
            None => none,
        }
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let cost = |slot| prefill_cost(cluster, request, candidates, self.weights, slot);
        (0..cluster.prefill.len()).map(cost).collect()
    }
}

/// Of a prefill slot and, if it decodes too, of the whole instance, in blocks; +infinity if it cannot be chosen.
fn prefill_cost(
    cluster: &Cluster,
    request: &Request,
    candidates: Candidates<'_>,
    weights: Weights,
    slot: usize,
) -> f32 {
    let t = &cluster.prefill;
    if t.available[slot] != 1.0 || !candidates.can_prefill(slot) {
        return f32::INFINITY;
    }
    let block = (cluster.block_size_tokens as f32).max(1.0);
    let queue_ms = cluster.queue_ms(slot);
    // The host tells the queue in ms; at this speed these are so many tokens.
    let per_token = t.cost_per_token[slot];
    let queued = if per_token > 0.0 { queue_ms / per_token / block } else { 0.0 };
    let saved = weights.tiers.iter().zip(candidates.prefix_by_tier(slot));
    let saved: f32 = saved.map(|(weight, blocks)| weight * blocks as f32).sum();
    let new = (request.prompt_tokens as f32 / block).ceil() - saved;
    let peer = t.peer_of(slot).filter(|&peer| peer < cluster.decode.len());
    let in_use = peer.map_or(0.0, |peer| blocks_in_use(cluster, peer));
    weights.overlap * (queued + new.max(0.0)) + in_use
}

fn blocks_in_use(cluster: &Cluster, decode: usize) -> f32 {
    cluster.decode.capacity_blocks[decode] - cluster.decode.free_blocks[decode]
}

/// A slot by softmax over the costs, stretched to 0 to 1 and negated; the least one at temperature 0. `uniform`: 0 to 1.
/// `None` if no cost is finite. The costs are used up.
fn pick(costs: &mut [f32], temperature: f64, uniform: f64) -> Option<usize> {
    let best = kvasir_policy::columns::argmin(costs)?;
    let least = costs[best];
    if temperature == 0.0 || least == f32::NEG_INFINITY {
        return Some(best);
    }
    let finite = |cost: &f32| cost.is_finite();
    let most = costs.iter().copied().filter(finite).fold(least, f32::max);
    let spread = f64::from(most - least);
    if spread.is_nan() || spread <= 0.0 || spread.is_infinite() {
        let equals: Vec<usize> = (0..costs.len()).filter(|&slot| costs[slot] == least).collect();
        return equals.get((uniform * equals.len() as f64) as usize).copied().or(Some(best));
    }
    for cost in &mut *costs {
        let weight = math::exp(-f64::from(*cost - least) / spread / temperature) as f32;
        *cost = if cost.is_finite() { weight } else { 0.0 };
    }
    let mut left = uniform * costs.iter().map(|&weight| f64::from(weight)).sum::<f64>();
    for (slot, &weight) in costs.iter().enumerate() {
        left -= f64::from(weight);
        if left < 0.0 && weight > 0.0 {
            return Some(slot);
        }
    }
    Some(best)
}

/// A number from 0 to below 1 out of a seed.
fn uniform(seed: u64) -> f64 {
    (split_mix(seed) >> 11) as f64 / (1u64 << 53) as f64
}

kvasir_policy::export_scheduler!(OverlapCost);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question};
    use kvasir_policy_testing::{asked, chooses_what_is_there};
    use proptest::prelude::*;

    /// Instances that do both, with so many blocks in use.
    fn at(temperature: &str) -> OverlapCost {
        let mut policy = OverlapCost::default();
        let given = [("temperature".to_owned(), temperature.to_owned())];
        policy.configure(&Settings::new(&policy.describe(), &given).unwrap()).unwrap();
        policy
    }

    fn cluster(temperature: &str, in_use: &[u32]) -> Kept<OverlapCost> {
        let mut kept = Kept::new(Box::new(at(temperature)));
        kept.open(&Layout::of(in_use.len() as u32, in_use.len() as u32, 16).encode());
        for (slot, in_use) in in_use.iter().enumerate() {
            let (slot, peer) = (slot as u16, Some(slot as u16));
            let prefill =
                PrefillRow { slot, available: true, cost_per_token: 0.5, peer, ..PrefillRow::default() };
            let decode = DecodeRow {
                slot,
                available: true,
                capacity_blocks: 1_000,
                free_blocks: 1_000 - in_use,
                peer,
                ..DecodeRow::default()
            };
            kept.update_prefill(&prefill.encode());
            kept.update_decode(&decode.encode());
        }
        kept
    }

    fn ask(kept: &mut Kept<OverlapCost>, seed: u64, prefix: &[u32]) -> Decision {
        let request = Request { prompt_tokens: 160, seed, ..Request::default() };
        let question = Question::new(0.0, &request, prefix.len(), prefix.len()).with(Column::Prefix, prefix);
        kept.schedule(0.0, question.words())
    }

    #[test]
    fn overlap_is_weighed_against_the_blocks_in_use() {
        let mut kept = cluster("0", &[20, 13, 30]);
        assert_eq!(ask(&mut kept, 1, &[0, 0, 0]), Decision::run(1, 1), "30, 23 and 40");
        assert_eq!(ask(&mut kept, 1, &[8, 0, 0]), Decision::run(0, 0), "22, 23 and 40");
        let busy = PrefillRow {
            slot: 0,
            available: true,
            busy_until: 16.0,
            cost_per_token: 0.5,
            peer: Some(0),
            ..PrefillRow::default()
        };
        kept.update_prefill(&busy.encode());
        assert_eq!(ask(&mut kept, 1, &[8, 0, 0]), Decision::run(1, 1), "32 tokens wait there: 24");
        kept.update_decode(
            &DecodeRow { slot: 1, available: true, peer: Some(1), ..DecodeRow::default() }.encode(),
        );
        let Decision::Run(placement) = ask(&mut kept, 1, &[0, 0, 0]) else { panic!("there is room") };
        assert_eq!(placement.decode, 0, "no room where it would stay");
    }

    /// Eight blocks each, of ten: all in HBM, all in DRAM, half in DRAM and half below.
    #[test]
    fn a_block_that_is_not_in_hbm_saves_less() {
        let mut policy = OverlapCost::default();
        let given = [("dram-weight", "0.75"), ("below-weight", "0.25")].map(|(n, v)| (n.into(), v.into()));
        policy.configure(&Settings::new(&policy.describe(), &given).unwrap()).unwrap();
        let (mut by_tier, mut alike) = (Kept::new(Box::new(policy)), cluster("0", &[]));
        let request = Request { prompt_tokens: 160, ..Request::default() };
        let question = Question::new(0.0, &request, 3, 0).with(Column::Prefix, &[8, 8, 8]);
        let told =
            question.clone().with(Column::PrefixInHbm, &[8, 0, 0]).with(Column::PrefixInDram, &[8, 8, 4]);
        for kept in [&mut by_tier, &mut alike] {
            kept.open(&Layout::of(3, 0, 16).encode());
            let row = |slot| PrefillRow { slot, available: true, ..PrefillRow::default() }.encode();
            kept.update_prefill(&[row(0), row(1), row(2)].concat());
        }
        assert_eq!(by_tier.explain(0.0, told.words()), [2.0, 4.0, 6.0]);
        assert_eq!(by_tier.explain(0.0, question.words()), [2.0; 3], "nobody says where they are");
        assert_eq!(alike.explain(0.0, told.words()), [2.0; 3], "by default a block is a block");
    }

    /// Costs 23, 26 and 29: weights 1, e^-1 and e^-2 at temperature 0.5. The seeds are fixed.
    #[test]
    fn a_temperature_spreads_by_softmax() {
        let mut kept = cluster("0.5", &[13, 16, 19]);
        let mut counts = [0u32; 3];
        for seed in 0..10_000 {
            let Decision::Run(placement) = ask(&mut kept, seed, &[0, 0, 0]) else { panic!("there is room") };
            counts[placement.prefill as usize] += 1;
        }
        let sum = 1.0 + math::exp(-1.0) + math::exp(-2.0);
        for (slot, count) in counts.into_iter().enumerate() {
            let expected = 10_000.0 * math::exp(-(slot as f64)) / sum;
            assert!((f64::from(count) - expected).abs() < 200.0, "{counts:?}");
        }
    }

    proptest! {
        #[test]
        fn no_input_panics_and_what_is_chosen_is_there(asked in asked(), temperature in 0.0..3.0f64) {
            chooses_what_is_there(at(&temperature.to_string()), &asked);
        }
    }
}
