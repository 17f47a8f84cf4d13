//! RDMA by the verbs library, opened at run time.
//!
//! The same binary starts where there is no library, no device or no driver, and says "no RDMA devices": nothing
//! here is linked. One-sided writes and reads go over reliable connections ([`qp`]), which are set up over a
//! control stream ([`connect`]) and announce completions on a descriptor ([`cq`]). Why not a crate:
//! `docs/design/0002-verbs-at-run-time.md`.
#![allow(unsafe_code)]

pub mod connect;
pub mod cq;
mod device;
mod error;
mod load;
mod memory;
pub mod qp;
mod sys;

pub use device::{Device, DeviceOptions, Limits, device_names};
pub use error::{Error, Failure};
pub use memory::MemoryRegion;
