//! What calls a slot's policy: one engine per thread.

use super::version::Version;
use super::{Hook, Policy, Slot};
use crate::policy::Fault;
use crate::policy::catalog::Origin;
use crate::policy::log::Log;
use arc_swap::{ArcSwap, Cache};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Largest `export-state` handed on.
const MAX_STATE_BYTES: usize = 16 << 20;

impl<H: Hook> Slot<H> {
    /// A worker with an engine of the version in service.
    pub fn worker(self: &Arc<Self>) -> Worker<H> {
        self.workers.fetch_add(1, Ordering::Relaxed);
        let version = self.current();
        let engine = version.take_ready().or_else(|| version.build(self.limits, &self.log).ok());
        Worker {
            slot: self.clone(),
            cache: Cache::new(self.current.clone()),
            version,
            engine,
            fresh: true,
            rebuild_asked: false,
            retry: Backoff::default(),
        }
    }
}

/// One thread's view of a slot: its own engine, exchanged when the version changes.
pub struct Worker<H: Hook> {
    slot: Arc<Slot<H>>,
    cache: Cache<Arc<ArcSwap<Version<H>>>, Arc<Version<H>>>,
    /// Version of `engine`.
    version: Arc<Version<H>>,
    engine: Option<Box<H::Engine>>,
    /// The engine has seen nothing yet.
    fresh: bool,
    rebuild_asked: bool,
    retry: Backoff,
}

impl<H: Hook> Worker<H> {
    /// Looks for a newer version or a rebuilt engine; costs a pointer load when there is none.
    pub fn refresh(&mut self) {
        let newest = self.cache.load();
        if newest.generation == self.version.generation && self.engine.is_some() {
            return;
        }
        let newest = newest.clone();
        if let Some(engine) = newest.take_ready() {
            self.install(newest, engine);
        } else if !self.rebuild_asked && self.retry.due() {
            self.rebuild_asked = true;
            self.slot.rebuild(&newest);
        }
    }

    fn install(&mut self, version: Arc<Version<H>>, mut engine: Box<H::Engine>) {
        if let Some(old) = &mut self.engine
            && self.version.description.name == version.description.name
        {
            hand_over::<H>(old, &mut engine, &self.slot.log);
        }
        if version.generation != self.version.generation {
            self.retry = Backoff::default(); // another policy does not wait for the faults of this one
        }
        self.version = version;
        self.engine = Some(engine);
        self.fresh = true;
        self.rebuild_asked = false;
    }

    /// The engine, unless the last one failed and its successor is still being built.
    pub fn engine(&mut self) -> Option<&mut H::Engine> {
        self.engine.as_deref_mut()
    }

    /// Whether the engine has to be given everything; true once per engine.
    pub fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.fresh)
    }

    /// Gives up the engine, so that the next refresh looks for a fresh one.
    pub fn drop_engine(&mut self) {
        self.engine = None;
        self.rebuild_asked = false;
        self.retry.failed();
    }

    pub fn version(&self) -> &Arc<Version<H>> {
        &self.version
    }

    /// The native twin of the version in service, or of the slot's default.
    pub fn native(&self) -> Option<Box<H::Engine>> {
        let name = match &self.version.assignment.origin {
            Origin::Builtin { name } | Origin::Native { name } => name,
            Origin::Module { .. } => "",
        };
        let twin = H::builtins().find(|b| b.name == name).or_else(|| H::builtins().next())?;
        Some((twin.native)())
    }

    /// Records a call that gave no usable answer; the version's breaker decides whether the policy
    /// goes out of service.
    pub fn record(&mut self, fault: &Fault) {
        self.version.counters.fault(fault);
        if matches!(fault, Fault::Trap(_) | Fault::Deadline(_)) {
            self.drop_engine();
        }
        if *fault != Fault::NotReady && self.version.breaker.fault(Instant::now()) {
            let (slot, generation, fault) = (self.slot.clone(), self.version.generation, fault.clone());
            self.slot.builder.submit(move || slot.trip(generation, &fault));
        }
    }
}

impl<H: Hook> Drop for Worker<H> {
    fn drop(&mut self) {
        self.slot.workers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// `export-state` of the outgoing engine to the incoming one of the same name.
fn hand_over<H: Hook>(old: &mut H::Engine, new: &mut H::Engine, log: &Log) {
    let state = match old.export_state() {
        Ok(state) if state.is_empty() => return,
        Ok(state) if state.len() > MAX_STATE_BYTES => {
            return log
                .add(2, &format!("state of {} bytes not handed over: over {MAX_STATE_BYTES}", state.len()));
        }
        Ok(state) => state,
        Err(fault) => return log.add(2, &format!("state not exported: {fault}")),
    };
    match new.import_state(&state) {
        Ok(Ok(())) => {}
        Ok(Err(reason)) => log.add(2, &format!("starts cold: {reason}")),
        Err(fault) => log.add(2, &format!("starts cold: import-state {fault}")),
    }
}

/// Waits longer after each failure, so that a broken policy is not rebuilt in a loop.
#[derive(Default)]
struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    fn failed(&mut self) {
        let wait = Duration::from_millis(1 << self.failures.min(10));
        self.failures += 1;
        self.until = Some(Instant::now() + wait);
    }

    fn due(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyConfig;
    use crate::policy::engine::Engine;
    use crate::policy::scheduler::SchedulerHook;
    use crate::policy::slot::{Builder, Source};

    #[test]
    fn another_policy_does_not_wait_for_the_faults_of_the_one_before() {
        let config = PolicyConfig::default();
        let wanted = (Source::Builtin("mooncake".into()), Vec::new());
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        let slot = Slot::<SchedulerHook>::open(engine, &config, wanted, None, builder).unwrap();
        let mut worker = slot.worker();
        for _ in 0..20 {
            worker.drop_engine();
        }
        assert_eq!(worker.retry.failures, 20);
        slot.load(Source::Builtin("random".into()), Vec::new()).unwrap();
        worker.refresh();
        assert_eq!(worker.version().description.name, "random");
        worker.drop_engine();
        assert_eq!(worker.retry.failures, 1);
    }
}
