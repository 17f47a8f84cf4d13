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

mod handover;
#[cfg(test)]
mod tests;

pub use handover::{ArrivingBlock, HandOverCall, HandedPlace};

use std::fmt;

use strum::{FromRepr, IntoStaticStr, VariantArray};

use crate::block::{BATCH_MAX, BlockKey, BlockMeta, Pin};

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// First frame of every connection. `namespace` is for the host's log. What the connection stores and pins is
    /// on the account of `tenant`. With `wants_ring`, what follows the answer goes through shared memory
    /// ([`ring`](crate::stream::ring)) if the answer says so.
    Hello {
        /// What the client speaks. A host that speaks none of it refuses before it looks at the rest.
        versions: Versions,
        wants_write: bool,
        wants_ring: bool,
        tenant: u16,
        namespace: String,
        /// Says who the client is, over TCP; on a Unix socket the host asks the kernel.
        token: String,
    },
    Exists(Vec<BlockKey>),
    /// `release`: leases that the client is done with, so that they cost no round trip of their own.
    Get {
        class: u16,
        release: Vec<u64>,
        keys: Vec<BlockKey>,
    },
    /// Blocks with their checksums; the payload holds their bytes in this order. A frame does not carry the blocks'
    /// tenant: it is the connection's.
    Put(Vec<(BlockMeta, u64)>),
    Reserve(Vec<BlockMeta>),
    /// Reservations with the checksums of what was filled in.
    Commit(Vec<(u64, u64)>),
    Abort(Vec<u64>),
    Release(Vec<u64>),
    Remove(Vec<BlockKey>),
    Stat(Vec<BlockKey>),
    Verify(Vec<BlockKey>),
    Pin {
        pin: Pin,
        keys: Vec<BlockKey>,
    },
    /// Ends the pins of the connection's tenant.
    Unpin(Vec<BlockKey>),
    /// Blocks in the pool must not be evicted for `ms` milliseconds, unless the connection ends before.
    Hold {
        ms: u32,
        keys: Vec<BlockKey>,
    },
    /// Takes back one `Hold` on each block.
    EndHold(Vec<BlockKey>),
    Evict(Vec<BlockKey>),
    /// Blocks that are stored here must be held by `copies` hosts in total, this one included. Answered at once.
    Replicate {
        copies: u8,
        keys: Vec<BlockKey>,
    },
    HandOver(HandOverCall),
    /// Which host should take a put of this many bytes that asks for copies.
    Place {
        bytes: u64,
        copies: u8,
    },
    /// Which of the tenant's blocks have left the host since this position, of `max` departures at most. One that it does not
    /// know, such as 0, is answered with the present one.
    Removals {
        since: u64,
        max: u32,
    },
}

