//! Native client of a Kvasir host.
//!
//! [`data`] stores and reads blocks: in place in shared memory on the host's own machine, over TCP from elsewhere.
//! `control` asks about and changes the host itself, over gRPC; it is behind the feature of that name, which is on by
//! default. Without it this crate is threads and sockets alone, with no asynchronous runtime.

#[cfg(feature = "control")]
pub mod control;
pub mod data;

/// Whom to trust and what to show over TLS.
#[cfg(feature = "tls")]
pub use kvasir_tls::{ClientFiles, ClientTls, TlsError};

/// Messages and stubs of the gRPC services.
#[cfg(feature = "control")]
pub use kvasir_proto as proto;
