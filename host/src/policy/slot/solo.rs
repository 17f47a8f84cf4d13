//! A policy outside any slot: for replays, benches and checks.

use super::version::{Code, Program, code, configured};
use super::{Hook, Settings, Source};
use crate::policy::catalog::Assignment;
use crate::policy::log::Log;
use crate::policy::{Digest, Engine, Error, Limits, PolicyConfig};
use kvasir_policy::Description;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A policy that was found, compiled and configured once; any number of instances are made of it.
pub struct Solo<H: Hook> {
    program: Program<H>,
    assignment: Assignment,
    description: Description,
    limits: Limits,
    log: Arc<Log>,
}

impl<H: Hook> Solo<H> {
    /// # Errors
    /// As [`Slot::load`](super::Slot::load).
    pub fn new(
        engine: &Engine,
        config: &PolicyConfig,
        source: Source,
        settings: Settings,
    ) -> Result<Self, Error> {
        let Code { program, origin, .. } = code::<H>(engine, source)?;
        let assignment = Assignment { origin, settings };
        let (limits, log) = (H::KIND.limits(config), Arc::default());
        let (_, description) = configured::<H>(&program, &assignment, &limits, &log)?;
        Ok(Self { program, assignment, description, limits, log })
    }

    /// A fresh instance with its settings, not opened.
    ///
    /// # Errors
    /// It cannot be instantiated, or does not take its settings this time.
    pub fn instance(&self) -> Result<Box<H::Engine>, Error> {
        configured::<H>(&self.program, &self.assignment, &self.limits, &self.log).map(|(engine, _)| engine)
    }

    pub fn description(&self) -> &Description {
        &self.description
    }

    /// `None`: it is compiled into this binary.
    pub fn digest(&self) -> Option<Digest> {
        match &self.program {
            Program::Component(module) => Some(module.digest),
            Program::Native(_) => None,
        }
    }

    /// What the linear memories of its instances take now, bytes; of a native policy nothing is known.
    pub fn memory_in_use(&self) -> usize {
        self.limits.in_use.load(Ordering::Relaxed)
    }
}
