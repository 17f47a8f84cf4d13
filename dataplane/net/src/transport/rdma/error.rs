//! What can go wrong with verbs, and how an operation failed.

use std::io;

use super::sys;
use kvasir_memory::region::Location;

/// A refused or failed call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The library is optional: without it everything but this transport works.
    #[error(
        "no RDMA devices: {library} could not be loaded ({source}); install rdma-core, or use another transport"
    )]
    NoLibrary { library: String, source: libloading::Error },
    #[error(
        "no RDMA devices: the verbs library has no function {name} ({source}); install rdma-core 31 or later, \
         or use another transport"
    )]
    OldLibrary { name: &'static str, source: libloading::Error },
    #[error("no RDMA devices: the verbs library is loaded but finds none; check `rdma link` and the driver")]
    NoDevices,
    #[error("no RDMA device {wanted}; there are: {found}")]
    NoSuchDevice { wanted: String, found: String },
    #[error("port {port} of {device} is not active (state {state}); check its cable and `rdma link`")]
    PortDown { device: String, port: u8, state: u32 },
    #[error("port {port} of {device} has no {wanted} address; set an IP address on its network interface")]
    NoGid { device: String, port: u8, wanted: String },
    #[error("{step} failed on {device}: {source}")]
    System { step: &'static str, device: String, source: io::Error },
    #[error("{what} is not supported by {device}")]
    Unsupported { what: &'static str, device: String },
    #[error("{device} cannot reach memory at {location}: {reason}; transfer it by way of the host")]
    DeviceMemory { device: String, location: Location, reason: String },
    #[error("range of {len} B at {offset} is outside the registered {region_bytes} B")]
    OutOfRegion { offset: u64, len: u64, region_bytes: u64 },
    #[error("a work request {problem}; split it")]
    BadRequest { problem: String },
    #[error(
        "{wanted} work requests do not fit: {outstanding} of {depth} are outstanding; wait for completions"
    )]
    QueueFull { wanted: usize, outstanding: usize, depth: usize },
    #[error("the connection is broken; connect again")]
    Broken,
    #[error("the control stream failed while {step}: {source}")]
    Control { step: &'static str, source: io::Error },
    #[error("the peer's handshake was refused: {problem}")]
    Handshake { problem: String },
    #[error("the peer speaks for epoch {theirs}, but epoch {fence} is the oldest accepted; it must rejoin")]
    StaleEpoch { theirs: u64, fence: u64 },
}

impl Error {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::PortDown { .. } | Self::QueueFull { .. } | Self::Broken | Self::Control { .. })
    }
}

/// Why one work request ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The peer's adapter refused the key, the range or the kind of access.
    #[error("the peer refused the access: wrong key, outside its region, or not granted")]
    RemoteAccess,
    /// The peer's adapter found the request malformed, for example too long.
    #[error("the peer called the request invalid")]
    RemoteInvalid,
    /// No acknowledgement after every retry: the peer or the path to it is gone.
    #[error("the peer does not answer")]
    Unreachable,
    /// An earlier request failed or the connection was closed; this one may or may not have reached the peer.
    #[error("flushed, because the connection broke before this request was done")]
    Flushed,
    /// Our own adapter refused a local range or key.
    #[error("the local memory of the request is not accessible to the adapter")]
    LocalProtection,
    #[error("the adapter reports status {status} (vendor {vendor})")]
    Other { status: u32, vendor: u32 },
}

impl Failure {
    /// The failure of a completion, or `None` if it succeeded.
    pub(super) fn of(wc: &sys::Wc) -> Option<Self> {
        Some(match wc.status {
            sys::WC_SUCCESS => return None,
            sys::WC_REM_ACCESS_ERR => Self::RemoteAccess,
            sys::WC_REM_INV_REQ_ERR | sys::WC_REM_OP_ERR => Self::RemoteInvalid,
            sys::WC_RETRY_EXC_ERR | sys::WC_RNR_RETRY_EXC_ERR => Self::Unreachable,
            sys::WC_WR_FLUSH_ERR => Self::Flushed,
            sys::WC_LOC_PROT_ERR => Self::LocalProtection,
            status => Self::Other { status, vendor: wc.vendor_err },
        })
    }

    /// Whether another connection or another path may succeed.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Unreachable | Self::Flushed)
    }
}
