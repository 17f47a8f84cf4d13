//! Who runs: one thread at a time, chosen by the seed, and time that jumps when all wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::thread::futex;

use crate::disk::Disks;
use crate::fiber::{self, Work};
use crate::net::{Network, Watch};
use crate::random::Rng;

/// What a look at the clock takes, in nanoseconds.
const LOOK: u64 = 1000;
/// A schedule of more steps runs in a circle.
const STEPS_MAX: u64 = 50_000_000;

static NOW: AtomicU64 = AtomicU64::new(0);
static WORLD: Mutex<Option<World>> = Mutex::new(None);
/// Locks still to be taken until another thread may be preferred.
static UNTIL_PREEMPTED: AtomicU32 = AtomicU32::new(u32::MAX);

/// The thread whose turn it is, as [`World::current`]; before there is a world, none.
static CURRENT: AtomicUsize = AtomicUsize::new(NOBODY);
const NOBODY: usize = usize::MAX;
/// Tells the driver's thread that it goes on, after one of the system had its turn.
static DRIVER: Turn = Turn(AtomicU32::new(0));

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
    },
    /// It will never run again: its process has crashed.
    Crashed,
    Ended,
}

/// What a thread of the world runs on.
pub(crate) enum Runs {
    /// The thread on which the world has begun. It lets all others run.
    Driver,
    /// A stack of its own; until it has begun, with what it does.
    Fiber(Option<Work>),
    /// A thread of the system, as it borrows from the stack of another.
    Thread(Arc<Turn>),
}

pub(crate) struct Task {
    name: String,
    pub(crate) host: Option<usize>,
    pub(crate) state: State,
    runs: Runs,
    notified: bool,
}

/// Tells a thread of the system that it has its turn.
#[derive(Default)]
pub(crate) struct Turn(AtomicU32);

impl Turn {
    fn give(&self) {
        self.0.store(1, Ordering::Release);
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
    }

    pub(crate) fn wait(&self) {
        while self.0.swap(0, Ordering::Acquire) == 0 {
            // It may be given in between, or wake for nothing.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, 0, None);
        }
    }
}

pub(crate) struct World {
    pub(crate) tasks: Vec<Task>,
    current: usize,
    ready: Vec<usize>,
    timers: BTreeSet<(u64, usize)>,
    /// Machines that stand still, since when; and how long each did before.
    still: BTreeMap<usize, u64>,
    stood: BTreeMap<usize, u64>,
    /// Their threads that could run.
    held: Vec<usize>,
    /// Threads that wait for a lock or a condition, by its number.
    waiting: BTreeSet<(u64, usize)>,
    /// Descriptors that threads wait for.
    pub(crate) sockets: Watch,
    pub(crate) rng: Rng,
    pub(crate) net: Network,
    pub(crate) disks: Disks,
    pub(crate) trace: Vec<String>,
    pub(crate) steps: u64,
    /// Depends on every choice that was made.
    pub(crate) fingerprint: u64,
    preempt_every: u64,
    next_key: u64,
    /// What the clocks on the wall of the machines follow from, and how far those are ahead that were set since.
    clocks: u64,
    pub(crate) clocks_set: BTreeMap<usize, Duration>,
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
    let main = task("driver".into(), None, Runs::Driver);
    *WORLD.lock().unwrap_or_else(PoisonError::into_inner) = Some(World {
        tasks: vec![main],
        current: 0,
        ready: Vec::new(),
        timers: BTreeSet::new(),
        still: BTreeMap::new(),
        stood: BTreeMap::new(),
        held: Vec::new(),
        waiting: BTreeSet::new(),
        sockets: Watch::default(),
        net: Network::default(),
        disks: Disks::default(),
        trace: Vec::new(),
        steps: 0,
        fingerprint: seed,
        preempt_every,
        next_key: 1,
        clocks: seed,
        clocks_set: BTreeMap::new(),
        rng,
    });
    CURRENT.store(0, Ordering::Relaxed);
    UNTIL_PREEMPTED.store(preempt_every as u32, Ordering::Relaxed);
}

