//! The policy host: loads components, calls them within limits, and falls back when they fail.
//!
//! Four slots ([`SlotKind`]), each a [`slot::Slot`] with one typed [`slot::Hook`]. Threads that
//! decide own a worker per slot ([`SchedulerWorker`], [`EvictorWorker`], …) whose calls never fail
//! outward: a policy that traps, is late or answers outside the contract costs one native decision;
//! an evictor costs native decisions until a fresh instance has been told of the pool.
//!
//! # Files
//!
//! One policy at work:
//! * `engine`, `compiler`, `interface`: a component is checked and compiled; `bindings` is the contract, generated.
//! * `guest`: one instance, called within its limits; `control`: what the components of all slots export.
//! * `scheduler`, `evictor`, `admitter`, `balancer`: the hot functions of each slot, and the worker that calls them.
//! * `chain`: several schedulers that decide together; `slot/learning`: policies that learn.
//! * `fault`: what can go wrong; `counters`: what is counted, and the breaker; `log`: what policies say.
//!
//! One slot (`slot`):
//! * `slot/version`: from a component to something that can serve; `slot/swap`: how it comes into service.
//! * `slot/worker`: one thread's instance, its spare and its native twin; `slot/builder`: builds instances beside the traffic.
//! * `slot/trial`, `slot/shadow`: the second seat; `trial`: the words for trials and changes that operators see.
//! * `guard`: when a newcomer is too bad; `guards`: the thread that looks; `slot/guarded`, `slot/contest`: what is done then.
//!
//! All slots of a host:
//! * `host`: the door that everybody uses; `watch`: the folder whose files are loaded.
//! * `catalog`: what survives a restart; `history`: who changed what, and why.
//! * `rollout`: one policy for many hosts; `trust`: whose policies may serve.
//! * `description`, `inspect`: what a policy says of itself; `record`: decisions that can be asked again.

mod bindings;
mod catalog;
pub mod chain;
mod compiler;
mod control;
mod counters;
pub(crate) mod description;
mod engine;
mod fault;
pub mod guard;
mod guards;
mod guest;
pub mod history;
mod host;
pub mod inspect;
mod interface;
mod log;
pub mod record;
pub mod rollout;
pub mod slot;
pub mod trial;
pub mod trust;
mod unwrapped;
mod watch;

pub mod admitter;
pub mod balancer;
pub mod evictor;
pub mod scheduler;

#[cfg(test)]
mod tests;

pub use admitter::AdmitterWorker;
pub use balancer::BalancerWorker;
pub use catalog::{Assignment, Catalog, Origin, Stored, StoredTrial};
pub use counters::CounterValues;
pub use description::BadDescription;
pub use engine::{Digest, Engine, Module, NoDigest};
pub use evictor::EvictorWorker;
pub use fault::{Error, Fault};
pub use guard::{Breach, Guard, GuardConfig};
pub use guest::Limits;
pub use host::{Again, LOADS_MAX, PolicyHost, SlotStatus, Wanted};
pub use inspect::slot_of_file;
pub use log::{LogLine, LogPage};
pub use scheduler::SchedulerWorker;
pub use slot::{ChainPart, LearningStatus, Outcomes, Prepared, SPARES_MAX, Serving, Source, standalone};

pub use trial::{
    Action, Agreement, Beside, Cause, Change, Listener, PolicyId, Share, Stage, Subject, TrialStatus,
    WatchStatus,
};

use crate::text::printable;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The four decisions a policy can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotKind {
    Scheduler,
    Evictor,
    Admitter,
    Balancer,
}

impl SlotKind {
    pub const ALL: [Self; 4] = [Self::Scheduler, Self::Evictor, Self::Admitter, Self::Balancer];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Evictor => "evictor",
            Self::Admitter => "admitter",
            Self::Balancer => "balancer",
        }
    }

    /// The interface a component of this slot must export, beside `control`.
    fn interface(self) -> &'static str {
        match self {
            Self::Scheduler => "kvasir:policy/scheduling@0.1.0",
            Self::Evictor => "kvasir:policy/eviction@0.1.0",
            Self::Admitter => "kvasir:policy/admission@0.1.0",
            Self::Balancer => "kvasir:policy/balancing@0.1.0",
        }
    }

    /// Whether it decides about requests, so that a policy can learn from what came of them.
    fn has_outcomes(self) -> bool {
        matches!(self, Self::Scheduler | Self::Admitter)
    }

    fn limits(self, config: &PolicyConfig) -> Limits {
        let given = config.slot_memory_bytes[self as usize].unwrap_or(config.memory_bytes);
        let memory_bytes = match self {
            Self::Evictor => given.saturating_add(256 * config.evictor_slots as usize),
            Self::Scheduler | Self::Admitter | Self::Balancer => given,
        };
        let PolicyConfig {
            hot_deadline, cold_deadline, starved_after, evictor_slots, core_instances, ..
        } = *config;
        Limits {
            memory_bytes,
            hot: hot_deadline,
            cold: cold_deadline,
            starved: starved_after,
            evictor_slots,
            core_instances,
            in_use: Arc::default(),
        }
    }
}

