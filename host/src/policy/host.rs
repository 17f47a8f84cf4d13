//! The four slots of one daemon behind one door: load, rollback, list, workers.

use super::admitter::AdmitterHook;
use super::balancer::BalancerHook;
use super::catalog::Catalog;
use super::chain::PartSaid;
use super::evictor::EvictorHook;
use super::guards::Looking;
use super::log::Log;
use super::record::Record;
use super::scheduler::{SchedulerHook, SharedThresholds};
use super::slot::{
    Builder, Hook, Learning, LearningStatus, News, Outcomes, Serving, Slot, Source, Trial, Version,
};
use super::{
    AdmitterWorker, Assignment, BalancerWorker, CounterValues, Engine, Error, EvictorWorker, Guard,
    GuardConfig, Listener, LogLine, LogPage, PolicyConfig, PolicyId, SchedulerWorker, SlotKind, Stage,
    TrialStatus, WatchStatus, watch,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Policies wanted at start, where nothing is stored: source and settings per slot.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub scheduler: (Source, Settings),
    pub evictor: (Source, Settings),
    pub admitter: (Source, Settings),
    pub balancer: (Source, Settings),
}

type Settings = Vec<(String, String)>;

impl Default for Wanted {
    /// The default policies of this binary.
    fn default() -> Self {
        fn first<H: Hook>() -> (Source, Settings) {
            let name = H::builtins().next().map_or("", |b| b.name);
            (Source::Builtin(name.into()), Vec::new())
        }
        Self {
            scheduler: first::<SchedulerHook>(),
            evictor: first::<EvictorHook>(),
            admitter: first::<AdmitterHook>(),
            balancer: first::<BalancerHook>(),
        }
    }
}

/// What serves one slot, and how it does.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SlotStatus {
    pub slot: String,
    pub name: String,
    pub version: String,
    /// `wasm` or `native`.
    pub engine: &'static str,
    /// SHA-256 of the component; `None` for native.
    pub digest: Option<String>,
    pub generation: u64,
    pub settings: Vec<(String, String)>,
    /// What a rollback would bring back.
    pub previous: Option<String>,
    /// Why the breaker or a guard last took a policy out of service, or ended a trial, if nobody brought another into service since.
    pub last_trip: Option<String>,
    /// Counts of this version.
    pub counters: CounterValues,
    /// Counts of all versions since the host started; the mean time is this version's.
    pub totals: CounterValues,
    /// What the linear memories of all its instances take now, and the most that one instance may take.
    pub memory_bytes: u64,
    pub memory_bytes_max: u64,
    /// Whether its policies can learn from what came of requests.
    pub has_outcomes: bool,
    pub learning: LearningStatus,
    /// The policy on trial beside it.
    pub trial: Option<TrialStatus>,
    /// The trial is not asked, and nothing is swapped but by an operator, or by a guard that puts a policy back.
    pub paused: bool,
    /// The policy came into service a short while ago.
    pub watch: Option<WatchStatus>,
    /// It is watched, or will be from the next look of the guards on.
    pub watched: bool,
    /// Policies that a guard took out of service or ended the trial of, since the host started; in the order of
    /// [`Guard::ALL`].
    pub guard_rollbacks: [u64; Guard::ALL.len()],
    /// The same by the breaker.
    pub breaker_trips: u64,
}

/// The policy host of one daemon.
pub struct PolicyHost {
    scheduler: Arc<Slot<SchedulerHook>>,
    evictor: Arc<Slot<EvictorHook>>,
    admitter: Arc<Slot<AdmitterHook>>,
    balancer: Arc<Slot<BalancerHook>>,
    thresholds: SharedThresholds,
    outcomes: Outcomes,
    learning: Mutex<Vec<Learning>>,
    /// Loads under way: each holds its component in memory, and they are compiled one by one.
    loads: AtomicUsize,
    changing_settings: Mutex<()>,
    guard: GuardConfig,
    looking: Mutex<Option<Looking>>,
}

