//! Needs RDMA devices: `cargo xtask test --rdma`. Whole hosts that keep copies for each other, over whatever devices there are.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvasir_cluster::{Cluster, ClusterConfig, Kind, PeerConfig, RailState};
use kvasir_net::transport::node::Secret;
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::clock::Clock;
use kvasir_store::config::DramConfig;
use kvasir_store::dram::{DramStore, Lookup};
use kvasir_store::tiering::{AdmitAll, Tiering, TieringConfig};

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 32;
/// More than arrives in one piece.
const LARGE: u32 = 20 << 20;

struct Host {
    store: Arc<DramStore>,
    cluster: Arc<Cluster>,
    tiering: Arc<Tiering>,
    clock: Clock,
}

fn start(n: usize, ports: &[SocketAddr; 2]) -> Host {
    let name = |n: usize| format!("host-{n}");
    let other = PeerConfig { name: name(1 - n), address: ports[1 - n].to_string(), rack: String::new() };
    let config = ClusterConfig {
        listen: ports[n],
        peers: vec![other],
        transports: Some(vec![Kind::Rdma, Kind::Tcp]),
        ..ClusterConfig::new(&name(n), Secret::new(b"the secret of this cluster"))
    };
    let clock = Clock::start();
    let dram = DramConfig { pool_bytes: 96 << 20, blocks_max: 1024, ..DramConfig::default() };
    let store = Arc::new(DramStore::open(dram).unwrap());
    let cluster = Cluster::open(config, Arc::clone(&store), clock, Box::new(|_| {})).unwrap();
    let below = vec![cluster.tier()];
    let traffic = TieringConfig::default();
    let tiering = Tiering::start(Arc::clone(&store), below, Box::new(AdmitAll), traffic, clock).unwrap();
    let tiering = Arc::new(tiering);
    cluster.run(&tiering).unwrap();
    Host { store, cluster, tiering, clock }
}

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("rdma", &n.to_le_bytes())
}

fn content(n: u32) -> Vec<u8> {
    content_of(n, BLOCK)
}

fn content_of(n: u32, size: u32) -> Vec<u8> {
    (0..size).map(|i| (i.wrapping_mul(31) ^ (i >> 13) ^ n) as u8).collect()
}

/// What the host finds, wherever it is.
fn read(host: &Host, n: u32) -> Vec<u8> {
    let found = host.tiering.get(host.store.new_owner(), &[key(n)], 0, host.clock.now_ms()).unwrap()[0];
    let Lookup::Hit(lease) = found else { panic!("block {n}: {found:?}") };
    host.store.pool().mapping().bytes(lease.offset, lease.size.into()).unwrap().to_vec()
}

fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..6000 {
        if condition() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("two minutes passed without: {what}");
}

/// Two ports that are free, below those that the system gives to a caller that asks for any.
fn ports() -> [SocketAddr; 2] {
    let first = 6_000 + (std::process::id() % 500) as u16 * 4;
    let free = (first..).map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let free: Vec<_> = free.filter(|addr| TcpListener::bind(addr).is_ok()).take(2).collect();
    [free[0], free[1]]
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn hosts_read_each_others_pools_by_their_devices() {
    let ports = ports();
    let hosts = [start(0, &ports), start(1, &ports)];
    let resident = |host: &Host| (0..BLOCKS).all(|n| host.store.exists(&[key(n)]).unwrap()[0]);
    let owner = hosts[0].store.new_owner();
    for n in 0..BLOCKS {
        hosts[0].store.put(owner, &BlockMeta::single(key(n), BLOCK), &content(n), 0).unwrap();
    }
    let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
    hosts[0].cluster.replicate(&keys, 2);
    until("copies", || resident(&hosts[1]));
    let stats = || hosts[1].cluster.stats();
    until("counted", || stats().taken == u64::from(BLOCKS));
    assert_eq!(stats().corrupt, 0);
    let rails = hosts[1].cluster.peers().remove(0).rails;
    let bytes = |kind| rails.iter().filter(|rail| rail.kind == kind).map(|rail| rail.bytes).sum::<u64>();
    assert_eq!((bytes(Kind::Rdma), bytes(Kind::Tcp)), (u64::from(BLOCK * BLOCKS), 0), "{rails:?}");
    assert_eq!((rails[0].kind, rails[0].state), (Kind::Rdma, RailState::InUse));
    assert!(!rails[0].local_nic.is_empty() && !rails[0].remote_nic.is_empty());

    // What is read for the tiers goes by the device too: the copies are gone from the pool here, and come back.
    hosts[1].store.remove(&keys, hosts[1].clock.now_ms()).unwrap();
    for n in 0..BLOCKS {
        assert!(read(&hosts[1], n) == content(n), "block {n}");
    }
    assert!(stats().read_hits > 0, "{:?}", stats());
    let large = BLOCKS + 1;
    hosts[0].store.put(owner, &BlockMeta::single(key(large), LARGE), &content_of(large, LARGE), 0).unwrap();
    hosts[0].cluster.replicate(&[key(large)], 2);
    until("a copy of the large one", || hosts[1].store.exists(&[key(large)]).unwrap()[0]);
    until("which is counted", || stats().taken > u64::from(BLOCKS));
    hosts[1].store.remove(&[key(large)], hosts[1].clock.now_ms()).unwrap();
    assert!(read(&hosts[1], large) == content_of(large, LARGE), "the large one");
    let rails = hosts[1].cluster.peers().remove(0).rails;
    assert!(rails.iter().all(|rail| rail.kind == Kind::Rdma || rail.bytes == 0), "{rails:?}");

    // Places of a hand-over are written by the device too, and no longer once they were taken back.
    hosts[0].store.put(owner, &BlockMeta::single(key(BLOCKS), BLOCK), &content(BLOCKS), 0).unwrap();
    let pushed = hosts[0].cluster.push("host-1", &[key(BLOCKS)]).unwrap();
    assert_eq!(pushed, [kvasir_cluster::push::Pushed::Done]);
    let rails = hosts[0].cluster.peers().remove(0).rails;
    assert!(rails.iter().any(|rail| rail.kind == Kind::Rdma && rail.bytes >= BLOCK.into()), "{rails:?}");
}
