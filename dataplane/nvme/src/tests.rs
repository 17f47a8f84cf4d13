//! The tier against a map: whatever happens to process and files, a block is bit-exact or missing.

mod power;

use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tempfile::TempDir;

use super::format::Place;
use super::io::OpKind;
use super::segments::State;
use super::*;
use kvasir_memory::buffer::Buffer;
use kvasir_protocol::block::{BlockMeta, checksum};
use kvasir_store::conformance;
use kvasir_store::store::{Loaded, Stored};

const SEGMENT: u64 = 64 << 10;

fn config(dir: &Path, segments: u64) -> NvmeConfig {
    NvmeConfig { capacity_bytes: segments * SEGMENT, segment_bytes: SEGMENT, ..NvmeConfig::new(dir) }
}

fn open(config: &NvmeConfig) -> NvmeStore {
    NvmeStore::open(config.clone()).unwrap()
}

fn key(n: u32) -> BlockKey {
    BlockKey(u128::from(n) << 64 | u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The one content that block `n` has, whenever it is stored: blocks are named by their content.
fn content(n: u32) -> (BlockMeta, Vec<u8>) {
    let size = 1 + (n.wrapping_mul(2_654_435_761) >> 16) % 12_000;
    let parent = (!n.is_multiple_of(4)).then(|| key(n - 1));
    let (class, tenant) = ((n % 7) as u16, (n % 3) as u16);
    let meta = BlockMeta { key: key(n), parent, depth: n % 4, class, tenant, ttl_ms: 0, size };
    let bytes = (0..size).map(|at| (at.wrapping_mul(31) ^ n.wrapping_mul(0x85eb_ca6b) >> (at % 24)) as u8);
    (meta, bytes.collect())
}

fn put_of(n: u32) -> Put {
    let (meta, bytes) = content(n);
    Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() }
}

fn put(store: &NvmeStore, ns: &[u32]) -> Vec<Result<Stored, TierError>> {
    let done = store.put(ns.iter().map(|&n| put_of(n)).collect()).wait();
    done.into_iter().map(|done| done.outcome).collect()
}

/// Which of the blocks the store returns; what it returns is bit-exact.
fn get(store: &NvmeStore, ns: &[u32]) -> Vec<bool> {
    let gets = ns.iter().map(|&n| Get { key: key(n), buffer: Buffer::zeroed(12_000) }).collect();
    let check = |(&n, done): (&u32, GetDone)| {
        let Some(loaded) = done.outcome.unwrap() else { return false };
        let (meta, bytes) = content(n);
        assert_eq!(loaded, Loaded { meta, checksum: checksum(&bytes) });
        assert!(done.buffer.bytes()[..bytes.len()] == bytes, "block {n} is not what was stored");
        assert!(done.buffer.bytes()[bytes.len()..].iter().all(|&byte| byte == 0), "written behind block {n}");
        true
    };
    ns.iter().zip(store.get(gets).wait()).map(check).collect()
}

fn remove(store: &NvmeStore, ns: &[u32]) -> Vec<bool> {
    store.remove(ns.iter().map(|&n| key(n)).collect()).wait().into_iter().map(Result::unwrap).collect()
}

/// Changes what is on the disk at the beginning of a block; a second time changes it back.
fn flip(dir: &Path, place: Place) {
    let segment = dir.join(format!("segment-{:06}", place.segment));
    let segment = OpenOptions::new().read(true).write(true).open(segment).unwrap();
    let (mut byte, at) = ([0], u64::from(place.page) * 4096);
    segment.read_exact_at(&mut byte, at).unwrap();
    segment.write_all_at(&[!byte[0]], at).unwrap();
}

/// The books are what the index says, and no more is in use than there is. The janitor may begin to empty another segment
/// at any time, so they are looked at until they agree.
fn audit(store: &NvmeStore) {
    until(|| books(store));
}

/// Tries again until it is so; what never becomes so ends with why.
fn until(mut is_so: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(why) = is_so() {
        assert!(Instant::now() < deadline, "{why}");
        std::thread::yield_now();
    }
}

/// Why the books do not agree.
fn books(store: &NvmeStore) -> Result<(), String> {
    let segments = store.shared.segments();
    for (number, segment) in segments.list.iter().enumerate() {
        if segment.readers + segment.writers > 0 || segment.state == State::Reclaiming {
            return Err(format!("segment {number} is busy: {segment:?}"));
        }
        assert!(segment.live_pages + segment.dead_pages <= segments.pages, "segment {number}: {segment:?}");
    }
    let live: u64 = segments.list.iter().map(|segment| u64::from(segment.live_blocks)).sum();
    let pages: u64 = segments.list.iter().map(|segment| u64::from(segment.live_pages)).sum();
    drop(segments);
    let counters = &store.shared.counters;
    let found = |number| store.shared.index.in_segment(number).len() as u64;
    let counted = [
        (0..store.shared.config.segments()).map(found).sum::<u64>(),
        counters.blocks.load(Ordering::Relaxed),
        counters.claimed_pages.load(Ordering::Relaxed),
        store.shared.under_way.load(Ordering::Relaxed) as u64,
    ];
    let expected = [live, live, pages, 0];
    (counted == expected).then_some(()).ok_or_else(|| {
        format!("blocks found, blocks, pages and calls are {counted:?}, by the segments {expected:?}")
    })
}

/// Room for 49 MiB, in segments that hold a few of the suite's largest blocks.
fn for_suite(dir: &TempDir, io_uring: bool, on_full: OnFull) -> Arc<dyn BlockStore> {
    let config = NvmeConfig {
        capacity_bytes: 64 << 20,
        segment_bytes: 4 << 20,
        io_uring,
        on_full,
        ..NvmeConfig::new(dir.path())
    };
    Arc::new(open(&config))
}

#[test]
fn it_does_what_every_durable_tier_must() {
    conformance::check_durable(|| TempDir::new().unwrap(), |dir| for_suite(dir, true, OnFull::Refuse));
}

#[test]
fn it_does_so_with_threads_and_eviction_too() {
    conformance::check_durable(|| TempDir::new().unwrap(), |dir| for_suite(dir, false, OnFull::Evict));
}

#[test]
fn blocks_come_back_as_they_were_stored_whatever_way_the_disk_is_reached() {
    for (io_uring, direct_io) in [(true, true), (true, false), (false, true), (false, false)] {
        let dir = TempDir::new().unwrap();
        let config = NvmeConfig { io_uring, direct_io, ..config(dir.path(), 64) };
        let ns: Vec<u32> = (0..200).collect();
        for sync in [SyncMode::Flush, SyncMode::Batch] {
            let store = open(&NvmeConfig { sync, ..config.clone() });
            let again = sync == SyncMode::Batch;
            let expected = if again { Stored::AlreadyStored } else { Stored::Stored };
            assert!(put(&store, &ns).into_iter().all(|outcome| outcome == Ok(expected)));
            assert_eq!(
                put(&store, &[1000, 1000]),
                [Ok(if again { expected } else { Stored::Stored }), Ok(Stored::AlreadyStored)]
            );
            assert!(get(&store, &ns).into_iter().all(|hit| hit));
            assert_eq!(get(&store, &[5, 5000, 5]), [true, false, true]);
            assert_eq!(store.report().blocks, if again { 201 } else { 0 });
            store.flush().wait().unwrap();
            audit(&store);
        }
    }
}

#[test]
fn a_batch_is_written_behind_one_header_page() {
    let dir = TempDir::new().unwrap();
    let store =
        open(&NvmeConfig { segment_bytes: 1 << 20, capacity_bytes: 8 << 20, ..NvmeConfig::new(dir.path()) });
    let blocks = 63;
    let of = |n: u32| {
        let buffer = Buffer::copy_of(&vec![n as u8; 4096]);
        Put {
            meta: BlockMeta::single(key(n), 4096),
            checksum: checksum(buffer.bytes()),
            buffer: buffer.into(),
        }
    };
    // The first group of a segment is a small one.
    store.put(vec![of(blocks)]).wait();
    let before = store.stats().written_bytes;
    store.put((0..blocks).map(of).collect()).wait();
    let written = store.stats().written_bytes - before;
    assert_eq!(written, u64::from(blocks + 1) * 4096, "one header page for all of them");
}

#[test]
fn bad_calls_are_refused_and_change_nothing() {
    let dir = TempDir::new().unwrap();
    let store = open(&config(dir.path(), 8));
    let buffer = || Buffer::zeroed(100).into();
    let sized = |size| BlockMeta::single(key(1), size);
    let puts = vec![
        Put { meta: sized(0), checksum: 0, buffer: buffer() },
        Put { meta: sized(1 << 20), checksum: 0, buffer: buffer() },
        Put { meta: sized(101), checksum: 0, buffer: buffer() },
        Put { meta: sized(100), checksum: 0, buffer: buffer() },
    ];
    let done = store.put(puts).wait();
    assert!(done.iter().all(|done| done.buffer.len() == 100));
    let outcomes: Vec<_> = done.into_iter().map(|done| done.outcome).collect();
    assert!(matches!(outcomes[0], Err(TierError::ZeroSize { .. })));
    assert!(matches!(outcomes[1], Err(TierError::TooLarge { .. })));
    assert!(matches!(outcomes[2], Err(TierError::Buffer { .. })));
    assert!(matches!(outcomes[3], Err(TierError::ChecksumMismatch { .. })));
    put(&store, &[3]);
    let done = store.get(vec![Get { key: key(3), buffer: Buffer::zeroed(10) }]).wait();
    assert!(matches!(done[0].outcome, Err(TierError::Buffer { .. })));
    assert_eq!(remove(&store, &[1, 3, 3]), [false, true, false]);
    assert_eq!(store.stats().blocks, 0);
    audit(&store);
    let small = NvmeConfig { items_max: 4, ..config(TempDir::new().unwrap().path(), 8) };
    let small = open(&small);
    let pending = small.put((0..3).map(put_of).collect());
    // Either it is still under way, and two more are too many, or it is done.
    let busy = put(&small, &[8, 9]);
    assert!(busy.iter().all(|outcome| matches!(outcome, Ok(_) | Err(TierError::Busy { limit: 4, .. }))));
    assert!(pending.wait().iter().all(|done| done.outcome.is_ok()));
}

#[test]
fn bad_settings_and_directories_are_refused_with_a_reason() {
    let dir = TempDir::new().unwrap();
    let good = config(dir.path(), 8);
    let refused =
        |config: NvmeConfig| NvmeStore::open(config).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(refused(NvmeConfig { segment_bytes: 5000, ..good.clone() }).contains("segment_bytes"));
    assert!(refused(NvmeConfig { capacity_bytes: SEGMENT, ..good.clone() }).contains("capacity_bytes"));
    assert!(refused(NvmeConfig { queue_depth: 0, ..good.clone() }).contains("queue_depth"));
    assert!(refused(NvmeConfig { dir: "/dev/null/x".into(), ..good.clone() }).contains("/dev/null/x"));
    let store = open(&good);
    drop(store);
    let other = NvmeConfig { segment_bytes: 2 * SEGMENT, capacity_bytes: 32 * SEGMENT, ..good.clone() };
    assert!(refused(other).contains("65536"));
    std::fs::write(dir.path().join("store"), "something else").unwrap();
    assert!(refused(good).contains("empty the directory"));
}

#[test]
fn a_full_store_refuses_and_recovers_by_removing() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path(), 16);
    let store = open(&config);
    let mut stored = Vec::new();
    for n in 0..1000 {
        match put(&store, &[n])[0] {
            Ok(_) => stored.push(n),
            Err(TierError::Full { .. }) => break,
            ref other => panic!("{other:?}"),
        }
    }
    let pages: u64 = stored.iter().map(|&n| u64::from(format::pages(content(n).0.size))).sum();
    assert!(pages * 2 >= config.block_pages_max(), "{pages} of {} pages", config.block_pages_max());
    assert!(get(&store, &stored).into_iter().all(|hit| hit), "nothing was given up");
    // Churn through several times the capacity: space comes back only by being reclaimed.
    let mut next = 1000;
    for round in 0..300 {
        let gone = stored.remove(round * 7 % stored.len());
        assert_eq!(remove(&store, &[gone]), [true]);
        if put(&store, &[next])[0].is_ok() {
            stored.push(next);
        }
        next += 1;
    }
    assert!(get(&store, &stored).into_iter().all(|hit| hit));
    assert!(store.moved_bytes() > 0 && store.stats().used_bytes <= config.capacity_bytes);
    audit(&store);
    assert!(remove(&store, &stored).into_iter().all(|removed| removed));
    assert_eq!(store.stats().blocks, 0);
    drop(store);
    let store = open(&config);
    assert!(get(&store, &(0..next).collect::<Vec<_>>()).into_iter().all(|hit| !hit), "removed is removed");
}

