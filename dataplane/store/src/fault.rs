//! Any tier, failing on purpose: what users of a tier must survive.
//!
//! Faults come by chance, decided by a seed and by how often the block was asked for, so that a seed replays
//! whatever the threads do; or one by one ([`FaultStore::inject`]). The device can also be held
//! ([`FaultStore::hold`]): operations are taken and none completes until it is released.

use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::counters::Counters;
use super::departures::Departures;
use super::store::{
    BlockStore, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, TierError, TierStats,
};
use kvasir_os::thread::JoinHandle;
use kvasir_protocol::block::BlockKey;

/// A call on one block, or a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    Put,
    Get,
    Remove,
    Flush,
}

/// What happens to it instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device reports an error; trying again may help.
    Io,
    /// The tier is full. A put only; elsewhere as [`Fault::Io`].
    Full,
    /// The bytes came back short or damaged: the block is dropped and missing. A get only; elsewhere as
    /// [`Fault::Io`].
    Damaged,
    /// It had not begun when it was cancelled.
    Cancelled,
}

/// How often each fault happens, in 1,000 calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    pub io: u16,
    pub full: u16,
    pub damaged: u16,
    pub cancelled: u16,
}

/// A tier that fails as instructed, and is `inner` otherwise. Operations run in order on its own thread.
pub struct FaultStore {
    inner: Arc<dyn BlockStore>,
    plan: Arc<Plan>,
    device: Arc<Device>,
    worker: Option<JoinHandle<()>>,
}

struct Plan {
    name: &'static str,
    seed: u64,
    rates: Rates,
    state: Mutex<PlanState>,
    counters: Counters,
}

#[derive(Default)]
struct PlanState {
    injected: Vec<(Call, Fault)>,
    /// How often each block was asked for.
    calls: HashMap<(Call, BlockKey), u64>,
}

/// The device has reached one operation.
struct Turn<'a> {
    inner: &'a dyn BlockStore,
    plan: &'a Plan,
    /// The caller had cancelled by then.
    cancelled: bool,
}

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Device {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    held: bool,
    /// Operations that may go although the device is held.
    let_go: usize,
    closed: bool,
}

impl FaultStore {
    /// `inner`, failing at `rates` by chance from `seed`.
    pub fn new(inner: Arc<dyn BlockStore>, seed: u64, rates: Rates) -> Self {
        let name = inner.capabilities().name;
        let plan = Plan { name, seed, rates, state: Mutex::default(), counters: Counters::default() };
        let device = Arc::new(Device::default());
        let running = Arc::clone(&device);
        let worker = kvasir_os::thread::spawn(move || running.run());
        Self { inner, plan: Arc::new(plan), device, worker: Some(worker) }
    }

    /// The next `call` on any block fails in this way. Several faults wait in line.
    pub fn inject(&self, call: Call, fault: Fault) {
        self.plan.state.lock().injected.push((call, fault));
    }

    /// Holds the device: operations are taken from now on, and none of them begins.
    pub fn hold(&self) {
        let mut queue = self.device.queue.lock();
        (queue.held, queue.let_go) = (true, 0);
    }

    /// Lets the oldest `count` operations go, those waiting or the next to come.
    pub fn let_go(&self, count: usize) {
        self.device.queue.lock().let_go += count;
        self.device.changed.notify_all();
    }

    /// Ends a [`hold`](Self::hold).
    pub fn release(&self) {
        let mut queue = self.device.queue.lock();
        (queue.held, queue.let_go) = (false, 0);
        drop(queue);
        self.device.changed.notify_all();
    }

    /// Operations taken and not begun.
    pub fn waiting(&self) -> usize {
        self.device.queue.lock().waiting.len()
    }

    fn later<T: Send + 'static>(&self, work: impl FnOnce(Turn<'_>) -> T + Send + 'static) -> Pending<T> {
        let (completion, pending) = Pending::new();
        let (inner, plan) = (Arc::clone(&self.inner), Arc::clone(&self.plan));
        self.device.queue.lock().waiting.push_back(Box::new(move || {
            let cancelled = completion.cancelled.is_set();
            completion.done(work(Turn { inner: &*inner, plan: &plan, cancelled }));
        }));
        self.device.changed.notify_all();
        pending
    }
}

