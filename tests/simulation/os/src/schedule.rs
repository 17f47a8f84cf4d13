//! Who runs: one thread at a time, chosen by the seed, and time that jumps when all wait.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::disk::Disks;
use crate::net::Network;
use crate::random::Rng;

/// What a look at the clock takes, in nanoseconds.
const LOOK: u64 = 1000;
/// A schedule of more steps runs in a circle.
const STEPS_MAX: u64 = 20_000_000;

static NOW: AtomicU64 = AtomicU64::new(0);
static WORLD: Mutex<Option<World>> = Mutex::new(None);
/// Locks still to be taken until another thread may be preferred.
static UNTIL_PREEMPTED: AtomicU32 = AtomicU32::new(u32::MAX);

thread_local! {
    static ME: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What a thread waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// A lock, or a condition, by its number.
    Key(u64),
    End(usize),
    Sockets,
    Time,
}

pub(crate) enum State {
    Ready,
    Waits {
        on: On,
        until: Option<u64>,
        sockets: Vec<(OwnedFd, PollFlags)>,
    },
    /// It will never run again: its process has crashed.
    Crashed,
    Ended,
}

pub(crate) struct Task {
    name: String,
    pub(crate) host: Option<usize>,
    pub(crate) state: State,
    thread: Thread,
    turn: Arc<AtomicBool>,
    notified: bool,
}

pub(crate) struct World {
    pub(crate) tasks: Vec<Task>,
    current: usize,
    ready: Vec<usize>,
    timers: BTreeSet<(u64, usize)>,
    pub(crate) rng: Rng,
    pub(crate) net: Network,
    pub(crate) disks: Disks,
    pub(crate) trace: Vec<String>,
    pub(crate) steps: u64,
    /// Depends on every choice that was made.
    pub(crate) fingerprint: u64,
    preempt_every: u64,
    next_key: u64,
}

/// The world. Only the thread whose turn it is gets here, so nobody waits for long.
pub(crate) fn world() -> Guard {
    Guard(WORLD.lock().unwrap_or_else(PoisonError::into_inner))
}

