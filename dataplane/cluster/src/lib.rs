//! Hosts that know each other, keep copies for each other, and read from each other.
//!
//! ```text
//! Cluster::open(store)          listens for peers, exports the pool (for reading) to those that know the secret
//!   .tier()                     the peers as the last tier below the pool: a miss here is asked of those that hold it
//!   .run(tiering)               begins to answer, to listen to each peer, and to do what the table says must be done
//!   .replicate(keys, copies)    the put is done; copies follow
//! ```
//!
//! **Who says what.** Each host listens to every peer over a connection of its own ([`link`]): the peer answers as soon
//! as it has news, and every 150 ms in any case, so that connection is the heartbeat as well. News are facts about the
//! peer's own copies; [`table`] puts them together and says what must be done, [`placement`] says where.
//!
//! **How bytes go.** By reading: a host that wants a block asks its holder to lend it (or is told by its holder where it
//! lies, to take a copy of it), reads the holder's pool through the transfer engine, and compares the bytes with the
//! checksum before anybody sees them ([`fetch`]). Nothing that arrives late can fall on a block that has taken its place,
//! because only a host that hands blocks over writes into another's pool ([`handover`]), into places made for them under
//! a name of their own.
//!
//! **Which way.** Each host tells its rails, the NICs behind them and which NICs serve which memory ([`whereabouts`]);
//! the host that reads pairs them with its own and puts them in an order ([`paths`]).
//!
//! **How blocks go.** A removal ([`removal`]) reaches every host that is up at once, and the others when they return; what
//! was put before it is taken in nowhere any more.
//!
//! **Threads**: one accepts, one per accepted connection answers ([`serve`]); per peer one listens and one has copies
//! made; one looks after targets, damage and [`orphans`] ([`upkeep`]), one keeps targets on disk ([`targets`]), one hears what is
//! handed over. All blocked threads; the table
//! has one lock, which is never held during I/O.
//!
//! Deliberately absent: consensus (a wrong view costs a copy too many or too few for a while, never wrong bytes),
//! discovery (peers are listed).

mod channel;
mod copies;
mod counts;
mod fetch;
pub mod handover;
mod link;
pub mod message;
mod orphans;
mod paths;
pub mod placement;
pub mod primary;
pub mod push;
mod rails;
mod removal;
mod serve;
mod staging;
mod stop;
pub mod table;
pub mod targets;
mod tier;
mod upkeep;
mod ways;
mod whereabouts;

#[cfg(test)]
mod tests;

use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

pub use counts::ClusterStats;
pub use link::{LinkState, PeerView};
pub use message::Status;
pub use paths::{RailState, RailView};
pub use rails::{Kind, unavailable};

use self::copies::Copies;
use self::counts::Counts;
use self::handover::Receiving;
use self::link::Link;
use self::rails::Rail;
use self::removal::{Kept, Removals};
use self::stop::Stop;
use self::table::{Heard, Holding, NODES_MAX, NodeId, Nodes, Table};
use self::targets::Targets;
use self::tier::PeerTier;
use self::upkeep::Todo;
use self::ways::Ways;
use kvasir_memory::region::Region;
use kvasir_net::topology::Topology;
use kvasir_net::transport::node::Secret;
use kvasir_net::transport::tcp::Tls;
use kvasir_net::transport::{Denied, Error as TransportError};
use kvasir_os::net::{SocketAddr, TcpListener};
use kvasir_os::thread::{self, JoinHandle};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::clock::Clock;
use kvasir_protocol::listener::Listener;
use kvasir_protocol::wire::Outcome;
use kvasir_state_db as state_db;
use kvasir_store::dram::{DramStore, OwnerId};
use kvasir_store::store::BlockStore;
use kvasir_store::tiering::Tiering;

/// Another host, as the settings name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    pub name: String,
    /// `host:port` of its [`ClusterConfig::listen`].
    pub address: String,
    /// Its failure domain; copies go to different domains first.
    pub rack: String,
}

