//! What every tier can do: the [`BlockStore`] trait.
//!
//! Operations are submitted in batches and complete later, in any order; within a batch each item has its own
//! outcome. A buffer enters an operation by value and comes back with the result, success or not. Dropping a
//! [`Pending`] or cancelling it is a request to stop early: only the completion says what happened, and only it
//! returns the buffers.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use super::departures::Departures;
use kvasir_memory::buffer::{Buffer, Source};
use kvasir_memory::shared::Shared;
use kvasir_protocol::block::{BlockKey, BlockMeta};

/// Where a block lives, nearest to the compute first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    Hbm = 0,
    Dram = 1,
    Nvme = 2,
    Remote = 3,
    /// The pools of other hosts. They fill by copies that a put asked for, not with what this host evicts.
    Peer = 4,
}

impl Tier {
    pub const ALL: [Self; 5] = [Self::Hbm, Self::Dram, Self::Nvme, Self::Remote, Self::Peer];

    /// Whether a block about to be evicted from a tier above may go here.
    pub const fn takes_victims(self) -> bool {
        !matches!(self, Self::Peer)
    }

    /// Whether other hosts use the same objects.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Remote)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Hbm => "hbm",
            Self::Dram => "dram",
            Self::Nvme => "nvme",
            Self::Remote => "remote",
            Self::Peer => "peer",
        }
    }
}

/// What a tier is and what it promises. Callers ask here; they do not downcast.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    pub tier: Tier,
    /// For messages and metrics, such as `nvme` or `memory`.
    pub name: &'static str,
    /// Blocks that were stored before a [`BlockStore::flush`] outlive the process.
    pub durable: bool,
    /// Largest block, in bytes.
    pub block_bytes_max: u64,
    /// The most bytes of blocks that the tier holds; `None` if it does not know.
    pub capacity_bytes: Option<u64>,
}

/// A block to store. `buffer` holds its bytes (`meta.size` of them from the start); `checksum` was taken when the
/// block was first stored.
#[derive(Debug)]
pub struct Put {
    pub meta: BlockMeta,
    pub checksum: u64,
    pub buffer: Source,
}

impl Put {
    /// Refuses what no tier may store: no bytes, more than `max`, or bytes that are missing or not the announced ones.
    pub fn check(&self, tier: &'static str, max: u64) -> Result<(), TierError> {
        let (key, size) = (self.meta.key, u64::from(self.meta.size));
        if size == 0 {
            return Err(TierError::ZeroSize { key });
        }
        if size > max {
            return Err(TierError::TooLarge { tier, key, size, max });
        }
        let (expected, found) = (self.checksum, self.bytes()?.checksum());
        if expected != found {
            return Err(TierError::ChecksumMismatch { key, expected, found });
        }
        Ok(())
    }

    /// The block's bytes.
    pub fn bytes(&self) -> Result<Shared<'_>, TierError> {
        let (key, size, all) = (self.meta.key, self.meta.size, self.buffer.shared());
        let bytes = all.first(size as usize);
        let whole = bytes.len() == size as usize;
        whole.then_some(bytes).ok_or(TierError::Buffer { key, size: size.into(), len: all.len() as u64 })
    }
}

#[derive(Debug)]
pub struct PutDone {
    pub buffer: Source,
    pub outcome: Result<Stored, TierError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    Stored,
    /// The tier holds the block already; nothing was written.
    AlreadyStored,
}

/// A block to load into `buffer`, which must be at least as long as the block.
#[derive(Debug)]
pub struct Get {
    pub key: BlockKey,
    pub buffer: Buffer,
}

impl Get {
    /// Where a block of `size` bytes goes.
    pub fn target(&mut self, size: u32) -> Result<&mut [u8], TierError> {
        let (key, len) = (self.key, self.buffer.len() as u64);
        self.buffer.bytes_mut().get_mut(..size as usize).ok_or(TierError::Buffer {
            key,
            size: size.into(),
            len,
        })
    }
}

