//! Blocks in and out of a Kvasir host: in place over the Unix socket, inline over TCP.

mod handover;
mod place;

use std::fmt;
use std::io::{self, BufReader, Read};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvasir_dataplane::memory::host::Mapping;
use kvasir_dataplane::stream::ring::{Ring, Side};
use kvasir_dataplane::stream::{Eager, Stream, receive_with_fds};
use kvasir_dataplane::wire::{
    Found, HEADER_LEN, Header, Op, Outcome, Placed, Reply, Request, Stat, WireError,
};
use kvasir_dataplane::{BATCH_MAX, BlockKey, BlockMeta, Pin, checksum};

pub use handover::{Arrivals, HandOver};
pub use place::Place;

/// Where a host's data plane listens. Written `unix:/path`, `host:port` or `tcp:host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Same machine and user: blocks are read and filled in place.
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl FromStr for Endpoint {
    type Err = ClientError;

    fn from_str(text: &str) -> Result<Self, ClientError> {
        let bad = |why: String| ClientError::Endpoint { text: text.into(), why };
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let address = text.strip_prefix("tcp:").unwrap_or(text);
        let mut addrs = address.to_socket_addrs().map_err(|error| bad(error.to_string()))?;
        addrs.next().map(Self::Tcp).ok_or_else(|| bad("it resolves to no address".into()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(addr) => write!(f, "{addr}"),
        }
    }
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ask to store and remove blocks. Default true.
    pub write: bool,
    /// Compare every block read with its checksum; one that differs is reported to the host and is a miss.
    /// Default true.
    pub verify: bool,
    /// What engine hashes do not cover (model, dtype, layout, block size). Default empty.
    pub namespace: String,
    /// On whose account blocks are stored and pinned; 0 = nobody in particular. Default 0.
    pub tenant: u16,
    /// How long the host may take to answer. Default 10 s.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            write: true,
            verify: true,
            namespace: String::new(),
            tenant: 0,
            timeout: Duration::from_secs(10),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{text:?} is not an endpoint ({why}); write unix:/path or host:port")]
    Endpoint { text: String, why: String },
    #[error("no Kvasir host at {endpoint}: {source}")]
    Connect { endpoint: Endpoint, source: io::Error },
    #[error("the connection to {endpoint} broke in the middle of {op:?}: {source}; connect again")]
    Lost { endpoint: Endpoint, op: Op, source: io::Error },
    #[error("{endpoint} answered with something that is not the data protocol: {source}")]
    Protocol { endpoint: Endpoint, source: WireError },
    #[error("{endpoint} answered {op:?} with something else, or with another number of items")]
    WrongReply { endpoint: Endpoint, op: Op },
    #[error("{endpoint} refused: {message}")]
    Refused { endpoint: Endpoint, retryable: bool, message: String },
    #[error("block {key}: {}", outcome.text())]
    Block { key: BlockKey, outcome: Outcome },
    #[error("batch of {len} blocks; the most in one call is {BATCH_MAX}, send several")]
    Batch { len: usize },
    #[error("payload of {bytes} B is above the {max} B that the host takes at once; send smaller batches")]
    Payload { bytes: u64, max: u64 },
    #[error("block of {len} B does not match its announced size of {size} B")]
    Size { len: usize, size: u32 },
    #[error("block of {size} B does not fit the buffer of {len} B")]
    Buffer { size: u32, len: usize },
    #[error("the lease on block {key} ran out before it was read; get it again")]
    LeaseExpired { key: BlockKey },
    #[error("the memory that {endpoint} sent cannot be mapped: {source}")]
    Map { endpoint: Endpoint, source: io::Error },
    #[error("hand-overs need the host's Unix socket, and {endpoint} is none")]
    NotLocal { endpoint: Endpoint },
    #[error(
        "block {block}, layer {layer} does not exist: the hand-over has {blocks} blocks of {layers} layers"
    )]
    NoLayer { block: usize, layer: u32, blocks: usize, layers: u32 },
    #[error("{what} of the hand-over of request {request} is not here yet; wait for it again")]
    NotArrived { what: String, request: u64 },
    #[error("the connection to {endpoint} is unusable after an earlier error; connect again")]
    Closed { endpoint: Endpoint },
}

