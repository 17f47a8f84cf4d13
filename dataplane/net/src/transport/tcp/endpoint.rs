//! A peer over one or more connections.
//!
//! A key may encrypt only so much. A connection that nears this is replaced: the next one takes what is asked from then on, and the old one
//! ends once nothing is in flight on it.

use parking_lot::RwLock;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::client::Connection;
use super::{NAME, TcpConfig, capabilities, greet};
use crate::transport::node::NOTICE_MAX;
use crate::transport::{Cancel, Capabilities, Endpoint, Error, Grant, Node, Op, Sink};
use kvasir_os::net::SocketAddr;
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};

const CLOSED: &str = "the endpoint was closed";

/// How to connect to a peer.
pub(super) struct Dial {
    pub(super) node: Arc<Node>,
    pub(super) config: TcpConfig,
    pub(super) address: SocketAddr,
}

impl Dial {
    fn connect(&self) -> Result<Arc<Connection>, Error> {
        let address = self.address.to_string();
        let unreachable = |error: io::Error| Error::Unreachable {
            transport: NAME,
            address: address.clone(),
            reason: error.to_string(),
        };
        let TcpConfig { bind, checksum, heartbeat, peer_timeout, ref tls, .. } = self.config;
        let stream = kvasir_os::net::connect_from(bind, self.address, self.config.connect_timeout);
        let stream = stream.map_err(unreachable)?;
        let deadline = Instant::now() + self.config.handshake_timeout;
        let met = greet::connect(stream, tls.as_ref(), &self.node, &self.node.cluster, deadline);
        let (socket, peer) = met.map_err(|error| error.of(NAME, &address))?;
        let connection =
            Connection::new(peer, socket, checksum, heartbeat, peer_timeout).map_err(unreachable)?;
        let running = connection.clone();
        let receiver = thread::Builder::new().name("kvasir-tcp-recv".into());
        receiver.spawn(move || running.run()).map_err(unreachable)?;
        Ok(connection)
    }
}

/// See the [module](self). The first connection that breaks ends it.
pub(super) struct TcpEndpoint {
    peer: String,
    capabilities: Capabilities,
    lines: Arc<Lines>,
    next: AtomicUsize,
}

/// The connections of an endpoint.
struct Lines {
    dial: Dial,
    now: RwLock<Now>,
    /// A thread is replacing worn ones.
    renewing: AtomicBool,
}

struct Now {
    connections: Vec<Arc<Connection>>,
    /// Replaced, with something in flight.
    replaced: Vec<Arc<Connection>>,
    closed: bool,
}

impl TcpEndpoint {
    pub(super) fn connect(dial: Dial) -> Result<Self, Error> {
        let first = dial.connect()?;
        let count = dial.config.connections.max(1);
        let endpoint = Self {
            peer: first.peer.clone(),
            capabilities: capabilities(&dial.config),
            lines: Arc::new(Lines {
                dial,
                now: RwLock::new(Now { connections: vec![first], replaced: Vec::new(), closed: false }),
                renewing: AtomicBool::new(false),
            }),
            next: AtomicUsize::new(0),
        };
        for _ in 1..count {
            let next = endpoint.lines.dial.connect()?;
            endpoint.lines.now.write().connections.push(next);
        }
        Ok(endpoint)
    }

    fn peer_down(&self, reason: String) -> Error {
        Error::PeerDown { peer: self.peer.clone(), reason }
    }

    /// The connection of this number, as it is now.
    fn line(&self, number: usize) -> Arc<Connection> {
        let connection = self.lines.at(number);
        if connection.is_worn(self.lines.dial.config.records_max) {
            self.lines.renew();
        }
        connection
    }
}

impl Endpoint for TcpEndpoint {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        let answer = self.line(0).open(segment).map_err(|reason| self.peer_down(reason))?;
        answer.map_err(|denied| Error::Denied {
            peer: self.peer.clone(),
            segment: segment.to_owned(),
            denied,
        })
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        let count = self.lines.dial.config.connections.max(1);
        if count == 1 {
            return self.line(0).submit(ops, &self.capabilities, sink);
        }
        let first = self.next.fetch_add(ops.len(), Ordering::Relaxed);
        let mut shares: Vec<Vec<Op>> = vec![Vec::new(); count];
        for (n, op) in ops.into_iter().enumerate() {
            shares[first.wrapping_add(n) % count].push(op);
        }
        for (number, share) in shares.into_iter().enumerate().filter(|(_, share)| !share.is_empty()) {
            self.line(number).submit(share, &self.capabilities, sink);
        }
    }

    fn cancel(&self, cancel: &Cancel) {
        cancel.set();
        self.lines.all().iter().for_each(|connection| connection.cancel(cancel));
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        if message.len() > NOTICE_MAX {
            return Err(Error::NoticeTooLong { len: message.len() });
        }
        self.line(0).notify(message).map_err(|reason| self.peer_down(reason))
    }

    fn down(&self) -> Option<String> {
        self.lines.now.read().connections.iter().find_map(|connection| connection.down())
    }

    fn in_flight(&self) -> usize {
        self.lines.all().iter().map(|connection| connection.in_flight()).sum()
    }

    fn close(&self) {
        self.lines.now.write().closed = true;
        // No lock is held, because closing completes what is in flight.
        self.lines.all().iter().for_each(|connection| connection.fail(CLOSED));
    }
}

impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}

impl Lines {
    fn at(&self, number: usize) -> Arc<Connection> {
        Arc::clone(&self.now.read().connections[number])
    }

    fn all(&self) -> Vec<Arc<Connection>> {
        let now = self.now.read();
        now.connections.iter().chain(&now.replaced).cloned().collect()
    }

