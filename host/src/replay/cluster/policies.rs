//! The policies that decide in a simulated cluster.

use super::Setup;
use crate::policy::admitter::AdmitterHook;
use crate::policy::balancer::BalancerHook;
use crate::policy::evictor::{EvictorEngine, EvictorHook};
use crate::policy::scheduler::SchedulerHook;
use crate::policy::slot::Hook;
use crate::policy::{
    Engine, Error, GuardConfig, PolicyConfig, PolicyHost, Prepared, SlotKind, SlotStatus, Source, Wanted,
};
use std::sync::Arc;
use std::time::Duration;

/// A policy and its settings.
#[derive(Clone, Debug)]
pub struct Choice {
    pub source: Source,
    pub settings: Vec<(String, String)>,
}

/// One for each slot.
#[derive(Clone, Debug)]
pub struct Choices {
    pub scheduler: Choice,
    pub evictor: Choice,
    pub admitter: Choice,
    pub balancer: Choice,
}

/// The native twins of the default policies.
impl Default for Choices {
    fn default() -> Self {
        fn first<H: Hook>() -> Choice {
            let name = H::builtins().next().map_or("", |builtin| builtin.name);
            Choice { source: Source::Native(name.into()), settings: Vec::new() }
        }
        Self {
            scheduler: first::<SchedulerHook>(),
            evictor: first::<EvictorHook>(),
            admitter: first::<AdmitterHook>(),
            balancer: first::<BalancerHook>(),
        }
    }
}

impl Choices {
    #[must_use]
    pub fn with(mut self, slot: SlotKind, choice: Choice) -> Self {
        *match slot {
            SlotKind::Scheduler => &mut self.scheduler,
            SlotKind::Evictor => &mut self.evictor,
            SlotKind::Admitter => &mut self.admitter,
            SlotKind::Balancer => &mut self.balancer,
        } = choice;
        self
    }
}

/// A policy that takes over in the course of a replay.
#[derive(Clone, Debug)]
pub struct Swap {
    /// Virtual time since the first request, µs.
    pub at_us: u64,
    /// Not that of the evictors, of which each pool has its own.
    pub slot: SlotKind,
    pub choice: Choice,
}

/// A swap that took place.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Swapped {
    pub at_s: f64,
    pub slot: &'static str,
    pub from: String,
    pub to: String,
}

impl Swap {
    /// # Errors
    /// The policy does not start.
    pub(super) fn take_place(&self, host: &PolicyHost, now_us: u64) -> Result<Swapped, Error> {
        let from = host.status(self.slot).name;
        let Choice { source, settings } = self.choice.clone();
        let to = host.load(self.slot, source, settings)?.name;
        Ok(Swapped { at_s: now_us as f64 / 1e6, slot: self.slot.as_str(), from, to })
    }
}

/// What a policy did that it must not do, in one slot.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Faults {
    pub slot: &'static str,
    pub policy: String,
    pub traps: u64,
    pub deadline_misses: u64,
    pub invalid_answers: u64,
    /// Decisions that a native policy made instead.
    pub fallbacks: u64,
    /// Times its learner failed; it was made again.
    pub learner_faults: u64,
}

impl Faults {
    pub fn any(&self) -> bool {
        self.traps + self.deadline_misses + self.invalid_answers + self.fallbacks + self.learner_faults > 0
    }
}

impl std::fmt::Display for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { slot, policy, traps, deadline_misses, invalid_answers, fallbacks, learner_faults } = self;
        write!(
            f,
            "{slot} `{policy}`: {traps} traps, {deadline_misses} deadlines missed, {invalid_answers} invalid answers; a \
             native policy decided {fallbacks} times instead"
        )?;
        if *learner_faults > 0 {
            write!(f, "; its learner failed {learner_faults} times")?;
        }
        Ok(())
    }
}

/// What a policy learned from in one slot.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Learned {
    pub slot: &'static str,
    pub policy: String,
    /// How many ends of requests it was told.
    pub outcomes: u64,
    /// Outcomes that it was too slow for.
    pub dropped: u64,
    /// Times that it told its deciding instances something new, and the bytes of the last.
    pub published: u64,
    pub knowledge_bytes: u64,
}

