//! What a scenario does to its world.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::Access;
use rustix::process::{Resource, Rlimit};
use rustix::thread::CpuSet;

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
    allow_descriptors();
    schedule::begin(seed);
}

pub(crate) fn over(trace: &[String], why: &str) {
    if let Some(over) = OVER.get() {
        over(trace, why);
    }
    std::process::exit(1);
}

/// Keeps the calling thread, and what it starts, on one core, the one with this number among those that it may use. Of a
/// world one thread runs at a time, and giving the turn to another costs less if no other core has to wake up for it.
pub fn stay_on_core(number: usize) {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let Some(&core) = cores.get(number % cores.len().max(1)) else { return };
    let mut one = CpuSet::new();
    one.set(core);
    let _ = rustix::thread::sched_setaffinity(None, &one);
}

/// More than 30 hosts need: a connection takes four and more, and those of a process that has crashed stay open. 20,000 were enough so
/// far.
const DESCRIPTORS: u64 = 200_000;

/// As many descriptors as this process may have.
fn allow_descriptors() {
    let most = rustix::process::getrlimit(Resource::Nofile).maximum;
    let wanted = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS.max(most.unwrap_or(0))) };
    if rustix::process::setrlimit(Resource::Nofile, wanted).is_err() {
        let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    }
}

/// Whether files can be made in a folder, on a file system of at least so many bytes. Of its size, as all who ask must hear the same.
pub fn has_room(folder: &Path, bytes: u64) -> bool {
    let may_write = rustix::fs::access(folder, Access::WRITE_OK).is_ok();
    may_write && rustix::fs::statvfs(folder).is_ok_and(|found| found.f_blocks * found.f_frsize >= bytes)
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

/// Machines from this number on are clients'.
pub const CLIENTS_FROM: usize = 1000;
/// On machines from this number on runs what has the name of a host, and is another process. Those before it are hosts'.
pub const TWINS_FROM: usize = 500;

/// What a machine is called in what a run says.
pub fn name(machine: usize) -> String {
    match machine {
        CLIENTS_FROM.. => format!("client-{}", machine - CLIENTS_FROM),
        TWINS_FROM.. => format!("twin-{}", machine - TWINS_FROM),
        _ => format!("host-{machine}"),
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
    world.note(&format!("{} crashes", name(host)));
    world.freeze(host);
    world.lose(host, false);
}

/// Ends a host's process by cutting its power: of what it wrote and did not sync, its disks keep what they like.
pub fn cut_power(host: usize) {
    let mut world = schedule::world();
    world.note(&format!("{} loses power", name(host)));
    world.freeze(host);
    world.lose(host, true);
}

/// A machine's process stands still from now on, and its connections stay open: as `kill -STOP` does, or a host that pages.
pub fn pause(machine: usize) {
    let mut world = schedule::world();
    world.note(&format!("{} stands still", name(machine)));
    world.pause(machine);
}

/// It goes on.
pub fn resume(machine: usize) {
    let mut world = schedule::world();
    world.note(&format!("{} goes on", name(machine)));
    world.resume(machine);
}

/// The most that the clock on the wall of one machine is ahead of another's, in seconds.
pub const CLOCKS_DIFFER_S: u64 = schedule::CLOCKS_DIFFER_S;

/// Sets the clock on the wall of a machine: so far ahead of one that was never wrong.
pub fn set_clock(machine: usize, ahead: Duration) {
    let mut world = schedule::world();
    world.note(&format!("the clock of {} is set, to {ahead:?} ahead", name(machine)));
    world.clocks_set.insert(machine, ahead);
}

/// How far the clock on the wall of a machine is ahead of one that was never wrong.
pub fn clock_ahead(machine: usize) -> Duration {
    schedule::clock_of(Some(machine))
}

/// How long the machine of the calling thread stood still so far.
pub fn stood_still() -> Duration {
    let world = schedule::world();
    let machine = schedule::me().and_then(|me| world.tasks[me].host);
    Duration::from_nanos(machine.map_or(0, |machine| world.stood(machine)))
}

/// How many threads a machine's process has.
pub fn threads(machine: usize) -> usize {
    let world = schedule::world();
    let runs = |task: &&schedule::Task| {
        task.host == Some(machine) && !matches!(task.state, schedule::State::Ended | schedule::State::Crashed)
    };
    world.tasks.iter().filter(runs).count()
}

/// Does `look` without any turn of another thread in between, so that what it finds is so at one moment; again, if it had to
/// wait for somebody.
pub fn at_once<T>(mut look: impl FnMut() -> T) -> T {
    loop {
        let turns = schedule::world().steps;
        let locks = schedule::preempt_after(u32::MAX);
        let seen = look();
        schedule::preempt_after(locks);
        if schedule::world().steps == turns {
            return seen;
        }
    }
}

/// How disks fail from now on.
pub fn disks_fail(failing: Failing) {
    schedule::world().disks.failing = failing;
}

/// From now on nothing that `from` sends reaches `to`, until [`mend`].
pub fn cut(from: usize, to: usize) {
    let mut world = schedule::world();
    world.note(&format!("nothing gets from {} to {} any more", name(from), name(to)));
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
