//! The remote tier in a directory. Against a server: `tests/s3`.

use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use kvasir_protocol::block::BlockMeta;
use kvasir_protocol::clock::Clock;
use kvasir_store::config::DramConfig;
use kvasir_store::conformance::{self, block, bytes_of, get_all, holds, key, put, put_all, remove};
use kvasir_store::dram::{DramStore, Lookup};
use kvasir_store::tiering::{AdmitAll, Tiering, TieringConfig};

fn config(dir: &TempDir) -> RemoteConfig {
    let place = Place::Directory(dir.path().join("blocks"));
    RemoteConfig { capacity_bytes: Some(32 << 20), ..RemoteConfig::new(place) }
}

fn open(dir: &TempDir) -> RemoteStore {
    RemoteStore::open(&config(dir)).unwrap()
}

fn sealed(dir: &TempDir, key: u8) -> RemoteStore {
    let keys = vec![TenantKey { tenant: 0, key: [key; 32] }];
    RemoteStore::open(&RemoteConfig { keys, ..config(dir) }).unwrap()
}

fn file_of(dir: &TempDir, n: u64) -> PathBuf {
    let name = key(n).to_string();
    dir.path().join("blocks").join(&name[..2]).join(name)
}

#[test]
fn conforms() {
    conformance::check_durable(|| TempDir::new().unwrap(), |dir| Arc::new(open(dir)));
}

#[test]
fn conforms_when_sealed() {
    let dir = TempDir::new().unwrap();
    let count = AtomicU64::new(0);
    conformance::check(|| {
        let place = dir.path().join(count.fetch_add(1, Ordering::Relaxed).to_string());
        let keys = vec![TenantKey { tenant: 0, key: [3; 32] }];
        let config = RemoteConfig { keys, place: Place::Directory(place), ..config(&dir) };
        Arc::new(RemoteStore::open(&config).unwrap())
    });
}

#[test]
fn a_damaged_object_is_a_miss_and_goes_unless_others_may_rely_on_it() {
    let damage: [fn(&mut Vec<u8>); 5] = [
        |object| object[200] ^= 1,
        |object| object[20] ^= 1,
        |object| object.truncate(150),
        |object| object.truncate(0),
        |object| object.push(0),
    ];
    for (key_byte, shared) in [(None, true), (None, false), (Some(5), true), (Some(5), false)] {
        for (n, damage) in (0..).zip(damage) {
            let dir = TempDir::new().unwrap();
            let keys = key_byte.map(|byte| TenantKey { tenant: 0, key: [byte; 32] }).into_iter().collect();
            let store = RemoteStore::open(&RemoteConfig { keys, shared, ..config(&dir) }).unwrap();
            assert!(put_all(&store, vec![block(n, 500), block(90, 500)]).iter().all(Result::is_ok));
            let mut object = std::fs::read(file_of(&dir, n)).unwrap();
            damage(&mut object);
            std::fs::write(file_of(&dir, n), object).unwrap();
            assert!(!holds(&store, n, 500) && holds(&store, 90, 500));
            assert_eq!((store.exists(&[key(n)]), file_of(&dir, n).exists()), (vec![false], shared));
            let stats = store.stats();
            assert_eq!((stats.corrupt, stats.misses, stats.blocks, stats.io_errors), (1, 1, 1, 0));
            assert_eq!(put(&store, n, 500), Ok(Stored::Stored));
            assert!(holds(&store, n, 500));
        }
    }
}

#[test]
fn a_block_under_another_name_is_not_served() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir);
    assert!(put_all(&store, vec![block(1, 500), block(2, 500)]).iter().all(Result::is_ok));
    std::fs::copy(file_of(&dir, 1), file_of(&dir, 2)).unwrap();
    assert!(!holds(&store, 2, 500) && holds(&store, 1, 500));
    std::fs::remove_file(file_of(&dir, 1)).unwrap();
    assert!(!holds(&store, 1, 500));
    assert_eq!((store.stats().blocks, store.stats().corrupt), (0, 1));
}

