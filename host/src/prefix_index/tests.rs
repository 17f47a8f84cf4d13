use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// More than the covers that stand in a run itself.
const SLOTS: usize = 12;
const CHAIN: usize = 70;

/// What the index represents: for each instance a set of hashes, walked from the front.
#[derive(Default)]
struct Model {
    held: [HashSet<u64>; SLOTS],
}

impl Model {
    fn lookup(&self, chain: &[u64]) -> Vec<u32> {
        let matched =
            |held: &HashSet<u64>| chain.iter().take_while(|hash| held.contains(hash)).count() as u32;
        self.held.iter().map(matched).collect()
    }
}

/// A chain that leaves the trunk `trunk` at `fork` for the branch `branch`.
#[derive(Clone, Copy, Debug)]
struct Chain {
    trunk: u8,
    fork: usize,
    branch: u8,
}

impl Chain {
    fn hashes(self) -> Vec<u64> {
        let mut parent = u64::from(self.trunk);
        let next = |i| {
            let salt = if i < self.fork { 0 } else { u64::from(self.branch) };
            parent = (parent ^ salt << 56).wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(29) ^ i as u64;
            parent
        };
        (0..CHAIN).map(next).collect()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Store { slot: u16, chain: Chain, from: usize, len: usize },
    Remove { slot: u16, chain: Chain, at: Vec<usize> },
    RemoveRange { slot: u16, chain: Chain, from: usize, len: usize },
    Drop { slot: u16 },
    Sweep { most: usize },
}

fn chain() -> impl Strategy<Value = Chain> {
    let fork = prop_oneof![Just(0), Just(8), Just(CHAIN), 0..CHAIN];
    (1..3u8, fork, 1..3u8).prop_map(|(trunk, fork, branch)| Chain { trunk, fork, branch })
}

fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..SLOTS as u16;
    let from = || prop_oneof![Just(0), 0..CHAIN];
    let len = || prop_oneof![Just(16usize), 1..CHAIN];
    prop_oneof![
        8 => (slot(), chain(), from(), len()).prop_map(|(slot, chain, from, len)| Op::Store { slot, chain, from, len }),
        3 => (slot(), chain(), prop::collection::vec(0..CHAIN, 1..6))
            .prop_map(|(slot, chain, at)| Op::Remove { slot, chain, at }),
        3 => (slot(), chain(), from(), len())
            .prop_map(|(slot, chain, from, len)| Op::RemoveRange { slot, chain, from, len }),
        1 => slot().prop_map(|slot| Op::Drop { slot }),
        1 => (1usize..40).prop_map(|most| Op::Sweep { most }),
    ]
}

/// Applies `op` to both; if a cap may refuse, the model follows what the index says it holds.
fn apply(op: &Op, index: &mut PrefixIndex, model: &mut Model) {
    match op {
        Op::Store { slot, chain, from, len } => {
            let hashes = chain.hashes();
            let parent = from.checked_sub(1).map(|i| hashes[i]);
            let blocks = &hashes[*from..(from + len).min(CHAIN)];
            let stored = index.store(*slot, parent, blocks);
            let taken = blocks.len() - stored.refused;
            let held = &mut model.held[usize::from(*slot)];
            let fresh = blocks[..taken].iter().filter(|&&hash| held.insert(hash)).count();
            assert_eq!(stored.new + stored.shared, fresh, "{op:?} {stored:?}");
            assert_eq!(stored.new + stored.shared + stored.repeated, taken);
        }
        Op::Remove { slot, chain, at } => {
            let hashes = chain.hashes();
            remove(index, model, *slot, &at.iter().map(|&i| hashes[i]).collect::<Vec<_>>());
        }
        Op::RemoveRange { slot, chain, from, len } => {
            let hashes = chain.hashes();
            remove(index, model, *slot, &hashes[*from..(from + len).min(CHAIN)]);
        }
        Op::Drop { slot } => {
            model.held[usize::from(*slot)].clear();
            index.drop_instance(*slot);
        }
        Op::Sweep { most } => {
            index.sweep(*most);
        }
    }
}

fn remove(index: &mut PrefixIndex, model: &mut Model, slot: u16, hashes: &[u64]) {
    let held = &mut model.held[usize::from(slot)];
    let forgotten = index.stats().forgotten;
    let gone = hashes.iter().filter(|hash| held.remove(hash)).count();
    let removed = index.remove(slot, hashes);
    if index.stats().forgotten == forgotten {
        assert_eq!(removed, gone);
    } else {
        held.retain(|&hash| index.holds(slot, hash));
    }
}

