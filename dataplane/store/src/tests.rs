//! The store against a slow, obvious model, and the corner cases one by one.

mod index;
mod pins;
mod tenants;
mod upkeep;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::dram::{DramStore, Evict, Lease, Lookup, Offered, OwnerId, Remove, Reserve, Verify};
use super::events::{AccessEvent, EventKind, NO_SLOT};
use super::lifecycle::State;
use crate::config::{CommitCheck, DramConfig, TenantConfig};
use crate::error::StoreError;
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};

fn config(pages: u64) -> DramConfig {
    DramConfig {
        pool_bytes: pages * 4096,
        blocks_max: 1024,
        put_wait: Duration::ZERO,
        lease_ttl: Duration::from_millis(1000),
        lease_grace: Duration::from_millis(100),
        reservation_ttl: Duration::from_millis(5000),
        ..DramConfig::default()
    }
}

fn store(pages: u64) -> Arc<DramStore> {
    Arc::new(DramStore::open(config(pages)).unwrap())
}

fn key(n: u64) -> BlockKey {
    BlockKey::from_engine_hash("test", &n.to_le_bytes())
}

fn bytes_of(n: u64, size: u32) -> Vec<u8> {
    (0..size).map(|i| (n as u8).wrapping_mul(31).wrapping_add(i as u8)).collect()
}

fn put(store: &DramStore, n: u64, size: u32, now: u64) -> Reserve {
    store.put(OwnerId(0), &BlockMeta::single(key(n), size), &bytes_of(n, size), now).unwrap()
}

fn lease(store: &DramStore, n: u64, now: u64) -> Option<Lease> {
    match store.get(OwnerId(0), &[key(n)], 0, now).unwrap()[0] {
        Lookup::Hit(lease) => Some(lease),
        _ => None,
    }
}

fn drain(store: &DramStore) -> Vec<AccessEvent> {
    let mut events = Vec::new();
    store.drain_events(&mut events);
    events
}

/// What a policy that starts now is told of a pool that nobody uses meanwhile.
fn replayed(store: &DramStore) -> Vec<AccessEvent> {
    let history = store.history(u64::from(u32::MAX)).in_order();
    let mut events = Vec::new();
    for past in &history.entries {
        if past.is_use() {
            events.push(store.past_use(past.slot(), &history).unwrap());
        } else {
            events.push(store.resident(past.slot()).unwrap().insert);
        }
    }
    events
}

fn reserve(store: &DramStore, owner: OwnerId, n: u64, size: u32) -> Reserve {
    store.reserve(owner, &[BlockMeta::single(key(n), size)], 0).unwrap().remove(0)
}

