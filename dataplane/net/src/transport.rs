//! Transports: ways to move bytes between a local [`Region`] and memory that a peer granted.
//!
//! A node exports segments (named sets of regions) through its [`Exports`]. A peer connects, which
//! proves on both sides that the shared secret is known, opens a segment by name and gets a [`Grant`]: what the memory
//! is, the keys to it, the epoch it is valid in and for how long. Operations name a grant and ranges of it:
//!
//! ```text
//! Transport::connect(address) -> Endpoint        one peer over one link
//! Endpoint::open(segment)     -> Grant           dies with its lease, its epoch, or when revoked
//! Endpoint::submit(ops, sink)                    one completion per operation, success or not
//! ```
//!
//! What every transport keeps, and `conformance` checks:
//!
//! * each operation submitted completes exactly once, also when the peer dies, the endpoint closes or it is cancelled;
//! * local memory lent to an operation is neither read nor written after that operation's completion;
//! * a failed read says how many leading bytes are valid. A failed write says how many the peer confirmed; others may
//!   or may not have arrived, and may still arrive until the grant dies, so a range is written by another party only
//!   under a new grant;
//! * nothing outside a granted range is touched, whatever a peer sends.
//!
//! Callers ask for [`Capabilities`]; they never downcast. `fault` wraps any transport in failures on demand.

pub mod auth;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod deadlined;
#[cfg(any(test, feature = "conformance"))]
pub mod fault;
pub mod grant;
pub mod local;
#[cfg(any(test, feature = "conformance"))]
pub mod loopback;
pub mod node;
pub mod op;
pub mod queued;
pub mod rdma;
pub mod shm;
pub mod tcp;

use std::sync::Arc;

pub use grant::{Access, Denied, Exports, Grant, RemoteRange};
use kvasir_memory::region::{Location, Region};
use kvasir_memory::shared::Shared;
pub use node::Node;
pub use op::{Cancel, Completion, CompletionQueue, Direction, Op, OpError, Sink};

/// What a kind of link can do. Callers ask here; they do not downcast.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// For messages and metrics, such as `tcp`.
    pub name: &'static str,
    /// The peer's processor takes no part in an operation.
    pub one_sided: bool,
    /// [`Endpoint::map`] gives the peer's memory itself.
    pub zero_copy: bool,
    /// The most bytes of one operation.
    pub message_bytes_max: u64,
    /// The most local or remote ranges of one operation.
    pub ranges_max: usize,
    /// The most operations of one endpoint in flight; more complete with [`OpError::QueueFull`].
    pub queue_depth: usize,
    /// Local regions must be [registered](Transport::register) before an operation names them.
    pub needs_registration: bool,
    /// Whether memory of the host, and of a CUDA device, may take part.
    pub host_memory: bool,
    pub cuda_memory: bool,
}

impl Capabilities {
    pub fn reaches(&self, location: Location) -> bool {
        if location.is_host() { self.host_memory } else { self.cuda_memory }
    }
}

/// Why there is no endpoint, or no grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{address:?} is no {transport} address: {reason}")]
    Address { transport: &'static str, address: String, reason: String },
    #[error(
        "no connection to {address} over {transport}: {reason}; check that the peer runs, then try again"
    )]
    Unreachable { transport: &'static str, address: String, reason: String },
    #[error(
        "peer at {address} and this node do not share a secret ({reason}); give both the same secret (cluster.secret_file)"
    )]
    Authentication { address: String, reason: String },
    #[error(
        "peer at {address} and this node do not agree about TLS ({reason}); give both, or neither, certificates of one \
         authority, each with its node's name"
    )]
    Certificate { address: String, reason: String },
    #[error("peer {peer} is down: {reason}")]
    PeerDown { peer: String, reason: String },
    #[error("peer {peer} does not give segment {segment:?}: {denied}")]
    Denied { peer: String, segment: String, denied: Denied },
    #[error("{transport} cannot use {region}: {reason}")]
    Register { transport: &'static str, region: String, reason: String },
    #[error("{transport} cannot {what}")]
    Unsupported { transport: &'static str, what: &'static str },
    #[error("message of {len} B is above the limit of {max} B; send several", max = node::NOTICE_MAX)]
    NoticeTooLong { len: usize },
}

impl Error {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::PeerDown { .. })
    }
}

/// A kind of link of one node.
pub trait Transport: Send + Sync {
    fn capabilities(&self) -> Capabilities;

    /// Makes a region usable by operations. At start-up, not on the hot path. Again for the same region: no effect.
    fn register(&self, region: &Region) -> Result<(), Error>;

    /// Ends what [`register`](Self::register) began. Operations in flight keep the memory until they complete.
    fn unregister(&self, region: &Region);

    /// Where peers reach this node over this link. Returns `None` if it only connects out.
    fn address(&self) -> Option<String>;

    /// Connects and authenticates. Bounded in time by the transport's configuration.
    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error>;

    /// Called after a segment was revoked or the epoch moved: a transport whose hardware checks keys makes the old
    /// ones useless before it returns. Transports that look each operation up in [`Exports`] have nothing to do.
    fn revoked(&self) {}
}

/// One peer over one link.
pub trait Endpoint: Send + Sync {
    /// The name that the peer gave when it authenticated.
    fn peer(&self) -> &str;

    /// Asks for a grant on a segment that the peer exports. Blocks for one round trip.
    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error>;

    /// Starts operations. Each completes once through `sink`, in any order, perhaps before this returns and perhaps on
    /// another thread. Refused operations complete with the reason.
    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>);

    /// Asks that operations made with this token end early. Only their completions say what happened to them.
    fn cancel(&self, cancel: &Cancel) {
        cancel.set();
    }

    /// Tells the peer something (at most [`node::NOTICE_MAX`] bytes); it arrives in the peer's
    /// [`Notices`](node::Notices) after the effects of all operations that completed before this call.
    fn notify(&self, message: &[u8]) -> Result<(), Error>;

    /// The peer's bytes in place, without a copy. Only where [`Capabilities::zero_copy`] says so.
    fn map(&self, _grant: &Grant, _range: RemoteRange) -> Result<Mapped, Error> {
        Err(Error::Unsupported { transport: "this transport", what: "map a peer's memory" })
    }

    /// Why the endpoint no longer works; `None` while it does. It does not come back: connect again.
    fn down(&self) -> Option<String>;

    /// Operations submitted and not yet completed.
    fn in_flight(&self) -> usize;

    /// Ends it. Operations in flight complete with [`OpError::PeerDown`]. Returns at once.
    fn close(&self);
}

/// A peer's bytes, mapped here. They are immutable only as long as the protocol above says so (a committed block
/// under a lease); the mapping itself stays valid for as long as this value lives, whatever happens to the peer.
pub struct Mapped {
    pub(crate) memory: Arc<kvasir_memory::host::Mapping>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Mapped {
    pub fn bytes(&self) -> Shared<'_> {
        // In range since it was made; a mapping does not shrink.
        self.memory.bytes(self.offset, self.len).unwrap_or(Shared::from(&[][..]))
    }
}
