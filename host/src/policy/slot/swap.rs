//! How another version comes into a slot's service: by an operator, from its trial, back, and by the breaker or a guard.

use super::version::{Code, Program, code, default_native, prepare, stored_program};
use super::{Hook, Previous, Settings, Slot, Source, Version};
use crate::policy::catalog::{Assignment, Origin, Stored};
use crate::policy::{Action, Cause, Error, Fault};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long after a failure the catalogue is written again.
const PERSIST_AGAIN: Duration = Duration::from_secs(5);
/// How long an operator's call waits for instances of policies that were swapped before.
const ROOM_WAIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How often a policy that served before is started once more, if the machine had no time for it.
const TRIES_MORE: usize = 2;

/// Tries again where no instance is free: those that served before are given back beside the traffic, which takes a moment.
pub(super) fn with_room<R>(mut prepare: impl FnMut() -> Result<R, Error>) -> Result<R, Error> {
    let until = Instant::now() + ROOM_WAIT;
    loop {
        match prepare() {
            Err(Error::NoRoom { .. }) if Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
            prepared => return prepared,
        }
    }
}

/// The same for what shall serve again and nobody asked for: a machine that had no time for it may have some the next time.
fn with_time<R>(mut prepare: impl FnMut() -> Result<R, Error>) -> Result<R, Error> {
    for _ in 0..TRIES_MORE {
        match with_room(&mut prepare) {
            Err(Error::Start { fault: Fault::Starved(_), .. }) => {}
            prepared => return prepared,
        }
    }
    with_room(prepare)
}

impl<H: Hook> Slot<H> {
    /// Brings a policy into service. Blocking (compiles): not for the hot path.
    ///
    /// # Errors
    /// Any step failed; the version in service is untouched.
    pub fn load(self: &Arc<Self>, source: Source, settings: Settings) -> Result<Arc<Version<H>>, Error> {
        self.load_for(source, settings, Cause::Operator)
    }

    /// Prepares a policy and gives it up again, to see whether it could serve here, and what it would be stored as.
    ///
    /// # Errors
    /// As [`Slot::load`].
    pub fn resolve(&self, source: Source, settings: Settings) -> Result<Assignment, Error> {
        let code = self.code(source)?;
        let assignment = Assignment { origin: code.origin, settings };
        self.prepare(code.program, assignment).map(|version| version.assignment)
    }

    fn load_for(
        self: &Arc<Self>,
        source: Source,
        settings: Settings,
        cause: Cause,
    ) -> Result<Arc<Version<H>>, Error> {
        let code = self.code(source)?;
        let assignment = Assignment { origin: code.origin, settings };
        // Not under the lock: while this one takes its time, the one that serves may have to go.
        let version = with_room(|| self.prepare(code.program.clone(), assignment.clone()))?;
        let _change = self.change.lock();
        self.publish(version, &code.modules, Swap::by_hand(Action::Loaded, cause))
    }

    /// Loads a component of the watched folder with the settings of the one that serves; with its own defaults if it
    /// refuses those.
    ///
    /// # Errors
    /// As [`Slot::load`], and [`Error::Paused`].
    pub fn load_with_settings_in_service(self: &Arc<Self>, source: Source) -> Result<Arc<Version<H>>, Error> {
        if self.is_paused() {
            return Err(Error::Paused(H::KIND));
        }
        let settings = self.current().assignment.settings.clone();
        if settings.is_empty() {
            return self.load_for(source, settings, Cause::Folder);
        }
        match self.load_for(source.clone(), settings, Cause::Folder) {
            Err(refused @ (Error::Settings { .. } | Error::UnknownSetting { .. })) => {
                self.log.add_host(
                    2,
                    &format!("loaded with its defaults, for it refuses the settings in service: {refused}"),
                );
                self.load_for(source, Vec::new(), Cause::Folder)
            }
            loaded => loaded,
        }
    }

    /// Gives other settings to what serves: the same program, not compiled again.
    ///
    /// # Errors
    /// It refuses them, or the catalogue cannot be written; what serves is untouched.
    pub fn configure(self: &Arc<Self>, settings: Settings) -> Result<Arc<Version<H>>, Error> {
        let _change = self.change.lock();
        let current = self.current();
        let assignment = Assignment { origin: current.assignment.origin.clone(), settings };
        let version = with_room(|| self.prepare(current.program.clone(), assignment.clone()))?;
        self.publish(version, &[], Swap::by_hand(Action::Set, Cause::Operator))
    }

    /// Ends the trial if somebody wanted one; else puts the previous version back, and what served becomes the previous one.
    ///
    /// # Errors
    /// There is neither, the previous one no longer starts, or the catalogue cannot be written.
    pub fn rollback(self: &Arc<Self>) -> Result<(), Error> {
        let _change = self.change.lock();
        let wanted = self.trial().is_some_and(|trial| !trial.by_guard);
        if wanted && self.end_trial(Cause::Operator, None) {
            return Ok(());
        }
        let version = with_room(|| self.prepare_previous())?;
        self.publish(version, &[], Swap::by_hand(Action::RolledBack, Cause::Operator)).map(drop)
    }

