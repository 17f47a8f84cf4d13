//! An evictor entered by its core module.

use super::abi::{Asked, Told};
use super::{Control, Unwrapped};
use crate::policy::evictor::{EvictorEngine, events_time, victims_time, with_victims};
use crate::policy::guest::{Guest, State};
use crate::policy::{Fault, SlotKind};
use kvasir_policy::evictor::Victim;
use wasmtime::{Instance, Store, TypedFunc};

/// `eviction` of one instance.
pub(in crate::policy) struct Evictor {
    control: Control,
    open: Told,
    update_tiers: Told,
    on_events: TypedFunc<(u64, u32, u32), ()>,
    select_victims: Asked<(u64, u32)>,
}

impl Unwrapped for Evictor {
    fn new(store: &mut Store<State>, instance: &Instance, learns: bool) -> wasmtime::Result<Self> {
        let name = |name| format!("{}#{name}", SlotKind::Evictor.interface());
        Ok(Self {
            open: Told::new(store, instance, &name("open"))?,
            update_tiers: Told::new(store, instance, &name("update-tiers"))?,
            on_events: instance.get_typed_func(&mut *store, &name("on-events"))?,
            select_victims: Asked::new(store, instance, &name("select-victims"))?,
            control: Control::new(store, instance, learns)?,
        })
    }

    fn control(&self) -> &Control {
        &self.control
    }
}

impl EvictorEngine for Guest<Evictor> {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        self.cold("open", |b, store| b.open.call(&b.control.abi, store, layout))
    }

    fn update_tiers(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-tiers", |b, store| b.update_tiers.call(&b.control.abi, store, rows))
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        self.hot_plus("on-events", events_time(words), |b, store| {
            let (at, len) = b.control.abi.lower(store, words)?;
            b.on_events.call(store, (base_ms, at, len))
        })
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        let words = self.hot_plus("select-victims", victims_time(want), |b, store| {
            b.select_victims.call(&b.control.abi, store, (now_ms, want), |answer, at| answer.list(at))
        })?;
        with_victims(victims, words, want)
    }
}
