//! What calls a slot's policy: one engine per thread.

use super::learning::{Knowledge, Lessons, Seat};
use super::version::{StateRefused, Version};
use super::{Hook, Policy, Slot};
use crate::policy::catalog::Origin;
use crate::policy::{Cause, Fault};
use arc_swap::{ArcSwap, ArcSwapOption, Cache};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Largest `export-state` handed on.
pub(super) const MAX_STATE_BYTES: usize = 16 << 20;
/// The most engines of a version kept for workers whose own fails.
pub const SPARES_MAX: usize = 4;

impl<H: Hook> Slot<H> {
    /// A worker with an engine of the version in service.
    pub fn worker(self: &Arc<Self>) -> Worker<H> {
        self.workers.fetch_add(1, Ordering::Relaxed);
        let version = self.current();
        let engine = version.take_ready().or_else(|| version.build(&self.limits, &self.log).ok());
        let mut worker = Worker::new(self, &self.current, self.lessons(Seat::Service), version, engine);
        worker.counted = true;
        worker
    }
}

/// One thread's view of a seat of a slot: its own engine, exchanged when the version changes.
pub struct Worker<H: Hook> {
    slot: Arc<Slot<H>>,
    /// Whether this is one of the workers for which a load makes an engine.
    counted: bool,
    cache: Cache<Arc<ArcSwap<Version<H>>>, Arc<Version<H>>>,
    knowledge: Cache<Arc<ArcSwapOption<Knowledge>>, Option<Arc<Knowledge>>>,
    /// Number of the knowledge that `engine` has; 0 = none.
    adopted: u64,
    /// Version of `engine`.
    version: Arc<Version<H>>,
    engine: Option<Box<H::Engine>>,
    /// The native twin, once it had to decide for `version`.
    twin: Option<Box<H::Engine>>,
    /// The engine has seen nothing yet.
    fresh: bool,
    coming: Option<Coming<H>>,
    retry: Backoff,
}

/// An engine that can serve, and its version.
pub struct Found<H: Hook> {
    pub version: Arc<Version<H>>,
    pub engine: Box<H::Engine>,
}

/// An engine that is built for one worker, beside the traffic.
struct Coming<H: Hook> {
    version: Arc<Version<H>>,
    /// Closed without an engine: it could not be built, or is not wanted after all.
    engine: mpsc::Receiver<Box<H::Engine>>,
}

impl<H: Hook> Worker<H> {
    fn new(
        slot: &Arc<Slot<H>>,
        seat: &Arc<ArcSwap<Version<H>>>,
        lessons: &Lessons,
        version: Arc<Version<H>>,
        engine: Option<Box<H::Engine>>,
    ) -> Self {
        Self {
            slot: Arc::clone(slot),
            counted: false,
            cache: Cache::new(Arc::clone(seat)),
            knowledge: Cache::new(lessons.knowledge.clone()),
            adopted: 0,
            version,
            engine,
            twin: None,
            fresh: true,
            coming: None,
            retry: Backoff::default(),
        }
    }

    /// A worker of a policy on trial. Its engine is built beside the traffic if none is ready.
    pub(super) fn of_trial(
        slot: &Arc<Slot<H>>,
        version: &Arc<Version<H>>,
        seat: &Arc<ArcSwap<Version<H>>>,
    ) -> Self {
        Self::new(slot, seat, slot.lessons(Seat::Trial), Arc::clone(version), version.take_ready())
    }

    /// Takes up a newer version or an engine that was built, if there is one; costs a pointer load when
    /// there is none. Returns true once per engine, which must then be given everything.
    pub fn refresh(&mut self) -> bool {
        if let Some(found) = self.find() {
            self.install(found);
        }
        self.adopt();
        std::mem::take(&mut self.fresh)
    }

