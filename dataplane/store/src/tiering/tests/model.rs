//! Random calls on two threads over a tier that fails by chance, with an evictor beside them.
//!
//! Blocks come back bit-exact or are missing, always. Only one thread stores and removes a given block, so in the end
//! it is known which blocks must be gone everywhere. What the tier took, it still has, lost, or was told to remove.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::*;
use crate::store::{Put, PutDone};

const BLOCKS: u64 = 48;
const THREADS: u64 = 2;
const CASES: u32 = 24;

#[derive(Clone, Debug)]
enum Op {
    Put(u64),
    Lend(Vec<u64>),
    Read(Vec<u64>, u64),
    Remove(u64),
    Exists,
}

fn op() -> impl Strategy<Value = Op> {
    let blocks = || prop::collection::vec(0..BLOCKS, 1..8);
    prop_oneof![
        8 => (0..BLOCKS).prop_map(Op::Put),
        3 => blocks().prop_map(Op::Lend),
        3 => (blocks(), 1u64..200_000).prop_map(|(blocks, max)| Op::Read(blocks, max)),
        1 => (0..BLOCKS).prop_map(Op::Remove),
        1 => Just(Op::Exists),
    ]
}

fn size(n: u64) -> u32 {
    1 + (n * 7919 % 20_000) as u32
}

/// A faulty tier whose removals do work, so that what must be gone is known.
struct SureRemoves {
    faulty: FaultStore,
    inner: Arc<MemoryStore>,
    removed: AtomicU64,
}

impl BlockStore for SureRemoves {
    fn capabilities(&self) -> Capabilities {
        self.faulty.capabilities()
    }
    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        self.faulty.put(batch)
    }
    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.faulty.get(batch)
    }
    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        self.faulty.sizes(keys)
    }
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        let gone = self.inner.remove(keys).wait();
        let count = gone.iter().filter(|gone| **gone == Ok(true)).count();
        self.removed.fetch_add(count as u64, Ordering::Relaxed);
        Pending::ready(gone)
    }
    fn flush(&self) -> Pending<Result<(), TierError>> {
        self.faulty.flush()
    }
    fn stats(&self) -> TierStats {
        self.faulty.stats()
    }
}

/// One thread's calls. It alone puts and removes the blocks whose `n % THREADS` is its number.
struct Caller<'a> {
    tiering: &'a Tiering,
    owner: OwnerId,
    thread: u64,
    /// Own blocks put since they were last removed.
    put: [bool; BLOCKS as usize],
}

impl Caller<'_> {
    fn step(&mut self, op: &Op) {
        let own = |n: u64| n / THREADS * THREADS + self.thread;
        match op {
            Op::Put(n) => self.put(own(*n)),
            Op::Lend(blocks) => self.lend(blocks),
            Op::Read(blocks, max) => self.read(blocks, *max),
            Op::Remove(n) => {
                let n = own(*n);
                // Another thread may be bringing it up.
                while self.tiering.remove(&[key(n)], 0).unwrap()[0] == Remove::Unfinished {
                    std::thread::yield_now();
                }
                self.put[n as usize] = false;
            }
            Op::Exists => drop(self.tiering.residency(&(0..BLOCKS).map(key).collect::<Vec<_>>()).unwrap()),
        }
    }

    fn put(&mut self, n: u64) {
        let meta = BlockMeta::single(key(n), size(n));
        let put = self.tiering.dram().put(self.owner, &meta, &bytes_of(n, size(n)), 0).unwrap();
        self.put[n as usize] |= matches!(put, Reserve::Reserved(_));
    }

    fn lend(&self, blocks: &[u64]) {
        let keys: Vec<_> = blocks.iter().copied().map(key).collect();
        for (&n, lookup) in blocks.iter().zip(self.tiering.get(self.owner, &keys, 0, 0).unwrap()) {
            let Lookup::Hit(lease) = lookup else { continue };
            let bytes = self.tiering.dram().pool().mapping().bytes(lease.offset, lease.size.into()).unwrap();
            assert_eq!(bytes, bytes_of(n, size(n)), "block {n} was lent as other bytes");
            assert_eq!(lease.checksum, bytes.checksum());
            self.tiering.dram().release(self.owner, &[lease.id]).unwrap()[0].clone().unwrap();
        }
    }

    fn read(&self, blocks: &[u64], max: u64) {
        let keys: Vec<_> = blocks.iter().copied().map(key).collect();
        let (mut total, reads) = (0, self.tiering.read(&keys, 0, 0, max));
        for (&n, read) in blocks.iter().zip(&reads) {
            let bytes = match read {
                Read::Held(held) => held.bytes(),
                Read::Onboarded(block) => block.bytes().into(),
                Read::Missing | Read::Throttled => continue,
            };
            total += bytes.len() as u64;
            assert_eq!(bytes, bytes_of(n, size(n)), "block {n} was read as other bytes");
        }
        assert!(total <= max, "{total} B where {max} were allowed");
        for read in &reads {
            if let Read::Onboarded(block) = read {
                self.tiering.promote_on_evidence(block, 0);
            }
        }
    }
}

