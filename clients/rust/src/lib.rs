//! Native client of a Kvasir host.
//!
//! [`data`] stores and reads blocks: in place in shared memory on the host's own machine, over TCP from elsewhere.
//! [`control`] asks about and changes the host itself, over gRPC.

pub mod control;
pub mod data;

/// Messages and stubs of the gRPC services, generated from `host/proto`.
#[allow(clippy::all, unreachable_pub, missing_docs)]
pub mod proto {
    tonic::include_proto!("kvasir.v1");
}
