//! Decisions by several threads at once. A decision looks at the tables under their lock, calls the
//! policies without it, and is booked under it again, after a check against what is true by then.

#[cfg(test)]
mod tests;

use super::blocks::Found;
use super::state::State;
use super::{Conductor, Error, Rejected, Scheduled};
use crate::explain::{Admitted, Decided, Explain, Tape};
use crate::fleet::{self, Admission, Ask, Outcome, Outlook};
use crate::policy::record::PolicyOf;
use crate::policy::{AdmitterWorker, Fault, PolicyHost, SchedulerWorker, Subject, scheduler as policy};
use kvasir_policy::admitter::{Forecast, Verdict};
use kvasir_policy::scheduler::{Decision, Question, Request};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// Decisions made by the policy before the native twin decides under the lock: the hints for each.
const ATTEMPTS: [u32; 2] = [0, Request::ASKED_AGAIN];

/// A decision to make.
#[derive(Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) ask: &'a Ask,
    pub(super) chain: &'a [u64],
    pub(super) explain: bool,
    pub(super) now_ms: u64,
}

/// One worker: an instance of each policy on the request path, and what it saw last.
pub(super) struct Decider {
    scheduler: SchedulerWorker,
    admitter: AdmitterWorker,
    /// Built once per look, in buffers that are used again.
    found: Found,
    question: Question,
    registrations: u64,
    /// Where its decisions are kept, if they are.
    tape: Option<Arc<Mutex<Tape>>>,
    /// What the admitter said of this decision.
    admitted: Option<Admitted>,
    /// What the two policies call themselves, by their generations.
    names: [Named; 2],
}

/// Policies as they are recorded: the active one and a canary. They change rarely, so they are shared.
#[derive(Default)]
struct Named([Option<(u64, Arc<PolicyOf>)>; 2]);

impl Named {
    fn of(&mut self, generation: u64, policy: impl FnOnce() -> PolicyOf) -> Arc<PolicyOf> {
        let known = self.0.iter().flatten().find(|(known, _)| *known == generation);
        if let Some((_, policy)) = known {
            return Arc::clone(policy);
        }
        self.0.swap(0, 1);
        Arc::clone(&self.0[0].insert((generation, Arc::new(policy()))).1)
    }
}

impl Decider {
    pub(super) fn new(policies: &PolicyHost, tape: Option<Arc<Mutex<Tape>>>) -> Self {
        let mut scheduler = policies.scheduler_worker();
        if tape.is_some() {
            scheduler.keep_recent();
        }
        Self {
            scheduler,
            admitter: policies.admitter_worker(),
            found: Found::default(),
            question: Question::default(),
            registrations: 0,
            tape,
            admitted: None,
            names: Default::default(),
        }
    }

    /// Lets an idle worker take up new versions, so that old ones can go.
    pub(super) fn refresh(&mut self) {
        self.scheduler.refresh();
        self.admitter.refresh();
    }

    /// Takes in what is true now beside the blocks that were found, and the question to ask about it. `hints` are added to
    /// those of the request.
    fn look(&mut self, state: &mut State, wish: &Wish<'_>, hints: u32) {
        self.admitted = None;
        state.fleet.tick(wish.now_ms);
        state.bring_up_to_date(wish.chain, &mut self.found);
        state.question(wish.ask, &self.found, hints, wish.now_ms, &mut self.question);
        self.registrations = state.fleet.registrations();
        let subject = Subject { tenant: wish.ask.tenant, session: wish.ask.session, chain: wish.chain };
        self.scheduler.catch_up(&state.fleet, &subject);
        self.admitter.choose(&subject);
        self.admitter.update_load(state.load);
    }

    /// What the admitter is told of this very placement. Returns `None` if there is nothing to admit.
    fn forecast(
        &self,
        state: &State,
        wish: &Wish<'_>,
        decision: &Decision,
    ) -> Result<Option<(Forecast, Admission)>, fleet::Error> {
        match state.fleet.forecast(wish.ask, decision, self.question.candidates(), wish.now_ms)? {
            Outcome::Rejected { .. } => Ok(None),
            Outcome::Admitted(admission) => {
                let tenant_share = state.fleet.tenant_share(wish.ask.tenant);
                Ok(Some((forecast(&admission, tenant_share), admission)))
            }
        }
    }

    fn admit(&mut self, wish: &Wish<'_>, forecast: &Forecast, admission: &Admission) -> Option<Rejected> {
        let start = self.timer();
        let verdict = self.admitter.admit_request(self.question.request_words(), forecast);
        self.note_verdict(forecast, verdict, start);
        refusal(wish.ask, verdict, admission)
    }

