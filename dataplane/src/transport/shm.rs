//! Nodes of one host: memory travels as descriptors over a Unix socket, bytes do not travel at all.
//!
//! Opening a segment maps the peer's memory here. [`Endpoint::map`] then lends the peer's bytes in place; an operation
//! is one copy, made by the thread that submits it. Only regions with a descriptor (pools) can be opened.
//!
//! Each connection has a control page that the server writes and the client only reads: one word per grant, which
//! holds part of the grant's key while it lives. A revoked grant's word is cleared before the revocation returns, and
//! operations look at it before each chunk. That is a rule among nodes which share a secret, not a wall: memory once
//! mapped stays mapped, so a revoked peer that breaks the rule still reaches it. A read-only grant comes as a
//! descriptor that cannot be mapped for writing; that one is a wall.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

use super::auth::{self, AuthError};
use super::grant::{Denied, Grant, Granted};
use super::node::NOTICE_MAX;
use super::tcp::wire::{self, BODY_MAX, HEADER_LEN, Header, Kind};
use super::{
    Access, Capabilities, Completion, Direction, Endpoint, Error, Mapped, Node, Op, OpError, RemoteRange,
    Sink, Transport,
};
use crate::memory::host::{HostPool, Mapping};
use crate::memory::region::{LocalRange, Region, copy_ranges};
use crate::stream::{receive_with_fd, send_with_fd};

const NAME: &str = "shm";
/// Bytes copied between two looks at whether to go on.
const CHUNK: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Grants of one connection alive at once: words of its control page.
const SLOTS: usize = PAGE as usize / 4;
/// The most accepted connections; more are closed at once.
const CONNECTIONS_MAX: usize = 1024;

/// Settings of the link between nodes of one host.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// The socket where peers are accepted; a file left there by an earlier run is replaced. None: only connect out.
    pub listen: Option<PathBuf>,
    /// How long a handshake, or the answer to an `open`, may take in all. Default 2 s.
    pub timeout: Duration,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self { listen: None, timeout: Duration::from_secs(2) }
    }
}

pub struct Shm {
    node: Arc<Node>,
    config: ShmConfig,
    accepted: Arc<Accepted>,
}

#[derive(Default)]
struct Accepted {
    streams: Mutex<HashMap<u64, UnixStream>>,
    next: AtomicU64,
    ended: AtomicBool,
}

impl Shm {
    /// Starts to listen, if the configuration says so.
    pub fn new(node: Arc<Node>, config: ShmConfig) -> io::Result<Self> {
        let accepted = Arc::new(Accepted::default());
        if let Some(path) = &config.listen {
            let listener = listen(path)?;
            let (node, accepted, timeout) = (node.clone(), accepted.clone(), config.timeout);
            let run = move || accept_all(&listener, &node, &accepted, timeout);
            thread::Builder::new().name("kvasir-shm-accept".into()).spawn(run)?;
        }
        Ok(Self { node, config, accepted })
    }

