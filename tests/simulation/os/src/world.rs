//! What a scenario does to its world.

use std::sync::OnceLock;

pub use crate::disk::Failing;
use crate::random::Rng;
use crate::schedule;

/// Ends the process with what happened. It does not return.
type Over = fn(trace: &[String], why: &str);

static OVER: OnceLock<Over> = OnceLock::new();

/// Begins a world in which the calling thread is the driver. Once in a process. `over` is called with the trace when the world
/// cannot go on.
pub fn begin(seed: u64, over: Over) {
    let _ = OVER.set(over);
    schedule::begin(seed);
}

pub(crate) fn over(trace: &[String], why: &str) {
    if let Some(over) = OVER.get() {
        over(trace, why);
    }
    std::process::exit(1);
}

/// The numbers of a scenario, from the same seed and in a sequence of their own.
pub struct Chance(Rng);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(Rng(seed ^ 0x5ce0_a210))
    }

    /// Below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.below(limit)
    }
}

/// What is done by `work` is done by this host: its threads, its connections.
pub fn on_host<T>(host: usize, work: impl FnOnce() -> T) -> T {
    let me = schedule::me().expect("a thread of the world");
    let before = schedule::world().tasks[me].host.replace(host);
    let done = work();
    schedule::world().tasks[me].host = before;
    done
}

/// Ends a host's process as `kill -9` does, at whatever its threads are doing.
pub fn crash(host: usize) {
    let mut world = schedule::world();
    world.note(&format!("host-{host} crashes"));
    world.freeze(host);
    world.lose(host, false);
}

/// Ends a host's process by cutting its power: of what it wrote and did not sync, its disks keep what they like.
pub fn cut_power(host: usize) {
    let mut world = schedule::world();
    world.note(&format!("host-{host} loses power"));
    world.freeze(host);
    world.lose(host, true);
}

/// How disks fail from now on.
pub fn disks_fail(failing: Failing) {
    schedule::world().disks.failing = failing;
}

/// From now on nothing that `from` sends reaches `to`, until [`mend`].
pub fn cut(from: usize, to: usize) {
    let mut world = schedule::world();
    world.note(&format!("nothing gets from host-{from} to host-{to} any more"));
    world.net.cut(from, to);
}

pub fn mend() {
    let mut world = schedule::world();
    world.note("the network is whole again");
    let schedule::World { net, rng, .. } = &mut *world;
    net.mend(rng);
}

/// Breaks a connection, if there is any.
pub fn reset_one() {
    let mut world = schedule::world();
    let schedule::World { net, rng, .. } = &mut *world;
    if let Some(which) = net.reset_one(rng) {
        world.note(&format!("the connection {which} breaks"));
    }
}

/// Lets other threads go first, a number of times.
pub fn let_others(times: u64) {
    (0..times).for_each(|_| schedule::yield_now());
}

pub fn note(text: &str) {
    schedule::world().note(text);
}

/// What happened so far, how many turns threads had, a number that depends on all of their order, and the time in
/// nanoseconds.
pub fn so_far() -> (Vec<String>, u64, u64, u64) {
    let world = schedule::world();
    (world.trace.clone(), world.steps, world.fingerprint, schedule::now())
}
