//! Which host takes a put that asks for copies.
//!
//! The host that is asked, in general: its client is near it. Another one when this one is short of space or clearly busier
//! ([`placement::primary`](super::placement::primary)); the client then puts there, and that host has the copies made.

use super::placement::{Candidate, primary};
use super::table::NodeId;
use super::{Cluster, Shared};

/// The host that should take a put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Primary {
    pub name: String,
    /// Its data port; `None` means the host that was asked.
    pub data: Option<String>,
}

impl Cluster {
    /// Which host should take `bytes` of blocks that `copies` hosts must hold.
    pub fn primary(&self, bytes: u64, copies: u8) -> Primary {
        let shared = &self.shared;
        let own = Primary { name: shared.config.name.clone(), data: None };
        if copies <= 1 {
            return own;
        }
        let open = shared.links.iter().filter(|link| link.is_up());
        let open: Vec<_> = open.filter_map(|link| Some((link, link.data()?))).collect();
        let candidates: Vec<Candidate<'_>> =
            open.iter().map(|(link, _)| super::upkeep::candidate(link, 0)).collect();
        let chosen = primary(bytes, &shared.candidate(), &candidates);
        let chosen = open.into_iter().find(|(link, _)| Some(NodeId::of(&link.config.name)) == chosen);
        chosen.map_or(own, |(link, data)| Primary { name: link.config.name.clone(), data: Some(data) })
    }

    /// Tells peers where this host takes puts over TCP. Once, before [`run`](Self::run).
    pub fn set_data_port(&self, addr: std::net::SocketAddr) {
        // A second address is not expected, and the first one holds.
        let _ = self.shared.data.set(addr);
    }
}

impl Shared {
    fn candidate(&self) -> Candidate<'_> {
        let status = self.status();
        Candidate {
            node: NodeId::of(&self.config.name),
            rack: &self.config.rack,
            free_bytes: status.free_bytes,
            pool_bytes: status.pool_bytes,
            load: status.load,
        }
    }
}