/// A block found by a `Get`. Local: lent in the pool. Remote: `offset` and `lease` are 0 and the payload holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Hit { offset: u64, size: u32, checksum: u64, lease: u64 },
    Not(Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    At { reservation: u64, offset: u64 },
    Not(Outcome),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    pub size: u32,
    /// Bit *n* is set where tier *n* of `kvasir_store::store::Tier` holds the block. What follows is known of blocks in
    /// DRAM only, else 0.
    pub tiers: u8,
    pub checksum: u64,
    pub depth: u32,
    pub class: u16,
    pub uses: u32,
    pub leases: u32,
    /// Milliseconds since it was stored, and since its last use.
    pub age_ms: u64,
    pub idle_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Error {
        retryable: bool,
        message: String,
    },
    /// `shared` says that the pool's descriptor comes with this frame.
    Hello {
        shared: bool,
        writable: bool,
        /// The second descriptor is that of the ring.
        ring: bool,
        /// A random number of this run of the host: with another one, what a client remembers of its blocks is void.
        boot: u64,
        pool_bytes: u64,
        lease_ms: u64,
        /// How long a place may be filled, from the request for it on.
        reservation_ms: u64,
        payload_max: u64,
    },
    Exists(Vec<bool>),
    Get(Vec<Found>),
    Reserve(Vec<Placed>),
    Stat(Vec<Option<Stat>>),
    /// The request makes no sense now, or cannot be done; the next one may.
    Refused {
        retryable: bool,
        message: String,
    },
    /// The host, and its data port; an empty one means the host that was asked.
    Place {
        node: String,
        data: String,
    },
    /// For how long it may go on, and one place per block.
    HandOver {
        time_ms: u64,
        places: Vec<HandedPlace>,
    },
    /// How long the places stay. 0 layers means that it has not begun.
    Arrivals {
        time_ms: u64,
        layers: u32,
        blocks: Vec<ArrivingBlock>,
    },
    /// Answers `Put`, `Commit`, `Abort`, `Release`, `Remove`, `Verify`, `Pin`, `Unpin`, `Hold`, `EndHold`, `Evict` and
    /// `Replicate`. For `LayerDone`, `Finish`, `DropHandOver`, `WaitArrival` and `LeaveArrivals`: one, which is `InProgress` when a wait
    /// ended too early.
    Outcomes(Op, Vec<Outcome>),
    /// `next`: where to go on; the position that was asked from, if nothing has left since. `lost`: what came before is not
    /// known any more, so nothing that is remembered of the host's blocks holds. Keys are without the tenant.
    Removals {
        next: u64,
        lost: bool,
        keys: Vec<BlockKey>,
    },
}

impl Request {
    /// Makes the keys those of `tenant`, whichever tenant the client named. The host calls it before it looks at a key.
    pub fn belong_to(&mut self, tenant: u16) {
        let own = |meta: &mut BlockMeta| {
            meta.tenant = tenant;
            meta.key = meta.key.of_tenant(tenant);
            meta.parent = meta.parent.map(|parent| parent.of_tenant(tenant));
        };
        match self {
            Self::Exists(keys)
            | Self::Remove(keys)
            | Self::Stat(keys)
            | Self::Verify(keys)
            | Self::Unpin(keys)
            | Self::Evict(keys)
            | Self::EndHold(keys)
            | Self::Hold { keys, .. }
            | Self::Get { keys, .. }
            | Self::Pin { keys, .. }
            | Self::Replicate { keys, .. } => keys.iter_mut().for_each(|key| *key = key.of_tenant(tenant)),
            Self::Put(blocks) => blocks.iter_mut().for_each(|(meta, _)| own(meta)),
            Self::Reserve(blocks) | Self::HandOver(HandOverCall::Begin { blocks, .. }) => {
                blocks.iter_mut().for_each(own);
            }
            Self::Hello { .. } | Self::Commit(_) | Self::Abort(_) | Self::Release(_) => {}
            Self::HandOver(_) | Self::Place { .. } | Self::Removals { .. } => {}
        }
    }

    pub fn op(&self) -> Op {
        match self {
            Self::Hello { .. } => Op::Hello,
            Self::Exists(_) => Op::Exists,
            Self::Get { .. } => Op::Get,
            Self::Put(_) => Op::Put,
            Self::Reserve(_) => Op::Reserve,
            Self::Commit(_) => Op::Commit,
            Self::Abort(_) => Op::Abort,
            Self::Release(_) => Op::Release,
            Self::Remove(_) => Op::Remove,
            Self::Stat(_) => Op::Stat,
            Self::Verify(_) => Op::Verify,
            Self::Pin { .. } => Op::Pin,
            Self::Unpin(_) => Op::Unpin,
            Self::Hold { .. } => Op::Hold,
            Self::EndHold(_) => Op::EndHold,
            Self::Evict(_) => Op::Evict,
            Self::Replicate { .. } => Op::Replicate,
            Self::HandOver(call) => call.op(),
            Self::Place { .. } => Op::Place,
            Self::Removals { .. } => Op::Removals,
        }
    }