#[derive(Debug)]
pub struct GetDone {
    pub buffer: Buffer,
    /// `None` means that the tier does not hold the block, or held it damaged (counted, and dropped from the tier). The
    /// buffer's bytes are then undefined.
    pub outcome: Result<Option<Loaded>, TierError>,
}

/// A block that was loaded: `meta.size` bytes at the front of the buffer, which match `checksum`.
///
/// `meta` is what was put, except that a tier may have forgotten the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    pub meta: BlockMeta,
    pub checksum: u64,
}

/// Why an operation on one block failed. The tier is as it was before, for this block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TierError {
    #[error("block {key} has no bytes; a block holds at least one")]
    ZeroSize { key: BlockKey },
    #[error("block {key} of {size} B is larger than the {max} B that tier {tier} takes")]
    TooLarge { tier: &'static str, key: BlockKey, size: u64, max: u64 },
    #[error("buffer of {len} B for block {key} of {size} B is too short")]
    Buffer { key: BlockKey, size: u64, len: u64 },
    #[error(
        "block {key} came with checksum {expected:#018x}, its bytes have {found:#018x}; it was not stored"
    )]
    ChecksumMismatch { key: BlockKey, expected: u64, found: u64 },
    #[error("tier {tier} is full: {size} B wanted for block {key}; evict from it or try again")]
    Full { tier: &'static str, key: BlockKey, size: u64 },
    #[error("{step} on tier {tier} failed for block {key}: {reason}")]
    Io { tier: &'static str, step: &'static str, key: BlockKey, reason: String, retryable: bool },
    #[error("tier {tier} has too many operations under way ({limit}); try again")]
    Busy { tier: &'static str, limit: usize },
    #[error("block {key} is just being stored by another writer; try again")]
    InProgress { key: BlockKey },
    #[error("cancelled before it began")]
    Cancelled,
    #[error("tier {tier} is closed")]
    Closed { tier: &'static str },
}

impl TierError {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Full { .. } | Self::Busy { .. } | Self::InProgress { .. } | Self::Cancelled => true,
            Self::Io { retryable, .. } => *retryable,
            _ => false,
        }
    }
}

/// All counts of a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    pub blocks: u64,
    /// Bytes of those blocks, without what the tier needs around them.
    pub block_bytes: u64,
    /// Bytes the tier occupies, with headers, padding and what is dead and not yet reclaimed.
    pub used_bytes: u64,
    pub hits: u64,
    pub misses: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Damaged blocks found (torn, flipped, truncated); each became a miss.
    pub corrupt: u64,
    /// Bytes that it has compared with their checksums though nobody had asked for them.
    pub scrubbed_bytes: u64,
    pub io_errors: u64,
    pub evicted: u64,
    /// It takes nothing more, because its device can no longer be trusted with it. What it holds is served.
    pub broken: bool,
}

/// A tier.
pub trait BlockStore: Send + Sync {
    fn capabilities(&self) -> Capabilities;

    /// Stores blocks. A block is visible once its item is done; it is immutable from then on.
    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>>;

    /// Loads blocks; each is compared with its checksum before it is reported.
    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>>;

    /// The size in bytes of each block the tier holds, as far as it knows without I/O; a later get may still miss.
    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>>;

    /// Which keys the tier holds, as far as it knows without I/O.
    fn exists(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.sizes(keys).iter().map(Option::is_some).collect()
    }

    /// As [`sizes`](Self::sizes), but asks a place that other hosts also use for blocks that this one does not know of. What
    /// is found is known from then on. A tier that nobody shares knows all it has.
    fn look_up(&self, keys: Vec<BlockKey>) -> Pending<Vec<Option<u32>>> {
        Pending::ready(self.sizes(&keys))
    }

    /// Drops blocks. Returns for each whether there was one.
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>>;