    /// Gives the engine what the policy's learner published, unless it has that already.
    fn adopt(&mut self) {
        let Some(knowledge) = self.knowledge.load() else { return };
        let known = knowledge.number == self.adopted && !self.fresh;
        if known || knowledge.generation != self.version.generation {
            return;
        }
        let knowledge = Arc::clone(knowledge);
        // If that fails, the next engine is not given the same before it has decided once.
        self.adopted = knowledge.number;
        let _ = self.tell(|engine| engine.adopt(&knowledge.bytes));
    }

    /// An engine that should serve in place of the present one: of a newer version, or because there is none.
    pub fn find(&mut self) -> Option<Found<H>> {
        let newest = self.cache.load();
        let nothing_new = newest.generation == self.version.generation && self.engine.is_some();
        if nothing_new && self.coming.is_none() {
            return None;
        }
        let newest = newest.clone();
        self.look_around(newest)
    }

    /// The generation of what is published, whether or not this worker has an engine of it.
    pub fn newest_generation(&mut self) -> u64 {
        self.cache.load().generation
    }

    fn look_around(&mut self, newest: Arc<Version<H>>) -> Option<Found<H>> {
        if newest.generation != self.version.generation
            && let Some(engine) = newest.take_ready()
        {
            return Some(Found { version: newest, engine });
        }
        match self.coming.as_ref().map(|coming| coming.engine.try_recv()) {
            Some(Ok(engine)) => {
                let coming = self.coming.take().expect("an engine has just come");
                return Some(Found { version: coming.version, engine });
            }
            Some(Err(mpsc::TryRecvError::Empty)) => return None,
            Some(Err(mpsc::TryRecvError::Disconnected)) => {
                self.coming = None;
                if self.engine.is_none() {
                    self.retry.failed(Instant::now());
                }
            }
            None => {}
        }
        let behind = self.engine.is_none() || newest.generation != self.version.generation;
        if behind && self.retry.due(Instant::now()) {
            self.coming = Some(Coming { engine: self.slot.rebuild(&newest), version: newest });
        }
        None
    }

    /// Puts the engine into service at once. What its predecessor of the same name learned follows in a second one:
    /// no call waits for `export-state` and `import-state`.
    pub fn install(&mut self, found: Found<H>) {
        let Found { version, engine } = found;
        let newer = version.generation != self.version.generation;
        let same_name = self.version.description.name == version.description.name;
        let old_version = std::mem::replace(&mut self.version, version);
        let old = self.engine.replace(engine);
        self.fresh = true;
        self.twin = None;
        if !newer {
            return self.discard(old);
        }
        self.retry = Backoff::default(); // another policy does not wait for the faults of this one
        self.coming = None;
        match old {
            Some(old) if same_name => {
                let engine = self.slot.hand_over(&old_version, old, &self.version);
                self.coming = Some(Coming { engine, version: self.version.clone() });
            }
            old => self.discard(old),
        }
    }

    /// Gives an engine up beside the traffic: an evictor may hold gigabytes, which take time to give back.
    fn discard(&self, engine: Option<Box<H::Engine>>) {
        self.slot.builder.submit(move || drop(engine));
    }

    /// Asks the policy. The call is counted, and so is its fault, which may cost the engine, and its
    /// policy the slot.
    ///
    /// # Errors
    /// Any [`Fault`]; the caller decides in the policy's place, or asks the twin.
    pub fn ask<R>(&mut self, f: impl FnOnce(&mut H::Engine) -> Result<R, Fault>) -> Result<R, Fault> {
        let engine = self.engine.as_deref_mut().ok_or(Fault::NotReady)?;
        let counters = &self.version.counters;
        counters.measure(|| f(engine)).map_err(|fault| self.failed(fault))
    }

    /// As [`Worker::ask`], for what the policy is told between its decisions: not one of its calls.
    ///
    /// # Errors
    /// Any [`Fault`].
    pub fn tell<R>(&mut self, f: impl FnOnce(&mut H::Engine) -> Result<R, Fault>) -> Result<R, Fault> {
        let engine = self.engine.as_deref_mut().ok_or(Fault::NotReady)?;
        f(engine).map_err(|fault| self.failed(fault))
    }