fn reserved(store: &DramStore, owner: OwnerId, n: u64, size: u32) -> u64 {
    match reserve(store, owner, n, size) {
        Reserve::Reserved(reservation) => reservation.id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_block_is_read_back_bit_exact() {
    let store = store(64);
    for (n, size) in [(1, 1), (2, 64), (3, 3000), (4, 4096), (5, 100_000)] {
        assert!(matches!(put(&store, n, size, 0), Reserve::Reserved(_)));
        let lease = lease(&store, n, 0).unwrap();
        let bytes = store.pool().mapping().bytes(lease.offset, size.into()).unwrap();
        assert_eq!((bytes.to_vec(), lease.checksum), (bytes_of(n, size), checksum(&bytes_of(n, size))));
    }
    assert_eq!(store.exists(&[key(1), key(9), key(5)]).unwrap(), [true, false, true]);
    let many: Vec<BlockKey> = (0..1000).map(key).collect();
    assert_eq!(store.exists(&many).unwrap().iter().filter(|&&found| found).count(), 5);
}

#[test]
fn bad_calls_leave_the_state_as_it_was() {
    let store = store(4);
    let (owner, other) = (store.new_owner(), store.new_owner());
    let refused = |n, size| match reserve(&store, owner, n, size) {
        Reserve::Refused(error) => error.to_string(),
        other => format!("{other:?}"),
    };
    assert!(refused(1, 0).contains("no bytes"));
    assert!(refused(1, 4 * 4096 + 1).contains("larger than the pool of 16384 B"));
    let before = store.metrics();
    assert!(matches!(store.exists(&vec![key(1); 4097]), Err(StoreError::BatchTooLarge { len: 4097 })));
    let commit = |owner, id| store.commit(owner, &[(id, None)], 0).unwrap().remove(0);
    for id in [0, 7, u64::MAX] {
        assert_eq!(commit(owner, id), Err(StoreError::UnknownReservation { id }));
        assert_eq!(store.abort(owner, &[id]).unwrap()[0], Err(StoreError::UnknownReservation { id }));
        assert_eq!(store.release(OwnerId(0), &[id]).unwrap()[0], Err(StoreError::LeaseGone { id }));
    }
    assert_eq!(store.metrics(), before);

    let id = reserved(&store, owner, 1, 4096);
    assert_eq!(reserve(&store, other, 1, 4096), Reserve::InProgress);
    assert_eq!(commit(other, id), Err(StoreError::NotTheWriter { id }));
    assert!(matches!(
        store.fill(owner, id, 4000, [0; 97][..].into()),
        Err(StoreError::OutOfReservation { .. })
    ));
    assert_eq!(store.remove(&[key(1)], 0).unwrap(), [Remove::InProgress]);
    store.fill(owner, id, 0, bytes_of(1, 4096)[..].into()).unwrap();
    assert!(lease(&store, 1, 0).is_none(), "not visible before commit");
    assert!(commit(owner, id).is_ok());
    assert_eq!(commit(owner, id), Err(StoreError::AlreadyCommitted { id }));
    assert_eq!(store.abort(owner, &[id]).unwrap()[0], Err(StoreError::AlreadyCommitted { id }));
    assert_eq!(reserve(&store, other, 1, 4096), Reserve::AlreadyStored);

    let id = reserved(&store, owner, 2, 4096);
    store.abort(owner, &[id]).unwrap().remove(0).unwrap();
    assert_eq!(commit(owner, id), Err(StoreError::Aborted { id }));
    let Some(lease) = lease(&store, 1, 0) else { panic!("resident") };
    assert_eq!(
        store.release(OwnerId(0), &[lease.id, lease.id]).unwrap(),
        [Ok(()), Err(StoreError::LeaseGone { id: lease.id })]
    );
}

#[test]
fn a_wrong_checksum_is_refused_or_found() {
    let verify = DramConfig { commit_check: CommitCheck::Verify, ..config(8) };
    for (config, refused) in [(verify, true), (config(8), false)] {
        let store = Arc::new(DramStore::open(config).unwrap());
        let id = reserved(&store, OwnerId(0), 1, 4096);
        store.fill(OwnerId(0), id, 0, bytes_of(1, 4096)[..].into()).unwrap();
        let result = store.commit(OwnerId(0), &[(id, Some(1))], 0).unwrap().remove(0);
        assert_eq!(matches!(result, Err(StoreError::ChecksumMismatch { expected: 1, .. })), refused);
        let expected = if refused { Verify::Missing } else { Verify::Dropped };
        assert_eq!(store.verify(&[key(1)], 0).unwrap(), [expected]);
        assert!(lease(&store, 1, 0).is_none());
        let metrics = store.metrics();
        assert_eq!((metrics.checksum_failures, metrics.free_bytes), (1, 8 * 4096));
    }
}

#[test]
fn what_its_caller_has_checked_is_summed_up_again_only_where_that_is_configured() {
    let verify = DramConfig { commit_check: CommitCheck::Verify, ..config(64) };
    for (config, is_believed) in [(verify, false), (config(64), true)] {
        let store = Arc::new(DramStore::open(config).unwrap());
        let put = |n, size: u32, checksum| {
            let meta = BlockMeta::single(key(n), size);
            store.put_checked(OwnerId(0), &meta, &bytes_of(n, size), checksum, 0)
        };
        assert_eq!(put(1, 4096, 1).is_ok(), is_believed, "another checksum");
        let sizes = [(2, 5000), (3, 16 << 10), (4, (64 << 10) + 100)];
        for (n, size) in sizes {
            assert!(matches!(put(n, size, checksum(&bytes_of(n, size))), Ok(Reserve::Reserved(_))));
            assert_eq!(store.verify(&[key(n)], 0).unwrap(), [Verify::Intact], "{size} B");
        }
        let meta = BlockMeta::single(key(5), 4096);
        let short = store.put_checked(OwnerId(0), &meta, &[7; 4095], 0, 0);
        assert!(matches!(short, Err(StoreError::OutOfReservation { .. })));
        assert_eq!(store.metrics().reservations, 0);
    }
}

#[test]
fn corrupt_bytes_are_dropped_even_while_someone_reads_them() {
    let store = store(8);
    put(&store, 1, 4096, 0);
    assert_eq!(store.verify(&[key(1)], 0).unwrap(), [Verify::Intact]);
    let lease = lease(&store, 1, 0).unwrap();
    assert!(store.pool().mapping().write(lease.offset + 7, b"flip"));
    assert_eq!(store.verify(&[key(1)], 0).unwrap(), [Verify::Dropped]);
    assert_eq!(store.exists(&[key(1)]).unwrap(), [false]);
    assert_eq!(store.metrics().free_bytes, 7 * 4096, "the reader keeps the memory");
    store.release(OwnerId(0), &[lease.id]).unwrap().remove(0).unwrap();
    assert_eq!(store.metrics().free_bytes, 8 * 4096);
    let kinds: Vec<_> = drain(&store).iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Insert, EventKind::Hit, EventKind::Remove]);
}

#[test]
fn a_block_that_a_batch_names_many_times_is_compared_once() {
    let store = store(8);
    put(&store, 1, 4096, 0);
    put(&store, 2, 4096, 0);
    let lease = lease(&store, 1, 0).unwrap();
    assert!(store.pool().mapping().write(lease.offset, b"flip"));
    // Compared a second time, it would be missing.
    let expected = [Verify::Dropped, Verify::Intact, Verify::Dropped, Verify::Missing, Verify::Dropped];
    assert_eq!(store.verify(&[1, 2, 1, 3, 1].map(key), 0).unwrap(), expected);
    assert_eq!(store.metrics().checksum_failures, 1);
}

