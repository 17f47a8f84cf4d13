use super::*;
use kvasir_policy::learning::{OUTCOME, Outcome};
use kvasir_policy::scheduler::{DecodeRow, Kept, Layout, PrefillRow, Question};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use mooncake_scheduler::Mooncake;
use proptest::prelude::*;

/// What a prefill takes, ms: fixed, for a token, for a pair of tokens.
type Costs = [f64; 3];

fn prefill_ms([c0, c1, c2]: Costs, computed: f64) -> f64 {
    c0 + computed * (c1 + c2 * computed / 2.0)
}

/// One instance as it is, and as the host sees it: in the manner of the host's books, which are put right whenever a prefill
/// ends.
struct Instance {
    truth: Costs,
    registered: Costs,
    /// Ends of its prefills, as they will be and as they were booked, in order.
    ends: Vec<(f64, f64)>,
    shift: f64,
    booked_until: f64,
    /// It tells how long each prefill took.
    measures: bool,
}

impl Instance {
    fn advance(&mut self, now: f64) {
        while let Some(&(end, booked)) = self.ends.first().filter(|(end, _)| *end <= now) {
            self.ends.remove(0);
            let shift = end - (booked + self.shift);
            self.shift += shift;
            self.booked_until = if self.ends.is_empty() { end } else { (self.booked_until + shift).max(end) };
        }
    }

    fn row(&self, slot: u16) -> PrefillRow {
        let [c0, c1, c2] = self.registered.map(|cost| cost as f32);
        PrefillRow {
            slot,
            available: true,
            busy_until: self.booked_until as f32,
            cost_fixed: c0,
            cost_per_token: c1,
            cost_per_pair: c2,
            queued: self.ends.len() as u32,
            identity: u32::from(slot) + 7,
            ..PrefillRow::default()
        }
    }

    /// Books a prefill and lets it run; what came of it.
    fn serve(&mut self, slot: u32, now: f64, prompt: f64) -> Outcome {
        let queue = (self.booked_until - now).max(0.0);
        let booked = now + queue + prefill_ms(self.registered, prompt);
        let start = self.ends.last().map_or(now, |(end, _)| end.max(now));
        let end = start + prefill_ms(self.truth, prompt);
        self.ends.push((end, booked - self.shift));
        self.booked_until = booked;
        let ttft_ms = Times { predicted: Some((booked - now) as f32), measured: Some((end - now) as f32) };
        Outcome {
            prefill: slot + 7,
            prompt_tokens: prompt as u32,
            queue_ms: Some(queue as f32),
            prefill_ms: Times {
                predicted: Some(prefill_ms(self.registered, prompt) as f32),
                measured: self.measures.then(|| prefill_ms(self.truth, prompt) as f32),
            },
            ttft_ms,
            ..Outcome::default()
        }
    }
}

/// Two instances are three times slower than they say, two are three times faster.
fn fleet() -> Vec<Instance> {
    let truth = [[20.0, 0.3, 4e-5], [30.0, 0.36, 3e-5], [20.0, 0.1, 1e-5], [10.0, 0.12, 1.5e-5]];
    let factors = [1.0 / 3.0, 1.0 / 3.0, 3.0, 3.0];
    let instance = |(truth, factor): (Costs, f64)| Instance {
        truth,
        registered: truth.map(|cost| cost * factor),
        ends: Vec::new(),
        shift: 0.0,
        booked_until: 0.0,
        measures: false,
    };
    truth.into_iter().zip(factors).map(instance).collect()
}

/// A number from 0 to below 1.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 40) as f64 / f64::from(1 << 24)
}

fn opened<S: Scheduler + Default>() -> Kept<S> {
    let mut kept = Kept::new(Box::<S>::default());
    kept.open(&Layout::of(4, 1, 16).encode());
    let decode = DecodeRow { available: true, free_blocks: 1 << 20, ..DecodeRow::default() };
    kept.update_decode(&decode.encode());
    kept
}

/// Mean TTFT of so many requests, ms; the policy hears of what came of them whenever another 20 have ended.
fn serve<S: Scheduler + Default>(kept: &mut Kept<S>, requests: u32, hear: fn(&mut S, &[u32])) -> f64 {
    let (mut fleet, mut state, mut now, mut sum) = (fleet(), 1, 0.0, 0.0);
    let mut outcomes: Vec<(f64, Outcome)> = Vec::new();
    for _ in 0..requests {
        now += uniform(&mut state) * 400.0;
        let prompt = 200.0 + uniform(&mut state).powi(3) * 8_000.0;
        for (slot, instance) in fleet.iter_mut().enumerate() {
            instance.advance(now);
            kept.update_prefill(&instance.row(slot as u16).encode());
        }
        outcomes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let ended = outcomes.partition_point(|(end, _)| *end <= now);
        if ended >= 20 {
            let words: Vec<u32> = outcomes.drain(..ended).flat_map(|(_, outcome)| outcome.encode()).collect();
            hear(kept.scheduler(), &words);
        }
        let request = Request { prompt_tokens: prompt as u32, ..Request::default() };
        let decision = kept.schedule(now as f32, Question::new(now as f32, &request, 4, 1).words());
        let Decision::Run(placement) = decision else { panic!("an instance is there") };
        let outcome = fleet[placement.prefill as usize].serve(placement.prefill, now, prompt.floor());
        let ttft = f64::from(outcome.ttft_ms.measured.unwrap());
        sum += ttft;
        outcomes.push((now + ttft, outcome));
    }
    sum / f64::from(requests)
}

fn learn(policy: &mut FittedCost, outcomes: &[u32]) {
    policy.observe(Outcomes::new(OUTCOME, outcomes));
    let knowledge = policy.publish();
    policy.adopt(&knowledge);
}

