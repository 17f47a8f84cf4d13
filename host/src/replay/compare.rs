//! Two policies of one slot over the same trace, beside each other.
//!
//! Evictors are compared in caches of several sizes, everything else in two simulated clusters that differ in that one
//! policy. Both sides take the trace request by request, so what they did with a request can be held against each other
//! without keeping all of them. [`Decisions`] asks both what a host recorded.

mod decisions;
mod evictors;
mod requests;
#[cfg(test)]
mod tests;
mod told;

pub use decisions::{Decisions, Differing, Side};
pub use evictors::{CacheSide, Capacity, Evictors, capacities};
pub use requests::{Chose, Diff, Difference, Requests};

use super::contender::Contender;
use super::trace::Request;
use super::{cache, cluster, trace};
use crate::policy::SlotKind;
use crate::policy::record::{self, PlayError};
use serde::Serialize;

/// Differences that are told in full.
const TOLD: usize = 5;

/// Why two policies were not compared.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Trace(#[from] trace::Error),
    #[error(transparent)]
    Policy(#[from] crate::policy::Error),
    #[error(transparent)]
    Cache(#[from] cache::Error),
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    #[error("trace {0} holds no requests")]
    Empty(String),
    #[error(transparent)]
    Recording(#[from] record::Error),
    #[error(transparent)]
    Play(#[from] PlayError),
    #[error(
        "the recording {recording} holds no decision of the {slot}; record one with explain.file and explain.sample"
    )]
    NoDecision { recording: String, slot: SlotKind },
}

/// What was asked for.
pub struct Match<'a> {
    /// Name of the trace, for the report.
    pub trace: &'a str,
    pub candidate: &'a Contender,
    pub baseline: &'a Contender,
    /// Tokens in a block of the trace.
    pub block_size_tokens: u32,
}

/// The requests of a trace, or why they end.
pub type Requested = Result<Request, trace::Error>;

/// The JSON of `kvasir policy replay`.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Comparison {
    Evictors(Evictors),
    Requests(Box<Requests>),
    Decisions(Box<Decisions>),
}

impl Comparison {
    /// What the candidate did that it must not do, one line each. If there are any, its figures are not its own.
    pub fn candidate_faults(&self) -> Vec<String> {
        match self {
            Self::Evictors(evictors) => evictors.faults(|capacity| &capacity.candidate),
            Self::Requests(requests) => requests.candidate.faults.iter().map(ToString::to_string).collect(),
            Self::Decisions(decisions) => decisions.candidate.faults(),
        }
    }

    /// The same of the other policy.
    pub fn baseline_faults(&self) -> Vec<String> {
        match self {
            Self::Evictors(evictors) => evictors.faults(|capacity| &capacity.baseline),
            Self::Requests(requests) => requests.baseline.faults.iter().map(ToString::to_string).collect(),
            Self::Decisions(decisions) => decisions.baseline.faults(),
        }
    }
}