#[test]
fn leases_protect_until_they_expire() {
    let store = store(8);
    put(&store, 1, 4096, 0);
    let slot = store.stat(&[key(1)]).unwrap()[0].unwrap().slot;
    let lease = lease(&store, 1, 10).unwrap();
    assert_eq!(lease.expires_ms, 1010);
    drain(&store);
    assert_eq!(store.evict(&[slot], 20), [Evict::InUse]);
    assert_eq!(drain(&store)[0].kind, EventKind::Keep);
    store.sweep(1109); // lease and grace
    assert_eq!(store.evict(&[slot], 1109), [Evict::InUse]);
    drain(&store);
    store.sweep(1110);
    assert_eq!(
        store.evict(&[slot, slot, 77, u32::MAX], 1110),
        [Evict::Evicted, Evict::NotResident, Evict::NotResident, Evict::NotResident]
    );
    assert_eq!(
        store.release(OwnerId(0), &[lease.id]).unwrap()[0],
        Err(StoreError::LeaseGone { id: lease.id })
    );
    assert_eq!(store.metrics().leases_expired, 1);
    assert!(drain(&store).is_empty(), "an eviction the policy chose is not told to it");
}

#[test]
fn nobody_ends_the_lease_of_another() {
    let store = store(8);
    put(&store, 1, 4096, 0);
    let lease = lease(&store, 1, 0).unwrap();
    drain(&store);
    let (other, id) = (store.new_owner(), lease.id);
    assert_eq!(store.release(other, &[id]).unwrap(), [Err(StoreError::LeaseGone { id })]);
    assert_eq!(store.evict(&[lease.slot], 0), [Evict::InUse], "its reader still holds it");
    assert_eq!(store.release(OwnerId(0), &[id]).unwrap(), [Ok(())]);
}

#[test]
fn a_lease_of_an_earlier_run_ends_nothing_now() {
    let first_id = || {
        let store = store(8);
        put(&store, 1, 4096, 0);
        lease(&store, 1, 0).unwrap().id
    };
    // Two runs begin alike by chance, once in four billion times; four pairs in a row do not.
    assert!((0..4).any(|_| first_id() != first_id()));
}

#[test]
fn the_place_of_a_late_client_goes_to_nobody_while_it_may_write_there() {
    let store = store(8);
    let late = store.new_client();
    let id = reserved(&store, late, 1, 8 * 4096);
    let place =
        |n| store.put(OwnerId(0), &BlockMeta::single(key(n), 4096), &bytes_of(n, 4096), 6000).unwrap();
    store.sweep(5000);
    let metrics = store.metrics();
    assert_eq!((metrics.reservations, metrics.quarantined_bytes, metrics.quarantined), (0, 8 * 4096, 1));
    assert!(matches!(place(2), Reserve::Refused(StoreError::PoolFull { .. })), "there is no other memory");
    // Nor does another client get more to be late with.
    assert!(matches!(
        reserve(&store, store.new_client(), 3, 4096),
        Reserve::Refused(StoreError::WritersLate { bytes: 32_768 })
    ));
    assert_eq!(store.metrics().quarantine_refused, 1);
    assert!(store.is_filling(late));

    // It wakes up, finishes its copy, and says so.
    let other = store.new_client();
    assert!(store.commit(other, &[(id, None)], 6000).unwrap()[0].is_err());
    assert_eq!(store.metrics().quarantined_bytes, 8 * 4096, "only its own word counts");
    assert_eq!(store.commit(late, &[(id, None)], 6000).unwrap()[0], Err(StoreError::Aborted { id }));
    assert_eq!(store.metrics().quarantined_bytes, 0);
    assert!(matches!(place(2), Reserve::Reserved(_)) && !store.is_filling(late));
}

#[test]
fn one_client_that_stopped_does_not_stop_the_others() {
    let store = store(12);
    let stopped = store.new_client();
    for n in 0..4 {
        reserved(&store, stopped, n, 4096);
    }
    store.sweep(5000);
    assert_eq!(store.metrics().quarantined_bytes, 4 * 4096);
    let more = reserve(&store, stopped, 5, 4096);
    assert!(
        matches!(more, Reserve::Refused(StoreError::TooMuchReserved { reserved_bytes: 16_384, .. })),
        "it has its share, and time does not give it another: {more:?}"
    );
    reserved(&store, store.new_client(), 6, 4096);
}

#[test]
fn the_places_of_a_client_that_left_go_after_a_grace_time() {
    let store = store(8);
    let client = store.new_client();
    reserved(&store, client, 1, 4096);
    store.sweep(5000);
    reserved(&store, client, 2, 4096);
    store.release_owner(client, 6000);
    assert_eq!(store.metrics().quarantined_bytes, 2 * 4096);
    store.sweep(6099);
    assert_eq!(store.metrics().free_bytes, 6 * 4096);
    store.sweep(6100);
    assert_eq!((store.metrics().free_bytes, store.metrics().quarantined_bytes), (8 * 4096, 0));
}

