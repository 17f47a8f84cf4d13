//! Power cuts, and disks that fail to sync.

use parking_lot::Mutex;
use std::fs::File;
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;

use super::super::format::{self, Entry, GroupHead, Kind, Place, Tombstone};
use super::super::io::Op;
use super::super::threads::perform;
use super::*;

/// A disk with a cache of its own: what was written and not synced since may be gone after a power cut, any page of it.
#[derive(Clone, Default)]
struct Cache(Arc<Mutex<Vec<Page>>>);

/// What a page of a file was before it was written.
struct Page {
    file: Arc<File>,
    offset: u64,
    before: Vec<u8>,
}

impl Cache {
    fn faults(&self) -> Faults {
        let cache = self.clone();
        Faults(Some(Arc::new(move |op| (op.kind != OpKind::Read).then(|| cache.perform(op)))))
    }

    fn perform(&self, op: &Op) -> std::io::Result<usize> {
        let mut pages = self.0.lock();
        if op.kind == OpKind::Write {
            let len: usize = op.pieces.iter().map(|piece| piece.len).sum();
            for at in (0..len).step_by(4096) {
                let offset = op.offset + at as u64;
                let mut before = vec![0; 4096];
                op.file.read_exact_at(&mut before, offset)?;
                pages.push(Page { file: Arc::clone(&op.file), offset, before });
            }
        } else {
            pages.retain(|page| !Arc::ptr_eq(&page.file, &op.file));
        }
        perform(op)
    }

    /// Cuts the power: pages for which `lost` says so are as they were.
    fn cut(self, mut lost: impl FnMut(&Page) -> bool) {
        let mut pages = self.0.lock();
        while let Some(page) = pages.pop() {
            if lost(&page) {
                page.file.write_all_at(&page.before, page.offset).unwrap();
            }
        }
    }
}

/// On threads, because those are what faults are for, and without `O_DIRECT`, so that any memory can be written back.
fn simulated(dir: &Path, segments: u64) -> NvmeConfig {
    NvmeConfig { io_uring: false, direct_io: false, ..config(dir, segments) }
}

fn with_faults(config: &NvmeConfig, faults: Faults) -> NvmeStore {
    NvmeStore::open_with(config.clone(), faults).unwrap()
}

/// Has segments that were in use and are free, so that their first pages say so.
fn used_before(config: &NvmeConfig) {
    let (store, ns) = (open(config), (500..540).collect::<Vec<u32>>());
    assert!(put(&store, &ns).iter().all(Result::is_ok));
    assert!(remove(&store, &ns).into_iter().all(|removed| removed));
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.stats().used_bytes > 2 * SEGMENT && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(store.stats().used_bytes <= 2 * SEGMENT);
}

/// The first groups of segments are lost, others are not. Then a segment begins what looks like the same life again.
#[test]
fn what_a_power_cut_left_of_a_segment_is_not_taken_for_part_of_its_next_life() {
    let dir = TempDir::new().unwrap();
    let config = simulated(dir.path(), 10);
    used_before(&config);
    let cache = Cache::default();
    let store = with_faults(&config, cache.faults());
    // Groups of two pages each, through three segments.
    let ns: Vec<u32> = (0..200).filter(|&n| content(n).0.size <= 4096).take(24).collect();
    ns.iter().for_each(|&n| assert_eq!(put(&store, &[n]), [Ok(Stored::Stored)]));
    store.crash();
    cache.cut(|page| page.offset == 0);

    let store = open(&config);
    remove(&store, &ns);
    store.flush().wait().unwrap();
    store.crash();
    assert_eq!(get(&open(&config), &ns), [false; 24]);
}

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<u32>),
    Remove(Vec<u32>),
    Flush,
    /// With a seed for what is lost.
    Cut(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let ns = || proptest::collection::vec(0..60u32, 1..12);
    prop_oneof![
        6 => ns().prop_map(Step::Put),
        3 => ns().prop_map(Step::Remove),
        1 => Just(Step::Flush),
        2 => any::<u64>().prop_map(Step::Cut),
    ]
}

/// What must be known of a block after a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Flushed,
    Gone,
    Either,
}

