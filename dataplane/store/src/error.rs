//! What can go wrong in the block store, and whether trying again helps.

use crate::lifecycle::State;
use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_protocol::wire::Outcome;

/// A refused call. The store is as it was before the call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("block {key} has no bytes; a block holds at least one")]
    ZeroSize { key: BlockKey },
    #[error(
        "block {key} of {size} B is larger than the pool of {pool_bytes} B; enlarge store.pool_bytes or split it"
    )]
    TooLarge { key: BlockKey, size: u64, pool_bytes: u64 },
    #[error("batch of {len} items; the most in one call is {max}, send several", max = BATCH_MAX)]
    BatchTooLarge { len: usize },
    #[error(
        "pool is full: {size} B wanted for block {key}, {free_bytes} B free (perhaps in pieces), nothing evictable \
         within {waited_ms} ms; try again"
    )]
    PoolFull { key: BlockKey, size: u64, free_bytes: u64, waited_ms: u64 },
    #[error(
        "all block slots are taken ({slots}) and block {key} needs one; raise store.block_slots or try again"
    )]
    SlotsFull { key: BlockKey, slots: u32 },
    #[error(
        "tenant {tenant} uses {used_bytes} B of its quota of {quota_bytes} B, block {key} needs {size} B, and none of \
         its blocks can be evicted now; release or unpin some, or raise its quota in store.tenants"
    )]
    QuotaFull { key: BlockKey, tenant: u16, size: u64, used_bytes: u64, quota_bytes: u64 },
    #[error("reservation {id:#x} is not known: it was never made, or ended long ago")]
    UnknownReservation { id: u64 },
    #[error("reservation {id:#x} belongs to another writer")]
    NotTheWriter { id: u64 },
    #[error("reservation {id:#x} is already committed; a block is immutable from then on")]
    AlreadyCommitted { id: u64 },
    #[error("reservation {id:#x} was aborted or reclaimed; reserve the block again")]
    Aborted { id: u64 },
    #[error("reservation {id:#x} is still being filled or committed by another call")]
    Busy { id: u64 },
    #[error("{len} B do not fill reservation {id:#x} of {size} B at offset {offset}")]
    OutOfReservation { id: u64, offset: u64, len: u64, size: u64 },
    #[error(
        "block {key} arrived with checksum {found:#018x} instead of {expected:#018x}; it was not stored, send it again"
    )]
    ChecksumMismatch { key: BlockKey, expected: u64, found: u64 },
    #[error("lease {id:#x} has expired, was released, or is another reader's")]
    LeaseGone { id: u64 },
    #[error("no room for another lease: {held} are held; release some")]
    TooManyLeases { held: usize },
    #[error(
        "{bytes} B of the pool wait for clients that have not finished writing in their time; resume or end those \
         processes, or try again"
    )]
    WritersLate { bytes: u64 },
    #[error(
        "this caller has {reserved_bytes} B reserved and not committed, and with block {key} would have more than the \
         {max_bytes} B that it may; commit or abort some first"
    )]
    TooMuchReserved { key: BlockKey, reserved_bytes: u64, max_bytes: u64 },
    #[error("a block cannot go from {from:?} to {to:?}")]
    IllegalTransition { from: State, to: State },
}

impl StoreError {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            Self::PoolFull { .. }
                | Self::SlotsFull { .. }
                | Self::QuotaFull { .. }
                | Self::Busy { .. }
                | Self::WritersLate { .. }
                | Self::ChecksumMismatch { .. }
                | Self::TooMuchReserved { .. }
                | Self::TooManyLeases { .. }
        )
    }
}

/// The error as clients are told it.
impl From<&StoreError> for Outcome {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::ZeroSize { .. } => Self::ZeroSize,
            StoreError::TooLarge { .. } => Self::TooLarge,
            StoreError::PoolFull { .. } | StoreError::WritersLate { .. } => Self::PoolFull,
            StoreError::SlotsFull { .. } => Self::SlotsFull,
            StoreError::QuotaFull { .. } => Self::QuotaFull,
            StoreError::UnknownReservation { .. } => Self::UnknownReservation,
            StoreError::NotTheWriter { .. } => Self::NotTheWriter,
            StoreError::AlreadyCommitted { .. } => Self::AlreadyCommitted,
            StoreError::Aborted { .. } => Self::Aborted,
            StoreError::Busy { .. } => Self::Busy,
            StoreError::ChecksumMismatch { .. } => Self::ChecksumMismatch,
            StoreError::LeaseGone { .. } => Self::LeaseGone,
            StoreError::TooManyLeases { .. } | StoreError::TooMuchReserved { .. } => Self::Throttled,
            StoreError::BatchTooLarge { .. }
            | StoreError::OutOfReservation { .. }
            | StoreError::IllegalTransition { .. } => Self::Internal,
        }
    }
}