#[test]
fn what_this_process_fills_by_itself_no_time_takes_back() {
    let store = store(8);
    let owner = store.new_transfers_owner();
    let id = reserved(&store, owner, 1, 4096);
    store.sweep(u64::MAX);
    store.fill(owner, id, 0, bytes_of(1, 4096)[..].into()).unwrap();
    assert!(store.commit(owner, &[(id, None)], 0).unwrap()[0].is_ok());
}

/// A lookup that brings a block up says nothing about when it was put, and neither does a copy from another host.
#[test]
fn what_was_brought_is_told_from_what_was_put() {
    let store = store(8);
    let owners = [store.new_owner(), store.new_client(), store.new_bringing_owner(), store.new_peer_owner()];
    for (n, owner) in (1..).zip(owners) {
        let id = reserved(&store, owner, n, 4096);
        assert!(store.commit(owner, &[(id, None)], 0).unwrap()[0].is_ok());
    }
    let brought = [1, 2, 3, 4].map(|n| store.stat(&[key(n)]).unwrap()[0].unwrap().was_brought);
    assert_eq!(brought, [false, false, true, true]);
}

#[test]
fn a_peer_reserves_a_quarter_of_the_pool_and_leaves_the_rest_to_others() {
    let store = store(8);
    let (one, two) = (store.new_peer_owner(), store.new_peer_owner());
    let refused = |owner, n| {
        let meta = BlockMeta::single(key(n), 4096);
        matches!(
            store.reserve(owner, &[meta], 0).unwrap()[0],
            Reserve::Refused(StoreError::TooMuchReserved { reserved_bytes: 8192, max_bytes: 8192, .. })
        )
    };
    let first = reserved(&store, one, 1, 4096);
    reserved(&store, one, 2, 4096);
    assert!(refused(one, 3));
    reserved(&store, two, 3, 4096);
    assert!(store.abort(one, &[first]).unwrap()[0].is_ok());
    reserved(&store, one, 4, 4096);
}

#[test]
fn who_is_abandoned_keeps_what_it_was_lent_until_its_time_is_over() {
    let store = store(8);
    put(&store, 1, 4096, 0);
    let client = store.new_client();
    let Lookup::Hit(lease) = store.get(client, &[key(1)], 0, 0).unwrap()[0] else { panic!("resident") };
    store.abandon_owner(client, 0);
    drain(&store);
    assert_eq!(store.evict(&[lease.slot], 0), [Evict::InUse]);
    store.sweep(lease.expires_ms + 100);
    drain(&store);
    assert_eq!(store.evict(&[lease.slot], lease.expires_ms + 100), [Evict::Evicted]);
}

#[test]
fn a_dead_writer_leaves_nothing_behind() {
    let store = store(8);
    let (dead, late) = (store.new_owner(), store.new_owner());
    put(&store, 9, 4096, 0);
    reserved(&store, dead, 1, 4096);
    reserved(&store, dead, 2, 8192);
    let kept = reserved(&store, late, 3, 4096);
    assert!(matches!(store.get(dead, &[key(9)], 0, 0).unwrap()[0], Lookup::Hit(_)));
    store.release_owner(dead, 0);
    let metrics = store.metrics();
    assert_eq!((metrics.reservations, metrics.reservations_reclaimed, metrics.leases), (1, 2, 0));
    assert_eq!(metrics.free_bytes, 6 * 4096);
    store.sweep(5000);
    assert_eq!(store.commit(late, &[(kept, None)], 0).unwrap()[0], Err(StoreError::Aborted { id: kept }));
    assert_eq!(store.metrics().free_bytes, 7 * 4096);
}

#[test]
fn a_put_into_a_full_pool_takes_from_the_reserve() {
    let store = store(4);
    (0..4).for_each(|n| assert!(matches!(put(&store, n, 4096, n), Reserve::Reserved(_))));
    let Reserve::Refused(error) = put(&store, 4, 4096, 4) else { panic!("no room") };
    assert!(error.retryable() && matches!(error, StoreError::PoolFull { free_bytes: 0, .. }), "{error}");
    assert!(store.pressure().is_low());

    let slots: Vec<u32> = drain(&store).iter().map(|event| event.slot).collect();
    put(&store, 1, 4096, 5); // a use that the policy has not seen
    assert_eq!(
        store.offer_victims(&[slots[0], slots[1], slots[2], 999], 6),
        Offered { taken: 2, kept: 1, replaced: 0, not_resident: 1 }
    );
    let held = lease(&store, 2, 7).unwrap(); // a use takes it out of the reserve
    assert!(matches!(put(&store, 4, 4096, 8), Reserve::Reserved(_)));
    assert!(matches!(put(&store, 5, 4096, 8), Reserve::Refused(_)), "nothing else may go");
    assert_eq!(store.exists(&[0, 1, 2, 3, 4].map(key)).unwrap(), [false, true, true, true, true]);
    assert_eq!(store.metrics().lifecycle.in_state(State::Evicted), 1);
    assert_eq!(held.size, 4096);
    let events: Vec<_> = drain(&store).iter().map(|event| (event.kind, event.slot)).collect();
    assert_eq!(
        events[..3],
        [(EventKind::Hit, slots[1]), (EventKind::Keep, slots[1]), (EventKind::Hit, slots[2])]
    );
}