fn history(config: &NvmeConfig, steps: Vec<Step>) {
    let all: Vec<u32> = (0..60).collect();
    let mut known = vec![Known::Gone; 60];
    let mut cache = Cache::default();
    let mut store = with_faults(config, cache.faults());
    for step in steps {
        match step {
            Step::Put(ns) => {
                for (&n, outcome) in ns.iter().zip(put(&store, &ns)) {
                    match outcome {
                        Ok(Stored::Stored) => known[n as usize] = Known::Either,
                        Ok(Stored::AlreadyStored) | Err(TierError::Full { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            Step::Remove(ns) => {
                remove(&store, &ns);
                ns.iter().for_each(|&n| known[n as usize] = Known::Gone);
            }
            Step::Flush => {
                store.flush().wait().unwrap();
                let held = store.exists(&all.iter().map(|&n| key(n)).collect::<Vec<_>>());
                for (known, held) in known.iter_mut().zip(held) {
                    *known = if held { Known::Flushed } else { Known::Gone };
                }
            }
            Step::Cut(mut seed) => {
                store.crash();
                std::mem::take(&mut cache).cut(|_| {
                    seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    seed >> 63 == 1
                });
                store = with_faults(config, cache.faults());
                for ((&n, known), held) in all.iter().zip(&mut known).zip(get(&store, &all)) {
                    let expected = if held { Known::Flushed } else { Known::Gone };
                    assert!(
                        *known == Known::Either || *known == expected,
                        "block {n} was {known:?}, held: {held}"
                    );
                    // What recovery found is on the disk.
                    *known = expected;
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// What was flushed is there, what was removed is not, whichever pages of the rest were lost and how often.
    #[test]
    fn power_cuts_cost_only_what_was_not_flushed(steps in proptest::collection::vec(step(), 1..40)) {
        let dir = TempDir::new().unwrap();
        let config = simulated(dir.path(), 10);
        used_before(&config);
        history(&config, steps);
    }
}

#[test]
fn a_removal_survives_a_power_cut_without_a_flush() {
    let (dir, cache) = (TempDir::new().unwrap(), Cache::default());
    let config = simulated(dir.path(), 8);
    let store = open(&config);
    put(&store, &[1, 2]);
    drop(store);
    let store = with_faults(&config, cache.faults());
    assert_eq!(remove(&store, &[1]), [true]);
    store.crash();
    cache.cut(|_| true);
    assert_eq!(get(&open(&config), &[1, 2]), [false, true]);
}

/// The janitor syncs a sealed segment by itself and saves its summary, which is believed from then on.
#[test]
fn what_the_checkpoint_says_of_a_segment_survives_a_power_cut() {
    let (dir, cache) = (TempDir::new().unwrap(), Cache::default());
    let config = simulated(dir.path(), 10);
    let store = with_faults(&config, cache.faults());
    // One by one: the janitor has the summary of a full segment before the first block of the next is stored.
    let ns: Vec<u32> = (0..24).collect();
    ns.iter().for_each(|&n| assert_eq!(put(&store, &[n]), [Ok(Stored::Stored)]));
    store.crash();
    cache.cut(|_| true);

    let store = open(&config);
    assert!(store.report().segments_from_checkpoint >= 3, "{:?}", store.report());
    let listed = store.exists(&ns.iter().map(|&n| key(n)).collect::<Vec<_>>());
    assert_eq!(get(&store, &ns), listed);
}

/// Its summary tells that a block lives in a segment, though the header page before it is damaged. Compaction moves the block,
/// and the tombstone of an earlier copy, which is still on the disk, does not cover the new one.
#[test]
fn a_block_whose_header_is_damaged_is_still_there_after_its_move_and_a_restart() {
    let dir = TempDir::new().unwrap();
    let config = simulated(dir.path(), 10);
    let store = open(&config);
    let one_by_one = |store: &NvmeStore, ns: std::ops::Range<u32>| {
        ns.for_each(|n| assert_eq!(put(store, &[n]), [Ok(Stored::Stored)]));
    };
    put(&store, &[0]);
    assert_eq!(remove(&store, &[0]), [true]);
    one_by_one(&store, 1..8);
    put(&store, &[0]);
    let place = store.shared.index.get(key(0)).unwrap().place;
    one_by_one(&store, 8..24);
    drop(store);
    let segment = dir.path().join(format!("segment-{:06}", place.segment));
    let file = OpenOptions::new().write(true).open(segment).unwrap();
    file.write_all_at(&[0; 4096], u64::from(place.page - 1) * 4096).unwrap();

    let store = open(&config);
    // It is alone in its segment, as others are in the two behind: to empty these makes enough space.
    let in_segment =
        |segment| (1..24).filter(|&n| found_in(&store, n) == Some(segment)).collect::<Vec<u32>>();
    remove(&store, &in_segment(place.segment));
    remove(&store, &in_segment(place.segment + 1)[1..]);
    remove(&store, &in_segment(place.segment + 2)[1..]);
    let (mut others, deadline) = (100.., Instant::now() + Duration::from_secs(60));
    while found_in(&store, 0) == Some(place.segment) && Instant::now() < deadline {
        put(&store, &[others.next().unwrap()]);
    }
    audit(&store);
    assert!(found_in(&store, 0).is_some_and(|segment| segment != place.segment), "it was moved");
    store.flush().wait().unwrap();
    store.crash();
    assert_eq!(get(&open(&config), &[0]), [true]);
}

fn found_in(store: &NvmeStore, n: u32) -> Option<u32> {
    store.shared.index.get(key(n)).map(|found| found.place.segment)
}

/// Keeps the next op of one kind from being done until it is told to go on.
struct Hold {
    kind: OpKind,
    armed: AtomicBool,
    reached: Barrier,
    go_on: Barrier,
}

impl Hold {
    fn of(kind: OpKind) -> Arc<Self> {
        let (reached, go_on) = (Barrier::new(2), Barrier::new(2));
        Arc::new(Self { kind, armed: AtomicBool::new(false), reached, go_on })
    }

    fn pass(&self, op: &Op) {
        if op.kind == self.kind && self.armed.swap(false, Ordering::SeqCst) {
            self.reached.wait();
            self.go_on.wait();
        }
    }

    /// Begins something, and returns once it has come to the op.
    fn until_held<T>(&self, begin: impl FnOnce() -> T) -> T {
        self.armed.store(true, Ordering::SeqCst);
        let begun = begin();
        self.reached.wait();
        begun
    }
}

/// A flush need not wait for what was stored after it was asked for, and must not count it as synced either.
#[test]
fn a_write_that_ends_after_the_sync_of_one_flush_is_synced_by_the_next() {
    let (dir, cache) = (TempDir::new().unwrap(), Cache::default());
    let (sync, write) = (Hold::of(OpKind::Sync), Hold::of(OpKind::Write));
    let (first, second, disk) = (Arc::clone(&sync), Arc::clone(&write), cache.clone());
    let faults = move |op: &Op| {
        first.pass(op);
        second.pass(op);
        (op.kind != OpKind::Read).then(|| disk.perform(op))
    };
    let config = simulated(dir.path(), 10);
    let store = with_faults(&config, Faults(Some(Arc::new(faults))));
    put(&store, &[0]);
    put(&store, &[1]);
    // The second flush waits for the first, and finds that the write has begun and not ended.
    let one = sync.until_held(|| store.flush());
    let two = store.flush();
    let stored = write.until_held(|| store.put(vec![put_of(2)]));
    sync.go_on.wait();
    one.wait().unwrap();
    two.wait().unwrap();
    write.go_on.wait();
    assert_eq!(stored.wait()[0].outcome, Ok(Stored::Stored));

    store.flush().wait().unwrap();
    store.crash();
    cache.cut(|_| true);
    assert_eq!(get(&open(&config), &[0, 1, 2]), [true; 3]);
}

#[test]
fn after_a_sync_that_failed_the_store_only_reads() {
    let (dir, failing) = (TempDir::new().unwrap(), Arc::new(AtomicU64::new(0)));
    let config = simulated(dir.path(), 8);
    let fails = Arc::clone(&failing);
    let fault = move |op: &Op| {
        let now = op.kind == OpKind::Sync && fails.swap(0, Ordering::SeqCst) == 1;
        now.then(|| Err(std::io::Error::from_raw_os_error(5)))
    };
    let store = with_faults(&config, Faults(Some(Arc::new(fault))));
    put(&store, &[1, 2]);
    store.flush().wait().unwrap();
    put(&store, &[3]);
    failing.store(1, Ordering::SeqCst);
    let error = store.flush().wait().unwrap_err();
    assert!(error.to_string().contains("a sync failed") && !error.retryable(), "{error}");
    assert!(store.stats().broken);
    // The disk would say yes now, for what it no longer has.
    let error = store.flush().wait().unwrap_err();
    assert!(error.to_string().contains("read-only"), "{error}");
    assert!(put(&store, &[4])[0].as_ref().is_err_and(|error| !error.retryable()));
    assert!(store.remove(vec![key(2)]).wait()[0].is_err(), "it may come back");
    assert_eq!(get(&store, &[1, 2, 3, 4]), [true, false, true, false]);
    drop(store);
    let store = open(&config);
    assert!(!store.stats().broken && get(&store, &[1])[0] && put(&store, &[4]) == [Ok(Stored::Stored)]);
}

#[test]
fn a_first_group_that_cannot_be_synced_is_refused() {
    let dir = TempDir::new().unwrap();
    let config = simulated(dir.path(), 8);
    let fault = |op: &Op| (op.kind == OpKind::Sync).then(|| Err(std::io::Error::from_raw_os_error(5)));
    let store = with_faults(&config, Faults(Some(Arc::new(fault))));
    assert!(put(&store, &[1])[0].is_err() && get(&store, &[1]) == [false]);
    assert!(store.stats().broken);
    audit(&store);
}

/// A file whose name is not durable may be gone after a power cut, with all that was synced in it.
#[test]
fn a_segment_whose_name_cannot_be_synced_takes_no_block() {
    let dir = TempDir::new().unwrap();
    let fault = |op: &Op| (op.kind == OpKind::SyncFolder).then(|| Err(std::io::Error::from_raw_os_error(5)));
    let store = with_faults(&simulated(dir.path(), 8), Faults(Some(Arc::new(fault))));
    assert!(put(&store, &[1])[0].is_err() && get(&store, &[1]) == [false]);
    assert!(store.stats().broken);
    audit(&store);
}

#[test]
fn a_block_is_stored_once_the_name_of_its_segment_is_durable() {
    let (dir, done) = (TempDir::new().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let record = Arc::clone(&done);
    let perform_and_record = move |op: &Op| {
        let outcome = perform(op);
        record.lock().push((op.kind, op.offset));
        Some(outcome)
    };
    let store = with_faults(&simulated(dir.path(), 10), Faults(Some(Arc::new(perform_and_record))));
    let count = |what: &dyn Fn(OpKind, u64) -> bool| {
        done.lock().iter().filter(|&&(kind, offset)| what(kind, offset)).count()
    };
    let begun = || count(&|kind, offset| kind == OpKind::Write && offset == 0);
    for n in 0..24 {
        assert_eq!(put(&store, &[n]), [Ok(Stored::Stored)]);
        assert_eq!(count(&|kind, _| kind == OpKind::SyncFolder), begun(), "after block {n}");
    }
    assert!(begun() >= 3, "several segments");
}

/// A tombstone outlives the segment that it tells of, or the end of it. Nothing that is stored later is taken for what it removed.
#[test]
fn what_was_removed_from_a_lost_place_costs_no_later_block() {
    // In the next segment to begin, or behind what is left of the first one; the segments count their lives from 1.
    for (target_epoch, target) in [
        (9, Place { segment: 3, page: 1 }),
        (1, Place { segment: 0, page: 6 }),
        (1, Place { segment: 0, page: 9 }),
    ] {
        let dir = TempDir::new().unwrap();
        let config = simulated(dir.path(), 30);
        let store = open(&config);
        put(&store, &[0]);
        let (id, found) = (store.shared.disk.store, store.shared.index.get(key(0)).unwrap().place);
        assert_eq!((store.shared.segments().at(found.segment).epoch, found.segment), (1, 0));
        store.crash();
        std::fs::remove_dir_all(dir.path().join("checkpoint")).unwrap();
        let tombstone = Entry::Tombstone(Tombstone { key: key(500), sequence: 1000, target, target_epoch });
        let head = GroupHead { segment: 7, epoch: 2, page: 0, pages: 1, kind: Kind::Cold };
        let mut page = [0; 4096];
        format::encode_group(&head, &[tombstone], id, &mut page);
        std::fs::write(dir.path().join("segment-000007"), page).unwrap();

        let store = open(&config);
        // One by one, so that some block begins on each page.
        let ns: Vec<u32> = (1..60).collect();
        ns.iter().for_each(|&n| assert_eq!(put(&store, &[n]), [Ok(Stored::Stored)]));
        store.crash();
        let store = open(&config);
        assert_eq!(get(&store, &ns), [true; 59], "{target:?}");
        audit(&store);
    }
}

/// What could not be read once may be read after the next start; if it was removed in between, it is gone.
#[test]
fn what_was_removed_while_it_could_not_be_read_is_not_back() {
    let dir = TempDir::new().unwrap();
    let config = simulated(dir.path(), 10);
    let store = open(&config);
    put(&store, &[1]);
    let place = store.shared.index.get(key(1)).unwrap().place;
    flip(dir.path(), place);
    assert_eq!(get(&store, &[1]), [false]);
    flip(dir.path(), place);
    assert!(store.remove(vec![key(1)]).wait()[0].is_ok());
    store.crash();
    assert_eq!(get(&open(&config), &[1]), [false]);
}
