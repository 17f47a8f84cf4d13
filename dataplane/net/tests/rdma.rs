//! Real verbs over whatever devices this machine has; `cargo xtask test --rdma` boots one with two of Soft-RoCE.
//!
//! `RDMA_DEVICES` names two devices that reach each other (one device, named twice, works as well).

#[path = "rdma/failures.rs"]
mod failures;
#[path = "rdma/side.rs"]
mod side;
#[path = "rdma/transport.rs"]
mod transport;
#[path = "rdma/verbs.rs"]
mod verbs;