    /// Stops listening and ends accepted connections: peers find this node down.
    pub fn shut_down(&self) {
        if self.accepted.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(path) = &self.config.listen {
            // The accepting thread sees the flag with the next connection, which is this one.
            drop(UnixStream::connect(path));
            let _ = std::fs::remove_file(path);
        }
        lock(&self.accepted.streams).values().for_each(end);
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl Transport for Shm {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        if region.location().is_host() {
            return Ok(());
        }
        let reason = "only memory of the host can be mapped and copied".to_owned();
        Err(Error::Register { transport: NAME, region: format!("{region:?}"), reason })
    }

    fn unregister(&self, _region: &Region) {}

    fn address(&self) -> Option<String> {
        self.config.listen.as_ref().map(|path| path.display().to_string())
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let unreachable = |error: io::Error| Error::Unreachable {
            transport: NAME,
            address: address.to_owned(),
            reason: error.to_string(),
        };
        let mut stream = UnixStream::connect(address).map_err(unreachable)?;
        let peer = auth::connect(&mut Deadlined::new(&stream, self.config.timeout), &self.node);
        let peer = peer.map_err(|error| match error {
            AuthError::Io(error) if error.kind() != io::ErrorKind::UnexpectedEof => unreachable(error),
            error => Error::Authentication { address: address.to_owned(), reason: error.to_string() },
        })?;
        let control = receive_fd(&mut stream).and_then(|fd| Mapping::new(fd.as_fd(), PAGE, false));
        Ok(Arc::new(ShmEndpoint {
            peer,
            control: control.map_err(unreachable)?,
            stream: Mutex::new(stream.try_clone().map_err(unreachable)?),
            watched: stream,
            held: Mutex::default(),
            down: Mutex::default(),
            in_flight: AtomicUsize::new(0),
        }))
    }
}

fn capabilities() -> Capabilities {
    Capabilities {
        name: NAME,
        one_sided: true,
        zero_copy: true,
        message_bytes_max: u64::MAX,
        ranges_max: usize::MAX,
        queue_depth: usize::MAX,
        needs_registration: false,
        host_memory: true,
        cuda_memory: false,
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixStream::connect(path) {
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another node listens there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
        Err(_) => {}
    }
    UnixListener::bind(path)
}

fn accept_all(listener: &UnixListener, node: &Arc<Node>, accepted: &Arc<Accepted>, timeout: Duration) {
    while !accepted.ended.load(Ordering::Acquire) {
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors, most likely.
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        let id = accepted.next.fetch_add(1, Ordering::Relaxed);
        let mut streams = lock(&accepted.streams);
        let Some(clone) = stream.try_clone().ok().filter(|_| streams.len() < CONNECTIONS_MAX) else {
            continue;
        };
        streams.insert(id, clone);
        drop(streams);
        let (node, inner) = (node.clone(), accepted.clone());
        let serve = move || {
            if !inner.ended.load(Ordering::Acquire) {
                // Why it ended is known to the peer, which ended it.
                let _ = serve(stream, &node, timeout);
            }
            lock(&inner.streams).remove(&id).iter().for_each(end);
        };
        if thread::Builder::new().name("kvasir-shm-serve".into()).spawn(serve).is_err() {
            lock(&accepted.streams).remove(&id);
        }
    }
}

/// What one connection was granted, and the page that says what of it lives.
struct Slots {
    control: Arc<HostPool>,
    granted: Vec<Arc<Granted>>,
}

fn serve(mut stream: UnixStream, node: &Node, timeout: Duration) -> Result<(), Box<dyn std::error::Error>> {
    let peer = auth::accept(&mut Deadlined::new(&stream, timeout), node)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(timeout))?;
    let mut slots = Slots { control: Arc::new(HostPool::new(PAGE, true)?), granted: Vec::new() };
    send_with_fd(&mut stream, &[0], slots.control.readonly_fd()?.as_fd())?;
    let mut body = Vec::new();
    loop {
        let header = read_frame(&mut stream, &mut body)?;
        match header.kind {
            Kind::Open => answer_open(&mut stream, node, &mut slots, &header, wire::decode_segment(&body)?)?,
            Kind::Notice => {
                node.notices.push(&peer, &body);
            }
            kind => return Err(wire::WireError::Unasked(kind).into()),
        }
    }
}

fn read_frame(stream: &mut impl Read, body: &mut Vec<u8>) -> Result<Header, Box<dyn std::error::Error>> {
    let mut head = [0; HEADER_LEN];
    stream.read_exact(&mut head)?;
    // Nothing on this link has a payload, and the decoder bounds the body.
    let header = Header::decode(&head)?;
    debug_assert!(header.body_len as usize <= BODY_MAX);
    body.resize(header.body_len as usize, 0);
    stream.read_exact(body)?;
    Ok(header)
}

fn answer_open(
    stream: &mut UnixStream,
    node: &Node,
    slots: &mut Slots,
    header: &Header,
    name: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let opened = node.exports.grant(name).and_then(|granted| {
        let fds = descriptors(&granted)?;
        let slot = slots.take(&granted)?;
        Ok((granted, fds, slot))
    });
    let (granted, fds, slot) = match opened {
        Ok(opened) => opened,
        Err(denied) => {
            let refusal = Header { code: denied as u8, ..Header::new(Kind::Grant, header.request) };
            return Ok(stream.write_all(&refusal.encode())?);
        }
    };
    let mut frame = Vec::new();
    wire::encode_grant(&mut frame, slot as u64, &granted);
    stream.write_all(&frame)?;
    for fd in fds {
        send_with_fd(stream, &[0], fd.as_fd())?;
    }
    Ok(())
}

/// A descriptor per region, that maps as the grant allows.
fn descriptors(granted: &Granted) -> Result<Vec<OwnedFd>, Denied> {
    let of = |region: &Region| {
        let fd = region.fd()?;
        if granted.access == Access::Read {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            return Some(OwnedFd::from(OpenOptions::new().read(true).open(path).ok()?));
        }
        fd.try_clone_to_owned().ok()
    };
    granted.regions.iter().map(|region| of(region).ok_or(Denied::Unreachable)).collect()
}

impl Slots {
    /// A word of the control page that says that this grant lives, until it dies.
    fn take(&mut self, granted: &Arc<Granted>) -> Result<usize, Denied> {
        let slot = match self.granted.iter().position(|old| old.enter().is_err()) {
            Some(slot) => slot,
            None if self.granted.len() < SLOTS => self.granted.len(),
            None => return Err(Denied::Full),
        };
        if slot == self.granted.len() {
            self.granted.push(granted.clone());
        } else {
            self.granted[slot] = granted.clone();
        }
        let word = word_of(granted.key);
        self.control.mapping().store_word(slot as u64, word);
        let control = self.control.clone();
        granted.on_death(move || {
            // Unless another grant has the word by now.
            if control.mapping().load_word(slot as u64) == Some(word) {
                control.mapping().store_word(slot as u64, 0);
            }
        });
        Ok(slot)
    }
}

/// What stands in the control page for a living grant; never 0.
fn word_of(key: u64) -> u32 {
    (key >> 32) as u32 | 1
}

/// A segment mapped here.
struct Held {
    epoch: u64,
    access: Access,
    expires: Instant,
    slot: u64,
    word: u32,
    memory: Vec<(Arc<Mapping>, Region)>,
}

struct ShmEndpoint {
    peer: String,
    control: Mapping,
    /// For questions, one at a time.
    stream: Mutex<UnixStream>,
    /// The same socket, looked at for its end.
    watched: UnixStream,
    held: Mutex<HashMap<u64, Arc<Held>>>,
    down: Mutex<Option<String>>,
    in_flight: AtomicUsize,
}

impl ShmEndpoint {
    fn execute(&self, op: &Op, capabilities: &Capabilities) -> Completion {
        let (valid_bytes, result) = match self.start(op, capabilities) {
            Ok((held, remote)) => {
                let (from, to) = match op.direction {
                    Direction::Read => (&remote, &op.local),
                    Direction::Write => (&op.local, &remote),
                };
                let mut first = true;
                copy_ranges(from, to, CHUNK, || {
                    // The first look was taken by `submit`, for all its operations.
                    if !std::mem::take(&mut first) {
                        self.check_up()?;
                    }
                    if op.is_cancelled() { Err(OpError::Cancelled) } else { Ok(self.check_alive(&held)?) }
                })
            }
            Err(error) => (0, Err(error)),
        };
        Completion { id: op.id, valid_bytes, result }
    }

