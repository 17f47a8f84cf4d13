//! One instance of a component, called within its limits.

use super::bindings::learner::Learner;
use super::engine::Ticker;
use super::fault::TEXT_BYTES;
use super::log::Log;
use super::unwrapped::Unwrapped;
use super::{Error, Fault, Module};
use crate::text::printable;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use wasmtime::component::Instance;
use wasmtime::{PoolConcurrencyLimitError, ResourceLimiter, Store, UpdateDeadline};

/// What a guest may use.
#[derive(Clone, Debug)]
pub struct Limits {
    /// All linear memories of an instance together.
    pub memory_bytes: usize,
    /// Thread CPU time of one hot call: a thread that is descheduled for a while does not make a policy late.
    pub hot: Duration,
    /// The same for a cold call.
    pub cold: Duration,
    /// A call that the machine or its cgroup hardly runs ends after this time, or ten times its CPU time.
    pub starved: Duration,
    /// Block slots of the pool that an evictor serves.
    pub evictor_slots: u32,
    /// Core instances of one component.
    pub core_instances: u32,
    /// What the memories of all instances of the slot take now.
    pub in_use: Arc<AtomicUsize>,
}

impl Limits {
    /// Time that a call of so much CPU time may take in all.
    fn starved(&self, budget: Duration) -> Duration {
        (budget * STARVED).max(self.starved)
    }
}

/// How many times its CPU time a call may take at least, however little the machine runs it.
const STARVED: u32 = 10;

/// Host data of one store.
pub(super) struct State {
    memory: MemoryBudget,
    log: Arc<Log>,
    budget: Duration,
    /// Time that the running call may take in all.
    starved: Duration,
    /// Thread CPU time and time when the first epoch passed under the running call.
    noticed: Option<(Duration, Instant)>,
}

/// What the linear memories of one instance take together. A refusal traps.
struct MemoryBudget {
    used: usize,
    limit: usize,
    core_instances: usize,
    in_use: Arc<AtomicUsize>,
}

impl Drop for MemoryBudget {
    fn drop(&mut self) {
        self.in_use.fetch_sub(self.used, Ordering::Relaxed);
    }
}

pub(super) const TABLE_ELEMENTS: usize = 100_000;

impl ResourceLimiter for MemoryBudget {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let used = self.used + desired.saturating_sub(current);
        if used > self.limit {
            return Err(wasmtime::Error::msg(format!(
                "forcing trap when growing memory: {used} bytes in all, where {} are allowed",
                self.limit
            )));
        }
        self.in_use.fetch_add(used - self.used, Ordering::Relaxed);
        self.used = used;
        Ok(true)
    }

    fn memory_grow_failed(&mut self, error: wasmtime::Error) -> wasmtime::Result<()> {
        Err(error)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        if desired > TABLE_ELEMENTS {
            return Err(wasmtime::Error::msg(format!(
                "a table of {desired} elements, where {TABLE_ELEMENTS} are allowed"
            )));
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        self.core_instances
    }

    fn tables(&self) -> usize {
        self.core_instances
    }

    fn memories(&self) -> usize {
        4
    }
}

impl State {
    #[cfg(test)]
    pub(super) fn unlimited() -> Self {
        let memory = MemoryBudget { used: 0, limit: usize::MAX, core_instances: 1, in_use: Arc::default() };
        let (budget, starved) = (Duration::MAX, Duration::MAX);
        Self { memory, log: Arc::default(), budget, starved, noticed: None }
    }

    pub(super) fn add_log(&mut self, level: u32, message: &str) {
        self.log.add(level, message);
    }
}

/// An interruption by [`on_epoch`], to tell it from a trap.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Interrupted(Fault);

/// An instance with its typed exports `B`.
pub(super) struct Guest<B> {
    store: Store<State>,
    bindings: B,
    /// The learning half, of a component that learns.
    learning: Option<Learner>,
    limits: Limits,
    dead: bool,
    /// The function of the contract that was called last.
    called: &'static str,
    _ticker: Arc<Ticker>,
}

impl<B> Guest<B> {
    /// Instantiates `module` and looks its exports up with `bind`.
    ///
    /// # Errors
    /// The pool is full, the initial memory is over the limit, or an export has another type.
    pub(super) fn new(
        module: &Module,
        limits: &Limits,
        log: Arc<Log>,
        bind: impl FnOnce(&mut Store<State>, &Instance) -> wasmtime::Result<B>,
    ) -> Result<Self, Error> {
        Self::start(module, module.pre.engine(), limits, log, |store| {
            let instance = module.pre.instantiate(&mut *store)?;
            let bindings = bind(store, &instance)?;
            let learning = module.learns.then(|| Learner::new(store, &instance)).transpose()?;
            Ok((bindings, learning))
        })
    }

    fn start(
        module: &Module,
        engine: &wasmtime::Engine,
        limits: &Limits,
        log: Arc<Log>,
        instantiate: impl FnOnce(&mut Store<State>) -> wasmtime::Result<(B, Option<Learner>)>,
    ) -> Result<Self, Error> {
        let memory = MemoryBudget {
            used: 0,
            limit: limits.memory_bytes,
            core_instances: limits.core_instances as usize,
            in_use: Arc::clone(&limits.in_use),
        };
        let state =
            State { memory, log, budget: limits.cold, starved: limits.starved(limits.cold), noticed: None };
        let mut store = Store::new(engine, state);
        store.limiter(|state| &mut state.memory);
        store.epoch_deadline_callback(|mut context| on_epoch(context.data_mut()));
        store.set_epoch_deadline(1);
        let failed = |e: wasmtime::Error| {
            let (name, reason) = (module.name.clone(), printable(&format!("{e:#}"), TEXT_BYTES));
            match e.is::<PoolConcurrencyLimitError>() {
                true => Error::NoRoom { name, reason },
                false => Error::Instantiate { name, reason },
            }
        };
        let (bindings, learning) = instantiate(&mut store).map_err(failed)?;
        let limits = limits.clone();
        let (called, ticker) = ("", Arc::clone(&module.ticker));
        Ok(Self { store, bindings, learning, limits, dead: false, called, _ticker: ticker })
    }

