//! Pins, times to live, and evictions by name.

use super::*;
use crate::dram::{Pinning, Resident};
use kvasir_protocol::block::Pin;

fn pinnable() -> Arc<DramStore> {
    let config = DramConfig {
        pin_share: 0.5,
        pin_half_life: Duration::from_millis(1000),
        pin_max: Duration::from_millis(10_000),
        ..config(16)
    };
    let store = Arc::new(DramStore::open(config).unwrap());
    (0..4).for_each(|n| assert!(matches!(put(&store, n, 4096, 0), Reserve::Reserved(_))));
    drain(&store);
    store
}

fn pin(store: &DramStore, n: u64, pin: Pin, now: u64) -> Pinning {
    store.pin(0, &[key(n)], pin, now).unwrap()[0]
}

fn evict(store: &DramStore, n: u64, now: u64) -> Evict {
    drain(store);
    let slot = store.stat(&[key(n)]).unwrap()[0].unwrap().slot;
    store.evict(&[slot], now)[0]
}

fn kinds(store: &DramStore) -> Vec<EventKind> {
    drain(store).into_iter().map(|event| event.kind).collect()
}

#[test]
fn a_soft_pin_holds_until_its_weight_has_decayed() {
    let store = pinnable();
    assert_eq!(pin(&store, 0, Pin::Soft { weight: 8 }, 0), Pinning::Until { ms: 3000 });
    assert_eq!(pin(&store, 0, Pin::Soft { weight: 2 }, 0), Pinning::Until { ms: 3000 }, "never shorter");
    assert_eq!(kinds(&store), [EventKind::Pin]);
    assert_eq!(evict(&store, 0, 2999), Evict::Pinned);
    assert_eq!(kinds(&store), [EventKind::Keep, EventKind::Pin]);
    assert_eq!(store.metrics().tenants[0].pinned_bytes, 4096);
    store.sweep(3000);
    assert_eq!(kinds(&store), [EventKind::Unpin]);
    assert_eq!(store.metrics().tenants[0].pinned_bytes, 0);
    assert_eq!(evict(&store, 0, 3000), Evict::Evicted);
    assert_eq!(pin(&store, 0, Pin::Soft { weight: 8 }, 0), Pinning::Missing);
    assert_eq!(pin(&store, 1, Pin::Soft { weight: 0 }, 5), Pinning::Until { ms: 5 }, "weighs nothing");
    assert_eq!(evict(&store, 1, 5), Evict::Evicted);
}

#[test]
fn a_hard_pin_is_a_lease_with_a_bound() {
    let store = pinnable();
    let forever = Pin::Hard { duration_ms: u32::MAX };
    assert_eq!(pin(&store, 0, forever, 100), Pinning::Until { ms: 10_100 });
    assert_eq!(pin(&store, 1, Pin::Soft { weight: 4 }, 100), Pinning::Until { ms: 2100 });
    let stat = store.stat(&[key(0)]).unwrap()[0].unwrap();
    assert_eq!((stat.pinned_until_ms, stat.expires_ms), (Some(10_100), None));
    assert_eq!(
        store.evict_keys(&[key(0), key(1), key(9)], 200).unwrap(),
        [Evict::Pinned, Evict::Evicted, Evict::NotResident]
    );
    assert_eq!(kinds(&store), [EventKind::Pin, EventKind::Pin, EventKind::Remove]);
    store.sweep(10_100);
    assert_eq!(store.evict_keys(&[key(0)], 10_100).unwrap(), [Evict::Evicted]);
    assert_eq!(store.metrics().tenants[0].pinned_bytes, 0);
    let held = lease(&store, 2, 10_200).unwrap();
    assert_eq!(store.evict_keys(&[key(2)], 10_200).unwrap(), [Evict::InUse]);
    assert_eq!(held.size, 4096);
}

#[test]
fn a_pinned_victim_stays_though_it_was_chosen() {
    let store = pinnable();
    let slots: Vec<u32> = store.list(0, 10).0.iter().map(|block| block.slot).collect();
    assert_eq!(store.offer_victims(&slots, 1).taken, 4);
    pin(&store, 2, Pin::Hard { duration_ms: 1000 }, 2);
    assert_eq!(kinds(&store), [EventKind::Keep, EventKind::Pin], "it comes back to the books first");
    while store.evict_from_reserve(3).is_some() {}
    assert_eq!(store.exists(&[0, 1, 2, 3].map(key)).unwrap(), [false, false, true, false]);
    let told = store.list(0, 10).0.iter().map(|block| store.resident(block.slot)).collect::<Vec<_>>();
    assert!(matches!(told[..], [Some(Resident { pinned: true, .. })]), "a new policy hears of it: {told:?}");
}

