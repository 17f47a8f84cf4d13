//! Which blocks evictors chose lately, and in which place.

use kvasir_dataplane::BlockKey;
use kvasir_dataplane::tier::dram::BlockStat;
use kvasir_dataplane::tier::ghosts::MissCause;
use kvasir_dataplane::tier::store::Tier;
use kvasir_dataplane::tier::tiering::Residency;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Choices of one block that are told.
const TOLD_MAX: usize = 16;

/// An evictor's choice of a block. 80 bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub key: BlockKey,
    /// These three are on the host's clock.
    pub at_ms: u64,
    pub inserted_ms: u64,
    pub used_ms: u64,
    pub uses: u32,
    pub policy: Arc<str>,
    pub generation: u64,
    /// Place in the answer, which had `of` victims; 1 = most expendable.
    pub rank: u16,
    pub of: u16,
    /// Where its bytes were to go, as the contract has it.
    pub to: u8,
    /// The native twin chose.
    pub fallback: bool,
}

/// The last choices in one pool.
#[derive(Debug)]
pub struct Evicted {
    choices: Mutex<VecDeque<Choice>>,
    limit: usize,
}

/// What is remembered of a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Past {
    /// Newest first.
    pub choices: Vec<Choice>,
    /// Choices before this time are forgotten. `None` means that none is.
    pub since_ms: Option<u64>,
}

impl Evicted {
    pub fn new(limit: usize) -> Self {
        Self { choices: Mutex::default(), limit }
    }

    /// Whether anything is remembered.
    pub fn is_on(&self) -> bool {
        self.limit > 0
    }

    /// Remembers what one answer chose, most expendable first.
    pub fn note(&self, chosen: impl Iterator<Item = Choice>) {
        let mut choices = self.choices.lock();
        for choice in chosen {
            if choices.len() == self.limit {
                choices.pop_front();
            }
            choices.push_back(choice);
        }
    }

    pub fn of(&self, key: BlockKey) -> Past {
        let choices = self.choices.lock();
        let of_block = choices.iter().rev().filter(|choice| choice.key == key);
        let forgot = choices.len() == self.limit;
        let since_ms = choices.front().filter(|_| forgot).map(|oldest| oldest.at_ms);
        Past { choices: of_block.take(TOLD_MAX).cloned().collect(), since_ms }
    }
}

/// Where the policy wanted the bytes of a victim.
pub fn destination(to: u8) -> &'static str {
    match to {
        1 => "hbm",
        3 => "nvme",
        4 => "remote",
        15 => "nowhere",
        _ => "host",
    }
}

/// Where a block is, or how it left, in one or two sentences. `peers`: names of those known to hold it.
pub fn summary(
    at: &Residency,
    peers: &[String],
    stat: Option<&BlockStat>,
    past: &Past,
    cause: MissCause,
    now_ms: u64,
) -> String {
    let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
    if let Some(stat) = stat {
        let age = now_ms.saturating_sub(stat.inserted_ms);
        let mut text = format!("It is in the pool, since {}; used {} times.", seconds(age), stat.uses);
        if let Some(chosen) = past.choices.first() {
            text += &match chosen.at_ms >= stat.inserted_ms {
                true => format!(
                    " `{}` has chosen it as a victim, and it is still there: in use, or in the reserve.",
                    chosen.policy
                ),
                false => format!(" It was evicted {} ago and has come back.", seconds(now_ms - chosen.at_ms)),
            };
        }
        return text;
    }
    let left = match (cause, past.choices.first()) {
        (MissCause::Evicted, Some(chosen)) => format!(
            "{} evicted it {} ago, at place {} of {}: {} in the pool, not used for {}.",
            match chosen.fallback {
                true => format!("The native twin of `{}`", chosen.policy),
                false => format!("`{}`", chosen.policy),
            },
            seconds(now_ms.saturating_sub(chosen.at_ms)),
            chosen.rank,
            chosen.of,
            seconds(chosen.at_ms.saturating_sub(chosen.inserted_ms)),
            seconds(chosen.at_ms.saturating_sub(chosen.used_ms)),
        ),
        (MissCause::Evicted, None) => {
            "It was evicted by an operator, or so long ago that the choice is forgotten.".to_owned()
        }
        (MissCause::Expired, _) => "It expired: its time to live, or that of its reservation, had passed.".to_owned(),
        (MissCause::Removed, _) => "It was removed on request; the audit log says by whom.".to_owned(),
        (MissCause::Corrupted, _) => "Its bytes no longer matched its checksum, so it was dropped.".to_owned(),
        (_, Some(chosen)) => format!(
            "`{}` evicted it {} ago; how it left last is forgotten.",
            chosen.policy,
            seconds(now_ms.saturating_sub(chosen.at_ms))
        ),
        (_, None) => match past.since_ms {
            None => "It was never in this pool since the host started, as far as is remembered: no eviction is forgotten.".to_owned(),
            Some(since) => format!(
                "Nothing is known of it: it never was in this pool, or left it more than {} ago.",
                seconds(now_ms.saturating_sub(since))
            ),
        },
    };
    match at.size {
        Some(_) => format!("It is not in the pool, but {}. {left}", elsewhere(at, peers)),
        None => left,
    }
}

