//! Policies on trial, and what changes in a slot: as operators and the history see them.

use super::counters::CounterValues;
use super::guard::{Guard, WindowValues};
use super::slot::LearningStatus;
use super::{Error, SlotKind};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a policy is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// It decides.
    Active,
    /// It is asked beside the active policy, and its answers are compared and not used.
    Shadow,
    /// It decides for a share of the requests.
    Canary(Share),
}

/// The requests that a canary decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// This many of a thousand sessions, or of a thousand prompts where requests name no session.
    PerMille(u32),
    /// The requests of this tenant, by its number.
    Tenant(u32),
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Active => f.write_str("active"),
            Self::Shadow => f.write_str("shadow"),
            Self::Canary(Share::PerMille(share)) => write!(f, "canary {}%", f64::from(*share) / 10.0),
            Self::Canary(Share::Tenant(tenant)) => write!(f, "canary tenant {tenant}"),
        }
    }
}

/// What of a request matters for the choice of the policy that decides it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Subject<'a> {
    pub tenant: u32,
    /// 0 means that it names none.
    pub session: u64,
    /// The chained hashes of its prompt.
    pub chain: &'a [u64],
}

impl Share {
    /// # Errors
    /// No share that a canary can have.
    pub fn check(self, slot: SlotKind) -> Result<(), Error> {
        match self {
            Self::PerMille(0 | 1_001..) => Err(Error::Share { slot }),
            Self::PerMille(_) | Self::Tenant(_) => Ok(()),
        }
    }

    /// Whether the canary in `slot` decides this request: the same for every request of a session, and for every
    /// request with the same prompt where no session is named. Slots choose independently of each other.
    pub fn takes(self, slot: SlotKind, subject: &Subject<'_>) -> bool {
        match self {
            Self::Tenant(tenant) => subject.tenant == tenant,
            Self::PerMille(share) => {
                let named = if subject.session != 0 {
                    subject.session
                } else {
                    subject.chain.last().copied().unwrap_or(0)
                };
                let mixed = mix(named ^ mix(u64::from(subject.tenant) << 8 | slot as u64));
                // The upper half times the range, rather than a remainder: no bias worth a name, and no division.
                ((u128::from(mixed) * 1_000) >> 64) < u128::from(share)
            }
        }
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A policy on trial, and how it does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrialStatus {
    pub name: String,
    pub version: String,
    /// `wasm` or `native`.
    pub engine: &'static str,
    /// SHA-256 of the component; `None` for native.
    pub digest: Option<String>,
    pub generation: u64,
    pub settings: Vec<(String, String)>,
    pub stage: Stage,
    pub counters: CounterValues,
    /// The answers of a shadow beside those of the active policy.
    pub agreement: Agreement,
    /// Decisions that a shadow was not told, because it was behind.
    pub dropped: u64,
    /// The last window: what came of its decisions, or would have come of them, beside those of the active policy.
    pub window: Beside,
    /// What its learner did.
    pub learning: LearningStatus,
}

/// How often a shadow answered as the active policy did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Agreement {
    pub asked: u64,
    pub same: u64,
}

/// Two policies over the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Beside {
    pub newcomer: WindowValues,
    /// What the newcomer is held against.
    pub compared: Option<WindowValues>,
}

/// A policy that came into service a short while ago: if it breaks a guard, the one before it is put back.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WatchStatus {
    /// For how long it is still watched.
    pub seconds_left: u64,
    /// The one before it in its last window, for comparison.
    pub window: Beside,
}

/// A policy as one change of a slot knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyId {
    pub name: String,
    pub version: String,
    /// SHA-256 of the component; `None` for native.
    pub digest: Option<String>,
    pub generation: u64,
    pub settings: Vec<(String, String)>,
}

