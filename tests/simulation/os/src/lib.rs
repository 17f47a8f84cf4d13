//! The machine of a simulated host, in the shape of `kvasir-os`: virtual time, chance from a seed, threads that take turns,
//! and a network and disks that are models. `parking_lot` and `oneshot` are here as well, because a thread that waits for a lock must
//! let another one go on.
//!
//! Threads are mostly stacks on one thread of the system ([`fiber`]), and one runs at a time ([`schedule`]). Whenever it waits, and now and then when it
//! takes a lock, the seed says who is next. Time stands still while any thread can run, and then jumps to whatever happens
//! next. A process that crashes is never scheduled again: no destructor runs, as after `kill -9`. So a world is never taken
//! down either; each seed has a process of its own.

pub mod disk;
mod fiber;
pub mod net;
pub mod oneshot;
mod order;
pub mod planted;
pub mod random;
mod schedule;
pub mod sync;
pub mod thread;
pub mod time;
pub mod world;
