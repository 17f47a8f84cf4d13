//! What the links between nodes of one host have in common: memory travels as descriptors over a Unix socket.
//!
//! Opening a segment sends a descriptor per region, which the peer turns into memory of its own ([`Reach`] says how); an
//! operation is a copy, made by the thread that submits it.
//!
//! Each connection has a control page that the server writes and the client only reads: one word per grant, which
//! holds part of the grant's key while it lives. A revoked grant's word is cleared before the revocation returns, and
//! operations check it before each chunk. That is a rule among nodes which share a secret, not a wall: memory once
//! mapped stays mapped, so a revoked peer that breaks the rule still reaches it.

mod endpoint;
mod server;
mod socket;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use self::endpoint::LocalEndpoint;
use self::socket::receive_fd;
use super::auth::{self, AuthError};
use super::deadlined::Deadlined;
use super::grant::RemoteRegion;
use super::{Access, Capabilities, Direction, Endpoint, Error, Node, OpError, Transport};
use kvasir_memory::host::Mapping;
use kvasir_memory::region::{LocalRange, Region};
use kvasir_protocol::listener::{self, Listener, Seat};
use kvasir_protocol::stream::connect_unix;

const PAGE: u64 = 4096;
/// How long a node that has our socket may take to accept somebody.
const ANSWER: Duration = Duration::from_secs(1);
/// The most accepted connections; more are closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// Grants of one connection alive at once: words of its control page.
pub const SLOTS: usize = PAGE as usize / 4;

/// Settings of the link between nodes of one host.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// The socket where peers are accepted; a file left there by an earlier run is replaced. `None` means that it only connects out.
    pub listen: Option<PathBuf>,
    /// How long a handshake, or the answer to an `open`, may take in total. Default 2 s.
    pub timeout: Duration,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self { listen: None, timeout: Duration::from_secs(2) }
    }
}

/// How the nodes of one host reach each other's memory, and copy.
pub trait Reach: Send + Sync {
    fn capabilities(&self) -> Capabilities;

    /// See [`Transport::register`].
    fn register(&self, region: &Region) -> Result<(), Error>;

    /// See [`Transport::unregister`].
    fn unregister(&self, region: &Region);

    /// The descriptor that gives a peer the region, with no more rights than `access`. Returns `None` if peers cannot have the
    /// region over this link.
    fn give(&self, region: &Region, access: Access) -> Option<OwnedFd>;

    /// A peer's region, from the descriptor that its [`give`](Self::give) made. The descriptor is checked.
    fn take(&self, fd: OwnedFd, region: &RemoteRegion, writable: bool) -> io::Result<Taken>;

    /// Copies the bytes of one list to the other in chunks, in order, and asks `go_on` before each. Returns how many
    /// leading bytes are in place, and why it stopped before the end. Nothing is under way when it returns.
    fn copy(
        &self,
        direction: Direction,
        from: &[LocalRange],
        to: &[LocalRange],
        go_on: &mut dyn FnMut() -> Result<(), OpError>,
    ) -> (u64, Result<(), OpError>);
}

/// A peer's region, usable here.
pub struct Taken {
    pub region: Region,
    /// Its bytes, where they are in memory of the host.
    pub mapping: Option<Arc<Mapping>>,
}

impl Taken {
    /// Maps a peer's memory of the host.
    pub fn mapped(fd: &OwnedFd, region: &RemoteRegion, writable: bool) -> io::Result<Self> {
        let mapping = Arc::new(Mapping::new(fd.as_fd(), region.len, writable)?);
        Ok(Self { region: Region::of_mapping(mapping.clone()), mapping: Some(mapping) })
    }
}

/// The descriptor of a region of the host, that maps as `access` allows.
pub fn descriptor(region: &Region, access: Access) -> Option<OwnedFd> {
    match access {
        Access::Read => region.readonly_fd(),
        _ => region.fd()?.try_clone_to_owned().ok(),
    }
}

/// One node's end of such links.
pub struct Local {
    pub node: Arc<Node>,
    config: LocalConfig,
    reach: Arc<dyn Reach>,
    listener: Option<Listener>,
}

impl Local {
    /// Starts to listen, if the configuration says so.
    pub fn new(node: Arc<Node>, reach: Arc<dyn Reach>, config: LocalConfig) -> io::Result<Self> {
        let mut listener = None;
        if let Some(path) = &config.listen {
            let door = listen(path)?;
            let (node, reach, timeout) = (node.clone(), reach.clone(), config.timeout);
            let serve = move |stream, seat: &Seat| {
                // The peer knows why the connection ended, as it ended it.
                let _ = server::serve(stream, seat, &node, &*reach, timeout);
            };
            let limits = listener::Limits::of(CONNECTIONS_MAX);
            listener = Some(Listener::start(door, "kvasir-local-serve", limits, serve, drop)?);
        }
        Ok(Self { node, config, reach, listener })
    }

    /// Stops listening and ends accepted connections: peers find this node down.
    pub fn shut_down(&self) {
        if let (Some(listener), Some(path)) = (&self.listener, &self.config.listen)
            && listener.stop()
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl Transport for Local {
    fn capabilities(&self) -> Capabilities {
        self.reach.capabilities()
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        self.reach.register(region)
    }

    fn unregister(&self, region: &Region) {
        self.reach.unregister(region);
    }

    fn address(&self) -> Option<String> {
        self.config.listen.as_ref().map(|path| path.display().to_string())
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let unreachable = |error: io::Error| Error::Unreachable {
            transport: self.reach.capabilities().name,
            address: address.to_owned(),
            reason: error.to_string(),
        };
        let mut stream = connect_unix(Path::new(address), self.config.timeout).map_err(unreachable)?;
        let peer =
            auth::connect(&mut Deadlined::new(&stream, self.config.timeout), &self.node, &self.node.cluster);
        let peer = peer.map_err(|error| match error {
            AuthError::Io(away) if !auth::is_hanging_up(&away) => unreachable(away),
            error => Error::Authentication { address: address.to_owned(), reason: error.to_string() },
        })?;
        stream.set_read_timeout(Some(self.config.timeout)).map_err(unreachable)?;
        stream.set_write_timeout(Some(self.config.timeout)).map_err(unreachable)?;
        let control = receive_fd(&mut stream).and_then(|fd| Mapping::new(fd.as_fd(), PAGE, false));
        let endpoint = LocalEndpoint::new(peer, self.reach.clone(), control.map_err(unreachable)?, stream);
        Ok(Arc::new(endpoint.map_err(unreachable)?))
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match connect_unix(path, ANSWER) {
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another node listens there")),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another node listens there, and accepts nobody",
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
        Err(_) => {}
    }
    UnixListener::bind(path)
}

/// The control page's word for a living grant; never 0.
fn word_of(key: u64) -> u32 {
    (key >> 32) as u32 | 1
}
