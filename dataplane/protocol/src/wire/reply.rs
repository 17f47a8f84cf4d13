//! What a host answers.

use super::fields::{Reader, put_found, put_key, put_list, put_stat, put_text, put_u64};
use super::{ArrivingBlock, HandedPlace, Op, Outcome, WireError, encode_frame};
use crate::block::BlockKey;

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