pub(crate) struct Guard(MutexGuard<'static, Option<World>>);

impl std::ops::Deref for Guard {
    type Target = World;

    fn deref(&self) -> &World {
        self.0.as_ref().expect("the world has begun")
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut World {
        self.0.as_mut().expect("the world has begun")
    }
}

pub(crate) fn begin(seed: u64) {
    let mut rng = Rng(seed);
    // Some seeds switch threads at almost every lock, some hardly ever.
    let preempt_every = 2 << rng.below(8);
    let main = task("driver".into(), None, thread::current());
    *WORLD.lock().unwrap_or_else(PoisonError::into_inner) = Some(World {
        tasks: vec![main],
        current: 0,
        ready: Vec::new(),
        timers: BTreeSet::new(),
        net: Network::default(),
        disks: Disks::default(),
        trace: Vec::new(),
        steps: 0,
        fingerprint: seed,
        preempt_every,
        next_key: 1,
        rng,
    });
    ME.set(Some(0));
    UNTIL_PREEMPTED.store(preempt_every as u32, Ordering::Relaxed);
}

fn task(name: String, host: Option<usize>, thread: Thread) -> Task {
    Task { name, host, state: State::Ready, thread, turn: Arc::default(), notified: false }
}

/// The calling thread's number; `None` outside of a world.
pub(crate) fn me() -> Option<usize> {
    ME.get()
}

pub(crate) fn now() -> u64 {
    NOW.load(Ordering::Relaxed)
}

pub(crate) fn look_at_clock() -> u64 {
    NOW.fetch_add(LOOK, Ordering::Relaxed) + LOOK
}

/// A number for a lock or a condition.
pub(crate) fn key(of: &AtomicU64) -> u64 {
    if of.load(Ordering::Relaxed) == 0 && me().is_some() {
        let mut world = world();
        of.store(world.next_key, Ordering::Relaxed);
        world.next_key += 1;
    }
    of.load(Ordering::Relaxed)
}

/// Starts a thread of the same host, which waits for its turn.
pub(crate) fn adopt(name: String, thread: Thread) -> (usize, Arc<AtomicBool>) {
    let mut world = world();
    let host = me().and_then(|me| world.tasks[me].host);
    let new = task(name, host, thread);
    let turn = Arc::clone(&new.turn);
    world.tasks.push(new);
    let id = world.tasks.len() - 1;
    world.ready.push(id);
    (id, turn)
}

/// What a new thread does first.
pub(crate) fn enter(id: usize, turn: Arc<AtomicBool>) {
    await_turn(&turn);
    ME.set(Some(id));
}

/// What a thread does last.
pub(crate) fn leave() {
    let Some(me) = me() else { return };
    ME.set(None);
    let mut world = world();
    world.tasks[me].state = State::Ended;
    world.wake_all(&On::End(me));
    world.hand_over();
}

/// Waits until somebody wakes it; false if the time was over first. Nothing is missed between the caller's last look at
/// what it waits for and this call, because nobody else runs in between.
pub(crate) fn wait(on: On, until: Option<u64>, sockets: Vec<(OwnedFd, PollFlags)>) -> bool {
    let me = me().expect("a thread of the world");
    if until.is_some_and(|until| until <= now()) {
        yield_now();
        return false;
    }
    let mut world = world();
    if let Some(until) = until {
        world.timers.insert((until, me));
    }
    world.tasks[me].notified = false;
    world.tasks[me].state = State::Waits { on, until, sockets };
    switch(me, world);
    self::world().tasks[me].notified
}

/// Now and then lets another thread go first.
pub(crate) fn maybe_yield() {
    let Some(_) = me() else { return };
    if UNTIL_PREEMPTED.fetch_sub(1, Ordering::Relaxed) > 1 {
        return;
    }
    let mut world = world();
    let every = world.preempt_every;
    let next = 1 + world.rng.below(2 * every) as u32;
    UNTIL_PREEMPTED.store(next, Ordering::Relaxed);
    drop(world);
    yield_now();
}

pub(crate) fn yield_now() {
    let Some(me) = me() else { return };
    let mut world = world();
    world.ready.push(me);
    switch(me, world);
}

fn switch(me: usize, mut world: Guard) {
    let turn = Arc::clone(&world.tasks[me].turn);
    world.hand_over();
    drop(world);
    await_turn(&turn);
}

fn await_turn(turn: &AtomicBool) {
    while !turn.swap(false, Ordering::Acquire) {
        thread::park();
    }
}

impl World {
    /// Gives the turn to the next thread.
    fn hand_over(&mut self) {
        let next = self.next();
        self.current = next;
        self.steps += 1;
        let mixed =
            (self.fingerprint ^ next as u64 ^ now().rotate_left(17)).wrapping_mul(0x0000_0100_0000_01b3);
        self.fingerprint = mixed ^ (mixed >> 29);
        if self.steps > STEPS_MAX {
            self.end(&format!("no end after {STEPS_MAX} steps"));
        }
        let task = &mut self.tasks[next];
        task.state = State::Ready;
        task.turn.store(true, Ordering::Release);
        task.thread.unpark();
    }

    fn next(&mut self) -> usize {
        loop {
            if !self.ready.is_empty() {
                let at = self.rng.below(self.ready.len() as u64) as usize;
                return self.ready.swap_remove(at);
            }
            self.net.collect(&mut self.rng);
            self.wake_for_sockets();
            if self.ready.is_empty() {
                self.advance();
            }
        }
    }

    /// Nobody can run: to the next moment at which something happens.
    fn advance(&mut self) {
        let timer = self.timers.first().map(|(at, _)| *at);
        let Some(next) = timer.into_iter().chain(self.net.next()).min() else {
            self.end("every thread waits, and nothing will happen any more");
            return;
        };
        NOW.fetch_max(next, Ordering::Relaxed);
        let now = now();
        self.net.deliver(now);
        while let Some(&(at, task)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            self.ready.push(task);
            self.tasks[task].state = State::Ready;
        }
    }

    /// Threads with something to read, or with room to write.
    fn wake_for_sockets(&mut self) {
        let mut owners = Vec::new();
        let mut polled: Vec<PollFd<'_>> = Vec::new();
        for (id, task) in self.tasks.iter().enumerate() {
            let State::Waits { sockets, .. } = &task.state else { continue };
            for (socket, events) in sockets {
                owners.push(id);
                polled.push(PollFd::new(socket, *events));
            }
        }
        if polled.is_empty() {
            return;
        }
        let ready = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        if ready.unwrap_or(0) == 0 {
            return;
        }
        let mut woken: Vec<usize> = owners
            .iter()
            .zip(&polled)
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|(id, _)| *id)
            .collect();
        woken.dedup();
        woken.into_iter().for_each(|id| self.wake(id));
    }

    pub(crate) fn wake_all(&mut self, what: &On) {
        for id in self.waiting(what) {
            self.wake(id);
        }
    }

    pub(crate) fn wake_one(&mut self, what: &On) {
        let waiting = self.waiting(what);
        if !waiting.is_empty() {
            let at = self.rng.below(waiting.len() as u64) as usize;
            self.wake(waiting[at]);
        }
    }

    fn waiting(&self, what: &On) -> Vec<usize> {
        let waits = |task: &Task| matches!(&task.state, State::Waits { on, .. } if on == what);
        (0..self.tasks.len()).filter(|&id| waits(&self.tasks[id])).collect()
    }

    fn wake(&mut self, id: usize) {
        if let State::Waits { until: Some(until), .. } = self.tasks[id].state {
            self.timers.remove(&(until, id));
        }
        self.tasks[id].notified = true;
        self.tasks[id].state = State::Ready;
        self.ready.push(id);
    }

    /// Stops every thread of a host, wherever it is.
    pub(crate) fn freeze(&mut self, host: usize) {
        for id in 0..self.tasks.len() {
            let task = &mut self.tasks[id];
            if task.host == Some(host) && id != self.current && !matches!(task.state, State::Ended) {
                if let State::Waits { until: Some(until), .. } = task.state {
                    self.timers.remove(&(until, id));
                }
                task.state = State::Crashed;
                self.ready.retain(|other| *other != id);
            }
        }
    }

    /// What a host's process had in hand is lost, and what it wrote and did not sync, if its power is cut.
    pub(crate) fn lose(&mut self, host: usize, power_cut: bool) {
        self.net.lose(host, &mut self.rng);
        if power_cut {
            self.disks.lose(host, &mut self.rng);
        }
    }

    pub(crate) fn note(&mut self, text: &str) {
        let task = &self.tasks[self.current];
        let host = task.host.map_or("world".to_owned(), |host| format!("host-{host}"));
        let (now, name) = (now(), &task.name);
        let line =
            format!("{:>3}.{:06} {host:<7} {name:<16} {text}", now / 1_000_000_000, now / 1000 % 1_000_000);
        self.trace.push(line);
    }

    /// The world cannot go on.
    pub(crate) fn end(&mut self, why: &str) {
        self.note(&format!("the world ends: {why}"));
        let waiting: Vec<String> = self
            .tasks
            .iter()
            .filter_map(|task| match &task.state {
                State::Waits { on, .. } => Some(format!("{:?} {} waits for {on:?}", task.host, task.name)),
                _ => None,
            })
            .collect();
        self.trace.extend(waiting);
        crate::world::over(&self.trace, why);
    }
}

/// Whether any of them is ready now.
pub(crate) fn ready_now(sockets: &mut [PollFd<'_>]) -> rustix::io::Result<usize> {
    rustix::event::poll(sockets, Some(&Timespec::default()))
}

pub(crate) fn own(socket: BorrowedFd<'_>) -> OwnedFd {
    socket.try_clone_to_owned().expect("a descriptor is left")
}
