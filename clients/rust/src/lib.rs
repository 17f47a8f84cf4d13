//! Native client of a Kvasir host.
//!
//! [`data`] stores and reads blocks: in place in shared memory on the host's own machine, over TCP from elsewhere.
//!
//! An engine that keeps its KV in paged memory uses these things of it (`examples/engine.rs` is all of it in 60 lines):
//!
//! * [`Plan`](data::Plan) says once where the blocks lie, in how many runs. From then on a block is a number.
//! * [`Jobs`](data::Jobs) saves and loads such blocks on threads of their own, and tells by a descriptor what has ended: each
//!   job once, which blocks are there, and not before the copying has stopped. A block is there only if its checksum is that
//!   of what was stored.
//! * [`Namespace`](data::Namespace) makes of an engine's hash the key of a block and a [`Label`](data::Label), which is stored
//!   behind the block and compared after a load. Keys may collide, or be stored under by somebody else; a label does not.
//! * [`Reconnecting`](data::Reconnecting) gives clients for the short questions (`exists`, `hold`), with
//!   [`boot`](data::Client::boot) to tell when the host is another and what was remembered is void.
//!
//! With the feature `gpu` such blocks may lie in the memory of an NVIDIA GPU: `data::DeviceBlocks` in place of a plan.
//!
//! `control` asks about and changes the host itself, over gRPC; it is behind the feature of that name, which is on by
//! default. Without it this crate is threads and sockets alone, with no asynchronous runtime.

#[cfg(feature = "control")]
pub mod control;
pub mod data;
pub mod sync;

/// Which authorities to trust and which certificate to show over TLS.
#[cfg(feature = "tls")]
pub use kvasir_tls::{ClientFiles, ClientTls, TlsError};

/// Messages and stubs of the gRPC services.
#[cfg(feature = "control")]
pub use kvasir_proto as proto;

/// What to do about a Unix socket that cannot be opened.
const WHO_MAY: &str = "the daemon's own user may use it, and whoever its settings list under [[access.allow]]; its TCP ports, if it has any, \
     take a token (`kvasir token new`, on the host)";
