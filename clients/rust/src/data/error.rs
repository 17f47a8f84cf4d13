//! What can go wrong between a client and its host.

use std::io;

use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_protocol::wire::{Op, Outcome, Reply, WireError};

#[cfg(feature = "gpu")]
use super::CudaError;
use super::{Endpoint, HandingError, LabelFault};

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{text:?} is not an endpoint ({why}); write unix:/path or host:port")]
    Endpoint { text: String, why: String },
    #[error("{}", unconnected(endpoint, source))]
    Connect { endpoint: Endpoint, source: io::Error },
    #[error("the connection to {endpoint} broke in the middle of {op:?}: {source}; connect again")]
    Lost { endpoint: Endpoint, op: Op, source: io::Error },
    #[error("{endpoint} answered with something that is not the data protocol: {source}")]
    Protocol { endpoint: Endpoint, source: WireError },
    #[error("{endpoint} answered {op:?} with something else, or with another number of items")]
    WrongReply { endpoint: Endpoint, op: Op },
    #[error("{endpoint} refused: {message}")]
    Refused { endpoint: Endpoint, retryable: bool, message: String },
    #[error("block {key}: {}", outcome.text())]
    Block { key: BlockKey, outcome: Outcome },
    #[error(
        "block {key} is not removed everywhere: it is being written, or a disk or another host that has it did not answer; remove it again"
    )]
    NotRemoved { key: BlockKey },
    #[error("batch of {len} blocks; the most in one call is {BATCH_MAX}, send several")]
    Batch { len: usize },
    #[error("payload of {bytes} B is above the {max} B that the host takes at once; send smaller batches")]
    Payload { bytes: u64, max: u64 },
    #[error("block of {len} B does not match its announced size of {size} B")]
    Size { len: usize, size: u32 },
    #[error("block of {size} B does not fit the buffer of {len} B")]
    Buffer { size: u32, len: usize },
    #[error("block {block} is not in the plan, which has {blocks}")]
    NoBlock { block: usize, blocks: usize },
    #[error(
        "block {key} is stored with {size} B, and the plan's blocks have {expected} B; what differs belongs in the namespace"
    )]
    OtherSize { key: BlockKey, size: u32, expected: u32 },
    #[error(
        "block {key} is not the one that was asked for: {fault}; treat it as missing, and find out who stored it"
    )]
    OtherLabel { key: BlockKey, fault: LabelFault },
    #[error("{labels} labels for {blocks} blocks; give one for each, or none")]
    Labels { labels: usize, blocks: usize },
    #[error("the lease on block {key} ran out before it was read; get it again")]
    LeaseExpired { key: BlockKey },
    #[error("block {key} was lent over a connection that has ended; connect again and get it again")]
    LenderGone { key: BlockKey },
    #[error("the memory that {endpoint} sent cannot be mapped: {source}")]
    Map { endpoint: Endpoint, source: io::Error },
    #[error("hand-overs need the host's Unix socket, and {endpoint} is none")]
    NotLocal { endpoint: Endpoint },
    #[error(
        "block {block}, layer {layer} does not exist: the hand-over has {blocks} blocks of {layers} layers"
    )]
    NoLayer { block: usize, layer: u32, blocks: usize, layers: u32 },
    #[error("{what} of the hand-over of request {request} is not here yet; wait for it again")]
    NotArrived { what: String, request: u64 },
    #[error("the time to fill the blocks of request {request} is over; drop the hand-over and begin again")]
    TooLate { request: u64 },
    #[error(transparent)]
    Handing(#[from] HandingError),
    #[error("the deadline for {op:?} at {endpoint} had passed before it was asked; set a later one")]
    DeadlinePassed { endpoint: Endpoint, op: Op },
    #[error(
        "{endpoint} speaks data protocol {version}, and {op:?} needs {}; update the host, or go on without", op.since()
    )]
    TooOld { endpoint: Endpoint, op: Op, version: u8 },
    #[cfg(feature = "gpu")]
    #[error("blocks were not copied between the host and a GPU: {source}; what is missing is computed anew")]
    Gpu { source: CudaError },
    #[cfg(feature = "gpu")]
    #[error(
        "the engine's stream on cuda:{device} had not come to the job's blocks when the job's time was over; give jobs more \
         time, or find out what the stream waits for"
    )]
    StreamLate { device: u16 },
    #[error("the connection to {endpoint} is unusable after an earlier error; connect again")]
    Closed { endpoint: Endpoint },
}

impl ClientError {
    /// Whether the same call may succeed later (for connection errors: on a new connection).
    pub fn retryable(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::Lost { .. }
            | Self::LeaseExpired { .. }
            | Self::LenderGone { .. }
            | Self::NotRemoved { .. }
            | Self::NotArrived { .. }
            | Self::TooLate { .. }
            | Self::DeadlinePassed { .. }
            | Self::Closed { .. } => true,
            #[cfg(feature = "gpu")]
            Self::StreamLate { .. } => true,
            #[cfg(feature = "gpu")]
            // A GPU that has failed stays so until the process is started again.
            Self::Gpu { .. } => false,
            Self::Refused { retryable, .. } => *retryable,
            Self::Block { outcome, .. } => outcome.retryable(),
            Self::Endpoint { .. }
            | Self::Protocol { .. }
            | Self::WrongReply { .. }
            | Self::Batch { .. }
            | Self::Payload { .. }
            | Self::Size { .. }
            | Self::Buffer { .. }
            | Self::NoBlock { .. }
            | Self::OtherSize { .. }
            | Self::OtherLabel { .. }
            | Self::Labels { .. }
            | Self::NotLocal { .. }
            | Self::NoLayer { .. }
            | Self::TooOld { .. }
            | Self::Handing(_)
            | Self::Map { .. } => false,
        }
    }
}

/// A socket that is there and cannot be opened has a host behind it, as a rule.
fn unconnected(endpoint: &Endpoint, source: &io::Error) -> String {
    if source.kind() == io::ErrorKind::PermissionDenied {
        format!("{endpoint} is closed to this user ({source}); {}", crate::WHO_MAY)
    } else {
        format!("no Kvasir host at {endpoint}: {source}")
    }
}

/// The error for a reply that does not answer the question.
pub(super) fn wrong(endpoint: &Endpoint, op: Op, reply: Reply) -> ClientError {
    let endpoint = endpoint.clone();
    match reply {
        Reply::Error { retryable, message } | Reply::Refused { retryable, message } => {
            ClientError::Refused { endpoint, retryable, message }
        }
        _ => ClientError::WrongReply { endpoint, op },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_this_user_may_not_open_is_told_from_one_that_is_not_there() {
        let endpoint: Endpoint = "unix:/run/kvasir.sock".parse().unwrap();
        let failed =
            |kind: io::ErrorKind| ClientError::Connect { endpoint: endpoint.clone(), source: kind.into() };
        let closed = failed(io::ErrorKind::PermissionDenied).to_string();
        assert!(closed.contains("unix:/run/kvasir.sock is closed to this user"), "{closed}");
        let absent = failed(io::ErrorKind::NotFound).to_string();
        assert!(absent.contains("no Kvasir host at unix:/run/kvasir.sock"), "{absent}");
    }
}
