use super::*;
use kvasir_policy::evictor::NO_SLOT;
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

#[test]
fn what_was_popular_comes_back_as_popular() {
    let mut policy = Kvasir::default();
    policy.open(4);
    policy.history.leaves(identity(3), 20);
    let steps = prompts([3, 100].into_iter());
    let (mut words, mut events) = (Vec::new(), Vec::new());
    for (slot, step) in (0..).zip(&steps) {
        let event = Event {
            kind: EventKind::Insert,
            replayed: false,
            class: step.class,
            slot,
            parent_or_uses: NO_SLOT,
            depth: 0,
            size_bytes: 1,
            time_ms: 1_000,
            identity: identity(step.blocks[0]),
            tenant: 0,
        };
        event.encode(0, &mut words);
        events.push(event);
    }
    policy.on_events(Events::new(0, kvasir_policy::evictor::EVENT, &words));
    policy.file_new(None);
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
    policy.file_new(None);
    let cells: Vec<_> = (0..5).map(|slot: usize| policy.blocks[slot].cell).collect();
    let [tail, once, again] = [(0, true), (0, false), (1, false)].map(|(uses, tail)| cell_of(3, uses, tail));
    assert_eq!(cells, [again, again, tail, once, tail]);
}
