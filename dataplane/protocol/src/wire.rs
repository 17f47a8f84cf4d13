//! The data protocol: one frame format for the Unix socket and for TCP.
//!
//! A frame is a 32-byte header, a body of at most [`BODY_MAX`] bytes that describes blocks, and, for a `Put` and
//! for the reply to a remote `Get`, the blocks' bytes back to back. All integers are little-endian.
//!
//! ```text
//! 0 magic "KVSR" · 4 version u8 · 5 op u8 · 6 flags u16 (bit 0: reply) · 8 request id u64
//! 16 body length u32 · 20 zero u32 · 24 payload length u64
//! ```
//!
//! **Versions.** A hello names the lowest and the highest version that the client speaks; the host answers in the highest
//! that both do, or refuses and names both ranges. So that sides of any two
//! releases understand each other that far, this never changes: the header, the layout of `Error`, and the first two bytes
//! of a hello, whose rest only ever grows at its end. A host skips what it does not know there. The answer to a hello has the
//! version agreed on in its header; every other frame has the version since which it means what it does, which must not be above
//! that.
//!
//! Every batch holds at most [`BATCH_MAX`] items. Decoding checks every length before it allocates, and a frame
//! that does not decode ends the connection: after it, the two sides do not agree where the next one starts.

mod fields;
mod handover;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use handover::{ArrivingBlock, HandOverCall, HandedPlace};
pub use reply::{Found, Placed, Reply, Stat};
pub use request::Request;

use std::fmt;

use strum::{FromRepr, IntoStaticStr, VariantArray};

use self::fields::Reader;
use crate::block::BATCH_MAX;

pub const MAGIC: [u8; 4] = *b"KVSR";
/// The newest version that this side speaks. 7: which blocks have left the host. 6: a hello names a range of versions, and its answer the run of the host; blocks are
/// held by a connection. 5: a hello carries a token, and says how long a place may be filled. 4: hand-overs layer by layer, requests that are refused while the connection goes on, a ring in shared memory, where
/// a put should go. 3: a stat
/// names the tiers of a block, a put may ask for copies on other hosts. 2: a hello names a tenant, blocks have a time to
/// live, can be pinned and evicted by name.
pub const VERSION: u8 = 7;
/// The versions that this side speaks.
pub const VERSIONS: Versions = Versions { lowest: 6, highest: VERSION };
pub const HEADER_LEN: usize = 32;
/// Above the longest legal body (4,096 put items of 55 B).
pub const BODY_MAX: usize = 512 << 10;
const REPLY: u16 = 1;
const TEXT_MAX: usize = 1024;

/// A frame that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("not a Kvasir data connection: frame starts with {found:02x?}")]
    Magic { found: [u8; 4] },
    #[error("peer speaks data protocol {found}, this side speaks {VERSIONS}; use the same release on both")]
    Version { found: u8 },
    #[error("the client speaks data protocol {client}, this host {VERSIONS}; update the older of the two")]
    NoCommonVersion { client: Versions },
    #[error("operation {op} with flags {flags:#x} is not known")]
    Op { op: u8, flags: u16 },
    #[error("body of {len} B is above the limit of {BODY_MAX} B")]
    BodyTooLong { len: u32 },
    #[error("body ends after {had} B where {wanted} B more are announced")]
    Truncated { had: usize, wanted: usize },
    #[error("body has {extra} B too many")]
    Trailing { extra: usize },
    #[error("batch of {len} items; the most in one call is {BATCH_MAX}")]
    Batch { len: u32 },
    #[error("field {field} holds {value}, which has no meaning")]
    Value { field: &'static str, value: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
#[repr(u8)]
pub enum Op {
    /// Reply only: the request, or the connection, was refused.
    Error = 0,
    Hello = 1,
    Exists = 2,
    Get = 3,
    Put = 4,
    Reserve = 5,
    Commit = 6,
    Abort = 7,
    Release = 8,
    Remove = 9,
    Stat = 10,
    Verify = 11,
    Pin = 12,
    Unpin = 13,
    Evict = 14,
    Replicate = 15,
    /// Reply only: the request was refused, and the connection goes on.
    Refused = 16,
    HandOver = 17,
    LayerDone = 18,
    Finish = 19,
    DropHandOver = 20,
    Arrivals = 21,
    WaitArrival = 22,
    LeaveArrivals = 23,
    Place = 24,
    Hold = 25,
    EndHold = 26,
    Removals = 27,
}

impl Op {
    /// Its name in logs and refusals.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The version in which it took its present form, of those that this side speaks.
    pub fn since(self) -> u8 {
        match self {
            Self::Removals => 7,
            _ => VERSIONS.lowest,
        }
    }
}

/// Versions of this protocol that one side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    pub lowest: u8,
    pub highest: u8,
}

