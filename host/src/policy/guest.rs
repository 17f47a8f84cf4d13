//! One instance of a component, called within its limits.

use super::fault::TEXT_BYTES;
use super::log::Log;
use super::{Error, Fault, Module};
use crate::text::printable;
use std::sync::Arc;
use std::time::Duration;
use wasmtime::component::Instance;
use wasmtime::{Store, StoreLimits, StoreLimitsBuilder, UpdateDeadline};

/// What a guest may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub memory_bytes: usize,
    /// Thread CPU time of one hot call: a descheduled thread does not make a policy late.
    pub hot: Duration,
    /// The same for a cold call.
    pub cold: Duration,
}

/// Host data of one store.
pub(super) struct State {
    limits: StoreLimits,
    log: Arc<Log>,
    budget: Duration,
    /// Thread CPU time when the first epoch passed under the running call.
    noticed: Option<Duration>,
}

impl State {
    pub(super) fn add_log(&mut self, level: u32, message: &str) {
        self.log.add(level, message);
    }
}

/// Marks an interruption by [`on_epoch`], to tell it from a trap.
#[derive(Debug)]
struct PastDeadline;

impl std::fmt::Display for PastDeadline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("past its deadline")
    }
}

impl std::error::Error for PastDeadline {}

/// An instance with its typed exports `B`.
pub(super) struct Guest<B> {
    store: Store<State>,
    bindings: B,
    limits: Limits,
    dead: bool,
}

impl<B> Guest<B> {
    /// Instantiates `module` and looks its exports up with `bind`.
    ///
    /// # Errors
    /// The pool is full, the initial memory is over the limit, or an export has another type.
    pub(super) fn new(
        module: &Module,
        limits: Limits,
        log: Arc<Log>,
        bind: impl FnOnce(&mut Store<State>, &Instance) -> wasmtime::Result<B>,
    ) -> Result<Self, Error> {
        let memory = StoreLimitsBuilder::new()
            .memory_size(limits.memory_bytes)
            .table_elements(100_000)
            .instances(16)
            .memories(4)
            .tables(16)
            .trap_on_grow_failure(true);
        let state = State { limits: memory.build(), log, budget: limits.cold, noticed: None };
        let mut store = Store::new(&module.engine, state);
        store.limiter(|state| &mut state.limits);
        store.epoch_deadline_callback(|mut context| on_epoch(context.data_mut()));
        store.set_epoch_deadline(1);
        let failed = |e: wasmtime::Error| Error::Instantiate {
            name: module.name.clone(),
            reason: printable(&format!("{e:#}"), TEXT_BYTES),
        };
        let instance = module.pre.instantiate(&mut store).map_err(failed)?;
        let bindings = bind(&mut store, &instance).map_err(failed)?;
        Ok(Self { store, bindings, limits, dead: false })
    }

    /// Calls a hot function.
    ///
    /// # Errors
    /// A trap or a missed deadline, after which the guest only answers [`Fault::NotReady`].
    pub(super) fn hot<R>(
        &mut self,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.call(self.limits.hot, f)
    }

    /// Calls a cold function, or a hot one that was given `extra` work.
    ///
    /// # Errors
    /// As [`Guest::hot`].
    pub(super) fn cold<R>(
        &mut self,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.call(self.limits.cold, f)
    }

    /// Calls a hot function whose deadline grows with its input.
    ///
    /// # Errors
    /// As [`Guest::hot`].
    pub(super) fn hot_plus<R>(
        &mut self,
        extra: Duration,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.call(self.limits.hot + extra, f)
    }

    fn call<R>(
        &mut self,
        budget: Duration,
        f: impl FnOnce(&B, &mut Store<State>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        if self.dead {
            return Err(Fault::NotReady);
        }
        let state = self.store.data_mut();
        state.budget = budget;
        state.noticed = None;
        self.store.set_epoch_deadline(1);
        f(&self.bindings, &mut self.store).map_err(|error| {
            self.dead = true;
            if error.is::<PastDeadline>() {
                return Fault::Deadline(budget);
            }
            Fault::Trap(printable(&error.root_cause().to_string(), TEXT_BYTES))
        })
    }
}

/// An epoch passed under a running call: interrupt it if it has used up its CPU time since the
/// first such moment. Reading the clock here keeps it off calls that end within a tick.
fn on_epoch(state: &mut State) -> wasmtime::Result<UpdateDeadline> {
    let now = thread_cpu_time();
    let since = *state.noticed.get_or_insert(now);
    if now - since >= state.budget {
        return Err(wasmtime::Error::new(PastDeadline));
    }
    Ok(UpdateDeadline::Continue(1))
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