    /// An engine that was found failed before it was installed: counted, and the next is not asked for at once.
    pub fn failed_to_follow(&mut self, version: &Arc<Version<H>>, fault: &Fault) {
        self.slot.record(version, "", fault);
        self.retry.failed(Instant::now());
    }

    /// Gives up the engine. A spare one takes its place, or else the next refresh looks for a fresh one.
    pub fn drop_engine(&mut self) {
        let engine = std::mem::replace(&mut self.engine, self.version.take_spare());
        self.discard(engine);
        if self.engine.is_some() {
            self.fresh = true;
            self.slot.stock(&self.version);
        } else {
            self.retry.failed(Instant::now());
        }
    }

    /// Makes an engine of the same version, elsewhere and later, that was told nothing.
    pub fn beside(&self) -> impl FnOnce() -> Option<Box<H::Engine>> + Send + use<H> {
        let (slot, version) = (self.slot.clone(), self.version.clone());
        move || version.beside(&slot.limits).ok()
    }

    /// What the engine has adopted of its policy's learner.
    pub fn knowledge(&mut self) -> Option<Arc<[u8]>> {
        let (adopted, generation) = (self.adopted, self.version.generation);
        let knowledge = self.knowledge.load().as_ref()?;
        let has_it = knowledge.number == adopted && knowledge.generation == generation;
        has_it.then(|| Arc::clone(&knowledge.bytes))
    }

    pub fn version(&self) -> &Arc<Version<H>> {
        &self.version
    }

    /// The native twin, which decides in place of the policy. Counted.
    pub fn twin(&mut self) -> Option<&mut H::Engine> {
        self.version.counters.fallback();
        if self.twin.is_none() {
            self.twin = self.native();
        }
        self.twin.as_deref_mut()
    }

    /// The native twin of the version in service with the operator's settings, or else the slot's default.
    pub fn native(&self) -> Option<Box<H::Engine>> {
        let assignment = &self.version.assignment;
        let (name, settings) = match &assignment.origin {
            Origin::Builtin { name } | Origin::Native { name } => (name.as_str(), &*assignment.settings),
            Origin::Module { .. } | Origin::Chain { .. } => ("", &[][..]),
        };
        let twin = H::builtins().find(|b| b.name == name).or_else(|| H::builtins().next())?;
        let mut engine = (twin.native)();
        // The component took the same settings, so a refusal is a fault of ours; deciding goes on.
        if !matches!(engine.configure(settings), Ok(Ok(()))) {
            self.slot
                .log
                .add(1, &format!("the native `{}` does not take the settings of its component", twin.name));
        }
        Some(engine)
    }

    /// Records a call that gave no usable answer.
    pub fn record(&mut self, fault: &Fault) {
        let called = self.engine.as_ref().map_or("", |engine| engine.called());
        self.slot.record(&self.version, called, fault);
    }

    fn failed(&mut self, fault: Fault) -> Fault {
        // An engine that exists and is not ready died unseen: it will never answer again.
        let fault = match fault {
            Fault::NotReady => Fault::Trap("its instance is gone".to_owned()),
            fault => fault,
        };
        self.record(&fault);
        if matches!(fault, Fault::Trap(_) | Fault::Deadline(_) | Fault::Starved(_)) {
            self.drop_engine();
        }
        fault
    }
}

