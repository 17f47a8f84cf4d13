//! Blocks in and out of a Kvasir host: in place over the Unix socket, inline over TCP.

mod block;
mod error;
mod handover;
mod place;
mod wire;

use parking_lot::Mutex;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_memory::host::Mapping;
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta, Pin, checksum};
use kvasir_protocol::stream::{Eager, Stream};
use kvasir_protocol::wire::{Found, Op, Outcome, Placed, Reply, Request, Stat, WireError};

use self::block::{Bytes, Lent, Local};
use self::error::wrong;
use self::wire::{Fault, Wire, no_payload};
pub use block::Block;
pub use error::ClientError;
pub use handover::{Arrivals, HandOver};
pub use kvasir_memory::shared::Shared;
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
    /// The tenant on whose account blocks are stored and pinned; 0 = none in particular. Default 0.
    pub tenant: u16,
    /// Who this client is, where it comes over TCP (`kvasir token new`). Default none.
    pub token: String,
    /// How long the host may take to answer. Default 10 s.
    pub timeout: Duration,
    /// TLS, for connections over TCP. Default none.
    #[cfg(feature = "tls")]
    pub tls: Option<kvasir_tls::ClientTls>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            write: true,
            verify: true,
            namespace: String::new(),
            tenant: 0,
            token: String::new(),
            timeout: Duration::from_secs(10),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

impl Options {
    /// A connection over TCP, encrypted if TLS is asked for.
    fn dress(&self, stream: TcpStream) -> io::Result<Stream> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            return tls.stream(stream);
        }
        Ok(Stream::Tcp(stream))
    }
}

/// The outcome of putting a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Stored,
    AlreadyStored,
    /// Another writer is storing it.
    InProgress,
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