    /// Has worn connections replaced, on a thread of its own.
    fn renew(self: &Arc<Self>) {
        if self.renewing.swap(true, Ordering::AcqRel) {
            return;
        }
        let lines = Arc::clone(self);
        let renew = move || {
            lines.replace_worn();
            lines.renewing.store(false, Ordering::Release);
        };
        if thread::Builder::new().name("kvasir-tcp-renew".into()).spawn(renew).is_err() {
            self.renewing.store(false, Ordering::Release);
        }
    }

    fn replace_worn(&self) {
        /// Between two attempts at a peer that is not there, or is another one now.
        const PAUSE: Duration = Duration::from_secs(1);
        for number in 0..self.dial.config.connections.max(1) {
            let old = self.at(number);
            if !old.is_worn(self.dial.config.records_max) {
                continue;
            }
            match self.dial.connect() {
                Ok(new) if new.peer == old.peer => self.replace(number, &old, new),
                other => {
                    // It keeps what it has; who asks next begins another attempt.
                    let _ = other.inspect(|stranger| stranger.fail("it has another name"));
                    return thread::sleep(PAUSE);
                }
            }
        }
    }

    fn replace(&self, number: usize, old: &Arc<Connection>, new: Arc<Connection>) {
        {
            let mut now = self.now.write();
            if now.closed {
                drop(now);
                return new.fail(CLOSED);
            }
            now.connections[number] = new;
            now.replaced.push(Arc::clone(old));
        }
        // Two hold it here, and its receiving thread. Whoever else does has found it before, and may not have asked yet.
        while old.down().is_none() && (Arc::strong_count(old) > 3 || !old.is_idle()) {
            thread::sleep(Duration::from_millis(10));
        }
        old.fail("another connection has taken its place");
        self.now.write().replaced.retain(|connection| !Arc::ptr_eq(connection, old));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::{Tcp, authority::Authority};
    use super::*;
    use crate::transport::node::Secret;
    use crate::transport::{Access, CompletionQueue, Direction, Transport};
    use kvasir_memory::buffer::Buffer;
    use kvasir_memory::region::Region;

    const PATIENCE: Duration = Duration::from_secs(120);
    const BYTES: usize = 64 << 10;

    /// A node with some bytes, and an endpoint to it whose connections are soon worn.
    fn pair(in_kernel: bool) -> (Tcp, TcpEndpoint) {
        let (authority, secret) = (Authority::new(), || Secret::new(b"secret"));
        let config = |name: &str| TcpConfig {
            listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
            connections: 2,
            tls: Some(authority.tls(name).in_kernel(in_kernel)),
            connect_timeout: PATIENCE,
            handshake_timeout: PATIENCE,
            peer_timeout: PATIENCE,
            records_max: 32,
            ..TcpConfig::default()
        };
        let node = Arc::new(Node::new("server", secret(), 1));
        let bytes = Region::of_buffer(Buffer::zeroed(BYTES));
        let pattern: Vec<u8> = (0..BYTES).map(|n| (n % 251) as u8).collect();
        bytes.range(0, BYTES as u64).unwrap().copy_in(&pattern);
        node.exports.export("kv", vec![bytes], Access::Read, PATIENCE).unwrap();
        let server = Tcp::new(node, config("server")).unwrap();
        let address = server.address().unwrap().parse().unwrap();
        let node = Arc::new(Node::new("client", secret(), 1));
        let dial = Dial { node, config: config("client"), address };
        (server, TcpEndpoint::connect(dial).unwrap())
    }

    /// Asks while connections are replaced, and what was asked of the old ones arrives.
    fn replaces_worn_connections(in_kernel: bool) {
        const AT_ONCE: usize = 8;
        let (server, endpoint) = pair(in_kernel);
        let (first, queue) = (Arc::downgrade(&endpoint.lines.at(0)), CompletionQueue::new());
        let grant = endpoint.open("kv").unwrap();
        let ours = Region::of_buffer(Buffer::zeroed(AT_ONCE * BYTES));
        let mut buffer = vec![0; BYTES];
        for _ in 0..64 {
            let place = |n: usize| ours.range((n * BYTES) as u64, BYTES as u64).unwrap();
            let read = |n: usize| Op {
                id: n as u64,
                direction: Direction::Read,
                grant: grant.clone(),
                local: vec![place(n)],
                remote: vec![grant.range(0, BYTES as u64)],
                cancel: None,
            };
            endpoint.submit((0..AT_ONCE).map(read).collect(), &queue.sink());
            for _ in 0..AT_ONCE {
                let done = queue.wait(Instant::now() + PATIENCE).expect("a completion");
                assert_eq!(done.result, Ok(()));
                place(done.id as usize).copy_out(&mut buffer);
                assert!(buffer.iter().enumerate().all(|(n, byte)| *byte == (n % 251) as u8));
            }
        }
        let until = |what: &str, is: &dyn Fn() -> bool| {
            let deadline = Instant::now() + PATIENCE;
            while !is() {
                assert!(Instant::now() < deadline, "{what}");
                thread::sleep(Duration::from_millis(1));
            }
        };
        until("the old ones have ended", &|| endpoint.lines.all().len() == 2 && server.accepted().0 == 2);
        assert!(first.upgrade().is_none(), "the first was replaced");
        assert_eq!(endpoint.down(), None);
        drop(endpoint);
        until("all have ended", &|| server.accepted().0 == 0);
    }

    #[test]
    fn worn_connections_are_replaced_amid_reads() {
        replaces_worn_connections(false);
    }

    #[test]
    #[ignore = "needs TLS in the kernel: cargo xtask test --rdma"]
    fn in_the_kernel_worn_connections_are_replaced_amid_reads() {
        replaces_worn_connections(true);
    }
}
