//! Which memory is in use: plans, and jobs that are not drained.

use std::collections::HashMap;
use std::sync::Arc;

use kvasir_client::data::Namespace;
use kvasir_client::sync::Mutex;
use pyo3::exceptions::{PyKeyError, PyRuntimeError};
use pyo3::prelude::*;

use crate::device::Place;
use crate::memory::Buffers;

/// Plans and open jobs. What it returns is dropped by the caller, outside of the lock: that may run Python code.
#[derive(Default)]
pub(crate) struct Table(Mutex<State>);

#[derive(Default)]
struct State {
    plans: HashMap<u64, Planned>,
    open: HashMap<u64, Open>,
    last: u64,
}

/// Where an engine's blocks lie, under which namespace, and what keeps them alive.
pub(crate) struct Planned {
    place: Place,
    namespace: Arc<Namespace>,
    _owner: Option<Py<PyAny>>,
    /// Jobs that are not drained.
    jobs: usize,
}

/// A job that is not drained.
pub(crate) struct Open {
    /// The number that the caller gave it.
    pub(crate) job: u64,
    pub(crate) kind: Kind,
    pub(crate) kept: Kept,
}

/// What a job does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Load,
    Save,
    HandOver,
    Arrive,
}

impl Kind {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; 4] = [Self::Load, Self::Save, Self::HandOver, Self::Arrive];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Save => "save",
            Self::HandOver => "hand_over",
            Self::Arrive => "arrive",
        }
    }
}

/// What stays alive until the job is drained.
pub(crate) enum Kept {
    Plan(u64),
    Buffers(#[expect(dead_code, reason = "kept alive, not used")] Buffers),
}

impl Table {
    /// Returns the number of the plan.
    pub(crate) fn plan(&self, place: Place, namespace: Namespace, owner: Option<Py<PyAny>>) -> u64 {
        let planned = Planned { place, namespace: Arc::new(namespace), _owner: owner, jobs: 0 };
        let mut state = self.0.lock();
        state.last += 1;
        let number = state.last;
        state.plans.insert(number, planned);
        number
    }

    /// # Errors
    /// There is no such plan, or jobs of it are not drained.
    pub(crate) fn unplan(&self, number: u64) -> PyResult<Planned> {
        let mut state = self.0.lock();
        match state.plans.get(&number).map(|planned| planned.jobs) {
            Some(0) => state.plans.remove(&number).ok_or_else(|| no_plan(number)),
            None => Err(no_plan(number)),
            Some(jobs) => {
                let text = format!("{jobs} jobs of plan {number} are not drained; drain them first");
                Err(PyRuntimeError::new_err(text))
            }
        }
    }

    /// Where the blocks of a plan lie.
    pub(crate) fn planned(&self, number: u64) -> PyResult<(Place, Arc<Namespace>)> {
        let state = self.0.lock();
        let planned = state.plans.get(&number).ok_or_else(|| no_plan(number))?;
        Ok((planned.place.clone(), Arc::clone(&planned.namespace)))
    }

    /// Notes a job before it is given, and returns the number under which to give it: callers may use one number for two jobs.
    pub(crate) fn open(&self, job: u64, kind: Kind, kept: Kept) -> PyResult<u64> {
        let mut state = self.0.lock();
        if let Kept::Plan(number) = kept {
            // It may have been taken out meanwhile.
            state.plans.get_mut(&number).ok_or_else(|| no_plan(number))?.jobs += 1;
        }
        state.last += 1;
        let number = state.last;
        state.open.insert(number, Open { job, kind, kept });
        Ok(number)
    }

    /// A job that is drained, or was not taken.
    pub(crate) fn ended(&self, number: u64) -> Option<Open> {
        let mut state = self.0.lock();
        let open = state.open.remove(&number)?;
        if let Kept::Plan(plan) = open.kept
            && let Some(planned) = state.plans.get_mut(&plan)
        {
            planned.jobs -= 1;
        }
        Some(open)
    }
}

fn no_plan(number: u64) -> PyErr {
    PyKeyError::new_err(format!("there is no plan {number}"))
}
