//! The NVMe tier of one host on a disk that fails: clients put, get, remove and flush; the process is killed, or its power cut, at
//! any turn of its threads, also while it recovers; then what it had answered must be so.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_memory::buffer::Buffer;
use kvasir_nvme::{NvmeConfig, NvmeStore, SyncMode};
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, Chance, Failing};
use kvasir_protocol::block::{BlockMeta, checksum};
use kvasir_store::store::{BlockStore, Get, Put, PutDone, Stored, TierError};

use crate::model::{By, Counts, content, key};
use crate::violated;

const HOST: usize = 0;
const CLIENTS: u32 = 3;
/// Calls of each client in each life of the process.
const CALLS: u32 = 60;
/// About two thirds of what fits, so that segments are emptied all the time.
const BLOCKS: u32 = 40;
const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u64 = 12;
const BLOCK_MAX: usize = 20_000;
/// Bytes a second: all of them every 50 ms.
const SCRUB: u64 = 16 << 20;

/// What must be so of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Never stored, removed, or lost for certain.
    Absent,
    /// `durable`: outlives a power cut.
    Stored { durable: bool },
    /// Something was under way when the process ended, or failed.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    state: State,
    /// Number of the last call that could change it.
    call: u64,
}

struct Model {
    blocks: Vec<Block>,
    calls: u64,
    counts: Counts,
}

/// What all processes of a run share.
struct World {
    model: Mutex<Model>,
    config: NvmeConfig,
    /// How the disk fails while the process serves.
    failing: Failing,
}

pub(crate) fn run(seed: u64, dir: PathBuf) -> Counts {
    let mut chance = Chance::new(seed);
    let mut one_in = |often: u64| if chance.below(3) == 0 { often } else { 0 };
    let failing = Failing { reads: one_in(20), writes: one_in(30), syncs: one_in(100), bits: one_in(100) };
    let sync = if chance.below(3) == 0 { SyncMode::Batch } else { SyncMode::Flush };
    // Of numbers of its own: the others are those of the seed with it and without.
    let scrubs = Chance::new(seed ^ 0x73_6372_7562).below(2) == 1;
    let config = NvmeConfig {
        capacity_bytes: SEGMENTS * SEGMENT,
        segment_bytes: SEGMENT,
        queue_depth: 4,
        scrub_bytes_per_s: if scrubs { SCRUB } else { 0 },
        direct_io: false,
        io_uring: false,
        sync,
        ..NvmeConfig::new(dir)
    };
    world::note(&format!("a disk that fails as {failing:?}, {sync:?}, scrubbed: {scrubs}"));
    let absent = Block { state: State::Absent, call: 0 };
    let blocks = vec![absent; BLOCKS as usize];
    let model = Mutex::new(Model { blocks, calls: 0, counts: Counts::default() });
    let world = Arc::new(World { model, config, failing });
    let mut crashed = false;
    for _ in 0..3 + chance.below(4) {
        let process = world.start(&mut chance, CALLS);
        // What one that crashed has left to the system may still be lost soon after the next has begun.
        let soon = crashed && chance.below(2) == 0;
        let kind = chance.below(5);
        crashed = matches!(kind, 1 | 2);
        match kind {
            0 => drop(process.join()),
            kind => {
                thread::sleep(Duration::from_micros(chance.below(if soon { 20_000 } else { 400_000 })));
                world::let_others(chance.below(100));
                let cut = kind > 2;
                if cut {
                    world::cut_power(HOST)
                } else {
                    world::crash(HOST)
                }
                // What a sync that failed has dropped is lost without a power cut, too.
                world.ended(cut || failing.syncs > 0);
            }
        }
    }
    drop(world.start_on_a_good_disk().join());
    world.model().counts.clone()
}

impl Model {
    /// A call begins that may change a block. Returns what was known of it.
    fn begin(&mut self, n: u32) -> State {
        self.calls += 1;
        let call = self.calls;
        std::mem::replace(&mut self.blocks[n as usize], Block { state: State::Unknown, call }).state
    }

    fn end(&mut self, n: u32, state: State) {
        self.blocks[n as usize].state = state;
    }
}