#[test]
fn a_store_that_may_evict_drops_the_oldest() {
    let dir = TempDir::new().unwrap();
    let store = open(&NvmeConfig { on_full: OnFull::Evict, ..config(dir.path(), 16) });
    let ns: Vec<u32> = (0..2000).collect();
    for batch in ns.chunks(16) {
        assert_eq!(put(&store, batch), vec![Ok(Stored::Stored); batch.len()]);
    }
    let held = get(&store, &ns);
    assert!(held[1990..].iter().all(|&hit| hit) && held[..100].iter().all(|&hit| !hit));
    let stats = store.stats();
    assert_eq!(stats.evicted + stats.blocks, 2000);
    audit(&store);
}

/// No segment can be freed here, so each removal takes a page that nothing gives back.
#[test]
fn a_removal_for_which_there_is_no_space_is_refused_and_its_block_is_not_served() {
    let dir = TempDir::new().unwrap();
    let fails = Arc::new(AtomicBool::new(true));
    let failing = fails.clone();
    let fault = move |op: &super::io::Op| {
        let marks_free = op.kind == OpKind::Write && op.slot.is_none();
        (marks_free && failing.load(Ordering::Relaxed)).then(|| Err(std::io::Error::from_raw_os_error(5)))
    };
    let config = NvmeConfig { io_uring: false, ..config(dir.path(), 8) };
    let store = NvmeStore::open_with(config, Faults(Some(Arc::new(fault)))).unwrap();
    let remove = |n: u32| store.remove(vec![key(n)]).wait().remove(0);
    let stored: Vec<u32> = (0..60).filter(|&n| put(&store, &[n])[0].is_ok()).collect();
    let refused = stored.into_iter().find(|&n| remove(n).is_err()).expect("a removal that is refused");
    assert_eq!(get(&store, &[refused]), [false]);
    fails.store(false, Ordering::Relaxed);
    until(|| remove(refused).map(drop).map_err(|error| error.to_string()));
    until(|| put(&store, &[refused]).remove(0).map(drop).map_err(|error| error.to_string()));
    audit(&store);
}

