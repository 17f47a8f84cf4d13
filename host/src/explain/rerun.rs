//! Recorded decisions, asked again of another policy: `kvasir policy run` and `replay`.

use super::{Decided, Found};
use crate::fleet::{Changes, Told};
use crate::policy::record::{PlayError, Player, Record, Records};
use crate::policy::scheduler::is_same as is_same_decision;
use crate::policy::{SlotKind, record};
use kvasir_policy::scheduler::{
    Answer, DECODE_ROW, Decision, HEAD_WORDS, Layout, PREFILL_ROW, Placement, Question,
};
use std::io::BufRead;
use std::iter::repeat;
use std::sync::Arc;

/// How many ids of decisions that differ are listed.
const TOLD_MAX: usize = 10;
/// The shortest row of either table that a host ever had.
const ROW_AT_FIRST: usize = 17;

/// What became of all records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Answered as recorded.
    pub same: u64,
    pub different: u64,
    /// Recorded from the native twin, in place of a policy that failed; not asked.
    pub natively: u64,
    /// The policy failed.
    pub failed: u64,
    /// Records of other slots, which were not asked.
    pub others: u64,
    /// Ids of the first decisions that differ.
    pub differing: Vec<u64>,
    /// Id and reason.
    pub first_failure: Option<(u64, String)>,
}

/// Asks a policy all records of its slot.
///
/// # Errors
/// The recording cannot be read, or holds something else; or no instance of the policy can be made.
pub fn all<R: BufRead>(player: &Player, records: Records<R>) -> Result<Tally, RerunError> {
    let mut tally = Tally::default();
    for record in records {
        let record = record?;
        if record.slot != player.slot().as_str() {
            tally.others += 1;
        } else if record.fallback.is_some() {
            tally.natively += 1;
        } else {
            tally.count(&record, player.play(&record, false))?;
        }
    }
    Ok(tally)
}

