//! One host: pool, tiers and cluster, as the daemon puts them together.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context;

use kvasir_cluster::{Cluster, ClusterConfig, Kind, PeerConfig};
use kvasir_eviction::Eviction;
use kvasir_net::transport::node::Secret;
use kvasir_nvme::{NvmeConfig, NvmeStore};
use kvasir_os::thread;
use kvasir_os::time::Duration;
use kvasir_os::world::{self, Chance};
use kvasir_protocol::block::BlockKey;
use kvasir_protocol::clock::Clock;
use kvasir_server::access::{Gate, Identity, Refused, Roles};
use kvasir_server::node::Node;
use kvasir_server::{Listen, Server, ServerConfig};
use kvasir_store::config::{DramConfig, OnFull};
use kvasir_store::dram::DramStore;
use kvasir_store::store::{BlockStore, Tier};
use kvasir_store::tiering::{AdmitAll, LevelStats, Tiering, TieringConfig};

use crate::bucket::Bucket;
use crate::evictor::{self, Twins};
use crate::model::TENANTS;

/// Bytes of a host's pool and disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pool: u64,
    disk: u64,
}

impl Room {
    /// Nothing is evicted for want of space, so whatever is missing was lost.
    pub(crate) const AMPLE: Self = Self { pool: 8 << 20, disk: 8 << 20 };
    /// Less than clients put.
    pub(crate) const SMALL: Self = Self { pool: 192 << 10, disk: 512 << 10 };
}

const SEGMENT: u64 = 64 << 10;
/// A tenth of what it is by default, so that most pauses outlast it.
const LEASE: Duration = Duration::from_secs(1);
/// A twentieth; a hand-over may take half of it.
pub(crate) const RESERVATION: Duration = Duration::from_secs(3);
/// Free share of a pool above a disk at which eviction stops: most blocks are on the disk alone.
const FREE: f64 = 0.998;
/// And below which the product's own thread begins to.
const LOW: f64 = 0.99;
/// How long a client may stall in the middle of a frame: for a run of seconds, less than by default.
pub(crate) const STALL: Duration = Duration::from_secs(2);

/// The most threads of a host, and how many more for each of its peers and clients.
const THREADS: u64 = 40;
const THREADS_OF_PEER: u64 = 16;

/// What a client says to be let in.
pub(crate) fn token(tenant: u16) -> String {
    format!("a token of tenant {tenant}")
}

/// Lets tenants in, each for itself alone.
struct Tenants;

impl Gate for Tenants {
    fn local(&self, _uid: u32, _gid: u32) -> Result<Identity, Refused> {
        Err(Refused("nobody is on the same machine".into()))
    }

    fn bearer(&self, shown: &str) -> Result<Identity, Refused> {
        let tenant = TENANTS.into_iter().find(|&tenant| token(tenant) == shown);
        let tenant = tenant.ok_or_else(|| Refused(format!("{shown:?} is no token")))?;
        let name = format!("tenant {tenant}");
        Ok(Identity {
            name,
            roles: Roles::OPERATOR,
            tenant: Some(tenant),
            shared: Vec::new(),
            in_place: false,
        })
    }
}

pub(crate) struct Host {
    pub(crate) store: Arc<DramStore>,
    pub(crate) tiering: Arc<Tiering>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) clock: Clock,
    /// What tells this process from others.
    pub(crate) boot: u64,
    room: Room,
    server: Server,
    /// If the product's own thread chooses.
    eviction: Option<Eviction>,
}

/// The disk of a host.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) folder: PathBuf,
    /// Of what is chosen to go down to it.
    pub(crate) seed: u64,
}

/// Bytes a second of a disk that is scrubbed: a full one every 8 s.
const SCRUB: u64 = 1 << 20;

impl Host {
    /// As its peers have it in their settings.
    pub(crate) fn name(n: usize) -> String {
        format!("host-{n}")
    }

    /// Where it serves clients.
    pub(crate) fn data_port(n: usize) -> SocketAddr {
        address(n, 7200)
    }

    /// Whether a tier of its own has a block.
    pub(crate) fn has(&self, key: BlockKey) -> bool {
        self.tiering.residency_own(&[key]).is_ok_and(|found| found[0].bits() != 0)
    }

    /// What it holds more of than its settings allow; `machine` is where it runs, with so many peers.
    pub(crate) fn beyond_limits(&self, machine: usize, peers: usize) -> Option<String> {
        let (tiers, traffic) = (self.tiering.stats(), traffic());
        let queued = |of: fn(&LevelStats) -> u64| tiers.levels.iter().map(of).max().unwrap_or_default();
        let clients = self.server.metrics().connections;
        let all = [
            ("connections of clients", clients, ServerConfig::default().connections_max.into()),
            ("blocks on their way down", queued(|level| level.offload.queued), traffic.queue_blocks.into()),
            (
                "bytes on their way down",
                queued(|level| level.offload.queued_bytes),
                traffic.queue_bytes.min(self.room.pool / 4),
            ),
            ("bytes being loaded", tiers.loading_bytes, traffic.load_bytes),
            ("threads", world::threads(machine) as u64, THREADS + THREADS_OF_PEER * peers as u64 + clients),
        ];
        let (what, count, limit) = all.into_iter().find(|(_, count, limit)| count > limit)?;
        Some(format!("{count} {what}, and may have {limit}"))
    }

    /// Whether anything is under way for clients, or between its tiers.
    pub(crate) fn is_busy(&self) -> bool {
        let tiers = self.tiering.stats();
        let queued = tiers.levels.iter().any(|level| level.offload.queued > 0);
        queued || tiers.loading_bytes > 0 || self.server.metrics().connections > 0
    }

