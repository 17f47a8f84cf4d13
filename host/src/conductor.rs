//! The conductor by names: instances as the outside knows them, the prefix index over their blocks,
//! and the policies that decide.
//!
//! What is true stands in one [`state::State`] behind a lock that is held for microseconds and never
//! while a policy runs, and who holds which blocks beside it, behind another ([`blocks`]); workers decide beside both, each with
//! policy instances of its own ([`decide`]).
//! Lock order: the queue of idle workers and the state are never held together.

mod blocks;
mod decide;
mod deciders;
mod load;
mod memos;
mod names;
mod outcomes;
mod serves;
mod state;
#[cfg(test)]
mod tests;
mod tick;

pub use self::tick::run;

use self::blocks::{Blocks, Found};
use self::deciders::Deciders;
use self::serves::Serves;
use self::state::State;
use crate::config;
use crate::explain::Explain;
use crate::fleet::{self, Admission, DecodeSpec, Needs, PrefillSpec};
use crate::policy::PolicyHost;
use crate::prefix_index::{self, Tier};
use kvasir_dataplane::times::{Times, TimesTaken};
use kvasir_policy::balancer::Snapshot;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest name of an instance, and of what else it names.
const NAME_MAX: usize = 128;
/// The most pieces that a sweep takes: some 20 ms.
const SWEEPS: u32 = 4096;

/// Why a message of an instance or router was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("instance `{name}` is not registered here; register it")]
    UnknownInstance { name: String },
    #[error("instance name of {len} bytes; it must have 1 to {NAME_MAX}")]
    Name { len: usize },
    #[error("instance `{name}` would do neither prefill nor decode; set at least one")]
    NoRole { name: String },
    #[error("`{name}` cannot be a {what}: {limit} names of those are known, which is all there is room for")]
    TooManyNames { what: &'static str, name: String, limit: usize },
    #[error("epoch {given} of instance `{name}` is not the current {current}; register it again")]
    Epoch { name: String, given: u64, current: u64 },
    #[error(
        "message {given} of instance `{name}` where {expected} is next; its blocks are forgotten, call ResetBlocks and tell all of them again, from message 1"
    )]
    Gap { name: String, given: u64, expected: u64 },
    #[error(transparent)]
    Fleet(#[from] fleet::Error),
}

/// What an instance says of itself.
#[derive(Clone, Debug, Default)]
pub struct Registration {
    pub prefill: Option<PrefillSpec>,
    pub decode: Option<DecodeSpec>,
    /// Name of its machine. Empty means that it does not say.
    pub host: String,
    /// Name of its domain of the network. Empty means that it does not say.
    pub domain: String,
    /// Models it serves. None means any.
    pub models: Vec<String>,
    /// Adapters it has loaded.
    pub adapters: Vec<String>,
    /// The most adapters that it can hold at once. `None` means that it does not say.
    pub adapters_max: Option<u32>,
}

/// What an instance says of its present state.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub free_blocks: u32,
    /// It takes no new requests.
    pub draining: bool,
    /// Queued requests as the engine counts them. `None` means that it does not say.
    pub waiting: Option<u32>,
    /// Adapters it has loaded now. `None` means those that it said last.
    pub adapters: Option<Vec<String>>,
}

struct Instance {
    prefill: Option<u16>,
    decode: Option<u16>,
    epoch: u64,
    /// How many messages of stored or removed blocks came since its blocks were last unknown.
    sequence: u64,
    /// A message was missed: its blocks are forgotten, and stay forgotten until it starts over.
    desynced: bool,
    reported_ms: u64,
    draining: bool,
    serves: Arc<Serves>,
}

/// Where the index has the blocks of an instance: one that does both is known by its prefill half.
#[derive(Clone, Copy, Debug)]
enum Holder {
    Prefill(u16),
    Decode(u16),
}

impl Instance {
    fn holder(&self) -> Holder {
        match (self.prefill, self.decode) {
            (Some(slot), _) => Holder::Prefill(slot),
            (None, slot) => Holder::Decode(slot.expect("an instance has a role")),
        }
    }
}

