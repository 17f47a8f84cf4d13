//! The second seat of a slot: a policy on trial beside the one that serves, in shadow or for a share of the requests.
//!
//! A trial never costs a decision: the active policy decides what a canary does not answer, and a shadow is asked on a
//! thread of its own ([`super::shadow`]). Faults count against the policy on trial alone, and end the trial.

use super::shadow::{Tally, Told, run};
use super::swap::{Swap, with_room};
use super::version::stored_program;
use super::{Hook, Settings, Slot, Source, Version, Worker};
use crate::policy::catalog::{Assignment, Stored, StoredTrial};
use crate::policy::{Action, Cause, Error, Share, Stage, Subject};
use arc_swap::{ArcSwap, ArcSwapOption, Cache};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// A policy on trial. A different policy is a different trial.
pub struct Trial<H: Hook> {
    pub version: Arc<Version<H>>,
    pub stage: Stage,
    /// It is there to be compared with, and not to be brought into service; see [`super::contest`].
    pub(super) by_guard: bool,
    /// How the answers of a shadow compare.
    pub tally: Tally,
    /// What its workers look at; always `version`.
    seat: Arc<ArcSwap<Version<H>>>,
    ended: AtomicBool,
    /// The queue to the thread of a shadow.
    pub(super) told: Option<SyncSender<Told<H>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<H: Hook> Trial<H> {
    fn start(slot: &Arc<Slot<H>>, version: Version<H>, stage: Stage) -> Result<Arc<Self>, Error> {
        Self::start_for(slot, version, stage, false)
    }

    /// Starts a trial that a restart does not bring back.
    pub(super) fn start_by_guard(
        slot: &Arc<Slot<H>>,
        version: Version<H>,
        stage: Stage,
    ) -> Result<Arc<Self>, Error> {
        Self::start_for(slot, version, stage, true)
    }

    fn start_for(
        slot: &Arc<Slot<H>>,
        version: Version<H>,
        stage: Stage,
        by_guard: bool,
    ) -> Result<Arc<Self>, Error> {
        let version = Arc::new(version);
        let (told, heard) = match stage {
            Stage::Shadow => {
                let (told, heard) = sync_channel(super::shadow::QUEUE);
                (Some(told), Some(heard))
            }
            Stage::Active | Stage::Canary(_) => (None, None),
        };
        let trial = Arc::new(Self {
            seat: Arc::new(ArcSwap::new(Arc::clone(&version))),
            version,
            stage,
            by_guard,
            tally: Tally::default(),
            ended: AtomicBool::new(false),
            told,
            thread: Mutex::default(),
        });
        if let Some(heard) = heard {
            let (slot, shadow) = (Arc::clone(slot), Arc::clone(&trial));
            let thread = std::thread::Builder::new().name("kvasir-shadow".into());
            let started = thread.spawn(move || run(&slot, &shadow, &heard));
            let started =
                started.map_err(|e| Error::Engine(format!("cannot start the shadow's thread: {e}")))?;
            *trial.thread.lock() = Some(started);
        }
        Ok(trial)
    }

    pub(super) fn seat(&self) -> &Arc<ArcSwap<Version<H>>> {
        &self.seat
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    /// Nobody asks it any more. Waits for the call that its shadow makes, which has a deadline.
    pub(super) fn end(&self) {
        self.ended.store(true, Relaxed);
        if let Some(told) = &self.told {
            let _ = told.try_send(Told::End); // a thread that has more to hear looks at `ended` between
        }
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
        self.version.ready.lock().clear();
        self.version.spares.lock().clear();
    }

    pub(super) fn as_stored(&self) -> StoredTrial {
        StoredTrial { assignment: self.version.assignment.clone(), stage: self.stage }
    }
}

impl<H: Hook> Slot<H> {
    pub fn trial(&self) -> Option<Arc<Trial<H>>> {
        self.trial.load_full()
    }

    /// Puts a policy on trial, in place of one that is there. Blocking, as [`Slot::load`].
    ///
    /// # Errors
    /// As [`Slot::load`], or the slot cannot have such a trial. A trial that is there goes on.
    pub fn load_on_trial(
        self: &Arc<Self>,
        source: Source,
        settings: Settings,
        stage: Stage,
    ) -> Result<(), Error> {
        if let Stage::Canary(share) = stage {
            if let Some(why) = H::NO_CANARY {
                return Err(Error::NoCanary { slot: H::KIND, why });
            }
            share.check(H::KIND)?;
        }
        let code = self.code(source)?;
        let assignment = Assignment { origin: code.origin, settings };
        let workers = self.trial_workers(stage);
        let version = with_room(|| self.prepare_for(workers, code.program.clone(), assignment.clone()))?;
        let _change = self.change.lock();
        self.try_out(version, stage, &code.modules)
    }

    /// Engines made ahead: a shadow has one thread, a canary may be asked by every worker.
    fn trial_workers(&self, stage: Stage) -> usize {
        match stage {
            Stage::Shadow => 1,
            Stage::Active | Stage::Canary(_) => self.workers.load(Relaxed),
        }
    }

    fn try_out(
        self: &Arc<Self>,
        mut version: Version<H>,
        stage: Stage,
        modules: &[Vec<u8>],
    ) -> Result<(), Error> {
        let trial = Some(StoredTrial { assignment: version.assignment.clone(), stage });
        self.store(&Stored { trial, ..self.as_stored() }, modules)?;
        version.generation = self.next_generation();
        let old = self.trial.load_full();
        // Without its thread this trial does not exist, whatever was written.
        let trial = Trial::start(self, version, stage).inspect_err(|_| self.persist())?;
        self.trial.store(Some(Arc::clone(&trial)));
        // How the trial before this one ended would be read as how this one does.
        self.last_trip.lock().clone_from(&self.tripped.lock());
        if let Some(old) = &old {
            old.end();
        }
        self.stock(&trial.version);
        let before = old.as_ref().map(|old| &*old.version);
        self.tell(Action::Tried(stage), Cause::Operator, before, Some(&trial.version), None);
        Ok(())
    }

    /// Goes on with the trial of an earlier run, or says why it cannot.
    pub(super) fn restore_trial(self: &Arc<Self>, stored: StoredTrial) {
        let StoredTrial { assignment, stage } = stored;
        let name = assignment.origin.name().to_owned();
        let program = stored_program::<H>(&self.engine, self.catalog.as_ref(), &assignment.origin);
        let started = program.and_then(|program| {
            let mut version = self.prepare_for(1, program, assignment)?;
            version.generation = self.next_generation();
            Trial::start(self, version, stage)
        });
        let _change = self.change.lock();
        match started {
            Ok(trial) => {
                self.stock(&trial.version);
                self.trial.store(Some(trial));
            }
            Err(error) => {
                let reason = format!("trial of `{name}` ended, for it could not be restored: {error}");
                self.log.add_host(1, &reason);
                self.tell(Action::TrialEnded, Cause::Restart, None, None, Some(reason));
                self.persist();
            }
        }
    }

    /// Brings the policy on trial into service, as any other: with new instances, from the same program.
    ///
    /// # Errors
    /// There is none, it no longer starts, or the catalogue cannot be written. The trial goes on.
    pub fn promote(self: &Arc<Self>) -> Result<Arc<Version<H>>, Error> {
        let _change = self.change.lock();
        let trial = self.trial().ok_or(Error::NoTrial(H::KIND))?;
        let on_trial = &trial.version;
        let version = with_room(|| self.prepare(on_trial.program.clone(), on_trial.assignment.clone()))?;
        self.publish(version, &[], Swap::by_hand(Action::Promoted, Cause::Operator))
    }

    /// Ends the trial. Returns false if there is none. Under the lock of changes.
    pub(super) fn end_trial(self: &Arc<Self>, cause: Cause, why: Option<&str>) -> bool {
        let Some(trial) = self.trial.load_full() else { return false };
        let name = &trial.version.description.name;
        let reason = why.map(|why| format!("trial of `{name}` ended: {why}"));
        if let Some(reason) = &reason {
            self.log.add_host(1, reason);
            *self.last_trip.lock() = Some(reason.clone());
            self.guarded.lock().count(cause);
        }
        self.trial.store(None); // a reader that sees it gone can see why
        trial.end();
        self.persist();
        self.tell(Action::TrialEnded, cause, Some(&trial.version), None, reason);
        true
    }

    /// The trial ends with a swap; the catalogue knows already.
    pub(super) fn drop_trial(&self, swap: &Swap) {
        let Some(trial) = self.trial.swap(None) else { return };
        trial.end();
        if swap.action != Action::Promoted {
            self.tell(Action::TrialEnded, swap.cause, Some(&trial.version), None, None);
        }
    }

    pub fn is_paused(&self) -> bool {
        self.paused.load(Relaxed)
    }

    /// # Errors
    /// The catalogue cannot be written; nothing has changed.
    pub fn set_paused(self: &Arc<Self>, paused: bool) -> Result<(), Error> {
        let _change = self.change.lock();
        if self.is_paused() == paused {
            return Ok(());
        }
        self.store(&Stored { paused, ..self.as_stored() }, &[])?;
        self.paused.store(paused, Relaxed);
        let action = if paused { Action::Paused } else { Action::Resumed };
        let current = self.current();
        self.tell(action, Cause::Operator, Some(&current), Some(&current), None);
        Ok(())
    }

    /// Ends the thread of a shadow, for a host that ends; the catalogue keeps the trial.
    pub fn close(&self) {
        if let Some(trial) = self.trial() {
            trial.end();
        }
    }

    /// One more engine of a version; on the caller's thread.
    ///
    /// # Errors
    /// It cannot be made, or does not start.
    pub fn build(&self, version: &Version<H>) -> Result<Box<H::Engine>, Error> {
        version.build(&self.limits, &self.log)
    }

    /// Whether that generation serves or is on trial.
    pub(super) fn seats(&self, generation: u64) -> bool {
        let on_trial =
            || self.trial.load().as_ref().is_some_and(|trial| trial.version.generation == generation);
        self.current.load().generation == generation || on_trial()
    }
}

/// The trial as a thread saw it last.
type Seen<H> = Cache<Arc<ArcSwapOption<Trial<H>>>, Option<Arc<Trial<H>>>>;

/// One thread's view of a slot's trial. Costs a pointer load while there is none.
pub struct OnTrial<H: Hook> {
    slot: Arc<Slot<H>>,
    cache: Seen<H>,
}

impl<H: Hook> OnTrial<H> {
    pub fn new(slot: &Arc<Slot<H>>) -> Self {
        Self { slot: Arc::clone(slot), cache: Cache::new(Arc::clone(&slot.trial)) }
    }

    /// The policy on trial, unless it must not be asked now.
    fn asked(&mut self) -> Option<&Arc<Trial<H>>> {
        let trial = self.cache.load().as_ref()?;
        (!self.slot.is_paused()).then_some(trial)
    }

    /// Whether there is one, asked or not.
    pub fn is_there(&mut self) -> bool {
        self.cache.load().is_some()
    }

    /// Whether that generation is the one on trial.
    pub fn is_on(&mut self, generation: u64) -> bool {
        self.cache.load().as_ref().is_some_and(|trial| trial.version.generation == generation)
    }

    /// The shadow that hears of the decisions, if there is one.
    pub fn shadow(&mut self) -> Option<&Arc<Trial<H>>> {
        self.asked().filter(|trial| trial.stage == Stage::Shadow)
    }

    /// The canary, if it decides this request.
    pub fn canary(&mut self, subject: &Subject<'_>) -> Option<&Arc<Trial<H>>> {
        let takes = |share: Share| share.takes(H::KIND, subject);
        self.asked().filter(|trial| matches!(trial.stage, Stage::Canary(share) if takes(share)))
    }

    /// A worker of the policy on trial.
    pub fn worker(&self, trial: &Trial<H>) -> Worker<H> {
        Worker::of_trial(&self.slot, &trial.version, &trial.seat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::engine::Engine;
    use crate::policy::scheduler::SchedulerHook;
    use crate::policy::slot::Builder;
    use crate::policy::{PolicyConfig, Share};

    #[test]
    fn what_is_compiled_is_not_compiled_again() {
        let bad = |mode: &str| {
            let bytes = kvasir_tests::guest("scheduler").to_vec();
            let settings = vec![("mode".to_owned(), mode.to_owned())];
            (Source::Bytes { name: "bad".into(), bytes }, settings)
        };
        let (config, builder) = (PolicyConfig::default(), Builder::start().unwrap());
        let engine = Engine::new(&config, None).unwrap();
        let slot = Slot::<SchedulerHook>::open(engine, &config, bad("none"), None, builder).unwrap();
        let first = slot.current().program.clone();
        let (source, settings) = bad("trap");
        let loaded = slot.load(source, settings).unwrap();
        assert!(Arc::ptr_eq(&loaded.program, &first));
        let (source, settings) = bad("none");
        slot.load_on_trial(source, settings, Stage::Canary(Share::Tenant(1))).unwrap();
        assert!(Arc::ptr_eq(&slot.trial().unwrap().version.program, &first));
        assert!(Arc::ptr_eq(&slot.promote().unwrap().program, &first));
        slot.rollback().unwrap();
        assert!(Arc::ptr_eq(&slot.configure(Vec::new()).unwrap().program, &first));
        let other = slot.load(Source::Builtin("random".into()), Vec::new()).unwrap();
        assert!(!Arc::ptr_eq(&other.program, &first));
    }
}