/// Loads under way at once.
pub const LOADS_MAX: usize = 8;

impl PolicyHost {
    /// Restores the stored assignments from `state` (a database and its folder), or brings `wanted`
    /// into service; then watches the configured folder.
    ///
    /// # Errors
    /// A wanted policy does not start, or the database or engine cannot be used.
    pub fn open(
        config: &PolicyConfig,
        wanted: Wanted,
        state: Option<(kvasir_state_db::Db, &std::path::Path)>,
    ) -> Result<Arc<Self>, Error> {
        let engine = Engine::new(config, config.cache_dir.as_deref())?;
        let catalog = state.map(|(db, path)| Catalog::open(db, path)).transpose()?;
        let builder = Builder::start;
        let scheduler = Slot::open(engine.clone(), config, wanted.scheduler, catalog.clone(), builder()?)?;
        let evictor = Slot::open(engine.clone(), config, wanted.evictor, catalog.clone(), builder()?)?;
        let admitter = Slot::open(engine.clone(), config, wanted.admitter, catalog.clone(), builder()?)?;
        let balancer = Slot::open(engine, config, wanted.balancer, catalog, builder()?)?;
        let every = config.learn_every;
        let learning = vec![Learning::start(&scheduler, every)?, Learning::start(&admitter, every)?];
        let slots = (scheduler.clone(), evictor.clone(), admitter.clone(), balancer.clone());
        // Not by way of the host, which could then end on the guards' thread.
        let look = move |now_ms| {
            let (scheduler, evictor, admitter, balancer) = &slots;
            scheduler.judge(now_ms);
            evictor.judge(now_ms);
            admitter.judge(now_ms);
            balancer.judge(now_ms);
        };
        let every = Some(config.guard.every).filter(|every| !every.is_zero());
        let looking = every.map(|every| Looking::start(every, look)).transpose()?;
        let host = Arc::new(Self {
            looking: Mutex::new(looking),
            outcomes: Outcomes::new([scheduler.feeds(), admitter.feeds()].into_iter().flatten()),
            learning: Mutex::new(learning),
            loads: AtomicUsize::new(0),
            changing_settings: Mutex::default(),
            guard: config.guard.clone(),
            scheduler,
            evictor,
            admitter,
            balancer,
            thresholds: SharedThresholds::default(),
        });
        if let Some(folder) = &config.watch_dir {
            watch::start(&host, folder.clone())?;
        }
        Ok(host)
    }

    /// Where the conductor tells what came of requests.
    pub fn outcomes(&self) -> Outcomes {
        self.outcomes.clone()
    }

    /// Ends learning, and keeps what was learned; ends the threads of shadows and guards. Blocking, for at most the cold deadline of a
    /// slot.
    pub fn close(&self) {
        drop(self.looking.lock().take());
        self.learning.lock().clear();
        self.slots().for_each(|slot| slot.close());
    }

    /// Verifies, compiles, instantiates, configures and publishes a policy. Blocking.
    ///
    /// # Errors
    /// Any step failed; the policy in service is untouched.
    pub fn load(
        &self,
        slot: SlotKind,
        source: Source,
        settings: Vec<(String, String)>,
    ) -> Result<SlotStatus, Error> {
        self.load_as(slot, source, settings, Stage::Active)
    }

    /// The same for a trial; a trial that is there is replaced by it. [`Stage::Active`] ends the trial. Blocking.
    ///
    /// # Errors
    /// As [`PolicyHost::load`], and the slot cannot have such a trial.
    pub fn load_as(
        &self,
        slot: SlotKind,
        source: Source,
        settings: Vec<(String, String)>,
        stage: Stage,
    ) -> Result<SlotStatus, Error> {
        let under_way = self.loads.fetch_add(1, Ordering::Relaxed);
        let loaded = if under_way < LOADS_MAX {
            self.slot(slot).load(source, settings, stage)
        } else {
            Err(Error::Busy { limit: LOADS_MAX })
        };
        self.loads.fetch_sub(1, Ordering::Relaxed);
        loaded
    }