/// A decision with its reasons.
pub struct Scheduled {
    /// 0 if it was not booked.
    pub request_id: u64,
    /// Names the decision, booked or not: the same as `request_id` if it was.
    pub decision_id: u64,
    pub result: Result<Placed, Rejected>,
    pub policy: String,
    pub generation: u64,
    pub fallback: Option<String>,
    pub scores: Scores,
}

/// Names and identities of the instances, by slot; `None` for an empty slot.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    pub prefill: Vec<Option<(String, u32)>>,
    pub decode: Vec<Option<(String, u32)>>,
}

/// What a policy says of the instances, by their names; it may say nothing.
pub struct Scores {
    pub prefill: Vec<(String, f32)>,
    pub decode: Vec<(String, f32)>,
}

pub struct Placed {
    pub prefill: String,
    pub decode: String,
    pub prefix_blocks: u32,
    pub transfer: Option<(String, u32)>,
    pub admission: Admission,
}

impl Placed {
    /// Leading blocks of the prompt that are stored where it goes, or fetched.
    pub fn hit_blocks(&self) -> u64 {
        let fetched = self.transfer.as_ref().map_or(0, |(_, blocks)| *blocks);
        u64::from(self.prefix_blocks) + u64::from(fetched)
    }
}

pub struct Rejected {
    /// The admitter turned it away; it saw the forecast for this placement, which the scheduler chose.
    pub refused: Option<Admission>,
    pub reason: u32,
    pub retry_after_ms: u32,
}

/// Sums for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub placed: u64,
    pub rejected: u64,
    pub in_flight: usize,
    pub prefill: usize,
    pub decode: usize,
    /// Instances that were silent for too long.
    pub forgotten: u64,
    /// Memos of sessions and tenants that made room for others.
    pub memos_forgotten: u64,
    /// Names for which there was no room.
    pub names_refused: u64,
}

/// A step in the life of a scheduled request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    Transfer,
    Prefill {
        /// As the instance measured it, without the waits before it. `None` means that it did not.
        took_ms: Option<f64>,
    },
    Progress(u32),
    Finished,
}

/// See the module documentation.
pub struct Conductor {
    state: Mutex<State>,
    blocks: Arc<Blocks>,
    deciders: Deciders,
    decisions: Times,
    /// Requests that found the queue before the deciders full.
    turned_away: AtomicU64,
    explain: Arc<Explain>,
}

impl Conductor {
    /// A conductor that keeps no decisions to explain, and does not say which run of the host this is.
    pub fn new(config: &config::Conductor, policies: &PolicyHost, now_ms: u64) -> Self {
        Self::with_explain(config, policies, Explain::off(), 0, now_ms)
    }

    /// `run`: a number that another run of the host does not have, for policies.
    pub fn with_explain(
        config: &config::Conductor,
        policies: &PolicyHost,
        explain: Arc<Explain>,
        run: u32,
        now_ms: u64,
    ) -> Self {
        let state = State::new(config, policies.outcomes(), run, now_ms);
        Self {
            blocks: Arc::clone(&state.blocks),
            state: Mutex::new(state),
            deciders: Deciders::new(config.workers, policies, &explain),
            decisions: Times::default(),
            turned_away: AtomicU64::new(0),
            explain,
        }
    }

    /// Counts a request that is not decided, because too many wait.
    pub fn turn_away(&self) {
        self.turned_away.fetch_add(1, Ordering::Relaxed);
    }

    /// The decisions that can be explained.
    pub fn explain(&self) -> &Arc<Explain> {
        &self.explain
    }

    /// The instances that are known now, by their slots.
    pub fn slots(&self) -> Slots {
        self.state.lock().slots()
    }

    /// Registers an instance, in place of a known one of that name. Returns the epoch under which it reports from now on.
    ///
    /// # Errors
    /// The name, the roles or the costs cannot be used, or a table is full.
    pub fn register(&self, name: &str, given: Registration, now_ms: u64) -> Result<u64, Error> {
        let _order = self.blocks.order();
        self.state.lock().register(name, given, now_ms)
    }