impl ClientError {
    /// Whether the same call may succeed later (for connection errors: on a new connection).
    pub fn retryable(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::Lost { .. }
            | Self::LeaseExpired { .. }
            | Self::NotArrived { .. }
            | Self::Closed { .. } => true,
            Self::Refused { retryable, .. } => *retryable,
            Self::Block { outcome, .. } => outcome.retryable(),
            Self::Endpoint { .. }
            | Self::Protocol { .. }
            | Self::WrongReply { .. }
            | Self::Batch { .. }
            | Self::Payload { .. }
            | Self::Size { .. }
            | Self::Buffer { .. }
            | Self::NotLocal { .. }
            | Self::NoLayer { .. }
            | Self::Map { .. } => false,
        }
    }
}

/// What became of a block that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Stored,
    AlreadyStored,
    /// Another writer is storing it.
    InProgress,
}

/// Leases and addresses of a local reader.
struct Local {
    mapping: Mapping,
    /// Leases done with, to go back with the next `get`.
    done: Mutex<Vec<u64>>,
    lease: Duration,
}

/// A connection to one host. Calls take turns; use one client per thread for more.
pub struct Client {
    endpoint: Endpoint,
    options: Options,
    local: Option<Arc<Local>>,
    payload_max: u64,
    checksum_failures: AtomicU64,
    wire: Mutex<Wire>,
}

struct Wire {
    reader: BufReader<Eager>,
    writer: Stream,
    next: u64,
    frame: Vec<u8>,
    body: Vec<u8>,
    broken: bool,
}

