//! Which blocks are worth a place in a tier below.

use crate::store::Tier;

/// A block offered to a tier, as far as admission may look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Workload class of the request that stored it, 0 = unknown.
    pub class: u16,
    /// Uses since it was stored.
    pub uses: u32,
    /// Position in its chain.
    pub depth: u32,
    /// Bytes.
    pub size: u32,
    /// Milliseconds since it was last offered to this tier and not stored; `None` if that is not remembered.
    pub refused_ms_ago: Option<u64>,
    /// The tenant whose block it is.
    pub tenant: u16,
}

/// What happens to an offered block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Skip,
    Store,
    /// Store it in the next colder tier instead; if there is none, as `Skip`.
    Colder,
}

/// Decides on batches of offered blocks, on the thread that drives eviction: never in a put or a get.
pub trait Admit: Send {
    /// One answer per candidate, in order; candidates without one are skipped.
    fn admit(&mut self, tier: Tier, candidates: &[Candidate]) -> Vec<Admission>;
}

/// Stores whatever [`TieringConfig::min_uses`](super::TieringConfig::min_uses) lets through.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdmitAll;

impl Admit for AdmitAll {
    fn admit(&mut self, _tier: Tier, candidates: &[Candidate]) -> Vec<Admission> {
        vec![Admission::Store; candidates.len()]
    }
}
