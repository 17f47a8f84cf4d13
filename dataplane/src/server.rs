//! Serves a store on a Unix socket and on TCP: one blocking thread per connection, a cap on their number.
//!
//! A connection on the Unix socket is local: it gets the pool's descriptor, reads leased blocks in place and fills
//! reservations in place. A connection on TCP is remote: bytes travel in the frames, straight from and into the
//! pool. When a connection ends, for whatever reason, its reservations are aborted and its leases released.

mod handover;

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::block::{BlockKey, BlockMeta};
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::config::ServerConfig;
use crate::memory::host::HostPool;
use crate::stream::ring::{self, Ring, Side};
use crate::stream::{Eager, Stream, Timed, send_with_fds};
use crate::tier::dram::{
    BlockStat, DramStore, Evict, Held, Lookup, OwnerId, Pinning, Remove, Reserve, Verify,
};
use crate::tier::tiering::{Read, Residency, Tiering};
use crate::wire::{Found, HEADER_LEN, Header, Op, Outcome, Placed, Reply, Request, Stat, WireError};

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
#[derive(Clone, Debug, Default)]
pub struct Listen {
    /// Mode 0600, and only processes of this user are let in.
    pub unix: Option<PathBuf>,
    /// Not authenticated: keep it on loopback or a trusted network.
    pub tcp: Option<SocketAddr>,
}

/// Plain numbers about the server.
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
}

#[derive(Default)]
struct Counts {
    accepted: AtomicU64,
    refused: AtomicU64,
    broken: AtomicU64,
    requests: AtomicU64,
    payload_in: AtomicU64,
    payload_out: AtomicU64,
}

struct Shared {
    store: Arc<DramStore>,
    tiering: Arc<Tiering>,
    /// None: this host knows no others.
    cluster: Option<Arc<Cluster>>,
    config: ServerConfig,
    clock: Clock,
    stopping: AtomicBool,
    /// A second handle on each open connection, to end it from outside.
    open: Mutex<HashMap<u64, Stream>>,
    /// Woken when a connection ends or the server stops.
    changed: Condvar,
    counts: Counts,
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    unix: Option<(UnixListener, PathBuf, u64)>,
    tcp: Option<(TcpListener, SocketAddr)>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Serves a DRAM store alone.
    pub fn start(
        store: Arc<DramStore>,
        listen: &Listen,
        config: ServerConfig,
        clock: Clock,
    ) -> Result<Self, ServeError> {
        Self::start_tiered(Arc::new(Tiering::dram_only(store, clock)), None, listen, config, clock)
    }

    /// Serves a DRAM store and the tiers below it, on a host that keeps copies on others if it knows any.
    pub fn start_tiered(
        tiering: Arc<Tiering>,
        cluster: Option<Arc<Cluster>>,
        listen: &Listen,
        config: ServerConfig,
        clock: Clock,
    ) -> Result<Self, ServeError> {
        if listen.unix.is_none() && listen.tcp.is_none() {
            return Err(ServeError::Nowhere);
        }
        let tcp = listen.tcp.map(bind_tcp).transpose()?;
        let unix = listen.unix.as_deref().map(bind_unix).transpose()?;
        let shared = Arc::new(Shared {
            store: Arc::clone(tiering.dram()),
            tiering,
            cluster,
            config,
            clock,
            stopping: AtomicBool::new(false),
            open: Mutex::new(HashMap::new()),
            changed: Condvar::new(),
            counts: Counts::default(),
        });
        let mut server = Self { shared, unix, tcp, threads: Vec::new() };
        server.spawn_all()?;
        Ok(server)
    }

