//! Inputs for property tests of an evictor: compare it with a model over [`steps`] by means of
//! [`kvasir_policy::testing::run`], and see that it survives [`words`] by means of [`feed`].
//!
//! It is a crate of its own, so that the SDK does not bring a test framework to authors of policies.

use kvasir_policy::Evictor;
use kvasir_policy::evictor::{Event, EventKind, Kept, NO_SLOT, Victim};
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

/// Accesses to single blocks, of which none is in a chain: what algorithms are defined over that know no chains. A few
/// blocks are used often, the others seldom.
pub fn accesses() -> impl Strategy<Value = Vec<Step>> {
    let block = prop_oneof![0..6_u64, 0..40_u64];
    let step = (block, prop::bool::weighted(0.05));
    let step = step.prop_map(|(block, remove)| Step { wait_ms: 1, class: 0, blocks: vec![block], remove });
    prop::collection::vec(step, 1..200)
}

/// Checks the contract's books with single blocks: a pinned one is not chosen, one that was chosen is not chosen again before
/// it is named, and all that can be evicted are given if they are wanted.
///
/// # Panics
/// The policy breaks the contract.
pub fn keeps_books(policy: impl Evictor) {
    const SLOTS: u32 = 8;
    let mut policy = Kept::new(Box::new(policy));
    policy.open(&kvasir_policy::evictor::Layout::of(SLOTS).encode());
    let tell = |policy: &mut Kept<_>, kind, slots: &[u32]| {
        let mut words = Vec::new();
        for &slot in slots {
            let parent_or_uses = if kind == EventKind::Insert { NO_SLOT } else { 1 };
            event(kind, slot, parent_or_uses).encode(0, &mut words);
        }
        policy.on_events(0, &words);
    };
    let choose = |policy: &mut Kept<_>, expected: &[u32]| {
        let mut chosen: Vec<_> =
            policy.select_victims(9, SLOTS).map(|word| Victim::unpack(word).slot).collect();
        chosen.sort_unstable();
        assert_eq!(chosen, expected);
    };
    tell(&mut policy, EventKind::Insert, &[0, 1, 2, 3, 4, 5, 6, 7]);
    tell(&mut policy, EventKind::Pin, &[1, 4]);
    tell(&mut policy, EventKind::Hit, &[1, 2, 2]);
    choose(&mut policy, &[0, 2, 3, 5, 6, 7]);
    choose(&mut policy, &[]);
    tell(&mut policy, EventKind::Keep, &[0, 2]);
    tell(&mut policy, EventKind::Hit, &[5]);
    tell(&mut policy, EventKind::Pin, &[6]);
    tell(&mut policy, EventKind::Unpin, &[1]);
    choose(&mut policy, &[0, 1, 2, 5]);
    tell(&mut policy, EventKind::Unpin, &[6, 4]);
    tell(&mut policy, EventKind::Insert, &[0, 3]);
    tell(&mut policy, EventKind::Remove, &[3, 4]);
    choose(&mut policy, &[0, 6]);
}

fn event(kind: EventKind, slot: u32, parent_or_uses: u32) -> Event {
    let identity = u64::from(slot) << 7 | 1;
    let (size_bytes, time_ms) = (1 << 20, u64::from(slot));
    Event {
        kind,
        replayed: false,
        class: 0,
        slot,
        parent_or_uses,
        depth: 0,
        size_bytes,
        time_ms,
        identity,
        tenant: 0,
    }
}
