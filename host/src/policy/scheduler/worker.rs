//! The scheduler of one thread: an instance of the active policy, and one of a canary if there is one.

use super::shadow::Heard;
use super::{SchedulerEngine, SchedulerHook, push};
use crate::fleet::{Changes, Fleet, Outlook, Recent, Told};
use crate::policy::record::PolicyOf;
use crate::policy::slot::{OnTrial, Slot, Trial, Version, Worker};
use crate::policy::{Fault, Subject};
use arc_swap::ArcSwap;
use kvasir_policy::scheduler::{Decision, Question, Reason, Request};
use std::sync::Arc;

/// A decision and who made it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub decision: Decision,
    /// Why the native twin decided instead of the policy.
    pub fallback: Option<Fault>,
    /// Generation of the policy that decided.
    pub generation: u64,
    pub seat: Seat,
}

/// Which policy of a slot decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    Active,
    /// The canary.
    Trial,
}

/// Thresholds in force, shared by the balancer that sets them and the schedulers that read them.
pub type SharedThresholds = Arc<ArcSwap<Vec<f32>>>;

/// The scheduler of one thread. Its calls never fail outward.
pub struct SchedulerWorker {
    active: Seated,
    trial: OnTrial<SchedulerHook>,
    canary: Option<Seated>,
    /// The canary decides the request at hand.
    asks_canary: bool,
    thresholds: SharedThresholds,
    /// What changed in the tables lately, for decisions that can be explained.
    recent: Option<Recent>,
}

impl SchedulerWorker {
    pub(in crate::policy) fn new(slot: &Arc<Slot<SchedulerHook>>, thresholds: SharedThresholds) -> Self {
        let active = Seated::new(slot.worker(), thresholds.clone());
        Self { active, trial: OnTrial::new(slot), canary: None, asks_canary: false, thresholds, recent: None }
    }

    /// Begins to keep what changes in the tables, for [`Self::recent`].
    pub fn keep_recent(&mut self) {
        self.recent = Some(Recent::default());
    }

    /// What changed in the tables since that was cleared, and the tables whole.
    pub fn recent(&mut self) -> Option<(&mut Recent, &Told)> {
        self.recent.as_mut().map(|recent| (recent, &self.active.told))
    }

    /// What decided, as it is recorded.
    pub fn record_of(&self, outcome: &Outcome) -> PolicyOf {
        PolicyOf::from(self.version_of(outcome))
    }

    /// The thresholds, and what its learner published, by which the engine decided.
    pub fn known(&mut self, outcome: &Outcome) -> (Arc<Vec<f32>>, Option<Arc<[u8]>>) {
        let seated = match (outcome.seat, &mut self.canary) {
            (Seat::Trial, Some(canary)) => canary,
            _ => &mut self.active,
        };
        let thresholds = seated.thresholds_seen.clone().unwrap_or_else(|| seated.thresholds.load_full());
        (thresholds, seated.worker.knowledge())
    }

    /// Decides one request by the active policy, where nobody else touches the tables.
    pub fn schedule(&mut self, fleet: &Fleet, question: &Question) -> Outcome {
        self.asks_canary = false;
        self.active.catch_up(fleet, self.recent.as_mut());
        self.decide(question)
    }

    /// Copies what changed in the tables, for the request of `subject`; no policy is called, so this may stand under their
    /// lock.
    pub fn catch_up(&mut self, fleet: &Fleet, subject: &Subject<'_>) {
        self.active.catch_up(fleet, self.recent.as_mut());
        let canary = self.trial.canary(subject).cloned();
        self.asks_canary = canary.is_some();
        if let Some(trial) = canary {
            self.canary_of(&trial).catch_up(fleet, None);
        }
    }

    fn canary_of(&mut self, trial: &Trial<SchedulerHook>) -> &mut Seated {
        let kept = self.canary.take().filter(|kept| kept.generation() == trial.version.generation);
        let new = || Seated::new(self.trial.worker(trial), self.thresholds.clone());
        self.canary.insert(kept.unwrap_or_else(new))
    }

