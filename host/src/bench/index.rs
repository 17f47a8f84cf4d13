//! `kvasir bench index`: the prefix index as it stands in the daemon, single-threaded.

use super::{Row, conversation, cpu_time, time_prepared};
use crate::prefix_index::{Limits, PrefixIndex, SWEEP, Slot};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::{Duration, Instant};

/// Blocks in one store event, as engines send them.
const EVENT: usize = 16;

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Lookups timed per row.
    pub lookups: usize,
    /// Distinct blocks in the index that lookups are made in.
    pub blocks: usize,
    /// Distinct blocks stored, shared by nobody.
    pub stored: usize,
    /// Requests of the conversation trace, if there is one.
    pub requests: usize,
}

impl Size {
    pub const FULL: Self = Self { lookups: 50_000, blocks: 1 << 20, stored: 1 << 20, requests: usize::MAX };
    /// For tests: every row, no meaning in the numbers.
    pub const SMOKE: Self = Self { lookups: 200, blocks: 1 << 14, stored: 1 << 14, requests: 300 };
}

/// The rows of the report; chains, depths and the order of lookups follow from `seed`.
///
/// # Errors
/// As [`conversation::rows`].
pub fn rows(size: Size, seed: u64) -> Result<Vec<Row>, conversation::Error> {
    let mut rows = Vec::new();
    for (depth, workers) in [(16, 8), (1_024, 64), (8_192, 64), (16, 512)] {
        let lookups = Lookups::new(depth, workers, size, seed);
        let mut matched = vec![0; workers];
        // The hashes of a request are in the cache, since it was decoded just before; the index may not be.
        let times = time_prepared(
            size.lookups,
            |i| lookups.query(i).to_vec(),
            |query| {
                std::hint::black_box(lookups.index.lookup(query, &mut matched));
            },
        );
        rows.push(Row::of_times(format!("lookup/{depth}x{workers}"), &times));
    }
    let (store, memory) = store(size.stored, seed);
    rows.push(Row::new("store/16-block", store, "blocks/cpu-s"));
    rows.push(Row::new("memory/entry", memory, "bytes"));
    let [longest, all] = drop_instance(size.stored, seed);
    rows.push(Row::new("drop/longest", longest.as_secs_f64() * 1e6, "us"));
    rows.push(Row::new("drop/all", all.as_secs_f64() * 1e6, "us"));
    rows.extend(conversation::rows(size.requests)?);
    Ok(rows)
}

/// Whole chains looked up at random among many; every worker holds each of them to a depth of its own.
pub struct Lookups {
    pub index: PrefixIndex,
    chains: Vec<Vec<u64>>,
    /// Which chain is next, over and over.
    order: Vec<u32>,
}

impl Lookups {
    pub fn new(depth: usize, workers: usize, size: Size, seed: u64) -> Self {
        // Covers take most of the memory when workers outnumber blocks: keep these tables comparable.
        let count = (size.blocks / depth).min((size.blocks / workers).max(1)).max(2);
        let chains = chains(count, depth, seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 1);
        let mut index = PrefixIndex::new(Limits::default());
        for chain in &chains {
            for worker in 0..workers {
                let held = rng.next_u32() as usize % depth + 1;
                store_chain(&mut index, worker as Slot, &chain[..held]);
            }
        }
        let order = (0..size.lookups).map(|_| rng.next_u32() % chains.len() as u32).collect();
        Self { index, chains, order }
    }

    /// The chain of lookup `i`.
    pub fn query(&self, i: usize) -> &[u64] {
        &self.chains[self.order[i % self.order.len()] as usize]
    }
}

/// Blocks stored per CPU-second, and bytes per entry: chains of 64 blocks that nobody shares, growing
/// from empty, so that both include the cost of growing.
fn store(blocks: usize, seed: u64) -> (f64, f64) {
    let chains = chains(blocks / 64, 64, seed);
    let mut index = PrefixIndex::new(Limits::default());
    let ((), spent) = cpu_time(|| {
        for (i, chain) in chains.iter().enumerate() {
            store_chain(&mut index, (i % 64) as Slot, chain);
        }
    });
    let stats = index.stats();
    (stats.entries as f64 / spent.as_secs_f64(), stats.bytes as f64 / stats.entries as f64)
}

/// What it takes to forget one of four instances that hold all blocks: the longest call, for which others wait, and all
/// calls together.
fn drop_instance(blocks: usize, seed: u64) -> [Duration; 2] {
    let mut index = PrefixIndex::new(Limits::default());
    for (i, chain) in chains(blocks / 64, 64, seed).iter().enumerate() {
        store_chain(&mut index, (i % 4) as Slot, chain);
    }
    let start = Instant::now();
    index.drop_instance(0);
    let mut calls = vec![start.elapsed()];
    loop {
        let start = Instant::now();
        let more = index.sweep(SWEEP);
        calls.push(start.elapsed());
        if !more {
            break;
        }
    }
    [calls.iter().copied().max().unwrap_or_default(), calls.iter().sum()]
}

/// Chains that share no block.
pub fn chains(count: usize, depth: usize, seed: u64) -> Vec<Vec<u64>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| (0..depth).map(|_| rng.next_u64()).collect()).collect()
}

/// Stores a chain event by event.
pub fn store_chain(index: &mut PrefixIndex, slot: Slot, chain: &[u64]) {
    let mut parent = None;
    for event in chain.chunks(EVENT) {
        index.store(slot, parent, event);
        parent = event.last().copied();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_promised_row_is_measured() {
        let rows = rows(Size::SMOKE, 1).unwrap();
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        let lookups = ["lookup/16x8", "lookup/1024x64", "lookup/8192x64", "lookup/16x512"];
        assert_eq!(names[..4], lookups);
        assert_eq!(names[4..8], ["store/16-block", "memory/entry", "drop/longest", "drop/all"]);
        assert!(rows.iter().all(|row| row.value > 0.0));
    }
}
