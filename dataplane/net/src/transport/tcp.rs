//! Transfers over TCP: framed, in order, straight from and to registered memory.
//!
//! Requests of many operations leave in one system call and their answers come back in as few; payloads are gathered
//! from and scattered into memory by the kernel, without a copy of our own. A peer proves that it knows the secret
//! before it can ask anything ([`auth`](super::auth)). An endpoint pings when it hears nothing; a peer that stays
//! silent, or whose connection breaks, fails everything at once.
//!
//! One transport is one rail: `bind` picks the local address, and with it the network card. Endpoints own `connections`
//! connections each, which share the load. Threads: one accepts, one per connection on either side; blocked threads
//! cost nothing, and a thread that does I/O for one peer alone needs no readiness bookkeeping.

mod asked;
mod client;
mod endpoint;
pub mod greet;
mod queue;
mod server;
pub mod socket;
mod tls;
pub mod wire;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Capabilities, Endpoint, Error, Node, Transport};
use endpoint::{Dial, TcpEndpoint};
use kvasir_memory::region::Region;
use kvasir_os::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::listener::{self, Listener, Seat};
use server::Serving;
#[cfg(any(test, feature = "conformance"))]
pub use tls::authority;
pub use tls::{Tls, TlsError, TlsFiles};

const NAME: &str = "tcp";

/// Settings of one rail.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where peers are accepted; port 0 picks a free one. The default `None` means that it only connects out.
    pub listen: Option<SocketAddr>,
    /// The local address to connect from, which picks the network card. The default `None` leaves that to the routes of the system.
    pub bind: Option<IpAddr>,
    /// Connections of one endpoint. Default 1. More help where one cannot fill the link.
    pub connections: usize,
    /// Send a CRC-32 with every payload and check it. Default false: TCP's own and the block's checksum remain.
    pub checksum: bool,
    /// Encrypt, and accept only nodes that show a certificate of the cluster for their own name. Both sides must have
    /// it, or neither. With the default `None`, bytes travel in the clear, and the secret alone decides who may ask.
    pub tls: Option<Tls>,
    /// Default 1 s.
    pub connect_timeout: Duration,
    /// How long a handshake may take in total. Default 2 s.
    pub handshake_timeout: Duration,
    /// An idle endpoint pings this often. Default 200 ms.
    pub heartbeat: Duration,
    /// A peer that owes an answer and is silent for this long is down. Default 700 ms: with one heartbeat on top, a
    /// dead peer is known within a second.
    pub peer_timeout: Duration,
    /// The most accepted connections, handshakes included; more are closed at once. Default 1,024.
    pub connections_max: usize,
    /// The most operations of one connection in flight. Default 65,536.
    pub queue_depth: usize,
    /// After about so many records (of 16 KiB, or a message) a connection that encrypts is replaced, while what is in flight on it ends.
    /// Default 2^22, a quarter of what one key may encrypt.
    pub records_max: u64,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            listen: None,
            bind: None,
            connections: 1,
            checksum: false,
            tls: None,
            connect_timeout: Duration::from_secs(1),
            handshake_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_millis(200),
            peer_timeout: Duration::from_millis(700),
            connections_max: 1024,
            queue_depth: 1 << 16,
            records_max: 1 << 22,
        }
    }
}

pub struct Tcp {
    node: Arc<Node>,
    config: TcpConfig,
    listening: Option<(SocketAddr, Listener)>,
    /// Connections that were not from peers.
    strangers: Arc<AtomicU64>,
}

impl Tcp {
    /// Starts to listen, if the configuration says so.
    pub fn new(node: Arc<Node>, config: TcpConfig) -> io::Result<Self> {
        let strangers = Arc::new(AtomicU64::new(0));
        let mut listening = None;
        if let Some(address) = config.listen {
            let door = TcpListener::bind(address)?;
            let address = door.local_addr()?;
            let (node, settings, strangers) = (node.clone(), config.clone(), strangers.clone());
            let serve = move |stream, seat: &Seat| {
                if serve(&node, &settings, stream, seat).is_none() {
                    strangers.fetch_add(1, Ordering::AcqRel);
                }
            };
            let limits = listener::Limits::of(config.connections_max);
            listening = Some((address, Listener::start(door, "kvasir-tcp-serve", limits, serve, drop)?));
        }
        Ok(Self { node, config, listening, strangers })
    }

    /// Connections accepted now, and those refused since the start: strangers, and those above the limit.
    pub fn accepted(&self) -> (usize, u64) {
        let (open, full) =
            self.listening.as_ref().map_or((0, 0), |(_, listener)| (listener.open(), listener.refused()));
        (open, full + self.strangers.load(Ordering::Acquire))
    }

    /// Stops listening and ends accepted connections. Endpoints that this node opened stay.
    pub fn shut_down(&self) {
        if let Some((_, listener)) = &self.listening {
            listener.stop();
        }
    }
}

impl Transport for Tcp {
    fn capabilities(&self) -> Capabilities {
        capabilities(&self.config)
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        if region.location().is_host() {
            return Ok(());
        }
        let reason = "sockets read and write memory of the host only".to_owned();
        Err(Error::Register { transport: NAME, region: format!("{region:?}"), reason })
    }

    fn unregister(&self, _region: &Region) {}

    fn address(&self) -> Option<String> {
        self.listening.as_ref().map(|(address, _)| address.to_string())
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let address = address.parse().map_err(|error: std::net::AddrParseError| Error::Address {
            transport: NAME,
            address: address.to_owned(),
            reason: error.to_string(),
        })?;
        let dial = Dial { node: Arc::clone(&self.node), config: self.config.clone(), address };
        Ok(Arc::new(TcpEndpoint::connect(dial)?))
    }
}

fn capabilities(config: &TcpConfig) -> Capabilities {
    Capabilities {
        name: NAME,
        one_sided: false,
        zero_copy: false,
        message_bytes_max: wire::PAYLOAD_MAX,
        ranges_max: wire::RANGES_MAX,
        queue_depth: config.queue_depth,
        needs_registration: false,
        host_memory: true,
        cuda_memory: false,
    }
}

/// From the handshake to the end of one connection. Returns `None` if it was not a peer's.
fn serve(node: &Node, config: &TcpConfig, stream: TcpStream, seat: &Seat) -> Option<()> {
    let deadline = Instant::now() + config.handshake_timeout;
    let (socket, peer) = greet::accept(stream, config.tls.as_ref(), node, &node.cluster, deadline).ok()?;
    if !node.admits(&peer) {
        return None;
    }
    seat.greeted();
    // Clients ping every heartbeat, so this is generous.
    let patience = config.peer_timeout * 8;
    Serving::new(node, &peer, &socket, config.checksum, patience).run();
    Some(())
}

#[cfg(test)]
mod tests;
