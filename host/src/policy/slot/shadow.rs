//! A policy in shadow: told of what the active one decided, on a thread of its own, and asked the same.
//!
//! Deciding threads never wait for it: they put a copy of the question into a bounded queue, and when that is full the
//! shadow misses this one, which is counted.

use super::{Hook, Slot, Trial, Worker};
use crate::policy::Agreement;
use crate::policy::counters::Decided;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Receiver;

/// Decisions that wait for a shadow. Few: each may carry a copy of the tables.
pub(super) const QUEUE: usize = 64;

/// Asks the policy in shadow what the active one was asked.
pub trait Shadow<H: Hook>: Default {
    /// On the shadow's thread; faults are counted by the worker.
    fn hear(&mut self, around: &Around<'_, H>, worker: &mut Worker<H>, heard: H::Heard);
}

/// Where a shadow is.
pub struct Around<'a, H: Hook> {
    pub slot: &'a Arc<Slot<H>>,
    pub trial: &'a Trial<H>,
}

/// On the way to a shadow's thread.
pub(super) enum Told<H: Hook> {
    Decision(H::Heard),
    End,
}

/// How the answers of a shadow compare with those of the active policy.
#[derive(Default)]
pub struct Tally {
    asked: AtomicU64,
    same: AtomicU64,
    dropped: AtomicU64,
    waiting: AtomicUsize,
    /// What would have come of its answers, and what came of the active policy's by the same forecast.
    pub newcomer: Decided,
    pub active: Decided,
}

impl Tally {
    pub fn compare(&self, same: bool) {
        self.asked.fetch_add(1, Relaxed);
        self.same.fetch_add(u64::from(same), Relaxed);
    }

    pub fn agreement(&self) -> Agreement {
        Agreement { asked: self.asked.load(Relaxed), same: self.same.load(Relaxed) }
    }

    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }
}

impl<H: Hook> Trial<H> {
    /// Tells a shadow of a decision. `heard` is made only if there is room for it. Never waits.
    pub fn tell(&self, heard: impl FnOnce() -> H::Heard) {
        let Some(told) = &self.told else { return };
        let tally = &self.tally;
        // Some threads may find the last place at once: the queue itself has the last word.
        if tally.waiting.load(Relaxed) < QUEUE {
            tally.waiting.fetch_add(1, Relaxed);
            if told.try_send(Told::Decision(heard())).is_ok() {
                return;
            }
            tally.waiting.fetch_sub(1, Relaxed);
        }
        tally.dropped.fetch_add(1, Relaxed);
    }
}

/// Until the trial ends.
pub(super) fn run<H: Hook>(slot: &Arc<Slot<H>>, trial: &Arc<Trial<H>>, told: &Receiver<Told<H>>) {
    let mut worker = Worker::of_trial(slot, &trial.version, trial.seat());
    let (mut shadow, around) = (H::Shadow::default(), Around { slot, trial });
    for told in told {
        let Told::Decision(heard) = told else { return };
        trial.tally.waiting.fetch_sub(1, Relaxed);
        if trial.has_ended() {
            return;
        }
        shadow.hear(&around, &mut worker, heard);
    }
}
