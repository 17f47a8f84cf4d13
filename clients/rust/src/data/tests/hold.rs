//! What a client keeps: leases until it gives them back, and blocks that must not be evicted.

use kvasir_store::config::TenantConfig;
use kvasir_store::dram::Evict;

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

/// The pool is 32 pages, of which tenant 3 may keep two.
fn host() -> Host {
    let tenant = TenantConfig { tenant: 3, pin_quota_bytes: Some(8192), ..TenantConfig::default() };
    let dram = DramConfig {
        pool_bytes: 32 * 4096,
        put_wait: Duration::ZERO,
        tenants: vec![tenant],
        pin_share: 0.5,
        ..DramConfig::default()
    };
    Host::start(dram, ServerConfig::default())
}

fn of_tenant_3(endpoint: &Endpoint) -> Client {
    Client::connect(endpoint, Options { tenant: 3, ..options() }).unwrap()
}

fn kept_bytes(host: &Host) -> u64 {
    host.store.metrics().tenants.iter().map(|tenant| tenant.pinned_bytes).sum()
}

/// What an eviction policy that wants to be rid of everything does.
fn press(host: &Host) {
    host.store.drain_events(&mut Vec::new());
    let slots: Vec<u32> = host.store.list(0, 1000).0.iter().map(|block| block.slot).collect();
    assert!(host.store.evict(&slots, 0).iter().all(|evicted| *evicted != Evict::InUse));
}

#[test]
fn what_is_released_goes_back_at_once() {
    let host = Host::small();
    for client in host.both() {
        put(&client, 1, 4096).unwrap();
        let mut blocks = client.get(&[key(1), key(2), key(1)], 0).unwrap();
        assert_eq!(host.store.metrics().leases, if client.is_local() { 2 } else { 0 });
        drop(blocks.pop());
        client.release(blocks.into_iter().flatten()).unwrap();
        assert_eq!(host.store.metrics().leases, 0, "the dropped one as well");
        client.release([]).unwrap();
        let again = client.get(&[key(1)], 0).unwrap();
        assert_eq!(again[0].as_ref().unwrap().bytes().unwrap(), bytes_of(1, 4096));
        // The next client counts leases as well, and the host may be slow to notice that this one has gone.
        client.release(again.into_iter().flatten()).unwrap();
        client.remove(&[key(1)]).unwrap();
    }
}

#[test]
fn a_held_block_survives_pressure_until_it_is_released() {
    let host = host();
    for endpoint in [host.unix(), host.tcp()] {
        let client = Client::connect(&endpoint, options()).unwrap();
        for n in 0..4 {
            put(&client, n, 4096).unwrap();
        }
        let held = client.hold(&[key(1), key(9), key(2)], HOUR).unwrap();
        assert!(matches!(held[..], [Ok(true), Ok(false), Ok(true)]), "{held:?}");
        // A second request needs one of them too.
        assert!(client.hold(&[key(1)], HOUR).unwrap()[0].is_ok());
        assert_eq!(kept_bytes(&host), 2 * 4096);
        press(&host);
        let there = |client: &Client| client.exists(&[0, 1, 2, 3].map(key)).unwrap();
        assert_eq!(there(&client), [false, true, true, false]);
        assert_eq!(client.end_hold(&[key(1), key(2), key(9)]).unwrap(), [true, true, false]);
        press(&host);
        assert_eq!(there(&client), [false, true, false, false], "held twice, released once");
        assert_eq!(client.end_hold(&[key(1), key(2)]).unwrap(), [true, false]);
        assert_eq!(client.end_hold(&[key(1)]).unwrap(), [false]);
        press(&host);
        assert_eq!((there(&client), kept_bytes(&host)), (vec![false; 4], 0));
    }
}

#[test]
fn a_hold_ends_with_its_connection() {
    let host = host();
    let [unix, tcp] = host.both();
    put(&unix, 1, 4096).unwrap();
    for client in [&unix, &tcp] {
        assert!(matches!(client.hold(&[key(1)], HOUR).unwrap()[0], Ok(true)));
    }
    assert_eq!(tcp.unpin(&[key(1)]).unwrap(), [false], "it is no pin of the tenant");
    let two = host.server().metrics().connections;
    drop(unix);
    host.until(|host| host.server().metrics().connections < two);
    press(&host);
    assert_eq!((tcp.exists(&[key(1)]).unwrap(), kept_bytes(&host)), (vec![true], 4096));
    drop(tcp);
    host.until(|host| kept_bytes(host) == 0);
    press(&host);
    assert_eq!(host.store.exists(&[key(1)]).unwrap(), [false]);
}

#[test]
fn a_hold_ends_by_its_time() {
    let host = host();
    let [client, _] = host.both();
    put(&client, 1, 4096).unwrap();
    client.hold(&[key(1)], Duration::from_millis(1)).unwrap();
    host.until(|host| kept_bytes(host) == 0);
    assert_eq!(client.end_hold(&[key(1)]).unwrap(), [false]);
    press(&host);
    assert_eq!(client.exists(&[key(1)]).unwrap(), [false]);
}

#[test]
fn what_is_beyond_the_quota_is_refused_block_by_block() {
    let host = host();
    for endpoint in [host.unix(), host.tcp()] {
        let (own, other) = (of_tenant_3(&endpoint), of_tenant_3(&endpoint));
        for n in 0..3 {
            put(&own, n, 4096).unwrap();
        }
        let held = own.hold(&[0, 1, 2].map(key), HOUR).unwrap();
        assert!(matches!(held[..2], [Ok(true), Ok(true)]), "{held:?}");
        let over = held[2].as_ref().unwrap_err();
        assert!(
            over.retryable() && over.to_string().contains("pinned as much as it may, holds included"),
            "{over}"
        );
        // Another connection of the tenant keeps the same blocks, which costs nothing, and no others.
        assert!(matches!(other.hold(&[0, 2].map(key), HOUR).unwrap()[..], [Ok(true), Err(_)]));
        assert_eq!(kept_bytes(&host), 8192);
        // Whoever paid for it: it is kept, and paid for, until the last one ends.
        assert_eq!(own.end_hold(&[0, 1].map(key)).unwrap(), [true, true]);
        assert_eq!(kept_bytes(&host), 4096);
        assert!(matches!(own.pin(&[key(2)], Pin::Hard { duration_ms: 60_000 }).unwrap()[0], Ok(true)));
        assert!(own.hold(&[key(1)], HOUR).unwrap()[0].is_err(), "pins take from the same quota");
        own.remove(&[0, 1, 2].map(key)).unwrap();
        assert_eq!(kept_bytes(&host), 0);
    }
}