#[test]
fn errors_of_the_device_fail_one_operation_and_nothing_else() {
    let dir = TempDir::new().unwrap();
    let calls = AtomicU64::new(0);
    let fault = move |op: &super::io::Op| {
        let n = calls.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        match (op.kind, n) {
            (OpKind::Write, 0..20) => Some(Err(std::io::Error::from_raw_os_error(28))),
            (OpKind::Write | OpKind::Read, 20..30) => Some(Err(std::io::ErrorKind::Interrupted.into())),
            (OpKind::Read, 30..60) => Some(Err(std::io::Error::from_raw_os_error(5))),
            _ => None,
        }
    };
    let config = NvmeConfig { io_uring: false, ..config(dir.path(), 32) };
    let store = NvmeStore::open_with(config.clone(), Faults(Some(Arc::new(fault)))).unwrap();
    let (mut stored, mut failed, mut unread) = (HashSet::new(), 0, 0);
    for n in 0..300u32 {
        match put(&store, &[n])[0] {
            Ok(_) => drop(stored.insert(n)),
            Err(ref error) => failed += u32::from(error.retryable()),
        }
        if n % 5 == 4 {
            let was_stored = stored.remove(&(n - 2));
            // If it fails, nobody gets the block until a restart, and then it may be there.
            if let Ok(removed) = &store.remove(vec![key(n - 2)]).wait()[0] {
                assert_eq!(*removed, was_stored);
            }
        }
        let asked = n / 2;
        let done = store.get(vec![Get { key: key(asked), buffer: Buffer::zeroed(12_000) }]).wait();
        match &done[0].outcome {
            Ok(loaded) => assert_eq!(loaded.is_some(), stored.contains(&asked)),
            Err(error) => unread += u32::from(error.retryable()),
        }
    }
    assert!(
        failed > 5 && unread > 5 && store.stats().io_errors > 20,
        "{failed} {unread} {:?}",
        store.stats()
    );
    assert_eq!(store.stats().corrupt, 0, "an error is not damage");
    audit(&store);
    store.crash();
    let store = open(&config);
    let ns: Vec<u32> = (0..300).collect();
    for (n, hit) in ns.iter().zip(get(&store, &ns)) {
        assert!(hit || !stored.contains(n), "{n} was stored and is gone");
    }
}

