//! What the store counts, checks and costs.

use super::*;
use crate::ghosts::MissCause;
use crate::scrub::Scrubber;
use kvasir_protocol::clock::Clock;

fn damage(store: &DramStore, n: u64) {
    let lease = lease(store, n, 0).unwrap();
    assert!(store.pool().mapping().write(lease.offset, &[!bytes_of(n, 1)[0]]));
    store.release(OwnerId(0), &[lease.id]).unwrap().remove(0).unwrap();
}

#[test]
fn a_scrub_finds_what_has_changed() {
    let store = store(64);
    (0..20).for_each(|n| assert!(matches!(put(&store, n, 4096, 0), Reserve::Reserved(_))));
    damage(&store, 7);
    damage(&store, 13);
    let (mut from, mut steps, mut bytes, mut dropped) = (0, 0, 0, 0);
    loop {
        let done = store.scrub(from, 8192, 50);
        assert!(done.bytes <= 3 * 4096, "at most one block over the budget");
        (steps, bytes, dropped) = (steps + 1, bytes + done.bytes, dropped + done.dropped);
        let Some(next) = done.next else { break };
        assert_eq!(store.metrics().scrub.passes, 0);
        from = next;
    }
    assert_eq!((bytes, dropped), (20 * 4096, 2));
    assert!(steps >= 7);
    let scrub = store.metrics().scrub;
    assert_eq!((scrub.blocks, scrub.dropped, scrub.passes, scrub.last_pass_ms), (20, 2, 1, Some(50)));
    assert_eq!(store.exists(&[7, 13, 8].map(key)).unwrap(), [false, false, true]);
    assert_eq!(store.metrics().checksum_failures, 2);
    assert!(lease(&store, 7, 60).is_none());
    assert_eq!(store.metrics().misses_by_cause[MissCause::Corrupted as usize], 1);
}

#[test]
fn the_scrubbing_thread_goes_round_until_it_is_dropped() {
    let store = store(64);
    put(&store, 1, 4096, 0);
    damage(&store, 1);
    let scrubber = Scrubber::start(Arc::clone(&store), Clock::start(), 1 << 30).unwrap();
    while store.metrics().scrub.passes < 2 {
        std::thread::yield_now();
    }
    drop(scrubber);
    assert_eq!((store.metrics().scrub.dropped, store.exists(&[key(1)]).unwrap()[0]), (1, false));
    assert_eq!(Arc::strong_count(&store), 1, "the thread has ended");
}

#[test]
fn a_miss_has_a_cause_and_times_are_counted() {
    let store = store(64);
    let meta = BlockMeta { ttl_ms: 500, ..BlockMeta::single(key(1), 4096) };
    store.put(OwnerId(0), &meta, &bytes_of(1, 4096), 0).unwrap();
    (2..5).for_each(|n| assert!(matches!(put(&store, n, 4096, 0), Reserve::Reserved(_))));
    let read = lease(&store, 2, 40).unwrap();
    store.release(OwnerId(0), &[read.id]).unwrap().remove(0).unwrap();
    store.remove(&[key(3)], 50).unwrap();
    drain(&store);
    let slot = store.stat(&[key(4)]).unwrap()[0].unwrap().slot;
    assert_eq!(store.evict(&[slot], 100), [Evict::Evicted]);
    store.sweep(500);
    for n in [1, 3, 4, 9, 9] {
        assert!(lease(&store, n, 600).is_none());
    }
    assert!(store.hold(key(4), 0, 600).is_none());
    let metrics = store.metrics();
    assert_eq!((metrics.misses, metrics.misses_by_cause), (6, [2, 2, 1, 1, 0]));
    let age = metrics.age_at_eviction;
    assert_eq!((age.count(), age.sum_ms, metrics.lifetime.count()), (1, 100, 3));
    assert_eq!((metrics.reuse_interval.count(), metrics.reuse_interval.sum_ms), (1, 40));
    assert_eq!(metrics.creation.count(), 4);
    drop(store.hold(key(2), 0, 700).unwrap());
    let metrics = store.metrics();
    assert_eq!((metrics.migration.count(), metrics.migrated_bytes), (1, 4096));
}

#[test]
fn a_put_waits_for_a_slot_as_for_memory() {
    let config = DramConfig { blocks_max: 1, put_wait: Duration::from_secs(60), ..config(1024) };
    let store = Arc::new(DramStore::open(config).unwrap());
    // More blocks than there are slots: some shard runs out on the way.
    let count = u64::from(store.slots()) + 1;
    std::thread::scope(|scope| {
        let writer =
            scope.spawn(|| (0..count).all(|n| matches!(put(&store, n, 64, 0), Reserve::Reserved(_))));
        let mut seen = Vec::new();
        while !writer.is_finished() {
            if store.wait_pressure(Duration::from_millis(5)).slots_full {
                store.drain_events(&mut seen);
                store.offer_victims(&seen.iter().map(|event| event.slot).collect::<Vec<_>>(), 1);
            }
        }
        assert!(writer.join().unwrap(), "no put was refused");
    });
    assert!(store.metrics().put_waits > 0);
}

#[test]
fn a_block_costs_less_than_64_bytes_besides_its_own() {
    check_cost(1 << 18);
}

#[test]
#[ignore = "needs a minute and 1.3 GB"]
fn one_of_ten_million_blocks_costs_less_than_64_bytes_besides_its_own() {
    check_cost(10_000_000);
}

fn check_cost(blocks: u32) {
    let config = DramConfig {
        pool_bytes: u64::from(blocks) * 64 + (1 << 20),
        blocks_max: blocks,
        events_max: 1, // the policy's, not the store's, and nobody drains them here
        ..DramConfig::default()
    };
    let store = DramStore::open(config).unwrap();
    let before = private_bytes();
    for n in 0..blocks {
        let key = BlockKey(u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
        let outcome = store.put(OwnerId(0), &BlockMeta::single(key, 64), &[n as u8; 64], 0).unwrap();
        assert!(matches!(outcome, Reserve::Reserved(_)), "{n}: {outcome:?}");
    }
    // Other tests of this process may have given memory back meanwhile.
    let (metadata, grown) = (store.metadata(), private_bytes() as f64 - before as f64);
    let per_block = grown / f64::from(blocks);
    println!(
        "{metadata:?}: {:.2} B per block; the process grew by {per_block:.2}",
        metadata.bytes_per_block()
    );
    assert_eq!(metadata.blocks, u64::from(blocks));
    assert!(metadata.bytes_per_block() <= 64.0, "{metadata:?}");
}

/// Memory of this process that is not shared, so without the pool.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}
