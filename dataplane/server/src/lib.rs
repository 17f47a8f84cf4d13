//! Serves a store on a Unix socket and on TCP: one blocking thread per connection, a cap on their number.
//!
//! A connection on the Unix socket is local: it gets the pool's descriptor, reads leased blocks in place and fills
//! reservations in place. A connection on TCP is remote: bytes travel in the frames, straight from and into the
//! pool. When a connection ends, for whatever reason, its reservations are aborted and its leases released.

pub mod access;
mod config;
mod connection;
mod handover;
pub mod node;
mod outcome;

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use self::access::{Gate, Identity, Shown};
use self::connection::Connection;
use self::node::Node;
pub use config::ServerConfig;
use kvasir_os::net::{SocketAddr, TcpListener, TcpStream};
use kvasir_os::thread::{self, JoinHandle};
use kvasir_os::time::Duration;
use kvasir_protocol::listener::{Door, Handle, Limits, Listener, Seat};
use kvasir_protocol::stream::{Stream, connect_unix};
use kvasir_protocol::wire::{Op, Reply};
use kvasir_store::times::{Times, TimesTaken};

/// How long a host that has our socket may take to accept somebody.
const ANSWER: Duration = Duration::from_secs(1);

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("neither a socket path nor a TCP address is set: nobody could reach the store")]
    Nowhere,
    #[error("socket {path} is in use by a running host; stop that one or choose another path")]
    SocketInUse { path: PathBuf },
    #[error("{path} exists and is not a socket; remove it or choose another path")]
    NotASocket { path: PathBuf },
    #[error("socket {path} could not be opened: {source}")]
    Socket { path: PathBuf, source: io::Error },
    #[error("data port {addr} could not be opened: {source}")]
    Tcp { addr: SocketAddr, source: io::Error },
    #[error("no thread for {name}: {source}")]
    Thread { name: &'static str, source: io::Error },
}

/// Where to listen; at least one.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Callers are known by the credentials that the kernel tells.
    pub unix: Option<PathBuf>,
    /// Callers need a token, or a certificate where the gate asks for one. Whether there is TLS is for the gate to say
    /// ([`Gate::dress`]).
    pub tcp: Option<SocketAddr>,
    /// The mode of the Unix socket. A caller that can open it is still asked who it is.
    pub mode: u32,
}

impl Default for Listen {
    fn default() -> Self {
        Self { unix: None, tcp: None, mode: 0o600 }
    }
}

/// Counts of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerMetrics {
    /// Open now.
    pub connections: u64,
    pub accepted: u64,
    /// Turned away: over the cap, or of another user.
    pub refused: u64,
    /// Ended because the peer broke the protocol or stalled in a frame.
    pub broken: u64,
    pub requests: u64,
    pub payload_in_bytes: u64,
    pub payload_out_bytes: u64,
    /// From a request's first bytes until its answer is handed to the connection, by [`Call`].
    pub times: [TimesTaken; Call::ALL.len()],
}

/// What a request asks for, as far as times are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Get,
    /// A put with the bytes of its blocks, which only clients over TCP send.
    Put,
    /// With [`Commit`](Self::Commit), the put of a client that fills blocks in place.
    Reserve,
    Commit,
    Exists,
    Other,
}

impl Call {
    pub const ALL: [Self; 6] = [Self::Get, Self::Put, Self::Reserve, Self::Commit, Self::Exists, Self::Other];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Reserve => "reserve",
            Self::Commit => "commit",
            Self::Exists => "exists",
            Self::Other => "other",
        }
    }

    fn of(op: Op) -> Self {
        match op {
            Op::Get => Self::Get,
            Op::Put => Self::Put,
            Op::Reserve => Self::Reserve,
            Op::Commit => Self::Commit,
            Op::Exists => Self::Exists,
            _ => Self::Other,
        }
    }
}

#[derive(Default)]
struct Counts {
    accepted: AtomicU64,
    refused: AtomicU64,
    broken: AtomicU64,
    requests: AtomicU64,
    payload_in: AtomicU64,
    payload_out: AtomicU64,
    times: [Times; Call::ALL.len()],
}

struct Shared {
    node: Arc<Node>,
    gate: Arc<dyn Gate>,
    config: ServerConfig,
    stopping: AtomicBool,
    /// The right by which each connection is open. Entries of those that ended are dropped with the next sweep.
    open: Mutex<Vec<Weak<Entry>>>,
    /// Woken when the server stops.
    stopped: Condvar,
    counts: Counts,
}

