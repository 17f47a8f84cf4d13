//! What jobs came to, in total.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use kvasir_client::data::Done;

use crate::jobs::Kind;

/// One of each kind of job.
#[derive(Default)]
pub(super) struct Tallies([Tally; Kind::ALL.len()]);

#[derive(Default)]
struct Tally {
    jobs: AtomicU64,
    failed: AtomicU64,
    here: AtomicU64,
    absent: AtomicU64,
    bytes: AtomicU64,
}

impl Tallies {
    pub(super) fn add(&self, kind: Kind, done: &Done) {
        let Tally { jobs, failed, here, absent, bytes } = &self.0[kind as usize];
        let blocks = done.blocks.iter().filter(|&&here| here).count() as u64;
        let add = |count: &AtomicU64, by: u64| count.fetch_add(by, Ordering::Relaxed);
        add(jobs, 1);
        add(failed, (!done.ok).into());
        add(here, blocks);
        add(absent, done.blocks.len() as u64 - blocks);
        add(bytes, done.bytes);
    }

    /// Every count, by its name.
    pub(super) fn list(&self, all: &mut BTreeMap<String, u64>) {
        for (kind, tally) in Kind::ALL.iter().zip(&self.0) {
            let Tally { jobs, failed, here, absent, bytes } = tally;
            for (name, count) in [
                ("jobs", jobs),
                ("jobs_failed", failed),
                ("blocks", here),
                ("blocks_failed", absent),
                ("bytes", bytes),
            ] {
                all.insert(format!("{}_{name}", kind.name()), count.load(Ordering::Relaxed));
            }
        }
    }
}