#[test]
fn sealed_blocks_need_their_key() {
    let dir = TempDir::new().unwrap();
    let store = sealed(&dir, 1);
    assert_eq!(put(&store, 1, 5000), Ok(Stored::Stored));
    let object = std::fs::read(file_of(&dir, 1)).unwrap();
    let clear = bytes_of(1, 5000);
    assert!(!object.windows(16).any(|part| part == &clear[..16]), "no plain text at rest");
    drop(store);
    for other in [sealed(&dir, 2), open(&dir)] {
        let error = get_all(&other, &[1], 5000).remove(0).unwrap_err();
        assert!(error.to_string().contains("which is not among remote.keys"), "{error}");
        assert!(!error.retryable() && other.exists(&[key(1)]) == [true] && other.stats().corrupt == 0);
    }
    // A ring with the old key opens it, and seals new blocks with the new one.
    let keys = [1, 2].map(|byte| TenantKey { tenant: 0, key: [byte; 32] });
    let both = RemoteStore::open(&RemoteConfig { keys: keys.into(), ..config(&dir) }).unwrap();
    assert!(holds(&both, 1, 5000) && put(&both, 2, 50) == Ok(Stored::Stored));
    drop(both);
    assert!(holds(&sealed(&dir, 2), 2, 50));
}

#[test]
fn each_tenant_has_its_own_key() {
    let dir = TempDir::new().unwrap();
    let keys = [1, 2].map(|tenant| TenantKey { tenant, key: [tenant as u8; 32] });
    let of_tenant = |n: u64| {
        let put = block(n, 400);
        Put { meta: BlockMeta { tenant: n as u16, ..put.meta }, ..put }
    };
    let allow_plain = true;
    let store =
        RemoteStore::open(&RemoteConfig { keys: keys.to_vec(), allow_plain, ..config(&dir) }).unwrap();
    assert!(put_all(&store, (0..3).map(of_tenant).collect()).iter().all(Result::is_ok));
    let first = RemoteConfig { keys: keys[..1].to_vec(), allow_plain, ..config(&dir) };
    let first = RemoteStore::open(&first).unwrap();
    let found = |store: &RemoteStore| {
        let found = get_all(store, &[0, 1, 2], 400).into_iter();
        found.map(|found| found.map(|found| found.map(|(loaded, _)| loaded.meta.tenant))).collect::<Vec<_>>()
    };
    assert_eq!(found(&store), [Ok(Some(0)), Ok(Some(1)), Ok(Some(2))]);
    assert_eq!(found(&first)[..2], [Ok(Some(0)), Ok(Some(1))]);
    assert!(found(&first)[2].as_ref().is_err_and(|error| !error.retryable()));
}

#[test]
fn a_sealed_block_is_not_replaced_by_a_plain_one() {
    let dir = TempDir::new().unwrap();
    let sealing = sealed(&dir, 1);
    assert_eq!(put(&sealing, 1, 500), Ok(Stored::Stored));
    // Whoever can write there can do this, without any key.
    std::fs::remove_file(file_of(&dir, 1)).unwrap();
    assert_eq!(put(&open(&dir), 1, 500), Ok(Stored::Stored));
    let error = get_all(&sealing, &[1], 500).remove(0).unwrap_err();
    assert!(!error.retryable() && error.to_string().contains("remote.allow_plain"), "{error}");
    assert!(file_of(&dir, 1).exists(), "a person decides about it");
    // What it would not read it does not store.
    let keys = vec![TenantKey { tenant: 7, key: [1; 32] }];
    let others = RemoteStore::open(&RemoteConfig { keys, ..config(&dir) }).unwrap();
    assert!(put(&others, 2, 500).unwrap_err().to_string().contains("remote.allow_plain"));
}

#[test]
fn hosts_share_a_place() {
    let dir = TempDir::new().unwrap();
    let (one, two) = (open(&dir), open(&dir));
    assert_eq!(put(&one, 1, 300), Ok(Stored::Stored));
    assert_eq!(two.exists(&[key(1)]), [false], "no I/O for this question");
    assert!(holds(&two, 1, 300) && two.exists(&[key(1)]) == [true], "found by asking, and remembered");
    assert_eq!(put(&one, 2, 300), Ok(Stored::Stored));
    assert_eq!((remove(&two, 2), remove(&two, 2)), (Ok(true), Ok(false)));
    assert!(!holds(&one, 2, 300) && one.exists(&[key(2)]) == [false]);
}

