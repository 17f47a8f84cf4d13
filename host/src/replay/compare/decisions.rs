//! Two policies asked what a host was asked: a recording of its decisions in place of a trace.
//!
//! Each decision is asked of fresh instances, on the tables it was made on, so one that differs changes none after it.

use super::{Contender, Error, TOLD};
use crate::explain::rerun;
use crate::policy::record::{self, PlayError, Played, Player, Record};
use crate::policy::{Engine, PolicyConfig};
use serde::Serialize;

/// What became of the decisions of one slot.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Decisions {
    pub mode: &'static str,
    pub slot: &'static str,
    pub recording: String,
    /// Decisions of the slot; each was asked of both policies.
    pub decisions: u64,
    /// Of these, recorded from the native twin of a policy that failed.
    pub natively: u64,
    /// Decisions of other slots, which were passed over.
    pub others: u64,
    /// Both answered the same.
    pub agree: u64,
    pub candidate: Side,
    pub baseline: Side,
    /// The first on which the two differ.
    pub differing: Vec<Differing>,
}

/// What one policy answered.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Side {
    pub name: String,
    /// Answered as it was decided then.
    pub as_recorded: u64,
    pub failed: u64,
    /// The first failure.
    pub fault: Option<String>,
}

/// A decision on which the two differ, with the answers in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Differing {
    pub id: u64,
    pub at_ms: u64,
    /// Name of the policy that decided then.
    pub policy: String,
    pub recorded: String,
    pub candidate: String,
    pub baseline: String,
}

impl Decisions {
    /// Asks both policies what is recorded for their slot.
    ///
    /// # Errors
    /// A policy does not start, the recording cannot be read, or it holds no decision of the slot.
    pub fn compare(
        recording: &str,
        [candidate, baseline]: [&Contender; 2],
        records: impl Iterator<Item = Result<Record, record::Error>>,
        limit: usize,
    ) -> Result<Self, Error> {
        let slot = candidate.slot;
        let side = |name: &String| Side { name: name.clone(), ..Side::default() };
        let mut compared = Self {
            mode: "decisions",
            slot: slot.as_str(),
            recording: recording.to_owned(),
            candidate: side(&candidate.name),
            baseline: side(&baseline.name),
            ..Self::default()
        };
        let players = [player(candidate)?, player(baseline)?];
        for record in records {
            let record = record?;
            if record.slot != compared.slot {
                compared.others += 1;
            } else if compared.decisions < limit as u64 {
                compared.ask(&players, &record)?;
            }
        }
        match compared.decisions {
            0 => Err(Error::NoDecision { recording: recording.to_owned(), slot }),
            _ => Ok(compared),
        }
    }

    fn ask(&mut self, [candidate, baseline]: &[Player; 2], record: &Record) -> Result<(), Error> {
        self.decisions += 1;
        self.natively += u64::from(record.fallback.is_some());
        let a = self.candidate.count(record, candidate.play(record, false))?;
        let b = self.baseline.count(record, baseline.play(record, false))?;
        let asked = &record.asked.name;
        if a.as_ref().zip(b.as_ref()).is_some_and(|(a, b)| rerun::is_same(asked, a, b)) {
            self.agree += 1;
        } else if self.differing.len() < TOLD {
            let told = |answer: Option<Vec<u64>>| {
                answer.map_or_else(|| "failed".into(), |answer| rerun::answer(asked, &answer))
            };
            self.differing.push(Differing {
                id: record.id,
                at_ms: record.at_ms,
                policy: record.policy.name.clone(),
                recorded: rerun::answer(asked, &record.answer),
                candidate: told(a),
                baseline: told(b),
            });
        }
        Ok(())
    }
}

impl Side {
    /// The answer; `None`: the policy failed.
    fn count(
        &mut self,
        record: &Record,
        played: Result<Played, PlayError>,
    ) -> Result<Option<Vec<u64>>, PlayError> {
        match played {
            Ok(Played { answer, .. }) => {
                let same = rerun::is_same(&record.asked.name, &answer, &record.answer);
                self.as_recorded += u64::from(same);
                Ok(Some(answer))
            }
            Err(PlayError::Fault { function, fault }) => {
                self.failed += 1;
                self.fault.get_or_insert_with(|| format!("decision {}: `{function}` {fault}", record.id));
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    pub(super) fn faults(&self) -> Vec<String> {
        let more = |fault: &String| match self.failed {
            1 => fault.clone(),
            failed => format!("{fault}; {failed} decisions in all"),
        };
        self.fault.iter().map(more).collect()
    }
}

fn player(of: &Contender) -> Result<Player, Error> {
    let config = PolicyConfig::unhurried();
    let engine = Engine::new(&config, None)?;
    let (source, settings) = (of.choice.source.clone(), of.choice.settings.clone());
    Ok(Player::new(&engine, &config, of.slot, source, settings)?)
}