fn check(index: &PrefixIndex, model: &Model) {
    for trunk in 1..3 {
        for fork in [0, 1, 8, 16, 17, 40, CHAIN] {
            for branch in 1..3 {
                let chain = Chain { trunk, fork, branch }.hashes();
                let mut out = [9; SLOTS];
                let longest = index.lookup(&chain, &mut out);
                assert_eq!(out.to_vec(), model.lookup(&chain));
                assert_eq!(longest, out.into_iter().max().unwrap_or(0));
                let short = &chain[..20];
                index.lookup(short, &mut out);
                assert_eq!(out.to_vec(), model.lookup(short));
            }
        }
    }
    for (slot, held) in model.held.iter().enumerate() {
        assert!(held.iter().all(|&hash| index.holds(slot as u16, hash)));
    }
}

/// Nothing is left but what instances hold.
fn assert_swept(index: &mut PrefixIndex, model: &Model) {
    while index.sweep(8) {}
    let distinct: HashSet<u64> = model.held.iter().flatten().copied().collect();
    let stats = index.stats();
    assert!(stats.entries >= distinct.len());
    assert!(stats.entries <= distinct.len() * CELLS, "a page without a holder stays");
}

/// Every block of every run is found where it stands, and every run by its first block.
fn assert_whole(index: &PrefixIndex) {
    let (mut blocks, mut runs, mut covers) = (0, 0, 0);
    for number in 0..index.runs.slots() {
        let run = index.runs.get(number);
        if run.is_empty() {
            continue;
        }
        let hashes: Vec<u64> = (0..run.len()).map(|offset| index.pages.cell(run.cell(offset))).collect();
        for (offset, &hash) in (0..).zip(&hashes) {
            assert_eq!(index.find(hash), Some(Place { run: number, offset }));
        }
        assert_eq!(Some(run.first()), hashes.first().copied());
        assert_eq!(Some(run.last()), hashes.last().copied());
        assert_eq!(index.enter(run.first(), 1), Some(Place { run: number, offset: 0 }));
        blocks += hashes.len();
        runs += 1;
        covers += run.clone().take_gone(|_| true).len();
    }
    assert_eq!((index.len(), index.heads.len(), index.runs.live()), (blocks, runs, runs));
    assert_eq!(index.stats().covers, covers);
    assert_eq!(index.runs.bytes(), index.runs.counted_bytes());
}

fn empty(index: &mut PrefixIndex) {
    for slot in 0..SLOTS as u16 {
        index.drop_instance(slot);
    }
    while index.sweep(8) {}
    let stats = index.stats();
    assert_eq!((stats.entries, stats.runs, stats.covers), (0, 0, 0));
}

proptest! {
    #[test]
    fn agrees_with_a_set_per_instance(ops in prop::collection::vec(op(), 1..60)) {
        let mut index = PrefixIndex::new(Limits::default());
        let mut model = Model::default();
        for op in &ops {
            apply(op, &mut index, &mut model);
        }
        check(&index, &model);
        assert_whole(&index);
        assert_swept(&mut index, &model);
        check(&index, &model);
        assert_whole(&index);
        prop_assert!(!index.crossed);
        prop_assert_eq!(index.stats().refused + index.stats().forgotten, 0);
        empty(&mut index);
    }

    #[test]
    fn at_its_caps_it_forgets_but_never_invents(
        ops in prop::collection::vec(op(), 1..60), entries in 0usize..100, covers in 0usize..8,
    ) {
        let mut index = PrefixIndex::new(Limits { entries, covers });
        let mut model = Model::default();
        for op in &ops {
            apply(op, &mut index, &mut model);
            prop_assert!(index.stats().entries <= entries && index.stats().covers <= covers);
        }
        check(&index, &model);
        assert_whole(&index);
        assert_swept(&mut index, &model);
        assert_whole(&index);
        empty(&mut index);
    }
}

#[test]
fn a_dropped_instance_has_nothing_at_once_and_its_successors_only_what_is_theirs() {
    let chain = Chain { trunk: 1, fork: CHAIN, branch: 1 }.hashes();
    let mut index = PrefixIndex::new(Limits::default());
    let mut out = [0];
    // More than have numbers of their own before the first is swept.
    for round in 0..40 {
        let held = 1 + round % CHAIN;
        index.store(0, None, &chain[..held]);
        assert_eq!(index.lookup(&chain, &mut out), held as u32);
        index.drop_instance(0);
        assert_eq!(index.lookup(&chain, &mut out), 0);
        assert!(!index.holds(0, chain[0]));
        assert_eq!(index.remove(0, &chain), 0);
        assert_whole(&index);
    }
    empty(&mut index);
}