impl World {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the process: it opens the store, looks at everything in it, serves, and closes.
    fn start(self: &Arc<Self>, chance: &mut Chance, calls: u32) -> thread::JoinHandle<()> {
        let (world, seeds) = (Arc::clone(self), [(); CLIENTS as usize].map(|()| chance.below(u64::MAX)));
        let process = move || {
            world::disks_fail(Failing { syncs: world.failing.syncs, ..Failing::default() });
            let store = Arc::new(world.open());
            // A sync that failed meanwhile would lose what had been seen.
            world::disks_fail(Failing::default());
            world.look_at_all(&store);
            world::disks_fail(world.failing);
            let breaks = world.fail_all_writes(Chance::new(seeds[0] ^ 0x6272_6561_6b73));
            let work = |(number, seed): (usize, u64)| {
                let (world, store) = (Arc::clone(&world), Arc::clone(&store));
                let client = Client { number: number as u32, world, store, chance: Chance::new(seed) };
                spawn("client", move || client.work(calls))
            };
            let clients: Vec<_> = seeds.into_iter().enumerate().map(work).collect();
            clients.into_iter().chain(breaks).for_each(|thread| drop(thread.join()));
            world::disks_fail(Failing { syncs: world.failing.syncs, ..Failing::default() });
            drop(store);
            world::note("closes the store");
        };
        world::on_host(HOST, || spawn("process", process))
    }

    /// The last process, with which nothing goes wrong any more: all is as promised, all can be removed, and then there is room again.
    fn start_on_a_good_disk(self: &Arc<Self>) -> thread::JoinHandle<()> {
        let world = Arc::clone(self);
        let process = move || {
            world::disks_fail(Failing::default());
            let store = world.open();
            world.look_at_all(&store);
            let until = Instant::now() + Duration::from_secs(60);
            while store.remove((0..BLOCKS).map(key).collect()).wait().iter().any(Result::is_err) {
                if Instant::now() > until {
                    violated("not every block can be removed, though the disk is good");
                }
                thread::sleep(Duration::from_millis(20));
            }
            let done = store.put(vec![put(0)]).wait();
            if !matches!(done.as_slice(), [PutDone { outcome: Ok(Stored::Stored), .. }]) {
                violated("an empty tier takes no block, though the disk is good");
            }
        };
        world::on_host(HOST, || spawn("process", process))
    }

    /// In one of three processes no write succeeds for a while. The first of each segment takes it out of use, until none is left.
    fn fail_all_writes(self: &Arc<Self>, mut chance: Chance) -> Option<thread::JoinHandle<()>> {
        if chance.below(3) > 0 {
            return None;
        }
        let mut up_to = |ms: u64| Duration::from_micros(chance.below(ms * 1000));
        let (after, lasts, failing) = (up_to(100), up_to(100), self.failing);
        let world = Arc::clone(self);
        let work = move || {
            thread::sleep(after);
            world::note("no write succeeds");
            world.model().counts.fault("no write succeeds");
            world::disks_fail(Failing { writes: 1, ..failing });
            thread::sleep(lasts);
            world::note("writes succeed again");
            world::disks_fail(failing);
        };
        Some(spawn("breaks", work))
    }

    /// If a sync fails it does not open. An operator then looks at the disk.
    fn open(&self) -> NvmeStore {
        let opened = NvmeStore::open(self.config.clone());
        let store = opened.or_else(|error| {
            world::note(&format!("the store does not open: {error}"));
            world::disks_fail(Failing::default());
            NvmeStore::open(self.config.clone())
        });
        let store = store.unwrap_or_else(|error| violated(&format!("the store does not open: {error}")));
        world::note(&format!("the store is open: {:?}", store.report()));
        store
    }

    /// The process has ended. `uncertain`: what was not durable may be lost.
    fn ended(&self, uncertain: bool) {
        let mut model = self.model();
        for n in 0..BLOCKS {
            let state = model.begin(n);
            let lost = uncertain && state == State::Stored { durable: false };
            model.end(n, if lost { State::Unknown } else { state });
        }
    }

    /// After a start everything is certain again, because recovery made durable what it found.
    fn look_at_all(&self, store: &NvmeStore) {
        for n in 0..BLOCKS {
            if let Some(found) = self.get(store, n, true) {
                let state = if found { State::Stored { durable: true } } else { State::Absent };
                self.model().end(n, state);
            }
        }
    }

    /// Reads a block and compares it with what is promised. `None`: it could not be read now.
    fn get(&self, store: &NvmeStore, n: u32, recovered: bool) -> Option<bool> {
        let before = self.model().blocks[n as usize];
        let mut done = store.get(vec![Get { key: key(n), buffer: Buffer::zeroed(BLOCK_MAX) }]).wait();
        let done = done.pop().unwrap_or_else(|| violated("a get of one block has no answer"));
        let found = match done.outcome {
            Ok(Some(loaded)) => {
                let bytes = &done.buffer.bytes()[..loaded.meta.size as usize];
                if bytes != content(n, By::First) {
                    violated(&format!("block {n} is read with wrong bytes"));
                }
                true
            }
            Ok(None) => false,
            Err(error) => {
                world::note(&format!("block {n} cannot be read: {error}"));
                return None;
            }
        };
        let mut model = self.model();
        *(if found { &mut model.counts.hits } else { &mut model.counts.misses }) += 1;
        let after = model.blocks[n as usize];
        drop(model);
        world::note(&format!(
            "reads block {n}: {} ({:?})",
            if found { "found" } else { "missing" },
            after.state
        ));
        if (before.call, before.state) == (after.call, after.state) {
            self.check(n, after.state, found, recovered);
        }
        Some(found)
    }