impl<H: Hook> Drop for Worker<H> {
    fn drop(&mut self) {
        if self.counted {
            self.slot.workers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<H: Hook> Slot<H> {
    /// Counts a fault of the function `called`, and logs it; the version's breaker decides whether the policy goes out of
    /// service.
    fn record(self: &Arc<Self>, version: &Version<H>, called: &str, fault: &Fault) {
        let faults = version.counters.fault(fault);
        let said = || if called.is_empty() { fault.to_string() } else { format!("`{called}` {fault}") };
        // The 1st, 2nd, 4th, 8th and so on: one that fails at every call does not push out what else was logged.
        if faults.is_power_of_two() {
            let (name, generation) = (&version.description.name, version.generation);
            self.log.add_host(2, &format!("`{name}`: {}; fault {faults} of generation {generation}", said()));
        }
        if let Some(within) = version.breaker.fault(Instant::now()) {
            let (slot, generation) = (self.clone(), version.generation);
            let why = format!("{within}, the last one: {}", said());
            self.builder.submit(move || slot.take_out(generation, Cause::Breaker, &why));
        }
    }

    /// Has the builder's thread make spare engines of `version` until there are enough: as many as may fail before the
    /// breaker acts, so that no fault but the last costs more than the decision that it spoilt.
    pub(super) fn stock(self: &Arc<Self>, version: &Arc<Version<H>>) {
        if !H::HAS_SPARES || !version.is_component() {
            return;
        }
        let enough = (self.config.breaker_faults as usize).saturating_sub(1).min(SPARES_MAX);
        let (slot, version) = (Arc::downgrade(self), Arc::downgrade(version));
        self.builder.submit(move || {
            let (Some(slot), Some(version)) = (slot.upgrade(), version.upgrade()) else { return };
            let has_seat = || slot.seats(version.generation);
            while has_seat() && version.spares.lock().len() < enough {
                match version.build(&slot.limits, &slot.log) {
                    Ok(spare) => version.spares.lock().push(spare),
                    Err(e) => return slot.log.add_host(1, &format!("no spare instance: {e}")),
                }
            }
            if !has_seat() {
                version.spares.lock().clear(); // replaced meanwhile
            }
        });
    }

    /// Another engine of `version`, built on the builder's thread.
    fn rebuild(self: &Arc<Self>, version: &Arc<Version<H>>) -> mpsc::Receiver<Box<H::Engine>> {
        let (sender, engine) = mpsc::channel();
        let (slot, version) = (self.clone(), version.clone());
        self.builder.submit(move || {
            if !slot.seats(version.generation) {
                return;
            }
            match version.build(&slot.limits, &slot.log) {
                Ok(engine) => drop(sender.send(engine)), // the worker may be gone
                Err(e) => slot.log.add_host(1, &format!("instance not rebuilt: {e}")),
            }
        });
        engine
    }

    /// An engine of `to` with the state of `old`, if that has any and `to` takes it.
    fn hand_over(
        self: &Arc<Self>,
        from: &Arc<Version<H>>,
        mut old: Box<H::Engine>,
        to: &Arc<Version<H>>,
    ) -> mpsc::Receiver<Box<H::Engine>> {
        let (sender, engine) = mpsc::channel();
        let (slot, from, to) = (self.clone(), from.clone(), to.clone());
        self.builder.submit(move || {
            let Some(state) = slot.exported(&from, &mut *old) else { return };
            drop(old); // its memory may be needed for its successor
            if let Some(engine) = slot.with_state(&to, &state) {
                let _ = sender.send(engine); // the worker may be gone
            }
        });
        engine
    }

    fn exported(self: &Arc<Self>, from: &Version<H>, old: &mut H::Engine) -> Option<Vec<u8>> {
        let problem = match old.export_state() {
            Ok(state) if state.is_empty() => return None,
            Ok(state) if state.len() <= MAX_STATE_BYTES => return Some(state),
            Ok(state) => format!("{} bytes are over {MAX_STATE_BYTES}", state.len()),
            Err(fault) => {
                self.record(from, "export-state", &fault);
                fault.to_string()
            }
        };
        self.log.add_host(2, &format!("state not handed over: {problem}"));
        None
    }

    /// Returns `None` if what `version` has in service already, with no state, should go on.
    fn with_state(self: &Arc<Self>, version: &Version<H>, state: &[u8]) -> Option<Box<H::Engine>> {
        // One fault per load, not one per worker: those alone could trip the breaker.
        if version.refuses_state.load(Ordering::Relaxed) {
            return None;
        }
        let problem = match version.build_with(state, &self.limits, &self.log) {
            Ok(Ok(engine)) => return Some(engine),
            Ok(Err(StateRefused::Politely(reason))) => reason, // the log cuts it
            Ok(Err(StateRefused::ByFault(fault))) => {
                version.refuses_state.store(true, Ordering::Relaxed);
                self.record(version, "import-state", &fault);
                format!("import-state {fault}")
            }
            Err(e) => e.to_string(),
        };
        self.log.add_host(2, &format!("starts cold: {problem}"));
        None
    }
}

/// Waits longer after each failure, so that a broken policy is not rebuilt in a loop.
pub(super) struct Backoff {
    failures: u32,
    until: Option<Instant>,
    /// The longest wait is this power of two of milliseconds.
    longest: u32,
}

/// About a second: requests are decided natively meanwhile.
impl Default for Backoff {
    fn default() -> Self {
        Self::up_to(10)
    }
}

/// A policy that went without a failure for this long is forgiven those before.
const FORGIVEN: Duration = Duration::from_secs(60);

impl Backoff {
    pub(super) fn up_to(longest: u32) -> Self {
        Self { failures: 0, until: None, longest }
    }

    pub(super) fn failed(&mut self, now: Instant) {
        if self.until.is_some_and(|until| now > until + FORGIVEN) {
            self.failures = 0;
        }
        let wait = Duration::from_millis(1 << self.failures.min(self.longest));
        self.failures += 1;
        self.until = Some(now + wait);
    }

    pub(super) fn due(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::admitter::AdmitterHook;
    use crate::policy::balancer::BalancerHook;
    use crate::policy::catalog::Catalog;
    use crate::policy::engine::Engine;
    use crate::policy::scheduler::SchedulerHook;
    use crate::policy::slot::{Builder, Source};
    use crate::policy::{Error, PolicyConfig};
    use kvasir_policy::admitter::{Forecast, Request, Verdict};
    use kvasir_policy::balancer::Snapshot;

    fn slot(settings: &[(&str, &str)]) -> Arc<Slot<SchedulerHook>> {
        let config = PolicyConfig { breaker_faults: 2, ..PolicyConfig::default() };
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let wanted = (Source::Native("mooncake".into()), settings.collect());
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        Slot::open(engine, &config, wanted, None, builder).unwrap()
    }

    #[test]
    fn another_policy_does_not_wait_for_the_faults_of_the_one_before() {
        let slot = slot(&[]);
        let mut worker = slot.worker();
        for _ in 0..20 {
            worker.drop_engine();
        }
        assert_eq!(worker.retry.failures, 20);
        slot.load(Source::Native("random".into()), Vec::new()).unwrap();
        worker.refresh();
        assert_eq!(worker.version().description.name, "random");
        worker.drop_engine();
        assert_eq!(worker.retry.failures, 1);
    }

    #[test]
    fn an_engine_that_died_unseen_is_a_fault_and_goes() {
        let slot = slot(&[]);
        let mut worker = slot.worker();
        assert!(matches!(worker.ask(|_| Err::<(), _>(Fault::NotReady)), Err(Fault::Trap(_))));
        assert!(worker.engine.is_none());
        assert_eq!(worker.version().counters.values().traps, 1);
        assert_eq!(worker.ask(|_| Ok(())), Err(Fault::NotReady), "none is there, which is no further fault");
        assert_eq!(worker.version().counters.values().traps, 1);
    }

    #[test]
    fn the_native_twin_has_the_settings_of_its_component() {
        let config = PolicyConfig::default();
        let wanted = (Source::Builtin("slo".into()), vec![("slack".to_owned(), "3".to_owned())]);
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        let slot = Slot::<AdmitterHook>::open(engine, &config, wanted, None, builder).unwrap();
        let twin = |worker: &mut Worker<AdmitterHook>| {
            let request = Request { ttft_slo: 1.0, tbt_slo: 1.0, ..Request::default() };
            let forecast = Forecast { ttft: 2.0, ..Forecast::default() };
            worker.twin().unwrap().admit_request(&request.encode(), &forecast)
        };
        let mut worker = slot.worker();
        assert_eq!(twin(&mut worker), Ok(Verdict::Accept), "late by less than the slack");
        slot.take_out(worker.version().generation, Cause::Breaker, "as told");
        worker.refresh();
        assert_eq!(worker.version().assignment.origin, Origin::Native { name: "slo".into() });
        assert_eq!(twin(&mut worker), Ok(Verdict::Accept), "also when it serves after a trip");
    }

    #[test]
    fn what_served_before_comes_back_though_no_instance_is_free_for_a_moment() {
        let config = PolicyConfig { instances: 6, ..PolicyConfig::default() };
        let engine = Engine::new(&config, None).unwrap();
        let open = |name: &str| {
            let wanted = (Source::Builtin(name.into()), Vec::new());
            Slot::<SchedulerHook>::open(engine.clone(), &config, wanted, None, Builder::start().unwrap())
        };
        let slot = open("mooncake").unwrap();
        let broken = slot.load(Source::Builtin("random".into()), Vec::new()).unwrap().generation;
        let others: Vec<_> = std::iter::from_fn(|| open("random").ok()).collect();
        assert!(matches!(open("random"), Err(Error::NoRoom { .. })));
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| slot.take_out(broken, Cause::Breaker, "as told"));
            // Told just before the policy before it is started.
            while !slot.log.read().0.iter().any(|line| line.text.contains("taken out of service")) {
                std::thread::yield_now();
            }
            drop(others);
            taking.join().unwrap();
        });
        assert_eq!(slot.current().assignment.origin, Origin::Builtin { name: "mooncake".into() });
    }

    #[test]
    fn a_full_disk_does_not_keep_a_broken_policy_in_service() {
        let folder = tempfile::tempdir().unwrap();
        let catalog =
            Catalog::open(kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, folder.path()).unwrap();
        let config = PolicyConfig::default();
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        let wanted = (Source::Native("mooncake".into()), Vec::new());
        let slot =
            Slot::<SchedulerHook>::open(engine, &config, wanted, Some(catalog.clone()), builder).unwrap();
        slot.load(Source::Native("random".into()), Vec::new()).unwrap();
        catalog.full.store(true, Ordering::Relaxed);
        assert!(slot.load(Source::Native("round-robin".into()), Vec::new()).is_err());
        assert_eq!((slot.current().description.name.as_str(), slot.current().generation), ("random", 2));
        slot.take_out(2, Cause::Breaker, "as told");
        assert_eq!(slot.current().description.name, "mooncake");
        catalog.full.store(false, Ordering::Relaxed);
        slot.persist();
        let stored = catalog.stored(crate::policy::SlotKind::Scheduler).unwrap().unwrap();
        assert_eq!((stored.current, stored.trip), (slot.current().assignment.clone(), slot.last_trip()));
    }

    #[test]
    fn what_serves_in_place_of_a_broken_policy_says_so_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let catalog =
            Catalog::open(kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, folder.path()).unwrap();
        let config = PolicyConfig::default();
        let open = || {
            let wanted = (Source::Native("mooncake".into()), Vec::new());
            let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
            Slot::<SchedulerHook>::open(engine, &config, wanted, Some(catalog.clone()), builder).unwrap()
        };
        let slot = open();
        slot.load(Source::Native("random".into()), Vec::new()).unwrap();
        slot.take_out(2, Cause::Breaker, "as told");
        let why = slot.last_trip().unwrap();
        assert!(why.contains("`random` taken out of service") && why.contains("`mooncake` serves"), "{why}");
        drop(slot);
        let slot = open();
        assert_eq!(
            (slot.current().description.name.as_str(), slot.last_trip()),
            ("mooncake", Some(why.clone()))
        );
        assert!(slot.log.read().0.iter().any(|line| line.text.contains(&why)));
        slot.load(Source::Native("round-robin".into()), Vec::new()).unwrap();
        drop(slot);
        let slot = open();
        assert_eq!(
            (slot.last_trip(), slot.previous()),
            (None, Some("mooncake".to_owned())),
            "chosen by a person"
        );
    }