#[test]
fn a_victim_is_copied_before_it_is_ready() {
    let store = store(4);
    (0..4).for_each(|n| assert!(matches!(put(&store, n, 4096, n), Reserve::Reserved(_))));
    let slots: Vec<u32> = drain(&store).iter().map(|event| event.slot).collect();
    let mut chosen = Vec::new();
    assert_eq!(store.choose_victims(&slots[..3], 5, &mut chosen), Offered::default());
    assert_eq!(chosen.iter().map(|stat| stat.key).collect::<Vec<_>>(), [0, 1, 2].map(key));
    assert!(store.hold_chosen(slots[0], key(1)).is_none(), "the slot holds another block");
    assert!(store.hold_chosen(slots[3], key(3)).is_none(), "it was not chosen");
    let held = store.hold_chosen(slots[0], key(0)).unwrap();
    assert_eq!(held.bytes(), bytes_of(0, 4096));
    assert_eq!(store.stat(&[key(0)]).unwrap()[0].unwrap().uses, 0);
    assert_eq!(store.metrics().lifecycle.in_state(State::Migrating), 1);
    assert!(matches!(put(&store, 4, 4096, 6), Reserve::Refused(_)), "nothing is ready yet");
    assert!(lease(&store, 1, 6).is_some(), "a use after the choice");
    drop(held);
    assert_eq!(store.make_ready(&slots[..3], 7), 2);
    assert!((5..7).all(|n| matches!(put(&store, n, 4096, 8), Reserve::Reserved(_))));
    assert_eq!(store.exists(&[0, 1, 2, 3].map(key)).unwrap(), [false, true, false, true]);
}

#[test]
fn a_waiting_put_is_served_by_the_evictor() {
    let config = DramConfig { put_wait: Duration::from_secs(60), ..config(4) };
    let store = Arc::new(DramStore::open(config).unwrap());
    (0..4).for_each(|n| assert!(matches!(put(&store, n, 4096, n), Reserve::Reserved(_))));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| put(&store, 4, 2 * 4096, 9));
        let mut seen = Vec::new();
        while !writer.is_finished() {
            if store.wait_pressure(Duration::from_millis(5)).waiting_puts > 0 {
                store.drain_events(&mut seen);
                store.offer_victims(&seen.iter().map(|event| event.slot).collect::<Vec<_>>(), 9);
            }
        }
        assert!(matches!(writer.join().unwrap(), Reserve::Reserved(_)));
    });
    assert_eq!(store.metrics().put_waits, 1);
}

#[test]
fn running_out_of_slots_is_said() {
    let store = Arc::new(DramStore::open(DramConfig { blocks_max: 1, ..config(1024) }).unwrap());
    let outcomes: Vec<Reserve> = (0..1000).map(|n| put(&store, n, 1, 0)).collect();
    let full = |outcome: &&Reserve| matches!(outcome, Reserve::Refused(StoreError::SlotsFull { .. }));
    let refused = outcomes.iter().filter(full).count();
    assert!(refused > 0);
    let resident = store.metrics().lifecycle.in_state(State::Active) as usize;
    assert_eq!(resident, 1000 - refused);
    assert!(resident <= store.slots() as usize);
    assert!(drain(&store).iter().all(|event| event.slot < store.slots()));
}

#[test]
fn a_put_without_a_slot_calls_the_evictor() {
    let store = Arc::new(DramStore::open(DramConfig { blocks_max: 1, ..config(1024) }).unwrap());
    assert!(!store.wait_pressure(Duration::ZERO).is_low());
    let full = |outcome: &Reserve| matches!(outcome, Reserve::Refused(StoreError::SlotsFull { .. }));
    let refused = (0..).find(|&n| full(&put(&store, n, 1, 0))).unwrap();
    let pressure = store.wait_pressure(Duration::from_secs(3600));
    assert!(pressure.slots_full && pressure.is_low() && pressure.excess_bytes() == 0);
    assert_eq!(store.offer_victims(&[], 1).taken, 0);
    assert!(store.pressure().slots_full, "nothing was offered");
    let slots: Vec<u32> = drain(&store).iter().map(|event| event.slot).collect();
    assert!(store.offer_victims(&slots, 1).taken > 0);
    assert!(!store.pressure().is_low());
    assert!(matches!(put(&store, refused, 1, 2), Reserve::Reserved(_)));
}

