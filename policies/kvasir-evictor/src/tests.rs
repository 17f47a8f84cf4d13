use super::*;
use kvasir_policy::evictor::{EVENT, NO_SLOT};
use kvasir_policy::testing::{Step, run};
use kvasir_policy_testing::{Roomy, feed, keeps_books, said, steps, words};
use proptest::prelude::*;

proptest! {
    #[test]
    fn leaves_leave_first(steps in steps(0..60_000, 4), slots in 1..16_u32) {
        run(&mut Kvasir::default(), slots, &steps, true);
    }

    #[test]
    fn survives_any_words(words in words()) {
        feed(Kvasir::default(), &words);
    }

    #[test]
    fn keeps_the_books(said in said()) {
        keeps_books(Kvasir::default(), &said);
    }

    #[test]
    fn spare_slots_change_nothing(steps in steps(0..60_000, 4), slots in 1..16_u32) {
        let expected = run(&mut Kvasir::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Roomy(Kvasir::default()), slots, &steps, true), expected);
    }
}

/// A prompt each second. Those with ids below 8 are of class 1, the others of class 2.
fn prompts(ids: impl Iterator<Item = u64>) -> Vec<Step> {
    let step = |id| Step { wait_ms: 1_000, class: 1 + u16::from(id >= 8), blocks: vec![id], remove: false };
    ids.map(step).collect()
}

fn is_resident(policy: &Kvasir, identity: u64) -> bool {
    let at = |slot: u32| policy.blocks[slot as usize].identity == identity;
    (0..policy.blocks.len() as u32).any(|slot| at(slot) && policy.books.standing(slot) != Standing::Out)
}

/// As the test pool hashes the first block of a prompt.
fn identity(id: u64) -> u64 {
    (1 << 3 | id & 7) + (id >> 3 << 32)
}

#[test]
fn what_is_used_often_outlives_what_is_new() {
    let mut policy = Kvasir::default();
    // Three popular prompts, each every twelve seconds, among nine that nobody asks again.
    let ids = (0..2_000).map(|n| if n % 4 == 0 { n / 4 % 3 } else { 8 + n });
    run(&mut policy, 6, &prompts(ids), true);
    assert!((0..3).all(|id| is_resident(&policy, identity(id))));
}

fn event(kind: EventKind, slot: u32, parent_or_uses: u32, depth: u32, identity: u64) -> Event {
    let (replayed, class, size_bytes, time_ms, tenant) = (false, 3, 1, 1_000, 0);
    Event { kind, replayed, class, slot, parent_or_uses, depth, size_bytes, time_ms, identity, tenant }
}

fn tell(policy: &mut Kvasir, events: &[Event]) {
    let mut words = Vec::new();
    events.iter().for_each(|event| event.encode(0, &mut words));
    policy.on_events(Events::new(0, EVENT, &words));
}

#[test]
fn what_was_popular_comes_back_as_popular() {
    let mut policy = Kvasir::default();
    policy.open(4);
    policy.history.leaves(identity(3), 20);
    let events = [3, 100].map(identity);
    let events: Vec<_> =
        (0..).zip(events).map(|(slot, id)| event(EventKind::Insert, slot, NO_SLOT, 0, id)).collect();
    tell(&mut policy, &events);
    policy.settle(None);
    assert_eq!([0, 1].map(|slot: usize| policy.blocks[slot].uses), [21, 0]);
    let mut victims = Vec::new();
    policy.select_victims(2_000, 1, &mut victims);
    assert_eq!(victims, [Victim::new(1)]);
    assert_eq!(policy.history.returns(events[1].identity), Some(0));
}

#[test]
fn the_last_block_of_a_request_is_told_from_the_others() {
    let mut policy = Kvasir::default();
    let step = |blocks: &[u64]| Step { wait_ms: 1_000, class: 3, blocks: blocks.to_vec(), remove: false };
    run(&mut policy, 8, &[step(&[1, 2, 3]), step(&[1, 2, 4, 5])], true);
    policy.settle(None);
    let queues: Vec<_> = (0..5).map(|slot: usize| policy.blocks[slot].queue).collect();
    let queue = |brought, known, uses, tail| queue_of(3, Request { brought, known }, uses, tail);
    // Both blocks that were used again are of the second request, which brought two.
    let (again, tail) = (queue(2, 2, 1, false), queue(3, 0, 0, true));
    let (once, last) = (queue(2, 2, 0, false), queue(2, 2, 0, true));
    assert_eq!(queues, [again, again, tail, once, last]);
}

#[test]
fn what_comes_back_is_not_new_and_a_hit_ends_what_was_brought() {
    let mut policy = Kvasir::default();
    policy.open(8);
    policy.history.leaves(100, 4);
    let chain = |kind, slots: std::ops::Range<u32>| {
        let parent =
            |slot: u32| if kind == EventKind::Insert { slot.checked_sub(1).unwrap_or(NO_SLOT) } else { 1 };
        slots.map(|slot| event(kind, slot, parent(slot), slot, 100 + u64::from(slot))).collect::<Vec<_>>()
    };
    let queues = |policy: &Kvasir| [0, 1, 2, 3].map(|slot: usize| policy.blocks[slot].queue);
    let queue = |brought, known, uses, tail| queue_of(3, Request { brought, known }, uses, tail);
    tell(&mut policy, &chain(EventKind::Insert, 0..3));
    policy.settle(None);
    let expected = [queue(2, 1, 5, false), queue(2, 1, 0, false), queue(2, 1, 0, true)];
    assert_eq!(queues(&policy)[..3], expected, "the first block was known");
    tell(&mut policy, &chain(EventKind::Hit, 0..3));
    assert_eq!(queues(&policy)[..3], [queue(0, 1, 6, false), queue(0, 2, 1, false), queue(0, 3, 1, false)]);
    tell(&mut policy, &chain(EventKind::Insert, 3..4));
    policy.settle(None);
    let expected =
        [queue(1, 3, 6, false), queue(1, 3, 1, false), queue(1, 3, 1, false), queue(1, 3, 0, true)];
    assert_eq!(queues(&policy), expected, "a new block behind them");
}

/// A call's time follows its events, however long the chains are that they continue.
#[test]
fn an_event_moves_but_a_few_of_the_blocks_before_it() {
    let mut policy = Kvasir::default();
    policy.open(64);
    let insert = |slot: u32| {
        event(EventKind::Insert, slot, slot.checked_sub(1).unwrap_or(NO_SLOT), slot, 100 + u64::from(slot))
    };
    let hit = |slot: u32| event(EventKind::Hit, slot, 1, slot, 100 + u64::from(slot));
    tell(&mut policy, &(0..20).map(insert).chain((0..20).map(hit)).collect::<Vec<_>>());
    policy.moves = 0;
    tell(&mut policy, &[20, 21].map(insert));
    policy.settle(None);
    let behind = queue_of(3, Request { brought: 2, known: 20 }, 1, false);
    let moved: Vec<_> = (0..20).filter(|&slot: &usize| policy.blocks[slot].queue == behind).collect();
    assert_eq!(moved, (4..20).collect::<Vec<_>>());
}