/// Ends the evictor also when a caller panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn evict_until(tiering: &Tiering, stop: &AtomicBool) {
    let mut evictor = Fifo::default();
    let bound = tiering.dram().pool().bytes() / 4;
    while !stop.load(Ordering::Relaxed) {
        let pressure = tiering.dram().wait_pressure(Duration::from_millis(1));
        if pressure.excess_bytes() > 0 || pressure.waiting_puts > 0 {
            evictor.turn(tiering, 4, Destination::HostDecides, pressure.waiting_puts > 0);
            tiering.dram().reclaim(4, 0);
        }
        let stats = tiering.stats().levels[0].offload;
        assert!(stats.queued_bytes <= bound, "{stats:?}");
    }
}

fn run(seed: u64, calls: &[Vec<Op>]) {
    let inner = memory(Tier::Nvme);
    let rates = Rates { io: 60, full: 40, damaged: 40, cancelled: 30 };
    let faulty = FaultStore::new(inner.clone(), seed, rates);
    let below = Arc::new(SureRemoves { faulty, inner: inner.clone(), removed: AtomicU64::new(0) });
    let config = DramConfig {
        pool_bytes: 40 * 4096,
        blocks_max: 256,
        put_wait: Duration::from_millis(5),
        low_free: 0.2,
        high_free: 0.4,
        ..DramConfig::default()
    };
    let tiering_config = TieringConfig { load_timeout: PATIENCE, load_bytes: 100_000, ..everything() };
    let store = Arc::new(DramStore::open(config).unwrap());
    let tiering =
        Tiering::start(store, vec![below.clone()], Box::new(AdmitAll), tiering_config, Clock::start())
            .unwrap();
    let stop = AtomicBool::new(false);
    let put: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| evict_until(&tiering, &stop));
        let _stop = Stop(&stop);
        let callers: Vec<_> = (0..THREADS)
            .zip(calls)
            .map(|(thread, ops)| {
                let mut caller = Caller {
                    tiering: &tiering,
                    owner: tiering.dram().new_owner(),
                    thread,
                    put: [false; BLOCKS as usize],
                };
                scope.spawn(move || {
                    ops.iter().for_each(|op| caller.step(op));
                    caller.put
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    assert!(tiering.drain(Instant::now() + PATIENCE));
    check_end(&tiering, &below, &put);
}

fn check_end(tiering: &Tiering, below: &SureRemoves, put: &[[bool; BLOCKS as usize]]) {
    for n in 0..BLOCKS {
        let there = tiering.exists(&[key(n)]).unwrap()[0];
        assert!(put[(n % THREADS) as usize][n as usize] || !there, "block {n} came back after its removal");
        if below.inner.exists(&[key(n)])[0] {
            assert!(crate::conformance::get_all(&*below.inner, &[n], 20_001)[0].is_ok());
        }
    }
    let (offload, stats) = (tiering.stats().levels[0].offload, below.stats());
    let accounted = stats.blocks + stats.corrupt + below.removed.load(Ordering::Relaxed);
    assert_eq!(offload.stored, accounted, "{offload:?} {stats:?}");
    assert_eq!((offload.queued, offload.queued_bytes, tiering.stats().loading_bytes), (0, 0, 0));
}

#[test]
fn random_calls_on_two_threads_keep_every_byte() {
    let seed = std::env::var("KVASIR_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let config = Config {
        cases: CASES,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 0,
        ..Config::default()
    };
    let calls = prop::collection::vec(prop::collection::vec(op(), 200..400), THREADS as usize);
    let result = TestRunner::new(config).run(&calls, |calls| {
        run(seed, &calls);
        Ok(())
    });
    if let Err(error) = result {
        panic!("KVASIR_SEED={seed} replays these calls (not how the threads interleave): {error}");
    }
}