/// Settings of a host in a cluster.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Hosts of another cluster are refused.
    pub cluster: String,
    /// This host's name: the one that peers have in their settings.
    pub name: String,
    pub rack: String,
    /// What all hosts of the cluster share.
    pub secret: Secret,
    /// Encrypts what is said and read between hosts, and accepts only hosts with a certificate for their name. All
    /// hosts of the cluster have it, or none.
    pub tls: Option<Tls>,
    /// Whether the kernel encrypts what rails over TCP carry, where it can. Default true.
    pub tls_in_kernel: bool,
    /// Where peers ask. Port 0 takes any.
    pub listen: SocketAddr,
    /// Where peers read the pool over TCP, an address for each rail. Port 0 takes any; peers are told. At least one, which
    /// RDMA connections are set up over, too.
    pub transfer: Vec<SocketAddr>,
    /// Kinds of transport for the pool, in the order of preference. Between hosts on one machine shared memory goes
    /// before all others. `None` means what this machine has, and RDMA only without TLS, because it is not encrypted.
    pub transports: Option<Vec<Kind>>,
    /// Socket where hosts on this machine reach the pool through shared memory. `None` means that they do not.
    pub socket: Option<PathBuf>,
    pub peers: Vec<PeerConfig>,
    /// Which NICs serve which memory here: rails are chosen by it, and peers are told. `None` means that all are alike.
    pub topology: Option<Topology>,
    /// How often the machine is read again. Default 5 s.
    pub topology_every: Duration,
    /// The most replicated blocks known, of all hosts together. About 80 B each. Default 1,048,576.
    pub blocks_max: usize,
    /// News kept for peers that lag; one that lags more is told everything again. Default 65,536.
    pub log_max: usize,
    /// The most copies waiting per peer; others are made later. Default 4,096.
    pub queue_max: usize,
    /// How long a read may spend on one holder after another. Below the time a lookup waits for a tier. Default 1.5 s.
    pub read_timeout: Duration,
    /// How often all blocks are checked for copies that are missing, gone or too many. Default 5 s.
    pub audit_every: Duration,
    /// How long a lost peer's copies count before they are made again elsewhere: most peers come back, from a restart or a
    /// blip, and copies made for that are dropped again. Nobody reads them meanwhile. Default 30 s.
    pub repair_after: Duration,
    /// A folder to keep in how many copies are wanted of which blocks, for a host that has a durable tier. Default none: a
    /// block that all its holders still have after a restart is not copied again.
    pub targets: Option<PathBuf>,
    /// A folder to keep in which blocks were removed, so that a host which was away cannot bring them back after this one
    /// was restarted. The default `None` means that it learns that from its peers, as far as they know it.
    pub removals: Option<PathBuf>,
    /// A peer without an answer for this long, beyond the 150 ms of a heartbeat, is down. Default 700 ms.
    pub silence: Duration,
}

impl ClusterConfig {
    /// A cluster of one, on loopback.
    pub fn new(name: &str, secret: Secret) -> Self {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            cluster: "kvasir".to_owned(),
            name: name.to_owned(),
            rack: String::new(),
            secret,
            tls: None,
            tls_in_kernel: true,
            listen: any_port,
            transfer: vec![any_port],
            transports: None,
            socket: None,
            peers: Vec::new(),
            topology: None,
            topology_every: Duration::from_secs(5),
            blocks_max: 1 << 20,
            log_max: 1 << 16,
            queue_max: 4096,
            read_timeout: Duration::from_millis(1500),
            audit_every: Duration::from_secs(5),
            repair_after: Duration::from_secs(30),
            targets: None,
            removals: None,
            silence: Duration::from_millis(700),
        }
    }
}