    /// What its tiers hold: free bytes of the pool, and blocks on the disk.
    pub(crate) fn filled(&self) -> (u64, u64) {
        let below = self.tiering.stats().levels;
        let disk = below.iter().filter(|level| level.capabilities.tier == Tier::Nvme);
        (self.store.pressure().free_bytes, disk.map(|level| level.store.blocks).sum())
    }

    /// Blocks that went down to the disk or bucket, and that came up, since it was started.
    pub(crate) fn moved(&self) -> (u64, u64) {
        let below = self.tiering.stats().levels;
        let below = below.iter().find(|level| level.capabilities.tier.takes_victims());
        below.map_or((0, 0), |level| (level.offload.stored, level.store.hits))
    }

    /// How often another policy has come to choose what goes down.
    pub(crate) fn swaps(&self) -> u64 {
        self.eviction.as_ref().map_or(0, |eviction| eviction.counts().promotions.load(Relaxed))
    }

    /// Starts number `n` of `count` hosts on this machine, which is its own or another.
    pub(crate) fn start(
        n: usize,
        machine: usize,
        count: usize,
        room: Room,
        disk: Option<Disk>,
        bucket: Option<&Arc<Bucket>>,
    ) -> anyhow::Result<Self> {
        let peer = |n: usize| PeerConfig {
            name: Self::name(n),
            address: address(n, 7100).to_string(),
            rack: format!("rack-{n}"),
        };
        let mut config = ClusterConfig::new(&Self::name(n), Secret::new(b"the secret of this cluster"));
        config.rack = format!("rack-{n}");
        config.listen = address(machine, 7100);
        config.transfer = vec![address(machine, 7101)];
        config.transports = Some(vec![Kind::Tcp]);
        config.peers = (0..count).filter(|&other| other != n).map(peer).collect();
        // Each is what it is by default in proportion, so that a run of seconds sees several.
        config.audit_every = Duration::from_secs(1);
        config.repair_after = Duration::from_secs(2);

        if let Some(disk) = &disk {
            config.targets = Some(disk.folder.join("targets"));
            config.removals = Some(disk.folder.join("removals"));
        }

        let mut dram = DramConfig {
            pool_bytes: room.pool,
            blocks_max: 1024,
            lease_ttl: LEASE,
            reservation_ttl: RESERVATION,
            ..DramConfig::default()
        };
        if disk.is_some() {
            (dram.low_free, dram.high_free) = (LOW, FREE);
        }
        let store = Arc::new(DramStore::open(dram).context("the pool")?);
        let clock = Clock::start();
        let tell = Box::new(move |event| world::note(&format!("says: {event}")));
        let cluster = Cluster::open(config, Arc::clone(&store), clock, tell).context("the cluster")?;
        let mut below: Vec<Arc<dyn BlockStore>> = Vec::new();
        match (&disk, bucket) {
            (Some(disk), Some(bucket)) => below.push(Arc::new(bucket.open(Chance::new(disk.seed)))),
            (Some(disk), None) => below.push(Arc::new(disk.open(room).context("the disk")?)),
            (None, _) => {}
        }
        below.push(cluster.tier());
        let tiering = Tiering::start(Arc::clone(&store), below, Box::new(AdmitAll), traffic(), clock);
        let tiering = Arc::new(tiering.context("the tiers")?);
        cluster.run(&tiering).context("the cluster's threads")?;
        let node = Arc::new(Node::new(Arc::clone(&tiering), Some(Arc::clone(&cluster)), clock));
        let listen = Listen { tcp: Some(Self::data_port(machine)), ..Listen::default() };
        let gate = Arc::new(Tenants);
        let config = ServerConfig { stall_timeout: STALL, ..ServerConfig::default() };
        let boot = node.boot();
        let server = Server::start(node, &listen, gate, config).context("the server")?;
        let eviction = match disk {
            Some(disk) => disk.evict(&tiering, clock).context("the evictor")?,
            None => None,
        };
        Ok(Self { store, tiering, cluster, clock, boot, room, server, eviction })
    }
}

/// Whatever leaves the pool goes down: a block that went nowhere would be missing, as one that was lost is.
fn traffic() -> TieringConfig {
    TieringConfig { min_uses: 0, ..TieringConfig::default() }
}

fn address(n: usize, port: u16) -> SocketAddr {
    let [high, low] = (n as u16).to_be_bytes();
    SocketAddr::from(([10, 0, high, low], port))
}

impl Disk {
    /// Every other host's blocks are chosen by the product's thread, which is returned.
    fn evict(&self, tiering: &Arc<Tiering>, clock: Clock) -> std::io::Result<Option<Eviction>> {
        let (tiering, mut chance) = (Arc::clone(tiering), Chance::new(self.seed));
        if chance.below(2) == 0 {
            let twins = Twins::new(tiering.dram().slots(), chance);
            return Eviction::start(tiering, twins, clock).map(Some);
        }
        let evict = move || evictor::by_chance(&tiering, clock, chance);
        thread::Builder::new().name("kvasir-evict".into()).spawn(evict).map(|_| None)
    }

    /// As the daemon opens it, and small.
    fn open(&self, room: Room) -> anyhow::Result<NvmeStore> {
        let config = NvmeConfig {
            capacity_bytes: room.disk,
            segment_bytes: SEGMENT,
            queue_depth: 4,
            // Of every other disk.
            scrub_bytes_per_s: SCRUB * (self.seed % 2),
            direct_io: false,
            io_uring: false,
            on_full: OnFull::Evict,
            ..NvmeConfig::new(self.folder.clone())
        };
        let store = NvmeStore::open(config)?;
        let report = store.report();
        world::note(&format!("the disk has {} blocks, {} damaged", report.blocks, report.corrupt));
        Ok(store)
    }
}