    /// Calls `adopt`, if the policy learns.
    ///
    /// # Errors
    /// As [`Guest::hot`].
    pub(super) fn take_up(&mut self, knowledge: &[u8]) -> Result<(), Fault> {
        let Some(learning) = self.learning.take() else { return Ok(()) };
        let adopted =
            self.cold("adopt", |_, store| learning.kvasir_policy_learning().call_adopt(store, knowledge));
        self.learning = Some(learning);
        adopted
    }

    pub(super) fn bindings(&self) -> &B {
        &self.bindings
    }

    pub(super) fn called(&self) -> &'static str {
        self.called
    }

    /// Calls the hot function `name` of the contract.
    ///
    /// # Errors
    /// A trap or a missed deadline, after which the guest only answers [`Fault::NotReady`].
    pub(super) fn hot<R>(
        &mut self,
        name: &'static str,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.call(name, self.limits.hot, f)
    }

    /// Calls a cold function, or a hot one that was given `extra` work.
    ///
    /// # Errors
    /// As [`Guest::hot`].
    pub(super) fn cold<R>(
        &mut self,
        name: &'static str,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.call(name, self.limits.cold, f)
    }

    /// Calls a hot function whose deadline grows with its input.
    ///
    /// # Errors
    /// As [`Guest::hot`].
    pub(super) fn hot_plus<R>(
        &mut self,
        name: &'static str,
        extra: Duration,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.call(name, self.limits.hot + extra, f)
    }

    fn call<R>(
        &mut self,
        name: &'static str,
        budget: Duration,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        if self.dead {
            return Err(Fault::NotReady);
        }
        self.called = name;
        let starved = self.limits.starved(budget);
        let state = self.store.data_mut();
        (state.budget, state.starved) = (budget, starved);
        state.noticed = None;
        self.store.set_epoch_deadline(1);
        f(&self.bindings, &mut self.store).map_err(|error| {
            self.dead = true;
            match error.downcast_ref() {
                Some(Interrupted(fault)) => fault.clone(),
                None => Fault::Trap(printable(&error.root_cause().to_string(), TEXT_BYTES)),
            }
        })
    }
}

impl<B: Unwrapped> Guest<B> {
    /// The same of the core module in a component that has one to enter.
    ///
    /// # Errors
    /// As [`Guest::new`].
    pub(super) fn unwrapped(module: &Module, limits: &Limits, log: Arc<Log>) -> Result<Self, Error> {
        let core = module.core.as_ref().ok_or_else(|| Error::Instantiate {
            name: module.name.clone(),
            reason: "it has no module that can be entered alone".into(),
        })?;
        Self::start(module, core.module().engine(), limits, log, |store| {
            let instance = core.instantiate(&mut *store)?;
            Ok((B::new(store, &instance, module.learns)?, None))
        })
    }
}

/// An epoch passed under a running call: interrupt it if it has used up its CPU time since the
/// first such moment, or all its time. Reading the clock here keeps it off calls that end within a tick.
fn on_epoch(state: &mut State) -> wasmtime::Result<UpdateDeadline> {
    let now = (thread_cpu_time(), Instant::now());
    let since = *state.noticed.get_or_insert(now);
    let fault = if now.0 - since.0 >= state.budget {
        Fault::Deadline(state.budget)
    } else if now.1 - since.1 >= state.starved {
        Fault::Starved(state.starved)
    } else {
        return Ok(UpdateDeadline::Continue(1));
    };
    Err(wasmtime::Error::new(Interrupted(fault)))
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(limit: usize) -> MemoryBudget {
        MemoryBudget { used: 0, limit, core_instances: 1, in_use: Arc::default() }
    }

    #[test]
    fn the_memories_of_an_instance_share_one_limit() {
        let mut memory = budget(100);
        assert!(memory.memory_growing(0, 60, None).is_ok(), "the first");
        assert!(memory.memory_growing(0, 40, None).is_ok(), "the second");
        assert!(memory.memory_growing(40, 41, None).is_err(), "either, by one more");
        assert!(memory.memory_growing(60, 60, None).is_ok());
        assert!(memory.table_growing(0, TABLE_ELEMENTS + 1, None).is_err());
        let in_use = Arc::clone(&memory.in_use);
        assert_eq!(in_use.load(Ordering::Relaxed), 100);
        drop(memory);
        assert_eq!(in_use.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_call_that_hardly_runs_ends_all_the_same() {
        let started = |ago| {
            let noticed = Some((thread_cpu_time(), Instant::now() - ago));
            let (budget, starved) = (Duration::from_secs(1), Duration::from_secs(10));
            State { memory: self::budget(0), log: Arc::default(), budget, starved, noticed }
        };
        assert!(on_epoch(&mut started(Duration::ZERO)).is_ok());
        let ended = on_epoch(&mut started(Duration::from_secs(10))).err().unwrap();
        let Interrupted(fault) = ended.downcast_ref().unwrap();
        assert_eq!(*fault, Fault::Starved(Duration::from_secs(10)), "it did not run past its deadline");
    }
}
