//! How soon a decode instance can begin: the time to the first layer of a hand-over, and to the whole of it.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvasir_dataplane::block::{BlockKey, BlockMeta, checksum};
use kvasir_dataplane::clock::Clock;
use kvasir_dataplane::cluster::handover::{HandingOver, Waited};
use kvasir_dataplane::cluster::{Cluster, ClusterConfig, LinkState, PeerConfig};
use kvasir_dataplane::config::DramConfig;
use kvasir_dataplane::tier::dram::DramStore;
use kvasir_dataplane::tier::tiering::{AdmitAll, Tiering, TieringConfig};
use kvasir_dataplane::transport::node::Secret;

/// 64 MiB of a model with 32 layers: 64 KiB of each layer in each block.
const LAYERS: u32 = 32;
const BLOCKS: u32 = 32;
const BLOCK: u32 = 2 << 20;
/// Other work on the machine must not end a measurement.
const PATIENCE: Duration = Duration::from_secs(60);

struct Host {
    store: Arc<DramStore>,
    cluster: Arc<Cluster>,
    clock: Clock,
    /// Kept alive, because the cluster has only a weak reference.
    _tiering: Arc<Tiering>,
}

/// Seconds from the beginning of a hand-over between two hosts in this process, over loopback, with all layers filled in
/// at once: until the first layer can be read, and until all blocks are compared and kept. One pair per round.
pub(super) fn first_layer(rounds: usize) -> io::Result<Vec<(f64, f64)>> {
    let to = Host::start("to", &peer("from", "127.0.0.1:1"))?;
    let from = Host::start("from", &peer("to", &to.cluster.addr().to_string()))?;
    let up = || from.cluster.peers().iter().all(|peer| peer.state == LinkState::Up);
    let until = Instant::now() + PATIENCE;
    while !up() {
        if Instant::now() > until {
            return Err(io::Error::other("the two hosts of the measurement did not find each other"));
        }
        thread::sleep(Duration::from_millis(1));
    }
    let bytes: Vec<u8> = (0..BLOCK).map(|n| (n ^ (n >> 9)) as u8).collect();
    // The first round connects.
    (0..=rounds as u64).map(|round| one(&from, &to, round, &bytes)).skip(1).collect()
}

fn one(from: &Host, to: &Host, round: u64, bytes: &[u8]) -> io::Result<(f64, f64)> {
    let key = |n: u32| BlockKey(u128::from(round) << 64 | u128::from(n));
    let metas: Vec<BlockMeta> = (0..BLOCKS).map(|n| BlockMeta::single(key(n), BLOCK)).collect();
    let sums = vec![checksum(bytes); metas.len()];
    let handing = from.cluster.hand_over(from.store.new_owner(), round, "to", &metas, LAYERS);
    let mut handing = handing.map_err(io::Error::other)?;
    for place in handing.places() {
        from.store.pool().mapping().write(place.offset, bytes);
    }
    let start = Instant::now();
    let arrival = to.cluster.arrival(0, round, start + PATIENCE).map_err(io::Error::other)?;
    let arrival = arrival.ok_or_else(|| io::Error::other("the hand-over did not begin"))?;
    let times = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let first = arrival.wait(Some(0), start + PATIENCE) == Waited::Here;
            let first_at = start.elapsed();
            (first && arrival.wait(None, start + PATIENCE) == Waited::Here)
                .then(|| (first_at.as_secs_f64(), start.elapsed().as_secs_f64()))
        });
        send(&mut handing, &sums)?;
        reader.join().ok().flatten().ok_or_else(|| io::Error::other("the hand-over did not arrive"))
    });
    drop((handing, arrival));
    let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
    for host in [from, to] {
        host.store.remove(&keys, host.clock.now_ms()).map_err(io::Error::other)?;
    }
    times
}

fn send(handing: &mut HandingOver, sums: &[u64]) -> io::Result<()> {
    (0..LAYERS).try_for_each(|layer| handing.layer_done(layer)).map_err(io::Error::other)?;
    handing.finish(sums).map_err(io::Error::other)
}

fn peer(name: &str, address: &str) -> PeerConfig {
    PeerConfig { name: name.to_owned(), address: address.to_owned(), rack: String::new() }
}

impl Host {
    fn start(name: &str, peer: &PeerConfig) -> io::Result<Self> {
        let mut config = ClusterConfig::new(name, Secret::new(b"the secret of a measurement"));
        (config.peers, config.silence) = (vec![peer.clone()], PATIENCE);
        // A peer may reserve a quarter of the pool.
        let dram = DramConfig { pool_bytes: 320 << 20, prefault: true, ..DramConfig::default() };
        let clock = Clock::start();
        let store = Arc::new(DramStore::open(dram).map_err(io::Error::other)?);
        let cluster = Cluster::open(config, Arc::clone(&store), clock, Box::new(drop));
        let cluster = cluster.map_err(io::Error::other)?;
        let below = vec![cluster.tier()];
        let tiering =
            Tiering::start(Arc::clone(&store), below, Box::new(AdmitAll), TieringConfig::default(), clock);
        let tiering = Arc::new(tiering.map_err(io::Error::other)?);
        cluster.run(&tiering).map_err(io::Error::other)?;
        Ok(Self { store, cluster, clock, _tiering: tiering })
    }
}