/// The right by which a connection is open.
struct Entry {
    connection: Handle,
    /// The token or certificate that its hello came with, and who that was.
    shown: OnceLock<(Shown, Identity)>,
    /// Set when that right has ended.
    ended: AtomicBool,
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<Listener>,
    /// The socket's path and inode.
    socket: Option<(PathBuf, u64)>,
    tcp: Option<SocketAddr>,
    sweeper: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the blocks of a host.
    ///
    /// # Errors
    /// An address cannot be listened on; see [`ServeError`].
    pub fn start(
        node: Arc<Node>,
        listen: &Listen,
        gate: Arc<dyn Gate>,
        config: ServerConfig,
    ) -> Result<Self, ServeError> {
        if listen.unix.is_none() && listen.tcp.is_none() {
            return Err(ServeError::Nowhere);
        }
        let tcp = listen.tcp.map(bind_tcp).transpose()?;
        let unix = listen.unix.as_deref().map(|path| bind_unix(path, listen.mode)).transpose()?;
        let shared = Arc::new(Shared {
            node,
            gate,
            config,
            stopping: AtomicBool::new(false),
            open: Mutex::default(),
            stopped: Condvar::new(),
            counts: Counts::default(),
        });
        // From here on dropping it stops what was started.
        let mut server = Self { shared, listeners: Vec::new(), socket: None, tcp: None, sweeper: None };
        server.sweep()?;
        if let Some((door, path, inode)) = unix {
            server.socket = Some((path, inode));
            server.listen(door, "socket", Shared::serve_local, |_, stream| Ok(Stream::Unix(stream)))?;
        }
        if let Some((door, addr)) = tcp {
            server.tcp = Some(addr);
            server.listen(door, "TCP", Shared::serve_remote, |gate, stream| gate.dress(stream))?;
        }
        Ok(server)
    }

    fn sweep(&mut self) -> Result<(), ServeError> {
        let shared = Arc::clone(&self.shared);
        let sweeper = thread::Builder::new().name("kvasir-sweep".into()).spawn(move || shared.sweep_loop());
        self.sweeper = Some(sweeper.map_err(|source| ServeError::Thread { name: "sweeping", source })?);
        Ok(())
    }

    /// Each kind of connection has places of its own, so that nobody from afar keeps the clients on this machine out.
    fn listen<D: Door>(
        &mut self,
        door: D,
        kind: &'static str,
        serve: fn(&Arc<Shared>, D::Stream, &Seat),
        dress: fn(&dyn Gate, D::Stream) -> io::Result<Stream>,
    ) -> Result<(), ServeError> {
        let (serving, refusing) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let max = self.shared.config.connections_max as usize;
        let serve = move |stream: D::Stream, seat: &Seat| serve(&serving, stream, seat);
        let refuse = move |refused: D::Stream| {
            let message = format!(
                "{max} {kind} connections are open, the most this host allows is {max}; try again later"
            );
            refusing.turn_away(dress(&*refusing.gate, refused), message);
        };
        let listener = Listener::start(door, "kvasir-data", Limits::of(max), serve, refuse);
        self.listeners.push(listener.map_err(|source| ServeError::Thread { name: kind, source })?);
        Ok(())
    }

    /// Where TCP really listens (port 0 was replaced).
    pub fn tcp_addr(&self) -> Option<SocketAddr> {
        self.tcp
    }

    pub fn metrics(&self) -> ServerMetrics {
        let counts = &self.shared.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ServerMetrics {
            connections: self.listeners.iter().map(|listener| listener.open() as u64).sum(),
            accepted: read(&counts.accepted),
            refused: read(&counts.refused),
            broken: read(&counts.broken),
            requests: read(&counts.requests),
            payload_in_bytes: read(&counts.payload_in),
            payload_out_bytes: read(&counts.payload_out),
            times: std::array::from_fn(|call| counts.times[call].taken()),
        }
    }

    /// Ends every connection, waits for their threads, and removes the socket.
    pub fn stop(mut self) {
        self.stop_now();
    }

