//! RDMA by the verbs library, opened at run time.
//!
//! The same binary starts where there is no library, no device or no driver, and says "no RDMA devices": nothing
//! here is linked. One-sided writes and reads go over reliable connections ([`qp`]), which are set up over a
//! control stream ([`connect`]) and announce completions on a descriptor ([`cq`]). Why not a crate:
//! `docs/design/0002-verbs-at-run-time.md`.
//!
//! [`Rdma`] is the transport on top. One transport is one rail: a device, a TCP address for control, and one thread
//! for completions. An endpoint is a queue pair and its control stream, on which the two meet as over TCP ([`greet`]), with
//! TLS if the settings ask for it; the stream carries grants, notices and heartbeats, and when it ends so does the queue pair, on both
//! sides. Every peer has memory keys of its own for each segment, which die with its last lease, its epoch, or when the
//! segment is revoked.
#![allow(unsafe_code)]

mod client;
pub mod connect;
pub mod cq;
mod device;
mod error;
mod load;
mod memory;
mod plan;
mod progress;
pub mod qp;
mod registry;
mod server;
mod sys;
pub mod wire;

use std::io;
use std::sync::{Arc, Weak};

use super::tcp::Tls;
use super::tcp::greet;
use super::tcp::socket::{Deadlined, Socket};
use super::{Capabilities, Endpoint, Error as TransportError, Node, Transport};
use client::Link;
pub use device::{Device, DeviceOptions, Limits, device_names};
pub use error::{Error, Failure};
use kvasir_memory::region::Region;
use kvasir_os::net::{SocketAddr, TcpListener, TcpStream};
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::listener::{self, Listener, Seat};
pub use memory::MemoryRegion;
use progress::Progress;
use registry::Registry;
use server::Fences;
use wire::Inbox;

const NAME: &str = "rdma";
/// The most bytes and ranges of one operation; it is cut into work requests.
const OP_BYTES_MAX: u64 = 1 << 30;
const OP_RANGES_MAX: usize = 4096;

/// Settings of one rail.
#[derive(Clone, Debug)]
pub struct RdmaConfig {
    /// As `ibv_devices` names it.
    pub device: String,
    pub options: DeviceOptions,
    pub queue: qp::QueueOptions,
    /// Where peers reach the control stream; port 0 picks a free one. The default `None` means that it only connects out.
    pub listen: Option<SocketAddr>,
    /// Accept only nodes that show a certificate of the cluster for their own name, and encrypt the control stream. Both sides
    /// must have it, or neither. What adapters write and read travels in the clear in any case.
    pub tls: Option<Tls>,
    /// Default 1 s.
    pub connect_timeout: Duration,
    /// How long a handshake may take. Default 2 s.
    pub handshake_timeout: Duration,
    /// An idle endpoint pings this often. Default 200 ms.
    pub heartbeat: Duration,
    /// A peer silent for this long is down. Default 700 ms: with one heartbeat on top, known within a second.
    pub peer_timeout: Duration,
    /// The most accepted connections, handshakes included; more are closed at once. Default 1,024.
    pub connections_max: usize,
    /// The most operations of one endpoint in flight. Default 65,536.
    pub queue_depth: usize,
}

impl RdmaConfig {
    /// The defaults, on this device.
    pub fn of_device(name: &str) -> Self {
        Self {
            device: name.to_owned(),
            options: DeviceOptions::default(),
            queue: qp::QueueOptions::default(),
            listen: None,
            tls: None,
            connect_timeout: Duration::from_secs(1),
            handshake_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_millis(200),
            peer_timeout: Duration::from_millis(700),
            connections_max: 1024,
            queue_depth: 1 << 16,
        }
    }
}

/// What the threads of a transport share.
struct Shared {
    node: Arc<Node>,
    config: RdmaConfig,
    device: Arc<Device>,
    capabilities: Capabilities,
    registry: Registry,
    progress: Progress,
    fences: Fences,
}

/// The transport over one device.
pub struct Rdma {
    shared: Arc<Shared>,
    listening: Option<(SocketAddr, Listener)>,
}

