//! What the data plane asks of the machine: time, chance, threads, sockets and disks.
//!
//! Here all of it is the system's own, under the names of the standard library: nothing is wrapped, so nothing costs
//! anything. `tests/simulation` compiles the same data plane against a crate of the same shape, in which time is virtual,
//! every choice follows from a seed, and the network is a model. What is not asked for here cannot be simulated: code between
//! hosts, and on disks, takes time, threads, sockets and files from this crate, never from `std`. Locks it takes from
//! `parking_lot`, whose place
//! the simulation takes by name.

pub mod disk;
pub mod net;
pub mod planted;
pub mod random;

pub mod time {
    pub use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
}

pub mod thread {
    pub use std::thread::{Builder, JoinHandle, available_parallelism, scope, sleep, spawn, yield_now};
}
