//! The corner cases one by one, and threads; [`model`] has the random sequences.

mod model;

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;

use super::*;
use crate::transport::node::Secret;
use crate::transport::{Node, loopback};

/// A connection of the test's network. `hung_up`: the other side has closed it.
#[derive(Debug)]
struct Link {
    id: usize,
    peer: u8,
    hung_up: AtomicBool,
    closed: AtomicBool,
}

/// A network whose peers are reachable or not. Keeps every connection it ever made.
#[derive(Default)]
struct Net {
    unreachable: Mutex<BTreeSet<u8>>,
    links: Mutex<Vec<Arc<Link>>>,
    /// Peers that were tried, in order.
    tried: Mutex<Vec<u8>>,
    open: AtomicUsize,
    most_open: AtomicUsize,
    /// If set, connecting waits here for the holder of the other end.
    gate: Mutex<Option<Arc<Barrier>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nobody answers")]
struct NoAnswer;

impl Connector for Arc<Net> {
    type Peer = u8;
    type Endpoint = Arc<Link>;
    type Error = NoAnswer;

    fn connect(&self, peer: &u8) -> Result<Arc<Link>, NoAnswer> {
        self.tried.lock().push(*peer);
        let gate = self.gate.lock().clone();
        if let Some(gate) = gate {
            gate.wait();
        }
        if self.unreachable.lock().contains(peer) {
            return Err(NoAnswer);
        }
        self.most_open.fetch_max(self.open.fetch_add(1, SeqCst) + 1, SeqCst);
        let mut links = self.links.lock();
        let (hung_up, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        let id = links.len();
        links.push(Arc::new(Link { id, peer: *peer, hung_up, closed }));
        Ok(links.last().unwrap().clone())
    }

    fn is_broken(&self, link: &Arc<Link>) -> bool {
        link.hung_up.load(SeqCst)
    }

    fn close(&self, link: &Arc<Link>) {
        assert!(!link.closed.swap(true, SeqCst), "{link:?} closed twice");
        self.open.fetch_sub(1, SeqCst);
    }
}

fn pool(endpoints_max: usize) -> (Arc<Net>, Arc<EndpointPool<Arc<Net>>>) {
    let net = Arc::new(Net::default());
    let config = PoolConfig { endpoints_max, quarantine_max: 8, ..PoolConfig::default() };
    (net.clone(), EndpointPool::new(net, config))
}

fn quarantined(peer: u8, failures: u32, retry_in_ms: u64) -> Error<NoAnswer> {
    Error::Quarantined { peer: peer.to_string(), failures, retry_in_ms }
}

#[test]
fn an_endpoint_is_made_once_and_reused() {
    let (net, pool) = pool(2);
    let (first, again) = (pool.get(&1, || 0).unwrap(), pool.get(&1, || 0).unwrap());
    assert_eq!(first.id, again.id);
    drop((first, again));
    assert_eq!(pool.get(&1, || 0).unwrap().id, 0);
    assert_eq!((net.links.lock().len(), pool.open()), (1, 1));
    drop(pool);
    assert_eq!(net.open.load(SeqCst), 0, "the pool closes what it made");
}

#[test]
fn what_is_in_use_is_not_evicted() {
    let (net, pool) = pool(2);
    let (first, second) = (pool.get(&1, || 0).unwrap(), pool.get(&2, || 0).unwrap());
    let full = Error::Full { peer: "3".into(), endpoints_max: 2 };
    assert_eq!(pool.get(&3, || 0).err(), Some(full));
    drop(first);
    assert_eq!(pool.get(&3, || 0).unwrap().peer, 3);
    assert!(net.links.lock()[0].closed.load(SeqCst));
    assert!(!second.closed.load(SeqCst));
    assert_eq!((pool.open(), pool.stats().evicted, pool.stats().refused_full), (2, 1, 1));
}

#[test]
fn a_broken_peer_is_refused_for_longer_each_time() {
    let (net, pool) = pool(2);
    let broken = pool.get(&1, || 0).unwrap();
    let other = pool.get(&1, || 0).unwrap();
    broken.broke(1000);
    assert!(other.closed.load(SeqCst), "closed at once, so that the other side drops it too");
    assert_eq!(pool.open(), 1, "but somebody still holds it");
    other.broke(1000); // says nothing new
    assert_eq!((pool.open(), pool.stats().broken), (0, 1));

    assert_eq!(pool.get(&1, || 1049).err(), Some(quarantined(1, 1, 1)));
    net.unreachable.lock().insert(1);
    let failed = Error::Connect { peer: "1".into(), source: NoAnswer };
    for (now, failures, wait) in [(1050, 2, 100), (1150, 3, 200), (1350, 4, 400)] {
        assert_eq!(pool.get(&1, || now).err(), Some(failed.clone()));
        assert_eq!(pool.get(&1, || now).err(), Some(quarantined(1, failures, wait)));
    }
    for i in 0..40u64 {
        let now = 100_000 * (i + 1);
        assert_eq!(pool.get(&1, || now).err(), Some(failed.clone()));
    }
    assert_eq!(pool.get(&1, || 4_000_000).err(), Some(quarantined(1, 44, 10_000)), "never above the maximum");

    net.unreachable.lock().clear();
    pool.get(&1, || 5_000_000).unwrap().broke(5_000_000);
    assert_eq!(pool.get(&1, || 5_000_000).err(), Some(quarantined(1, 45, 10_000)), "no transfer has worked");
    pool.get(&1, || 6_000_000).unwrap().worked();
    pool.get(&1, || 6_000_000).unwrap().broke(6_000_000);
    assert_eq!(pool.get(&1, || 6_000_000).err(), Some(quarantined(1, 1, 50)), "counted anew");
}

#[test]
fn an_endpoint_that_the_peer_dropped_is_made_anew() {
    let (net, pool) = pool(1);
    let held = pool.get(&1, || 0).unwrap();
    held.hung_up.store(true, SeqCst);
    let full = Error::Full { peer: "1".into(), endpoints_max: 1 };
    assert_eq!(pool.get(&1, || 0).err(), Some(full), "the old one still counts");
    assert!(held.closed.load(SeqCst));
    drop(held);
    assert_eq!(pool.get(&1, || 0).unwrap().id, 1);

    net.links.lock()[1].hung_up.store(true, SeqCst);
    pool.tend(|| 0, 8);
    assert_eq!((pool.open(), pool.stats().dropped_by_peer), (0, 2), "idle ones are noticed too");
}

#[test]
fn probes_go_to_peers_that_are_wanted() {
    let (net, pool) = pool(4);
    net.unreachable.lock().extend([1, 2]);
    assert!(pool.get(&1, || 0).is_err() && pool.get(&2, || 0).is_err());
    assert_eq!(pool.get(&1, || 10).err(), Some(quarantined(1, 1, 40)));
    pool.tend(|| 49, 8);
    assert_eq!(*net.tried.lock(), [1, 2], "not before its time");
    net.unreachable.lock().clear();
    pool.tend(|| 50, 8);
    assert_eq!(*net.tried.lock(), [1, 2, 1], "nobody wants 2");
    assert_eq!(pool.get(&1, || 50).unwrap().id, 0);
    pool.tend(|| 10_050, 8); // forgets 2
    net.unreachable.lock().insert(2);
    assert!(pool.get(&2, || 10_050).is_err());
    assert_eq!(pool.get(&2, || 10_050).err(), Some(quarantined(2, 1, 50)), "a first failure again");
}

#[test]
fn quarantine_is_bounded() {
    let (net, pool) = pool(4);
    net.unreachable.lock().extend(0..=255);
    for peer in 0..=255u8 {
        assert!(pool.get(&peer, || peer.into()).is_err());
    }
    // Eight are remembered: the ones whose quarantine ends last.
    assert_eq!(pool.get(&248, || 256).err(), Some(quarantined(248, 1, 42)));
    assert!(matches!(pool.get(&247, || 256), Err(Error::Connect { .. })));
}

/// Waits until `condition` holds; another thread is about to make it so.
fn until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::yield_now();
    }
}