impl Rdma {
    /// Opens the device and, where the configuration says so, listens for peers.
    ///
    /// # Errors
    /// One that begins with "no RDMA devices" if there are none, or whatever went wrong with the device or the socket.
    pub fn new(node: Arc<Node>, config: RdmaConfig) -> Result<Self, Error> {
        let failed = |source| Error::Control { step: "listening", source };
        let device = Device::open(&config.device, config.options.clone())?;
        let door = config.listen.map(TcpListener::bind).transpose().map_err(failed)?;
        let shared = Arc::new(Shared {
            node,
            capabilities: capabilities(&config, &device),
            registry: Registry::new(&device),
            progress: Progress::new(&device)?,
            fences: Fences::default(),
            device,
            config,
        });
        // From here on dropping it stops what was started.
        let mut transport = Self { shared: Arc::clone(&shared), listening: None };
        let progressing = Arc::clone(&shared);
        spawn("rdma-progress", move || progressing.progress.run(|| progressing.registry.sweep()))?;
        if let Some(door) = door {
            let address = door.local_addr().map_err(failed)?;
            let limits = listener::Limits::of(shared.config.connections_max);
            // The peer of a connection that fails sees its stream end, and connects again; nobody else must be told.
            let serve = move |stream, seat: &Seat| drop(server::serve(&shared, stream, seat));
            let listener = Listener::start(door, "rdma-serve", limits, serve, drop).map_err(failed)?;
            transport.listening = Some((address, listener));
        }
        Ok(transport)
    }

    /// Ends every accepted connection and takes no more: peers then find this node down.
    pub fn shut_down(&self) {
        if let Some((_, listener)) = &self.listening {
            listener.stop();
        }
    }

    fn link(&self, address: &str) -> Result<Arc<Link>, TransportError> {
        let (transport, shared, config) = (NAME, &self.shared, &self.shared.config);
        let failed = |reason| TransportError::Unreachable { transport, address: address.to_owned(), reason };
        let io = |error: io::Error| failed(error.to_string());
        let socket = address.parse().map_err(|_| {
            let reason = "write IP:PORT".to_owned();
            TransportError::Address { transport, address: address.to_owned(), reason }
        })?;
        let stream = TcpStream::connect_timeout(&socket, config.connect_timeout).map_err(io)?;
        let deadline = Instant::now() + config.handshake_timeout;
        let met = greet::connect(stream, config.tls.as_ref(), &shared.node, &shared.node.cluster, deadline);
        let (control, peer) = met.map_err(|error| error.of(NAME, address))?;
        let id = shared.progress.id();
        let epochs = connect::Epochs { ours: shared.node.exports.epoch(), fence: shared.fences.of(&peer) };
        let (device, channel) = (&shared.device, &shared.progress.channel);
        let mut meeting = Deadlined { socket: &control, deadline };
        let connection = connect::connect(device, channel, id, config.queue, epochs, &mut meeting)
            .map_err(|error| failed(error.to_string()))?;
        shared.fences.raise(&peer, connection.peer.epoch);
        let link = Link::new(Arc::clone(shared), peer, id, connection.queue, control);
        let heard = Arc::downgrade(&link);
        spawn("rdma-listen", move || listen(&heard)).map_err(|error| failed(error.to_string()))?;
        Ok(link)
    }
}

impl Drop for Rdma {
    fn drop(&mut self) {
        self.shut_down();
        self.shared.progress.stop();
    }
}

impl Transport for Rdma {
    fn capabilities(&self) -> Capabilities {
        self.shared.capabilities.clone()
    }

    fn register(&self, region: &Region) -> Result<(), TransportError> {
        self.shared.registry.register(region).map_err(|error| TransportError::Register {
            transport: NAME,
            region: format!("{region:?}"),
            reason: error.to_string(),
        })
    }

    fn unregister(&self, region: &Region) {
        self.shared.registry.unregister(region);
    }

    fn address(&self) -> Option<String> {
        self.listening.as_ref().map(|(address, _)| address.to_string())
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, TransportError> {
        Ok(self.link(address)?)
    }

    fn revoked(&self) {
        self.shared.registry.sweep();
    }
}

/// Listens to a link's peer until the link is gone. The link is held during one answer only, so that it can be dropped.
fn listen(link: &Weak<Link>) {
    let (mut inbox, mut heard) = (Inbox::default(), Instant::now());
    while let Some(link) = link.upgrade() {
        if let Err(error) = link.listen(&mut inbox, &mut heard) {
            return link.go_down(&error.to_string());
        }
    }
}

/// The control stream for as long as one read or write on it may take.
fn within(socket: &Socket, timeout: Duration) -> Deadlined<'_> {
    Deadlined { socket, deadline: Instant::now() + timeout }
}

fn capabilities(config: &RdmaConfig, device: &Device) -> Capabilities {
    Capabilities {
        name: NAME,
        one_sided: true,
        zero_copy: false,
        message_bytes_max: OP_BYTES_MAX,
        ranges_max: OP_RANGES_MAX,
        queue_depth: config.queue_depth,
        needs_registration: true,
        host_memory: true,
        cuda_memory: device.takes_dma_bufs(),
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = thread::Builder::new().name(name.into()).spawn(run);
    spawned.map(|_| ()).map_err(|source| Error::Control { step: "starting a thread", source })
}