    /// Changes settings of what serves: adds those of `set`, and takes out those of `unset`. A stage other than active leaves what
    /// serves as it is, and puts the same policy with the other settings on trial. Nothing is compiled. Blocking.
    ///
    /// # Errors
    /// As [`PolicyHost::load_as`]; or the call unsets a setting that is not set.
    pub fn change_settings(
        &self,
        slot: SlotKind,
        set: Settings,
        unset: &[String],
        stage: Stage,
    ) -> Result<SlotStatus, Error> {
        // One after the other, so that none overlooks what another set.
        let _changing = self.changing_settings.lock();
        let Assignment { settings: before, .. } = self.slot(slot).assignment();
        let settings = merged(slot, before.clone(), set, unset)?;
        if stage == Stage::Active {
            // A swap for nothing would make it its own predecessor, to which a rollback goes.
            return if settings == before { Ok(self.status(slot)) } else { self.configure(slot, settings) };
        }
        self.load_as(slot, self.serving(slot, false)?.source, settings, stage)
    }

    /// Gives what serves a slot other settings, all of them; nothing is compiled. Blocking.
    ///
    /// # Errors
    /// The policy refuses them, or the catalogue cannot be written; what serves is untouched.
    pub fn configure(&self, slot: SlotKind, settings: Vec<(String, String)>) -> Result<SlotStatus, Error> {
        self.slot(slot).configure(settings)
    }

    /// Brings the policy on trial into service. Blocking.
    ///
    /// # Errors
    /// There is none, or it no longer starts.
    pub fn promote(&self, slot: SlotKind) -> Result<SlotStatus, Error> {
        self.slot(slot).promote()
    }

    /// Leaves the trial of a slot unasked, and swaps nothing in it but by an operator, or by a guard that puts a
    /// policy back. Kept over restarts.
    ///
    /// # Errors
    /// The catalogue cannot be written.
    pub fn pause(&self, slot: SlotKind) -> Result<SlotStatus, Error> {
        self.slot(slot).set_paused(true)?;
        Ok(self.status(slot))
    }

    /// # Errors
    /// As [`PolicyHost::pause`].
    pub fn resume(&self, slot: SlotKind) -> Result<SlotStatus, Error> {
        self.slot(slot).set_paused(false)?;
        Ok(self.status(slot))
    }

    /// Has every change of a slot told to `listener`, those before it first. One listener: a second takes its place.
    pub fn on_change(&self, listener: Listener) {
        let listener = Arc::from(listener);
        self.slots().for_each(|slot| slot.news().listen(Arc::clone(&listener)));
    }

    /// For how long a policy that came into service is watched.
    pub fn watch(&self) -> std::time::Duration {
        self.guard.watch
    }

    /// Has the guards look at `now_ms`, on a clock that does not go back. The host does so itself every
    /// [`GuardConfig::every`], unless that is zero.
    pub fn judge(&self, now_ms: u64) {
        self.slots().for_each(|slot| slot.judge(now_ms));
    }

    /// Has learners hear what came of requests until `now_ms`, on a clock that began with the host and does not go back. The host
    /// does so itself every [`PolicyConfig::learn_every`], unless that is zero.
    pub fn learn(&self, now_ms: u64) {
        self.learning.lock().iter_mut().for_each(|learning| learning.turn(now_ms));
    }

    /// What the guards allow.
    pub fn guards(&self) -> &GuardConfig {
        &self.guard
    }

    /// Ends the trial of a slot if there is one (the generation stays); else puts the previous policy back into
    /// service. Blocking.
    ///
    /// # Errors
    /// There is neither, or the previous one no longer starts.
    pub fn rollback(&self, slot: SlotKind) -> Result<SlotStatus, Error> {
        self.slot(slot).rollback()?;
        Ok(self.status(slot))
    }

