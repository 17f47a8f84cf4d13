//! Calls about hand-overs, layer by layer.

use super::fields::{Reader, put_key, put_list, put_meta, put_text, put_u64};
use super::{Op, WireError};
use crate::block::{BlockKey, BlockMeta};

/// One of the calls about hand-overs. Allowed only on the Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandOverCall {
    /// Hands blocks over to a peer, each as `layers` equal pieces. `request` names it on both hosts.
    Begin {
        request: u64,
        layers: u32,
        peer: String,
        blocks: Vec<BlockMeta>,
    },
    /// This layer is filled in, in all blocks.
    LayerDone {
        request: u64,
        layer: u32,
    },
    /// All layers are filled in; one checksum per block. The hand-over is over unless this is refused as incomplete.
    Finish {
        request: u64,
        checksums: Vec<u64>,
    },
    Drop {
        request: u64,
    },
    /// What is being handed over to this host. Answered as soon as it has begun; after `wait_ms`, or a second, in any
    /// case.
    Arrivals {
        request: u64,
        wait_ms: u32,
    },
    /// Answered in the same way: when the layer is here, or (`None`) when all is compared and kept.
    Wait {
        request: u64,
        layer: Option<u32>,
        wait_ms: u32,
    },
    Leave {
        request: u64,
    },
}

/// A place to fill for a hand-over, or (not `to_fill`) where the block is stored already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandedPlace {
    pub offset: u64,
    pub to_fill: bool,
}

/// A block that is being handed over to this host, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivingBlock {
    pub key: BlockKey,
    pub size: u32,
    pub offset: u64,
}

impl HandOverCall {
    pub(super) fn op(&self) -> Op {
        match self {
            Self::Begin { .. } => Op::HandOver,
            Self::LayerDone { .. } => Op::LayerDone,
            Self::Finish { .. } => Op::Finish,
            Self::Drop { .. } => Op::DropHandOver,
            Self::Arrivals { .. } => Op::Arrivals,
            Self::Wait { .. } => Op::WaitArrival,
            Self::Leave { .. } => Op::LeaveArrivals,
        }
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Begin { request, layers, peer, blocks } => {
                put_u64(out, request);
                out.extend(layers.to_le_bytes());
                put_text(out, peer);
                put_list(out, blocks, put_meta);
            }
            Self::LayerDone { request, layer } => {
                put_u64(out, request);
                out.extend(layer.to_le_bytes());
            }
            Self::Finish { request, checksums } => {
                put_u64(out, request);
                put_list(out, checksums, put_u64);
            }
            Self::Drop { request } | Self::Leave { request } => put_u64(out, request),
            Self::Arrivals { request, wait_ms } => {
                put_u64(out, request);
                out.extend(wait_ms.to_le_bytes());
            }
            Self::Wait { request, layer, wait_ms } => {
                put_u64(out, request);
                out.push(u8::from(layer.is_some()));
                out.extend(layer.unwrap_or_default().to_le_bytes());
                out.extend(wait_ms.to_le_bytes());
            }
        }
    }

    /// Returns `None` if `op` is not a call about hand-overs.
    pub(super) fn take(op: Op, body: &mut Reader<'_>) -> Result<Option<Self>, WireError> {
        Ok(Some(match op {
            Op::HandOver => Self::Begin {
                request: body.u64()?,
                layers: body.u32()?,
                peer: body.text()?,
                blocks: body.list(Reader::meta)?,
            },
            Op::LayerDone => Self::LayerDone { request: body.u64()?, layer: body.u32()? },
            Op::Finish => Self::Finish { request: body.u64()?, checksums: body.list(Reader::u64)? },
            Op::DropHandOver => Self::Drop { request: body.u64()? },
            Op::Arrivals => Self::Arrivals { request: body.u64()?, wait_ms: body.u32()? },
            Op::WaitArrival => {
                let (request, has_layer, layer) = (body.u64()?, body.bool("has layer")?, body.u32()?);
                Self::Wait { request, layer: has_layer.then_some(layer), wait_ms: body.u32()? }
            }
            Op::LeaveArrivals => Self::Leave { request: body.u64()? },
            _ => return Ok(None),
        }))
    }
}

impl HandedPlace {
    pub(super) fn put(out: &mut Vec<u8>, place: &Self) {
        put_u64(out, &place.offset);
        out.push(u8::from(place.to_fill));
    }

    pub(super) fn take(body: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self { offset: body.u64()?, to_fill: body.bool("to fill")? })
    }
}

impl ArrivingBlock {
    pub(super) fn put(out: &mut Vec<u8>, block: &Self) {
        put_key(out, &block.key);
        out.extend(block.size.to_le_bytes());
        put_u64(out, &block.offset);
    }

    pub(super) fn take(body: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self { key: body.key()?, size: body.u32()?, offset: body.u64()? })
    }
}
