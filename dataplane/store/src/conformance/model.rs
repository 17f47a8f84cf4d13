//! Random sequences of operations, compared with a map. A failure is shrunk and names the seed that replays it:
//! `KVASIR_SEED=... cargo test ...`.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::{block, get_all, is_block, key, put_all};
use crate::store::{BlockStore, Stored};

/// What the tier under test may do besides what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    None,
    /// Operations may fail, and then have changed nothing; blocks may turn out damaged, and are missing then.
    Injected,
}

#[derive(Clone, Debug)]
enum Op {
    Put(Vec<(u64, u32)>),
    Get(Vec<u64>),
    Remove(Vec<u64>),
    Exists,
    Flush,
    Reopen,
}

const KEYS: u64 = 24;
const SIZE_MAX: u32 = 20_000;
const CASES: u32 = 24;

/// Compares a tier with a map. `fresh` opens an empty one.
///
/// # Panics
/// If they differ, with the seed and the shortest sequence found that shows it.
pub fn check(fresh: impl Fn() -> Arc<dyn BlockStore>, faults: Faults) {
    run(false, |ops| {
        let store = fresh();
        let mut model = Model { sizes: HashMap::new(), faults };
        ops.iter().try_for_each(|op| model.step(&*store, op))
    });
}

/// [`check`], with the tier closed and opened again now and then.
///
/// # Panics
/// As `check`.
pub fn check_durable<P>(place: impl Fn() -> P, open: impl Fn(&P) -> Arc<dyn BlockStore>) {
    run(true, |ops| {
        let place = place();
        let mut store = open(&place);
        let mut model = Model { sizes: HashMap::new(), faults: Faults::None };
        for op in ops {
            if let Op::Reopen = op {
                prop_assert_eq!(store.flush().wait(), Ok(()));
                drop(store);
                store = open(&place);
            } else {
                model.step(&*store, op)?;
            }
        }
        Ok(())
    });
}

fn run(durable: bool, test: impl Fn(&[Op]) -> Result<(), TestCaseError>) {
    let seed = std::env::var("KVASIR_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) ^ 0x5eed_0000);
    let config = Config {
        cases: CASES,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    let ops = prop::collection::vec(op(durable), 1..40);
    if let Err(error) = TestRunner::new(config).run(&ops, |ops| test(&ops)) {
        panic!("KVASIR_SEED={seed} replays this: {error}");
    }
}

fn op(durable: bool) -> impl Strategy<Value = Op> {
    let keys = || prop::collection::vec(0..KEYS, 1..6);
    prop_oneof![
        4 => prop::collection::vec((0..KEYS, 1..SIZE_MAX), 1..6).prop_map(Op::Put),
        4 => keys().prop_map(Op::Get),
        2 => keys().prop_map(Op::Remove),
        1 => Just(Op::Exists),
        1 => Just(Op::Flush),
        u32::from(durable) => Just(Op::Reopen),
    ]
}

/// The sizes of the blocks that the tier should hold.
struct Model {
    sizes: HashMap<u64, u32>,
    faults: Faults,
}

impl Model {
    fn step(&mut self, store: &dyn BlockStore, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Put(blocks) => self.put(store, blocks)?,
            Op::Get(keys) => self.get(store, keys)?,
            Op::Remove(keys) => self.remove(store, keys)?,
            Op::Exists => self.same_keys(store)?,
            Op::Flush => self.allowed(store.flush().wait().map(drop))?,
            Op::Reopen => {}
        }
        let (stats, bytes) = (store.stats(), self.sizes.values().map(|&size| u64::from(size)).sum::<u64>());
        prop_assert_eq!((stats.blocks, stats.block_bytes), (self.sizes.len() as u64, bytes));
        Ok(())
    }

    fn put(&mut self, store: &dyn BlockStore, blocks: &[(u64, u32)]) -> Result<(), TestCaseError> {
        // It is open which of several puts under one name wins, so a batch names each block once.
        let mut batch = blocks.to_vec();
        batch.sort_unstable();
        batch.dedup_by_key(|&mut (n, _)| n);
        let puts = batch.iter().map(|&(n, size)| block(n, size)).collect();
        for (&(n, size), outcome) in batch.iter().zip(put_all(store, puts)) {
            let held = self.sizes.contains_key(&n);
            match outcome {
                Ok(Stored::Stored) => {
                    prop_assert!(!held, "block {} was stored twice", n);
                    self.sizes.insert(n, size);
                }
                Ok(Stored::AlreadyStored) => prop_assert!(held, "block {} was not there", n),
                Err(error) => self.allowed(Err(error))?,
            }
        }
        Ok(())
    }

    fn get(&mut self, store: &dyn BlockStore, keys: &[u64]) -> Result<(), TestCaseError> {
        for (&n, found) in keys.iter().zip(get_all(store, keys, SIZE_MAX as usize)) {
            let size = self.sizes.get(&n).copied();
            match (found, size) {
                (Ok(Some(found)), Some(size)) => is_block(n, size, &found),
                (Ok(None), Some(_)) if self.faults == Faults::Injected => drop(self.sizes.remove(&n)),
                (Ok(None), None) => {}
                (Err(error), _) => self.allowed(Err(error))?,
                (Ok(found), size) => {
                    let found = found.map(|(loaded, _)| loaded);
                    prop_assert!(false, "block {}: found {:?}, expected size {:?}", n, found, size);
                }
            }
        }
        Ok(())
    }

    fn remove(&mut self, store: &dyn BlockStore, keys: &[u64]) -> Result<(), TestCaseError> {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        let gone = store.remove(keys.iter().map(|&n| key(n)).collect()).wait();
        prop_assert_eq!(gone.len(), keys.len());
        for (n, gone) in keys.into_iter().zip(gone) {
            match gone {
                Ok(gone) => prop_assert_eq!(gone, self.sizes.remove(&n).is_some(), "removal of block {}", n),
                Err(error) => self.allowed(Err(error))?,
            }
        }
        Ok(())
    }

    fn same_keys(&self, store: &dyn BlockStore) -> Result<(), TestCaseError> {
        let keys: Vec<_> = (0..KEYS).map(key).collect();
        let expected: Vec<_> = (0..KEYS).map(|n| self.sizes.get(&n).copied()).collect();
        prop_assert_eq!(store.sizes(&keys), expected);
        let expected: Vec<_> = (0..KEYS).map(|n| self.sizes.contains_key(&n)).collect();
        prop_assert_eq!(store.exists(&keys), expected);
        Ok(())
    }

    fn allowed(&self, result: Result<(), crate::store::TierError>) -> Result<(), TestCaseError> {
        prop_assert!(result.is_ok() || self.faults == Faults::Injected, "{:?}", result);
        Ok(())
    }
}
