//! One policy for all hosts of a cluster: who is told next, and what is done when one of them goes back.
//!
//! A host that keeps rollouts hears from every other what serves there ([`Said`]) and answers what should ([`Order`]). Hosts
//! get the policy one at a time, in the order of their names: the next one is told when the guards of the last one have let it
//! pass, and the pause is over. If one refuses it, or goes back from it, or falls silent with it, no other host gets it, and
//! those that have it go back. There is no clock and no network here; `now` is an argument, Unix time in milliseconds.

pub mod follower;
pub mod keeper;
#[cfg(test)]
mod tests;

use super::catalog::Assignment;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Something is wrong with a host that was told and is then not heard of for this long: no other host is told.
pub const SILENT_MS: u64 = 60_000;
/// A host that waits for its turn is passed over when it was not heard of for this long.
pub const AWAY_MS: u64 = 15_000;
/// For so long after its start no host is told: hosts ask once a second, and the first that asks need not have the first name.
pub const GATHER_MS: u64 = 3_000;
/// Hosts of one rollout.
pub const HOSTS_MAX: usize = 4_096;

/// One policy on its way to all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    /// Rises with every rollout of a slot.
    pub id: u64,
    pub target: Assignment,
    /// The caller that started it.
    pub by: String,
    pub since_ms: u64,
    /// Between the end of one host's watch and the next host.
    pub pause_ms: u64,
    pub phase: Phase,
    hosts: BTreeMap<String, Place>,
    /// When the last host was through with its watch.
    settled_ms: Option<u64>,
}

/// The state of a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    Rolling,
    /// No other host is told; the hosts that have it keep it.
    Paused,
    /// No other host is told; the hosts that have it go back.
    Stopped {
        reason: String,
    },
}

/// How far one host is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    Waiting,
    /// It has not said yet that it serves it.
    Told,
    /// It was told, and somebody has paused the slot there.
    Paused,
    /// It serves it, and its guards compare.
    Watched,
    Settled,
    Failed {
        reason: String,
    },
    /// It went back because the rollout was stopped.
    Back,
}

impl Step {
    /// No other host is told before this one is through.
    fn is_under_way(&self) -> bool {
        matches!(self, Self::Told | Self::Paused | Self::Watched)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    step: Step,
    /// When it was heard of last.
    heard_ms: u64,
}

/// What a host says of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Another policy serves.
    Other,
    /// The same, and the slot is paused.
    Paused,
    /// It serves, and the host's guards compare it with the one before.
    Watched,
    /// It serves, and passed.
    Settled,
    /// The host refused it, or went back from it.
    Failed(String),
}

/// What a host should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Keep,
    /// Bring the target into service.
    Serve,
    /// Go back from the target to what served before.
    Return,
}

/// Why a host is not in the rollout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a rollout has at most {HOSTS_MAX} hosts; this is one more")]
pub struct TooManyHosts;

impl Rollout {
    pub fn new(id: u64, target: Assignment, by: String, pause_ms: u64, now_ms: u64) -> Self {
        let (phase, hosts) = (Phase::Rolling, BTreeMap::new());
        Self { id, target, by, since_ms: now_ms, pause_ms, phase, hosts, settled_ms: None }
    }

    /// Takes in what a host says, and answers what it should do. `None` means that it has not heard of this rollout yet, or was started
    /// again since. The same may be said and answered again.
    ///
    /// # Errors
    /// [`TooManyHosts`].
    pub fn hear(&mut self, host: &str, said: Option<Said>, now_ms: u64) -> Result<Order, TooManyHosts> {
        if !self.hosts.contains_key(host) && self.hosts.len() >= HOSTS_MAX {
            return Err(TooManyHosts);
        }
        let serves = matches!(said, Some(Said::Watched | Said::Settled));
        self.take_in(host, said, now_ms);
        self.stop_if_silent(now_ms);
        Ok(match (&self.phase, &self.hosts[host].step) {
            (Phase::Stopped { .. }, _) if serves => Order::Return,
            (Phase::Rolling, Step::Told | Step::Paused) => Order::Serve, // it did not hear the last answer
            (Phase::Rolling, Step::Waiting) if self.is_next(host, now_ms) => {
                self.set(host, Step::Told);
                Order::Serve
            }
            _ => Order::Keep,
        })
    }