    fn spawn_all(&mut self) -> Result<(), ServeError> {
        let no_thread = |name| move |source| ServeError::Thread { name, source };
        let shared = Arc::clone(&self.shared);
        self.threads.push(spawn("kvasir-sweep", move || shared.sweep_loop()).map_err(no_thread("sweeping"))?);
        if let Some((listener, path, _)) = &self.unix {
            let listener =
                listener.try_clone().map_err(|source| ServeError::Socket { path: path.clone(), source })?;
            let shared = Arc::clone(&self.shared);
            let accept = move || shared.accept_loop(|| listener.accept().map(|(s, _)| Stream::Unix(s)));
            self.threads.push(spawn("kvasir-accept", accept).map_err(no_thread("the socket"))?);
        }
        if let Some((listener, addr)) = &self.tcp {
            let listener = listener.try_clone().map_err(|source| ServeError::Tcp { addr: *addr, source })?;
            let shared = Arc::clone(&self.shared);
            let accept = move || shared.accept_loop(|| listener.accept().map(|(s, _)| Stream::Tcp(s)));
            self.threads.push(spawn("kvasir-accept", accept).map_err(no_thread("the data port"))?);
        }
        Ok(())
    }

    /// Where TCP really listens (port 0 was replaced).
    pub fn tcp_addr(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().map(|(_, addr)| *addr)
    }

    pub fn metrics(&self) -> ServerMetrics {
        let counts = &self.shared.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ServerMetrics {
            connections: lock(&self.shared.open).len() as u64,
            accepted: read(&counts.accepted),
            refused: read(&counts.refused),
            broken: read(&counts.broken),
            requests: read(&counts.requests),
            payload_in_bytes: read(&counts.payload_in),
            payload_out_bytes: read(&counts.payload_out),
        }
    }

    /// Ends every connection, waits for their threads, and removes the socket.
    pub fn stop(mut self) {
        self.stop_now();
    }