    /// Finds and compiles a policy, or takes the program of one that the slot has compiled already.
    pub(super) fn code(&self, source: Source) -> Result<Code<H>, Error> {
        let previous = self.previous.lock().as_ref().and_then(|previous| previous.program.clone());
        let trial = self.trial.load().as_ref().map(|trial| trial.version.program.clone());
        let compiled: Vec<_> =
            [Some(self.current().program.clone()), previous, trial].into_iter().flatten().collect();
        code::<H>(&self.engine, source, &compiled)
    }

    pub(super) fn prepare_previous(&self) -> Result<Version<H>, Error> {
        let previous = self.previous.lock().clone().ok_or(Error::NoPrevious(H::KIND))?;
        let program = match previous.program {
            Some(program) => program,
            None => stored_program(&self.engine, self.catalog.as_ref(), &previous.assignment.origin)?,
        };
        self.prepare(program, previous.assignment)
    }

    pub(super) fn prepare(
        &self,
        program: Arc<Program<H>>,
        assignment: Assignment,
    ) -> Result<Version<H>, Error> {
        self.prepare_for(self.workers.load(Ordering::Relaxed), program, assignment)
    }

    pub(super) fn prepare_for(
        &self,
        workers: usize,
        program: Arc<Program<H>>,
        assignment: Assignment,
    ) -> Result<Version<H>, Error> {
        // This holds for what was compiled long ago, too: its key may be trusted no longer.
        self.engine.gate.check(H::KIND, &assignment.origin)?;
        let unpublished = 0;
        prepare(program, assignment, unpublished, &self.limits, &self.log, &self.config, workers.max(1))
    }

    /// Exchanges the pointer, and writes the catalogue: before, for an operator, who hears that the disk is
    /// full while nothing has changed; after, for a trip, since a broken policy goes whatever the disk does.
    /// The reason of a trip is there before the new version is seen.
    pub(super) fn publish(
        self: &Arc<Self>,
        mut version: Version<H>,
        modules: &[Vec<u8>],
        swap: Swap,
    ) -> Result<Arc<Version<H>>, Error> {
        let old = self.current();
        let previous = swap.trip.is_none().then(|| Previous {
            assignment: old.assignment.clone(),
            name: old.description.name.clone(),
            program: Some(old.program.clone()),
        });
        if swap.trip.is_none() {
            self.store(&stored(&version.assignment, previous.as_ref(), self.is_paused()), modules)?;
        }
        version.generation = self.next_generation();
        let version = Arc::new(version);
        *self.previous.lock() = previous;
        // What somebody brings into service by hand ends the story of what the host did before.
        self.last_trip.lock().clone_from(&swap.trip);
        self.tripped.lock().clone_from(&swap.trip);
        if swap.is_watched() {
            self.guarded.lock().watch(version.generation);
        }
        if let (Action::Promoted, Some(trial)) = (swap.action, self.trial.load_full()) {
            self.promote_knowledge(trial.version.generation, version.generation);
        }
        let mut totals = self.totals.lock();
        self.current.store(version.clone());
        totals.retire(old.counters.clone());
        drop(totals);
        // Unused guests of the old version would keep their memory until its last Arc goes.
        old.ready.lock().clear();
        old.spares.lock().clear();
        self.stock(&version);
        let tripped = swap.trip.is_some();
        if tripped {
            self.persist();
        } else {
            self.drop_trial(&swap);
        }
        self.tell(swap.action, swap.cause, Some(&old), Some(&version), swap.trip);
        Ok(version)
    }

    pub(super) fn next_generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What a restart must know.
    pub(super) fn as_stored(&self) -> Stored {
        let current = self.current().assignment.clone();
        let trial = self.trial.load_full().filter(|trial| !trial.by_guard).map(|trial| trial.as_stored());
        let trip = self.tripped.lock().clone();
        Stored { trip, trial, ..stored(&current, self.previous.lock().as_ref(), self.is_paused()) }
    }

    /// Writes to the catalogue, if there is one, with these components and those that only the configuration named so far.
    ///
    /// # Errors
    /// The catalogue cannot be written.
    pub(super) fn store(&self, stored: &Stored, modules: &[Vec<u8>]) -> Result<(), Error> {
        let Some(catalog) = &self.catalog else { return Ok(()) };
        let mut configured = self.configured.lock();
        let all: Vec<&[u8]> = modules.iter().chain(&*configured).map(Vec::as_slice).collect();
        catalog.assign(H::KIND, stored, &all)?;
        configured.clear();
        Ok(())
    }