    /// A balancer that traps on every fourth call of an instance.
    fn trapping(breaker_faults: u32) -> Arc<Slot<BalancerHook>> {
        let config = PolicyConfig { breaker_faults, ..PolicyConfig::default() };
        let settings =
            [("mode", "trap"), ("after", "3")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let bytes = kvasir_tests::guest("balancer").to_vec();
        let wanted = (Source::Bytes { name: "bad".into(), bytes }, settings.into());
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        Slot::open(engine, &config, wanted, None, builder).unwrap()
    }

    fn until_stocked(slot: &Slot<BalancerHook>, spares: usize) {
        while slot.current().spares.lock().len() < spares {
            std::thread::yield_now(); // the test runner's time limit ends this if they are not made
        }
    }

    fn tick(worker: &mut Worker<BalancerHook>) -> Result<Vec<f32>, Fault> {
        worker.refresh();
        worker.ask(|engine| engine.tick(&Snapshot::default()))
    }

    #[test]
    fn each_trap_costs_one_call() {
        let slot = trapping(1_000);
        let mut worker = slot.worker();
        let trapped = |worker: &mut Worker<BalancerHook>| {
            tick(worker).is_err_and(|fault| matches!(fault, Fault::Trap(_)))
        };
        until_stocked(&slot, SPARES_MAX);
        // One after the other, without time to make a new one.
        for call in 1..=4 * SPARES_MAX {
            assert_eq!(trapped(&mut worker), call % 4 == 0, "call {call}");
        }
        for call in 1..=100 {
            until_stocked(&slot, 1);
            assert_eq!(trapped(&mut worker), call % 4 == 0, "call {call}");
        }
        let counters = slot.current().counters.values();
        assert_eq!((counters.traps, slot.current().generation), (SPARES_MAX as u64 + 25, 1));
        let lines: Vec<_> = slot.log.read().0.into_iter().map(|line| line.text).collect();
        let told = |text: &String| text.starts_with("`bad`: `tick` trapped: ");
        let counts = lines.iter().filter(|text| told(text)).map(|text| text.rsplit("; ").next().unwrap());
        let expected: Vec<_> = [1, 2, 4, 8, 16].map(|n| format!("fault {n} of generation 1")).into();
        assert!(counts.eq(&expected), "{lines:?}");
    }

    #[test]
    fn there_are_as_many_spares_as_faults_before_the_breaker_acts_and_none_for_what_is_replaced() {
        let slot = trapping(3);
        let mut worker = slot.worker();
        until_stocked(&slot, 2);
        let broken = slot.current();
        let calls =
            (1..).take_while(|_| slot.current().generation == 1).filter(|_| tick(&mut worker).is_err());
        assert!(calls.count() >= 3);
        assert_eq!(slot.current().assignment.origin, Origin::Native { name: "static".into() });
        let why = slot.last_trip().unwrap();
        assert!(
            why.contains("3 faults within ") && why.contains(", the last one: `tick` trapped: "),
            "{why}"
        );
        while !broken.spares.lock().is_empty() {
            std::thread::yield_now(); // they go right after the exchange
        }
        assert!(slot.current().spares.lock().is_empty(), "native policies do not fail");
        assert_eq!(tick(&mut worker), Ok(vec![1.5]));
    }

    #[test]
    fn failures_of_long_ago_are_forgiven() {
        let (mut retry, start) = (Backoff::default(), Instant::now());
        (0..5).for_each(|_| retry.failed(start));
        retry.failed(start + FORGIVEN);
        assert_eq!(retry.failures, 6);
        retry.failed(start + 3 * FORGIVEN);
        assert_eq!(retry.failures, 1);
    }

    #[test]
    fn an_engine_that_could_not_be_built_is_asked_for_again() {
        let slot = slot(&[]);
        let mut worker = slot.worker();
        worker.engine = None;
        worker.coming = Some(Coming { version: worker.version.clone(), engine: mpsc::channel().1 });
        while worker.engine.is_none() {
            worker.refresh();
        }
    }
}
