//! The admitter slot: engines, and the worker that each deciding thread holds.

use super::bindings::admitter::Admitter as Component;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::slot::{Builtin, Hook, Policy, Worker};
use super::{Error, Fault, Limits, Module, SlotKind};
use crate::conductor::fleet::RETRY_MAX_MS;
use kvasir_policy::Admitter;
use kvasir_policy::admitter::{BLOCK_WORDS, Block, Blocks, Forecast, Load, Request, Store, Verdict};
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
        self.hot(|b, store| b.kvasir_policy_admission().call_update_load(store, &load.encode()))
    }

    fn admit_request(&mut self, request: &[u32], forecast: &Forecast) -> Result<Verdict, Fault> {
        let forecast = forecast.encode();
        let bits =
            self.hot(|b, store| b.kvasir_policy_admission().call_admit_request(store, request, &forecast))?;
        let unknown = || Fault::Invalid(format!("unknown verdict {}", bits & 0xff));
        Verdict::unpack(bits).ok_or_else(unknown).and_then(sensible)
    }

    fn admit_blocks(&mut self, tier: u32, words: &[u32]) -> Result<Vec<Store>, Fault> {
        let answers =
            self.hot(|b, store| b.kvasir_policy_admission().call_admit_blocks(store, tier, STRIDE, words))?;
        let blocks = words.len() / BLOCK_WORDS;
        if answers.len() != blocks {
            return Err(Fault::Invalid(format!("{} answers for {blocks} blocks", answers.len())));
        }
        let known =
            |&word: &u32| Store::unpack(word).ok_or_else(|| Fault::Invalid(format!("unknown answer {word}")));
        answers.iter().map(known).collect()
    }
}

/// Refuses a rejection that no caller could act on.
fn sensible(verdict: Verdict) -> Result<Verdict, Fault> {
    let Verdict::Reject { retry_after_ms, .. } = verdict else { return Ok(verdict) };
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

/// The admitter of one thread. Its calls never fail outward.
pub struct AdmitterWorker {
    worker: Worker<AdmitterHook>,
    load: Load,
    /// The engine has not been told `load` yet.
    load_changed: bool,
}

impl AdmitterWorker {
    pub(super) fn new(worker: Worker<AdmitterHook>) -> Self {
        Self { worker, load: Load::default(), load_changed: true }
    }

    /// Sets what the policy knows of the cluster's load; it is told with the next request.
    pub fn update_load(&mut self, load: Load) {
        self.load_changed |= load != self.load;
        self.load = load;
    }

    /// Takes up a newer version of the policy or a rebuilt engine, if there is one.
    pub fn refresh(&mut self) {
        self.load_changed |= self.worker.refresh();
    }

    /// `request`: words as in the contract.
    pub fn admit_request(&mut self, request: &[u32], forecast: &Forecast) -> Verdict {
        self.decide(|e| e.admit_request(request, forecast)).unwrap_or(Verdict::Accept)
    }

    /// The same by the native twin, and counted: for a caller that must not wait for a component.
    pub fn admit_request_natively(&mut self, request: &[u32], forecast: &Forecast) -> Verdict {
        self.decide_natively(|e| e.admit_request(request, forecast)).unwrap_or(Verdict::Accept)
    }

    /// One answer per block offered to `tier`.
    pub fn admit_blocks(&mut self, tier: u32, blocks: &[Block]) -> Vec<Store> {
        let words: Vec<u32> = blocks.iter().flat_map(Block::encode).collect();
        self.decide(|e| e.admit_blocks(tier, &words)).unwrap_or_else(|| vec![Store::Store; blocks.len()])
    }

    fn decide<R>(&mut self, f: impl Fn(&mut dyn AdmitterEngine) -> Result<R, Fault>) -> Option<R> {
        self.refresh();
        let Self { worker, load, load_changed } = self;
        let asked = worker.ask(|engine| {
            if std::mem::take(load_changed) {
                engine.update_load(load)?;
            }
            f(engine)
        });
        asked.ok().or_else(|| self.decide_natively(f))
    }

    fn decide_natively<R>(&mut self, f: impl Fn(&mut dyn AdmitterEngine) -> Result<R, Fault>) -> Option<R> {
        let native = self.worker.twin()?;
        native.update_load(&self.load).ok()?;
        f(native).ok()
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
        check(0, 0, "fine");
        check(u32::MAX, RETRY_MAX_MS, "fine");
        check(1, RETRY_MAX_MS + 1, "invalid answer: rejection for 86400001 ms");
        assert_eq!(sensible(Verdict::Queue), Ok(Verdict::Queue));
    }
}