    fn start(&self, op: &Op, capabilities: &Capabilities) -> Result<(Arc<Held>, Vec<LocalRange>), OpError> {
        op.check(capabilities, Instant::now())?;
        let held = self.held(op.grant.key, op.grant.epoch, op.direction)?;
        let range = |range: &RemoteRange| {
            let (_, region) = held.memory.get(range.region as usize).ok_or(Denied::OutOfRange)?;
            region.range(range.offset, range.len).ok_or(Denied::OutOfRange)
        };
        let remote = op.remote.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        Ok((held, remote))
    }

    fn held(&self, key: u64, epoch: u64, direction: Direction) -> Result<Arc<Held>, Denied> {
        let held = lock(&self.held).get(&key).cloned().ok_or(Denied::UnknownKey)?;
        if held.epoch != epoch {
            return Err(Denied::StaleEpoch);
        }
        if !held.access.allows(direction) {
            return Err(Denied::Direction);
        }
        self.check_alive(&held)?;
        Ok(held)
    }

    fn check_alive(&self, held: &Held) -> Result<(), Denied> {
        if self.control.load_word(held.slot) != Some(held.word) {
            return Err(Denied::UnknownKey);
        }
        if Instant::now() >= held.expires { Err(Denied::LeaseEnded) } else { Ok(()) }
    }

