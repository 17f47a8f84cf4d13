//! A CUDA device in software: the functions of NVIDIA's driver that `kvasir-gpu` calls, for tests on machines without a
//! GPU. Installed as `libcuda.so.1` in a folder on `LD_LIBRARY_PATH`; `cargo xtask test --gpu` does that where there is no
//! driver. It is never shipped.
//!
//! It is made to find mistakes, so wherever the driver's documentation leaves a choice it takes the one that is worst for
//! a careless caller:
//!
//! * **Work is late.** A stream is a thread that waits a random time before each piece of work. Bytes that are read, reused
//!   or freed without a wait are wrong, not accidentally right. `KVASIR_CUDA_SEED` gives other times, and
//!   `KVASIR_CUDA_DELAY_US` longer ones.
//! * **Memory of a device cannot be touched.** Its addresses are mapped without any access; the bytes lie elsewhere, under
//!   addresses that nobody knows. A dereference on the host ends the process. While a kernel runs they are mapped.
//! * **Memory is poisoned** when it is allocated and when it is freed, and the addresses of freed memory are never used
//!   again. Freeing waits for nothing. Work that comes to freed memory fails, and with it the device, as on a GPU.
//! * **A call needs its context**, bound to the calling thread. A context whose last user lets go of it while memory,
//!   streams or events are left ends the process: that is a leak.
//! * **A kernel is compiled from its source** as C++ and run by the stream's thread, one GPU thread after the other.
//! * **Other processes** open memory and events under `/proc`, by the descriptors of their owner.
//! * **Errors on demand**: see [`fault`].
//!
//! What it does not have: speed, caches, the memory order of a GPU (threads of a kernel run one after the other), warps, and
//! everything that `kvasir-gpu` does not call.
//!
//! `unsafe` is allowed in the whole crate: it is a C interface that hands out addresses, and test code.
#![allow(unsafe_code)]

mod api;
mod chance;
mod copy;
mod device;
mod event;
mod fault;
mod ipc;
mod kernel;
mod memory;
mod outcome;
mod stream;
#[cfg(test)]
mod tests;