#[test]
fn what_is_found_at_open_is_told() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir);
    assert!(put_all(&store, (0..10).map(|n| block(n, 100)).collect()).iter().all(Result::is_ok));
    drop(store);
    for name in ["notes.txt", "00000000000000000000000000000001", "0000000000000000000000000000000G"] {
        std::fs::write(dir.path().join("blocks").join(name), "hello").unwrap();
    }
    let expected = OpenReport { blocks: 10, block_bytes: 1000, beyond_bounds: 0, foreign: 3 };
    assert_eq!(open(&dir).report(), expected);
    let bounded = RemoteStore::open(&RemoteConfig { blocks_max: 4, ..config(&dir) }).unwrap();
    assert_eq!(bounded.report(), OpenReport { blocks: 4, block_bytes: 400, beyond_bounds: 6, ..expected });
    assert!((0..10).all(|n| holds(&bounded, n, 100)), "beyond the bound, a get still finds them");
    assert!(matches!(put(&bounded, 99, 100), Err(TierError::Full { .. })));
}

#[test]
fn more_than_the_queue_takes_is_refused() {
    let dir = TempDir::new().unwrap();
    let store = RemoteStore::open(&RemoteConfig { queue_max: 2, ..config(&dir) }).unwrap();
    let busy = Err(TierError::Busy { tier: "remote", limit: 2 });
    assert_eq!(put_all(&store, (0..3).map(|n| block(n, 10)).collect()), [busy.clone(), busy.clone(), busy]);
    assert!(put_all(&store, (0..2).map(|n| block(n, 10)).collect()).iter().all(Result::is_ok));
}