    /// What another instance of the scheduler of that generation makes of a decision, if it serves still: nothing
    /// that decides is touched. Blocking, for as long as a few cold calls.
    pub fn ask_again(&self, record: &Record, generation: u64) -> Option<Again> {
        let mut engine = self.scheduler.engine_of(generation)?;
        let played = record.play::<SchedulerHook>(&mut *engine, true).ok()?;
        let scores = played.scores.iter().copied().map(f32::from_bits).collect();
        Some(Again { scores, parts: played.parts, same: played.answer == record.answer })
    }

    /// What serves a slot, with its code; that of default policies only if it is asked for. Blocking.
    ///
    /// # Errors
    /// The catalogue cannot be read, or the file that the configuration names is no longer what serves.
    pub fn serving(&self, slot: SlotKind, builtins_as_components: bool) -> Result<Serving, Error> {
        self.slot(slot).serving(builtins_as_components)
    }

    /// Whether exactly this policy serves, with these settings.
    pub fn serves(&self, slot: SlotKind, assignment: &Assignment) -> bool {
        self.slot(slot).serves(assignment)
    }

    /// Tries whether a policy could be brought into service, and returns what it would be stored as. Blocking.
    ///
    /// # Errors
    /// As [`PolicyHost::load`].
    pub fn resolve(
        &self,
        slot: SlotKind,
        source: Source,
        settings: Vec<(String, String)>,
    ) -> Result<Assignment, Error> {
        self.slot(slot).resolve(source, settings)
    }

    fn slot(&self, kind: SlotKind) -> &dyn AnySlot {
        match kind {
            SlotKind::Scheduler => &self.scheduler,
            SlotKind::Evictor => &self.evictor,
            SlotKind::Admitter => &self.admitter,
            SlotKind::Balancer => &self.balancer,
        }
    }

    fn slots(&self) -> impl Iterator<Item = &dyn AnySlot> {
        SlotKind::ALL.into_iter().map(|kind| self.slot(kind))
    }

    pub fn list(&self) -> Vec<SlotStatus> {
        SlotKind::ALL.map(|slot| self.status(slot)).into()
    }

    pub fn status(&self, slot: SlotKind) -> SlotStatus {
        self.slot(slot).status()
    }

    /// What the policies of a slot logged, oldest first, and how many lines were dropped.
    pub fn logs(&self, slot: SlotKind) -> (Vec<LogLine>, u64) {
        self.slot(slot).log().read()
    }

    /// What they logged behind line `after`. 0 means all that is kept.
    pub fn log_page(&self, slot: SlotKind, after: u64) -> LogPage {
        self.slot(slot).log().page(after)
    }

    /// As [`PolicyHost::load`], with the settings that serve.
    pub(super) fn load_watched(&self, slot: SlotKind, source: Source) -> Result<SlotStatus, Error> {
        self.slot(slot).load_with_settings_in_service(source)?;
        Ok(self.status(slot))
    }

    pub(super) fn is_paused(&self, slot: SlotKind) -> bool {
        self.slot(slot).is_paused()
    }

    pub(super) fn was_restored(&self, slot: SlotKind) -> bool {
        self.slot(slot).was_restored()
    }

    pub(super) fn log(&self, slot: SlotKind, text: &str) {
        self.slot(slot).log().add_host(1, text);
    }

    /// A scheduler for one thread.
    pub fn scheduler_worker(&self) -> SchedulerWorker {
        SchedulerWorker::new(&self.scheduler, self.thresholds.clone())
    }

    /// Sets the thresholds every scheduler reads from its next decision on; empty keeps them.
    pub fn set_thresholds(&self, values: Vec<f32>) {
        if !values.is_empty() && **self.thresholds.load() != values {
            self.thresholds.store(Arc::new(values));
        }
    }

