//! The gRPC contract of a host: messages and stubs, generated from `kvasir/v1`. It belongs to neither side.

#![allow(clippy::all, unreachable_pub, missing_docs)]

tonic::include_proto!("kvasir.v1");

/// The files themselves, as a `FileDescriptorSet`: for reflection, and to walk every call.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kvasir.bin"));