impl Client {
    pub fn connect(endpoint: &Endpoint, options: Options) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { endpoint: endpoint.clone(), source };
        let stream = match endpoint {
            Endpoint::Unix(path) => Stream::Unix(UnixStream::connect(path).map_err(failed)?),
            Endpoint::Tcp(addr) => {
                Stream::Tcp(TcpStream::connect_timeout(addr, options.timeout).map_err(failed)?)
            }
        };
        stream.set_timeouts(options.timeout).map_err(failed)?;
        let writer = stream.try_clone().map_err(failed)?;
        let reader = BufReader::with_capacity(16 << 10, Eager::new(stream));
        let mut wire = Wire { reader, writer, next: 1, frame: Vec::new(), body: Vec::new(), broken: false };
        let hello = Request::Hello {
            wants_write: options.write,
            wants_ring: true,
            tenant: options.tenant,
            namespace: options.namespace.clone(),
        };
        let (reply, fds) = wire.greet(&hello).map_err(|error| error.at(endpoint, Op::Hello))?;
        let Reply::Hello { shared, writable, ring, pool_bytes, lease_ms, payload_max } = reply else {
            return Err(wrong(endpoint, Op::Hello, reply));
        };
        let mut fds = fds.into_iter();
        let unmapped = |source| ClientError::Map { endpoint: endpoint.clone(), source };
        let local = match fds.next().filter(|_| shared) {
            Some(fd) => {
                let mapping = Mapping::new(fd.as_fd(), pool_bytes, writable).map_err(unmapped)?;
                let lease = Duration::from_millis(lease_ms);
                Some(Arc::new(Local { mapping, done: Mutex::new(Vec::new()), lease }))
            }
            None => None,
        };
        if let Some(memory) = fds.next().filter(|_| ring) {
            wire.share(&memory).map_err(unmapped)?;
        }
        let (endpoint, wire) = (endpoint.clone(), Mutex::new(wire));
        Ok(Self { endpoint, options, local, payload_max, checksum_failures: AtomicU64::new(0), wire })
    }

    /// Blocks that came back with other bytes than their checksums say, and were handed out as misses.
    pub fn checksum_failures(&self) -> u64 {
        self.checksum_failures.load(Ordering::Relaxed)
    }

    /// Whether blocks are read in place.
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// The key of the block that an engine names by `engine_hash`, in this client's namespace.
    pub fn key(&self, engine_hash: &[u8]) -> BlockKey {
        BlockKey::from_engine_hash(&self.options.namespace, engine_hash)
    }

    pub fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        match self.call(&Request::Exists(keys.to_vec()))? {
            Reply::Exists(found) if found.len() == keys.len() => Ok(found),
            other => Err(wrong(&self.endpoint, Op::Exists, other)),
        }
    }

    /// What the host knows about each key; none if it is not resident. Not a use.
    pub fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Option<Stat>>, ClientError> {
        self.check_batch(keys.len())?;
        match self.call(&Request::Stat(keys.to_vec()))? {
            Reply::Stat(stats) if stats.len() == keys.len() => Ok(stats),
            other => Err(wrong(&self.endpoint, Op::Stat, other)),
        }
    }

    /// Removes blocks; whether each was there.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Remove(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Keeps blocks from being evicted for a while, on the account of this client's tenant; whether each was there.
    pub fn pin(&self, keys: &[BlockKey], pin: Pin) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Pin { pin, keys: keys.to_vec() }, keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Ends the pins of this client's tenant; whether there was one on each.
    pub fn unpin(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Unpin(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Evicts blocks now, in spite of soft pins; whether each was there. A block that is being read or has a hard pin
    /// stays, with an error.
    pub fn evict(&self, keys: &[BlockKey]) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Evict(keys.to_vec()), keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Asks for blocks that are stored on this host to be held by `copies` hosts in all. The host answers at once and
    /// makes the copies in the background; it makes them again when it loses a holder. Ask again with a larger number to
    /// have more; a smaller one changes nothing.
    ///
    /// Per block: an error if it is not in the host's pool, or the host cannot promise that many.
    pub fn replicate(
        &self,
        keys: &[BlockKey],
        copies: u8,
    ) -> Result<Vec<Result<(), ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Replicate { copies, keys: keys.to_vec() }, keys.len())?;
        let result = |(&key, outcome)| match outcome {
            Outcome::Done => Ok(()),
            outcome => Err(ClientError::Block { key, outcome }),
        };
        Ok(keys.iter().zip(outcomes).map(result).collect())
    }

    /// Has the host compare blocks with their checksums; true where the block is resident and intact.
    pub fn verify(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Verify(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Stores one block.
    pub fn put(&self, meta: &BlockMeta, bytes: &[u8]) -> Result<Put, ClientError> {
        self.put_batch(&[(*meta, bytes)])?.remove(0)
    }

    /// Stores blocks; each on its own may fail, for instance because the pool is full.
    pub fn put_batch(
        &self,
        blocks: &[(BlockMeta, &[u8])],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        self.check_batch(blocks.len())?;
        for (meta, bytes) in blocks {
            if bytes.len() as u64 != u64::from(meta.size) {
                return Err(ClientError::Size { len: bytes.len(), size: meta.size });
            }
        }
        let outcomes = match &self.local {
            Some(local) => self.put_in_place(local, blocks)?,
            None => self.put_inline(blocks)?,
        };
        let results = blocks.iter().zip(outcomes).map(|((meta, _), outcome)| match outcome {
            Outcome::Done => Ok(Put::Stored),
            Outcome::AlreadyStored => Ok(Put::AlreadyStored),
            Outcome::InProgress => Ok(Put::InProgress),
            outcome => Err(ClientError::Block { key: meta.key, outcome }),
        });
        Ok(results.collect())
    }

    fn put_in_place(
        &self,
        local: &Local,
        blocks: &[(BlockMeta, &[u8])],
    ) -> Result<Vec<Outcome>, ClientError> {
        let metas: Vec<BlockMeta> = blocks.iter().map(|(meta, _)| *meta).collect();
        let placed = match self.call(&Request::Reserve(metas))? {
            Reply::Reserve(placed) if placed.len() == blocks.len() => placed,
            other => return Err(wrong(&self.endpoint, Op::Reserve, other)),
        };
        let mut outcomes = Vec::with_capacity(blocks.len());
        let mut commits = Vec::with_capacity(blocks.len());
        for (at, (placed, (_, bytes))) in placed.iter().zip(blocks).enumerate() {
            let last = at + 1 == blocks.len();
            match *placed {
                Placed::At { reservation, offset } => {
                    let soon = || {
                        if last {
                            self.announce()
                        }
                    };
                    let Some(sum) = local.mapping.write_checksummed(offset, bytes, soon) else {
                        return Err(ClientError::WrongReply {
                            endpoint: self.endpoint.clone(),
                            op: Op::Reserve,
                        });
                    };
                    commits.push((at, (reservation, sum)));
                    outcomes.push(Outcome::Internal);
                }
                Placed::Not(outcome) => outcomes.push(outcome),
            }
        }
        if !commits.is_empty() {
            let items: Vec<_> = commits.iter().map(|(_, item)| *item).collect();
            let results = self.outcomes(&Request::Commit(items), commits.len())?;
            commits.iter().zip(results).for_each(|((at, _), result)| outcomes[*at] = result);
        }
        Ok(outcomes)
    }

    /// Has the host awake when the next call comes, in a few microseconds.
    fn announce(&self) {
        // While another call is on its way the host is awake; an error will be that of the next call.
        if let Ok(wire) = self.wire.try_lock()
            && let Stream::Ring(ring) = &wire.writer
        {
            let _ = ring.announce();
        }
    }

    fn put_inline(&self, blocks: &[(BlockMeta, &[u8])]) -> Result<Vec<Outcome>, ClientError> {
        let bytes: u64 = blocks.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        if bytes > self.payload_max {
            return Err(ClientError::Payload { bytes, max: self.payload_max });
        }
        let request = Request::Put(blocks.iter().map(|(meta, bytes)| (*meta, checksum(bytes))).collect());
        let payload: Vec<&[u8]> = blocks.iter().map(|(_, bytes)| *bytes).collect();
        let reply = self.exchange(&request, &payload, no_payload)?;
        self.expect_outcomes(Op::Put, reply, blocks.len())
    }

    /// The resident ones of `keys`, for a request of workload class `class` (0 = unknown). Local blocks are lent:
    /// read them before their lease runs out.
    pub fn get(&self, keys: &[BlockKey], class: u16) -> Result<Vec<Option<Block>>, ClientError> {
        self.check_batch(keys.len())?;
        let (mut blocks, sums) = match &self.local {
            Some(local) => self.get_lent(local, keys, class)?,
            None => self.get_owned(keys, class)?,
        };
        let mut bad = Vec::new();
        if self.options.verify {
            for (block, sum) in blocks.iter_mut().zip(sums) {
                if block.as_ref().is_some_and(|block| checksum(block.raw()) != sum) {
                    bad.extend(block.take().map(|block| block.key));
                }
            }
        }
        self.report(&bad)?;
        Ok(blocks)
    }

    fn get_lent(
        &self,
        local: &Arc<Local>,
        keys: &[BlockKey],
        class: u16,
    ) -> Result<(Vec<Option<Block>>, Vec<u64>), ClientError> {
        let release = local.take_done();
        // The host's lease starts later than this, so ours ends first.
        let until = Instant::now() + local.lease;
        let entries = match self.call(&Request::Get { class, release, keys: keys.to_vec() })? {
            Reply::Get(entries) if entries.len() == keys.len() => entries,
            other => return Err(wrong(&self.endpoint, Op::Get, other)),
        };
        let lend = |(&key, entry)| match entry {
            Found::Hit { offset, size, checksum, lease } => {
                let lent = Lent { local: Arc::clone(local), offset, size, lease, until };
                (Some(Block { key, bytes: Bytes::Lent(lent) }), checksum)
            }
            Found::Not(_) => (None, 0),
        };
        Ok(keys.iter().zip(entries).map(lend).unzip())
    }

    fn get_owned(
        &self,
        keys: &[BlockKey],
        class: u16,
    ) -> Result<(Vec<Option<Block>>, Vec<u64>), ClientError> {
        let mut received = Vec::new();
        let found = self.get_remote(keys, class, |reader, _, size| {
            let mut bytes = vec![0; size as usize];
            reader.read_exact(&mut bytes)?;
            received.push(bytes);
            Ok(())
        })?;
        let mut received = received.into_iter();
        let own = |(&key, found): (&BlockKey, &Option<(u32, u64)>)| match found {
            Some((_, sum)) => (received.next().map(|bytes| Block { key, bytes: Bytes::Owned(bytes) }), *sum),
            None => (None, 0),
        };
        Ok(keys.iter().zip(&found).map(own).unzip())
    }

    /// Reads into the caller's buffers, one per key; returns the size of each block found. Remote bytes go
    /// straight from the socket into the buffers.
    pub fn get_into(
        &self,
        keys: &[BlockKey],
        class: u16,
        buffers: &mut [&mut [u8]],
    ) -> Result<Vec<Option<u32>>, ClientError> {
        self.check_batch(keys.len())?;
        if buffers.len() != keys.len() {
            return Err(ClientError::Batch { len: buffers.len() });
        }
        if self.local.is_some() {
            let blocks = self.get(keys, class)?.into_iter().zip(buffers);
            return blocks
                .map(|(block, buffer)| block.map(|block| block.copy_to(buffer)).transpose())
                .collect();
        }
        let mut too_small = None;
        let found =
            self.get_remote(keys, class, |reader, at, size| match buffers[at].get_mut(..size as usize) {
                Some(buffer) => reader.read_exact(buffer),
                None => {
                    too_small = Some(ClientError::Buffer { size, len: buffers[at].len() });
                    io::copy(&mut reader.take(size.into()), &mut io::sink()).map(drop)
                }
            })?;
        if let Some(error) = too_small {
            return Err(error);
        }
        let (mut bad, mut sizes) = (Vec::new(), Vec::with_capacity(keys.len()));
        for (at, found) in found.into_iter().enumerate() {
            let intact = |&(size, sum): &(u32, u64)| {
                !self.options.verify || checksum(&buffers[at][..size as usize]) == sum
            };
            if found.is_some_and(|found| !intact(&found)) {
                bad.push(keys[at]);
            }
            sizes.push(found.filter(intact).map(|(size, _)| size));
        }
        self.report(&bad)?;
        Ok(sizes)
    }

    /// Size and checksum of each block found; `receive(reader, index, size)` takes the bytes of each in turn.
    fn get_remote(
        &self,
        keys: &[BlockKey],
        class: u16,
        mut receive: impl FnMut(&mut BufReader<Eager>, usize, u32) -> io::Result<()>,
    ) -> Result<Vec<Option<(u32, u64)>>, ClientError> {
        let request = Request::Get { class, release: Vec::new(), keys: keys.to_vec() };
        let max = self.payload_max;
        self.exchange(&request, &[], |reader, reply, payload_len| {
            let entries = match reply {
                Reply::Get(entries) if entries.len() == keys.len() => entries,
                other => return Err(Fault::Reply(other)),
            };
            let found: Vec<Option<(u32, u64)>> = entries
                .into_iter()
                .map(|entry| match entry {
                    Found::Hit { size, checksum, .. } => Some((size, checksum)),
                    Found::Not(_) => None,
                })
                .collect();
            let total: u64 = found.iter().flatten().map(|&(size, _)| u64::from(size)).sum();
            if total != payload_len || total > max {
                return Err(WireError::Value { field: "payload length", value: payload_len }.into());
            }
            for (at, found) in found.iter().enumerate() {
                if let Some((size, _)) = found {
                    receive(reader, at, *size)?;
                }
            }
            Ok(found)
        })
    }

    /// Tells the host about blocks that do not match their checksums, so that it drops the corrupt ones.
    fn report(&self, bad: &[BlockKey]) -> Result<(), ClientError> {
        if bad.is_empty() {
            return Ok(());
        }
        self.checksum_failures.fetch_add(bad.len() as u64, Ordering::Relaxed);
        self.verify(bad).map(drop)
    }

    fn check_batch(&self, len: usize) -> Result<(), ClientError> {
        if len > BATCH_MAX { Err(ClientError::Batch { len }) } else { Ok(()) }
    }

    fn outcomes(&self, request: &Request, len: usize) -> Result<Vec<Outcome>, ClientError> {
        let reply = self.call(request)?;
        self.expect_outcomes(request.op(), reply, len)
    }

    fn expect_outcomes(&self, op: Op, reply: Reply, len: usize) -> Result<Vec<Outcome>, ClientError> {
        match reply {
            Reply::Outcomes(of, outcomes) if of == op && outcomes.len() == len => Ok(outcomes),
            other => Err(wrong(&self.endpoint, op, other)),
        }
    }

    fn call(&self, request: &Request) -> Result<Reply, ClientError> {
        self.exchange(request, &[], no_payload)
    }

    fn exchange<T>(
        &self,
        request: &Request,
        payload: &[&[u8]],
        receive: impl FnOnce(&mut BufReader<Eager>, Reply, u64) -> Result<T, Fault>,
    ) -> Result<T, ClientError> {
        let mut wire = lock(&self.wire);
        if wire.broken {
            return Err(ClientError::Closed { endpoint: self.endpoint.clone() });
        }
        // Whatever goes wrong in the middle, the two sides no longer agree on where a frame starts.
        wire.broken = true;
        let result =
            wire.exchange(request, payload, receive).map_err(|fault| fault.at(&self.endpoint, request.op()));
        wire.broken = result.is_err();
        result
    }
}

fn found_or_failed((&key, outcome): (&BlockKey, Outcome)) -> Result<bool, ClientError> {
    match outcome {
        Outcome::Done => Ok(true),
        Outcome::Missing => Ok(false),
        outcome => Err(ClientError::Block { key, outcome }),
    }
}

/// Takes a reply that is all there is to it.
fn no_payload(_: &mut BufReader<Eager>, reply: Reply, payload_len: u64) -> Result<Reply, Fault> {
    match payload_len {
        0 => Ok(reply),
        value => Err(WireError::Value { field: "payload length", value }.into()),
    }
}

/// What went wrong on the wire, before it is known where and in what.
enum Fault {
    Io(io::Error),
    Wire(WireError),
    Reply(Reply),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<WireError> for Fault {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl Fault {
    fn at(self, endpoint: &Endpoint, op: Op) -> ClientError {
        let endpoint = endpoint.clone();
        match self {
            Self::Io(source) => ClientError::Lost { endpoint, op, source },
            Self::Wire(source) => ClientError::Protocol { endpoint, source },
            Self::Reply(reply) => wrong(&endpoint, op, reply),
        }
    }
}

/// The error for a reply that does not answer the question.
fn wrong(endpoint: &Endpoint, op: Op, reply: Reply) -> ClientError {
    let endpoint = endpoint.clone();
    match reply {
        Reply::Error { retryable, message } | Reply::Refused { retryable, message } => {
            ClientError::Refused { endpoint, retryable, message }
        }
        _ => ClientError::WrongReply { endpoint, op },
    }
}

impl Wire {
    fn greet(&mut self, hello: &Request) -> Result<(Reply, Vec<OwnedFd>), Fault> {
        hello.encode(0, 0, &mut self.frame);
        // A host that is full says so and closes, perhaps before it reads this; its answer is still there.
        let sent = self.writer.write_all(&self.frame);
        let mut header = [0; HEADER_LEN];
        let fds = match &mut self.writer {
            Stream::Unix(stream) => receive_with_fds(stream, &mut header),
            _ => self.reader.read_exact(&mut header).map(|()| Vec::new()),
        };
        if fds.is_err() {
            sent?;
        }
        let fds = fds?;
        let header = Header::decode(&header)?;
        Ok((self.read_reply(header)?, fds))
    }

    /// Goes on through memory that the host shares.
    fn share(&mut self, memory: &OwnedFd) -> io::Result<()> {
        let Stream::Unix(socket) = &self.writer else { return Ok(()) };
        let ring = Arc::new(Ring::new(memory.as_fd(), Side::Client, socket.try_clone()?)?);
        self.writer = Stream::Ring(Arc::clone(&ring));
        self.reader = BufReader::with_capacity(16 << 10, Eager::new(Stream::Ring(ring)));
        Ok(())
    }

    fn exchange<T>(
        &mut self,
        request: &Request,
        payload: &[&[u8]],
        receive: impl FnOnce(&mut BufReader<Eager>, Reply, u64) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let id = self.next;
        self.next += 1;
        let payload_len = payload.iter().map(|part| part.len() as u64).sum();
        request.encode(id, payload_len, &mut self.frame);
        let sent = if payload.is_empty() {
            self.writer.write_all(&self.frame)
        } else {
            let parts: Vec<&[u8]> = std::iter::once(&self.frame[..]).chain(payload.iter().copied()).collect();
            self.writer.write_parts(&parts)
        };
        let mut header = [0; HEADER_LEN];
        // A host that refuses a request may close before it has read all of it; its reason is worth more.
        let read = self.reader.read_exact(&mut header);
        if read.is_err() {
            sent?;
        }
        read?;
        let header = Header::decode(&header)?;
        let reply = self.read_reply(header)?;
        if matches!(reply, Reply::Error { .. }) {
            return Err(Fault::Reply(reply));
        }
        if header.request != id {
            return Err(WireError::Value { field: "request id", value: header.request }.into());
        }
        receive(&mut self.reader, reply, header.payload_len)
    }

    fn read_reply(&mut self, header: Header) -> Result<Reply, Fault> {
        if !header.reply {
            return Err(WireError::Op { op: header.op as u8, flags: 0 }.into());
        }
        self.body.resize(header.body_len as usize, 0);
        self.reader.read_exact(&mut self.body)?;
        Ok(Reply::decode(header.op, &self.body)?)
    }
}

impl Local {
    /// Leases to send back now, as many as one call takes.
    fn take_done(&self) -> Vec<u64> {
        let mut done = lock(&self.done);
        let keep = done.len().saturating_sub(BATCH_MAX);
        done.split_off(keep)
    }
}

/// A block that was found: lent in the host's pool, or received.
pub struct Block {
    pub key: BlockKey,
    bytes: Bytes,
}

enum Bytes {
    Lent(Lent),
    Owned(Vec<u8>),
}

struct Lent {
    local: Arc<Local>,
    offset: u64,
    size: u32,
    lease: u64,
    until: Instant,
}

impl Block {
    /// Bytes.
    pub fn size(&self) -> u32 {
        match &self.bytes {
            Bytes::Lent(lent) => lent.size,
            Bytes::Owned(bytes) => bytes.len() as u32,
        }
    }

    /// The bytes; in place if the block is lent. A reader that may still be at it when the lease runs out (10 s by
    /// default) copies instead: [`copy_to`](Self::copy_to) notices.
    ///
    /// # Errors
    /// [`ClientError::LeaseExpired`], if it has run out already.
    pub fn bytes(&self) -> Result<&[u8], ClientError> {
        match &self.bytes {
            Bytes::Lent(lent) if Instant::now() >= lent.until => {
                Err(ClientError::LeaseExpired { key: self.key })
            }
            _ => Ok(self.raw()),
        }
    }

    /// Copies the block to the front of `buffer`; its size.
    ///
    /// # Errors
    /// [`ClientError::Buffer`] if it does not fit, [`ClientError::LeaseExpired`] if the lease ran out before the
    /// copy was done (the buffer is then undefined).
    pub fn copy_to(&self, buffer: &mut [u8]) -> Result<u32, ClientError> {
        let bytes = self.bytes()?;
        let len = buffer.len();
        let Some(to) = buffer.get_mut(..bytes.len()) else {
            return Err(ClientError::Buffer { size: self.size(), len });
        };
        to.copy_from_slice(bytes);
        self.bytes().map(|_| self.size())
    }

    fn raw(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Lent(lent) => lent.local.mapping.bytes(lent.offset, lent.size.into()).unwrap_or(&[]),
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("key", &self.key).field("size", &self.size()).finish_non_exhaustive()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        lock(&self.local.done).push(self.lease);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