impl Versions {
    /// The newest version that both sides speak.
    pub fn common(self, other: Self) -> Option<u8> {
        let newest = self.highest.min(other.highest);
        (newest >= self.lowest.max(other.lowest)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.lowest, self.highest)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub version: u8,
    pub op: Op,
    pub reply: bool,
    /// Chosen by the client, repeated in the reply.
    pub request: u64,
    pub body_len: u32,
    pub payload_len: u64,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.version;
        bytes[5] = self.op as u8;
        bytes[6..8].copy_from_slice(&(if self.reply { REPLY } else { 0 }).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        let found = reader.array()?;
        if found != MAGIC {
            return Err(WireError::Magic { found });
        }
        let (version, op, flags) = (reader.u8()?, reader.u8()?, reader.u16()?);
        let known = Op::from_repr(op).filter(|_| flags & !REPLY == 0);
        // A hello names its versions inside, and a refusal of one is for all versions.
        let for_any = matches!((known, flags), (Some(Op::Hello), 0) | (Some(Op::Error), REPLY));
        if !(VERSIONS.lowest..=VERSIONS.highest).contains(&version) && !for_any {
            return Err(WireError::Version { found: version });
        }
        let op = known.ok_or(WireError::Op { op, flags })?;
        let (request, body_len, zero, payload_len) =
            (reader.u64()?, reader.u32()?, reader.u32()?, reader.u64()?);
        if body_len as usize > BODY_MAX {
            return Err(WireError::BodyTooLong { len: body_len });
        }
        if zero != 0 {
            return Err(WireError::Value { field: "header bytes 20 to 23", value: zero.into() });
        }
        Ok(Self { version, op, reply: flags & REPLY != 0, request, body_len, payload_len })
    }
}

/// The outcome of one item of a batch. Numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromRepr, VariantArray)]
#[repr(u8)]
pub enum Outcome {
    Done = 0,
    AlreadyStored = 1,
    InProgress = 2,
    Missing = 3,
    PoolFull = 4,
    SlotsFull = 5,
    ZeroSize = 6,
    TooLarge = 7,
    UnknownReservation = 8,
    NotTheWriter = 9,
    AlreadyCommitted = 10,
    Aborted = 11,
    Busy = 12,
    ChecksumMismatch = 13,
    LeaseGone = 14,
    Throttled = 15,
    Dropped = 16,
    /// A fault of the host itself.
    Internal = 17,
    QuotaFull = 18,
    PinQuotaFull = 19,
    Pinned = 20,
    InUse = 21,
    TooFewHosts = 22,
    CopiesFull = 23,
    Conflict = 24,
}

impl Outcome {
    pub fn retryable(self) -> bool {
        let retryable = [
            Self::PoolFull,
            Self::SlotsFull,
            Self::QuotaFull,
            Self::PinQuotaFull,
            Self::Pinned,
            Self::InUse,
            Self::Busy,
            Self::ChecksumMismatch,
            Self::Throttled,
            Self::InProgress,
            Self::Aborted,
            Self::CopiesFull,
        ];
        retryable.contains(&self)
    }

    /// What it means and what to do, for error messages.
    pub fn text(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::AlreadyStored => "the block is stored already",
            Self::InProgress => "another writer is storing the block",
            Self::Missing => "the block is not resident",
            Self::PoolFull => "the pool is full and nothing could be evicted in time; try again",
            Self::SlotsFull => "all block slots of the host are taken; raise store.block_slots or try again",
            Self::ZeroSize => "a block holds at least one byte",
            Self::TooLarge => "the block is larger than the host's pool",
            Self::UnknownReservation => "the reservation is not known",
            Self::NotTheWriter => "the reservation belongs to another connection",
            Self::AlreadyCommitted => "the reservation is committed already",
            Self::Aborted => "the reservation was aborted or reclaimed; reserve the block again",
            Self::Busy => "another call is using the reservation",
            Self::ChecksumMismatch => "the bytes arrived with another checksum; send them again",
            Self::LeaseGone => "the lease has expired, was released, or is another connection's",
            Self::Throttled => {
                "this client holds as much as one may, or the host lends no more at once; release or commit some and try again"
            }
            Self::Dropped => "the block's bytes no longer matched its checksum; it was dropped",
            Self::QuotaFull => {
                "the tenant's quota is full and none of its blocks can be evicted now; release or unpin some"
            }
            Self::PinQuotaFull => {
                "the tenant has pinned as much as it may, holds included; end some, or wait until they end"
            }
            Self::Pinned => "a hard pin keeps the block; unpin it, or wait until the pin ends",
            Self::InUse => "the block is being read; try again",
            Self::TooFewHosts => {
                "the block is stored, but the cluster has fewer hosts than copies were asked for; add peers to \
                 cluster.peers, or ask for fewer"
            }
            Self::CopiesFull => {
                "the block is stored, but the host follows as many replicated blocks as it may; raise \
                 cluster.blocks_max, or remove some"
            }
            Self::Conflict => "another host holds other bytes under the same key; use another key",
            Self::Internal => "the host failed on its own account; see its log",
        }
    }
}

fn encode_frame(
    frame: &mut Vec<u8>,
    op: Op,
    reply: bool,
    request: u64,
    payload_len: u64,
    body: impl FnOnce(&mut Vec<u8>),
) {
    frame.clear();
    frame.resize(HEADER_LEN, 0);
    body(frame);
    let body_len = (frame.len() - HEADER_LEN) as u32;
    let header = Header { version: op.since(), op, reply, request, body_len, payload_len };
    frame[..HEADER_LEN].copy_from_slice(&header.encode());
}

/// Writes the version that was agreed on into the answer to a hello, which is told apart from others by it.
pub fn agree(frame: &mut [u8], version: u8) {
    if let Some(at) = frame.get_mut(4) {
        *at = version;
    }
}