#[test]
fn what_is_not_swept_yet_makes_room_for_what_is_stored() {
    let chains: Vec<_> = (1..3).map(|trunk| Chain { trunk, fork: CHAIN, branch: 1 }.hashes()).collect();
    for limits in [Limits { entries: CHAIN, covers: 9 }, Limits { entries: 1000, covers: 1 }] {
        let mut index = PrefixIndex::new(limits);
        index.store(0, None, &chains[0]);
        assert_eq!(index.store(1, None, &chains[1]).refused, CHAIN);
        index.drop_instance(0);
        assert_eq!(index.store(1, None, &chains[1]), Stored { new: CHAIN, ..Stored::default() });
        empty(&mut index);
    }
}

#[test]
fn a_lost_block_ends_the_match_and_its_return_heals_it() {
    let chain = Chain { trunk: 1, fork: CHAIN, branch: 1 }.hashes();
    let mut index = PrefixIndex::new(Limits::default());
    index.store(0, None, &chain[..10]);
    index.store(2, None, &chain[..10]);
    let mut out = [0; 3];
    assert_eq!(index.remove(0, &chain[3..4]), 1);
    assert_eq!(index.lookup(&chain, &mut out), 10);
    assert_eq!(out, [3, 0, 10]);
    let stored = index.store(0, Some(chain[2]), &chain[3..4]);
    assert_eq!(stored, Stored { shared: 1, ..Stored::default() });
    index.lookup(&chain, &mut out);
    assert_eq!(out, [10, 0, 10]);
}

#[test]
fn the_middle_of_a_run_goes_and_comes_back() {
    let chain = Chain { trunk: 1, fork: CHAIN, branch: 1 }.hashes();
    let mut index = PrefixIndex::new(Limits::default());
    let mut out = [0; SLOTS];
    for slot in 0..SLOTS {
        index.store(slot as u16, None, &chain);
    }
    assert_eq!(index.stats().runs, 1);
    for slot in 0..SLOTS {
        assert_eq!(index.remove(slot as u16, &chain[20..44]), 24);
        assert_whole(&index);
    }
    assert_eq!(index.stats().runs, 2, "two pages of the middle that nobody holds are gone");
    assert_eq!(index.lookup(&chain, &mut out), 20);
    for slot in 0..SLOTS {
        index.store(slot as u16, Some(chain[19]), &chain[20..44]);
        index.lookup(&chain, &mut out);
        assert_eq!(out[slot], CHAIN as u32);
        assert_whole(&index);
    }
    empty(&mut index);
}

#[test]
fn a_block_told_behind_a_wrong_one_is_still_found_behind_the_right_one() {
    let chain = Chain { trunk: 1, fork: CHAIN, branch: 1 }.hashes();
    let mut index = PrefixIndex::new(Limits::default());
    let mut lie = vec![u64::MAX];
    lie.extend(&chain[6..]);
    index.store(0, None, &lie);
    index.store(1, None, &chain[..6]);
    index.store(1, Some(chain[5]), &chain[6..]);
    let mut out = [0; 2];
    index.lookup(&chain, &mut out);
    assert_eq!(out, [0, CHAIN as u32]);
    empty(&mut index);
}

#[test]
fn a_block_that_is_told_twice_in_one_message_is_one_block() {
    let mut index = PrefixIndex::new(Limits::default());
    for hashes in [[0, 0, 0, 0], [7, 0, 7, 0], [7, 8, 8, 7]] {
        let stored = index.store(3, None, &hashes);
        assert_eq!(stored.new + stored.shared + stored.repeated, 4);
    }
    assert_eq!(index.len(), 3);
    assert!([0, 7, 8].iter().all(|&hash| index.holds(3, hash)));
    empty(&mut index);
}

#[test]
fn slots_beyond_the_answer_are_left_out() {
    let chain = Chain { trunk: 1, fork: CHAIN, branch: 1 }.hashes();
    let mut index = PrefixIndex::new(Limits::default());
    index.store(7, None, &chain);
    let mut out = [1; 2];
    assert_eq!(index.lookup(&chain, &mut out), 0);
    assert_eq!(out, [0; 2]);
    assert_eq!(index.lookup(&[], &mut out), 0);
}

#[test]
fn memory_of_an_unshared_entry_is_at_most_32_bytes() {
    let mut index = PrefixIndex::new(Limits::default());
    let mut hash = 1u64;
    for event in 0..20_000 {
        let blocks: Vec<u64> = (0..16)
            .map(|_| {
                hash = hash.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                hash
            })
            .collect();
        index.store(event % 64, None, &blocks);
        let stats = index.stats();
        if event > 1_000 && event % 500 == 0 {
            assert!(stats.bytes <= 32 * stats.entries, "{stats:?}");
        }
    }
}