#[test]
fn a_new_policy_is_told_what_is_resident() {
    let store = store(64);
    for n in 0..10u64 {
        let parent = n.checked_sub(1).map(key);
        let meta = BlockMeta { parent, depth: n as u32, class: 3, ..BlockMeta::single(key(n), 4096) };
        store.put(OwnerId(0), &meta, &bytes_of(n, 4096), n * 100).unwrap();
    }
    let live = drain(&store);
    assert_eq!(live[0].parent_or_uses, NO_SLOT);
    assert!((1..10).all(|n| live[n].parent_or_uses == live[n - 1].slot));
    lease(&store, 4, 5000).unwrap();
    store.remove(&[key(7)], 5000).unwrap();
    let replayed = replayed(&store);
    assert!(replayed.iter().all(|event| event.replayed));
    let inserts: Vec<_> = replayed.iter().filter(|event| event.kind == EventKind::Insert).collect();
    assert_eq!(inserts.len(), 9);
    for insert in inserts {
        let expected = live.iter().find(|event| event.identity == insert.identity).unwrap();
        let parent = if insert.depth == 8 { NO_SLOT } else { expected.parent_or_uses };
        let expected = AccessEvent { replayed: true, parent_or_uses: parent, ..*expected };
        assert_eq!(*insert, expected);
    }
    let last = replayed.last().unwrap();
    assert_eq!((last.kind, last.parent_or_uses, last.time_ms), (EventKind::Hit, 1, 5000));
    let (listed, rest) = store.list(0, 100);
    assert_eq!((listed.len(), rest), (9, None));
    assert_eq!(store.list(0, 4).0[..], listed[..4]);
}

#[test]
fn old_blocks_expire_when_told_to() {
    let config = DramConfig { block_ttl: Duration::from_millis(500), ..config(8) };
    let store = Arc::new(DramStore::open(config).unwrap());
    put(&store, 1, 4096, 0);
    put(&store, 2, 4096, 300);
    store.sweep(499);
    assert_eq!(store.exists(&[key(1), key(2)]).unwrap(), [true, true]);
    store.sweep(500);
    assert_eq!(store.exists(&[key(1), key(2)]).unwrap(), [false, true]);
    assert_eq!(store.metrics().lifecycle.in_state(State::Expired), 1);
}

#[test]
fn a_sent_block_outlives_its_removal() {
    let store = store(8);
    put(&store, 1, 5000, 0);
    let held = store.hold(key(1), 0, 0).unwrap();
    assert_eq!(store.stat(&[key(1)]).unwrap()[0].unwrap().state, State::Migrating);
    assert_eq!(store.remove(&[key(1)], 0).unwrap(), [Remove::Removed]);
    assert!(store.hold(key(1), 0, 0).is_none());
    assert_eq!(held.bytes(), bytes_of(1, 5000));
    drop(held);
    assert_eq!(store.metrics().free_bytes, 8 * 4096);
}

/// Writers, readers and an evictor at once: every block read is bit-exact, and nothing is lost or left over.
#[test]
fn many_threads_never_read_a_wrong_byte() {
    let config = DramConfig { put_wait: Duration::from_millis(20), ..config(64) };
    let store = Arc::new(DramStore::open(config).unwrap());
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for worker in 0..2u64 {
            let (store, done) = (&store, &done);
            scope.spawn(move || {
                let owner = store.new_owner();
                for step in 0..4000u64 {
                    let n = (step * 7 + worker * 3) % 97;
                    let size = 1 + (n as u32 * 211) % 9000;
                    let meta = BlockMeta::single(key(n), size);
                    let _ = store.put(owner, &meta, &bytes_of(n, size), step).unwrap();
                    for lookup in store.get(owner, &[key(n), key((n + 50) % 97)], 1, step).unwrap() {
                        let Lookup::Hit(lease) = lookup else { continue };
                        let bytes = store.pool().mapping().bytes(lease.offset, lease.size.into()).unwrap();
                        assert_eq!(bytes.checksum(), lease.checksum);
                        store.release(owner, &[lease.id]).unwrap().remove(0).unwrap();
                    }
                    if step % 50 == 0 {
                        store.remove(&[key(step % 97)], step).unwrap();
                    }
                }
                done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            });
        }
        let (mut events, mut round) = (Vec::new(), 0);
        while done.load(std::sync::atomic::Ordering::Relaxed) < 2 {
            store.wait_pressure(Duration::from_millis(1));
            round += 1;
            if round % 64 == 0 {
                replay_while_used(&store);
            }
            store.drain_events(&mut events);
            let slots: Vec<u32> = events.drain(..).map(|event| event.slot).collect();
            store.offer_victims(&slots, 0);
            store.reclaim(16, 0);
        }
    });
    store.sweep(u64::MAX / 2);
    let keys: Vec<BlockKey> = (0..97).map(key).collect();
    assert!(store.verify(&keys, 0).unwrap().iter().all(|&outcome| outcome != Verify::Dropped));
    store.remove(&keys, 0).unwrap();
    let metrics = store.metrics();
    assert_eq!((metrics.free_bytes, metrics.free_extents, metrics.leases), (64 * 4096, 1, 0));
    let living =
        [State::Creating, State::Storing, State::Active, State::Reused, State::Migrating, State::Evicting];
    assert!(living.iter().all(|&state| metrics.lifecycle.in_state(state) == 0), "{:?}", metrics.lifecycle);
    assert!(metrics.lifecycle.in_state(State::Evicted) > 0);
}

