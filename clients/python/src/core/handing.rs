//! Prompts between engines, layer by layer: jobs that others than loads and saves run, and that are reported with them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_client::data::{
    Handing, HandingOptions, Incoming, JobError, Namespace, Options, Outgoing, Transfer,
};
use kvasir_client::sync::Mutex;
use pyo3::prelude::*;

use super::{Inner, SILENCE_MAX};
use crate::bytes;
use crate::errors::{Error, job_error};
use crate::jobs::{Kept, Kind};

/// See the [module](self).
#[derive(Default)]
pub(super) struct HandOvers {
    /// Made for the first job.
    handing: Mutex<Option<Arc<Handing>>>,
    /// The number under which a job was given that its caller calls by another, and has not drained.
    numbers: Mutex<HashMap<u64, u64>>,
}

/// What both sides say of a job.
pub(super) struct Job<'a> {
    pub(super) job: u64,
    pub(super) plan: u64,
    pub(super) transfer: &'a [u8],
    pub(super) hashes: (&'a [u8], usize),
    /// Numbers in the plan.
    pub(super) blocks: &'a [u8],
    pub(super) layers: u32,
}

impl Job<'_> {
    /// The blocks of all hashes but the first `without`.
    fn blocks(&self, without: usize) -> PyResult<Vec<usize>> {
        let (hashes, hash_bytes) = self.hashes;
        let count = bytes::hashes(hashes, hash_bytes)?.len().saturating_sub(without);
        Ok(bytes::blocks(self.blocks, count)?.collect())
    }

    fn transfer(&self, namespace: &Namespace) -> PyResult<Transfer> {
        Transfer::new(self.transfer, namespace).map_err(job_error)
    }
}

impl Inner {
    pub(super) fn hand_over(&self, py: Python<'_>, job: &Job<'_>, peer: &str, from: u32) -> PyResult<()> {
        let blocks = job.blocks(0)?;
        let hashes = bytes::hashes(job.hashes.0, job.hashes.1)?;
        let (place, namespace) = self.table.planned(job.plan)?;
        let plan = place.on_host()?;
        let transfer = job.transfer(&namespace)?;
        let (peer, layers) = (peer.to_owned(), job.layers);
        let part = py.detach(|| {
            let blocks = hashes.map(|hash| transfer.key(hash)).zip(blocks).collect();
            Outgoing { transfer, from, peer, blocks, layers }
        });
        self.give_handing(job, Kind::HandOver, |handing, number| handing.hand_over(number, &plan, part))
    }

    pub(super) fn arrive(&self, py: Python<'_>, job: &Job<'_>, first: usize, ms: u64) -> PyResult<()> {
        let blocks = job.blocks(first)?;
        let hashes = bytes::hashes(job.hashes.0, job.hashes.1)?;
        let (place, namespace) = self.table.planned(job.plan)?;
        let plan = place.on_host()?;
        let transfer = job.transfer(&namespace)?;
        let (layers, time) = (job.layers, Duration::from_millis(ms));
        let prompt = py.detach(|| {
            let keys = hashes.map(|hash| transfer.key(hash)).collect();
            Incoming { transfer, keys, first, blocks, layers, time }
        });
        self.give_handing(job, Kind::Arrive, |handing, number| handing.arrive(number, &plan, prompt))
    }

    pub(super) fn layer_ready(&self, job: u64, layer: u32) -> bool {
        self.handing_of(job).is_some_and(|(handing, number)| handing.layer_ready(number, layer))
    }

    pub(super) fn abandon(&self, job: u64) -> bool {
        self.handing_of(job).is_some_and(|(handing, number)| handing.abandon(number))
    }

    pub(super) fn close_handing(&self) {
        let handing = self.hand_overs.handing.lock().clone();
        if let Some(handing) = handing {
            handing.close();
        }
    }

    /// Notes that a job was drained. Its caller may use its number for another one.
    pub(super) fn handing_ended(&self, job: u64) {
        self.hand_overs.numbers.lock().remove(&job);
    }

    fn handing_of(&self, job: u64) -> Option<(Arc<Handing>, u64)> {
        let number = *self.hand_overs.numbers.lock().get(&job)?;
        Some((self.hand_overs.handing.lock().clone()?, number))
    }

    fn handing(&self) -> PyResult<Arc<Handing>> {
        let jobs = self.jobs()?;
        let mut handing = self.hand_overs.handing.lock();
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new_err("it was closed"));
        }
        // The host answers the last word of the sender when the other one has read all blocks, which may take a while.
        let timeout = self.job_options.save_time.max(SILENCE_MAX);
        let make = || {
            let options = Options { timeout, ..self.options.clone() };
            let (class, send_time) = (self.job_options.class, self.job_options.save_time);
            let settings = HandingOptions { class, send_time, ..HandingOptions::default() };
            Arc::new(Handing::beside(&jobs, &self.endpoint, &options, settings))
        };
        Ok(Arc::clone(handing.get_or_insert_with(make)))
    }

    fn give_handing(
        &self,
        Job { job, plan, .. }: &Job<'_>,
        kind: Kind,
        give: impl FnOnce(&Handing, u64) -> Result<(), JobError>,
    ) -> PyResult<()> {
        let handing = self.handing()?;
        let number = self.table.open(*job, kind, Kept::Plan(*plan))?;
        // Known before it runs, for a caller that says at once that a layer is ready, or drains it.
        let known = match self.hand_overs.numbers.lock().entry(*job) {
            Entry::Occupied(_) => Err(JobError::Twice { job: *job }),
            Entry::Vacant(free) => {
                free.insert(number);
                Ok(())
            }
        };
        let given = known.and_then(|()| give(&handing, number).inspect_err(|_| self.handing_ended(*job)));
        given.map_err(|error| {
            drop(self.table.ended(number));
            job_error(error)
        })
    }
}
