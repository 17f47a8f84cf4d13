//! Blocks that a client was given: lent in the host's pool, or received.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use kvasir_memory::host::Mapping;
use kvasir_memory::shared::Shared;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};

use super::error::ClientError;
use crate::sync::Mutex;

/// Leases and addresses of a local reader.
pub(super) struct Local {
    pub(super) mapping: Arc<Mapping>,
    /// Leases that are done with; they go back with the next `get` or `release`.
    pub(super) done: Mutex<Vec<u64>>,
    pub(super) lease: Duration,
    /// How long a place may be filled.
    pub(super) filling: Duration,
    /// The connection has ended, and with it what was lent.
    pub(super) dead: AtomicBool,
}

impl Local {
    /// Whether the connection has ended, as far as this side knows. Where the host ended it and no call has met that yet,
    /// the host keeps what it lent in place until the leases' time is over.
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Leases to send back now, as many as one call takes.
    pub(super) fn take_done(&self) -> Vec<u64> {
        let mut done = self.done.lock();
        let keep = done.len().saturating_sub(BATCH_MAX);
        done.split_off(keep)
    }
}

/// A block that was found: lent in the host's pool, or received.
pub struct Block {
    pub key: BlockKey,
    pub(super) bytes: Bytes,
}

pub(super) enum Bytes {
    Lent(Lent),
    Owned(Vec<u8>),
}

pub(super) struct Lent {
    pub(super) local: Arc<Local>,
    pub(super) offset: u64,
    pub(super) size: u32,
    pub(super) lease: u64,
    pub(super) until: Instant,
}

impl Block {
    /// Bytes.
    pub fn size(&self) -> u32 {
        match &self.bytes {
            Bytes::Lent(lent) => lent.size,
            Bytes::Owned(bytes) => bytes.len() as u32,
        }
    }

    /// The bytes; in place if the block is lent. Other processes map that memory too, so this is no `&[u8]`: copy them, or give
    /// their address to a device. A reader that may not be done when the lease runs out (10 s by
    /// default) copies instead: [`copy_to`](Self::copy_to) notices.
    ///
    /// # Errors
    /// [`ClientError::LeaseExpired`] if it has run out already, [`ClientError::LenderGone`] if the client was dropped or its
    /// connection broke.
    pub fn bytes(&self) -> Result<Shared<'_>, ClientError> {
        match &self.bytes {
            Bytes::Lent(lent) if lent.local.is_dead() => Err(ClientError::LenderGone { key: self.key }),
            Bytes::Lent(lent) if Instant::now() >= lent.until => {
                Err(ClientError::LeaseExpired { key: self.key })
            }
            _ => Ok(self.raw()),
        }
    }

    /// Copies the block to the front of `buffer` and returns its size.
    ///
    /// # Errors
    /// [`ClientError::Buffer`] if it does not fit; those of [`bytes`](Self::bytes), if that came before the copy was done
    /// (the buffer is then undefined).
    pub fn copy_to(&self, buffer: &mut [u8]) -> Result<u32, ClientError> {
        let bytes = self.bytes()?;
        let len = buffer.len();
        if len < bytes.len() {
            return Err(ClientError::Buffer { size: self.size(), len });
        }
        bytes.copy_to(buffer);
        // Whatever is asked from here on is asked after the last byte was read.
        fence(Ordering::Acquire);
        self.bytes().map(|_| self.size())
    }

    /// Where it is lent in the host's pool. Returns `None` if it was received.
    #[cfg(feature = "gpu")]
    pub(super) fn offset(&self) -> Option<u64> {
        match &self.bytes {
            Bytes::Lent(lent) => Some(lent.offset),
            Bytes::Owned(_) => None,
        }
    }

    pub(super) fn raw(&self) -> Shared<'_> {
        let none = Shared::from(&[][..]);
        match &self.bytes {
            Bytes::Lent(lent) => lent.local.mapping.bytes(lent.offset, lent.size.into()).unwrap_or(none),
            Bytes::Owned(bytes) => Shared::from(&bytes[..]),
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
        self.local.done.lock().push(self.lease);
    }
}