    /// # Errors
    /// The instance or its epoch is unknown.
    pub fn unregister(&self, name: &str, epoch: u64) -> Result<(), Error> {
        let _order = self.blocks.order();
        self.state.lock().unregister(name, epoch)
    }

    /// The numbers of the model and the adapter that a request names. Empty means none.
    pub fn needs(&self, model: &str, adapter: &str) -> Needs {
        if model.is_empty() && adapter.is_empty() {
            return Needs::default();
        }
        self.state.lock().catalogue.needs(model, adapter)
    }

    /// Forgets the blocks of an instance, and keeps its load; it tells them again from message 1.
    ///
    /// # Errors
    /// The instance or its epoch is unknown.
    pub fn reset_blocks(&self, name: &str, epoch: u64) -> Result<(), Error> {
        let _order = self.blocks.order();
        self.state.lock().reset_blocks(name, epoch)
    }

    /// # Errors
    /// The instance or its epoch is unknown.
    pub fn report(&self, name: &str, epoch: u64, report: &Report, now_ms: u64) -> Result<(), Error> {
        self.state.lock().report(name, epoch, report, now_ms)
    }

    /// Blocks that became resident at an instance, one chain. `tier`: where, if the instance says it.
    ///
    /// # Errors
    /// The instance or its epoch is unknown, or a message is missing: [`Error::Gap`].
    pub fn stored(
        &self,
        name: &str,
        epoch: u64,
        sequence: u64,
        tier: Option<Tier>,
        parent: Option<u64>,
        blocks: &[u64],
    ) -> Result<(), Error> {
        let _order = self.blocks.order();
        let holder = self.state.lock().next_message(name, epoch, sequence)?;
        self.blocks.store(holder, tier, parent, blocks);
        Ok(())
    }

    /// Blocks that left a tier of an instance, in which another one may still have them. `None` means all its tiers.
    ///
    /// # Errors
    /// As [`Self::stored`].
    pub fn removed(
        &self,
        name: &str,
        epoch: u64,
        sequence: u64,
        tier: Option<Tier>,
        blocks: &[u64],
    ) -> Result<(), Error> {
        let _order = self.blocks.order();
        let holder = self.state.lock().next_message(name, epoch, sequence)?;
        self.blocks.remove(holder, tier, blocks);
        Ok(())
    }

    /// Leading blocks of `chain` at each instance that holds any, longest first.
    pub fn lookup(&self, chain: &[u64]) -> Vec<(String, u32)> {
        let mut found = Found::default();
        self.blocks.look(chain, &mut found);
        let state = self.state.lock();
        state.bring_up_to_date(chain, &mut found);
        state.by_name(&found)
    }

    /// # Errors
    /// The request is not in flight.
    pub fn complete(&self, request_id: u64, stage: Stage, now_ms: u64) -> Result<(), Error> {
        self.state.lock().complete(request_id, stage, now_ms)
    }

    /// Expires requests and silent instances, takes stock of the load for the admitters, and gives the
    /// state that the balancer sees.
    pub fn tick(&self, now_ms: u64) -> Snapshot {
        let _order = self.blocks.order();
        self.state.lock().tick(now_ms)
    }

    /// Takes out of the index what forgotten instances held, a piece at a time: decisions come in between.
    pub fn sweep(&self) {
        for _ in 0..SWEEPS {
            if !self.blocks.sweep() {
                break;
            }
        }
    }

    /// Lets idle workers take up new versions of their policies, so that old ones can go.
    pub fn refresh_idle(&self) {
        self.deciders.refresh_idle();
    }

    pub fn counts(&self) -> Counts {
        self.state.lock().counts()
    }

    /// How many requests were not decided, because too many waited.
    pub fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::Relaxed)
    }

    /// How long requests took to schedule, from the call to the answer.
    pub fn decision_times(&self) -> TimesTaken {
        self.decisions.taken()
    }

    pub fn index_stats(&self) -> prefix_index::Stats {
        self.blocks.stats()
    }
}