    fn take_in(&mut self, host: &str, said: Option<Said>, now_ms: u64) {
        let fresh = Place { step: Step::Waiting, heard_ms: now_ms };
        let place = self.hosts.entry(host.to_owned()).or_insert(fresh);
        place.heard_ms = now_ms;
        let Some(said) = said else { return };
        let step = match (&place.step, said) {
            (Step::Failed { .. }, _) => return,
            (_, Said::Failed(reason)) => Step::Failed { reason },
            // It never had it, and is not told again.
            (Step::Told | Step::Paused, Said::Other | Said::Paused)
                if matches!(self.phase, Phase::Stopped { .. }) =>
            {
                Step::Waiting
            }
            (Step::Told | Step::Paused, Said::Paused) => Step::Paused,
            (Step::Paused, Said::Other) => Step::Told,
            (Step::Watched | Step::Settled, Said::Other | Said::Paused)
                if matches!(self.phase, Phase::Stopped { .. }) =>
            {
                Step::Back
            }
            (Step::Watched | Step::Settled, Said::Other | Said::Paused) => {
                Step::Failed { reason: "it serves another policy now".into() }
            }
            (step, Said::Other | Said::Paused) => step.clone(),
            (Step::Settled, Said::Watched) => Step::Settled, // it was started again
            (_, Said::Watched) => Step::Watched,
            (_, Said::Settled) => Step::Settled,
        };
        match &step {
            Step::Settled if place.step != Step::Settled => self.settled_ms = Some(now_ms),
            Step::Failed { reason } => stop(&mut self.phase, format!("{host}: {reason}")),
            _ => {}
        }
        place.step = step;
    }

    fn stop_if_silent(&mut self, now_ms: u64) {
        let silent = |place: &Place| place.step.is_under_way() && now_ms > place.heard_ms + SILENT_MS;
        if let Some((host, place)) = self.hosts.iter().find(|(_, place)| silent(place)) {
            let seconds = (now_ms - place.heard_ms) / 1_000;
            stop(&mut self.phase, format!("{host}: not heard of for {seconds} s since it was told"));
        }
    }

    /// One host at a time, in the order of their names.
    fn is_next(&self, host: &str, now_ms: u64) -> bool {
        let gathered = now_ms >= self.since_ms.saturating_add(GATHER_MS);
        let busy = self.hosts.values().any(|place| place.step.is_under_way());
        let rested = self.settled_ms.is_none_or(|at| now_ms >= at.saturating_add(self.pause_ms));
        let waits = |place: &Place| place.step == Step::Waiting && now_ms <= place.heard_ms + AWAY_MS;
        let first = self.hosts.iter().find(|(_, place)| waits(place));
        gathered && !busy && rested && first.is_some_and(|(name, _)| name == host)
    }

    fn set(&mut self, host: &str, step: Step) {
        if let Some(place) = self.hosts.get_mut(host) {
            place.step = step;
        }
    }

    /// No other host is told until [`Rollout::resume`]. Returns false if it was stopped already.
    pub fn pause(&mut self) -> bool {
        let rolls = !matches!(self.phase, Phase::Stopped { .. });
        if rolls {
            self.phase = Phase::Paused;
        }
        rolls
    }

    /// Returns false if it was stopped, which is for good.
    pub fn resume(&mut self) -> bool {
        let rolls = !matches!(self.phase, Phase::Stopped { .. });
        if rolls {
            self.phase = Phase::Rolling;
        }
        rolls
    }

    /// The hosts that have it go back. Returns false if it was stopped already: it keeps its first reason.
    pub fn stop(&mut self, reason: String) -> bool {
        let rolls = !matches!(self.phase, Phase::Stopped { .. });
        stop(&mut self.phase, reason);
        rolls
    }

    /// The keeper itself was away: no host counts as silent for that time.
    pub fn woken(&mut self, now_ms: u64) {
        for place in self.hosts.values_mut() {
            place.heard_ms = now_ms;
        }
    }

    /// All that must not be forgotten.
    fn steps(&self) -> (Phase, Vec<(String, Step)>) {
        let hosts = self.hosts.iter().map(|(name, place)| (name.clone(), place.step.clone()));
        (self.phase.clone(), hosts.collect())
    }

    /// Hosts, how far each is, and when it was heard of last.
    pub fn hosts(&self) -> impl Iterator<Item = (&str, &Step, u64)> {
        self.hosts.iter().map(|(name, place)| (name.as_str(), &place.step, place.heard_ms))
    }

    /// Whether a host that is there has yet to get it, or to go back from it.
    fn is_on_its_way(&self, now_ms: u64) -> bool {
        let is_stopped = matches!(self.phase, Phase::Stopped { .. });
        let there = self.hosts.values().filter(|place| now_ms <= place.heard_ms.saturating_add(AWAY_MS));
        there.map(|place| &place.step).any(|step| match step {
            step if step.is_under_way() => true,
            Step::Settled => is_stopped,
            Step::Waiting => !is_stopped,
            _ => false,
        })
    }

    /// Whether every host that was ever heard of serves it and passed.
    pub fn is_done(&self) -> bool {
        !self.hosts.is_empty() && self.hosts.values().all(|place| place.step == Step::Settled)
    }
}

fn stop(phase: &mut Phase, reason: String) {
    if !matches!(phase, Phase::Stopped { .. }) {
        *phase = Phase::Stopped { reason };
    }
}
