//! The admitter slot: engines, and the worker that each deciding thread holds.

use super::bindings::admitter::Admitter as Component;
use super::control::{component_control, native_control};
use super::counters::Decided;
use super::guest::Guest;
use super::log::Log;
use super::record::PolicyOf;
use super::slot::{Around, Builtin, Hook, OnTrial, Policy, Shadow, Slot, Worker};
use super::{Error, Fault, Limits, Module, SlotKind, Subject};
use crate::fleet::{Outlook, RETRY_MAX_MS};
use kvasir_policy::Admitter;
use kvasir_policy::admitter::{BLOCK_WORDS, Block, Blocks, Forecast, Load, Request, Store, Verdict};
use kvasir_policy::scheduler::REASONS;
use std::sync::Arc;

/// Words in one record of blocks, as they are told.
const STRIDE: u32 = BLOCK_WORDS as u32;

/// An admitter behind either engine: the hot functions of `admission`, each of which may fail.
pub trait AdmitterEngine: Policy {
    /// # Errors
    /// Any [`Fault`]; after `Trap` and `Deadline` the engine only answers `NotReady`.
    fn update_load(&mut self, load: &Load) -> Result<(), Fault>;

    /// `request`: words as in the contract.
    ///
    /// # Errors
    /// As `update_load`, or a verdict the contract does not know.
    fn admit_request(&mut self, request: &[u32], forecast: &Forecast) -> Result<Verdict, Fault>;

    /// `words`: records of [`BLOCK_WORDS`].
    ///
    /// # Errors
    /// As `update_load`, or not one known answer per block.
    fn admit_blocks(&mut self, tier: u32, words: &[u32]) -> Result<Vec<Store>, Fault>;
}

/// A policy compiled into this binary. Never fails.
pub struct NativeAdmitter(pub Box<dyn Admitter>);

native_control!(NativeAdmitter, this => this.0);

impl AdmitterEngine for NativeAdmitter {
    fn update_load(&mut self, load: &Load) -> Result<(), Fault> {
        self.0.update_load(load);
        Ok(())
    }

    fn admit_request(&mut self, request: &[u32], forecast: &Forecast) -> Result<Verdict, Fault> {
        Ok(self.0.admit_request(&Request::decode(request), forecast))
    }

    fn admit_blocks(&mut self, tier: u32, words: &[u32]) -> Result<Vec<Store>, Fault> {
        let blocks = Blocks::new(STRIDE, words);
        let mut answers = Vec::with_capacity(blocks.len());
        self.0.admit_blocks(tier, blocks, &mut answers);
        Ok(answers)
    }
}

component_control!(admitter::Admitter);

impl AdmitterEngine for Guest<Component> {
    fn update_load(&mut self, load: &Load) -> Result<(), Fault> {
        self.hot("update-load", |b, store| {
            b.kvasir_policy_admission().call_update_load(store, &load.encode())
        })
    }

    fn admit_request(&mut self, request: &[u32], forecast: &Forecast) -> Result<Verdict, Fault> {
        let forecast = forecast.encode();
        let bits = self.hot("admit-request", |b, store| {
            b.kvasir_policy_admission().call_admit_request(store, request, &forecast)
        })?;
        verdict(bits)
    }

    fn admit_blocks(&mut self, tier: u32, words: &[u32]) -> Result<Vec<Store>, Fault> {
        let answers = self.hot("admit-blocks", |b, store| {
            b.kvasir_policy_admission().call_admit_blocks(store, tier, STRIDE, words)
        })?;
        stored(&answers, words.len() / BLOCK_WORDS)
    }
}

/// What a component answered about a request.
///
/// # Errors
/// [`Fault::Invalid`].
pub fn verdict(bits: u64) -> Result<Verdict, Fault> {
    let unknown = || Fault::Invalid(format!("unknown verdict {}", bits & 0xff));
    Verdict::unpack(bits).ok_or_else(unknown).and_then(sensible)
}

/// Checks what a component answered about a batch of blocks.
///
/// # Errors
/// [`Fault::Invalid`].
pub fn stored(answers: &[u32], blocks: usize) -> Result<Vec<Store>, Fault> {
    if answers.len() != blocks {
        return Err(Fault::Invalid(format!("{} answers for {blocks} blocks", answers.len())));
    }
    let known =
        |&word: &u32| Store::unpack(word).ok_or_else(|| Fault::Invalid(format!("unknown answer {word}")));
    answers.iter().map(known).collect()
}