    fn admit_natively(
        &mut self,
        wish: &Wish<'_>,
        forecast: &Forecast,
        admission: &Admission,
    ) -> Option<Rejected> {
        let start = self.timer();
        let verdict = self.admitter.admit_request_natively(self.question.request_words(), forecast);
        self.note_verdict(forecast, verdict, start);
        refusal(wish.ask, verdict, admission)
    }

    /// Started if decisions are kept, else `None`.
    fn timer(&self) -> Option<Instant> {
        self.tape.as_ref().map(|_| Instant::now())
    }

    fn note_verdict(&mut self, forecast: &Forecast, verdict: Verdict, start: Option<Instant>) {
        let Some(start) = start else { return };
        let ns = start.elapsed().as_nanos() as u64;
        let generation = self.admitter.generation();
        let policy = self.names[1].of(generation, || self.admitter.policy_of());
        let (load, forecast) = (self.admitter.load(), *forecast);
        let fallback = self.admitter.fallback().map(ToString::to_string);
        self.admitted = Some(Admitted { policy, generation, load, forecast, verdict, fallback, ns });
    }

    /// Keeps a decision, so that it can be explained. Never under the lock of the state.
    fn keep(
        &mut self,
        wish: &Wish<'_>,
        outcome: &policy::Outcome,
        scheduled: &Scheduled,
        ns: u64,
        scores: &[f32],
        explain: &Explain,
    ) {
        let Some(tape) = &self.tape else { return };
        let generation = outcome.generation;
        let policy = self.names[0].of(generation, || self.scheduler.record_of(outcome));
        let (thresholds, knowledge) = self.scheduler.known(outcome);
        let decided = Decided {
            id: scheduled.decision_id,
            at_ms: wish.now_ms,
            policy,
            generation,
            decision: outcome.decision,
            fallback: scheduled.fallback.clone(),
            ns,
            thresholds,
            knowledge,
            admitted: self.admitted.take(),
        };
        if let Some((recent, told)) = self.scheduler.recent() {
            tape.lock().keep(decided, recent, || told.all(), &self.question, scores);
        }
        explain.kept(scheduled.decision_id);
    }

    /// Counts what came of a decision for the policy that made it, and tells a shadow of it. Without the lock.
    fn count(&mut self, wish: &Wish<'_>, outcome: &policy::Outcome, scheduled: &Scheduled) {
        let blocks = wish.chain.len() as u64;
        let placed = scheduled.result.as_ref().ok();
        let hits = placed.map(|placed| (blocks, placed.hit_blocks().min(blocks)));
        let outlook = placed.map(|placed| Outlook::from(&placed.admission));
        self.scheduler.decided(outcome, hits, outlook.as_ref());
        self.scheduler.tell_shadow(&self.question, outcome, blocks);
    }

    /// Whether slots still mean the instances that this worker saw.
    fn same_instances(&self, state: &State) -> bool {
        state.fleet.registrations() == self.registrations
    }
}

fn forecast(admission: &Admission, tenant_share: f64) -> Forecast {
    Forecast {
        ttft: admission.ttft_ms as f32,
        tbt: admission.tbt_ms as f32,
        tenant_share: tenant_share as f32,
        queue: admission.queue_ms as f32,
        prefill: admission.prefill_ms as f32,
        transfer: admission.transfer_ms as f32,
        cached_tokens: admission.cached_tokens as f32,
        handover: admission.handover_ms as f32,
    }
}

/// Queues are kept by the router, so `Queue` goes back as a rejection with a short wait. What must run
/// runs.
fn refusal(ask: &Ask, verdict: Verdict, admission: &Admission) -> Option<Rejected> {
    let rejected = |reason, retry_after_ms| Rejected { refused: Some(*admission), reason, retry_after_ms };
    match verdict {
        _ if ask.must_run => None,
        Verdict::Accept => None,
        Verdict::Queue => Some(rejected(0, admission.queue_ms.clamp(1.0, 60_000.0) as u32)),
        Verdict::Reject { reason, retry_after_ms } => Some(rejected(reason, retry_after_ms)),
    }
}

fn nanos(start: Option<Instant>) -> u64 {
    start.map_or(0, |start| start.elapsed().as_nanos() as u64)
}

/// `None` means that the tables are no longer those that the decision was made on.
fn unless_overtaken<T>(result: Result<T, fleet::Error>) -> Result<Option<T>, Error> {
    match result {
        Err(fleet::Error::Invalid(_)) => Ok(None),
        other => Ok(Some(other?)),
    }
}