    /// Replaces `frame` by header and body.
    pub fn encode(&self, request: u64, payload_len: u64, frame: &mut Vec<u8>) {
        encode_frame(frame, self.op(), false, request, payload_len, |out| match self {
            Self::Hello { versions, wants_write, wants_ring, tenant, namespace, token } => {
                out.extend([versions.lowest, versions.highest]);
                out.extend([*wants_write, *wants_ring].map(u8::from));
                out.extend(tenant.to_le_bytes());
                put_text(out, namespace);
                put_text(out, token);
            }
            Self::Exists(keys)
            | Self::Remove(keys)
            | Self::Stat(keys)
            | Self::Verify(keys)
            | Self::Unpin(keys)
            | Self::EndHold(keys)
            | Self::Evict(keys) => put_list(out, keys, put_key),
            Self::Hold { ms, keys } => {
                out.extend(ms.to_le_bytes());
                put_list(out, keys, put_key);
            }
            Self::Pin { pin, keys } => {
                put_pin(out, *pin);
                put_list(out, keys, put_key);
            }
            Self::Replicate { copies, keys } => {
                out.push(*copies);
                put_list(out, keys, put_key);
            }
            Self::Get { class, release, keys } => {
                out.extend(class.to_le_bytes());
                put_list(out, release, put_u64);
                put_list(out, keys, put_key);
            }
            Self::Put(blocks) => put_list(out, blocks, |out, (meta, checksum)| {
                put_meta(out, meta);
                put_u64(out, checksum);
            }),
            Self::Reserve(blocks) => put_list(out, blocks, put_meta),
            Self::Commit(items) => put_list(out, items, |out, (id, checksum)| {
                put_u64(out, id);
                put_u64(out, checksum);
            }),
            Self::Abort(ids) | Self::Release(ids) => put_list(out, ids, put_u64),
            Self::HandOver(call) => call.put(out),
            Self::Place { bytes, copies } => {
                put_u64(out, bytes);
                out.push(*copies);
            }
            Self::Removals { since, max } => {
                put_u64(out, since);
                out.extend(max.to_le_bytes());
            }
        });
    }

    pub fn decode(op: Op, body: &[u8]) -> Result<Self, WireError> {
        let mut body = Reader(body);
        let request = match op {
            Op::Error | Op::Refused => return Err(WireError::Op { op: op as u8, flags: 0 }),
            Op::Hello => {
                let hello = Self::Hello {
                    versions: body.versions()?,
                    wants_write: body.bool("wants write")?,
                    wants_ring: body.bool("wants ring")?,
                    tenant: body.u16()?,
                    namespace: body.text()?,
                    token: body.text()?,
                };
                // Whatever a newer client says in addition.
                body = Reader(&[]);
                hello
            }
            Op::Exists => Self::Exists(body.list(Reader::key)?),
            Op::Get => Self::Get {
                class: body.u16()?,
                release: body.list(Reader::u64)?,
                keys: body.list(Reader::key)?,
            },
            Op::Put => Self::Put(body.list(|body| Ok((body.meta()?, body.u64()?)))?),
            Op::Reserve => Self::Reserve(body.list(Reader::meta)?),
            Op::Commit => Self::Commit(body.list(|body| Ok((body.u64()?, body.u64()?)))?),
            Op::Abort => Self::Abort(body.list(Reader::u64)?),
            Op::Release => Self::Release(body.list(Reader::u64)?),
            Op::Remove => Self::Remove(body.list(Reader::key)?),
            Op::Stat => Self::Stat(body.list(Reader::key)?),
            Op::Verify => Self::Verify(body.list(Reader::key)?),
            Op::Pin => Self::Pin { pin: body.pin()?, keys: body.list(Reader::key)? },
            Op::Unpin => Self::Unpin(body.list(Reader::key)?),
            Op::Hold => Self::Hold { ms: body.u32()?, keys: body.list(Reader::key)? },
            Op::EndHold => Self::EndHold(body.list(Reader::key)?),
            Op::Evict => Self::Evict(body.list(Reader::key)?),
            Op::Replicate => Self::Replicate { copies: body.u8()?, keys: body.list(Reader::key)? },
            Op::Place => Self::Place { bytes: body.u64()?, copies: body.u8()? },
            Op::Removals => Self::Removals { since: body.u64()?, max: body.u32()? },
            Op::HandOver
            | Op::LayerDone
            | Op::Finish
            | Op::DropHandOver
            | Op::Arrivals
            | Op::WaitArrival
            | Op::LeaveArrivals => match HandOverCall::take(op, &mut body)? {
                Some(call) => Self::HandOver(call),
                None => return Err(WireError::Op { op: op as u8, flags: 0 }),
            },
        };
        body.end()?;
        Ok(request)
    }
}