#[test]
fn recovery_is_quick_after_a_close_and_complete_after_a_crash() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path(), 64);
    let ns: Vec<u32> = (0..300).collect();
    let store = open(&config);
    put(&store, &ns);
    drop(store);
    let store = open(&config);
    let report = store.report().clone();
    assert!(report.segments_scanned <= 2 && report.segments_from_checkpoint > 20, "{report:?}");
    assert_eq!((report.blocks, report.corrupt), (300, 0));
    put(&store, &[1000]);
    store.crash();
    std::fs::remove_dir_all(dir.path().join("checkpoint")).unwrap();
    let store = open(&config);
    let report = store.report();
    assert_eq!((report.blocks, report.segments_from_checkpoint, report.corrupt), (301, 0, 0));
    assert!(get(&store, &ns).into_iter().all(|hit| hit));
    audit(&store);
}

#[test]
fn the_benchmark_runs_and_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let rows = bench::Bench { dir: dir.path(), bytes: 64 << 20, reads: 500, queue_depth: 8 }.run().unwrap();
    assert!(rows.len() == 5 && rows.iter().all(|row| row.value > 0.0), "{rows:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// One step of a random history.
#[derive(Clone, Debug)]
enum Step {
    Put(Vec<u32>),
    Get(Vec<u32>),
    Remove(Vec<u32>),
    Flush,
    Close,
    Crash,
    LoseCheckpoint,
}

fn step() -> impl Strategy<Value = Step> {
    let ns = || proptest::collection::vec(0..150u32, 1..20);
    prop_oneof![
        6 => ns().prop_map(Step::Put),
        3 => ns().prop_map(Step::Get),
        4 => ns().prop_map(Step::Remove),
        1 => Just(Step::Flush),
        1 => Just(Step::Close),
        2 => Just(Step::Crash),
        1 => Just(Step::LoseCheckpoint),
    ]
}

/// Does the steps to a store and to a map, and compares.
fn history(config: &NvmeConfig, steps: &[Step]) {
    let mut store = open(config);
    let mut model: HashMap<u32, ()> = HashMap::new();
    let all: Vec<u32> = (0..150).collect();
    for step in steps {
        match step {
            Step::Put(ns) => {
                for (n, outcome) in ns.iter().zip(put(&store, ns)) {
                    match outcome {
                        Ok(Stored::Stored) => assert_eq!(model.insert(*n, ()), None),
                        Ok(Stored::AlreadyStored) => assert!(model.contains_key(n)),
                        Err(TierError::Full { .. }) => assert!(!model.contains_key(n)),
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            Step::Get(ns) => {
                for (n, hit) in ns.iter().zip(get(&store, ns)) {
                    assert_eq!(hit, model.contains_key(n), "block {n}");
                }
            }
            Step::Remove(ns) => {
                for (n, removed) in ns.iter().zip(remove(&store, ns)) {
                    assert_eq!(removed, model.remove(n).is_some());
                }
            }
            Step::Flush => store.flush().wait().unwrap(),
            Step::Close | Step::Crash | Step::LoseCheckpoint => {
                if let Step::Close = step {
                    drop(store)
                } else {
                    store.crash()
                }
                if let Step::LoseCheckpoint = step {
                    let _ = std::fs::remove_dir_all(config.dir.join("checkpoint"));
                }
                store = open(config);
                assert_eq!(store.report().corrupt, 0);
            }
        }
        for (n, exists) in all.iter().zip(store.exists(&all.iter().map(|&n| key(n)).collect::<Vec<_>>())) {
            assert_eq!(exists, model.contains_key(n), "block {n} after {step:?}");
        }
    }
    for (n, hit) in all.iter().zip(get(&store, &all)) {
        assert_eq!(hit, model.contains_key(n), "block {n} at the end");
    }
    audit(&store);
}

/// 24, because each case opens stores and syncs files; `PROPTEST_CASES` asks for more.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// 150 blocks of up to 3 pages do not fit into 10 segments of 16 pages, so compaction is always at work.
    #[test]
    fn any_history_agrees_with_a_map(steps in proptest::collection::vec(step(), 1..40), io_uring in any::<bool>()) {
        let dir = TempDir::new().unwrap();
        history(&NvmeConfig { io_uring, ..config(dir.path(), 10) }, &steps);
    }

    /// Damages the files of a closed store at random places. Whatever is left is bit-exact, and the store goes on.
    #[test]
    fn damaged_files_cost_blocks_and_nothing_else(
        damage in proptest::collection::vec((0..16u32, 0..SEGMENT, 0..4u8), 1..12),
        checkpoint in any::<bool>(),
        removed in proptest::collection::vec(0..60u32, 0..10),
    ) {
        let dir = TempDir::new().unwrap();
        let config = config(dir.path(), 16);
        let store = open(&config);
        let ns: Vec<u32> = (0..60).collect();
        put(&store, &ns);
        remove(&store, &removed);
        store.flush().wait().unwrap();
        if checkpoint { drop(store) } else { store.crash() }
        for &(segment, at, how) in &damage {
            damage_file(&dir.path().join(format!("segment-{segment:06}")), at, how);
        }
        if !checkpoint {
            std::fs::remove_dir_all(dir.path().join("checkpoint")).unwrap();
        }
        let store = open(&config);
        let hits = get(&store, &ns).into_iter().filter(|&hit| hit).count() as u64;
        prop_assert_eq!(store.stats().blocks, hits, "what was found damaged is forgotten");
        audit(&store);
        let more: Vec<u32> = (100..130).collect();
        prop_assert!(put(&store, &more).into_iter().all(|outcome| outcome.is_ok()));
        store.crash();
        let store = open(&config);
        prop_assert!(get(&store, &more).into_iter().all(|hit| hit));
        audit(&store);
    }
}

/// Flips a bit, writes a page of noise or of zeros, or cuts the file off.
fn damage_file(path: &Path, at: u64, how: u8) {
    let Ok(file) = OpenOptions::new().read(true).write(true).open(path) else { return };
    let mut byte = [0];
    match how {
        0 => {
            file.read_exact_at(&mut byte, at).unwrap_or_default();
            file.write_all_at(&[byte[0] ^ 1 << (at % 8)], at).unwrap();
        }
        1 => file.write_all_at(&[0xa5; 4096], at).unwrap(),
        2 => file.write_all_at(&[0; 4096], at & !4095).unwrap(),
        _ => file.set_len(at).unwrap(),
    }
}

#[test]
fn damage_is_found_before_anybody_reads() {
    let dir = TempDir::new().unwrap();
    let fast = NvmeConfig { scrub_bytes_per_s: 64 << 20, ..config(dir.path(), 16) };
    let store = open(&fast);
    let all: Vec<u32> = (0..60).collect();
    all.chunks(4).for_each(|some| assert!(put(&store, some).iter().all(Result::is_ok)));
    // Long since sealed.
    flip(dir.path(), store.shared.index.get(key(0)).unwrap().place);
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.stats().corrupt == 0 {
        assert!(Instant::now() < deadline, "{:?}", store.stats());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(store.take_damaged(), [key(0)]);
    let stats = store.stats();
    assert!((stats.hits, stats.misses) == (0, 0) && stats.scrubbed_bytes > 0, "{stats:?}");
    assert_eq!(get(&store, &all[..2]), [false, true]);
    assert_eq!((get(&store, &all[1..]), store.stats().corrupt), (vec![true; 59], 1));
    audit(&store);
}

#[test]
fn nothing_is_scrubbed_at_a_rate_of_0() {
    assert!(super::scrub::Scrub::new(0).due.is_none(), "and the janitor does not wake for it");
    assert!(super::scrub::Scrub::new(1).due.is_some());
}
