//! Two whole hosts in this process that know each other, and engines that hand prompts over.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, AtomicU64};

use kvasir_cluster::{Cluster, ClusterConfig, LinkState, PeerConfig};
use kvasir_net::transport::node::Secret;
use kvasir_store::tiering::{AdmitAll, Tiering, TieringConfig};

use super::*;
use crate::data::{Handing, HandingOptions, Incoming, Outgoing, Transfer};

/// Ports below those that the system gives to a caller that asks for any, so none is taken by chance.
fn ports() -> [SocketAddr; 2] {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 14_100 + (std::process::id() % 500) as u16 * 12;
    let next = || SocketAddr::from(([127, 0, 0, 1], first + NEXT.fetch_add(1, Ordering::Relaxed) % 400));
    let mut free = std::iter::repeat_with(next).filter(|addr| TcpListener::bind(addr).is_ok());
    std::array::from_fn(|_| free.next().unwrap())
}

/// Neither takes the other for dead because the machine is busy.
pub(super) struct Node {
    pub(super) host: Host,
    cluster: Arc<Cluster>,
}

impl Node {
    fn start(n: usize, ports: [SocketAddr; 2], dram: &DramConfig) -> Self {
        let secret = Secret::new(b"what both hosts of this test know");
        let mut config = ClusterConfig::new(&format!("host-{n}"), secret);
        let (name, address, rack) = (format!("host-{}", 1 - n), ports[1 - n].to_string(), "b".to_owned());
        config.peers = vec![PeerConfig { name, address, rack }];
        (config.listen, config.silence) = (ports[n], Duration::from_secs(60));
        let (clock, dir) = (Clock::start(), tempfile::tempdir().unwrap());
        let store = Arc::new(DramStore::open(dram.clone()).unwrap());
        let cluster = Cluster::open(config, Arc::clone(&store), clock, Box::new(drop)).unwrap();
        let below = vec![cluster.tier()];
        let traffic = TieringConfig { load_timeout: Duration::from_secs(60), ..TieringConfig::default() };
        let tiering = Tiering::start(Arc::clone(&store), below, Box::new(AdmitAll), traffic, clock);
        let tiering = Arc::new(tiering.unwrap());
        cluster.run(&tiering).unwrap();
        let node = Arc::new(kvasir_server::node::Node::new(tiering, Some(Arc::clone(&cluster)), clock));
        let listen = Listen { unix: Some(dir.path().join("data.sock")), ..Listen::default() };
        let server = Server::start(node, &listen, gate(), ServerConfig::default()).unwrap();
        Self { host: Host { dir, store, server: Some(server) }, cluster }
    }

    pub(super) fn reservations(&self) -> u64 {
        self.host.store.metrics().reservations
    }

    /// It is gone, and what was under way breaks.
    pub(super) fn stop(&mut self) {
        self.cluster.stop();
        self.host.server.take().unwrap().stop();
    }
}

/// `host-0` and `host-1`.
pub(super) struct Pair {
    pub(super) nodes: [Node; 2],
}

impl Pair {
    pub(super) fn start() -> Self {
        Self::with(DramConfig::default())
    }

    pub(super) fn with(dram: DramConfig) -> Self {
        let dram = DramConfig { pool_bytes: 32 << 20, blocks_max: 8192, put_wait: Duration::ZERO, ..dram };
        let ports = ports();
        let pair = Self { nodes: [0, 1].map(|n| Node::start(n, ports, &dram)) };
        until("both are up", || pair.nodes.iter().all(|node| node.cluster.peers()[0].state == LinkState::Up));
        pair
    }

    pub(super) fn engines(&self) -> [Engine; 2] {
        self.nodes.each_ref().map(|node| Engine::new(&node.host.unix(), HandingOptions::default()))
    }

    /// Nobody has or keeps anything of these blocks.
    pub(super) fn is_clean(&self, keys: &[BlockKey]) -> bool {
        self.nodes.iter().all(|node| {
            node.reservations() == 0 && node.host.store.exists(keys).unwrap().iter().all(|&here| !here)
        })
    }
}

pub(super) fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..60_000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("two minutes passed without: {what}");
}

pub(super) const LAYERS: u32 = 4;
/// Of K and of V.
const RUN: usize = 500;
pub(super) const SIZE: u64 = LAYERS as u64 * 2 * RUN as u64;
pub(super) const BLOCKS: usize = 40;
pub(super) const NAMESPACE: [u8; 32] = [7; 32];
pub(super) const LONG: Duration = Duration::from_secs(120);