impl Reply {
    pub fn op(&self) -> Op {
        match self {
            Self::Error { .. } => Op::Error,
            Self::Hello { .. } => Op::Hello,
            Self::Exists(_) => Op::Exists,
            Self::Get(_) => Op::Get,
            Self::Reserve(_) => Op::Reserve,
            Self::Stat(_) => Op::Stat,
            Self::Refused { .. } => Op::Refused,
            Self::Place { .. } => Op::Place,
            Self::HandOver { .. } => Op::HandOver,
            Self::Arrivals { .. } => Op::Arrivals,
            Self::Outcomes(op, _) => *op,
            Self::Removals { .. } => Op::Removals,
        }
    }

    /// Replaces `frame` by header and body.
    pub fn encode(&self, request: u64, payload_len: u64, frame: &mut Vec<u8>) {
        encode_frame(frame, self.op(), true, request, payload_len, |out| match self {
            Self::Error { retryable, message } | Self::Refused { retryable, message } => {
                out.push(u8::from(*retryable));
                put_text(out, message);
            }
            Self::Hello {
                shared,
                writable,
                ring,
                boot,
                pool_bytes,
                lease_ms,
                reservation_ms,
                payload_max,
            } => {
                out.extend([*shared, *writable, *ring].map(u8::from));
                let numbers = [boot, pool_bytes, lease_ms, reservation_ms, payload_max];
                numbers.into_iter().for_each(|value| put_u64(out, value));
            }
            Self::Exists(found) => put_list(out, found, |out, &found| out.push(u8::from(found))),
            Self::Get(found) => put_list(out, found, put_found),
            Self::Reserve(placed) => put_list(out, placed, |out, placed| match placed {
                Placed::At { reservation, offset } => {
                    out.push(Outcome::Done as u8);
                    put_u64(out, reservation);
                    put_u64(out, offset);
                }
                Placed::Not(outcome) => out.push(*outcome as u8),
            }),
            Self::Stat(stats) => put_list(out, stats, put_stat),
            Self::Place { node, data } => {
                put_text(out, node);
                put_text(out, data);
            }
            Self::HandOver { time_ms, places } => {
                put_u64(out, time_ms);
                put_list(out, places, HandedPlace::put);
            }
            Self::Arrivals { time_ms, layers, blocks } => {
                put_u64(out, time_ms);
                out.extend(layers.to_le_bytes());
                put_list(out, blocks, ArrivingBlock::put);
            }
            Self::Outcomes(_, outcomes) => put_list(out, outcomes, |out, &outcome| out.push(outcome as u8)),
            Self::Removals { next, lost, keys } => {
                put_u64(out, next);
                out.push(u8::from(*lost));
                put_list(out, keys, put_key);
            }
        });
    }