impl Conductor {
    /// Decides one request and books it.
    ///
    /// Waits while every worker decides. A policy that takes long holds up its own worker only.
    ///
    /// # Errors
    /// [`fleet::Error::TooManyRequests`].
    pub fn schedule(&self, ask: &Ask, chain: &[u64], explain: bool, now_ms: u64) -> Result<Scheduled, Error> {
        self.decisions.measure(|| self.decide(&Wish { ask, chain, explain, now_ms }))
    }

    fn decide(&self, wish: &Wish<'_>) -> Result<Scheduled, Error> {
        let mut decider = self.deciders.take();
        for hints in ATTEMPTS {
            if let Some(scheduled) = self.attempt(&mut decider, wish, hints)? {
                return Ok(scheduled);
            }
        }
        self.decide_locked(&mut decider, wish)
    }

    fn look(&self, decider: &mut Decider, wish: &Wish<'_>, hints: u32) {
        self.blocks.look(wish.chain, &mut decider.found);
        decider.look(&mut self.state.lock(), wish, hints);
    }

    /// Asks the policies without the lock. Returns `None` if the tables moved so that the answer no longer holds.
    fn attempt(
        &self,
        decider: &mut Decider,
        wish: &Wish<'_>,
        hints: u32,
    ) -> Result<Option<Scheduled>, Error> {
        self.look(decider, wish, hints);
        let scores = if wish.explain { decider.scheduler.explain(&decider.question) } else { Vec::new() };
        let start = decider.timer();
        let outcome = decider.scheduler.decide(&decider.question);
        let ns = nanos(start);
        let forecast = decider.forecast(&self.state.lock(), wish, &outcome.decision);
        let Some(forecast) = unless_overtaken(forecast)? else { return Ok(None) };
        let refused = forecast.and_then(|(forecast, admission)| decider.admit(wish, &forecast, &admission));
        let concluded = conclude(&mut self.state.lock(), decider, wish, &outcome, refused, &scores)?;
        if let Some(scheduled) = &concluded {
            decider.count(wish, &outcome, scheduled);
            decider.keep(wish, &outcome, scheduled, ns, &scores, &self.explain);
        }
        Ok(concluded)
    }

    /// The native twins decide while nothing can change.
    fn decide_locked(&self, decider: &mut Decider, wish: &Wish<'_>) -> Result<Scheduled, Error> {
        self.blocks.look(wish.chain, &mut decider.found);
        let mut locked = self.state.lock();
        let state = &mut *locked;
        decider.look(state, wish, Request::ASKED_AGAIN);
        let start = decider.timer();
        let outcome = decider.scheduler.decide_natively(&decider.question, Fault::Overtaken);
        let ns = nanos(start);
        let forecast = decider.forecast(state, wish, &outcome.decision)?;
        let refused =
            forecast.and_then(|(forecast, admission)| decider.admit_natively(wish, &forecast, &admission));
        let scheduled = conclude(state, decider, wish, &outcome, refused, &[])?;
        let scheduled = scheduled.expect("nothing changed since the look, under one lock");
        drop(locked);
        decider.keep(wish, &outcome, &scheduled, ns, &[], &self.explain);
        Ok(scheduled)
    }
}

/// Books what nobody refused, and counts the answer.
fn conclude(
    state: &mut State,
    decider: &Decider,
    wish: &Wish<'_>,
    outcome: &policy::Outcome,
    refused: Option<Rejected>,
    scores: &[f32],
) -> Result<Option<Scheduled>, Error> {
    if !decider.same_instances(state) {
        return Ok(None);
    }
    let booked = match refused {
        Some(rejected) => Err(rejected),
        None => {
            let booked = state.book(wish.ask, &outcome.decision, &decider.question, wish.now_ms);
            let Some(booked) = unless_overtaken(booked)? else { return Ok(None) };
            booked
        }
    };
    state.count(booked.as_ref().ok().map(|(_, placed)| placed), wish.chain.len());
    if let Err(rejected) = &booked {
        state.tell_rejected(wish.ask, rejected);
    }
    let request_id = booked.as_ref().map_or(0, |(id, _)| *id);
    let decision_id = if request_id == 0 { state.next_id() } else { request_id };
    Ok(Some(Scheduled {
        request_id,
        decision_id,
        result: booked.map(|(_, placed)| placed),
        policy: decider.scheduler.policy_of(outcome).to_owned(),
        generation: outcome.generation,
        fallback: outcome.fallback.as_ref().map(ToString::to_string),
        scores: state.scores(scores),
    }))
}
