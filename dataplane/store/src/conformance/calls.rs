//! One call at a time: sizes, refusals, duplicates, batches, counts.

use std::sync::Arc;

use super::{block, bytes_of, get_all, holds, is_block, key, put, put_all, remove};
use crate::config::DramConfig;
use crate::dram::{DramStore, OwnerId};
use crate::store::{BlockStore, Get, Put, Stored, TierError};
use kvasir_memory::buffer::{Buffer, Source};
use kvasir_protocol::block::{BATCH_MAX, BlockMeta, checksum};

pub(super) fn empty_batches_are_fine(store: &dyn BlockStore) {
    assert!(store.put(vec![]).wait().is_empty());
    assert!(store.get(vec![]).wait().is_empty());
    assert!(store.remove(vec![]).wait().is_empty());
    assert!(store.exists(&[]).is_empty());
    assert_eq!(store.flush().wait(), Ok(()));
    assert_eq!(store.stats().blocks, 0, "a fresh tier is empty");
}

pub(super) fn blocks_of_all_sizes_come_back(store: &dyn BlockStore) {
    let max = store.capabilities().block_bytes_max;
    let sizes = [
        1,
        7,
        8,
        63,
        64,
        65,
        511,
        512,
        513,
        4032,
        4095,
        4096,
        4097,
        65_536,
        100_001,
        1 << 20,
        (2 << 20) - 64,
        (3 << 20) + 1,
    ];
    let sizes: Vec<u32> = sizes.into_iter().filter(|&size| u64::from(size) <= max).collect();
    let numbered = || sizes.iter().enumerate().map(|(n, &size)| (n as u64, size));
    for (n, size) in numbered() {
        assert_eq!((store.exists(&[key(n)]), store.sizes(&[key(n)])), (vec![false], vec![None]));
        assert!(!holds(store, n, size));
        assert_eq!(put(store, n, size), Ok(Stored::Stored), "{size} B");
        assert_eq!((store.exists(&[key(n)]), store.sizes(&[key(n)])), (vec![true], vec![Some(size)]));
    }
    assert_eq!(store.flush().wait(), Ok(()));
    for (n, size) in numbered() {
        assert!(holds(store, n, size), "into a buffer of just {size} B");
        let found = get_all(store, &[n], size as usize + 5000).remove(0);
        is_block(n, size, &found.unwrap().expect("into a longer buffer"));
    }
    // All in one batch, from first to last and back.
    let there_and_back: Vec<u64> =
        numbered().map(|(n, _)| n).chain(numbered().rev().map(|(n, _)| n)).collect();
    let longest = sizes.iter().max().map_or(0, |&size| size as usize);
    for (&n, found) in there_and_back.iter().zip(get_all(store, &there_and_back, longest)) {
        is_block(n, sizes[n as usize], &found.unwrap().expect("stored"));
    }
    for (n, size) in numbered() {
        assert_eq!(remove(store, n), Ok(true));
        assert_eq!(remove(store, n), Ok(false));
        assert!(!holds(store, n, size) && store.exists(&[key(n)]) == [false]);
        // The name is free again, for other bytes too.
        assert_eq!(put(store, n, size / 2 + 1), Ok(Stored::Stored));
        assert!(holds(store, n, size / 2 + 1));
    }
}

pub(super) fn bad_items_are_refused_and_leave_the_rest_alone(store: &dyn BlockStore) {
    let max = store.capabilities().block_bytes_max;
    assert_eq!(put(store, 1, 100), Ok(Stored::Stored));
    let before = store.stats();
    let damaged = Put { checksum: 7, ..block(3, 100) };
    let short = Put { meta: BlockMeta::single(key(4), 101), ..block(4, 100) };
    let long = u32::try_from(max.saturating_add(1)).ok();
    let outcomes =
        put_all(store, [block(2, 0), damaged, short].into_iter().chain(long.map(too_long)).collect());
    assert_eq!(outcomes[0], Err(TierError::ZeroSize { key: key(2) }));
    let (expected, found) = (7, checksum(&bytes_of(3, 100)));
    assert_eq!(outcomes[1], Err(TierError::ChecksumMismatch { key: key(3), expected, found }));
    assert_eq!(outcomes[2], Err(TierError::Buffer { key: key(4), size: 101, len: 100 }));
    if let Some(size) = long {
        let tier = store.capabilities().name;
        assert_eq!(outcomes[3], Err(TierError::TooLarge { tier, key: key(5), size: size.into(), max }));
    }
    assert!(
        outcomes.iter().flatten().count() == 0
            && outcomes.iter().flat_map(|o| o.as_ref().err()).all(|e| !e.retryable())
    );
    assert_eq!((store.stats().blocks, store.stats().block_bytes), (before.blocks, before.block_bytes));
    assert_eq!(store.exists(&[2, 3, 4, 5].map(key)), [false; 4]);

    // Between good ones, a bad item costs only itself.
    let outcomes = put_all(store, vec![block(6, 5000), block(2, 0), block(7, 50)]);
    assert_eq!(outcomes, [Ok(Stored::Stored), Err(TierError::ZeroSize { key: key(2) }), Ok(Stored::Stored)]);

    let gets = [(6, 4999), (99, 0), (7, 50)];
    let batch = gets.map(|(n, len)| Get { key: key(n), buffer: Buffer::zeroed(len) });
    let done = store.get(batch.into()).wait();
    let lens: Vec<usize> = done.iter().map(|done| done.buffer.len()).collect();
    assert_eq!(lens, [4999, 0, 50], "buffers come back from refused gets");
    assert_eq!(done[0].outcome, Err(TierError::Buffer { key: key(6), size: 5000, len: 4999 }));
    assert_eq!(done[1].outcome, Ok(None));
    assert!(done[2].outcome.clone().is_ok_and(|loaded| loaded.is_some()));
    assert!(holds(store, 6, 5000), "a refused get costs nothing");

    // A block is stored from where it lies in a pool.
    let buffer = held(5000);
    let sum = buffer.shared().checksum();
    let done = store.put(vec![Put { meta: BlockMeta::single(key(8), 5000), checksum: sum, buffer }]).wait();
    assert!(done[0].outcome == Ok(Stored::Stored) && matches!(done[0].buffer, Source::Pool(_)));
}