/// The policies of a slot that come with the binary; the first is the default.
pub fn builtin_names(slot: SlotKind) -> Vec<&'static str> {
    fn names<H: slot::Hook>() -> Vec<&'static str> {
        H::builtins().map(|builtin| builtin.name).collect()
    }
    match slot {
        SlotKind::Scheduler => names::<scheduler::SchedulerHook>(),
        SlotKind::Evictor => names::<evictor::EvictorHook>(),
        SlotKind::Admitter => names::<admitter::AdmitterHook>(),
        SlotKind::Balancer => names::<balancer::BalancerHook>(),
    }
}

/// Text that names no slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown slot `{0}`; slots: {slots}{nearest}",
    slots = SlotKind::ALL.map(SlotKind::as_str).join(", "),
    nearest = fault::did_you_mean(&nearest(.0, SlotKind::ALL.map(SlotKind::as_str)))
)]
pub struct UnknownSlot(String);

/// The known name that somebody may have meant.
fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // Names are short. The distance to a long text takes long to compute, and no name is near it.
    let given = Some(given).filter(|given| given.len() <= 64)?;
    let distances = known.into_iter().map(|known| (strsim::damerau_levenshtein(known, given), known));
    distances.min().filter(|(distance, _)| *distance <= 3).map(|(_, known)| known.to_owned())
}

impl std::fmt::Display for SlotKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for SlotKind {
    type Err = UnknownSlot;

    fn from_str(text: &str) -> Result<Self, UnknownSlot> {
        let named = Self::ALL.into_iter().find(|kind| kind.as_str() == text);
        named.ok_or_else(|| UnknownSlot(printable(text, 64)))
    }
}

/// Limits and places of the policy host.
#[derive(Clone, Debug)]
pub struct PolicyConfig {
    /// Folder watched for `scheduler.wasm`, `evictor.wasm`, `admitter.wasm`, `balancer.wasm`;
    /// a file that appears or changes there is loaded. `None` if no folder is watched.
    pub watch_dir: Option<PathBuf>,
    /// The file of keys whose components are brought into service; see [`trust`]. `None` means everybody's.
    pub trust_file: Option<PathBuf>,
    /// Folder of compiled code, owned by this host; `None` compiles at every start.
    pub cache_dir: Option<PathBuf>,
    /// Thread CPU time of one hot call before it is interrupted.
    pub hot_deadline: Duration,
    /// The same for describe, configure, state and balancer ticks.
    pub cold_deadline: Duration,
    /// A call that the machine hardly runs ends after this time, or ten times its CPU time if that is more.
    pub starved_after: Duration,
    /// Linear memories of one instance together; evictors get 256 B per block slot on top.
    pub memory_bytes: usize,
    /// The same for single slots, in the order of [`SlotKind::ALL`].
    pub slot_memory_bytes: [Option<usize>; 4],
    /// Core instances of one component; what is compiled from interpreted languages has many.
    pub core_instances: u32,
    /// Block slots of the largest pool an evictor has to serve.
    pub evictor_slots: u32,
    /// Instances alive at once, of all slots and versions.
    pub instances: u32,
    /// Largest component accepted.
    pub max_module_bytes: u64,
    /// Faults within the window that take a policy out of service.
    pub breaker_faults: u32,
    pub breaker_window: Duration,
    /// How often a learner hears of outcomes.
    pub learn_every: Duration,
    pub guard: GuardConfig,
}

impl PolicyConfig {
    /// Limits of calls that nobody waits for, as in a replay: what comes of them must not depend on what else the machine does.
    pub fn unhurried() -> Self {
        Self { starved_after: Duration::from_secs(600), ..Self::default() }
    }
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            watch_dir: None,
            trust_file: None,
            cache_dir: None,
            hot_deadline: Duration::from_millis(5),
            cold_deadline: Duration::from_secs(2),
            // Less would end good calls on a machine that is merely busy.
            starved_after: Duration::from_secs(1),
            memory_bytes: 16 << 20,
            slot_memory_bytes: [None; 4],
            core_instances: 48,
            evictor_slots: 1 << 20,
            instances: 256,
            max_module_bytes: 32 << 20,
            breaker_faults: 5,
            breaker_window: Duration::from_secs(10),
            learn_every: Duration::from_secs(1),
            guard: GuardConfig::default(),
        }
    }
}
