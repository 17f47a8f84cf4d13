//! What a client asks.

use super::fields::{Reader, put_key, put_list, put_meta, put_pin, put_text, put_u64};
use super::{HandOverCall, Op, Versions, WireError, encode_frame};
use crate::block::{BlockKey, BlockMeta, Pin};

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