    fn stop_now(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        if let Some((path, inode)) = self.socket.take() {
            // Another host may have taken the path since.
            if fs::metadata(&path).is_ok_and(|file| file.ino() == inode) {
                let _ = fs::remove_file(&path);
            }
        }
        {
            // Under the lock, so that the sweeper is either waiting or has seen the flag.
            let _open = self.shared.open.lock();
            self.shared.stopped.notify_all();
        }
        if let Some(sweeper) = self.sweeper.take() {
            let _ = sweeper.join();
        }
        for listener in &self.listeners {
            listener.stop();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_now();
    }
}

fn bind_tcp(addr: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    // The standard library sets SO_REUSEADDR, so that a port is free again at once after a crash.
    let listener = TcpListener::bind(addr).map_err(|source| ServeError::Tcp { addr, source })?;
    let real = listener.local_addr().map_err(|source| ServeError::Tcp { addr, source })?;
    Ok((listener, real))
}

/// Binds under a temporary name and renames it into place once its mode is right, so that nobody can connect
/// before. A socket file that nobody answers on is a leftover of a crash, and is replaced.
pub fn bind_unix(path: &Path, mode: u32) -> Result<(UnixListener, PathBuf, u64), ServeError> {
    let failed = |source| ServeError::Socket { path: path.into(), source };
    if let Ok(file) = fs::symlink_metadata(path) {
        if !file.file_type().is_socket() {
            return Err(ServeError::NotASocket { path: path.into() });
        }
        let answer = connect_unix(path, ANSWER);
        // A socket that accepts nobody right now belongs to somebody, too.
        if answer.is_ok() || answer.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            return Err(ServeError::SocketInUse { path: path.into() });
        }
    }
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let _ = fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(failed)?;
    let placed = fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))
        .and_then(|()| fs::rename(&temporary, path))
        .and_then(|()| fs::metadata(path));
    match placed {
        Ok(file) => Ok((listener, path.into(), file.ino())),
        Err(source) => {
            let _ = fs::remove_file(&temporary);
            Err(failed(source))
        }
    }
}

impl Shared {
    fn sweep_loop(&self) {
        let mut open = self.open.lock();
        while !self.stopping.load(Ordering::SeqCst) {
            self.stopped.wait_for(&mut open, self.config.sweep_every);
            MutexGuard::unlocked(&mut open, || self.node.sweep());
            open.retain(|entry| match entry.upgrade() {
                Some(entry) => {
                    self.end_if_revoked(&entry);
                    true
                }
                None => false,
            });
        }
    }

    /// Ends a connection whose token was revoked since, or whose token or certificate has expired. What it is doing is
    /// finished; then its thread says why to the client.
    fn end_if_revoked(&self, entry: &Entry) {
        let Some((shown, identity)) = entry.shown.get() else { return };
        if !entry.ended.load(Ordering::Relaxed) && self.gate.identify(shown).as_ref() != Ok(identity) {
            entry.ended.store(true, Ordering::Relaxed);
            entry.connection.stop_reading();
        }
    }

    /// A connection on the Unix socket: the kernel says who is at the other end.
    fn serve_local(self: &Arc<Self>, stream: UnixStream, seat: &Seat) {
        let identity = rustix::net::sockopt::socket_peercred(&stream)
            .map_err(|error| error.to_string())
            .and_then(|peer| {
                let identity = self.gate.local(peer.uid.as_raw(), peer.gid.as_raw());
                identity.map_err(|refused| refused.to_string())
            });
        let stream = Stream::Unix(stream);
        match identity {
            Ok(identity) => {
                seat.greeted();
                self.serve(stream, Some(identity), seat);
            }
            Err(message) => self.turn_away(Ok(stream), message),
        }
    }

    /// A connection over TCP: the hello brings a token.
    fn serve_remote(self: &Arc<Self>, stream: TcpStream, seat: &Seat) {
        match self.gate.dress(stream) {
            Ok(stream) => self.serve(stream, None, seat),
            Err(error) => self.turn_away(Err(error), String::new()),
        }
    }

    fn serve(self: &Arc<Self>, stream: Stream, identity: Option<Identity>, seat: &Seat) {
        if let Err(error) = stream.set_timeouts(self.config.stall_timeout) {
            return self.turn_away(Ok(stream), format!("host cannot take the connection: {error}"));
        }
        let entry =
            Entry { connection: seat.handle(), shown: OnceLock::new(), ended: AtomicBool::new(false) };
        let entry = Arc::new(entry);
        self.open.lock().push(Arc::downgrade(&entry));
        self.counts.accepted.fetch_add(1, Ordering::Relaxed);
        Connection::new(Arc::clone(self), stream, identity, entry, seat).run();
    }

    fn turn_away(&self, stream: io::Result<Stream>, message: String) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        // An answer to a caller that encrypts would take a handshake, for which nobody else should wait.
        let Some(mut stream) = stream.ok().filter(|stream| !matches!(stream, Stream::Sealed(_))) else {
            return;
        };
        let mut frame = Vec::new();
        Reply::Error { retryable: true, message }.encode(0, 0, &mut frame);
        // The peer may be gone; it is turned away either way.
        let _ = stream.set_timeouts(Duration::from_secs(1)).and_then(|()| stream.write_all(&frame));
    }
}

#[cfg(test)]
mod tests;
