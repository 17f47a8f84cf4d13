//! A host: what its services share.

use crate::access::door::Door;
use crate::conductor::Conductor;
use crate::config::Config;
use crate::explain::blocks::Evicted;
use crate::policy::PolicyHost;
use crate::policy::history::History;
use crate::policy::rollout::keeper::Keeper;
use crate::traffic::Recorder;
use kvasir_dataplane::Clock;
use kvasir_dataplane::server::Server;
use kvasir_dataplane::server::node::Node;
use kvasir_dataplane::tier::scrub::Scrubber;
use kvasir_eviction::Eviction;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What the services of one host share.
pub struct Host {
    pub config: Config,
    pub clock: Clock,
    /// Its blocks.
    pub node: Arc<Node>,
    pub policies: Arc<PolicyHost>,
    /// Rollouts of policies to this host and those that follow it.
    pub rollouts: Keeper,
    /// What happened to them.
    pub history: Arc<History>,
    pub eviction: Eviction,
    /// What evictors chose lately.
    pub evicted: Arc<Evicted>,
    /// `None` means that `store.scrub_rate` is 0.
    pub scrubber: Option<Scrubber>,
    pub server: Server,
    pub conductor: Arc<Conductor>,
    /// `None` means that `record.file` is empty.
    pub traffic: Option<Recorder>,
    pub draining: AtomicBool,
    pub addrs: Addrs,
    pub door: Door,
}

/// Where a host really listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addrs {
    /// `None` means that control goes over the Unix socket alone.
    pub grpc: Option<SocketAddr>,
    pub http: SocketAddr,
    /// `None` means that bytes go over the Unix socket alone.
    pub data: Option<SocketAddr>,
    /// For other hosts. `None` means that there are none.
    pub cluster: Option<SocketAddr>,
}