impl std::fmt::Display for Learned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { slot, policy, outcomes, dropped, published, knowledge_bytes } = self;
        write!(
            f,
            "{slot} `{policy}`: {outcomes} outcomes heard, {dropped} dropped; published {published} times, \
             {knowledge_bytes} B at last"
        )
    }
}

/// Policies in service, as in a host: the breaker alone never acts, so that one that fails is not replaced unseen.
pub struct Policies {
    pub(super) host: Arc<PolicyHost>,
    /// One per pool.
    pub(super) evictors: Vec<Box<dyn EvictorEngine>>,
    evictor: String,
}

impl Policies {
    /// # Errors
    /// One of the policies does not start.
    pub fn open(setup: &Setup, choices: &Choices) -> Result<Self, Error> {
        let off = GuardConfig { watch: Duration::ZERO, every: Duration::ZERO, ..GuardConfig::default() };
        Self::guarded(setup, choices, off)
    }

    /// The same with guards, which look when [`PolicyHost::judge`] is called and not by themselves.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn guarded(setup: &Setup, choices: &Choices, guard: GuardConfig) -> Result<Self, Error> {
        let config = PolicyConfig {
            evictor_slots: setup.pool_blocks,
            breaker_faults: u32::MAX,
            // Not by the clock of this machine, which has no place here.
            learn_every: Duration::ZERO,
            guard: GuardConfig { every: Duration::ZERO, ..guard },
            instances: 256 + setup.pools(),
            ..PolicyConfig::unhurried()
        };
        let pair = |choice: &Choice| (choice.source.clone(), choice.settings.clone());
        let wanted = Wanted {
            scheduler: pair(&choices.scheduler),
            admitter: pair(&choices.admitter),
            balancer: pair(&choices.balancer),
            ..Wanted::default()
        };
        // The evictors are ours: one per pool, and none in the host's own slot but a native one.
        let wanted = Wanted { evictor: pair(&Choices::default().evictor), ..wanted };
        let engine = Engine::new(&config, None)?;
        let evictor = Prepared::<EvictorHook>::new(
            &engine,
            &config,
            choices.evictor.source.clone(),
            choices.evictor.settings.clone(),
        )?;
        let (mut evictors, mut name) = (Vec::new(), String::new());
        for _ in 0..setup.pools() {
            let (engine, description) = evictor.engine()?;
            evictors.push(engine);
            name = description.name;
        }
        Ok(Self { host: PolicyHost::open(&config, wanted, None)?, evictors, evictor: name })
    }

    pub fn host(&self) -> &Arc<PolicyHost> {
        &self.host
    }

    /// Name of the policy that decides in a slot.
    pub fn name(&self, slot: SlotKind) -> String {
        if slot == SlotKind::Evictor { self.evictor.clone() } else { self.host.status(slot).name }
    }

    /// What failed in the slots of the host; that of the evictors is in their pools.
    pub(super) fn faults(host: &PolicyHost) -> Vec<Faults> {
        let kinds = SlotKind::ALL.into_iter().filter(|&slot| slot != SlotKind::Evictor);
        let faults = kinds.map(|slot| {
            let SlotStatus { name, totals, learning, .. } = host.status(slot);
            Faults {
                slot: slot.as_str(),
                policy: name,
                traps: totals.traps,
                deadline_misses: totals.deadline_misses,
                invalid_answers: totals.invalid_answers,
                fallbacks: totals.fallbacks,
                learner_faults: learning.faults,
            }
        });
        faults.filter(Faults::any).collect()
    }

    /// How much the policies that learn were told.
    pub(super) fn learned(host: &PolicyHost) -> Vec<Learned> {
        let statuses = SlotKind::ALL.into_iter().map(|slot| (slot, host.status(slot)));
        let learned = statuses.filter(|(_, status)| status.learning.learns).map(|(slot, status)| Learned {
            slot: slot.as_str(),
            policy: status.name,
            outcomes: status.learning.outcomes,
            dropped: status.learning.dropped,
            published: status.learning.published,
            knowledge_bytes: status.learning.knowledge_bytes,
        });
        learned.collect()
    }
}
