//! One host: pool, tiers and cluster, as the daemon puts them together.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;

use kvasir_cluster::{Cluster, ClusterConfig, Kind, PeerConfig};
use kvasir_net::transport::node::Secret;
use kvasir_os::thread;
use kvasir_os::time::Duration;
use kvasir_os::world;
use kvasir_protocol::clock::Clock;
use kvasir_store::config::DramConfig;
use kvasir_store::dram::DramStore;
use kvasir_store::tiering::{AdmitAll, Tiering, TieringConfig};

/// Ample: nothing is evicted, so whatever is missing was lost.
const POOL: u64 = 8 << 20;
/// How often leases that have ended are taken back, as the server does.
const SWEEP: Duration = Duration::from_millis(500);

pub(crate) struct Host {
    pub(crate) store: Arc<DramStore>,
    pub(crate) tiering: Arc<Tiering>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) clock: Clock,
}

impl Host {
    /// As its peers have it in their settings.
    pub(crate) fn name(n: usize) -> String {
        format!("host-{n}")
    }

    /// Starts number `n` of `count` hosts; its threads are that host's.
    pub(crate) fn start(n: usize, count: usize) -> anyhow::Result<Self> {
        world::on_host(n, || Self::start_here(n, count))
    }

    fn start_here(n: usize, count: usize) -> anyhow::Result<Self> {
        let address = |n: usize, port: u16| SocketAddr::from(([10, 0, 0, n as u8], port));
        let peer = |n: usize| PeerConfig {
            name: Self::name(n),
            address: address(n, 7100).to_string(),
            rack: format!("rack-{n}"),
        };
        let mut config = ClusterConfig::new(&Self::name(n), Secret::new(b"the secret of this cluster"));
        config.rack = format!("rack-{n}");
        config.listen = address(n, 7100);
        config.transfer = vec![address(n, 7101)];
        config.transports = Some(vec![Kind::Tcp]);
        config.peers = (0..count).filter(|&other| other != n).map(peer).collect();
        // Each is what it is by default in proportion, so that a run of seconds sees several.
        config.audit_every = Duration::from_secs(1);
        config.repair_after = Duration::from_secs(2);

        let dram = DramConfig { pool_bytes: POOL, blocks_max: 1024, ..DramConfig::default() };
        let store = Arc::new(DramStore::open(dram).context("the pool")?);
        let clock = Clock::start();
        let tell = Box::new(move |event| world::note(&format!("says: {event}")));
        let cluster = Cluster::open(config, Arc::clone(&store), clock, tell).context("the cluster")?;
        let below = vec![cluster.tier()];
        let traffic = TieringConfig::default();
        let tiering = Tiering::start(Arc::clone(&store), below, Box::new(AdmitAll), traffic, clock);
        let tiering = Arc::new(tiering.context("the tiers")?);
        cluster.run(&tiering).context("the cluster's threads")?;
        let swept = Arc::clone(&store);
        let sweep = move || {
            loop {
                thread::sleep(SWEEP);
                swept.sweep(clock.now_ms());
            }
        };
        thread::Builder::new().name("kvasir-sweep".into()).spawn(sweep).context("the sweeper")?;
        Ok(Self { store, tiering, cluster, clock })
    }
}