    /// Writes the present state to the catalogue. If that fails, tries again later, until it succeeds.
    pub(super) fn persist(self: &Arc<Self>) {
        let Err(error) = self.store(&self.as_stored(), &[]) else { return };
        let name = self.current().description.name.clone();
        self.log.add_host(1, &format!("`{name}` serves, and a restart would not know: {error}"));
        let slot = Arc::downgrade(self);
        self.builder.submit_later(PERSIST_AGAIN, move || {
            if let Some(slot) = slot.upgrade() {
                let _change = slot.change.lock();
                slot.persist();
            }
        });
    }

    /// What the operator set for the slot's default policy, together with the component that served, or in the
    /// configuration.
    fn settings_of_default(&self, serving: &Assignment) -> Settings {
        let default = H::builtins().next().map_or("", |b| b.name);
        match (&serving.origin, &self.wanted) {
            (Origin::Builtin { name } | Origin::Native { name }, _) if name == default => {
                serving.settings.clone()
            }
            (_, (Source::Builtin(name) | Source::Native(name), settings)) if name == default => {
                settings.clone()
            }
            _ => Vec::new(),
        }
    }

    /// Takes generation `broken` out of service: back to the previous version, or to the native twin of the default. A
    /// trial of that generation ends.
    pub(super) fn take_out(self: &Arc<Self>, broken: u64, cause: Cause, why: &str) {
        let _change = self.change.lock();
        if self.trial.load().as_ref().is_some_and(|trial| trial.version.generation == broken) {
            self.end_trial(cause, Some(why));
            return;
        }
        let current = self.current();
        if current.generation != broken {
            return; // replaced meanwhile
        }
        let reason = format!("`{}` taken out of service: {why}", current.description.name);
        self.log.add_host(1, &reason);
        self.guarded.lock().count(cause);
        self.drop_contest();
        let previous = with_time(|| self.prepare_previous());
        if let Err(error) = &previous
            && !matches!(error, Error::NoPrevious(_))
        {
            self.log.add_host(1, &format!("the policy before it does not come back: {error}"));
        }
        let back = previous.ok().or_else(|| {
            let default = |settings| {
                let (program, assignment) = default_native::<H>(settings)?;
                self.prepare(Arc::new(program), assignment).ok()
            };
            default(self.settings_of_default(&current.assignment)).or_else(|| default(Vec::new()))
        });
        let Some(version) = back else { return };
        let serves = format!("{reason}; `{}` serves", version.description.name);
        let swap = Swap { action: Action::RolledBack, cause, trip: Some(serves) };
        if let Err(e) = self.publish(version, &[], swap) {
            self.log.add_host(1, &format!("breaker: {e}"));
        }
    }
}

/// Why another version comes into service.
pub(super) struct Swap {
    pub(super) action: Action,
    pub(super) cause: Cause,
    /// Why the host did it by itself.
    trip: Option<String>,
}

impl Swap {
    pub(super) fn by_hand(action: Action, cause: Cause) -> Self {
        Self { action, cause, trip: None }
    }

    /// What was put back has served before.
    fn is_watched(&self) -> bool {
        self.trip.is_none() && self.action != Action::RolledBack
    }
}

/// Without a trial, and as if brought into service by a person.
fn stored<H: Hook>(current: &Assignment, previous: Option<&Previous<H>>, paused: bool) -> Stored {
    Stored {
        current: current.clone(),
        previous: previous.map(|p| p.assignment.clone()),
        previous_name: previous.map(|p| p.name.clone()),
        trip: None,
        trial: None,
        paused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_waits_for_instances_that_are_about_to_be_given_back_and_for_nothing_else() {
        let no_room = || Error::NoRoom { name: "p".into(), reason: "all are taken".into() };
        let mut answers = vec![Ok(7), Err(no_room()), Err(no_room())];
        assert_eq!(with_room(|| answers.pop().unwrap()).unwrap(), 7);
        let mut asked = 0;
        let refused = with_room(|| -> Result<(), Error> {
            asked += 1;
            Err(Error::NoPrevious(crate::policy::SlotKind::Evictor))
        });
        assert!(matches!(refused, Err(Error::NoPrevious(_))));
        assert_eq!(asked, 1);
    }

    #[test]
    fn what_comes_back_is_tried_again_on_a_machine_that_had_no_time_but_not_for_ever() {
        let start = |fault| Error::Start { name: "p".into(), step: "open", fault };
        let starved = || start(Fault::Starved(Duration::from_secs(5)));
        let mut answers = vec![Ok(7), Err(starved()), Err(starved())];
        assert_eq!(with_time(|| answers.pop().unwrap()).unwrap(), 7);
        let tried = |fault: Fault| {
            let mut tried = 0;
            let refused = with_time(|| -> Result<(), Error> {
                tried += 1;
                Err(start(fault.clone()))
            });
            assert!(refused.is_err());
            tried
        };
        assert_eq!(tried(Fault::Starved(Duration::from_secs(5))), 1 + TRIES_MORE);
        assert_eq!(tried(Fault::Trap("it is broken".into())), 1);
    }
}
