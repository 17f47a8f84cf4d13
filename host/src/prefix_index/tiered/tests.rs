use super::*;
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap};

const SLOTS: usize = 3;
const CHAIN: u64 = 24;
const TIERS: [Tier; 4] = [Tier::Hbm, Tier::Dram, Tier::Nvme, Tier::Remote];

#[derive(Clone, Debug)]
enum Op {
    Store { slot: usize, tier: Option<Tier>, from: u64, len: u64 },
    Remove { slot: usize, tier: Option<Tier>, blocks: Vec<u64> },
    Drop { slot: usize },
    Sweep,
}

fn op() -> impl Strategy<Value = Op> {
    let tier = || prop::option::weighted(0.8, prop::sample::select(TIERS.to_vec()));
    let blocks = || prop::collection::vec(1..=CHAIN, 1..12);
    prop_oneof![
        8 => (0..SLOTS, tier(), 0..CHAIN, 1..CHAIN).prop_map(|(slot, tier, from, len)| Op::Store { slot, tier, from, len }),
        6 => (0..SLOTS, tier(), blocks()).prop_map(|(slot, tier, blocks)| Op::Remove { slot, tier, blocks }),
        1 => (0..SLOTS).prop_map(|slot| Op::Drop { slot }),
        1 => Just(Op::Sweep),
    ]
}

/// What an instance holds: in which tiers each block lies, none of them known if it was told without one.
#[derive(Clone, Default)]
struct Held {
    names_tiers: bool,
    blocks: HashMap<u64, BTreeSet<Tier>>,
}

impl Held {
    fn store(&mut self, tier: Option<Tier>, blocks: &[u64]) {
        self.names_tiers |= tier.is_some();
        for &block in blocks {
            self.blocks.entry(block).or_default().extend(tier);
        }
    }

    fn remove(&mut self, tier: Option<Tier>, blocks: &[u64]) {
        for block in blocks {
            if let Some(tiers) = self.blocks.get_mut(block) {
                tiers.retain(|at| tier.is_some_and(|tier| *at != tier));
                if tiers.is_empty() {
                    self.blocks.remove(block);
                }
            }
        }
    }

    /// Leading blocks of the chain in one of these tiers.
    fn leading(&self, chain: &[u64], tiers: &[Tier]) -> u32 {
        let is_there = |block: &&u64| {
            let at = self.blocks.get(block);
            at.is_some_and(|at| !self.names_tiers || tiers.iter().any(|tier| at.contains(tier)))
        };
        chain.iter().take_while(is_there).count() as u32
    }

    fn all(&self, chain: &[u64]) -> u32 {
        chain.iter().take_while(|block| self.blocks.contains_key(block)).count() as u32
    }
}

fn apply(op: &Op, chain: &[u64], index: &mut TieredIndex, model: &mut [Held; SLOTS]) {
    match op {
        Op::Store { slot, tier, from, len } => {
            let (from, end) = (*from as usize, (from + len).min(CHAIN) as usize);
            let parent = from.checked_sub(1).map(|before| chain[before]);
            index.store(*slot as u16, *tier, parent, &chain[from..end]);
            model[*slot].store(*tier, &chain[from..end]);
        }
        Op::Remove { slot, tier, blocks } => {
            index.remove(*slot as u16, *tier, blocks);
            model[*slot].remove(*tier, blocks);
        }
        Op::Drop { slot } => {
            index.drop_instance(*slot as u16);
            model[*slot] = Held::default();
        }
        Op::Sweep => {
            index.sweep(5);
        }
    }
}