    /// Decides one request on what was caught up: pushes that to the engine, asks it and checks the answer. The active policy
    /// decides what a canary does not answer, and the native twin decides after any fault of the active policy.
    pub fn decide(&mut self, question: &Question) -> Outcome {
        if let Some(canary) = self.canary.as_mut().filter(|_| self.asks_canary) {
            canary.refresh();
            if let Ok(decision) = canary.ask(question)
                && !keeps_out(&decision, question)
            {
                let generation = canary.generation();
                return Outcome { decision, fallback: None, generation, seat: Seat::Trial };
            }
            canary.version().counters.fallback();
        }
        self.active.refresh();
        match self.active.ask(question) {
            Ok(decision) if keeps_out(&decision, question) => self.overrule(decision, question),
            Ok(decision) => self.outcome(decision, None),
            Err(fault) => self.decide_natively(question, fault),
        }
    }

    fn outcome(&self, decision: Decision, fallback: Option<Fault>) -> Outcome {
        Outcome { decision, fallback, generation: self.active.generation(), seat: Seat::Active }
    }

    /// Takes up a newer version of the policy or a rebuilt engine, if there is one, and lets go of a canary that ended.
    pub fn refresh(&mut self) {
        self.active.refresh();
        let trial = &mut self.trial;
        self.canary.take_if(|canary| !trial.is_on(canary.generation()));
    }

    /// Has the native twin decide on what was caught up, and counts it.
    pub fn decide_natively(&mut self, question: &Question, why: Fault) -> Outcome {
        let decision = self.active.native(question);
        self.outcome(decision, Some(why))
    }

    /// The native twin places what the policy rejected, unless it sees no room either.
    fn overrule(&mut self, decision: Decision, question: &Question) -> Outcome {
        match self.active.native(question) {
            placed @ Decision::Run(_) => self.outcome(placed, Some(Fault::Overruled)),
            Decision::Reject { .. } => self.outcome(decision, None),
        }
    }

    /// Counts what came of a decision: placed (`hit_blocks` of its `blocks` are stored there, and what was forecast), or not.
    pub fn decided(&mut self, outcome: &Outcome, placed: Option<(u64, u64)>, outlook: Option<&Outlook>) {
        if outcome.fallback.is_some() {
            return;
        }
        let is_compared = self.trial.is_there();
        let decided = &self.version_of(outcome).counters.decided;
        match placed {
            Some((blocks, hit_blocks)) => decided.placed(blocks, hit_blocks),
            None => decided.rejected(),
        }
        if let Some(outlook) = outlook.filter(|_| is_compared) {
            decided.forecast(outlook);
        }
    }

    /// Tells a shadow, if there is one, what was decided, and on which tables.
    pub fn tell_shadow(&mut self, question: &Question, outcome: &Outcome, blocks: u64) {
        if outcome.fallback.is_some() {
            return;
        }
        let (told, thresholds) = (&self.active.told, &self.thresholds);
        if let Some(shadow) = self.trial.shadow() {
            shadow.tell(|| Heard {
                question: question.clone(),
                told: told.clone(),
                thresholds: thresholds.load_full(),
                decision: outcome.decision,
                blocks,
            });
        }
    }

    /// The scores of the policy that decides, on what was caught up, for `kvasir explain`; empty if it gives none.
    pub fn explain(&mut self, question: &Question) -> Vec<f32> {
        match self.canary.as_mut().filter(|_| self.asks_canary) {
            Some(canary) => canary.explain(question),
            None => self.active.explain(question),
        }
    }

    /// Name of the policy in service.
    pub fn policy(&self) -> &str {
        &self.active.version().description.name
    }

    /// Calls of the policy in service, by all workers.
    #[cfg(test)]
    pub(crate) fn calls(&self) -> u64 {
        self.active.version().counters.values().calls
    }

    /// Name of the policy that decided.
    pub fn policy_of(&self, outcome: &Outcome) -> &str {
        &self.version_of(outcome).description.name
    }