/// Why a host cannot join a cluster.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("{count} hosts are listed, this one included; a cluster has at most {NODES_MAX}")]
    TooMany { count: usize },
    #[error("host {name} is listed twice, or is this host itself; every host has one name")]
    Twice { name: String },
    #[error("{addr} cannot be opened for {what}: {source}; stop what uses it or choose another")]
    Listen { what: &'static str, addr: SocketAddr, source: io::Error },
    #[error("cluster.transports names {kind}, which this machine does not have: {reason}; leave it out")]
    Unavailable { kind: Kind, reason: String },
    #[error(
        "cluster.transfer lists no address, and cluster.transports no kind of transport that works without"
    )]
    NoRail,
    #[error("the pool cannot be registered for transfers: {0}")]
    Register(TransportError),
    #[error("the pool cannot be exported to peers: {0}")]
    Export(#[from] Denied),
    #[error("no thread for {what}: {source}")]
    Thread { what: &'static str, source: io::Error },
    #[error("what is known of wanted copies cannot be kept: {0}")]
    Targets(state_db::OpenError),
    #[error("removals cannot be kept: {0}")]
    Removals(state_db::OpenError),
}

/// A host that the settings do not name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no peer is called {name}; there are: {known}")]
pub struct NoPeer {
    pub name: String,
    pub known: String,
}

/// Something that an operator may want to know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Event {
    #[error("peer {peer} is up")]
    Up { peer: String },
    #[error(
        "peer {peer} is down: {reason}; its copies are made again if it stays away (cluster.repair_after)"
    )]
    Down { peer: String, reason: String },
    #[error("peer {peer} is refused: {reason}")]
    Refused { peer: String, reason: String },
    #[error("{what}; rails to peers are chosen anew")]
    Topology { what: String },
    #[error("block {key} was damaged here; it was dropped, and fetched again from {peer}")]
    Repaired { key: BlockKey, peer: String },
    #[error("block {key} was damaged here and dropped; no other host could give it back now")]
    NotRepaired { key: BlockKey },
    #[error(
        "renewed files of [cluster.tls] are not used: {reason}; connections go on with those that were read before"
    )]
    CertificateRefused { reason: String },
    #[error(
        "how many copies are wanted cannot be kept on disk: {reason}; until it can, a restart forgets it"
    )]
    TargetsNotKept { reason: String },
    #[error(
        "a removal cannot be kept on disk: {reason}; until it can, a restart of every host that heard of it forgets it"
    )]
    RemovalsNotKept { reason: String },
    #[error(
        "what was kept of removals is damaged; it is now in {}, and removals are learnt again from other hosts",
        kept.display()
    )]
    RemovalsDamaged { kept: PathBuf },
    #[error(
        "what was kept of wanted copies is damaged; it is now in {}, and copies are wanted again of those blocks only that \
         other hosts speak of", kept.display()
    )]
    TargetsDamaged { kept: PathBuf },
}

impl Event {
    /// Whether somebody should look into it.
    pub fn is_warning(&self) -> bool {
        !matches!(self, Self::Up { .. } | Self::Topology { .. })
    }
}

/// Where events go. Called from the cluster's threads: return soon.
pub type Events = Box<dyn Fn(Event) + Send + Sync>;

/// What all threads share: the parts with their owners, and what belongs to none of them.
struct Shared {
    config: Arc<ClusterConfig>,
    store: Arc<DramStore>,
    /// Set by [`Cluster::run`]. Weak: the tiering owns the peers' tier, which owns this.
    tiering: OnceLock<Weak<Tiering>>,
    clock: Clock,
    ways: Arc<Ways>,
    /// Where clients put and get over TCP, for peers to tell theirs.
    data: OnceLock<SocketAddr>,
    /// Holds what is lent to make copies, and to push.
    owner: OwnerId,
    links: Vec<Arc<Link>>,
    /// Peers that are up: bit n for place n.
    up: AtomicU64,
    copies: Arc<Copies>,
    todo: Todo,
    removals: Removals,
    /// Hand-overs that come in, and how many go out.
    receiving: Arc<Receiving>,
    sending: AtomicUsize,
    counts: Counts,
    /// Calls of peers being answered.
    serving: AtomicU64,
    events: Events,
    stop: Arc<Stop>,
}