/// Refuses a rejection that no caller could act on.
fn sensible(verdict: Verdict) -> Result<Verdict, Fault> {
    let Verdict::Reject { reason, retry_after_ms } = verdict else { return Ok(verdict) };
    if !REASONS.contains(&reason) {
        let (first, last) = (REASONS.start(), REASONS.end());
        return Err(Fault::Invalid(format!(
            "rejection for reason {reason}; the contract has {first} to {last}"
        )));
    }
    if retry_after_ms > RETRY_MAX_MS {
        return Err(Fault::Invalid(format!(
            "rejection for {retry_after_ms} ms; {RETRY_MAX_MS} at most, a day"
        )));
    }
    Ok(verdict)
}

/// Ties the slot machinery to admitters.
pub struct AdmitterHook;

impl Hook for AdmitterHook {
    const KIND: SlotKind = SlotKind::Admitter;
    type Engine = dyn AdmitterEngine;
    type Heard = Heard;
    type Shadow = AdmitterShadow;

    fn builtins() -> impl Iterator<Item = Builtin<Self>> {
        kvasir_default_policies::ADMITTERS.iter().map(|d| Builtin {
            name: d.name,
            component: d.component,
            native: Box::new(|| -> Box<dyn AdmitterEngine> { Box::new(NativeAdmitter((d.native)())) }),
        })
    }

    fn instantiate(
        module: &Module,
        limits: &Limits,
        log: Arc<Log>,
    ) -> Result<Box<dyn AdmitterEngine>, Error> {
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }
}

/// One decision, and everything that it was based on.
pub struct Heard {
    request: Vec<u32>,
    forecast: Forecast,
    load: Load,
    verdict: Verdict,
}

/// An admitter in shadow.
#[derive(Default)]
pub struct AdmitterShadow {
    /// What its engine was told.
    load: Option<Load>,
}

impl Shadow<AdmitterHook> for AdmitterShadow {
    fn hear(&mut self, around: &Around<'_, AdmitterHook>, worker: &mut Worker<AdmitterHook>, heard: Heard) {
        let Heard { request, forecast, load, verdict } = heard;
        let told = !worker.refresh() && self.load == Some(load);
        self.load = Some(load);
        let asked = worker.ask(|engine| {
            if !told {
                engine.update_load(&load)?;
            }
            engine.admit_request(&request, &forecast)
        });
        let Ok(answer) = asked else { return };
        let tally = &around.trial.tally;
        tally.compare(std::mem::discriminant(&answer) == std::mem::discriminant(&verdict));
        count(&tally.newcomer, answer, Some(&forecast));
        count(&tally.active, verdict, Some(&forecast));
    }
}

/// A queued request goes back to the router, as a rejected one does.
fn count(decided: &Decided, verdict: Verdict, forecast: Option<&Forecast>) {
    if verdict != Verdict::Accept {
        return decided.rejected();
    }
    decided.accepted();
    let Some(&Forecast { ttft, tbt, cached_tokens, .. }) = forecast else { return };
    decided.forecast(&Outlook {
        ttft_ms: ttft.into(),
        tbt_ms: tbt.into(),
        cached_tokens: cached_tokens as u64,
    });
}

/// The admitter of one thread. Its calls never fail outward.
pub struct AdmitterWorker {
    active: Seated,
    trial: OnTrial<AdmitterHook>,
    canary: Option<Seated>,
    /// The canary decides the request at hand.
    asks_canary: bool,
    load: Load,
    /// The canary gave the last answer.
    canary_answered: bool,
    /// Why the native twin gave it.
    fallback: Option<Fault>,
}

impl AdmitterWorker {
    pub(super) fn new(slot: &Arc<Slot<AdmitterHook>>) -> Self {
        let (active, trial) = (Seated::new(slot.worker()), OnTrial::new(slot));
        Self {
            active,
            trial,
            canary: None,
            asks_canary: false,
            load: Load::default(),
            canary_answered: false,
            fallback: None,
        }
    }

    /// Sets what the policy knows of the cluster's load; it is told with the next request.
    pub fn update_load(&mut self, load: Load) {
        self.load = load;
    }

    /// Says that the next request is that of `subject`.
    pub fn choose(&mut self, subject: &Subject<'_>) {
        let canary = self.trial.canary(subject).cloned();
        self.asks_canary = canary.is_some();
        if let Some(trial) = canary {
            let kept = self.canary.take().filter(|kept| kept.generation() == trial.version.generation);
            self.canary = kept.or_else(|| Some(Seated::new(self.trial.worker(&trial))));
        }
    }

    /// Takes up a newer version of the policy or a rebuilt engine, if there is one, and lets go of a canary that ended.
    pub fn refresh(&mut self) {
        self.active.refresh();
        let trial = &mut self.trial;
        self.canary.take_if(|canary| !trial.is_on(canary.generation()));
    }