#[test]
fn pins_end_with_their_tenant_and_their_block() {
    let store = pinnable();
    let tenants = vec![TenantConfig { tenant: 5, ..TenantConfig::default() }];
    let store = {
        let config = DramConfig { tenants, ..store.config().clone() };
        Arc::new(DramStore::open(config).unwrap())
    };
    put(&store, 0, 4096, 0);
    let hard = Pin::Hard { duration_ms: 5000 };
    store.pin(0, &[key(0)], hard, 0).unwrap();
    store.pin(5, &[key(0)], hard, 1000).unwrap();
    let pinned = |store: &DramStore| {
        store.metrics().tenants.iter().map(|tenant| tenant.pinned_bytes).collect::<Vec<_>>()
    };
    assert_eq!(pinned(&store), [4096, 4096]);
    assert_eq!(store.unpin(5, &[key(0), key(1)], 1).unwrap(), [true, false]);
    assert_eq!(evict(&store, 0, 2), Evict::Pinned, "the other tenant's pin holds");
    store.pin(5, &[key(0)], hard, 1000).unwrap();
    store.sweep(5000);
    assert_eq!((pinned(&store), evict(&store, 0, 5000)), (vec![0, 4096], Evict::Pinned));
    store.remove(&[key(0)], 5001).unwrap();
    assert_eq!(pinned(&store), [0, 0], "whoever removes a block ends its pins");
}

#[test]
fn a_holder_has_a_part_of_what_may_be_held_and_leaves_nothing() {
    let config = DramConfig { leases_max: 32 * 8, pin_share: 1.0, ..config(256) };
    let store = DramStore::open(config).unwrap();
    let keys: Vec<BlockKey> = (0..256).map(key).collect();
    (0..256).for_each(|n| assert!(matches!(put(&store, n, 64, 0), Reserve::Reserved(_))));
    let held = |outcomes: Vec<Pinning>| {
        let known = |outcome: &Pinning| matches!(outcome, Pinning::Until { .. } | Pinning::Throttled);
        assert!(outcomes.iter().all(known), "{outcomes:?}");
        outcomes.iter().filter(|outcome| matches!(outcome, Pinning::Until { .. })).count()
    };
    let [greedy, modest] = [store.new_client(), store.new_owner()];
    let of_greedy = held(store.hold_keys(0, greedy, &keys, 1000, 0).unwrap());
    assert!(of_greedy <= 2 * 32 && of_greedy > 32, "two a shard: {of_greedy}");
    assert_eq!(
        held(store.hold_keys(0, greedy, &keys, 2000, 0).unwrap()),
        of_greedy,
        "the same ones, for longer"
    );
    assert!(held(store.hold_keys(0, modest, &keys, 1000, 0).unwrap()) > 32, "another one still can");
    store.abandon_owner(greedy, 0);
    store.sweep(1000);
    assert_eq!(store.metrics().tenants[0].pinned_bytes, 0);
    assert!(held(store.hold_keys(0, modest, &keys, 1000, 1000).unwrap()) > 32);
    store.release_owner(modest, 1000);
    assert_eq!(store.metrics().tenants[0].pinned_bytes, 0);
}

#[test]
fn a_block_with_a_time_to_live_is_gone_when_it_is_over() {
    let store = store(16);
    let put = |n: u64, ttl_ms| {
        let meta = BlockMeta { ttl_ms, ..BlockMeta::single(key(n), 4096) };
        store.put(OwnerId(0), &meta, &bytes_of(n, 4096), 100).unwrap()
    };
    (1..4).for_each(|n| assert!(matches!(put(n, n as u32 * 100), Reserve::Reserved(_))));
    put(4, 0);
    store.pin(0, &[key(1)], Pin::Hard { duration_ms: 10_000 }, 100).unwrap();
    assert_eq!(store.stat(&[key(2)]).unwrap()[0].unwrap().expires_ms, Some(300));
    let read = lease(&store, 2, 250).unwrap();
    assert!(lease(&store, 1, 199).is_some() && lease(&store, 1, 200).is_none(), "a miss at once");
    assert!(store.hold(key(1), 0, 200).is_none());
    store.sweep(300);
    assert_eq!(store.metrics().lifecycle.in_state(State::Expired), 0, "both are being read");
    assert!(lease(&store, 2, 300).is_none(), "and read by nobody else");
    store.sweep(1350); // leases end, and what was read is looked at again later
    assert_eq!(store.exists(&[1, 2, 3, 4].map(key)).unwrap(), [false, false, false, true]);
    assert_eq!(store.metrics().lifecycle.in_state(State::Expired), 3);
    assert_eq!((store.metrics().free_bytes, store.metrics().tenants[0].pinned_bytes), (15 * 4096, 0));
    assert_eq!(store.release(OwnerId(0), &[read.id]).unwrap(), [Err(StoreError::LeaseGone { id: read.id })]);
    assert!(matches!(put(1, 0), Reserve::Reserved(_)));
    store.sweep(10_000);
    assert_eq!(store.exists(&[key(1)]).unwrap(), [true], "the new block has no time to live");
}

#[test]
fn a_caller_of_many_connections_holds_half_of_what_may_be_held() {
    // Eight a shard: two for one holder, four for one caller.
    let config = DramConfig { leases_max: 32 * 8, pin_share: 1.0, ..config(512) };
    let store = DramStore::open(config).unwrap();
    let keys: Vec<BlockKey> = (0..512).map(key).collect();
    (0..512).for_each(|n| assert!(matches!(put(&store, n, 64, 0), Reserve::Reserved(_))));
    let held = |owner| {
        let outcomes = store.hold_keys(0, owner, &keys, 1000, 0).unwrap();
        outcomes.iter().filter(|outcome| matches!(outcome, Pinning::Until { .. })).count()
    };
    let greedy: Vec<usize> = (0..4).map(|_| held(store.new_sender().of_caller("greedy"))).collect();
    assert_eq!(greedy, [64, 64, 0, 0]);
    assert_eq!(held(store.new_sender().of_caller("other")), 64);
}