/// This host as a member of a cluster. Dropping it ends all connections.
pub struct Cluster {
    shared: Arc<Shared>,
    /// Bound from the start, so that the port is known; served by `listener` from [`run`](Self::run) on.
    door: TcpListener,
    listener: OnceLock<Listener>,
    addr: SocketAddr,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Cluster {
    /// Opens the ports and exports the pool. Peers are answered from [`run`](Self::run) on.
    ///
    /// # Errors
    /// The settings name a host twice, or a port is taken.
    pub fn open(
        config: ClusterConfig,
        store: Arc<DramStore>,
        clock: Clock,
        events: Events,
    ) -> Result<Arc<Self>, OpenError> {
        let nodes = node_ids(&config)?;
        let listening = |what, addr| move |source| OpenError::Listen { what, addr, source };
        let door = TcpListener::bind(config.listen).map_err(listening("the cluster", config.listen))?;
        let addr = door.local_addr().map_err(listening("the cluster", config.listen))?;
        let config = Arc::new(config);
        let ways = Ways::open(Arc::clone(&config), Region::of_pool(Arc::clone(store.pool())), clock)?;
        let (ways, stop) = (Arc::new(ways), Arc::new(Stop::default()));
        let links = config.peers.iter().enumerate();
        let link = |(n, peer): (usize, &PeerConfig)| Link::new(n + 1, peer.clone(), &store, &ways, &stop);
        let copies = Arc::new(Copies::new(Table::new(nodes, config.blocks_max, config.log_max), &stop));
        let receiving = Receiving::new(&store, &copies, clock, &ways, &stop);
        let shared = Arc::new(Shared {
            links: links.map(link).map(Arc::new).collect(),
            up: AtomicU64::new(0),
            copies,
            owner: store.new_owner(),
            receiving: Arc::new(receiving),
            tiering: OnceLock::new(),
            data: OnceLock::new(),
            todo: Todo::default(),
            sending: AtomicUsize::new(0),
            counts: Counts::default(),
            removals: Removals::default(),
            serving: AtomicU64::new(0),
            ways,
            stop,
            config,
            store,
            clock,
            events,
        });
        Ok(Arc::new(Self { shared, door, listener: OnceLock::new(), addr, threads: Mutex::default() }))
    }

    /// The peers as a tier, to be the last below the pool.
    pub fn tier(&self) -> Arc<dyn BlockStore> {
        Arc::new(PeerTier(Arc::clone(&self.shared)))
    }

    /// Names of the peers that hold a block and are up, as far as this host knows: the one that it would be read from first.
    pub fn holders(&self, key: BlockKey) -> Vec<String> {
        let nearest_last = self.shared.holders(key).into_iter();
        let links = nearest_last.rev().filter_map(|place| self.shared.link(place));
        links.map(|link| link.config.name.clone()).collect()
    }

    /// Begins to answer peers, to listen to them, and to look after copies. Once; later calls do nothing.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn run(&self, tiering: &Arc<Tiering>) -> Result<(), OpenError> {
        if self.shared.tiering.set(Arc::downgrade(tiering)).is_err() {
            return Ok(());
        }
        self.open_removals()?;
        self.open_targets(tiering)?;
        // After what was put since is known again.
        self.shared.forget_what_was_removed(tiering);
        let listener = self.door.try_clone().and_then(|door| self.shared.answer_peers(door));
        let listener = listener.map_err(|source| OpenError::Thread { what: "accepting peers", source })?;
        let _ = self.listener.set(listener);
        self.spawn("kvasir-notice", "hand-overs", |shared| shared.receiving.hear_notices())?;
        self.spawn("kvasir-upkeep", "copies", |shared| shared.upkeep())?;
        if self.shared.config.topology.is_some() {
            self.spawn("kvasir-topology", "NICs that come and go", |shared| shared.follow_machine())?;
        }
        for link in &self.shared.links {
            let (watched, copied) = (Arc::clone(link), Arc::clone(link));
            self.spawn("kvasir-watch", "listening to a peer", move |shared| shared.watch(&watched))?;
            self.spawn("kvasir-copy", "copies to a peer", move |shared| shared.copy_all(&copied))?;
        }
        Ok(())
    }