/// What belongs into a layer of the block called `n`.
pub(super) fn layer_of(n: u64, layer: u32) -> Vec<u8> {
    (0..2 * RUN).map(|at| (at as u64 * 7 + n * 31 + u64::from(layer) * 101 + n / 8) as u8).collect()
}

/// Its memory keeps K of all blocks of a layer before V of all; then comes the next layer.
pub(super) struct Engine {
    // Before the memory, which its threads may touch until it is closed.
    pub(super) handing: Handing,
    pub(super) jobs: Jobs,
    pub(super) plan: Arc<Plan>,
    _memory: Vec<u8>,
}

impl Engine {
    pub(super) fn new(host: &Endpoint, settings: HandingOptions) -> Self {
        let mut memory = vec![0; BLOCKS * SIZE as usize];
        let base = memory.as_mut_ptr().expose_provenance();
        let run = |at| Run { addr: base + at * BLOCKS * RUN, len: RUN, stride: RUN };
        let runs: Vec<Run> = (0..2 * LAYERS as usize).map(run).collect();
        #[expect(unsafe_code, reason = "what an engine does")]
        // SAFETY: the runs lie in `memory`, which is touched through the plan alone, and dropped after the threads have ended.
        let plan = Arc::new(unsafe { Plan::new(&runs, BLOCKS) }.unwrap());
        let options = Options { timeout: LONG, ..options() };
        let jobs = Jobs::start(host, &options, JobOptions::default()).unwrap();
        let handing = Handing::beside(&jobs, host, &options, settings);
        Self { handing, jobs, plan, _memory: memory }
    }

    fn parts(&self, block: usize, layer: u32) -> Vec<u8> {
        let parts = self.plan.parts(block).unwrap().skip(2 * layer as usize).take(2);
        parts.flat_map(|part| part.to_vec()).collect()
    }

    pub(super) fn fill(&self, block: usize, n: u64, layer: u32) {
        let bytes = layer_of(n, layer);
        let mut rest = Shared::from(&bytes[..]);
        for mut place in self.plan.places(block).unwrap().skip(2 * layer as usize).take(2) {
            rest = rest.after(place.copy_in(rest));
        }
    }

    /// Computes a layer of a job's blocks: the one called `n` lies in block `n % BLOCKS`.
    pub(super) fn compute(&self, job: u64, names: &[u64], layer: u32) {
        names.iter().for_each(|&n| self.fill(n as usize % BLOCKS, n, layer));
        assert!(self.handing.layer_ready(job, layer), "layer {layer} of job {job}");
    }

    pub(super) fn has_layer(&self, block: usize, n: u64, layer: u32) -> bool {
        self.parts(block, layer) == layer_of(n, layer)
    }

    pub(super) fn has(&self, block: usize, n: u64) -> bool {
        (0..LAYERS).all(|layer| self.has_layer(block, n, layer))
    }

    /// Hands a part over and does not wait.
    pub(super) fn send(&self, job: u64, transfer: &Transfer, from: u32, names: &[u64]) {
        let blocks = keys(transfer, names).into_iter().zip(names.iter().map(|&n| n as usize % BLOCKS));
        let (transfer, peer, blocks) = (transfer.clone(), "host-1".to_owned(), blocks.collect());
        let part = Outgoing { transfer, from, peer, blocks, layers: LAYERS };
        self.handing.hand_over(job, &self.plan, part).unwrap();
    }

    /// Receives a prompt without its `first` blocks: the one called `n` into block `BLOCKS - 1 - n % BLOCKS`.
    pub(super) fn receive(&self, job: u64, transfer: &Transfer, names: &[u64], first: usize, time: Duration) {
        let blocks = names[first..].iter().map(|&n| into(n)).collect();
        let (transfer, keys) = (transfer.clone(), keys(transfer, names));
        let prompt = Incoming { transfer, keys, first, blocks, layers: LAYERS, time };
        self.handing.arrive(job, &self.plan, prompt).unwrap();
    }
}

pub(super) fn into(n: u64) -> usize {
    BLOCKS - 1 - n as usize % BLOCKS
}

pub(super) fn keys(transfer: &Transfer, names: &[u64]) -> Vec<BlockKey> {
    names.iter().map(|n| transfer.key(&n.to_le_bytes())).collect()
}

/// A transfer that no other test or round has.
pub(super) fn transfer() -> Transfer {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("cmpl-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    Transfer::new(name.as_bytes(), &Namespace::new(NAMESPACE)).unwrap()
}
