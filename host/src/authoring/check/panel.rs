//! Engines of one policy that are told and asked the same, and must answer the same.

use crate::policy::Fault;
use crate::policy::slot::{Hook, Policy};
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Instant;

/// Why a policy did not pass.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("`{call}` {fault}")]
    Fault { call: &'static str, fault: Fault },
    #[error("`{call}` answered {first}, and {second} in another instance that was told and asked the same")]
    Differs { call: &'static str, first: String, second: String },
}

/// The longest answer that a failure shows.
const SHOWN_BYTES: usize = 200;

impl Failure {
    pub(super) fn invalid(call: &'static str, reason: impl ToString) -> Self {
        Self::Fault { call, fault: Fault::Invalid(reason.to_string()) }
    }
}

/// How long calls took, by function; ns.
pub(super) type Times = BTreeMap<&'static str, Histogram<u64>>;

pub(super) struct Panel<H: Hook> {
    pub(super) engines: Vec<Box<H::Engine>>,
    /// Times of the first engine.
    pub(super) times: Times,
    /// Answers compared.
    pub(super) answers: u64,
}

impl<H: Hook> Panel<H> {
    pub(super) fn new(engines: Vec<Box<H::Engine>>) -> Self {
        Self { engines, times: Times::new(), answers: 0 }
    }

    /// Tells all engines the same.
    pub(super) fn tell(
        &mut self,
        call: &'static str,
        tell: impl Fn(&mut H::Engine) -> Result<(), Fault>,
    ) -> Result<(), Failure> {
        self.all(call, tell).map(drop)
    }

    /// The answer that all engines give.
    pub(super) fn ask<R: PartialEq + Debug>(
        &mut self,
        call: &'static str,
        ask: impl Fn(&mut H::Engine) -> Result<R, Fault>,
    ) -> Result<R, Failure> {
        let mut answers = self.all(call, ask)?.into_iter();
        let first = answers.next().ok_or_else(|| Failure::invalid(call, "nobody was asked"))?;
        self.answers += 1;
        match answers.find(|answer| *answer != first) {
            None => Ok(first),
            Some(other) => Err(Failure::Differs { call, first: shown(&first), second: shown(&other) }),
        }
    }

    /// Asks the last engine alone: it must not answer otherwise than the others for it afterwards.
    pub(super) fn ask_one<R>(
        &mut self,
        call: &'static str,
        ask: impl FnOnce(&mut H::Engine) -> Result<R, Fault>,
    ) -> Result<Option<R>, Failure> {
        let Some(engine) = self.engines.last_mut() else { return Ok(None) };
        ask(engine).map(Some).map_err(|fault| Failure::Fault { call, fault })
    }

    fn all<R>(
        &mut self,
        call: &'static str,
        f: impl Fn(&mut H::Engine) -> Result<R, Fault>,
    ) -> Result<Vec<R>, Failure> {
        let mut answers = Vec::with_capacity(self.engines.len());
        for (place, engine) in self.engines.iter_mut().enumerate() {
            let answer = if place == 0 { timed(&mut self.times, call, || f(engine)) } else { f(engine) };
            answers.push(answer.map_err(|fault| Failure::Fault { call, fault })?);
        }
        Ok(answers)
    }

    /// What the first engine wants its successor to know.
    pub(super) fn state(&mut self) -> Result<Vec<u8>, Failure> {
        let Some(engine) = self.engines.first_mut() else { return Ok(Vec::new()) };
        engine.export_state().map_err(|fault| Failure::Fault { call: "export-state", fault })
    }
}

pub(super) fn timed<R>(times: &mut Times, call: &'static str, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let answer = f();
    let ns = start.elapsed().as_nanos() as u64;
    // It grows as far as times do.
    let _ = times.entry(call).or_insert_with(histogram).record(ns);
    answer
}

/// Two digits are enough for a time on a machine that does other things as well.
fn histogram() -> Histogram<u64> {
    Histogram::new(2).expect("two digits are among the five that it can keep")
}

fn shown(answer: &impl Debug) -> String {
    crate::text::printable(&format!("{answer:?}"), SHOWN_BYTES)
}