fn too_long(size: u32) -> Put {
    // If that much memory would be a burden, the announcement alone must do.
    let len = if size <= 64 << 20 { size } else { 1 };
    let buffer = Buffer::zeroed(len as usize);
    Put { meta: BlockMeta::single(key(5), size), checksum: checksum(buffer.bytes()), buffer: buffer.into() }
}

/// A block lent by a DRAM pool.
fn held(size: u32) -> Source {
    let config = DramConfig { pool_bytes: 1 << 20, blocks_max: 16, ..DramConfig::default() };
    let pool = Arc::new(DramStore::open(config).expect("a small pool"));
    pool.put(OwnerId(0), &BlockMeta::single(key(0), size), &bytes_of(0, size), 0).expect("an empty pool");
    pool.hold(key(0), 0, 0).expect("it was just stored").into()
}

pub(super) fn a_block_is_stored_once(store: &dyn BlockStore) {
    assert_eq!(put(store, 1, 3000), Ok(Stored::Stored));
    assert_eq!(put(store, 1, 3000), Ok(Stored::AlreadyStored));
    // A second writer with other bytes changes nothing: a block is immutable.
    assert_eq!(put(store, 1, 200), Ok(Stored::AlreadyStored));
    assert!(holds(store, 1, 3000));

    let batch = [2, 3, 2, 1, 3, 2].map(|n| block(n, 3000));
    let outcomes = put_all(store, batch.into());
    let stored = |picks: &[usize]| picks.iter().filter(|&&i| outcomes[i] == Ok(Stored::Stored)).count();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!((stored(&[0, 2, 5]), stored(&[1, 4]), stored(&[3])), (1, 1, 0), "one of each wins");
    assert_eq!((store.stats().blocks, store.stats().block_bytes), (3, 9000));
    for n in 1..4 {
        assert!(holds(store, n, 3000));
    }
    let gone = store.remove([2, 2, 9, 3].map(key).into()).wait();
    assert_eq!(gone.iter().filter(|gone| **gone == Ok(true)).count(), 2);
    assert_eq!((store.stats().blocks, store.exists(&[1, 2, 3].map(key))), (1, vec![true, false, false]));
}

pub(super) fn the_largest_batch_is_taken(store: &dyn BlockStore) {
    let count = BATCH_MAX as u64;
    let size = |n: u64| 1 + (n as u32 * 37) % 512;
    let numbers: Vec<u64> = (0..count).collect();
    let keys: Vec<_> = numbers.iter().map(|&n| key(n)).collect();
    let outcomes = put_all(store, numbers.iter().map(|&n| block(n, size(n))).collect());
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(Stored::Stored)));
    assert!(store.exists(&keys).iter().all(|&held| held));
    for (&n, found) in numbers.iter().zip(get_all(store, &numbers, 512)) {
        is_block(n, size(n), &found.unwrap().expect("stored"));
    }
    assert_eq!(store.stats().blocks, count);
    assert!(store.remove(keys.clone()).wait().iter().all(|gone| *gone == Ok(true)));
    assert!(!store.exists(&keys).iter().any(|&held| held));
    assert_eq!((store.stats().blocks, store.stats().block_bytes), (0, 0));
}

pub(super) fn counts_add_up(store: &dyn BlockStore) {
    let sizes = [100, 70_000, 5];
    for (n, size) in (0..).zip(sizes) {
        assert_eq!(put(store, n, size), Ok(Stored::Stored));
    }
    assert_eq!(put(store, 0, 100), Ok(Stored::AlreadyStored));
    let stats = store.stats();
    let total: u32 = sizes.iter().sum();
    assert_eq!((stats.blocks, stats.block_bytes), (3, total.into()));
    assert!(stats.used_bytes >= stats.block_bytes, "headers and padding come on top: {stats:?}");
    assert!(stats.written_bytes >= stats.block_bytes, "{stats:?}");
    assert_eq!((stats.hits, stats.misses, stats.corrupt, stats.io_errors), (0, 0, 0, 0));
    assert!(holds(store, 0, 100) && holds(store, 1, 70_000) && !holds(store, 9, 5) && holds(store, 0, 100));
    assert_eq!(remove(store, 1), Ok(true));
    assert!(!holds(store, 1, 70_000));
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.corrupt, stats.io_errors), (3, 2, 0, 0));
    assert!(stats.read_bytes >= 70_200, "{stats:?}");
    assert_eq!((stats.blocks, stats.block_bytes), (2, 105));
}