impl Plan {
    /// What must go wrong with this call, if anything.
    fn fault(&self, call: Call, key: BlockKey) -> Option<Fault> {
        let mut state = self.state.lock();
        if let Some(at) = state.injected.iter().position(|&(on, _)| on == call) {
            return Some(state.injected.remove(at).1);
        }
        let count = state.calls.entry((call, key)).or_default();
        *count += 1;
        let mut what = [0; 25];
        what[..16].copy_from_slice(&key.0.to_le_bytes());
        what[16..24].copy_from_slice(&count.to_le_bytes());
        what[24] = call as u8;
        let mut chance = XxHash3_64::oneshot_with_seed(self.seed, &what) % 1000;
        let Rates { io, full, damaged, cancelled } = self.rates;
        let faults =
            [(io, Fault::Io), (full, Fault::Full), (damaged, Fault::Damaged), (cancelled, Fault::Cancelled)];
        faults.into_iter().find_map(|(rate, fault)| {
            let hit = chance < rate.into();
            chance = chance.saturating_sub(rate.into());
            hit.then_some(fault)
        })
    }
}

impl Turn<'_> {
    fn fault(&self, call: Call, key: BlockKey) -> Option<Fault> {
        if self.cancelled { Some(Fault::Cancelled) } else { self.plan.fault(call, key) }
    }

    /// Why a call on a block fails, if it does.
    fn refusal(&self, call: Call, key: BlockKey, size: u64) -> Option<TierError> {
        Some(self.error(self.fault(call, key)?, call, key, size))
    }

    fn error(&self, fault: Fault, call: Call, key: BlockKey, size: u64) -> TierError {
        let tier = self.plan.name;
        match (fault, call) {
            (Fault::Cancelled, _) => return TierError::Cancelled,
            (Fault::Full, Call::Put) => return TierError::Full { tier, key, size },
            _ => self.plan.counters.io_error(),
        }
        let reason = "injected fault".to_owned();
        TierError::Io { tier, step: call.name(), key, reason, retryable: true }
    }

    /// Passes a get on, or answers it.
    fn judge(&self, mut get: Get) -> ControlFlow<GetDone, Get> {
        let key = get.key;
        let outcome = match self.fault(Call::Get, key) {
            None => return ControlFlow::Continue(get),
            Some(Fault::Damaged) => self.damaged(key),
            Some(fault) => Err(self.error(fault, Call::Get, key, 0)),
        };
        // The bytes of a miss are undefined. Here they look like nothing that was ever stored.
        get.buffer.bytes_mut().fill(0xdb);
        ControlFlow::Break(GetDone { buffer: get.buffer, outcome })
    }

    fn damaged(&self, key: BlockKey) -> Result<Option<Loaded>, TierError> {
        if self.inner.remove(vec![key]).wait().remove(0)? {
            self.plan.counters.corrupt();
        } else {
            self.plan.counters.miss();
        }
        Ok(None)
    }
}

impl Call {
    const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Remove => "remove",
            Self::Flush => "flush",
        }
    }
}

impl Device {
    fn run(&self) {
        while let Some(work) = self.next() {
            work();
        }
    }

    fn next(&self) -> Option<Work> {
        let idle = |queue: &mut Queue| {
            let may_go = !queue.held || queue.let_go > 0;
            !queue.closed && (queue.waiting.is_empty() || !may_go)
        };
        // Once closed, what waits goes even if the device is held.
        let mut queue = self.queue.lock();
        self.changed.wait_while(&mut queue, idle);
        queue.let_go = queue.let_go.saturating_sub(1);
        queue.waiting.pop_front()
    }
}

impl BlockStore for FaultStore {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        self.later(move |turn| {
            let judge = |put: Put| match turn.refusal(Call::Put, put.meta.key, put.meta.size.into()) {
                Some(error) => ControlFlow::Break(PutDone { buffer: put.buffer, outcome: Err(error) }),
                None => ControlFlow::Continue(put),
            };
            pass_on(batch, judge, |batch| turn.inner.put(batch).wait())
        })
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.later(move |turn| pass_on(batch, |get| turn.judge(get), |batch| turn.inner.get(batch).wait()))
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        self.inner.sizes(keys)
    }

    fn look_up(&self, keys: Vec<BlockKey>) -> Pending<Vec<Option<u32>>> {
        self.inner.look_up(keys)
    }

    fn were_removed(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.inner.were_removed(keys)
    }

    fn forget(&self, keys: &[BlockKey]) {
        self.inner.forget(keys);
    }

    fn note_departures(&self, departures: &Arc<Departures>) {
        self.inner.note_departures(departures);
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        self.later(move |turn| {
            let judge = |key| match turn.refusal(Call::Remove, key, 0) {
                Some(error) => ControlFlow::Break(Err(error)),
                None => ControlFlow::Continue(key),
            };
            pass_on(keys, judge, |keys| turn.inner.remove(keys).wait())
        })
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        self.later(move |turn| match turn.refusal(Call::Flush, BlockKey::default(), 0) {
            Some(error) => Err(error),
            None => turn.inner.flush().wait(),
        })
    }

    /// The counts of the tier inside, plus the faults on top.
    fn stats(&self) -> TierStats {
        let (inner, own) = (self.inner.stats(), self.plan.counters.totals());
        TierStats {
            misses: inner.misses + own.misses,
            corrupt: inner.corrupt + own.corrupt,
            io_errors: inner.io_errors + own.io_errors,
            ..inner
        }
    }
}

