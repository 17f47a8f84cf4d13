//! Nodes of one process: an operation is a copy, made by the thread that submits it.
//!
//! It keeps every rule of a transport, so what works over it does not work by luck; and it is the fastest there is.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::grant::Grant;
use super::node::NOTICE_MAX;
use super::{Capabilities, Completion, Direction, Endpoint, Error, Node, Op, OpError, Sink, Transport};
use kvasir_memory::region::{LocalRange, Region, copy_ranges};
use kvasir_os::time::Instant;

const NAME: &str = "loopback";
/// Bytes copied between two checks whether to go on.
const CHUNK: u64 = 1 << 20;

/// The link between the nodes that were given it.
#[derive(Default)]
pub struct LoopbackNet(Mutex<HashMap<String, Weak<Station>>>);

/// A node on the net; down once its transport is gone.
struct Station {
    node: Arc<Node>,
    down: AtomicBool,
}

pub struct Loopback {
    net: Arc<LoopbackNet>,
    station: Arc<Station>,
}

impl Loopback {
    /// Joins `net` under the node's name. A node of the same name is replaced.
    pub fn new(net: Arc<LoopbackNet>, node: Arc<Node>) -> Self {
        let station = Arc::new(Station { node, down: AtomicBool::new(false) });
        let mut stations = net.0.lock();
        stations.insert(station.node.name.clone(), Arc::downgrade(&station));
        drop(stations);
        Self { net, station }
    }

    /// Leaves the net: peers then find this node down.
    pub fn shut_down(&self) {
        self.station.down.store(true, Ordering::Release);
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl Transport for Loopback {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        if region.location().is_host() {
            return Ok(());
        }
        let reason = "only memory of the host can be copied here".to_owned();
        Err(Error::Register { transport: NAME, region: format!("{region:?}"), reason })
    }

    fn unregister(&self, _region: &Region) {}

    fn address(&self) -> Option<String> {
        Some(self.station.node.name.clone())
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let stations = self.net.0.lock();
        let found = stations.get(address).and_then(Weak::upgrade);
        let unreachable = |reason: &str| Error::Unreachable {
            transport: NAME,
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let peer = found.filter(|peer| !peer.down.load(Ordering::Acquire));
        let peer = peer.ok_or_else(|| unreachable("no node of that name is on the net"))?;
        if peer.node.secret.bytes() != self.station.node.secret.bytes() {
            let reason = "the secrets differ".to_owned();
            return Err(Error::Authentication { address: address.to_owned(), reason });
        }
        Ok(Arc::new(LoopbackEndpoint { us: self.station.clone(), peer, closed: AtomicBool::new(false) }))
    }
}

fn capabilities() -> Capabilities {
    Capabilities {
        name: NAME,
        one_sided: true,
        zero_copy: false,
        message_bytes_max: u64::MAX,
        ranges_max: usize::MAX,
        queue_depth: usize::MAX,
        needs_registration: false,
        host_memory: true,
        cuda_memory: false,
    }
}

struct LoopbackEndpoint {
    us: Arc<Station>,
    peer: Arc<Station>,
    closed: AtomicBool,
}

impl LoopbackEndpoint {
    fn execute(&self, op: &Op, capabilities: &Capabilities) -> Completion {
        let (valid, result) = match self.start(op, capabilities) {
            Ok((granted, remote)) => {
                let (from, to) = match op.direction {
                    Direction::Read => (&remote, &op.local),
                    Direction::Write => (&op.local, &remote),
                };
                copy_ranges(from, to, CHUNK, || {
                    self.check_up()?;
                    if op.is_cancelled() {
                        return Err(OpError::Cancelled);
                    }
                    granted.enter().map_err(OpError::Denied)
                })
            }
            Err(error) => (0, Err(error)),
        };
        Completion { id: op.id, valid_bytes: valid, result }
    }

    fn start(
        &self,
        op: &Op,
        capabilities: &Capabilities,
    ) -> Result<(Arc<super::grant::Granted>, Vec<LocalRange>), OpError> {
        op.check(capabilities, Instant::now())?;
        self.check_up()?;
        let granted = self.peer.node.exports.authorize(
            &self.us.node.name,
            op.grant.key,
            op.grant.epoch,
            op.direction,
        )?;
        let remote = op.remote.iter().map(|range| granted.range(*range)).collect::<Result<_, _>>()?;
        Ok((granted, remote))
    }

    fn check_up(&self) -> Result<(), OpError> {
        match self.down() {
            Some(reason) => Err(OpError::PeerDown { peer: self.peer().to_owned(), reason }),
            None => Ok(()),
        }
    }

    fn up(&self) -> Result<(), Error> {
        match self.down() {
            Some(reason) => Err(Error::PeerDown { peer: self.peer().to_owned(), reason }),
            None => Ok(()),
        }
    }
}

impl Endpoint for LoopbackEndpoint {
    fn peer(&self) -> &str {
        &self.peer.node.name
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        self.up()?;
        let denied =
            |denied| Error::Denied { peer: self.peer().to_owned(), segment: segment.to_owned(), denied };
        Ok(Arc::new(self.peer.node.exports.grant(segment, &self.us.node.name).map_err(denied)?.describe()))
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        let capabilities = capabilities();
        for op in ops {
            let completion = self.execute(&op, &capabilities);
            // What was lent is given back before the completion says so.
            drop(op);
            sink.complete(completion);
        }
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        self.up()?;
        if message.len() > NOTICE_MAX {
            return Err(Error::NoticeTooLong { len: message.len() });
        }
        self.peer.node.notices.push(&self.us.node.name, message);
        Ok(())
    }

    fn down(&self) -> Option<String> {
        let closed = self.closed.load(Ordering::Acquire) || self.us.down.load(Ordering::Acquire);
        let left = self.peer.down.load(Ordering::Acquire);
        if closed { Some("the endpoint is closed".into()) } else { left.then(|| "it left the net".into()) }
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::conformance::{self, Pair};
    use crate::transport::node::Secret;

    fn pair() -> Pair {
        let net = Arc::new(LoopbackNet::default());
        let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"secret"), 1));
        let (client_node, server_node) = (node("client"), node("server"));
        let server = Arc::new(Loopback::new(net.clone(), server_node.clone()));
        let client = Arc::new(Loopback::new(net, client_node.clone()));
        let vanishing = server.clone();
        Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
    }

    #[test]
    fn keeps_the_rules() {
        conformance::run(&pair);
    }

    #[test]
    fn nodes_with_another_secret_are_refused() {
        let net = Arc::new(LoopbackNet::default());
        let transport = |name: &str, secret: &[u8]| {
            Loopback::new(net.clone(), Arc::new(Node::new(name, Secret::new(secret), 1)))
        };
        let (_a, b) = (transport("a", b"one"), transport("b", b"two"));
        assert!(matches!(b.connect("a"), Err(Error::Authentication { .. })));
        assert!(matches!(b.connect("nobody"), Err(Error::Unreachable { .. })));
    }
}