    fn check_up(&self) -> Result<(), OpError> {
        match self.down() {
            Some(reason) => Err(OpError::PeerDown { peer: self.peer.clone(), reason }),
            None => Ok(()),
        }
    }

    fn end(&self, reason: &str) -> Error {
        let mut down = lock(&self.down);
        let reason = down.get_or_insert_with(|| reason.to_owned()).clone();
        end(&self.watched);
        Error::PeerDown { peer: self.peer.clone(), reason }
    }

    /// Asks for a segment and maps what comes.
    fn ask(&self, segment: &str) -> Result<Result<Arc<Grant>, Denied>, Box<dyn std::error::Error>> {
        let mut stream = lock(&self.stream);
        let mut frame = Vec::new();
        let asked_at = Instant::now();
        wire::encode_named(&mut frame, Kind::Open, 0, segment.as_bytes());
        stream.write_all(&frame)?;
        let header = read_frame(&mut *stream, &mut frame)?;
        if header.kind != Kind::Grant {
            return Err(wire::WireError::Unasked(header.kind).into());
        }
        if let Some(denied) = Denied::from_u8(header.code) {
            return Ok(Err(denied));
        }
        let grant = wire::decode_grant(segment, asked_at, &frame)?;
        let writable = grant.access != Access::Read;
        let mut memory = Vec::with_capacity(grant.regions.len());
        for region in &grant.regions {
            let mapping = Arc::new(Mapping::new(receive_fd(&mut stream)?.as_fd(), region.len, writable)?);
            memory.push((mapping.clone(), Region::of_mapping(mapping)));
        }
        let Grant { key, epoch, access, expires, .. } = grant;
        let held = Held { epoch, access, expires, slot: header.request, word: word_of(key), memory };
        let mut all = lock(&self.held);
        all.retain(|_, held| self.check_alive(held).is_ok());
        all.insert(key, Arc::new(held));
        Ok(Ok(Arc::new(grant)))
    }
}

impl Endpoint for ShmEndpoint {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        let answer = self.ask(segment).map_err(|error| self.end(&error.to_string()))?;
        answer.map_err(|denied| Error::Denied {
            peer: self.peer.clone(),
            segment: segment.to_owned(),
            denied,
        })
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        let capabilities = capabilities();
        let up = self.check_up();
        self.in_flight.fetch_add(ops.len(), Ordering::AcqRel);
        for op in ops {
            let completion = match &up {
                Ok(()) => self.execute(&op, &capabilities),
                Err(error) => Completion::failed(op.id, 0, error.clone()),
            };
            drop(op);
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
            sink.complete(completion);
        }
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        if message.len() > NOTICE_MAX {
            return Err(Error::NoticeTooLong { len: message.len() });
        }
        if let Some(reason) = self.down() {
            return Err(Error::PeerDown { peer: self.peer.clone(), reason });
        }
        let mut frame = Vec::new();
        wire::encode_named(&mut frame, Kind::Notice, 0, message);
        let written = lock(&self.stream).write_all(&frame);
        written.map_err(|error| self.end(&error.to_string()))
    }

    fn map(&self, grant: &Grant, range: RemoteRange) -> Result<Mapped, Error> {
        let mapped = grant.covers(range).and_then(|()| {
            let held = self.held(grant.key, grant.epoch, Direction::Read)?;
            let (memory, _) = held.memory.get(range.region as usize).ok_or(Denied::OutOfRange)?;
            let inside = memory.bytes(range.offset, range.len).is_some();
            let memory = memory.clone();
            inside
                .then_some(Mapped { memory, offset: range.offset, len: range.len })
                .ok_or(Denied::OutOfRange)
        });
        mapped.map_err(|denied| Error::Denied {
            peer: self.peer.clone(),
            segment: grant.segment.clone(),
            denied,
        })
    }

    /// Looks at the socket: it ends with the peer.
    fn down(&self) -> Option<String> {
        let mut down = lock(&self.down);
        if down.is_none() {
            let peeked =
                rustix::net::recv(&self.watched, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            *down = match peeked {
                Ok((0, _)) => Some("it closed its socket".to_owned()),
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
                Err(error) => Some(error.to_string()),
            };
        }
        down.clone()
    }

    fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    fn close(&self) {
        self.end("the endpoint was closed");
    }
}

fn receive_fd(stream: &mut UnixStream) -> io::Result<OwnedFd> {
    let fd = receive_with_fd(stream, &mut [0])?;
    fd.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "a descriptor was announced and did not come")
    })
}

