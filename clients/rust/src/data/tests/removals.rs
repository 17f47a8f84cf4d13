//! Whoever follows what leaves a host knows what it holds.

use std::collections::HashSet;

use kvasir_protocol::wire::HEADER_LEN;
use kvasir_store::departures::NOTES_MAX;

use super::*;

/// All that has left since, and where to go on.
fn follow(client: &Client, since: &mut u64) -> HashSet<BlockKey> {
    let mut gone = HashSet::new();
    loop {
        let Removals { next, lost, keys } = client.removals(*since).unwrap();
        assert!(!lost);
        gone.extend(keys);
        if std::mem::replace(since, next) == next {
            return gone;
        }
    }
}

fn of_tenant(endpoint: &Endpoint, tenant: u16) -> (Client, u64) {
    let client = Client::connect(endpoint, Options { tenant, ..options() }).unwrap();
    let start = client.removals(0).unwrap();
    assert!(start.lost && start.keys.is_empty(), "whoever has just come knows nothing");
    (client, start.next)
}

#[test]
fn what_is_evicted_removed_or_over_is_told_to_its_tenant_alone() {
    let host = Host::small();
    let ((one, mut at), (two, mut other)) = (of_tenant(&host.unix(), 1), of_tenant(&host.tcp(), 2));
    for n in 0..3 {
        assert_eq!(put(&one, n, 4096).unwrap(), Put::Stored);
        assert_eq!(put(&two, n, 4096).unwrap(), Put::Stored);
    }
    assert!(follow(&one, &mut at).is_empty());
    assert_eq!(one.remove(&[key(0), key(9)]).unwrap(), [true, false]);
    assert!(one.evict(&[key(1)]).unwrap()[0].as_ref().unwrap());
    assert_eq!(follow(&one, &mut at), HashSet::from([key(0), key(1)]));
    assert!(follow(&one, &mut at).is_empty(), "once");
    assert!(follow(&two, &mut other).is_empty());
    assert_eq!(two.exists(&[0, 1, 2].map(key)).unwrap(), [true; 3]);

    // One that is back is not gone.
    one.remove(&[key(2)]).unwrap();
    put(&one, 2, 4096).unwrap();
    let short = BlockMeta { ttl_ms: 1, ..BlockMeta::single(key(3), 10) };
    two.put(&short, &bytes_of(3, 10)).unwrap();
    host.until(|_| !two.exists(&[key(3)]).unwrap()[0]);
    assert_eq!(follow(&two, &mut other), HashSet::from([key(3)]));
    assert!(follow(&one, &mut at).is_empty());
}

#[test]
fn under_pressure_what_is_not_told_of_is_there() {
    let host = Host::small();
    let (client, mut at) = of_tenant(&host.unix(), 0);
    let mut known = HashSet::new();
    for n in 0..500 {
        if matches!(put(&client, n, 20_000), Ok(Put::Stored)) {
            known.insert(key(n));
        } else {
            // Nobody chooses victims here.
            client.evict(&[key(n / 3), key(n / 2)]).unwrap();
        }
    }
    let gone = follow(&client, &mut at);
    assert!(gone.len() > 50 && gone.is_subset(&known));
    let keys: Vec<BlockKey> = known.into_iter().collect();
    for (key, there) in keys.iter().zip(client.exists(&keys).unwrap()) {
        assert_eq!(there, !gone.contains(key), "{key}");
    }
}

#[test]
fn a_reader_that_is_too_far_behind_or_of_another_run_is_told_so() {
    let mut host = Host::small();
    let (client, mut at) = of_tenant(&host.unix(), 1);
    let departures = host.store.departures();
    (0..NOTES_MAX as u64).for_each(|n| departures.note(key(n).of_tenant(1)));
    assert_eq!(follow(&client, &mut at.clone()).len(), NOTES_MAX);
    departures.note(key(0).of_tenant(2));
    let Removals { next, lost, keys } = client.removals(at).unwrap();
    assert!(lost && keys.is_empty());
    at = next;
    departures.note(key(7).of_tenant(1));
    assert_eq!(follow(&client, &mut at), HashSet::from([key(7)]));

    let addr = host.stop();
    let host = host.again(addr);
    let client = Client::connect(&host.unix(), options()).unwrap();
    assert!(client.removals(at).unwrap().lost);
}

#[test]
fn sides_of_the_version_before_go_on_without() {
    let (_dir, endpoint, older) = super::connection::mute_host();
    let client = Client::connect(&endpoint, Options::default()).unwrap();
    let refused = client.removals(0).unwrap_err();
    assert!(!refused.retryable() && refused.to_string().contains("speaks data protocol 6"), "{refused}");
    drop((client, older.join().unwrap()));

    let host = Host::small();
    let mut stream = UnixStream::connect(host.dir.path().join("data.sock")).unwrap();
    let (mut frame, mut answer) = (Vec::new(), [0; HEADER_LEN]);
    for request in [
        Request::Hello {
            versions: kvasir_protocol::wire::Versions { lowest: 6, highest: 6 },
            wants_write: false,
            wants_ring: false,
            tenant: 0,
            namespace: String::new(),
            token: String::new(),
        },
        Request::Exists(vec![key(1)]),
    ] {
        request.encode(0, 0, &mut frame);
        assert_eq!(frame[4], 6);
        stream.write_all(&frame).unwrap();
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[4], 6);
        let header = kvasir_protocol::wire::Header::decode(&answer).unwrap();
        stream.read_exact(&mut vec![0; header.body_len as usize]).unwrap();
    }
}

#[test]
fn a_block_is_in_the_pool_or_nowhere_where_there_are_no_tiers() {
    let host = Host::small();
    for client in host.both() {
        let _ = put(&client, 1, 100);
        assert_eq!(client.tiers(&[key(1), key(2)]).unwrap(), [Source::Pool, Source::Absent]);
    }
}