    /// `request`: words as in the contract.
    pub fn admit_request(&mut self, request: &[u32], forecast: &Forecast) -> Verdict {
        let load = &self.load;
        let ask = |e: &mut dyn AdmitterEngine| e.admit_request(request, forecast);
        if let Some(canary) = self.canary.as_mut().filter(|_| self.asks_canary) {
            if let Ok(verdict) = canary.ask(load, ask) {
                (self.canary_answered, self.fallback) = (true, None);
                count(&canary.worker.version().counters.decided, verdict, Some(forecast));
                return verdict;
            }
            canary.worker.version().counters.fallback();
        }
        let asked = self.active.ask(load, ask);
        (self.canary_answered, self.fallback) = (false, asked.as_ref().err().cloned());
        let Ok(verdict) = asked else {
            return self.active.decide_natively(load, ask).unwrap_or(Verdict::Accept);
        };
        let compared = Some(forecast).filter(|_| self.trial.is_there());
        count(&self.active.worker.version().counters.decided, verdict, compared);
        if let Some(shadow) = self.trial.shadow() {
            let (request, forecast, load) = (request.to_vec(), *forecast, *load);
            shadow.tell(|| Heard { request, forecast, load, verdict });
        }
        verdict
    }

    /// The native twin decides instead, and is counted: for a caller that must not wait for a component.
    pub fn admit_request_natively(&mut self, request: &[u32], forecast: &Forecast) -> Verdict {
        (self.canary_answered, self.fallback) = (false, Some(Fault::Overtaken));
        let decided = self.active.decide_natively(&self.load, |e| e.admit_request(request, forecast));
        decided.unwrap_or(Verdict::Accept)
    }

    /// One answer per block offered to `tier`; always of the active policy.
    pub fn admit_blocks(&mut self, tier: u32, blocks: &[Block]) -> Vec<Store> {
        let words: Vec<u32> = blocks.iter().flat_map(Block::encode).collect();
        let ask = |e: &mut dyn AdmitterEngine| e.admit_blocks(tier, &words);
        let asked = self.active.ask(&self.load, ask);
        (self.canary_answered, self.fallback) = (false, asked.as_ref().err().cloned());
        let answers = asked.ok().or_else(|| self.active.decide_natively(&self.load, ask));
        answers.unwrap_or_else(|| vec![Store::Store; blocks.len()])
    }

    /// Why the native twin gave the last answer, if it did.
    pub fn fallback(&self) -> Option<&Fault> {
        self.fallback.as_ref()
    }

    /// What the policy knows of the load.
    pub fn load(&self) -> Load {
        self.load
    }

    fn answered(&self) -> &Seated {
        self.canary.as_ref().filter(|_| self.canary_answered).unwrap_or(&self.active)
    }

    /// Generation of the policy that gave the last answer.
    pub fn generation(&self) -> u64 {
        self.answered().generation()
    }

    /// The policy in service, as it is recorded.
    pub fn policy_of(&self) -> PolicyOf {
        PolicyOf::from(&**self.answered().worker.version())
    }
}

/// An instance and what it was told.
struct Seated {
    worker: Worker<AdmitterHook>,
    told: Option<Load>,
}

impl Seated {
    fn new(worker: Worker<AdmitterHook>) -> Self {
        Self { worker, told: None }
    }

    fn refresh(&mut self) {
        if self.worker.refresh() {
            self.told = None;
        }
    }

    fn ask<R>(
        &mut self,
        load: &Load,
        f: impl Fn(&mut dyn AdmitterEngine) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        self.refresh();
        let Self { worker, told } = self;
        worker.ask(|engine| {
            if told.replace(*load) != Some(*load) {
                engine.update_load(load)?;
            }
            f(engine)
        })
    }

    fn decide_natively<R>(
        &mut self,
        load: &Load,
        f: impl Fn(&mut dyn AdmitterEngine) -> Result<R, Fault>,
    ) -> Option<R> {
        let native = self.worker.twin()?;
        native.update_load(load).ok()?;
        f(native).ok()
    }

    fn generation(&self) -> u64 {
        self.worker.version().generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_are_bounded() {
        let check = |reason, retry_after_ms, expected: &str| {
            let answer = sensible(Verdict::Reject { reason, retry_after_ms });
            let said = answer.map_or_else(|fault| fault.to_string(), |_| "fine".to_owned());
            assert!(said.contains(expected), "{said}");
        };
        check(1, 0, "fine");
        check(5, RETRY_MAX_MS, "fine");
        check(0, 0, "invalid answer: rejection for reason 0; the contract has 1 to 5");
        check(6, 0, "invalid answer: rejection for reason 6");
        check(1, RETRY_MAX_MS + 1, "invalid answer: rejection for 86400001 ms");
        assert_eq!(sensible(Verdict::Queue), Ok(Verdict::Queue));
    }
}
