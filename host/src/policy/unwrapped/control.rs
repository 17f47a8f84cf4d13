//! `control` and the half of `learning` that deciders have, for an unwrapped module of any world.

use super::Unwrapped;
use super::abi::{Abi, Answer, Asked, List, Told};
use crate::policy::Fault;
use crate::policy::engine::{CONTROL, LEARNING};
use crate::policy::guest::{Guest, State};
use crate::policy::slot::Policy;
use kvasir_policy::{Description, Setting};
use wasmtime::{Instance, Store};

/// Bytes of a `setting` in memory: three texts.
const SETTING: u32 = 24;

/// The cold functions of an instance.
pub(in crate::policy) struct Control {
    pub(super) abi: Abi,
    describe: Asked<()>,
    configure: Asked<List>,
    export_state: Asked<()>,
    import_state: Asked<List>,
    /// Of a policy that learns.
    adopt: Option<Told>,
}

impl Control {
    /// # Errors
    /// A function is missing or has another type.
    pub(super) fn new(store: &mut Store<State>, instance: &Instance, learns: bool) -> wasmtime::Result<Self> {
        let name = |name| format!("{CONTROL}#{name}");
        let adopt = format!("{LEARNING}#adopt");
        Ok(Self {
            abi: Abi::new(store, instance)?,
            describe: Asked::new(store, instance, &name("describe"))?,
            configure: Asked::new(store, instance, &name("configure"))?,
            export_state: Asked::new(store, instance, &name("export-state"))?,
            import_state: Asked::new(store, instance, &name("import-state"))?,
            adopt: learns.then(|| Told::new(store, instance, &adopt)).transpose()?,
        })
    }
}

impl<B: Unwrapped> Policy for Guest<B> {
    fn describe(&mut self) -> Result<Description, Fault> {
        self.cold("describe", |b, store| {
            let Control { abi, describe, .. } = b.control();
            describe.call(abi, store, (), description)
        })
    }

    fn configure(&mut self, settings: &[(String, String)]) -> Result<Result<(), String>, Fault> {
        self.cold("configure", |b, store| {
            let Control { abi, configure, .. } = b.control();
            let settings = abi.lower_pairs(store, settings)?;
            configure.call(abi, store, settings, |answer, at| answer.outcome(at))
        })
    }

    fn export_state(&mut self) -> Result<Vec<u8>, Fault> {
        self.cold("export-state", |b, store| {
            let Control { abi, export_state, .. } = b.control();
            export_state.call(abi, store, (), |answer, at| answer.list(at))
        })
    }

    fn import_state(&mut self, state: &[u8]) -> Result<Result<(), String>, Fault> {
        self.cold("import-state", |b, store| {
            let Control { abi, import_state, .. } = b.control();
            let state = abi.lower(store, state)?;
            import_state.call(abi, store, state, |answer, at| answer.outcome(at))
        })
    }

    fn adopt(&mut self, knowledge: &[u8]) -> Result<(), Fault> {
        if self.bindings().control().adopt.is_none() {
            return Ok(());
        }
        self.cold("adopt", |b, store| {
            let Control { abi, adopt, .. } = b.control();
            adopt.as_ref().map_or(Ok(()), |adopt| adopt.call(abi, store, knowledge))
        })
    }

    fn called(&self) -> &'static str {
        self.called()
    }
}

fn description(answer: Answer<'_>, at: u32) -> wasmtime::Result<Description> {
    let (first, count) = answer.extent(at.saturating_add(24))?;
    let setting = |i: u32| {
        let at = first.saturating_add(i.saturating_mul(SETTING));
        let [name, default, doc] = [0, 8, 16].map(|field| answer.text(at.saturating_add(field)));
        Ok(Setting { name: name?, default: default?, doc: doc? })
    };
    let [name, version, slot] = [0, 8, 16].map(|field| answer.text(at.saturating_add(field)));
    let settings = (0..count).map(setting).collect::<wasmtime::Result<_>>()?;
    Ok(Description { name: name?, version: version?, slot: slot?, settings })
}