impl Drop for FaultStore {
    fn drop(&mut self) {
        self.device.queue.lock().closed = true;
        self.device.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            // It runs what is waiting first: every operation that was taken completes.
            let _ = worker.join();
        }
    }
}

/// Keeps the answers with which `judge` breaks off, passes the rest on in one batch, and keeps the order.
fn pass_on<I, O>(
    batch: Vec<I>,
    judge: impl Fn(I) -> ControlFlow<O, I>,
    pass: impl FnOnce(Vec<I>) -> Vec<O>,
) -> Vec<O> {
    let (mut answered, mut passed) = (Vec::with_capacity(batch.len()), Vec::new());
    for item in batch {
        match judge(item) {
            ControlFlow::Break(answer) => answered.push(Some(answer)),
            ControlFlow::Continue(item) => {
                passed.push(item);
                answered.push(None);
            }
        }
    }
    let mut answers = pass(passed).into_iter();
    answered.into_iter().filter_map(|answer| answer.or_else(|| answers.next())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, block, holds, key, model, put};
    use crate::memory::MemoryStore;
    use crate::store::{Stored, Tier};

    fn memory(seed: u64, rates: Rates) -> FaultStore {
        FaultStore::new(Arc::new(MemoryStore::new(Tier::Nvme, 32 << 20)), seed, rates)
    }

    #[test]
    fn conforms_without_faults() {
        conformance::check(|| Arc::new(memory(0, Rates::default())));
    }

    #[test]
    fn faults_by_chance_never_change_bytes() {
        let rates = Rates { io: 100, full: 50, damaged: 100, cancelled: 50 };
        for seed in 0..4 {
            model::check(|| Arc::new(memory(seed, rates)), model::Faults::Injected);
        }
    }

    #[test]
    fn a_seed_replays_and_another_differs() {
        let outcomes = |seed| {
            let store = memory(seed, Rates { io: 300, ..Rates::default() });
            (0..200).map(|n| put(&store, n, 10).is_ok()).collect::<Vec<_>>()
        };
        assert_eq!(outcomes(1), outcomes(1));
        assert_ne!(outcomes(1), outcomes(2));
        let failed = outcomes(1).iter().filter(|&&ok| !ok).count();
        assert!((20..120).contains(&failed), "{failed} of 200 at 30 %");
    }

    #[test]
    fn injected_faults_come_in_line_and_once() {
        let store = memory(0, Rates::default());
        for fault in [Fault::Full, Fault::Io, Fault::Cancelled] {
            store.inject(Call::Put, fault);
        }
        store.inject(Call::Get, Fault::Damaged);
        let full = TierError::Full { tier: "memory", key: key(1), size: 10 };
        assert_eq!(put(&store, 1, 10), Err(full));
        let io = put(&store, 1, 10).unwrap_err();
        assert_eq!(io.to_string(), format!("put on tier memory failed for block {}: injected fault", key(1)));
        assert_eq!(put(&store, 1, 10), Err(TierError::Cancelled));
        assert_eq!(put(&store, 1, 10), Ok(Stored::Stored));
        assert!(!holds(&store, 1, 10), "damaged: missing, and dropped");
        let stats = store.stats();
        assert_eq!((stats.blocks, stats.io_errors, stats.corrupt, stats.misses), (0, 1, 1, 1));
        store.inject(Call::Flush, Fault::Io);
        assert!(store.flush().wait().is_err() && store.flush().wait().is_ok());
    }

    #[test]
    fn a_held_device_completes_nothing() {
        let store = memory(0, Rates::default());
        store.hold();
        let pending: Vec<_> = (0..3).map(|n| store.put(vec![block(n, 10)])).collect();
        assert_eq!((store.waiting(), store.stats().blocks), (3, 0));
        pending[1].cancel();
        let mut pending = pending.into_iter();
        store.let_go(1);
        assert_eq!(pending.next().unwrap().wait()[0].outcome, Ok(Stored::Stored));
        assert_eq!((store.waiting(), store.stats().blocks), (2, 1));
        store.release();
        assert_eq!(pending.next().unwrap().wait()[0].outcome, Err(TierError::Cancelled));
        assert_eq!(pending.next().unwrap().wait()[0].outcome, Ok(Stored::Stored));
    }

    #[test]
    fn what_a_held_device_took_completes_when_it_is_dropped() {
        let store = memory(0, Rates::default());
        store.hold();
        let pending = store.put(vec![block(1, 10)]);
        drop(store);
        assert_eq!(pending.wait()[0].outcome, Ok(Stored::Stored));
    }
}