    fn open_removals(&self) -> Result<(), OpenError> {
        let Some(path) = &self.shared.config.removals else { return Ok(()) };
        let (kept, damaged) = Kept::open(path).map_err(OpenError::Removals)?;
        if let Some(kept) = damaged {
            self.shared.tell(Event::RemovalsDamaged { kept });
        }
        self.shared.restore_removals(kept);
        Ok(())
    }

    /// Claims again what was held before, and keeps claims from now on.
    fn open_targets(&self, tiering: &Tiering) -> Result<(), OpenError> {
        let Some(path) = &self.shared.config.targets else { return Ok(()) };
        let (targets, damaged) = Targets::open(path).map_err(OpenError::Targets)?;
        if let Some(kept) = damaged {
            self.shared.tell(Event::TargetsDamaged { kept });
        }
        let at = self.shared.table().log().end();
        self.shared.restore_targets(&targets, tiering);
        self.spawn("kvasir-targets", "wanted copies", move |shared| shared.keep_targets(&targets, at))
    }

    fn spawn(
        &self,
        name: &str,
        what: &'static str,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> Result<(), OpenError> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name(name.into()).spawn(move || work(&shared));
        self.threads.lock().push(thread.map_err(|source| OpenError::Thread { what, source })?);
        Ok(())
    }

    /// Where peers reach it (port 0 was replaced).
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Asks for blocks stored here to be held by `copies` hosts in total, including this one. Returns at once; copies are
    /// made in the background, and made again when a holder is lost.
    ///
    /// Per key: done; missing here; too few hosts; or the table is full.
    pub fn replicate(&self, keys: &[BlockKey], copies: u8) -> Vec<Outcome> {
        let shared = &self.shared;
        if copies <= 1 {
            return vec![Outcome::Done; keys.len()];
        }
        if usize::from(copies) > shared.links.len() + 1 {
            return vec![Outcome::TooFewHosts; keys.len()];
        }
        // Brings up what has already gone below the pool, and keeps the rest from going.
        let loans = shared.lend(shared.owner, keys);
        let primary = NodeId::of(&shared.config.name);
        let mut table = shared.table();
        let mut outcome = |(&key, loan): (&BlockKey, &Option<message::Loan>)| {
            let Some(message::Loan { meta: BlockMeta { size, .. }, .. }) = *loan else {
                return Outcome::Missing;
            };
            // A block that is held already counts from its first put: saying so again is no news.
            let known = table.holding(key).map(|known| known.generation);
            let generation = known.unwrap_or_else(|| shared.copies.generations.next());
            match table.holds(0, key, Holding { size, target: copies, primary, generation }) {
                Heard::New | Heard::Known => Outcome::Done,
                Heard::Full => Outcome::CopiesFull,
                // It was removed between the two looks.
                Heard::Outdated | Heard::Removal(_) => Outcome::Missing,
            }
        };
        let outcomes: Vec<Outcome> = keys.iter().zip(&loans).map(&mut outcome).collect();
        drop(table);
        let leases: Vec<u64> = loans.iter().flatten().map(|loan| loan.lease).collect();
        let _ = shared.store.release(shared.owner, &leases);
        shared.copies.changed();
        shared.todo.look_at(keys);
        outcomes
    }

    /// The peers, in the order of the settings.
    pub fn peers(&self) -> Vec<PeerView> {
        self.shared.links.iter().map(|link| link.view()).collect()
    }