    /// Which blocks were removed and, as far as this tier hears from other hosts, not put since. A place that hosts share may
    /// have one all the same: a host that had not heard of the removal can have stored it there. A tier that hears from no other
    /// host knows of none.
    fn were_removed(&self, keys: &[BlockKey]) -> Vec<bool> {
        vec![false; keys.len()]
    }

    /// Forgets that these blocks are in a place that several hosts use, because another host has removed them or they
    /// arrive here damaged. The place stays as it is. A tier that nobody shares has nothing to do.
    fn forget(&self, _keys: &[BlockKey]) {}

    /// Completes when every put that was done before is as durable as the tier can make it.
    fn flush(&self) -> Pending<Result<(), TierError>>;

    fn stats(&self) -> TierStats;

    /// Begins to note there which blocks it lets go, for whatever reason: each when it is no longer found, and before what waits
    /// for it is done. For tiers of one host alone; others need not do so.
    fn note_departures(&self, departures: &Arc<Departures>) {
        let _ = departures;
    }

    /// Blocks found damaged and dropped since the last call, so that they can be fetched again from elsewhere. Bounded:
    /// the oldest are forgotten. A tier that does not keep them has none.
    fn take_damaged(&self) -> Vec<BlockKey> {
        Vec::new()
    }
}

/// A result that comes later. Wait for it, poll it as a future, or drop it: the operation goes on without.
#[derive(Debug)]
pub struct Pending<T> {
    receiver: oneshot::Receiver<T>,
    cancelled: Cancelled,
}

/// Shared between a [`Pending`] and the operation that answers it.
#[derive(Clone, Debug, Default)]
pub struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The side that answers. Dropping it unanswered is a bug of the tier.
#[derive(Debug)]
pub struct Completion<T> {
    sender: oneshot::Sender<T>,
    pub cancelled: Cancelled,
}

impl<T> Completion<T> {
    pub fn done(self, value: T) {
        // The caller may have stopped waiting; the operation is complete anyway.
        let _ = self.sender.send(value);
    }
}

impl<T> Pending<T> {
    pub fn new() -> (Completion<T>, Self) {
        let (sender, receiver) = oneshot::channel();
        let cancelled = Cancelled::default();
        (Completion { sender, cancelled: cancelled.clone() }, Self { receiver, cancelled })
    }

    /// An operation that is already done.
    pub fn ready(value: T) -> Self {
        let (completion, pending) = Self::new();
        completion.done(value);
        pending
    }

    /// Asks the operation to stop early; what was not begun ends with [`TierError::Cancelled`].
    pub fn cancel(&self) {
        self.cancelled.0.store(true, Ordering::Relaxed);
    }

    /// Blocks until the operation is complete.
    ///
    /// # Panics
    /// If the tier dropped the operation without completing it: its buffers are lost, so going on is not safe.
    pub fn wait(self) -> T {
        self.receiver.recv().expect("a tier completes every operation it took")
    }

    /// Blocks until the operation is complete, at most `timeout`; then the operation is still under way.
    ///
    /// # Errors
    /// Returns itself, so that the caller can go on waiting.
    ///
    /// # Panics
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(self, timeout: Duration) -> Result<T, Self> {
        match self.receiver.recv_timeout(timeout) {
            Ok(value) => Ok(value),
            Err(oneshot::RecvTimeoutError::Timeout) => Err(self),
            Err(oneshot::RecvTimeoutError::Disconnected) => {
                panic!("a tier completes every operation it took")
            }
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.receiver)
            .poll(cx)
            .map(|result| result.expect("a tier completes every operation it took"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_ran_out_can_go_on() {
        let (completion, pending) = Pending::new();
        let Err(pending) = pending.wait_timeout(Duration::ZERO) else { panic!("nothing was done yet") };
        completion.done(7);
        assert_eq!(pending.wait_timeout(Duration::from_secs(60)).unwrap(), 7);
    }
}