fn check(index: &TieredIndex, chain: &[u64], model: &[Held; SLOTS]) {
    let (mut all, mut near) = ([9; SLOTS], [9; SLOTS]);
    for chain in [chain, &chain[..7]] {
        index.lookup(chain, &mut all);
        assert_eq!(all, std::array::from_fn(|slot| model[slot].all(chain)));
        for (which, tiers) in [(Near::Hbm, &TIERS[..1]), (Near::Dram, &TIERS[..2])] {
            index.lookup_near(which, chain, &all, &mut near);
            let expected: [u32; SLOTS] = std::array::from_fn(|slot| model[slot].leading(chain, tiers));
            assert_eq!(near, expected, "{which:?}");
        }
    }
    assert_eq!(index.names_tiers(), model.iter().any(|held| held.names_tiers));
}

proptest! {
    #[test]
    fn agrees_with_sets_of_tiers_by_block(ops in prop::collection::vec(op(), 1..80)) {
        let chain: Vec<u64> = (1..=CHAIN).collect();
        let (mut index, mut model) = (TieredIndex::new(Limits::default()), <[Held; SLOTS]>::default());
        for op in &ops {
            apply(op, &chain, &mut index, &mut model);
            check(&index, &chain, &model);
        }
        (0..SLOTS as u16).for_each(|slot| index.drop_instance(slot));
        while index.sweep(5) {}
        let Stats { entries, runs, covers, .. } = index.stats();
        prop_assert_eq!((entries, runs, covers, index.names_tiers()), (0, 0, 0, false));
    }

    /// What does not fit costs misses, and never more than there is.
    #[test]
    fn where_an_index_is_full_less_is_known(ops in prop::collection::vec(op(), 1..80), most in 1..30usize) {
        let chain: Vec<u64> = (1..=CHAIN).collect();
        let mut index = TieredIndex::new(Limits { entries: most, covers: most });
        let mut model = <[Held; SLOTS]>::default();
        for op in &ops {
            apply(op, &chain, &mut index, &mut model);
            let (mut all, mut near) = ([0; SLOTS], [0; SLOTS]);
            index.lookup(&chain, &mut all);
            for (slot, held) in model.iter().enumerate() {
                prop_assert!(all[slot] <= held.all(&chain));
            }
            for (which, tiers) in [(Near::Hbm, &TIERS[..1]), (Near::Dram, &TIERS[..2])] {
                index.lookup_near(which, &chain, &all, &mut near);
                for (slot, held) in model.iter().enumerate() {
                    prop_assert!(near[slot] <= all[slot]);
                    prop_assert!(near[slot] <= held.leading(&chain, tiers));
                }
            }
        }
    }
}

#[test]
fn a_block_in_two_tiers_that_leaves_one_is_in_the_other() {
    let mut index = TieredIndex::new(Limits::default());
    let by_tier = |index: &TieredIndex| {
        let mut columns = [[0; 2]; 3];
        let [all, hbm, dram] = &mut columns;
        index.lookup(&[1, 2, 3], all);
        index.lookup_near(Near::Hbm, &[1, 2, 3], all, hbm);
        index.lookup_near(Near::Dram, &[1, 2, 3], all, dram);
        columns.map(|[first, _]| first)
    };
    index.store(0, Some(Tier::Hbm), None, &[1, 2, 3]);
    index.store(0, Some(Tier::Dram), Some(1), &[2, 3]);
    index.store(1, None, None, &[1]);
    assert_eq!(by_tier(&index), [3, 3, 3]);
    index.remove(0, Some(Tier::Hbm), &[3, 2]);
    assert_eq!(by_tier(&index), [3, 1, 3]);
    index.store(0, Some(Tier::Nvme), Some(2), &[3]);
    index.remove(0, Some(Tier::Dram), &[3]);
    assert_eq!(by_tier(&index), [3, 1, 2]);
    index.remove(0, Some(Tier::Nvme), &[3]);
    assert_eq!(by_tier(&index), [2, 1, 2]);
    index.remove(0, None, &[2]);
    assert_eq!(by_tier(&index), [1, 1, 1], "from all tiers");
    index.drop_instance(0);
    assert!(!index.names_tiers() && !index.is_empty(), "the other one names none");
}