#[test]
fn costs_that_are_wrong_by_three_are_learned_and_choices_become_better() {
    let mut kept = opened::<FittedCost>();
    let fitted = serve(&mut kept, 2_000, learn);
    let believed = serve(&mut opened::<Mooncake>(), 2_000, |_, _| {});
    assert!(fitted < 0.5 * believed, "{fitted:.0} ms, {believed:.0} with mooncake");
    for (slot, instance) in fleet().iter_mut().enumerate() {
        kept.update_prefill(&instance.row(slot as u16).encode());
        for prompt in [500, 1_500, 2_500] {
            let request = Request { prompt_tokens: prompt, ..Request::default() };
            let expected = kept.explain(0.0, Question::new(0.0, &request, 4, 1).words())[slot];
            let truth = prefill_ms(instance.truth, prompt.into());
            assert!(
                (f64::from(expected) / truth - 1.0).abs() < 0.2,
                "{slot}: {prompt} tokens, {expected} for {truth}"
            );
        }
    }
}

/// Every request waits, so that no time to first token is one of a prefill; nothing is learned of those.
#[test]
fn where_prefills_are_measured_their_cost_is_learned_behind_any_wait() {
    let expected = |measures: bool| {
        let mut kept = opened::<FittedCost>();
        let (mut instances, mut state) = (fleet(), 1);
        for request in 0..200 {
            let prompt = 200.0 + (uniform(&mut state) * 4_000.0).floor();
            let (slot, wait_ms) = (request % 4, 2_000.0 + uniform(&mut state) * 2_000.0);
            let instance = &mut instances[slot as usize];
            instance.measures = measures;
            let mut outcome = instance.serve(slot, 1e7 * f64::from(request), prompt);
            outcome.ttft_ms.measured = outcome.ttft_ms.measured.map(|ms| ms + wait_ms as f32);
            outcome.fetched_blocks = 1;
            learn(kept.scheduler(), &outcome.encode());
        }
        for (slot, instance) in fleet().iter().enumerate() {
            kept.update_prefill(&instance.row(slot as u16).encode());
        }
        let request = Request { prompt_tokens: 2_000, ..Request::default() };
        kept.explain(0.0, Question::new(0.0, &request, 4, 1).words())
    };
    for (at, instance) in fleet().iter().enumerate() {
        let [measured, not] = [true, false].map(|measures| f64::from(expected(measures)[at]));
        let (truth, registered) = (prefill_ms(instance.truth, 2e3), prefill_ms(instance.registered, 2e3));
        assert!((measured / truth - 1.0).abs() < 0.05, "{at}: {measured} for {truth}");
        assert!((not / registered - 1.0).abs() < 0.01, "{at}: {not}, as registered {registered}");
    }
}

#[test]
fn hostile_outcomes_poison_nothing() {
    let mut kept = opened::<FittedCost>();
    serve(&mut kept, 1_000, learn);
    let request = Request { prompt_tokens: 2_000, ..Request::default() };
    let expected = |kept: &mut Kept<FittedCost>| {
        for (slot, instance) in fleet().iter_mut().enumerate() {
            kept.update_prefill(&instance.row(slot as u16).encode());
        }
        kept.explain(0.0, Question::new(0.0, &request, 4, 1).words())
    };
    let before = expected(&mut kept);
    let times = [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e30, f32::MIN_POSITIVE, 1.0, 50.0];
    for (i, (&measured, &predicted)) in
        times.iter().flat_map(|m| times.iter().map(move |p| (m, p))).enumerate()
    {
        let prompt_tokens = [0, 1, u32::MAX, 2_000][i % 4];
        let ttft_ms = Times { predicted: None, measured: Some(measured) };
        for measured in [None, Some(measured)] {
            let prefill_ms = Times { predicted: Some(predicted), measured };
            let prefill = 7 + i as u32 % 4;
            let outcome = Outcome { prefill, prompt_tokens, ttft_ms, prefill_ms, ..Outcome::default() };
            learn(kept.scheduler(), &outcome.encode());
        }
    }
    let after = expected(&mut kept);
    for (before, after) in before.iter().zip(&after) {
        assert!((after / before - 1.0).abs() < 0.2, "{before} became {after}");
    }
}

#[test]
fn instances_that_come_and_go_are_forgotten_and_what_is_published_stays_small() {
    let mut policy = FittedCost::default();
    let ttft_ms = Times { predicted: None, measured: Some(100.0) };
    let hear = |policy: &mut FittedCost, prefill| {
        let prefill_ms = Times { predicted: Some(100.0), measured: None };
        let outcome = Outcome { prefill, prompt_tokens: 1_000, prefill_ms, ttft_ms, ..Outcome::default() };
        policy.observe(Outcomes::new(OUTCOME, &outcome.encode()));
    };
    for prefill in 1..3_000 {
        (0..12).for_each(|_| hear(&mut policy, prefill));
    }
    let remembered = STALE as usize / 12 + 1;
    assert_eq!((policy.fits.len(), policy.publish().len()), (remembered, 1 + remembered * RECORD));
    (1..3_000).for_each(|prefill| hear(&mut policy, prefill));
    assert!(policy.fits.len() <= INSTANCES);
}

proptest! {
    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(
        asked in asked(),
        knowledge in prop::collection::vec(any::<u8>(), 0..200),
        outcomes in prop::collection::vec(prop_oneof![0..5u32, any::<u32>()], 0..300),
    ) {
        let mut policy = FittedCost::default();
        policy.adopt(&[&[VERSION], &knowledge[..]].concat());
        chooses_what_is_there(policy, &asked);
        let mut policy = FittedCost::default();
        learn(&mut policy, &outcomes);
        chooses_what_is_there(policy, &asked);
    }
}
