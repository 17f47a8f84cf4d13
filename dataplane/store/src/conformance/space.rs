//! A tier at its limits of space, and across a restart.

use kvasir_os::time::{Duration, Instant};
use std::sync::Arc;

use super::{holds, key, put, remove};
use crate::store::{BlockStore, Stored, TierError};

/// A tier that makes space in the background gets this long.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) fn a_full_tier_refuses_or_evicts(store: &dyn BlockStore) {
    let capabilities = store.capabilities();
    let Some(capacity) = capabilities.capacity_bytes else { return };
    assert!((16 << 20..=128 << 20).contains(&capacity), "open the tier with room for 16 to 128 MiB");
    let size = capabilities.block_bytes_max.min(1 << 20) as u32;
    let most = 2 * capacity / u64::from(size);
    let mut stored = Vec::new();
    for n in 0..most {
        match put(store, n, size) {
            Ok(Stored::Stored) => stored.push(n),
            Err(TierError::Full { key: full, size: wanted, .. }) => {
                assert_eq!((full, wanted), (key(n), size.into()));
                assert!(!holds(store, n, size), "what was refused is not there");
                break;
            }
            other => panic!("{other:?} at block {n}"),
        }
    }
    let refuses = (stored.len() as u64) < most;
    let stats = store.stats();
    assert!(stats.block_bytes <= capacity, "{stats:?}");
    if refuses {
        assert!(stats.block_bytes >= capacity / 2, "{capacity} B were announced: {stats:?}");
        assert_eq!(stats.blocks, stored.len() as u64, "a tier that refuses does not evict as well");
        assert!(stored.iter().all(|&n| holds(store, n, size)));
    } else {
        assert!(stats.evicted > 0, "twice its capacity went in: {stats:?}");
    }
    for &n in &stored[..stored.len() / 2] {
        let gone = remove(store, n).expect("removing needs no space");
        assert!(gone || !refuses);
    }
    let start = Instant::now();
    while !matches!(put(store, most, size), Ok(Stored::Stored)) {
        assert!(start.elapsed() < PATIENCE, "half of it was removed and yet nothing fits");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(holds(store, most, size));
}

pub(super) fn flushed_blocks_outlive_the_tier<P>(place: &P, open: &impl Fn(&P) -> Arc<dyn BlockStore>) {
    let size = |n: u64| 1 + n as u32 * 2999;
    let store = open(place);
    for n in 0..20 {
        assert_eq!(put(&*store, n, size(n)), Ok(Stored::Stored));
    }
    assert_eq!(remove(&*store, 3), Ok(true));
    assert_eq!(store.flush().wait(), Ok(()));
    let before = store.stats();
    drop(store);
    for _ in 0..2 {
        let store = open(place);
        let stats = store.stats();
        assert_eq!((stats.blocks, stats.block_bytes), (before.blocks, before.block_bytes));
        for n in 0..20 {
            assert_eq!((store.exists(&[key(n)]), holds(&*store, n, size(n))), (vec![n != 3], n != 3));
        }
    }
}