    /// The evictor of one pool with that many block slots, for its owner thread.
    pub fn evictor_worker(&self, slots: u32) -> EvictorWorker {
        EvictorWorker::new(&self.evictor, slots)
    }

    /// An admitter for one thread.
    pub fn admitter_worker(&self) -> AdmitterWorker {
        AdmitterWorker::new(&self.admitter)
    }

    /// The balancer, for the thread that ticks.
    pub fn balancer_worker(&self) -> BalancerWorker {
        BalancerWorker::new(&self.balancer)
    }
}

/// What an instance that was asked again says of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Again {
    /// Unchecked. Empty means that it gives none.
    pub scores: Vec<f32>,
    /// What the filters and scorers of a chain say.
    pub parts: Vec<PartSaid>,
    /// Whether it decides as it did then.
    pub same: bool,
}

impl Drop for PolicyHost {
    fn drop(&mut self) {
        self.close();
    }
}

/// `settings` with some changed and some left out.
fn merged(
    slot: SlotKind,
    mut settings: Settings,
    set: Settings,
    unset: &[String],
) -> Result<Settings, Error> {
    for name in unset {
        let Some(at) = settings.iter().position(|(set, _)| set == name) else {
            let set: Vec<_> = settings.iter().map(|(name, _)| name.as_str()).collect();
            let set = if set.is_empty() { "none".to_owned() } else { set.join(", ") };
            return Err(Error::NotSet { slot, setting: name.clone(), set });
        };
        settings.remove(at);
    }
    for (name, value) in set {
        match settings.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => settings.push((name, value)),
        }
    }
    Ok(settings)
}

/// A slot, whatever its hook.
trait AnySlot {
    fn load(&self, source: Source, settings: Settings, stage: Stage) -> Result<SlotStatus, Error>;
    fn configure(&self, settings: Settings) -> Result<SlotStatus, Error>;
    fn promote(&self) -> Result<SlotStatus, Error>;
    fn set_paused(&self, paused: bool) -> Result<(), Error>;
    fn is_paused(&self) -> bool;
    fn judge(&self, now_ms: u64);
    fn close(&self);
    fn news(&self) -> &News;
    fn load_with_settings_in_service(&self, source: Source) -> Result<(), Error>;
    fn rollback(&self) -> Result<(), Error>;
    fn resolve(&self, source: Source, settings: Settings) -> Result<Assignment, Error>;
    fn serves(&self, assignment: &Assignment) -> bool;
    fn serving(&self, builtins_as_components: bool) -> Result<Serving, Error>;
    fn was_restored(&self) -> bool;
    fn log(&self) -> &Log;
    fn status(&self) -> SlotStatus;
    /// What serves, and its settings.
    fn assignment(&self) -> Assignment;
}

impl<H: Hook> AnySlot for Arc<Slot<H>> {
    fn load(&self, source: Source, settings: Settings, stage: Stage) -> Result<SlotStatus, Error> {
        match stage {
            Stage::Active => Slot::load(self, source, settings).map(|newcomer| status_with(self, &newcomer)),
            Stage::Shadow | Stage::Canary(_) => {
                self.load_on_trial(source, settings, stage).map(|()| self.status())
            }
        }
    }

    fn configure(&self, settings: Settings) -> Result<SlotStatus, Error> {
        Slot::configure(self, settings).map(|newcomer| status_with(self, &newcomer))
    }

    fn promote(&self) -> Result<SlotStatus, Error> {
        Slot::promote(self).map(|newcomer| status_with(self, &newcomer))
    }

    fn set_paused(&self, paused: bool) -> Result<(), Error> {
        Slot::set_paused(self, paused)
    }

    fn is_paused(&self) -> bool {
        Slot::is_paused(self)
    }

    fn judge(&self, now_ms: u64) {
        Slot::judge(self, now_ms);
    }