#[test]
fn two_threads_that_ask_for_one_peer_connect_once() {
    for reachable in [true, false] {
        let (net, pool) = pool(4);
        let gate = Arc::new(Barrier::new(2));
        *net.gate.lock() = Some(gate.clone());
        if !reachable {
            net.unreachable.lock().insert(7);
        }
        thread::scope(|scope| {
            let ask = || scope.spawn(|| pool.get(&7, || 0).map(|held| held.id));
            let threads = [ask(), ask(), ask()];
            until(|| pool.stats().waits >= 2); // one connects, the others wait for it
            gate.wait();
            let answers = threads.map(|thread| thread.join().unwrap());
            if reachable {
                assert_eq!(answers, [Ok(0), Ok(0), Ok(0)]);
            } else {
                let refused = answers.iter().filter(|answer| **answer == Err(quarantined(7, 1, 50)));
                assert_eq!(refused.count(), 2, "{answers:?}");
            }
        });
        assert_eq!(*net.tried.lock(), [7]);
    }
}

#[test]
fn nobody_waits_for_a_probe() {
    let (net, pool) = pool(4);
    pool.get(&7, || 0).unwrap().broke(0);
    let gate = Arc::new(Barrier::new(2));
    *net.gate.lock() = Some(gate.clone());
    thread::scope(|scope| {
        let probe = scope.spawn(|| pool.get(&7, || 50).map(|held| held.id));
        until(|| net.tried.lock().len() == 2);
        assert_eq!(pool.get(&7, || 50).err(), Some(quarantined(7, 1, 0)));
        gate.wait();
        assert_eq!(probe.join().unwrap(), Ok(1));
    });
    assert_eq!(pool.get(&7, || 50).unwrap().id, 1);
}