impl Client {
    pub fn connect(endpoint: &Endpoint, options: Options) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { endpoint: endpoint.clone(), source };
        let stream = match endpoint {
            Endpoint::Unix(path) => Stream::Unix(UnixStream::connect(path).map_err(failed)?),
            Endpoint::Tcp(addr) => {
                let stream = TcpStream::connect_timeout(addr, options.timeout).map_err(failed)?;
                options.dress(stream).map_err(failed)?
            }
        };
        stream.set_timeouts(options.timeout).map_err(failed)?;
        let mut wire = Wire::new(stream).map_err(failed)?;
        let hello = Request::Hello {
            wants_write: options.write,
            wants_ring: true,
            tenant: options.tenant,
            namespace: options.namespace.clone(),
            token: options.token.clone(),
        };
        let (reply, fds) = wire.greet(&hello).map_err(|error| error.at(endpoint, Op::Hello))?;
        let Reply::Hello { shared, writable, ring, pool_bytes, lease_ms, reservation_ms, payload_max } =
            reply
        else {
            return Err(wrong(endpoint, Op::Hello, reply));
        };
        let mut fds = fds.into_iter();
        let unmapped = |source| ClientError::Map { endpoint: endpoint.clone(), source };
        let local = match fds.next().filter(|_| shared) {
            Some(fd) => {
                let mapping = Mapping::new(fd.as_fd(), pool_bytes, writable).map_err(unmapped)?;
                let (lease, filling) =
                    (Duration::from_millis(lease_ms), Duration::from_millis(reservation_ms));
                let (done, dead) = (Mutex::new(Vec::new()), AtomicBool::new(false));
                Some(Arc::new(Local { mapping, done, lease, filling, dead }))
            }
            None => None,
        };
        if let Some(memory) = fds.next().filter(|_| ring) {
            wire.share(&memory).map_err(unmapped)?;
        }
        let (endpoint, wire) = (endpoint.clone(), Mutex::new(wire));
        Ok(Self { endpoint, options, local, payload_max, checksum_failures: AtomicU64::new(0), wire })
    }

    /// Blocks that came back with bytes that differ from their checksums, and were handed out as misses.
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

    /// What the host knows about each key; `None` if it is not resident. Not a use.
    pub fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Option<Stat>>, ClientError> {
        self.check_batch(keys.len())?;
        match self.call(&Request::Stat(keys.to_vec()))? {
            Reply::Stat(stats) if stats.len() == keys.len() => Ok(stats),
            other => Err(wrong(&self.endpoint, Op::Stat, other)),
        }
    }

    /// Removes blocks. Returns whether each was there.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Remove(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Keeps blocks from being evicted for a while, for this client's tenant. Returns whether each was there.
    pub fn pin(&self, keys: &[BlockKey], pin: Pin) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Pin { pin, keys: keys.to_vec() }, keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Ends the pins of this client's tenant. Returns whether there was one on each.
    pub fn unpin(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Unpin(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Evicts blocks now, even with soft pins. Returns whether each was there. A block that is being read or has a hard pin
    /// stays, with an error.
    pub fn evict(&self, keys: &[BlockKey]) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Evict(keys.to_vec()), keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Asks for blocks that are stored on this host to be held by `copies` hosts in total. The host answers at once and
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

    /// Has the host compare blocks with their checksums. Returns true for each that is resident and intact.
    pub fn verify(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Verify(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Stores one block.
    pub fn put(&self, meta: &BlockMeta, bytes: &[u8]) -> Result<Put, ClientError> {
        self.put_batch(&[(*meta, bytes)])?.remove(0)
    }

    /// Stores blocks. Each may fail on its own, for instance because the pool is full.
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
        // The host counts from later, so ours ends first.
        let until = Instant::now() + local.filling;
        let placed = match self.call(&Request::Reserve(metas))? {
            Reply::Reserve(placed) if placed.len() == blocks.len() => placed,
            other => return Err(wrong(&self.endpoint, Op::Reserve, other)),
        };
        let mut outcomes = Vec::with_capacity(blocks.len());
        let (mut commits, mut late) = (Vec::with_capacity(blocks.len()), Vec::new());
        for (at, (placed, (_, bytes))) in placed.iter().zip(blocks).enumerate() {
            let last = at + 1 == blocks.len();
            match *placed {
                // After that the place may soon be another's.
                Placed::At { reservation, .. } if Instant::now() >= until => {
                    late.push(reservation);
                    outcomes.push(Outcome::Aborted);
                }
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
                    if Instant::now() >= until {
                        late.push(reservation);
                        outcomes.push(Outcome::Aborted);
                    } else {
                        commits.push((at, (reservation, sum)));
                        outcomes.push(Outcome::Internal);
                    }
                }
                Placed::Not(outcome) => outcomes.push(outcome),
            }
        }
        if !late.is_empty() {
            // Tells the host that nothing is written there any more.
            let count = late.len();
            self.outcomes(&Request::Abort(late), count)?;
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
        // While another call is on its way the host is awake; an error will show up in the next call.
        if let Some(wire) = self.wire.try_lock()
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
                if block.as_ref().is_some_and(|block| block.raw().checksum() != sum) {
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

    /// The connection is over, or about to be: what it was lent is no longer this client's.
    fn disown(&self) {
        if let Some(local) = &self.local {
            local.dead.store(true, Ordering::SeqCst);
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
        let mut wire = self.wire.lock();
        if wire.broken {
            return Err(ClientError::Closed { endpoint: self.endpoint.clone() });
        }
        // Stays so unless all goes well to the end.
        wire.broken = true;
        let result =
            wire.exchange(request, payload, receive).map_err(|fault| fault.at(&self.endpoint, request.op()));
        wire.broken = result.is_err();
        if wire.broken {
            self.disown();
        }
        result
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Before the connection is closed, at which the host takes back what it has lent.
        self.disown();
    }
}

fn found_or_failed((&key, outcome): (&BlockKey, Outcome)) -> Result<bool, ClientError> {
    match outcome {
        Outcome::Done => Ok(true),
        Outcome::Missing => Ok(false),
        outcome => Err(ClientError::Block { key, outcome }),
    }
}

#[cfg(test)]
mod tests;
