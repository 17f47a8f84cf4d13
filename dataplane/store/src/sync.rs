//! Atomics of code that `tests/interleavings` compiles a second time, on loom's.

pub(crate) use std::sync::atomic;

/// How often a reader begins again when changes come between, before it takes the lock.
pub(crate) const TRIES: usize = 16;

/// So many words of zero. Those that nobody touches take no memory.
pub(crate) fn zeroed(len: usize) -> Box<[atomic::AtomicU64]> {
    bytemuck::zeroed_slice_box(len)
}

/// The same in words of 32 bits.
pub(crate) fn zeroed_halves(len: usize) -> Box<[atomic::AtomicU32]> {
    bytemuck::zeroed_slice_box(len)
}
