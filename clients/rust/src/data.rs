//! Blocks in and out of a Kvasir host: in place over the Unix socket, inline over TCP.

mod block;
mod calls;
#[cfg(feature = "gpu")]
mod device;
mod endpoint;
mod error;
mod get;
mod handing;
mod handover;
mod jobs;
mod label;
mod memory;
mod options;
mod place;
mod put;
mod reconnecting;
mod runs;
mod scatter;
mod transfer;
mod whereabouts;
mod wire;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_memory::host::Mapping;
use kvasir_os::net::TcpStream;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BATCH_MAX;
use kvasir_protocol::stream::{Stream, connect_unix};
use kvasir_protocol::wire::{Op, Outcome, Reply, Request};

use self::block::Local;
use self::error::wrong;
use self::wire::{Fault, Reader, Wire, no_payload};
use crate::sync::Mutex;
pub use block::Block;
#[cfg(feature = "gpu")]
pub use device::DeviceBlocks;
pub use endpoint::Endpoint;
pub use error::ClientError;
pub use handing::{Handing, HandingError, HandingOptions, Incoming, Outgoing};
pub use handover::{Arrivals, HandOver};
pub use jobs::{Done, JobError, JobOptions, Jobs};
#[cfg(feature = "gpu")]
pub use kvasir_gpu::memory::{CudaError, Device, DevicePlan, DevicePlanError, Event};
pub use kvasir_memory::runs::{Plan, PlanError, Run};
pub use kvasir_memory::shared::Shared;
pub use kvasir_protocol::block::{BlockKey, BlockMeta, Pin};
pub use kvasir_protocol::wire::VERSIONS;
pub use label::{Label, LabelFault, Namespace};
pub use memory::JobMemory;
pub use options::{Counts, Options};
pub use place::Place;
pub use put::Put;
pub use reconnecting::Reconnecting;
pub use whereabouts::{Removals, Source};

/// How long past a deadline a host may take to answer a last word. If it does not, the connection is ended, and with it ends,
/// at the host, whatever the word was about.
const LAST_WORD: Duration = Duration::from_millis(100);
pub use transfer::Transfer;

/// A connection to one host. Calls take turns; use one client per thread for more.
pub struct Client {
    endpoint: Endpoint,
    options: Options,
    local: Option<Arc<Local>>,
    boot: u64,
    /// The version of the protocol on which both sides agreed.
    version: u8,
    payload_max: u64,
    deadline: Mutex<Option<Instant>>,
    wire: Mutex<Wire>,
    /// The same connection again, to end it while a call waits.
    line: Stream,
}

impl Client {
    pub fn connect(endpoint: &Endpoint, options: Options) -> Result<Self, ClientError> {
        let limit = options.timeout;
        Self::connect_within(endpoint, options, limit)
    }

