//! How this host reaches others and they reach its pool: its name, its rails, and what it knows of NICs and memory.

use std::sync::Arc;

use super::rails::{self, Rail};
use super::staging::Staging;
use super::whereabouts::Whereabouts;
use super::{ClusterConfig, OpenError};
use kvasir_memory::region::Region;
use kvasir_net::transfer::{Engine, EngineConfig};
use kvasir_net::transport::{Access, Node, Transport};
use kvasir_os::time::{Duration, SystemTime, UNIX_EPOCH};
use kvasir_protocol::clock::Clock;

/// The segment that every host exports: its pool.
pub(super) const SEGMENT: &str = "kvasir.pool";
/// How long a grant on it lives; the engine renews it.
const GRANT: Duration = Duration::from_secs(60);

/// See the [module](self).
pub(super) struct Ways {
    pub(super) config: Arc<ClusterConfig>,
    pub(super) node: Arc<Node>,
    pub(super) engine: Engine,
    /// Memory for blocks of peers that are read for the tiers here.
    pub(super) staging: Staging,
    pub(super) rails: Vec<Rail>,
    pub(super) whereabouts: Whereabouts,
    pub(super) pool: Region,
}

impl Ways {
    /// Opens the rails and exports the pool.
    pub(super) fn open(config: Arc<ClusterConfig>, pool: Region, clock: Clock) -> Result<Self, OpenError> {
        let members = config.peers.iter().map(|peer| peer.name.clone());
        let node = Node::new(&config.name, config.secret.clone(), epoch());
        let node = Arc::new(node.of_cluster(&config.cluster, members));
        let rails = rails::open(&config, &node, clock)?;
        if rails.is_empty() {
            return Err(OpenError::NoRail);
        }
        node.exports.export(SEGMENT, vec![pool.clone()], Access::Read, GRANT)?;
        let transports = rails.iter().map(|rail| Arc::clone(&rail.transport) as Arc<dyn Transport>);
        let engine = Engine::new(EngineConfig::default(), transports.collect());
        let engine = engine.map_err(|source| OpenError::Thread { what: "transfers", source })?;
        engine.register(&pool).map_err(OpenError::Register)?;
        let staging = Staging::open(&engine).map_err(OpenError::Register)?;
        let whereabouts = Whereabouts::new(config.topology.clone(), &rails);
        Ok(Self { config, node, engine, staging, rails, whereabouts, pool })
    }

    /// When this returns, nobody reads or writes that segment any more.
    pub(super) fn take_back(&self, segment: &str) {
        self.node.exports.revoke(segment);
        self.rails.iter().for_each(|rail| rail.transport.revoked());
    }
}

/// Larger than that of every earlier run, as long as the machine's clock does not go back.
fn epoch() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_millis() as u64)
}
