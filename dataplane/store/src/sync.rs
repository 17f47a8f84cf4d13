//! Atomics of code that `tests/interleavings` compiles a second time, on loom's.

pub(crate) use std::sync::atomic;
