//! What a `Core` shares with the threads that work for it, and the end of all at exit.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use kvasir_client::data::{Done, Endpoint, JobMemory, JobOptions, Jobs, Options, Reconnecting};
use kvasir_client::sync::Mutex;
use pyo3::prelude::*;

use super::blocks::Blocks;
use super::handing::HandOvers;
use super::tally::Tallies;
use super::{Ended, flags};
use crate::errors::{Error, job_error};
use crate::jobs::{Kept, Kind, Table};
use crate::link::Link;

/// All that are open, to be closed before Python takes its memory back. Only locked with the GIL held, so that no other thread
/// has it locked when Python forks.
pub(super) static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

pub(super) struct Inner {
    /// The process that made it. A child has none of its threads, and shares its sockets with the parent.
    pub(super) pid: u32,
    pub(super) endpoint: Endpoint,
    pub(super) options: Options,
    pub(super) job_options: JobOptions,
    /// Threads that the first job starts.
    pub(super) jobs: Mutex<Option<Arc<Jobs>>>,
    pub(super) closed: AtomicBool,
    pub(super) asks: Arc<Link>,
    /// For calls that wait as long as a load may take.
    pub(super) calls: Reconnecting,
    pub(super) hand_overs: HandOvers,
    pub(super) table: Table,
    pub(super) tallies: Tallies,
}

impl Inner {
    pub(super) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    pub(super) fn jobs(&self) -> PyResult<Arc<Jobs>> {
        let mut jobs = self.jobs.lock();
        if let Some(jobs) = &*jobs {
            return Ok(Arc::clone(jobs));
        }
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new_err("it was closed"));
        }
        let started = Jobs::start(&self.endpoint, &self.options, self.job_options.clone());
        let started =
            started.map_err(|error| Error::new_err(format!("cannot start copying threads: {error}")))?;
        Ok(Arc::clone(jobs.insert(Arc::new(started))))
    }

    pub(super) fn give(&self, job: u64, kept: Kept, memory: JobMemory, blocks: Blocks) -> PyResult<()> {
        let jobs = self.jobs()?;
        let kind = if matches!(blocks, Blocks::Save(..)) { Kind::Save } else { Kind::Load };
        let number = self.table.open(job, kind, kept)?;
        let given = match blocks {
            Blocks::Load(blocks, labels) => jobs.load_labelled(number, memory, blocks, labels),
            Blocks::Save(blocks, labels) => jobs.save_labelled(number, memory, blocks, labels),
        };
        given.map_err(|error| {
            drop(self.table.ended(number));
            job_error(error)
        })
    }

    pub(super) fn ended<'py>(&self, py: Python<'py>, done: Done) -> Option<Ended<'py>> {
        let open = self.table.ended(done.job)?;
        if matches!(open.kind, Kind::HandOver | Kind::Arrive) {
            self.handing_ended(open.job);
        }
        self.tallies.add(open.kind, &done);
        let error = done.error.map(|error| error.to_string());
        Some((open.job, done.ok, flags(py, &done.blocks), done.bytes, error))
    }

    pub(super) fn counters(&self) -> BTreeMap<String, u64> {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.options.counts;
        let (failed, skipped) = self.asks.failures();
        let mut all = BTreeMap::from([
            ("connections".to_owned(), get(&counts.connections)),
            ("checksum_failures".to_owned(), get(&counts.checksum_failures)),
            ("label_failures".to_owned(), get(&counts.label_failures)),
            ("questions_failed".to_owned(), failed),
            ("questions_skipped".to_owned(), skipped),
        ]);
        self.tallies.list(&mut all);
        all
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.asks.close();
        self.calls.close();
        self.close_handing();
        let jobs = self.jobs.lock().clone();
        if let Some(jobs) = jobs {
            jobs.close();
        }
    }
}

/// Closes all that are open, at exit: from then on no thread of ours touches memory of Python's.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>) {
    let open = std::mem::take(&mut *OPEN.lock());
    for inner in open.iter().filter_map(Weak::upgrade) {
        if inner.is_ours() {
            py.detach(|| inner.close());
        } else {
            std::mem::forget(inner);
        }
    }
}
