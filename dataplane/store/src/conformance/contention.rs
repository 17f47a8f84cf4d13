//! Callers that go away, change their mind, or come all at once.

use kvasir_os::time::{Duration, Instant};

use super::{block, get_all, holds, is_block, key, put_all};
use crate::store::{BlockStore, Get, Stored, TierError};
use kvasir_memory::buffer::Buffer;

/// How long a tier may take to do what it was asked, before that counts as never.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) fn operations_end_although_nobody_waits(store: &dyn BlockStore) {
    drop(store.put((0..32).map(|n| block(n, 9000)).collect()));
    let keys: Vec<_> = (0..32).map(key).collect();
    until(|| store.exists(&keys).iter().all(|&held| held));
    drop(store.get(keys.iter().map(|&key| Get { key, buffer: Buffer::zeroed(9000) }).collect()));
    drop(store.flush());
    drop(store.remove(keys[..16].to_vec()));
    until(|| !store.exists(&keys[..16]).iter().any(|&held| held));
    assert!((16..32).all(|n| holds(store, n, 9000)));
}

/// Waits for a condition that no call reports.
fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "an operation that nobody waits for was lost");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn cancelled_items_are_as_if_never_asked(store: &dyn BlockStore) {
    const COUNT: u64 = 64;
    let pending = store.put((0..COUNT).map(|n| block(n, 20_000)).collect());
    pending.cancel();
    let done = pending.wait();
    assert_eq!(done.len() as u64, COUNT);
    for (n, done) in (0..).zip(done) {
        assert_eq!(
            done.buffer.shared().to_vec(),
            block(n, 20_000).buffer.shared().to_vec(),
            "the buffer is back unchanged"
        );
        match done.outcome {
            Ok(Stored::Stored) => assert!(holds(store, n, 20_000)),
            Err(TierError::Cancelled) => assert!(!holds(store, n, 20_000)),
            other => panic!("a cancelled put ended with {other:?}"),
        }
    }
    // A second attempt completes what the first left.
    let again = put_all(store, (0..COUNT).map(|n| block(n, 20_000)).collect());
    assert!(again.iter().all(Result::is_ok), "{again:?}");

    let buffers = (0..COUNT).map(|n| Get { key: key(n), buffer: Buffer::zeroed(20_000) });
    let pending = store.get(buffers.collect());
    pending.cancel();
    for (n, done) in (0..).zip(pending.wait()) {
        match done.outcome {
            Ok(Some(loaded)) => is_block(n, 20_000, &(loaded, done.buffer.bytes().to_vec())),
            Err(TierError::Cancelled) => assert_eq!(done.buffer.len(), 20_000),
            other => panic!("a cancelled get ended with {other:?}"),
        }
    }

    let pending = store.remove((0..COUNT).map(key).collect());
    pending.cancel();
    for (n, gone) in (0..).zip(pending.wait()) {
        match gone {
            Ok(gone) => assert!(gone && !holds(store, n, 20_000)),
            Err(error) => assert!(error == TierError::Cancelled && holds(store, n, 20_000)),
        }
    }
}

/// Four threads put, get and remove the same few blocks. Whatever is found is whole; what is there at the end is
/// what the counts say.
pub(super) fn threads_see_whole_blocks(store: &dyn BlockStore) {
    const BLOCKS: u64 = 12;
    let size = |n: u64| 1 + n as u32 * 3001;
    let visit = |thread: u64, round: u64| {
        let n = (thread * 5 + round * 7) % BLOCKS;
        match (thread + round) % 4 {
            0 => drop(store.remove(vec![key(n)]).wait().remove(0).expect("no faults here")),
            1 | 2 => match put_all(store, vec![block(n, size(n))]).remove(0) {
                Ok(_) | Err(TierError::InProgress { .. }) => {}
                Err(error) => panic!("no faults here: {error}"),
            },
            _ => {
                let near = [n, (n + 1) % BLOCKS];
                let longest = size(BLOCKS) as usize;
                for (n, found) in near.into_iter().zip(get_all(store, &near, longest)) {
                    if let Some(found) = found.expect("no faults here") {
                        is_block(n, size(n), &found);
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || (0..50).for_each(|round| visit(thread, round)));
        }
    });
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    let held: Vec<u64> = (0..BLOCKS).filter(|&n| holds(store, n, size(n))).collect();
    let known: Vec<u64> =
        (0..).zip(store.exists(&keys)).filter_map(|(n, known)| known.then_some(n)).collect();
    assert_eq!(held, known);
    let stats = store.stats();
    let bytes: u64 = held.iter().map(|&n| u64::from(size(n))).sum();
    assert_eq!((stats.blocks, stats.block_bytes), (held.len() as u64, bytes));
}
