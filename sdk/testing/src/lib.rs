//! Inputs for property tests of an evictor: compare it with a model over [`steps`] by means of
//! [`kvasir_policy::testing::run`], and see that it survives [`words`] by means of [`feed`].
//!
//! It is a crate of its own, so that the SDK does not bring a test framework to authors of policies.

use kvasir_policy::Evictor;
use kvasir_policy::evictor::Kept;
use kvasir_policy::testing::Step;
use proptest::prelude::*;
use std::ops::Range;

/// What happens to a small pool: prompts of up to 5 blocks that share heads, and an occasional removal.
///
/// `wait_ms` lies between steps; it starts at 1 if the policy's model orders blocks by time, so that each step has its
/// own time. Classes are below `classes`.
pub fn steps(wait_ms: Range<u64>, classes: u16) -> impl Strategy<Value = Vec<Step>> {
    let blocks = prop::collection::vec(0..3_u64, 1..6);
    let step = (wait_ms, 0..classes, blocks, prop::bool::weighted(0.1));
    let step = step.prop_map(|(wait_ms, class, blocks, remove)| Step { wait_ms, class, blocks, remove });
    prop::collection::vec(step, 1..80)
}

/// Words that are events, nearly events, or noise. The first two also say how long records are.
pub fn words() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![0..20_u32, any::<u32>()], 0..400)
}

/// Gives a policy of 8 slots batches of arbitrary words, some of them as tiers, and asks for victims in between, even at
/// times that went back.
///
/// # Panics
/// The policy panics, or gives more victims than were wanted.
pub fn feed(policy: impl Evictor, words: &[u32]) {
    const WANT: u32 = 3;
    let mut policy = Kept::new(Box::new(policy));
    let sizes = words.iter().take(2).map(|size| size % 16);
    policy.open(&[8].into_iter().chain(sizes).collect::<Vec<u32>>());
    for (batch, words) in (0..).zip(words.chunks(40)) {
        policy.update_tiers(&words.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>());
        policy.on_events(batch * 1_000, words);
        let victims = policy.select_victims(batch * 900, WANT).count();
        assert!(victims <= WANT as usize, "{victims} victims where {WANT} were wanted");
    }
}
