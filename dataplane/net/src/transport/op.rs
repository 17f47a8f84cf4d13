//! Operations and how they end.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Capabilities;
use super::grant::{Denied, Grant, RemoteRange};
use kvasir_memory::region::{LocalRange, Location, part_of};
use kvasir_os::time::Instant;

/// Which way bytes go, seen from the node that submits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// From the peer's memory to ours.
    Read = 0,
    /// From our memory to the peer's.
    Write = 1,
}

/// One move. The local ranges together are as long as the remote ranges together; bytes go from the
/// one list to the other in order.
#[derive(Clone, Debug)]
pub struct Op {
    /// Chosen by the caller, returned in the completion. It need not be unique.
    pub id: u64,
    pub direction: Direction,
    pub grant: Arc<Grant>,
    pub local: Vec<LocalRange>,
    pub remote: Vec<RemoteRange>,
    pub cancel: Option<Cancel>,
}

impl Op {
    /// Bytes to move; 0 for an operation that [`check`](Self::check) refuses.
    pub fn len(&self) -> u64 {
        self.local.iter().map(LocalRange::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slice of at most `len` bytes that begins `skip` bytes in, with the same id.
    pub fn part(&self, skip: u64, len: u64) -> Self {
        Self {
            id: self.id,
            direction: self.direction,
            grant: self.grant.clone(),
            local: part_of(&self.local, skip, len),
            remote: remote_part_of(&self.remote, skip, len),
            cancel: self.cancel.clone(),
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancel.as_ref().is_some_and(Cancel::is_set)
    }

    /// What a transport asks of every operation before it starts it: there is something to move, both sides are equally
    /// long, the grant covers and allows it, and the transport can handle the memory and the amount. The peer checks
    /// again.
    pub fn check(&self, capabilities: &Capabilities, now: Instant) -> Result<(), OpError> {
        if self.is_cancelled() {
            return Err(OpError::Cancelled);
        }
        let mut remote = 0u64;
        for range in &self.remote {
            self.grant.covers(*range).map_err(OpError::Denied)?;
            remote = remote.saturating_add(range.len);
        }
        let local = self.len();
        if local == 0 || local != remote {
            return Err(OpError::Lengths { local, remote });
        }
        let ranges = self.local.len().max(self.remote.len());
        if local > capabilities.message_bytes_max || ranges > capabilities.ranges_max {
            return Err(OpError::TooLarge { bytes: local, ranges, transport: capabilities.name });
        }
        if self.direction == Direction::Write && overlap(&self.remote) {
            return Err(OpError::Overlap);
        }
        self.grant.allows(self.direction, now).map_err(OpError::Denied)?;
        for range in &self.local {
            let (region, location) = (range.region(), range.region().location());
            if !capabilities.reaches(location) {
                return Err(OpError::Location { location, transport: capabilities.name });
            }
            if self.direction == Direction::Read && !region.writable() {
                return Err(OpError::ReadOnly { region: region.id() });
            }
        }
        Ok(())
    }
}

/// Whether two of these ranges share a byte. Ranges in order, as nearly all are, are only compared with their neighbours.
pub(super) fn overlap(ranges: &[RemoteRange]) -> bool {
    let follows = |pair: &[RemoteRange]| {
        let [before, after] = pair else { return true };
        (before.region, before.offset.saturating_add(before.len)) <= (after.region, after.offset)
    };
    if ranges.windows(2).all(follows) {
        return false;
    }
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable_by_key(|range| (range.region, range.offset));
    !sorted.windows(2).all(follows)
}

/// As [`part_of`], of remote ranges.
pub fn remote_part_of(ranges: &[RemoteRange], mut skip: u64, mut len: u64) -> Vec<RemoteRange> {
    let mut parts = Vec::new();
    for range in ranges {
        if len == 0 {
            break;
        }
        if skip >= range.len {
            skip -= range.len;
            continue;
        }
        let take = len.min(range.len - skip);
        parts.push(RemoteRange { region: range.region, offset: range.offset + skip, len: take });
        (skip, len) = (0, len - take);
    }
    parts
}

/// Asks operations to end early. Clones are the same token.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Why an operation did not move all of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    #[error("{local} B of local and {remote} B of remote memory; both must be the same and not 0")]
    Lengths { local: u64, remote: u64 },
    #[error("{bytes} B in {ranges} ranges are more than one {transport} operation takes; split it")]
    TooLarge { bytes: u64, ranges: usize, transport: &'static str },
    #[error("two ranges to write overlap; name each byte once")]
    Overlap,
    #[error("{transport} does not reach {location}")]
    Location { location: Location, transport: &'static str },
    #[error("region {region} is read-only here")]
    ReadOnly { region: u64 },
    #[error("region {region} is not registered with {transport}")]
    NotRegistered { region: u64, transport: &'static str },
    #[error("refused: {0}")]
    Denied(#[from] Denied),
    #[error("segment {segment:?} is not open over this rail; the peer does not export it, or not any more")]
    NotOpen { segment: String },
    #[error("{limit} operations are in flight on this endpoint; wait for some to complete")]
    QueueFull { limit: usize },
    #[error("peer {peer} is down: {reason}; use another endpoint or connect again")]
    PeerDown { peer: String, reason: String },
    #[error("cancelled")]
    Cancelled,
    #[error("not done before its deadline")]
    TimedOut,
    #[error("bytes arrived with checksum {found:#010x} instead of {expected:#010x}; send them again")]
    Checksum { expected: u32, found: u32 },
    #[error("the peer received other bytes than were sent; send them again")]
    PeerChecksum,
    #[error("a device of this node did not copy: {reason}; use another endpoint")]
    Device { reason: String },
    #[error("failed on purpose by the fault-injecting wrapper")]
    Injected,
}

impl OpError {
    /// Whether the same operation may succeed when tried again, on this endpoint or on another.
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            Self::QueueFull { .. }
                | Self::PeerDown { .. }
                | Self::Checksum { .. }
                | Self::PeerChecksum
                | Self::Injected
        )
    }

    /// Whether another endpoint to the same peer is worth trying.
    pub fn endpoint_at_fault(&self) -> bool {
        matches!(
            self,
            Self::PeerDown { .. }
                | Self::NotOpen { .. }
                | Self::NotRegistered { .. }
                | Self::Location { .. }
                | Self::Device { .. }
                | Self::Checksum { .. }
                | Self::PeerChecksum
                | Self::Injected
        )
    }
}

/// The end of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    pub id: u64,
    /// Leading bytes of the operation known to be in place: all of them after success. After a failed write the rest
    /// is unknown, not untouched.
    pub valid_bytes: u64,
    pub result: Result<(), OpError>,
}

impl Completion {
    pub fn done(op: &Op) -> Self {
        Self { id: op.id, valid_bytes: op.len(), result: Ok(()) }
    }

    pub fn failed(id: u64, valid_bytes: u64, error: OpError) -> Self {
        Self { id, valid_bytes, result: Err(error) }
    }
}

/// Where completions go. Called from threads of the transport: return soon, do not block on other completions.
pub trait Sink: Send + Sync {
    fn complete(&self, completion: Completion);
}

impl<F: Fn(Completion) + Send + Sync> Sink for F {
    fn complete(&self, completion: Completion) {
        self(completion);
    }
}

/// Completions in the order they came. Bounded by what its users have in flight.
#[derive(Default)]
pub struct CompletionQueue {
    ready: Mutex<VecDeque<Completion>>,
    arrived: Condvar,
}

impl CompletionQueue {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The sink to submit operations with.
    pub fn sink(self: &Arc<Self>) -> Arc<dyn Sink> {
        self.clone()
    }

    pub fn poll(&self) -> Option<Completion> {
        self.ready().pop_front()
    }

    /// The next completion, as soon as there is one, or `None` when `deadline` passes first.
    pub fn wait(&self, deadline: Instant) -> Option<Completion> {
        let mut ready = self.ready();
        loop {
            if let Some(completion) = ready.pop_front() {
                return Some(completion);
            }
            let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            self.arrived.wait_for(&mut ready, left);
        }
    }

    /// `count` completions, or those that came before `deadline`.
    #[cfg(any(test, feature = "conformance"))]
    pub fn wait_many(&self, count: usize, deadline: Instant) -> Vec<Completion> {
        (0..count).map_while(|_| self.wait(deadline)).collect()
    }

    fn ready(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.ready.lock()
    }
}

impl Sink for CompletionQueue {
    fn complete(&self, completion: Completion) {
        self.ready().push_back(completion);
        self.arrived.notify_one();
    }
}
