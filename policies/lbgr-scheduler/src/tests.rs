use super::*;
use kvasir_policy::learning::{OUTCOME, Outcome};
use kvasir_policy::scheduler::{DecodeRow, Kept, Layout, PrefillRow, Question, Reason};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use proptest::prelude::*;

fn outcome(prefill: u32, predicted: f32, measured: f32) -> Outcome {
    let ttft_ms = Times { predicted: Some(predicted), measured: Some(measured) };
    Outcome { prefill, prompt_tokens: 1_000, ttft_ms, ..Outcome::default() }
}

fn learn(policy: &mut Lbgr, outcomes: &[Outcome]) {
    let words: Vec<u32> = outcomes.iter().flat_map(Outcome::encode).collect();
    policy.observe(Outcomes::new(OUTCOME, &words));
    let knowledge = policy.publish();
    policy.adopt(&knowledge);
}

/// Two prefill instances, 7 and 8, of which the first is a little faster, and one decode instance.
fn pair() -> Kept<Lbgr> {
    let mut kept = Kept::new(Box::<Lbgr>::default());
    kept.open(&Layout::of(2, 1, 16).encode());
    for (slot, cost_per_token) in [(0, 0.10), (1, 0.11)] {
        let identity = u32::from(slot) + 7;
        let row = PrefillRow { slot, available: true, cost_per_token, identity, ..PrefillRow::default() };
        kept.update_prefill(&row.encode());
    }
    let decode = DecodeRow { available: true, free_blocks: 1 << 20, ..DecodeRow::default() };
    kept.update_decode(&decode.encode());
    kept
}

fn taken(kept: &mut Kept<Lbgr>, request: Request) -> Decision {
    let request = Request { prompt_tokens: 1_000, ..request };
    kept.schedule(0.0, Question::new(0.0, &request, 2, 1).words())
}

#[test]
fn an_instance_that_is_slower_than_it_says_is_left_until_it_no_longer_is() {
    let mut kept = pair();
    let request = Request { ttft_slo: 150.0, tbt_slo: f32::INFINITY, ..Request::default() };
    assert_eq!(taken(&mut kept, request), Decision::run(0, 0));
    learn(kept.scheduler(), &[outcome(7, 100.0, 130.0), outcome(8, 110.0, 110.0)]);
    assert_eq!(taken(&mut kept, request), Decision::run(1, 0), "130 ms here, 110 there");
    learn(kept.scheduler(), &[outcome(8, 110.0, 180.0)]);
    assert_eq!(taken(&mut kept, request), Decision::run(0, 0), "130 ms here, some 146 there");
    learn(kept.scheduler(), &[outcome(7, 100.0, 400.0); 20]);
    assert_eq!(taken(&mut kept, Request { ttft_slo: 120.0, ..request }), Decision::reject(Reason::Ttft, 25));
    learn(kept.scheduler(), &[outcome(7, 100.0, 100.0); 200]);
    assert_eq!(taken(&mut kept, Request { ttft_slo: 120.0, ..request }), Decision::run(0, 0));
}

#[test]
fn outcomes_that_say_nothing_teach_nothing_and_what_is_published_stays_small() {
    let mut policy = Lbgr::default();
    let unknown = Outcome { ttft_ms: Times::default(), ..outcome(7, 0.0, 0.0) };
    let rejected = Outcome { end: End::Rejected, ..outcome(7, 100.0, 900.0) };
    learn(&mut policy, &[unknown, rejected, outcome(0, 100.0, 900.0), outcome(7, 100.0, f32::INFINITY)]);
    assert!(policy.known.is_empty());
    (1..3_000).for_each(|prefill| learn(&mut policy, &[outcome(prefill, 0.0, f32::MAX)]));
    assert_eq!(policy.publish().len(), 1 + INSTANCES * RECORD);
    assert_eq!(policy.known[&2_999], MOST_MS as f32);
}

proptest! {
    /// Beside the sum of all outcomes, each with its weight.
    #[test]
    fn a_residual_is_the_mean_in_which_the_latest_count_most(
        lacked in prop::collection::vec(-1_000i32..1_000, 1..80), memory in 0.0..1.0f64,
    ) {
        let mut policy = Lbgr { memory, ..Lbgr::default() };
        let outcomes: Vec<_> = lacked.iter().map(|&ms| outcome(7, 1_000.0, (1_000 + ms) as f32)).collect();
        learn(&mut policy, &outcomes);
        let weights = (0..lacked.len()).rev().map(|since| memory.powi(since as i32));
        let sum: f64 = weights.clone().zip(&lacked).map(|(weight, &ms)| weight * f64::from(ms)).sum();
        let mean = sum / weights.sum::<f64>();
        prop_assert!((f64::from(policy.known[&7]) - mean).abs() < 1e-2, "{} for {mean}", policy.known[&7]);
    }

    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(
        asked in asked(),
        knowledge in prop::collection::vec(any::<u8>(), 0..200),
        outcomes in prop::collection::vec(prop_oneof![0..5u32, any::<u32>()], 0..300),
    ) {
        let mut policy = Lbgr::default();
        policy.adopt(&[&[VERSION], &knowledge[..]].concat());
        chooses_what_is_there(policy, &asked);
        let mut policy = Lbgr::default();
        policy.observe(Outcomes::new(OUTCOME, &outcomes));
        let knowledge = policy.publish();
        policy.adopt(&knowledge);
        chooses_what_is_there(policy, &asked);
    }
}