    fn version_of(&self, outcome: &Outcome) -> &Version<SchedulerHook> {
        match (outcome.seat, &self.canary) {
            (Seat::Trial, Some(canary)) => canary.version(),
            _ => self.active.version(),
        }
    }
}

/// An instance and what it was told.
struct Seated {
    worker: Worker<SchedulerHook>,
    told: Told,
    /// The part of it that the engine has not been given yet.
    pending: Option<Changes>,
    thresholds: SharedThresholds,
    thresholds_seen: Option<Arc<Vec<f32>>>,
}

impl Seated {
    fn new(worker: Worker<SchedulerHook>, thresholds: SharedThresholds) -> Self {
        Self { worker, told: Told::default(), pending: None, thresholds, thresholds_seen: None }
    }

    /// The few rows that changed are also noted in `recent`.
    fn catch_up(&mut self, fleet: &Fleet, recent: Option<&mut Recent>) {
        let Some(changes) = self.told.catch_up(fleet) else { return };
        if let Some(recent) = recent {
            recent.note(&changes);
        }
        // Two steps become one: everything as it is now.
        let behind = self.pending.is_some();
        self.pending = Some(if behind { self.told.all() } else { changes });
    }

    fn ask(&mut self, question: &Question) -> Result<Decision, Fault> {
        self.push_pending()?;
        let told = &self.told;
        self.worker.ask(|engine| checked(engine, told, question))
    }

    fn refresh(&mut self) {
        if self.worker.refresh() {
            self.pending = Some(self.told.all());
            self.thresholds_seen = None;
        }
    }

    fn push_pending(&mut self) -> Result<(), Fault> {
        let Self { worker, pending, thresholds, thresholds_seen, .. } = self;
        worker.tell(|engine| {
            if let Some(changes) = pending.take() {
                push(engine, &changes)?;
            }
            let thresholds = thresholds.load();
            if thresholds_seen.as_ref().is_none_or(|seen| !Arc::ptr_eq(seen, &thresholds)) {
                engine.set_thresholds(&thresholds)?;
                *thresholds_seen = Some(thresholds.clone());
            }
            Ok(())
        })
    }

    fn native(&mut self, question: &Question) -> Decision {
        let no_instance = Decision::reject(Reason::NoInstance, 1_000);
        let Some(native) = self.worker.twin() else { return no_instance };
        // This is rare enough to tell it everything, rather than to keep a cursor for it.
        let told = push(native, &self.told.all());
        let told = told.and_then(|()| native.set_thresholds(&self.thresholds.load()));
        let answer = told.and_then(|()| native.schedule(question));
        let decision = answer.unwrap_or(no_instance);
        if self.told.check(&decision, question.candidates()).is_ok() { decision } else { no_instance }
    }

    fn explain(&mut self, question: &Question) -> Vec<f32> {
        self.refresh();
        let pushed = self.push_pending();
        let told = &self.told;
        let scores = pushed.and_then(|()| {
            self.worker.tell(|engine| {
                let scores = engine.explain(question)?;
                let checked = told.check_scores(&scores);
                checked.map(|()| scores).map_err(|invalid| Fault::Invalid(invalid.to_string()))
            })
        });
        scores.unwrap_or_default()
    }

    fn version(&self) -> &Arc<Version<SchedulerHook>> {
        self.worker.version()
    }

    fn generation(&self) -> u64 {
        self.version().generation
    }
}

/// Whether a request is rejected that must run.
fn keeps_out(decision: &Decision, question: &Question) -> bool {
    matches!(decision, Decision::Reject { .. }) && Request::decode(question.words()).must_run()
}

/// The answer, held against what the policy was told.
pub(super) fn checked(
    engine: &mut dyn SchedulerEngine,
    told: &Told,
    question: &Question,
) -> Result<Decision, Fault> {
    let decision = engine.schedule(question)?;
    let checked = told.check(&decision, question.candidates());
    checked.map(|()| decision).map_err(|invalid| Fault::Invalid(invalid.to_string()))
}