fn end(stream: &UnixStream) {
    // It may have ended already, which is what is wanted.
    let _ = stream.shutdown(Shutdown::Both);
}

/// A socket for a while in which everything must be done.
struct Deadlined<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl<'a> Deadlined<'a> {
    fn new(stream: &'a UnixStream, timeout: Duration) -> Self {
        Self { stream, deadline: Instant::now() + timeout }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        left.map(Some).ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl Read for Deadlined<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Deadlined<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::buffer::Buffer;
    use crate::transport::conformance::{self, Pair};
    use crate::transport::node::Secret;

    const HOUR: Duration = Duration::from_secs(3600);

    fn node(name: &str) -> Arc<Node> {
        Arc::new(Node::new(name, Secret::new(b"secret"), 1))
    }

    fn server(dir: &Path) -> (Arc<Node>, Arc<Shm>) {
        let node = node("server");
        let listen = Some(dir.join("shm.sock"));
        let config = ShmConfig { listen, timeout: Duration::from_secs(120) };
        (node.clone(), Arc::new(Shm::new(node, config).unwrap()))
    }

    fn client() -> Arc<Shm> {
        let config = ShmConfig { timeout: Duration::from_secs(120), ..ShmConfig::default() };
        Arc::new(Shm::new(node("client"), config).unwrap())
    }

    #[test]
    fn keeps_the_rules() {
        let dir = tempfile::tempdir().unwrap();
        conformance::run(&|| {
            let (server_node, server) = server(dir.path());
            let (client, vanishing) = (client(), server.clone());
            let kill = Arc::new(move || vanishing.shut_down());
            Pair { client_node: client.node.clone(), server_node, client, server, kill }
        });
    }

    #[test]
    fn mapped_bytes_are_the_peers_own() {
        let dir = tempfile::tempdir().unwrap();
        let (node, server) = server(dir.path());
        let pool = Arc::new(HostPool::new(1 << 20, false).unwrap());
        node.exports.export("kv", vec![Region::of_pool(pool.clone())], Access::Read, HOUR).unwrap();
        node.exports.export("heap", vec![Region::of_buffer(Buffer::zeroed(64))], Access::Read, HOUR).unwrap();
        let endpoint = client().connect(&server.address().unwrap()).unwrap();
        let grant = endpoint.open("kv").unwrap();
        let mapped = endpoint.map(&grant, grant.range(4096, 5)).unwrap();
        assert_eq!(&mapped[..], [0; 5]);
        pool.mapping().write(4096, b"later");
        assert_eq!(&mapped[..], b"later", "no copy was made");
        assert!(endpoint.map(&grant, grant.range(1 << 20, 1)).is_err());
        let heap = endpoint.open("heap").err();
        assert!(matches!(heap, Some(Error::Denied { denied: Denied::Unreachable, .. })), "{heap:?}");

        node.exports.revoke("kv");
        assert!(endpoint.map(&grant, grant.range(4096, 5)).is_err(), "nothing new after revocation");
        drop((server, pool));
        assert_eq!(&mapped[..], b"later", "what is mapped stays");
    }

    #[test]
    fn slots_of_dead_grants_are_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let (node, server) = server(dir.path());
        let pool = Region::of_pool(Arc::new(HostPool::new(PAGE, false).unwrap()));
        node.exports.export("kv", vec![pool], Access::Read, HOUR).unwrap();
        let endpoint = client().connect(&server.address().unwrap()).unwrap();
        let first = endpoint.open("kv").unwrap();
        for _ in 1..SLOTS {
            endpoint.open("kv").unwrap();
        }
        assert!(matches!(endpoint.open("kv"), Err(Error::Denied { denied: Denied::Full, .. })));
        node.exports.fence();
        let again = endpoint.open("kv").unwrap();
        assert!(endpoint.map(&again, again.range(0, 1)).is_ok());
        assert!(endpoint.map(&first, first.range(0, 1)).is_err(), "its word says another grant");
    }
}
