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
    use std::io;

    pub use std::thread::{Builder, JoinHandle, available_parallelism, scope, sleep, spawn, yield_now};

    /// How much nicer a thread that gives way is than the rest of the host. It gets less than a tenth of a core that others want,
    /// and an idle core whole. So its work comes to its end also on a machine that is never idle.
    pub const NICENESS: i32 = 10;

    /// Has the calling thread give way to others from now on, for work that takes long and that nobody waits for. It should hold
    /// no lock meanwhile that others want. Linux counts niceness by thread, whatever POSIX says (nice(2), "C library/kernel
    /// differences").
    ///
    /// # Errors
    /// The system refuses, and the thread has the priority that it had.
    pub fn give_way() -> io::Result<()> {
        rustix::process::nice(NICENESS)?;
        Ok(())
    }
}
