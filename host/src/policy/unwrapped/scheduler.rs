//! A scheduler entered by its core module.

use super::abi::{Answer as Read, Asked, Told};
use super::{Control, Unwrapped};
use crate::policy::guest::{Guest, State};
use crate::policy::scheduler::SchedulerEngine;
use crate::policy::{Fault, SlotKind};
use kvasir_policy::scheduler::{Answer, Decision, Question};
use wasmtime::{Instance, Store};

/// `scheduling` of one instance.
pub(in crate::policy) struct Scheduler {
    control: Control,
    open: Told,
    update_prefill: Told,
    update_decode: Told,
    update_links: Told,
    set_thresholds: Told,
    schedule: Asked<(f32, u32, u32)>,
    explain: Asked<(f32, u32, u32)>,
}

impl Unwrapped for Scheduler {
    fn new(store: &mut Store<State>, instance: &Instance, learns: bool) -> wasmtime::Result<Self> {
        let name = |name| format!("{}#{name}", SlotKind::Scheduler.interface());
        let mut told = |function| Told::new(store, instance, &name(function));
        Ok(Self {
            open: told("open")?,
            update_prefill: told("update-prefill")?,
            update_decode: told("update-decode")?,
            update_links: told("update-links")?,
            set_thresholds: told("set-thresholds")?,
            schedule: Asked::new(store, instance, &name("schedule"))?,
            explain: Asked::new(store, instance, &name("explain"))?,
            control: Control::new(store, instance, learns)?,
        })
    }

    fn control(&self) -> &Control {
        &self.control
    }
}

impl Scheduler {
    fn scores(&self, store: &mut Store<State>, question: &Question) -> wasmtime::Result<Vec<f32>> {
        let abi = &self.control.abi;
        let (at, len) = abi.lower(store, question.words())?;
        self.explain.call(abi, store, (question.now(), at, len), |answer, at| answer.list(at))
    }
}

impl SchedulerEngine for Guest<Scheduler> {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        self.cold("open", |b, store| b.open.call(&b.control.abi, store, layout))
    }

    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-prefill", |b, store| b.update_prefill.call(&b.control.abi, store, rows))
    }

    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-decode", |b, store| b.update_decode.call(&b.control.abi, store, rows))
    }

    fn update_links(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-links", |b, store| b.update_links.call(&b.control.abi, store, rows))
    }

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.hot("set-thresholds", |b, store| b.set_thresholds.call(&b.control.abi, store, values))
    }

    fn schedule(&mut self, question: &Question) -> Result<Decision, Fault> {
        let answer = self.hot("schedule", |b, store| {
            let abi = &b.control.abi;
            let (at, len) = abi.lower(store, question.words())?;
            b.schedule.call(abi, store, (question.now(), at, len), answer)
        });
        answer.map(Decision::from)
    }

    fn explain(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        self.cold("explain", |b, store| b.scores(store, question))
    }

    fn score(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        self.hot("explain", |b, store| b.scores(store, question))
    }
}

/// The record `decision`, in the order of its fields.
fn answer(read: Read<'_>, at: u32) -> wasmtime::Result<Answer> {
    let word = |field: u32| read.number::<u32>(at.saturating_add(4 * field));
    Ok(Answer {
        prefill: word(0)?,
        decode: word(1)?,
        transfer_blocks: word(2)?,
        source: word(3)?,
        reason: word(4)?,
        retry_after: word(5)?,
        session_memo: read.number(at.saturating_add(24))?,
        tenant_charge: read.number(at.saturating_add(32))?,
    })
}