    fn close(&self) {
        Slot::close(self);
    }

    fn news(&self) -> &News {
        &self.news
    }

    fn load_with_settings_in_service(&self, source: Source) -> Result<(), Error> {
        Slot::load_with_settings_in_service(self, source).map(drop)
    }

    fn rollback(&self) -> Result<(), Error> {
        Slot::rollback(self)
    }

    fn resolve(&self, source: Source, settings: Settings) -> Result<Assignment, Error> {
        Slot::resolve(self, source, settings)
    }

    fn serves(&self, assignment: &Assignment) -> bool {
        self.current().assignment == *assignment
    }

    fn serving(&self, builtins_as_components: bool) -> Result<Serving, Error> {
        Slot::serving(self, builtins_as_components)
    }

    fn was_restored(&self) -> bool {
        Slot::was_restored(self)
    }

    fn log(&self) -> &Log {
        &self.log
    }

    fn assignment(&self) -> Assignment {
        self.current().assignment.clone()
    }

    fn status(&self) -> SlotStatus {
        status_with(self, &self.current())
    }
}

/// The status of a slot with that version in service. One that has just been put there may be gone again: who asked for it is
/// told of it nevertheless, with what took it out.
fn status_with<H: Hook>(slot: &Slot<H>, version: &Version<H>) -> SlotStatus {
    let digest = version.digest();
    let (guard_rollbacks, breaker_trips) = slot.guarded().rollbacks();
    let watched = slot.is_watched();
    SlotStatus {
        slot: H::KIND.to_string(),
        name: version.description.name.clone(),
        version: version.description.version.clone(),
        engine: if digest.is_some() { "wasm" } else { "native" },
        digest: digest.map(|d| d.to_string()),
        generation: version.generation,
        settings: version.assignment.settings.clone(),
        previous: slot.previous(),
        last_trip: slot.last_trip(),
        counters: version.counters.values(),
        totals: slot.totals(),
        memory_bytes: slot.memory_in_use() as u64,
        memory_bytes_max: slot.memory_bytes_max() as u64,
        has_outcomes: H::KIND.has_outcomes(),
        learning: slot.learning().0,
        trial: slot.trial().map(|trial| trial_status(slot, &trial)),
        paused: slot.is_paused(),
        watch: slot.guarded().watch_status(version.generation),
        watched,
        guard_rollbacks,
        breaker_trips,
    }
}

fn trial_status<H: Hook>(slot: &Slot<H>, trial: &Trial<H>) -> TrialStatus {
    let PolicyId { name, version, digest, generation, settings } = trial.version.id();
    TrialStatus {
        name,
        version,
        engine: if digest.is_some() { "wasm" } else { "native" },
        digest,
        generation,
        settings,
        stage: trial.stage,
        counters: trial.version.counters.values(),
        agreement: trial.tally.agreement(),
        dropped: trial.tally.dropped(),
        window: slot.guarded().trial_window(generation),
        learning: slot.learning().1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_changed_added_and_left_out() {
        let list = |settings: &[(&str, &str)]| -> Settings {
            settings.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        let change = |set: &[(&str, &str)], unset: &[&str]| {
            let unset: Vec<_> = unset.iter().map(|&name| name.to_owned()).collect();
            merged(SlotKind::Evictor, list(&[("a", "1"), ("b", "2")]), list(set), &unset)
        };
        assert_eq!(change(&[("b", "3"), ("c", "4")], &["a"]).unwrap(), list(&[("b", "3"), ("c", "4")]));
        assert_eq!(change(&[("a", "5")], &["a"]).unwrap(), list(&[("b", "2"), ("a", "5")]));
        assert_eq!(change(&[], &[]).unwrap(), list(&[("a", "1"), ("b", "2")]));
        let error = change(&[], &["x"]).unwrap_err().to_string();
        assert_eq!(error, "evictor has no setting `x` that could be unset; set are: a, b");
    }
}