    /// `limit` is how long each step of connecting may take, if that is shorter than the options' timeout.
    fn connect_within(endpoint: &Endpoint, options: Options, limit: Duration) -> Result<Self, ClientError> {
        // A socket takes 0 for no end.
        let limit = limit.min(options.timeout).max(Duration::from_millis(1));
        let failed = |source| ClientError::Connect { endpoint: endpoint.clone(), source };
        let stream = match endpoint {
            Endpoint::Unix(path) => Stream::Unix(connect_unix(path, limit).map_err(failed)?),
            Endpoint::Tcp(addr) => {
                let stream = TcpStream::connect_timeout(addr, limit).map_err(failed)?;
                options.dress(stream).map_err(failed)?
            }
        };
        let mut wire = Wire::new(stream, limit).map_err(failed)?;
        let hello = Request::Hello {
            versions: VERSIONS,
            wants_write: options.write,
            wants_ring: true,
            tenant: options.tenant,
            namespace: options.namespace.clone(),
            token: options.token.clone(),
        };
        let (reply, fds, version) = wire.greet(&hello).map_err(|error| error.at(endpoint, Op::Hello))?;
        let Reply::Hello { shared, writable, ring, boot, pool_bytes, lease_ms, reservation_ms, payload_max } =
            reply
        else {
            return Err(wrong(endpoint, Op::Hello, reply));
        };
        let mut fds = fds.into_iter();
        let unmapped = |source| ClientError::Map { endpoint: endpoint.clone(), source };
        let local = match fds.next().filter(|_| shared) {
            Some(fd) => {
                let mapping = Mapping::new(fd.as_fd(), pool_bytes, writable).map_err(unmapped)?;
                let mapping = Arc::new(mapping);
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
        let line = wire.writer.try_clone().map_err(failed)?;
        options.counts.connections.fetch_add(1, Ordering::Relaxed);
        options.counts.boot.store(boot, Ordering::Relaxed);
        let (endpoint, wire, deadline) = (endpoint.clone(), Mutex::new(wire), Mutex::new(None));
        Ok(Self { endpoint, options, local, boot, version, payload_max, deadline, wire, line })
    }

    /// Blocks that came back with bytes that differ from their checksums, and were handed out as misses: to all clients that
    /// share [`Options::counts`].
    pub fn checksum_failures(&self) -> u64 {
        self.options.counts.checksum_failures.load(Ordering::Relaxed)
    }

    /// Ends the connection now. A call that waits for the host fails at once; one that copies ends with its copy.
    pub fn hang_up(&self) {
        // This comes first, because the host takes back what it lent as soon as it sees the end.
        self.disown();
        self.line.shutdown();
    }

    /// A random number of the host's run that this is a connection to. With another one, what a caller remembers of the
    /// host's blocks is void.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// The time by which calls from now on must be answered, on top of [`Options::timeout`]; `None` ends that. A call that
    /// begins later fails with [`ClientError::DeadlinePassed`] and leaves the connection as it is. One that has begun is
    /// given up, and the connection with it, since its answer may still come. The last word to the host about something
    /// that has begun (a commit, a release) is said even later, and its answer waited for until the deadline, or for
    /// 100 ms if that is longer.
    pub fn set_deadline(&self, deadline: Option<Instant>) {
        *self.deadline.lock() = deadline;
    }

    /// Whether blocks are read in place.
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// The key of the block that an engine names by `engine_hash`, in this client's namespace.
    pub fn key(&self, engine_hash: &[u8]) -> BlockKey {
        BlockKey::from_engine_hash(&self.options.namespace, engine_hash)
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

    /// Whether it broke or the host has closed it. Then it is never used again, and what was lent over it is not read.
    fn is_over(&self) -> bool {
        // A call that is under way notices by itself.
        let Some(mut wire) = self.wire.try_lock() else { return false };
        wire.broken |= wire.writer.is_hung_up();
        if wire.broken {
            self.disown();
        }
        wire.broken
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
        payload: &[Shared<'_>],
        receive: impl FnOnce(&mut Reader, Reply, u64) -> Result<T, Fault>,
    ) -> Result<T, ClientError> {
        let mut wire = self.wire.lock();
        // Through shared memory an answer can come after the socket is closed.
        if wire.broken || self.local.as_ref().is_some_and(|local| local.is_dead()) {
            return Err(ClientError::Closed { endpoint: self.endpoint.clone() });
        }
        let (op, endpoint) = (request.op(), &self.endpoint);
        let mut deadline = *self.deadline.lock();
        if is_last_word(op) {
            deadline = deadline.map(|deadline| deadline.max(Instant::now() + LAST_WORD));
        } else if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(ClientError::DeadlinePassed { endpoint: endpoint.clone(), op });
        }
        // It stays so unless all goes well to the end.
        wire.broken = true;
        let limited = wire.limit(self.options.timeout, deadline).map_err(Fault::from);
        let result = limited.and_then(|()| wire.exchange(request, payload, receive));
        let result = result.map_err(|fault| fault.at(endpoint, op));
        wire.broken = result.is_err();
        if wire.broken {
            // This is done at once, because the host ends with the connection what was begun over it.
            self.hang_up();
        }
        result
    }
}

/// Whether it ends something at the host, which otherwise would wait for it.
fn is_last_word(op: Op) -> bool {
    use Op::{Abort, Commit, DropHandOver, EndHold, Finish, LeaveArrivals, Release};
    matches!(op, Commit | Abort | Release | EndHold | Finish | DropHandOver | LeaveArrivals)
}

impl Drop for Client {
    fn drop(&mut self) {
        // This comes before the connection is closed: then the host takes back what it has lent.
        self.disown();
    }
}

#[cfg(test)]
mod tests;