/// Why records could not be asked again.
#[derive(Debug, thiserror::Error)]
pub enum RerunError {
    #[error(transparent)]
    Recording(#[from] record::Error),
    #[error(transparent)]
    Policy(#[from] PlayError),
    #[error("the recording holds no record of the slot {slot} with id {id}")]
    NoSuchRecord { slot: SlotKind, id: u64 },
    #[error("the recording holds no record of the slot {slot}")]
    NoRecord { slot: SlotKind },
}

impl Tally {
    fn count(&mut self, record: &Record, played: Result<record::Played, PlayError>) -> Result<(), PlayError> {
        match played {
            Ok(played) if is_same(&record.asked.name, &played.answer, &record.answer) => self.same += 1,
            Ok(_) => {
                self.different += 1;
                if self.differing.len() < TOLD_MAX {
                    self.differing.push(record.id);
                }
            }
            Err(PlayError::Fault { function, fault }) => {
                self.failed += 1;
                let reason = || (record.id, format!("`{function}` {fault}"));
                self.first_failure.get_or_insert_with(reason);
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }
}

/// The first record of a slot, or the one with that id.
///
/// # Errors
/// There is none, or the recording cannot be read as far as that.
pub fn find<R: BufRead>(slot: SlotKind, id: Option<u64>, records: Records<R>) -> Result<Record, RerunError> {
    for record in records {
        let record = record?;
        if record.slot == slot.as_str() && id.is_none_or(|id| id == record.id) {
            return Ok(record);
        }
    }
    Err(match id {
        Some(id) => RerunError::NoSuchRecord { slot, id },
        None => RerunError::NoRecord { slot },
    })
}

impl Found {
    /// What a scheduler's record tells of its decision; `None` for records of other slots. The record has been checked.
    pub fn of_record(record: &Record) -> Option<Self> {
        let (&[now], [words]) = (&record.asked.scalars[..], &record.asked.lists[..]) else { return None };
        let decision = decision(&record.answer)?;
        let floats = |words: &[u32]| words.iter().copied().map(f32::from_bits).collect::<Vec<f32>>();
        let mut told = Told::default();
        let mut thresholds = Vec::new();
        let mut layout = Layout::default();
        for (name, words) in &record.pushed {
            let mut changes = Changes::default();
            match name.as_str() {
                "open" => {
                    layout = Layout::decode(words);
                    changes.open = Some(layout);
                }
                "update-prefill" => changes.prefill = rows(floats(words), layout.prefill_row, PREFILL_ROW),
                "update-decode" => changes.decode = rows(floats(words), layout.decode_row, DECODE_ROW),
                "update-links" => changes.links = floats(words),
                "set-thresholds" => thresholds = floats(words),
                _ => {}
            }
            told.apply(&changes);
        }
        // In a request of another length, the columns begin elsewhere than in a question.
        if layout.request_words as usize != HEAD_WORDS {
            return None;
        }
        let [prefill, decode] = [layout.prefill_slots, layout.decode_slots].map(|slots| slots as usize);
        Some(Self {
            decided: Decided {
                id: record.id,
                at_ms: record.at_ms,
                policy: Arc::new(record.policy.clone()),
                generation: 0,
                decision,
                fallback: record.fallback.clone(),
                ns: record.ns,
                thresholds: Arc::new(thresholds),
                knowledge: None,
                admitted: None,
            },
            tables: told.all(),
            question: Question::of_words(f32::from_bits(now as u32), words, prefill, decode),
            scores: floats(&record.scores),
        })
    }
}

/// Rows in the length that is known here: an earlier host's say less, a later one's more. What is missing is unknown, for which
/// the contract writes -1.
fn rows(values: Vec<f32>, given: u32, known: usize) -> Vec<f32> {
    let given = given as usize;
    if given == known {
        return values;
    }
    let row = |row: &[f32]| -> Vec<f32> { row.iter().copied().chain(repeat(-1.0)).take(known).collect() };
    // A record may claim any length; a row of which so little is known is not used.
    if given < ROW_AT_FIRST { Vec::new() } else { values.chunks_exact(given).flat_map(row).collect() }
}

/// A decision as it was recorded. Returns `None` if these are not its eight words.
pub fn decision(words: &[u64]) -> Option<Decision> {
    let &[prefill, decode, transfer_blocks, source, reason, retry_after, session_memo, tenant_charge] = words
    else {
        return None;
    };
    let [prefill, decode, transfer_blocks, source, reason, retry_after] =
        [prefill, decode, transfer_blocks, source, reason, retry_after].map(|word| word as u32);
    Some(
        Answer { prefill, decode, transfer_blocks, source, reason, retry_after, session_memo, tenant_charge }
            .into(),
    )
}

/// Whether two answers to the same question come to the same, as a trial counts it: memos, charges and the reasons of a
/// refusal do not matter.
pub fn is_same(asked: &str, a: &[u64], b: &[u64]) -> bool {
    match (asked, a, b) {
        ("schedule", a, b) => match (decision(a), decision(b)) {
            (Some(a), Some(b)) => is_same_decision(&a, &b),
            _ => a == b,
        },
        ("admit-request", &[a], &[b]) => a as u8 == b as u8,
        _ => a == b,
    }
}

/// An answer in words: of the function of the contract called so.
pub fn answer(asked: &str, words: &[u64]) -> String {
    let list = |words: &mut dyn Iterator<Item = String>| words.collect::<Vec<_>>().join(" ");
    match (asked, words) {
        ("schedule", words) => match decision(words) {
            Some(Decision::Run(Placement { prefill, decode, transfer, .. })) => {
                let fetched = transfer.map(|t| format!(", {} blocks from slot {}", t.blocks, t.source));
                format!("prefill slot {prefill}, decode slot {decode}{}", fetched.unwrap_or_default())
            }
            Some(Decision::Reject { reason, retry_after_ms }) => {
                format!("rejected: {}, again after {retry_after_ms} ms", super::words::reason(reason))
            }
            None => "no decision".to_owned(),
        },
        ("admit-request", &[bits]) => match bits as u8 {
            0 => "accept".to_owned(),
            1 => "queue".to_owned(),
            _ => format!("reject, reason {}, again after {} ms", bits >> 8 & 0x00ff_ffff, bits >> 32),
        },
        ("admit-blocks", words) => {
            let word =
                |word: &u64| ["skip", "store", "colder"].get(*word as usize).copied().unwrap_or("unknown");
            list(&mut words.iter().map(|w| word(w).to_owned()))
        }
        ("tick", words) => {
            format!("thresholds {}", list(&mut words.iter().map(|w| f32::from_bits(*w as u32).to_string())))
        }
        (_, words) => format!("victims {}", list(&mut words.iter().map(|w| (w & 0x0fff_ffff).to_string()))),
    }
}
