//! Hand-over of a request's blocks to a peer, layer by layer, while they are produced.
//!
//! ```text
//! here  -> peer   open: which blocks, how many layers      both: places reserved; at the peer exported for writing
//! here  -> peer   per finished layer: that part of every block, in one batch, announced when it is there
//! here  -> peer   settle: checksums                        peer: takes the export back, compares, commits; then here
//! ```
//!
//! A block is as many equal pieces as there are layers, one after the other (`layout.rs`). Layers may be finished in any
//! order. Readers at the peer may use a layer as soon as it is announced; whether the bytes were right is known when the
//! whole is settled. Until then nobody else sees the blocks. All blocks are kept or none: whatever breaks (a client that
//! is gone, a host that is lost, a checksum, time) gives the places back on both sides.
//!
//! Blocks that are stored here already can be pushed ([`push`](super::push)): in one layer, and each that arrives intact is
//! kept.
//!
//! A block that one of the two hosts stores already is held in place there instead, and written only on the other one.
//!
//! **Places under a reader.** A reader of arrivals holds their places: they go to nobody else before the last one left,
//! or the hand-over's time (half of what a reservation may take) is over, which readers are told.

pub mod notice;
mod receive;
mod send;

pub use receive::{Arrival, ArrivingBlock, Waited};
pub use send::{HandingOver, SourcePlace};

pub(super) use self::receive::Receiving;
use super::NoPeer;
use kvasir_protocol::block::{BlockKey, BlockMeta};

/// The most layers of a model.
pub const LAYERS_MAX: u32 = 1024;
/// The most blocks of one hand-over.
pub const BLOCKS_MAX: usize = 1024;
/// The most hand-overs that a host makes at once, and the most that it takes at once from one peer.
pub const HAND_OVERS_MAX: usize = 64;
/// The most that a host takes at once from all peers.
const TAKEN_MAX: usize = 4 * HAND_OVERS_MAX;

/// Why a block that is stored here cannot take part in a hand-over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotHeld {
    #[error("block {key} is stored already, with {size} B; hand it over in that size, or remove it first")]
    OtherSize { key: BlockKey, size: u32 },
    #[error("block {key} was just evicted; try again")]
    Evicted { key: BlockKey },
}

/// Why a hand-over did not begin, or did not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandOverError {
    #[error("this host knows no others; list them in cluster.peers")]
    Alone,
    #[error(transparent)]
    NoPeer(#[from] NoPeer),
    #[error("peer {peer} is not up; try again when it is, or hand over to another")]
    PeerDown { peer: String },
    #[error("a hand-over has 1 to {LAYERS_MAX} layers, not {layers}")]
    Layers { layers: u32 },
    #[error("a hand-over has 1 to {BLOCKS_MAX} blocks, not {blocks}; make several")]
    Blocks { blocks: usize },
    #[error("block {key} of {size} B does not consist of {layers} equal layers; pad it to a multiple")]
    Uneven { key: BlockKey, size: u32, layers: u32 },
    #[error(
        "{HAND_OVERS_MAX} hand-overs are under way here, the most at once; try again when one is finished"
    )]
    TooMany,
    #[error("block {key} has no place here: {reason}")]
    NoPlace { key: BlockKey, reason: String, retryable: bool },
    #[error(transparent)]
    NotHeld(#[from] NotHeld),
    #[error("peer {peer} does not take it: {reason}")]
    NotTaken { peer: String, reason: String },
    #[error("request {request} is being handed over already; finish or drop that first")]
    Twice { request: u64 },
    #[error("no hand-over of request {request} is open on this connection")]
    Unknown { request: u64 },
    #[error("layer {layer} does not exist; the hand-over has {layers}, counted from 0")]
    NoLayer { layer: u32, layers: u32 },
    #[error("layer {layer} was handed over already")]
    LayerTwice { layer: u32 },
    #[error("layer {layer} was not handed over yet; hand it over and finish again")]
    LayerMissing { layer: u32 },
    #[error("{given} checksums for {blocks} blocks; give one each")]
    Checksums { given: usize, blocks: usize },
    #[error("block {key} {reason}; nothing was kept on either host")]
    NotKept { key: BlockKey, reason: String },
    #[error("it broke off: {reason}; nothing was kept here, begin again")]
    Broken { reason: String },
    #[error("its time is over ({ms} ms, half of store.reservation_ttl); nothing was kept here, begin again")]
    Late { ms: u64 },
}

impl HandOverError {
    /// Whether the same hand-over, begun again, may succeed.
    pub fn retryable(&self) -> bool {
        match self {
            Self::PeerDown { .. }
            | Self::TooMany
            | Self::NotTaken { .. }
            | Self::NotKept { .. }
            | Self::Broken { .. }
            | Self::Late { .. } => true,
            Self::NoPlace { retryable, .. } => *retryable,
            Self::NotHeld(reason) => matches!(reason, NotHeld::Evicted { .. }),
            Self::Alone
            | Self::NoPeer(_)
            | Self::Layers { .. }
            | Self::Blocks { .. }
            | Self::Uneven { .. }
            | Self::Twice { .. }
            | Self::Unknown { .. }
            | Self::NoLayer { .. }
            | Self::LayerTwice { .. }
            | Self::LayerMissing { .. }
            | Self::Checksums { .. } => false,
        }
    }

    /// Whether this ends the hand-over, so that its places are given back.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::NotKept { .. } | Self::Broken { .. } | Self::Late { .. })
    }
}

/// Whether blocks can be handed over in this many layers.
fn check(blocks: &[BlockMeta], layers: u32) -> Result<(), HandOverError> {
    if !(1..=LAYERS_MAX).contains(&layers) {
        return Err(HandOverError::Layers { layers });
    }
    if !(1..=BLOCKS_MAX).contains(&blocks.len()) {
        return Err(HandOverError::Blocks { blocks: blocks.len() });
    }
    let uneven = |meta: &&BlockMeta| meta.size == 0 || !meta.size.is_multiple_of(layers);
    match blocks.iter().find(uneven) {
        Some(&BlockMeta { key, size, .. }) => Err(HandOverError::Uneven { key, size, layers }),
        None => Ok(()),
    }
}
