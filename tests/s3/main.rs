//! The remote tier against a real S3-compatible server on loopback, started and stopped by the tests.

mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_remote::{Place, RemoteConfig, RemoteStore, S3};
use kvasir_store::conformance::{self, block, holds, key, put, put_all, remove};
use kvasir_store::store::{BlockStore, Stored, TierError};

use self::server::{ACCESS_KEY, BUCKET, SECRET_KEY, Server};

fn config(server: &Server, prefix: &str) -> RemoteConfig {
    let place = Place::S3(S3 {
        bucket: BUCKET.into(),
        prefix: prefix.into(),
        endpoint: Some(format!("http://{}", server.address())),
        region: "us-east-1".into(),
        credentials: Some((ACCESS_KEY.into(), SECRET_KEY.into())),
    });
    RemoteConfig { capacity_bytes: Some(32 << 20), ..RemoteConfig::new(place) }
}

#[test]
fn conforms() {
    let server = Server::start();
    let places = AtomicU64::new(0);
    conformance::check_durable(
        || format!("some/place/{}", places.fetch_add(1, Ordering::Relaxed)),
        |prefix| Arc::new(RemoteStore::open(&config(&server, prefix)).unwrap()),
    );
}

#[test]
fn an_outage_is_an_error_and_then_over() {
    let mut server = Server::start();
    let quick = |config| RemoteConfig { attempts_max: 3, backoff: Duration::from_millis(1), ..config };
    let store = RemoteStore::open(&quick(config(&server, "outage"))).unwrap();
    assert_eq!(put(&store, 1, 5000), Ok(Stored::Stored));
    server.stop();
    let error = put(&store, 2, 5000).unwrap_err();
    assert!(error.retryable() && error.to_string().contains("gave up after 3 attempts"), "{error}");
    assert!(error.to_string().contains(&key(2).to_string()), "{error}");
    assert!(matches!(remove(&store, 1), Err(TierError::Io { step: "remove", retryable: true, .. })));
    assert_eq!(store.exists(&[key(1), key(2)]), [true, false], "an outage changes nothing");
    assert_eq!((store.retries(), store.stats().io_errors, store.stats().blocks), (4, 2, 1));
    server.restart();
    assert!(holds(&store, 1, 5000) && put(&store, 2, 5000) == Ok(Stored::Stored));
    assert!(holds(&store, 2, 5000));
}

#[test]
fn a_request_outlives_a_short_outage() {
    let mut server = Server::start();
    let (backoff, backoff_max) = (Duration::from_millis(1), Duration::from_millis(20));
    let patient = RemoteConfig { attempts_max: 100_000, backoff, backoff_max, ..config(&server, "patient") };
    let store = RemoteStore::open(&patient).unwrap();
    server.stop();
    let pending = store.put((0..20).map(|n| block(n, 3000)).collect());
    let start = Instant::now();
    while store.retries() < 40 {
        assert!(start.elapsed() < Duration::from_secs(120), "nothing is tried again");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.restart();
    assert!(pending.wait().iter().all(|done| done.outcome == Ok(Stored::Stored)));
    assert!((0..20).all(|n| holds(&store, n, 3000)));
}

#[test]
fn a_server_that_dies_under_load_costs_no_wrong_byte() {
    let mut server = Server::start();
    let quick =
        RemoteConfig { attempts_max: 2, backoff: Duration::from_millis(1), ..config(&server, "load") };
    let store = RemoteStore::open(&quick).unwrap();
    let mut stored = Vec::new();
    for round in 0..6 {
        let numbers: Vec<u64> = (round * 100..round * 100 + 100).collect();
        let pending = store.put(numbers.iter().map(|&n| block(n, 20_000)).collect());
        // Wherever the puts are at this moment.
        server.stop();
        let done = pending.wait();
        server.restart();
        for (n, done) in numbers.into_iter().zip(done) {
            match done.outcome {
                Ok(outcome) => {
                    assert_eq!(outcome, Stored::Stored);
                    stored.push(n);
                }
                Err(error) => assert!(error.retryable() && store.exists(&[key(n)]) == [false], "{error}"),
            }
        }
        // A put that failed may have arrived: `holds` accepts only a missing block or a whole one.
        for n in round * 100..round * 100 + 100 {
            let _ = holds(&store, n, 20_000);
        }
    }
    assert!(stored.iter().all(|&n| holds(&store, n, 20_000)));
    drop(store);
    let again = RemoteStore::open(&config(&server, "load")).unwrap();
    assert!(stored.iter().all(|&n| holds(&again, n, 20_000)), "what was acknowledged is there");
    assert_eq!(again.stats().corrupt, 0);
}

#[test]
fn refusals_say_why() {
    let server = Server::start();
    let fails = |change: fn(&mut S3), expected: &str| {
        let mut config = RemoteConfig { attempts_max: 1, ..config(&server, "") };
        if let Place::S3(s3) = &mut config.place {
            change(s3);
        }
        let error = RemoteStore::open(&config).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    };
    fails(|s3| s3.bucket = "elsewhere".into(), "cannot list the remote tier at s3://elsewhere/");
    fails(|s3| s3.credentials = Some((ACCESS_KEY.into(), "wrong".into())), "SignatureDoesNotMatch");
    let store = RemoteStore::open(&config(&server, "")).unwrap();
    assert!(put_all(&store, vec![block(1, 10)]).remove(0).is_ok(), "no prefix is fine");
}