    /// Which NICs serve which memory here, as peers are told it: JSON, empty if it is not known.
    pub fn matrix(&self) -> String {
        self.shared.ways.whereabouts.now().json.clone()
    }

    pub fn config(&self) -> &ClusterConfig {
        &self.shared.config
    }

    pub fn stats(&self) -> ClusterStats {
        let (blocks, refusals, (own, short), news, (removals, removals_forgotten)) = {
            let table = self.shared.table();
            (table.len(), table.refusals(), table.counts(), table.log().end(), table.removals())
        };
        let kept = self.shared.counts.targets_kept.load(Ordering::Relaxed);
        let unkept = self.config().targets.as_ref().map_or(0, |_| news.saturating_sub(kept));
        let pools: Vec<_> = self
            .shared
            .ways
            .rails
            .iter()
            .map(|rail| (rail.transport.open(), rail.transport.stats()))
            .collect();
        let stats = self.shared.counts.stats(blocks, own, short, refusals, &pools);
        ClusterStats { removals_kept: removals as u64, removals_forgotten, targets_unkept: unkept, ..stats }
    }

    /// Ends all connections and waits for the threads.
    pub fn stop(&self) {
        let shared = &self.shared;
        if !shared.stop.set() {
            return;
        }
        // From now on, nobody is let in.
        let _ = rustix::net::shutdown(&self.door, rustix::net::Shutdown::Both);
        shared.links.iter().for_each(|link| link.wake());
        shared.copies.wake();
        shared.todo.wake();
        shared.receiving.wake();
        for thread in self.threads.lock().drain(..) {
            let _ = thread.join();
        }
        if let Some(listener) = self.listener.get() {
            listener.stop();
        }
        shared.ways.rails.iter().for_each(Rail::stop);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.copies.table()
    }

    fn is_stopping(&self) -> bool {
        self.stop.is_set()
    }

    /// Waits, unless the host stops.
    fn pause(&self, time: Duration) {
        self.stop.pause(time);
    }

    /// `None` once the host shuts down.
    fn tiering(&self) -> Option<Arc<Tiering>> {
        self.tiering.get()?.upgrade()
    }

    /// The peers that are up.
    fn up(&self) -> Nodes {
        Nodes(self.up.load(Ordering::SeqCst))
    }

    /// A peer by its name.
    fn link_to(&self, name: &str) -> Result<&Arc<Link>, NoPeer> {
        let known = || self.links.iter().map(|link| link.config.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = self.links.iter().find(|link| link.config.name == name);
        found.ok_or_else(|| NoPeer { name: name.to_owned(), known: known() })
    }

    /// A peer by its place in the table.
    fn link(&self, place: usize) -> Option<&Arc<Link>> {
        self.links.get(place.checked_sub(1)?)
    }

    fn tell(&self, event: Event) {
        (self.events)(event);
    }

    fn status(&self) -> Status {
        let pressure = self.store.pressure();
        let queued: usize = self.links.iter().map(|link| link.queued()).sum();
        Status {
            free_bytes: pressure.free_bytes,
            pool_bytes: pressure.pool_bytes,
            load: self.serving.load(Ordering::Relaxed) + queued as u64,
            revision: self.ways.whereabouts.now().revision,
        }
    }
}

/// This host first, then the peers.
fn node_ids(config: &ClusterConfig) -> Result<Vec<NodeId>, OpenError> {
    let names = std::iter::once(&config.name).chain(config.peers.iter().map(|peer| &peer.name));
    let mut nodes: Vec<NodeId> = Vec::new();
    for name in names {
        let node = NodeId::of(name);
        if nodes.contains(&node) {
            return Err(OpenError::Twice { name: name.clone() });
        }
        nodes.push(node);
    }
    if nodes.len() > NODES_MAX { Err(OpenError::TooMany { count: nodes.len() }) } else { Ok(nodes) }
}