fn task(name: String, host: Option<usize>, runs: Runs) -> Task {
    Task { name, host, state: State::Ready, runs, notified: false }
}

/// The calling thread's number; `None` outside of a world.
pub(crate) fn me() -> Option<usize> {
    let current = CURRENT.load(Ordering::Relaxed);
    (current != NOBODY).then_some(current)
}

pub(crate) fn now() -> u64 {
    NOW.load(Ordering::Relaxed)
}

pub(crate) fn look_at_clock() -> u64 {
    NOW.fetch_add(LOOK, Ordering::Relaxed) + LOOK
}

/// Hosts put up with an hour between the clocks of two of them.
pub(crate) const CLOCKS_DIFFER_S: u64 = 50 * 60;

/// How far the clock of the calling thread's machine is ahead.
pub(crate) fn clock_of_machine() -> Duration {
    let Some(me) = me() else { return Duration::ZERO };
    let machine = world().tasks[me].host;
    clock_of(machine)
}

/// How far the clock of a machine is ahead.
pub(crate) fn clock_of(machine: Option<usize>) -> Duration {
    let world = world();
    if let Some(ahead) = machine.and_then(|machine| world.clocks_set.get(&machine)) {
        return *ahead;
    }
    let machine = machine.map_or(0, |machine| machine as u64 + 1);
    // Numbers of their own: the world's are the same whether or not clocks differ.
    let mut rng = Rng(world.clocks ^ 0x636c_6f63_6b73);
    let differ = rng.below(2) == 1;
    let mut rng = Rng(rng.next() ^ machine);
    Duration::from_secs(if differ { rng.below(CLOCKS_DIFFER_S) } else { 0 })
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

/// Adds a thread of the same host, which waits for its turn.
pub(crate) fn adopt(name: String, runs: Runs) -> usize {
    let mut world = world();
    let host = me().and_then(|me| world.tasks[me].host);
    world.tasks.push(task(name, host, runs));
    let id = world.tasks.len() - 1;
    world.make_ready(id);
    id
}

/// What a thread does last.
pub(crate) fn leave() {
    let Some(me) = me() else { return };
    let mut world = world();
    world.tasks[me].state = State::Ended;
    world.wake_all(&On::End(me));
    world.next_turn();
    if matches!(world.tasks[me].runs, Runs::Thread(_)) {
        drop(world);
        DRIVER.give();
    }
}

/// Waits until somebody wakes it; false if the time was over first. Nothing is missed between the caller's last look at
/// what it waits for and this call, because nobody else runs in between.
pub(crate) fn wait(on: On, until: Option<u64>) -> bool {
    let me = me().expect("a thread of the world");
    if until.is_some_and(|until| until <= now()) {
        yield_now();
        return false;
    }
    let mut world = world();
    if let Some(until) = until {
        world.timers.insert((until, me));
    }
    if let On::Key(key) = on {
        world.waiting.insert((key, me));
    }
    world.tasks[me].notified = false;
    world.tasks[me].state = State::Waits { on, until };
    switch(me, world);
    self::world().tasks[me].notified
}

/// No thread is preferred to the calling one, until the given number of locks has been taken. Returns what that number was.
pub(crate) fn preempt_after(locks: u32) -> u32 {
    UNTIL_PREEMPTED.swap(locks, Ordering::Relaxed)
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
    world.make_ready(me);
    switch(me, world);
}

fn switch(me: usize, mut world: Guard) {
    world.next_turn();
    if world.current == me {
        return;
    }
    // Whoever is next finds the world free.
    match &world.tasks[me].runs {
        Runs::Driver => {
            drop(world);
            drive();
        }
        Runs::Fiber(_) => {
            drop(world);
            fiber::pause();
        }
        Runs::Thread(turn) => {
            let turn = Arc::clone(turn);
            drop(world);
            DRIVER.give();
            turn.wait();
        }
    }
}

/// Lets others have their turns until the driver has the next.
fn drive() {
    loop {
        let mut world = world();
        let next = world.current;
        match &mut world.tasks[next].runs {
            Runs::Driver => return,
            Runs::Fiber(first) => {
                let first = first.take();
                drop(world);
                fiber::resume(next, first);
            }
            Runs::Thread(turn) => {
                let turn = Arc::clone(turn);
                drop(world);
                turn.give();
                DRIVER.wait();
            }
        }
    }
}

impl World {
    /// Chooses the next thread.
    fn next_turn(&mut self) {
        let next = self.next();
        self.current = next;
        CURRENT.store(next, Ordering::Relaxed);
        self.steps += 1;
        let mixed =
            (self.fingerprint ^ next as u64 ^ now().rotate_left(17)).wrapping_mul(0x0000_0100_0000_01b3);
        self.fingerprint = mixed ^ (mixed >> 29);
        if self.steps > STEPS_MAX {
            self.end(&format!("no end after {STEPS_MAX} steps"));
        }
        self.tasks[next].state = State::Ready;
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
            self.rouse(task);
        }
    }

    /// Threads with something to read, or with room to write.
    fn wake_for_sockets(&mut self) {
        for id in self.sockets.ready() {
            let id = id as usize;
            // Others were woken by something else, and see for themselves.
            if matches!(self.tasks[id].state, State::Waits { on: On::Sockets, .. }) {
                self.wake(id);
            }
        }
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
        match what {
            On::Key(key) => self.waiting.range((*key, 0)..=(*key, usize::MAX)).map(|(_, id)| *id).collect(),
            _ => {
                let waits = |task: &Task| matches!(&task.state, State::Waits { on, .. } if on == what);
                (0..self.tasks.len()).filter(|&id| waits(&self.tasks[id])).collect()
            }
        }
    }

    fn wake(&mut self, id: usize) {
        self.tasks[id].notified = true;
        self.rouse(id);
    }

    fn rouse(&mut self, id: usize) {
        self.end_wait(id, State::Ready);
        self.make_ready(id);
    }

    fn make_ready(&mut self, id: usize) {
        let stands_still = self.tasks[id].host.is_some_and(|host| self.still.contains_key(&host));
        if stands_still { self.held.push(id) } else { self.ready.push(id) }
    }

    /// No thread of a machine gets a turn until [`World::resume`].
    pub(crate) fn pause(&mut self, host: usize) {
        self.still.entry(host).or_insert_with(now);
        for id in std::mem::take(&mut self.ready) {
            self.make_ready(id);
        }
    }

    pub(crate) fn resume(&mut self, host: usize) {
        let Some(since) = self.still.remove(&host) else { return };
        *self.stood.entry(host).or_default() += now() - since;
        for id in std::mem::take(&mut self.held) {
            self.make_ready(id);
        }
    }

    /// How long a machine stood still in all, in nanoseconds.
    pub(crate) fn stood(&self, host: usize) -> u64 {
        self.stood.get(&host).copied().unwrap_or(0)
    }

    /// A thread waits for nothing any more.
    fn end_wait(&mut self, id: usize, state: State) {
        if let State::Waits { on, until } = std::mem::replace(&mut self.tasks[id].state, state) {
            if let Some(until) = until {
                self.timers.remove(&(until, id));
            }
            if let On::Key(key) = on {
                self.waiting.remove(&(key, id));
            }
        }
    }

    /// Stops every thread of a host, wherever it is.
    pub(crate) fn freeze(&mut self, host: usize) {
        for id in 0..self.tasks.len() {
            let task = &self.tasks[id];
            if task.host == Some(host) && id != self.current && !matches!(task.state, State::Ended) {
                self.end_wait(id, State::Crashed);
                self.ready.retain(|other| *other != id);
                self.held.retain(|other| *other != id);
            }
        }
        self.still.remove(&host);
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
        let host = task.host.map_or("world".to_owned(), crate::world::name);
        let (now, name) = (now(), &task.name);
        let line =
            format!("{:>3}.{:06} {host:<9} {name:<16} {text}", now / 1_000_000_000, now / 1000 % 1_000_000);
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