/// A connector that panics must not leave others waiting for ever.
#[test]
fn a_panic_while_connecting_counts_as_a_failure() {
    struct Panics;
    impl Connector for Panics {
        type Peer = u8;
        type Endpoint = ();
        type Error = NoAnswer;
        fn connect(&self, _: &u8) -> Result<(), NoAnswer> {
            panic!("a bug in a transport")
        }
        fn is_broken(&self, (): &()) -> bool {
            false
        }
        fn close(&self, (): &()) {}
    }
    let pool = EndpointPool::new(Panics, PoolConfig::default());
    let asked = pool.clone();
    assert!(thread::spawn(move || asked.get(&1, || 0).is_ok()).join().is_err());
    assert_eq!(pool.get(&1, || 0).err(), Some(quarantined(1, 1, 50)));
    assert_eq!(pool.open(), 0);
}

#[test]
fn many_threads_stay_within_the_cap() {
    let (net, pool) = pool(5);
    let now = AtomicU64::new(0);
    thread::scope(|scope| {
        for seed in 0..4u64 {
            let (pool, now) = (&pool, &now);
            scope.spawn(move || {
                let mut random = seed;
                for _ in 0..3000 {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let clock = || now.fetch_add(1, SeqCst);
                    let Ok(held) = pool.get(&((random >> 33) as u8 % 12), clock) else { continue };
                    assert!(held.peer < 12);
                    match (random >> 48) % 16 {
                        0 => held.broke(clock()),
                        1 => held.hung_up.store(true, SeqCst),
                        2..9 => held.worked(),
                        _ => {}
                    }
                }
            });
        }
    });
    assert_eq!(pool.open(), net.open.load(SeqCst), "all that was dropped is closed");
    assert!(net.most_open.load(SeqCst) <= 5, "{} open at once", net.most_open.load(SeqCst));
    let stats = pool.stats();
    assert!(stats.evicted > 0 && stats.broken > 0 && stats.dropped_by_peer > 0, "{stats:?}");
}

/// Ten thousand endpoints of a real transport through a cap of 64.
#[test]
fn a_transport_is_a_connector() {
    let net = Arc::new(loopback::LoopbackNet::default());
    let join =
        |name: &str| loopback::Loopback::new(net.clone(), Arc::new(Node::new(name, Secret::new(b"pool"), 1)));
    let us: Arc<dyn Transport> = Arc::new(join("us"));
    let peers: Vec<_> = (0..100).map(|i| (format!("peer{i}"), join(&format!("peer{i}")))).collect();
    let pool = EndpointPool::new(us, PoolConfig { endpoints_max: 64, ..PoolConfig::default() });
    for (name, _) in peers.iter().cycle().take(10_000) {
        let endpoint = pool.get(name, || 0).unwrap();
        assert_eq!(endpoint.peer(), name);
        endpoint.worked();
        assert!(pool.open() <= 64);
    }
    // An endpoint that is gone is found broken before it is used, cannot be connected again, and is left alone.
    let (name, last) = &peers[99];
    drop(pool.get(name, || 0).unwrap());
    last.shut_down();
    assert!(matches!(pool.get(name, || 0), Err(Error::Connect { .. })));
    assert!(matches!(pool.get(name, || 0), Err(Error::Quarantined { failures: 1, .. })));
    assert_eq!(pool.stats().dropped_by_peer, 1);
}