#[test]
fn what_was_taken_ends_although_the_tier_closes() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir);
    let pending = store.put((0..500).map(|n| block(n, 1000)).collect());
    drop(store);
    let store = open(&dir);
    for (n, done) in (0..).zip(pending.wait()) {
        match done.outcome {
            Ok(Stored::Stored) => assert!(holds(&store, n, 1000)),
            Err(TierError::Closed { .. }) => assert!(!holds(&store, n, 1000)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn bad_settings_are_named() {
    let dir = TempDir::new().unwrap();
    let check = |change: fn(&mut RemoteConfig), expected: &str| {
        let mut config = config(&dir);
        change(&mut config);
        let message = RemoteStore::open(&config).map_or_else(|error| error.to_string(), |_| "fine".into());
        assert!(message.contains(expected), "{message}");
    };
    let s3 = |endpoint: &str| {
        let credentials = Some(("id".into(), "secret".into()));
        let (bucket, region) = ("bucket".into(), "us-east-1".into());
        Place::S3(S3 { bucket, prefix: String::new(), endpoint: Some(endpoint.into()), region, credentials })
    };
    check(|_| (), "fine");
    check(|c| c.requests_max = 0, "remote.requests_max is 0");
    check(|c| c.capacity_bytes = Some(0), "remote.capacity_bytes is 0");
    check(|c| c.place = Place::Directory("/dev/null/blocks".into()), "cannot use directory /dev/null/blocks");
    let debug = format!("{:?}", s3("http://127.0.0.1:1"));
    assert!(!debug.contains("secret") && debug.contains("\"id\""), "{debug}");
    let refused = RemoteConfig { attempts_max: 2, backoff: std::time::Duration::ZERO, ..config(&dir) };
    let refused = RemoteConfig { place: s3("http://127.0.0.1:1"), ..refused };
    let error = RemoteStore::open(&refused).err().unwrap().to_string();
    assert!(error.contains("s3://bucket/ of http://127.0.0.1:1 after 2 attempts"), "{error}");
}

/// A host whose pool stands on a remote tier.
fn host_on(store: RemoteStore) -> Tiering {
    let dram = DramConfig { pool_bytes: 4 << 20, blocks_max: 1024, ..DramConfig::default() };
    let dram = Arc::new(DramStore::open(dram).unwrap());
    let patient = std::time::Duration::from_secs(60);
    let config = TieringConfig { load_timeout: patient, ..TieringConfig::default() };
    Tiering::start(dram, vec![Arc::new(store)], Box::new(AdmitAll), config, Clock::start()).unwrap()
}

/// Whether a reader on that host gets the block.
fn reads(host: &Tiering, n: u64) -> bool {
    let owner = host.dram().new_owner();
    let found = host.get(owner, &[key(n)], 0, 0).unwrap()[0];
    host.dram().release_owner(owner, 0);
    matches!(found, Lookup::Hit(_))
}

#[test]
fn a_removal_deletes_the_object_that_hosts_share_and_a_surplus_copy_does_not() {
    let dir = TempDir::new().unwrap();
    let (writer, stranger) = (open(&dir), host_on(open(&dir)));
    assert!(put_all(&writer, (1..4).map(|n| block(n, 300)).collect()).iter().all(Result::is_ok));
    let host = host_on(open(&dir));
    assert!((1..4).all(|n| reads(&host, n)));
    // A copy too many in the pool is no reason to delete what all hosts rely on.
    host.trim(&[key(1)], 0).unwrap();
    assert_eq!(host.dram().exists(&[key(1)]).unwrap(), [false]);
    assert!(file_of(&dir, 1).exists() && reads(&host, 1));
    // When a peer removes a block, a host deletes what it knows of: it may have stored it after the peer looked.
    stranger.remove_here(&[key(2)], 0).unwrap();
    assert!(file_of(&dir, 2).exists());
    host.remove_here(&[key(2)], 0).unwrap();
    assert!(!file_of(&dir, 2).exists());
    // The one that removes asks for what it does not know of.
    stranger.remove(&[key(1)], 0).unwrap();
    assert!(!file_of(&dir, 1).exists() && file_of(&dir, 3).exists());
}

#[test]
fn what_other_hosts_store_is_found_by_one_that_has_no_room_to_remember_it() {
    let dir = TempDir::new().unwrap();
    let full = RemoteStore::open(&RemoteConfig { blocks_max: 1, ..config(&dir) }).unwrap();
    assert_eq!(put(&full, 1, 300), Ok(Stored::Stored));
    let host = host_on(full);
    let other = open(&dir);
    assert!(put_all(&other, (2..4).map(|n| block(n, 300)).collect()).iter().all(Result::is_ok));
    assert!(reads(&host, 2));
    assert!(host.read(&[key(3)], 0, 0, u64::MAX)[0].bytes().is_some());
}

/// A lookup under way must not bring back what a removal made this host forget.
#[test]
fn what_is_forgotten_meanwhile_is_not_learned() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir);
    let (remote, runtime) = (&store.remote, store.runtime.as_ref().unwrap());
    let seen = || remote.stripe(key(1)).changes.load(Ordering::Acquire);
    let learn = |seen, correct: &dyn Fn(&Index) -> bool| {
        runtime.block_on(remote.settle(key(1), seen, correct));
        store.exists(&[key(1)])[0]
    };
    let before = seen();
    store.forget(&[key(1)]);
    assert!(!learn(before, &|index| index.learn(key(1), 300)));
    // Between the look at the changes and what follows from it.
    let and_forget = |index: &Index| {
        store.forget(&[key(1)]);
        index.learn(key(1), 300)
    };
    assert!(!learn(seen(), &and_forget));
    assert!(learn(seen(), &|index| index.learn(key(1), 300)));
}

#[test]
fn what_other_hosts_store_later_is_found() {
    let dir = TempDir::new().unwrap();
    let (host, deaf) = (host_on(open(&dir)), RemoteConfig { shared: false, ..config(&dir) });
    let deaf = host_on(RemoteStore::open(&deaf).unwrap());
    let other = open(&dir);
    assert_eq!(put(&other, 1, 300), Ok(Stored::Stored));
    assert!(reads(&host, 1) && !reads(&deaf, 1));
    // Also for those who read from afar.
    assert_eq!(put(&other, 2, 300), Ok(Stored::Stored));
    assert!(host.read(&[key(2)], 0, 0, u64::MAX)[0].bytes().is_some());
    // A peer asks there by itself.
    assert_eq!(put(&other, 3, 300), Ok(Stored::Stored));
    assert_eq!(host.get_here(host.dram().new_owner(), &[key(3)], 0).unwrap(), [Lookup::Miss]);
}

#[test]
fn what_was_not_there_is_not_asked_for_again_at_once() {
    let dir = TempDir::new().unwrap();
    let (store, other) = (open(&dir), open(&dir));
    assert_eq!(store.look_up(vec![key(1)]).wait(), [None]);
    assert_eq!(put(&other, 1, 300), Ok(Stored::Stored));
    assert_eq!(store.look_up(vec![key(1)]).wait(), [None], "so it was a moment ago");
    assert_eq!(store.look_up(vec![key(1), key(2)]).wait(), [None, None]);
    assert_eq!(put(&other, 3, 300), Ok(Stored::Stored));
    assert_eq!(store.look_up(vec![key(3)]).wait(), [Some(300)]);
    assert_eq!(store.sizes(&[key(3)]), [Some(300)], "known from here on");
}