    fn check(&self, n: u32, state: State, found: bool, recovered: bool) {
        // A disk that damages what it holds may damage anything; what cannot be read when it is moved is given up.
        let damages = self.failing.bits > 0;
        if found && state == State::Absent && !damages {
            violated(&format!("block {n} is back, though it was removed or lost"));
        }
        if let (false, State::Stored { durable }) = (found, state)
            && !damages
            && self.failing.reads == 0
            // Compaction may have moved it before the sync that failed; what it was moved from is found at the next start.
            && (self.failing.syncs == 0 || (durable && recovered))
        {
            let what = if durable { "durable" } else { "stored" };
            violated(&format!("block {n} was {what}, and is missing"));
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    let started = thread::Builder::new().name(name.into()).spawn(work);
    started.unwrap_or_else(|error| violated(&format!("no thread: {error}")))
}

fn put(n: u32) -> Put {
    let bytes = content(n, By::First);
    let meta = BlockMeta::single(key(n), bytes.len() as u32);
    Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() }
}

struct Client {
    number: u32,
    world: Arc<World>,
    store: Arc<NvmeStore>,
    chance: Chance,
}

impl Client {
    fn work(mut self, calls: u32) {
        for _ in 0..calls {
            match self.chance.below(12) {
                0..4 => self.put(),
                4..8 => {
                    let n = self.chance.below(BLOCKS.into()) as u32;
                    let _ = self.world.get(&self.store, n, false);
                }
                8..11 => self.remove(),
                _ => self.flush(),
            }
            thread::sleep(Duration::from_micros(self.chance.below(2_000)));
        }
    }

    /// Some of the blocks that this client alone changes.
    fn own(&mut self) -> Vec<u32> {
        let each = u64::from(BLOCKS / CLIENTS);
        let count = 1 + self.chance.below(4);
        let mut own: Vec<u32> =
            (0..count).map(|_| self.chance.below(each) as u32 * CLIENTS + self.number).collect();
        own.sort_unstable();
        own.dedup();
        own
    }

    fn put(&mut self) {
        let own = self.own();
        let before: Vec<State> = own.iter().map(|&n| self.world.model().begin(n)).collect();
        let done = self.store.put(own.iter().map(|&n| put(n)).collect()).wait();
        for ((n, before), done) in own.into_iter().zip(before).zip(done) {
            world::note(&format!("puts block {n}: {:?}", done.outcome));
            let durable = self.world.config.sync == SyncMode::Batch;
            let state = match (done.outcome, before) {
                (Ok(_), State::Stored { durable: true }) => before,
                (Ok(Stored::AlreadyStored), _) => {
                    self.world.check(n, before, true, false);
                    if before == State::Unknown { State::Stored { durable: false } } else { before }
                }
                (Ok(_), _) => {
                    self.world.model().counts.puts += 1;
                    // One that failed before may be there already, and not be durable.
                    State::Stored { durable: durable && before == State::Absent }
                }
                (Err(TierError::Full { .. } | TierError::Busy { .. }), before) => before,
                (Err(_), State::Stored { .. }) => before,
                (Err(_), _) => State::Unknown,
            };
            self.world.model().end(n, state);
        }
    }

    fn remove(&mut self) {
        let own = self.own();
        for &n in &own {
            self.world.model().begin(n);
        }
        let done = self.store.remove(own.iter().map(|&n| key(n)).collect()).wait();
        for (n, done) in own.into_iter().zip(done) {
            world::note(&format!("removes block {n}: {done:?}"));
            let mut model = self.world.model();
            model.counts.removals += u32::from(done.is_ok());
            model.end(n, if done.is_ok() { State::Absent } else { State::Unknown });
        }
    }

    fn flush(&self) {
        let stored = |block: &Block| matches!(block.state, State::Stored { .. });
        let before = self.world.model().blocks.clone();
        let flushed = self.store.flush().wait();
        world::note(&format!("flushes: {flushed:?}"));
        let mut model = self.world.model();
        for (before, now) in before.iter().zip(&mut model.blocks) {
            if flushed.is_ok() && before.call == now.call && stored(before) && stored(now) {
                now.state = State::Stored { durable: true };
            }
        }
    }
}