/// `in nvme, and at the peer host-2`.
fn elsewhere(at: &Residency, peers: &[String]) -> String {
    let tiers: Vec<_> = at.tiers().filter(|tier| *tier != Tier::Peer).map(|tier| tier.name()).collect();
    let mut places = Vec::new();
    if !tiers.is_empty() {
        places.push(format!("in {}", tiers.join(", ")));
    }
    match peers {
        // A block may have come or gone between the two looks.
        [] if tiers.is_empty() => places.push("at a peer".to_owned()),
        [] => {}
        [peer] => places.push(format!("at the peer {peer}")),
        peers => places.push(format!("at the peers {}", peers.join(", "))),
    }
    places.join(", and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(key: u128, at_ms: u64) -> Choice {
        Choice {
            key: BlockKey(key),
            at_ms,
            inserted_ms: at_ms / 2,
            used_ms: at_ms / 2,
            uses: 1,
            policy: "lru".into(),
            generation: 1,
            rank: 3,
            of: 64,
            to: 3,
            fallback: false,
        }
    }

    #[test]
    fn the_last_choices_are_remembered_and_it_is_said_when_some_are_not() {
        let evicted = Evicted::new(3);
        assert_eq!(evicted.of(BlockKey(1)), Past::default());
        evicted.note([choice(1, 1_000), choice(2, 1_000)].into_iter());
        assert_eq!(evicted.of(BlockKey(1)).since_ms, None);
        evicted.note([choice(1, 2_000), choice(3, 2_000)].into_iter());
        let past = evicted.of(BlockKey(1));
        assert_eq!((past.choices, past.since_ms), (vec![choice(1, 2_000)], Some(1_000)));
        assert!(evicted.of(BlockKey(9)).choices.is_empty());
    }

    #[test]
    fn what_is_not_known_is_said_apart_from_what_never_was() {
        let nowhere = Residency::default();
        let say = |past: &Past, cause| summary(&nowhere, &[], None, past, cause, 10_000);
        let none = Past::default();
        assert!(say(&none, MissCause::NeverStored).contains("never in this pool"));
        let forgot = Past { since_ms: Some(4_000), ..Past::default() };
        assert!(say(&forgot, MissCause::NeverStored).contains("or left it more than 6.0 s ago"));
        let chosen = Past { choices: vec![choice(1, 8_000)], since_ms: None };
        let text = say(&chosen, MissCause::Evicted);
        assert!(text.contains("`lru` evicted it 2.0 s ago, at place 3 of 64: 4.0 s in the pool"), "{text}");
        assert!(say(&none, MissCause::Evicted).contains("by an operator"));
        assert!(say(&chosen, MissCause::Removed).contains("on request"));
    }
}