    pub fn decode(op: Op, body: &[u8]) -> Result<Self, WireError> {
        let mut body = Reader(body);
        let reply = match op {
            Op::Error => Self::Error { retryable: body.bool("retryable")?, message: body.text()? },
            Op::Hello => Self::Hello {
                shared: body.bool("shared")?,
                writable: body.bool("writable")?,
                ring: body.bool("ring")?,
                boot: body.u64()?,
                pool_bytes: body.u64()?,
                lease_ms: body.u64()?,
                reservation_ms: body.u64()?,
                payload_max: body.u64()?,
            },
            Op::Exists => Self::Exists(body.list(|body| body.bool("exists"))?),
            Op::Get => Self::Get(body.list(Reader::found)?),
            Op::Reserve => Self::Reserve(body.list(|body| match body.outcome()? {
                Outcome::Done => Ok(Placed::At { reservation: body.u64()?, offset: body.u64()? }),
                outcome => Ok(Placed::Not(outcome)),
            })?),
            Op::Stat => Self::Stat(body.list(Reader::stat)?),
            Op::Refused => Self::Refused { retryable: body.bool("retryable")?, message: body.text()? },
            Op::Place => Self::Place { node: body.text()?, data: body.text()? },
            Op::Removals => {
                Self::Removals { next: body.u64()?, lost: body.bool("lost")?, keys: body.list(Reader::key)? }
            }
            Op::HandOver => Self::HandOver { time_ms: body.u64()?, places: body.list(HandedPlace::take)? },
            Op::Arrivals => {
                let (time_ms, layers) = (body.u64()?, body.u32()?);
                Self::Arrivals { time_ms, layers, blocks: body.list(ArrivingBlock::take)? }
            }
            Op::Put
            | Op::Commit
            | Op::Abort
            | Op::Release
            | Op::Remove
            | Op::Verify
            | Op::Pin
            | Op::Unpin
            | Op::Hold
            | Op::EndHold
            | Op::Evict
            | Op::Replicate
            | Op::LayerDone
            | Op::Finish
            | Op::DropHandOver
            | Op::WaitArrival
            | Op::LeaveArrivals => Self::Outcomes(op, body.list(Reader::outcome)?),
        };
        body.end()?;
        Ok(reply)
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

fn put_u64(out: &mut Vec<u8>, value: &u64) {
    out.extend(value.to_le_bytes());
}

fn put_key(out: &mut Vec<u8>, key: &BlockKey) {
    out.extend(key.0.to_le_bytes());
}

fn put_meta(out: &mut Vec<u8>, meta: &BlockMeta) {
    put_key(out, &meta.key);
    out.push(u8::from(meta.parent.is_some()));
    put_key(out, &meta.parent.unwrap_or_default());
    out.extend(meta.depth.to_le_bytes());
    out.extend(meta.class.to_le_bytes());
    out.extend(meta.ttl_ms.to_le_bytes());
    out.extend(meta.size.to_le_bytes());
}

fn put_pin(out: &mut Vec<u8>, pin: Pin) {
    let (hard, amount) = match pin {
        Pin::Hard { duration_ms } => (true, duration_ms),
        Pin::Soft { weight } => (false, weight),
    };
    out.push(u8::from(hard));
    out.extend(amount.to_le_bytes());
}

fn put_found(out: &mut Vec<u8>, found: &Found) {
    match found {
        Found::Hit { offset, size, checksum, lease } => {
            out.push(Outcome::Done as u8);
            out.extend(size.to_le_bytes());
            [offset, checksum, lease].into_iter().for_each(|value| put_u64(out, value));
        }
        Found::Not(outcome) => out.push(*outcome as u8),
    }
}

fn put_stat(out: &mut Vec<u8>, stat: &Option<Stat>) {
    out.push(u8::from(stat.is_some()));
    if let Some(stat) = stat {
        [stat.size, stat.depth, stat.uses, stat.leases]
            .into_iter()
            .for_each(|value| out.extend(value.to_le_bytes()));
        out.extend(stat.class.to_le_bytes());
        out.push(stat.tiers);
        [stat.checksum, stat.age_ms, stat.idle_ms].iter().for_each(|value| put_u64(out, value));
    }
}

/// Text is cut at 1 KiB, on a character boundary.
fn put_text(out: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(TEXT_MAX)];
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_list<T>(out: &mut Vec<u8>, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    out.extend((items.len() as u32).to_le_bytes());
    items.iter().for_each(|item| put(out, item));
}

/// The bytes that are left to decode.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) =
            self.0.split_first_chunk().ok_or(WireError::Truncated { had: self.0.len(), wanted: N })?;
        self.0 = rest;
        Ok(*head)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    fn key(&mut self) -> Result<BlockKey, WireError> {
        self.array().map(|bytes| BlockKey(u128::from_le_bytes(bytes)))
    }

    fn bool(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Value { field, value: value.into() }),
        }
    }

    /// The versions of a client with which this side can speak.
    fn versions(&mut self) -> Result<Versions, WireError> {
        let client = Versions { lowest: self.u8()?, highest: self.u8()? };
        client.common(VERSIONS).map(|_| client).ok_or(WireError::NoCommonVersion { client })
    }

    fn outcome(&mut self) -> Result<Outcome, WireError> {
        let value = self.u8()?;
        Outcome::from_repr(value).ok_or(WireError::Value { field: "outcome", value: value.into() })
    }

    fn text(&mut self) -> Result<String, WireError> {
        let len = usize::from(self.u16()?);
        if len > TEXT_MAX {
            return Err(WireError::Value { field: "text length", value: len as u64 });
        }
        let (text, rest) =
            self.0.split_at_checked(len).ok_or(WireError::Truncated { had: self.0.len(), wanted: len })?;
        self.0 = rest;
        let mut text = String::from_utf8_lossy(text).into_owned();
        // What stands for bytes that are no text is longer than they are.
        text.truncate(text.floor_char_boundary(TEXT_MAX));
        Ok(text)
    }

    fn meta(&mut self) -> Result<BlockMeta, WireError> {
        let (key, has_parent, parent) = (self.key()?, self.bool("has parent")?, self.key()?);
        let parent = has_parent.then_some(parent);
        let (depth, class, ttl_ms, size) = (self.u32()?, self.u16()?, self.u32()?, self.u32()?);
        Ok(BlockMeta { key, parent, depth, class, tenant: 0, ttl_ms, size })
    }

    fn pin(&mut self) -> Result<Pin, WireError> {
        let (hard, amount) = (self.bool("hard pin")?, self.u32()?);
        Ok(if hard { Pin::Hard { duration_ms: amount } } else { Pin::Soft { weight: amount } })
    }

    fn found(&mut self) -> Result<Found, WireError> {
        match self.outcome()? {
            Outcome::Done => {
                let size = self.u32()?;
                Ok(Found::Hit { size, offset: self.u64()?, checksum: self.u64()?, lease: self.u64()? })
            }
            outcome => Ok(Found::Not(outcome)),
        }
    }

    fn stat(&mut self) -> Result<Option<Stat>, WireError> {
        if !self.bool("has stat")? {
            return Ok(None);
        }
        let (size, depth, uses, leases, class, tiers) =
            (self.u32()?, self.u32()?, self.u32()?, self.u32()?, self.u16()?, self.u8()?);
        let (checksum, age_ms, idle_ms) = (self.u64()?, self.u64()?, self.u64()?);
        Ok(Some(Stat { size, tiers, checksum, depth, class, uses, leases, age_ms, idle_ms }))
    }

    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Result<T, WireError>) -> Result<Vec<T>, WireError> {
        let len = self.u32()?;
        if len as usize > BATCH_MAX {
            return Err(WireError::Batch { len });
        }
        (0..len).map(|_| item(self)).collect()
    }

    fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Trailing { extra: self.0.len() }) }
    }
}