    fn stop_now(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // Wakes `accept`, which then fails.
        if let Some((listener, path, inode)) = self.unix.take() {
            let _ = rustix::net::shutdown(listener.as_fd(), rustix::net::Shutdown::Both);
            // Another host may have taken the path since.
            if fs::metadata(&path).is_ok_and(|file| file.ino() == inode) {
                let _ = fs::remove_file(&path);
            }
        }
        if let Some((listener, _)) = self.tcp.take() {
            let _ = rustix::net::shutdown(listener.as_fd(), rustix::net::Shutdown::Both);
        }
        {
            // Under the lock, so that the sweeper is either waiting or has seen the flag.
            let _open = lock(&self.shared.open);
            self.shared.changed.notify_all();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // Nobody is let in any more; end those who are.
        let mut open = lock(&self.shared.open);
        while !open.is_empty() {
            open.values().for_each(Stream::shutdown);
            open = self.shared.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
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
fn bind_unix(path: &Path) -> Result<(UnixListener, PathBuf, u64), ServeError> {
    let failed = |source| ServeError::Socket { path: path.into(), source };
    if let Ok(file) = fs::symlink_metadata(path) {
        if !file.file_type().is_socket() {
            return Err(ServeError::NotASocket { path: path.into() });
        }
        if UnixStream::connect(path).is_ok() {
            return Err(ServeError::SocketInUse { path: path.into() });
        }
    }
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let _ = fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(failed)?;
    let placed = fs::set_permissions(&temporary, fs::Permissions::from_mode(0o600))
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

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(work)
}

impl Shared {
    fn sweep_loop(&self) {
        let mut open = lock(&self.open);
        while !self.stopping.load(Ordering::SeqCst) {
            let waited = self.changed.wait_timeout(open, self.config.sweep_every);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            self.store.sweep(self.clock.now_ms());
            open = lock(&self.open);
        }
    }

    fn accept_loop(self: &Arc<Self>, accept: impl Fn() -> io::Result<Stream>) {
        let mut next = 0u64;
        while !self.stopping.load(Ordering::SeqCst) {
            match accept() {
                Ok(stream) => self.admit(stream, &mut next),
                // Out of descriptors, most likely: wait for some connection to end instead of spinning.
                Err(_) if !self.stopping.load(Ordering::SeqCst) => thread::sleep(Duration::from_millis(20)),
                Err(_) => {}
            }
        }
    }

    fn admit(self: &Arc<Self>, mut stream: Stream, next: &mut u64) {
        let refusal = self.refusal(&stream);
        if let Err(message) = refusal.and_then(|()| self.start_connection(&stream, next)) {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            let mut frame = Vec::new();
            Reply::Error { retryable: true, message }.encode(0, 0, &mut frame);
            // The peer may be gone; it is turned away either way.
            let _ = stream.set_timeouts(Duration::from_secs(1)).and_then(|()| stream.write_all(&frame));
        }
    }

    fn refusal(&self, stream: &Stream) -> Result<(), String> {
        if let Stream::Unix(stream) = stream {
            let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|error| error.to_string())?;
            let (peer, own) = (peer.uid, rustix::process::geteuid());
            if peer != own {
                let (peer, own) = (peer.as_raw(), own.as_raw());
                return Err(format!("this socket serves user {own} only; the peer is user {peer}"));
            }
        }
        let (open, max) = (lock(&self.open).len(), self.config.connections_max);
        if open >= max {
            return Err(format!(
                "{open} connections are open, the most this host allows is {max}; try again later"
            ));
        }
        Ok(())
    }

    fn start_connection(self: &Arc<Self>, stream: &Stream, next: &mut u64) -> Result<(), String> {
        let text = |error: io::Error| format!("host cannot take the connection: {error}");
        stream.set_timeouts(self.config.stall_timeout).map_err(text)?;
        let (mine, handle) = (stream.try_clone().map_err(text)?, stream.try_clone().map_err(text)?);
        // Ids of the two accept loops differ in the low bit.
        let id = *next << 1 | u64::from(matches!(stream, Stream::Unix(_)));
        *next += 1;
        lock(&self.open).insert(id, handle);
        let shared = Arc::clone(self);
        let started = spawn("kvasir-data", move || {
            Connection::new(Arc::clone(&shared), mine).run();
            lock(&shared.open).remove(&id);
            shared.changed.notify_all();
        });
        if let Err(error) = started {
            lock(&self.open).remove(&id);
            return Err(text(error));
        }
        self.counts.accepted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Why a connection ended, other than by the peer closing it between frames.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Rule(&'static str),
}

struct Connection {
    shared: Arc<Shared>,
    reader: BufReader<Timed>,
    writer: Option<Stream>,
    owner: OwnerId,
    /// On whose account it stores.
    tenant: u16,
    /// The peer maps the pool.
    local: bool,
    greeted: bool,
    may_write: bool,
    hand_overs: handover::HandOvers,
    body: Vec<u8>,
    frame: Vec<u8>,
}

impl Connection {
    fn new(shared: Arc<Shared>, stream: Stream) -> Self {
        Self {
            owner: shared.store.new_owner(),
            local: matches!(stream, Stream::Unix(_)),
            writer: stream.try_clone().ok(),
            reader: BufReader::with_capacity(16 << 10, Timed { stream: Eager::new(stream), deadline: None }),
            tenant: 0,
            greeted: false,
            may_write: false,
            hand_overs: handover::HandOvers::default(),
            body: Vec::new(),
            frame: Vec::new(),
            shared,
        }
    }

    fn run(&mut self) {
        let mut request = 0;
        let ended = loop {
            match self.serve_one(&mut request) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(broken) => break Err(broken),
            }
        };
        self.hand_overs.end();
        self.shared.store.release_owner(self.owner);
        if let Err(broken) = ended {
            if !self.shared.stopping.load(Ordering::SeqCst) {
                self.shared.counts.broken.fetch_add(1, Ordering::Relaxed);
            }
            let error = Reply::Error { retryable: false, message: broken.to_string() };
            // Best effort: the peer may be what is broken.
            let _ = self.reply(request, &error);
        }
        self.reader.get_ref().stream.stream.shutdown();
    }

    /// Serves one frame; false when the peer closed the connection or was silent too long.
    fn serve_one(&mut self, request: &mut u64) -> Result<bool, Broken> {
        if !self.wait_for_frame()? {
            return Ok(false);
        }
        self.reader.get_mut().deadline = Some(Instant::now() + self.shared.config.stall_timeout);
        let mut header = [0; HEADER_LEN];
        self.reader.read_exact(&mut header)?;
        let header = Header::decode(&header)?;
        *request = header.request;
        if header.reply {
            return Err(Broken::Rule("a client sends requests, not replies"));
        }
        self.body.resize(header.body_len as usize, 0);
        self.reader.read_exact(&mut self.body)?;
        let call = Request::decode(header.op, &self.body)?;
        self.shared.counts.requests.fetch_add(1, Ordering::Relaxed);
        self.check(&call, header.payload_len)?;
        self.serve(header, call)?;
        Ok(true)
    }

    fn wait_for_frame(&mut self) -> Result<bool, Broken> {
        self.reader.get_mut().deadline = None;
        let silent_since = Instant::now();
        loop {
            match self.reader.fill_buf() {
                Ok(bytes) => return Ok(!bytes.is_empty()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => {
                    let idle = silent_since.elapsed() >= self.shared.config.idle_timeout;
                    if idle || self.shared.stopping.load(Ordering::SeqCst) {
                        return Ok(false);
                    }
                }
                // A client that was killed is no fault of the protocol.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn check(&self, call: &Request, payload_len: u64) -> Result<(), Broken> {
        let op = call.op();
        if self.greeted == (op == Op::Hello) {
            return Err(Broken::Rule("a connection starts with one hello"));
        }
        let writes = matches!(
            op,
            Op::Put
                | Op::Reserve
                | Op::Commit
                | Op::Abort
                | Op::Remove
                | Op::Pin
                | Op::Unpin
                | Op::Evict
                | Op::Replicate
                | Op::HandOver
        );
        if writes && !self.may_write {
            return Err(Broken::Rule("this connection did not ask to write in its hello"));
        }
        let in_place =
            matches!(op, Op::Reserve | Op::Commit | Op::Abort | Op::Release | Op::HandOver | Op::Arrivals);
        if in_place && !self.local {
            return Err(Broken::Rule("blocks are filled and read in place over the Unix socket only"));
        }
        let expected = match call {
            Request::Put(blocks) => blocks.iter().map(|(meta, _)| u64::from(meta.size)).sum(),
            _ => 0,
        };
        if payload_len != expected {
            return Err(Broken::Rule("the payload is not as long as its blocks"));
        }
        if payload_len > self.shared.config.payload_max {
            return Err(Broken::Rule("the payload is above this host's limit; send smaller batches"));
        }
        Ok(())
    }

    fn serve(&mut self, header: Header, call: Request) -> Result<(), Broken> {
        let (store, now) = (Arc::clone(&self.shared.store), self.shared.clock.now_ms());
        let tiering = Arc::clone(&self.shared.tiering);
        let rule = |_| Broken::Rule("a batch holds at most 4,096 items");
        let op = call.op();
        let outcomes = |list| Reply::Outcomes(op, list);
        let reply = match call {
            Request::Hello { wants_write, wants_ring, tenant, .. } => {
                self.tenant = tenant;
                return self.greet(header.request, wants_write, wants_ring);
            }
            Request::Get { class, release, keys } if self.local => {
                // A lease that expired on its way back is no one's problem.
                let _ = store.release(&release).map_err(rule)?;
                Reply::Get(
                    tiering.get(self.owner, &keys, class, now).map_err(rule)?.iter().map(found).collect(),
                )
            }
            Request::Get { class, keys, .. } => return self.send_blocks(header.request, &keys, class, now),
            Request::Put(blocks) => {
                let list = self.receive_blocks(&blocks, header.payload_len)?;
                outcomes(list)
            }
            Request::Exists(keys) => Reply::Exists(tiering.exists(&keys).map_err(rule)?),
            Request::Reserve(mut blocks) => {
                blocks.iter_mut().for_each(|meta| meta.tenant = self.tenant);
                let placed = store.reserve(self.owner, &blocks, now).map_err(rule)?;
                Reply::Reserve(placed.iter().map(place).collect())
            }
            Request::Commit(items) => {
                let items: Vec<_> = items.into_iter().map(|(id, checksum)| (id, Some(checksum))).collect();
                outcomes(store.commit(self.owner, &items, now).map_err(rule)?.iter().map(outcome).collect())
            }
            Request::Abort(ids) => {
                outcomes(store.abort(self.owner, &ids).map_err(rule)?.iter().map(outcome).collect())
            }
            Request::Release(ids) => {
                outcomes(store.release(&ids).map_err(rule)?.iter().map(outcome).collect())
            }
            Request::Remove(keys) => {
                outcomes(tiering.remove(&keys, now).map_err(rule)?.into_iter().map(removed).collect())
            }
            Request::Verify(keys) => {
                outcomes(store.verify(&keys, now).map_err(rule)?.into_iter().map(verified).collect())
            }
            Request::Pin { pin, keys } => {
                let pins = store.pin(self.tenant, &keys, pin, now).map_err(rule)?;
                outcomes(pins.into_iter().map(pinned).collect())
            }
            Request::Unpin(keys) => {
                let ended = store.unpin(self.tenant, &keys, now).map_err(rule)?;
                let outcome = |ended| if ended { Outcome::Done } else { Outcome::Missing };
                outcomes(ended.into_iter().map(outcome).collect())
            }
            Request::Evict(keys) => {
                outcomes(store.evict_keys(&keys, now).map_err(rule)?.into_iter().map(evicted).collect())
            }
            Request::Replicate { copies, keys } => outcomes(match &self.shared.cluster {
                Some(cluster) => cluster.replicate(&keys, copies),
                None if copies <= 1 => vec![Outcome::Done; keys.len()],
                None => vec![Outcome::TooFewHosts; keys.len()],
            }),
            Request::Place { bytes, copies } => {
                let primary = self.shared.cluster.as_ref().map(|cluster| cluster.primary(bytes, copies));
                let primary = primary.map(|primary| (primary.name, primary.data.unwrap_or_default()));
                let (node, data) = primary.unwrap_or_default();
                Reply::Place { node, data }
            }
            Request::HandOver(call) => self.hand_overs.serve(&self.shared, self.owner, self.tenant, call),
            Request::Stat(keys) => {
                let stats = store.stat(&keys).map_err(rule)?;
                let places = tiering.residency(&keys).map_err(rule)?;
                Reply::Stat(
                    stats.iter().zip(places).map(|(stat, at)| describe(stat.as_ref(), at, now)).collect(),
                )
            }
        };
        Ok(self.reply(header.request, &reply)?)
    }

    fn greet(&mut self, request: u64, wants_write: bool, wants_ring: bool) -> Result<(), Broken> {
        let store = Arc::clone(&self.shared.store);
        (self.greeted, self.may_write) = (true, wants_write);
        // A host that is short of memory or descriptors goes on without one.
        let ring = if wants_ring && self.local { ring::memory().ok() } else { None };
        let reply = Reply::Hello {
            shared: self.local,
            writable: wants_write,
            ring: ring.is_some(),
            pool_bytes: store.pool().bytes(),
            lease_ms: store.config().lease_ttl.as_millis() as u64,
            payload_max: self.shared.config.payload_max,
        };
        let Some(Stream::Unix(stream)) = &mut self.writer else { return Ok(self.reply(request, &reply)?) };
        reply.encode(request, 0, &mut self.frame);
        let readonly = if wants_write { None } else { Some(store.pool().readonly_fd()?) };
        let pool = readonly.as_ref().map_or_else(|| store.pool().writable_fd(), |fd| fd.as_fd());
        let fds = [Some(pool), ring.as_ref().map(HostPool::writable_fd)];
        send_with_fds(stream, &self.frame, &fds.into_iter().flatten().collect::<Vec<_>>())?;
        if let Some(memory) = ring {
            let ring = Arc::new(Ring::new(memory.writable_fd(), Side::Host, stream.try_clone()?)?);
            self.writer = Some(Stream::Ring(Arc::clone(&ring)));
            self.reader.get_mut().stream = Eager::new(Stream::Ring(ring));
        }
        Ok(())
    }

    /// Sends what any tier holds of `keys`, as much as one payload holds.
    fn send_blocks(&mut self, request: u64, keys: &[BlockKey], class: u16, now: u64) -> Result<(), Broken> {
        let tiering = Arc::clone(&self.shared.tiering);
        let reads = tiering.read(keys, class, now, self.shared.config.payload_max);
        let entries = reads.iter().map(|read| match read {
            Read::Held(Held { size, checksum, .. }) => {
                Found::Hit { offset: 0, size: *size, checksum: *checksum, lease: 0 }
            }
            Read::Onboarded(block) => {
                Found::Hit { offset: 0, size: block.meta.size, checksum: block.checksum, lease: 0 }
            }
            Read::Missing => Found::Not(Outcome::Missing),
            Read::Throttled => Found::Not(Outcome::Throttled),
        });
        let entries = entries.collect();
        let blocks: Vec<&[u8]> = reads.iter().filter_map(Read::bytes).collect();
        let total = blocks.iter().map(|bytes| bytes.len() as u64).sum();
        Reply::Get(entries).encode(request, total, &mut self.frame);
        let mut parts: Vec<&[u8]> = Vec::with_capacity(blocks.len() + 1);
        parts.push(&self.frame);
        parts.extend(blocks);
        self.shared.counts.payload_out.fetch_add(total, Ordering::Relaxed);
        let writer = self.writer.as_mut().ok_or(Broken::Rule("connection is closed"))?;
        writer.write_parts(&parts)?;
        drop(parts);
        // Served first: the reader does not wait for the pool.
        for read in reads {
            if let Read::Onboarded(block) = read {
                tiering.promote_on_evidence(&block, now);
            }
        }
        Ok(())
    }

    /// Receives the payload of a put straight into the pool; what finds no place is read and dropped.
    fn receive_blocks(
        &mut self,
        blocks: &[(BlockMeta, u64)],
        payload_len: u64,
    ) -> Result<Vec<Outcome>, Broken> {
        // A peer must keep up at least this rate: 1 MiB/s.
        let patience = self.shared.config.stall_timeout + Duration::from_millis(payload_len >> 10);
        let store = Arc::clone(&self.shared.store);
        let of_tenant = |(meta, _): &(BlockMeta, u64)| BlockMeta { tenant: self.tenant, ..*meta };
        let metas: Vec<BlockMeta> = blocks.iter().map(of_tenant).collect();
        let placed = store.reserve(self.owner, &metas, self.shared.clock.now_ms());
        let placed = placed.map_err(|_| Broken::Rule("a batch holds at most 4,096 items"))?;
        self.reader.get_mut().deadline = Some(Instant::now() + patience);
        let mut commits = Vec::with_capacity(blocks.len());
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(blocks.len());
        for (at, (outcome, (meta, checksum))) in placed.iter().zip(blocks).enumerate() {
            if let Reserve::Reserved(reservation) = outcome {
                match store.receive(self.owner, reservation.id, &mut self.reader) {
                    Ok(received) => received?,
                    // Reclaimed before its turn came: the payload is still on the wire.
                    Err(_) => discard(&mut self.reader, meta.size.into())?,
                }
                commits.push((at, (reservation.id, Some(*checksum))));
                outcomes.push(Outcome::Done);
            } else {
                discard(&mut self.reader, meta.size.into())?;
                outcomes.push(match place(outcome) {
                    Placed::Not(outcome) => outcome,
                    Placed::At { .. } => Outcome::Internal,
                });
            }
        }
        self.shared.counts.payload_in.fetch_add(payload_len, Ordering::Relaxed);
        let items: Vec<_> = commits.iter().map(|(_, item)| *item).collect();
        let results = store.commit(self.owner, &items, self.shared.clock.now_ms());
        let results = results.map_err(|_| Broken::Rule("a batch holds at most 4,096 items"))?;
        for ((at, _), result) in commits.iter().zip(&results) {
            outcomes[*at] = outcome(result);
        }
        Ok(outcomes)
    }

    fn reply(&mut self, request: u64, reply: &Reply) -> io::Result<()> {
        reply.encode(request, 0, &mut self.frame);
        let writer = self.writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        writer.write_all(&self.frame)
    }
}

fn discard(reader: &mut impl io::Read, len: u64) -> io::Result<()> {
    let read = io::copy(&mut reader.take(len), &mut io::sink())?;
    if read == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn found(lookup: &Lookup) -> Found {
    match lookup {
        Lookup::Hit(lease) => {
            Found::Hit { offset: lease.offset, size: lease.size, checksum: lease.checksum, lease: lease.id }
        }
        Lookup::Miss => Found::Not(Outcome::Missing),
        Lookup::Throttled => Found::Not(Outcome::Throttled),
    }
}

fn place(reserve: &Reserve) -> Placed {
    match reserve {
        Reserve::Reserved(reservation) => {
            Placed::At { reservation: reservation.id, offset: reservation.offset }
        }
        Reserve::AlreadyStored => Placed::Not(Outcome::AlreadyStored),
        Reserve::InProgress => Placed::Not(Outcome::InProgress),
        Reserve::Refused(error) => Placed::Not(error.into()),
    }
}

fn outcome<T>(result: &Result<T, crate::error::StoreError>) -> Outcome {
    result.as_ref().map_or_else(Outcome::from, |_| Outcome::Done)
}

fn removed(remove: Remove) -> Outcome {
    match remove {
        Remove::Removed => Outcome::Done,
        Remove::Missing => Outcome::Missing,
        Remove::InProgress => Outcome::InProgress,
    }
}

fn verified(verify: Verify) -> Outcome {
    match verify {
        Verify::Intact => Outcome::Done,
        Verify::Dropped => Outcome::Dropped,
        Verify::Missing => Outcome::Missing,
    }
}

fn pinned(pinning: Pinning) -> Outcome {
    match pinning {
        Pinning::Until { .. } => Outcome::Done,
        Pinning::Missing => Outcome::Missing,
        Pinning::QuotaFull => Outcome::PinQuotaFull,
    }
}

fn evicted(evict: Evict) -> Outcome {
    match evict {
        Evict::Evicted => Outcome::Done,
        Evict::NotResident => Outcome::Missing,
        Evict::InUse | Evict::Changed => Outcome::InUse,
        Evict::Pinned | Evict::Floor => Outcome::Pinned,
    }
}

/// None where no tier holds the block.
fn describe(stat: Option<&BlockStat>, at: Residency, now: u64) -> Option<Stat> {
    let (size, tiers) = (at.size?, at.bits());
    Some(stat.map_or(Stat { size, tiers, ..Stat::default() }, |stat| Stat {
        size,
        tiers,
        checksum: stat.checksum,
        depth: stat.depth,
        class: stat.class,
        uses: stat.uses,
        leases: stat.leases,
        age_ms: now.saturating_sub(stat.inserted_ms),
        idle_ms: now.saturating_sub(stat.used_ms),
    }))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