/// Any block may have gone, or have another's slot, by the time it is looked at.
fn replay_while_used(store: &DramStore) {
    let history = store.history(1).in_order();
    for past in &history.entries {
        let told = store.resident(past.slot()).map(|resident| resident.insert);
        let told = if past.is_use() { store.past_use(past.slot(), &history) } else { told };
        assert!(told.is_none_or(|event| event.replayed && event.slot == past.slot()));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put(u64, u32),
    Reserve(u64, u32),
    Commit(usize),
    Abort(usize),
    Get(u64),
    Release(usize),
    Remove(u64),
    Evict(u64),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let (n, size) = (0u64..12, 1u32..20_000);
    prop_oneof![
        4 => (n.clone(), size.clone()).prop_map(|(n, size)| Op::Put(n, size)),
        2 => (n.clone(), size).prop_map(|(n, size)| Op::Reserve(n, size)),
        2 => (0usize..8).prop_map(Op::Commit),
        1 => (0usize..8).prop_map(Op::Abort),
        4 => n.clone().prop_map(Op::Get),
        2 => (0usize..8).prop_map(Op::Release),
        1 => n.clone().prop_map(Op::Remove),
        2 => n.prop_map(Op::Evict),
        1 => (1u64..1500).prop_map(Op::Wait),
    ]
}

/// What the store should hold.
#[derive(Default)]
struct Model {
    resident: HashMap<u64, u32>,
    /// Open reservations: id, block, size, deadline.
    open: Vec<(u64, u64, u32, u64)>,
    /// Leases: the lease, the block, and when the store ends it.
    leases: Vec<(Lease, u64, u64)>,
}

impl Model {
    fn leased(&self, n: u64) -> bool {
        self.leases.iter().any(|lease| lease.1 == n)
    }
    fn writing(&self, n: u64) -> bool {
        self.open.iter().any(|open| open.1 == n)
    }
    fn check_outcome(&self, n: u64, outcome: &Reserve) {
        match outcome {
            Reserve::AlreadyStored => assert!(self.resident.contains_key(&n)),
            Reserve::InProgress => assert!(self.writing(n)),
            Reserve::Reserved(_) => assert!(!self.resident.contains_key(&n) && !self.writing(n)),
            Reserve::Refused(error) => assert!(matches!(error, StoreError::PoolFull { .. }), "{error}"),
        }
    }
}

fn run(ops: Vec<Op>) {
    let store = store(12);
    let owner = store.new_owner();
    let mut model = Model::default();
    let mut now = 0;
    for op in ops {
        match op {
            Op::Put(n, size) => {
                let meta = BlockMeta::single(key(n), size);
                let outcome = store.put(owner, &meta, &bytes_of(n, size), now).unwrap();
                model.check_outcome(n, &outcome);
                if matches!(outcome, Reserve::Reserved(_)) {
                    model.resident.insert(n, size);
                }
            }
            Op::Reserve(n, size) => {
                let meta = BlockMeta::single(key(n), size);
                let outcome = store.reserve(owner, &[meta], now).unwrap().remove(0);
                model.check_outcome(n, &outcome);
                if let Reserve::Reserved(reservation) = outcome {
                    store.fill(owner, reservation.id, 0, bytes_of(n, size)[..].into()).unwrap();
                    model.open.push((reservation.id, n, size, now + 5000));
                }
            }
            Op::Commit(at) if at < model.open.len() => {
                let (id, n, size, _) = model.open.swap_remove(at);
                assert!(store.commit(owner, &[(id, None)], now).unwrap()[0].is_ok());
                model.resident.insert(n, size);
            }
            Op::Abort(at) if at < model.open.len() => {
                let (id, ..) = model.open.swap_remove(at);
                assert_eq!(store.abort(owner, &[id]).unwrap(), [Ok(())]);
            }
            Op::Get(n) => match (lease(&store, n, now), model.resident.get(&n)) {
                (Some(lease), Some(&size)) => {
                    assert_eq!(lease.size, size);
                    model.leases.push((lease, n, now + 1100));
                }
                (lease, size) => assert_eq!((lease, size), (None, None)),
            },
            Op::Release(at) if at < model.leases.len() => {
                let (lease, ..) = model.leases.swap_remove(at);
                assert_eq!(store.release(OwnerId(0), &[lease.id]).unwrap(), [Ok(())]);
            }
            Op::Remove(n) => {
                let expected = match (model.resident.remove(&n), model.writing(n)) {
                    (Some(_), _) => Remove::Removed,
                    (None, true) => Remove::InProgress,
                    (None, false) => Remove::Missing,
                };
                assert_eq!(store.remove(&[key(n)], now).unwrap(), [expected]);
                for lease in model.leases.iter_mut().filter(|lease| lease.1 == n) {
                    lease.1 = u64::MAX - n; // still readable, no longer this key's
                }
            }
            Op::Evict(n) => {
                drain(&store);
                let Some(stat) = store.stat(&[key(n)]).unwrap()[0] else {
                    assert!(!model.resident.contains_key(&n));
                    continue;
                };
                let expected = if model.leased(n) { Evict::InUse } else { Evict::Evicted };
                assert_eq!(store.evict(&[stat.slot], now), [expected]);
                if expected == Evict::Evicted {
                    model.resident.remove(&n);
                }
            }
            Op::Wait(ms) => {
                now += ms;
                store.sweep(now);
                model.leases.retain(|lease| lease.2 > now);
                model.open.retain(|open| open.3 > now);
            }
            Op::Commit(_) | Op::Abort(_) | Op::Release(_) => {}
        }
        for n in 0..12 {
            assert_eq!(store.exists(&[key(n)]).unwrap()[0], model.resident.contains_key(&n), "block {n}");
        }
        for (lease, n, _) in &model.leases {
            let n = if *n > 12 { u64::MAX - n } else { *n };
            let bytes = store.pool().mapping().bytes(lease.offset, lease.size.into()).unwrap();
            assert_eq!(bytes, bytes_of(n, lease.size), "leased bytes of block {n} changed");
        }
    }
    store.sweep(now + 10_000);
    store.remove(&(0..12).map(key).collect::<Vec<_>>(), now).unwrap();
    assert_eq!(store.metrics().free_bytes, 12 * 4096, "memory leaked");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn random_calls_match_the_model(ops in prop::collection::vec(op(), 1..120)) {
        run(ops);
    }
}

#[test]
fn one_client_takes_neither_all_leases_nor_all_memory() {
    let store = Arc::new(DramStore::open(DramConfig { leases_max: 64 * 32, ..config(32) }).unwrap());
    put(&store, 1, 4096, 0);
    let (greedy, other) = (store.new_client(), store.new_client());
    let lent = |owner| matches!(store.get(owner, &[key(1)], 0, 0).unwrap()[0], Lookup::Hit(_));
    assert_eq!((0..100).filter(|_| lent(greedy)).count(), 16, "a quarter of those in the block's shard");
    assert!(lent(other), "others read on");
    store.release_owner(greedy, 0);
    assert!(lent(greedy));

    // 10 of 32 pages, in one batch or in several.
    let metas: Vec<BlockMeta> = (100..120).map(|n| BlockMeta::single(key(n), 4096)).collect();
    let placed = store.reserve(greedy, &metas, 0).unwrap();
    let ids: Vec<u64> =
        placed.iter().filter_map(|p| if let Reserve::Reserved(r) = p { Some(r.id) } else { None }).collect();
    assert_eq!(ids.len(), 10);
    let Reserve::Refused(error) = reserve(&store, greedy, 130, 4096) else { panic!("beyond its share") };
    assert!(matches!(error, StoreError::TooMuchReserved { reserved_bytes: 40_960, .. }) && error.retryable());
    assert!(error.to_string().contains("commit or abort some first"), "{error}");
    reserved(&store, other, 131, 4096);
    store.abort(greedy, &ids[..1]).unwrap().remove(0).unwrap();
    reserved(&store, greedy, 132, 4096);
    // A block of more than a share is no fault while nothing else is reserved.
    let large = DramStore::open(config(32)).unwrap();
    reserved(&large, large.new_client(), 1, 24 * 4096);
}

/// How many of 20 pages it gets in one batch.
fn reserve_20(store: &DramStore, owner: OwnerId, first: u64) -> usize {
    let metas: Vec<BlockMeta> = (first..first + 20).map(|n| BlockMeta::single(key(n), 4096)).collect();
    let placed = store.reserve(owner, &metas, 0).unwrap();
    placed.iter().filter(|placed| matches!(placed, Reserve::Reserved(_))).count()
}

#[test]
fn a_client_that_sends_its_blocks_reserves_no_more_than_one_that_fills_them() {
    let store = store(32);
    assert_eq!(reserve_20(&store, store.new_sender(), 100), 10);
    assert_eq!(reserve_20(&store, store.new_sender(), 200), 10);
    assert_eq!(reserve_20(&store, store.new_owner(), 300), 12, "this process has all");
}

#[test]
fn a_caller_of_many_connections_leaves_half_of_everything_to_others() {
    let config = DramConfig { leases_max: 64 * 32, pin_share: 1.0, ..config(64) };
    let store = Arc::new(DramStore::open(config).unwrap());
    let greedy: [OwnerId; 4] = std::array::from_fn(|_| store.new_client().of_caller("greedy"));
    let other = store.new_sender().of_caller("other");
    let placed: Vec<usize> =
        (0..).zip(&greedy).map(|(n, &owner)| reserve_20(&store, owner, 1000 * n)).collect();
    assert_eq!(placed, [20, 12, 0, 0], "half of 64 pages");
    assert_eq!(reserve_20(&store, other, 5000), 20);
    // What was taken back from them, and they may still be writing to, counts on.
    store.sweep(5000);
    assert_eq!(store.metrics().quarantined_bytes, 32 * 4096);
    assert_eq!(reserve_20(&store, store.new_sender().of_caller("greedy"), 6000), 0);
    greedy.iter().for_each(|&owner| store.release_owner(owner, 5000));
    store.sweep(6000);
    assert_eq!(reserve_20(&store, greedy[3], 7000), 20);

    put(&store, 1, 4096, 0);
    let lent = |owner| matches!(store.get(owner, &[key(1)], 0, 0).unwrap()[0], Lookup::Hit(_));
    let leases: Vec<usize> = greedy.iter().map(|&owner| (0..40).filter(|_| lent(owner)).count()).collect();
    assert_eq!(leases, [16, 16, 0, 0], "half of those in the block's shard");
    assert!(lent(other));
}