/// What happened in a slot.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    pub slot: SlotKind,
    pub action: Action,
    pub cause: Cause,
    /// What had the seat before: in service, or on trial.
    pub before: Option<PolicyId>,
    /// What has it now.
    pub after: Option<PolicyId>,
    /// Why, where the host did it by itself.
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// It came into service without a trial.
    Loaded,
    /// It serves with other settings than before.
    Set,
    /// It is on trial in that stage.
    Tried(Stage),
    /// It came into service from its trial.
    Promoted,
    /// The trial ended; what serves is untouched.
    TrialEnded,
    /// What served before serves again, or the native default.
    RolledBack,
    Paused,
    Resumed,
}

/// What brought the change about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A call of [`PolicyHost`](super::PolicyHost): its caller knows for whom.
    Operator,
    /// A file in the watched folder.
    Folder,
    Guard(Guard),
    /// Faults in a short time.
    Breaker,
    /// What was stored by an earlier run could not be restored.
    Restart,
}

/// Hears of each change, on the thread that made it, once it holds; it must not call the host back.
pub type Listener = Box<dyn Fn(&Change) + Send + Sync>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_canary_takes_its_share_and_a_session_stays() {
        let session = |session| Subject { session, ..Subject::default() };
        for share in [1, 10, 50, 500, 1_000] {
            let takes = |n: u64| Share::PerMille(share).takes(SlotKind::Scheduler, &session(n));
            let taken = (1..=100_000).filter(|&n| takes(n)).count() as f64;
            let expected = 100.0 * f64::from(share);
            assert!((taken - expected).abs() <= 4.0 * expected.sqrt(), "{taken} where {expected}");
        }
        // A session stays whatever its prompt; without one, the prompt counts.
        let half = Share::PerMille(500);
        let takes = |subject: Subject<'_>| half.takes(SlotKind::Scheduler, &subject);
        assert!((1..1_000).all(|n| takes(session(7)) == takes(Subject { chain: &[n], ..session(7) })));
        let prompt = |n: u64| takes(Subject { chain: &[1, n], ..Subject::default() });
        let prompts = (1..=1_000).filter(|&n| prompt(n)).count();
        assert!((400..600).contains(&prompts), "{prompts}");
    }

    #[test]
    fn a_larger_share_keeps_the_sessions_of_a_smaller_one() {
        let takes = |share, session| {
            let subject = Subject { session, ..Subject::default() };
            Share::PerMille(share).takes(SlotKind::Admitter, &subject)
        };
        assert!((1..10_000).all(|session| !takes(50, session) || takes(100, session)));
    }

    #[test]
    fn slots_and_tenants_choose_independently() {
        let takes = |slot, tenant, session| {
            let subject = Subject { tenant, session, ..Subject::default() };
            Share::PerMille(500).takes(slot, &subject)
        };
        let differ = |f: &dyn Fn(u64) -> (bool, bool)| (1..=1_000).filter(|&n| f(n).0 != f(n).1).count();
        let slots = differ(&|n| (takes(SlotKind::Scheduler, 0, n), takes(SlotKind::Admitter, 0, n)));
        let tenants = differ(&|n| (takes(SlotKind::Scheduler, 1, n), takes(SlotKind::Scheduler, 2, n)));
        assert!((400..600).contains(&slots) && (400..600).contains(&tenants), "{slots} {tenants}");
    }

    #[test]
    fn a_tenant_is_taken_whole() {
        let share = Share::Tenant(3);
        for session in 0..100 {
            let subject = |tenant| Subject { tenant, session, ..Subject::default() };
            assert!(share.takes(SlotKind::Scheduler, &subject(3)));
            assert!(!share.takes(SlotKind::Scheduler, &subject(2)));
        }
        assert!(Share::PerMille(0).check(SlotKind::Scheduler).is_err());
        assert!(Share::PerMille(1_001).check(SlotKind::Scheduler).is_err());
        assert!(Share::PerMille(1_000).check(SlotKind::Scheduler).is_ok());
    }

    #[test]
    fn stages_are_named_as_they_are_typed() {
        let named = [Stage::Active, Stage::Shadow, Stage::Canary(Share::PerMille(5))].map(|s| s.to_string());
        assert_eq!(named, ["active", "shadow", "canary 0.5%"]);
    }
}
