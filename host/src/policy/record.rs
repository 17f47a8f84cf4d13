//! A recorded decision: what a policy had been pushed, what it was asked, and what it answered.
//!
//! A recording is a text file with one JSON object a line. It is read from people and other machines, so every line,
//! list and count has a limit. [`Player`] asks any policy of the slot the same again.

mod play;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use play::decision_words;
pub use play::{PlayError, Playable, Played, Player, Tables, push_all};

use super::slot::{Hook, Version};
use super::{SlotKind, UnknownSlot};
use crate::text::printable;
use kvasir_policy::admitter::{BLOCK_WORDS, Forecast};
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::scheduler::Question;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Write};

/// Version of the format.
pub const FORMAT: u32 = 1;
/// The longest line of a recording, its end included.
pub const LINE_BYTES_MAX: usize = 16 << 20;
/// The most pushes of one record.
pub const PUSHES_MAX: usize = 4_096;
/// The most words of one record, all its lists together: tables of 4,096 instances take 160,000.
pub const WORDS_MAX: usize = 1 << 20;
/// The most records that are read of one recording.
pub const RECORDS_MAX: usize = 1_000_000;

/// One decision, so complete that any policy of its slot can be asked the same again.
///
/// Numbers that are floats in the contract are their bits (`f32::to_bits`), so nothing is lost in text. A `u64` in a
/// list of words is two of them, low half first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`FORMAT`].
    pub record: u32,
    /// `scheduler`, `evictor`, `admitter` or `balancer`.
    pub slot: String,
    /// Id of the decision.
    pub id: u64,
    /// Unix time, ms.
    pub at_ms: u64,
    /// Which policy was in service.
    pub policy: PolicyOf,
    /// What the policy was told before, in that order: names of the contract's functions, and their arguments.
    ///
    /// A clock in front of a list (`on-events`, and `schedule` or `select-victims` where a decision before this one has
    /// to be made again) stands in its first words; the bytes of `adopt` and `import-state` are their number, then four
    /// a word, the first in the lowest bits.
    pub pushed: Vec<Push>,
    pub asked: Call,
    /// In the order of the contract: the eight fields of a `decision`, the bits of a verdict, an answer per block, packed
    /// victims, or thresholds as bits. Empty where it is not known.
    pub answer: Vec<u64>,
    /// Scores as bits; empty where the policy gave none or was not asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<u32>,
    /// Why the native twin answered in the policy's place. `None` means that the policy did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// How long the answer took.
    pub ns: u64,
}

/// The policy in service when a decision was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyOf {
    pub name: String,
    pub version: String,
    /// SHA-256 of the component. `None` means that it is compiled into the host.
    #[serde(default)]
    pub digest: Option<String>,
    #[serde(default)]
    pub settings: Vec<(String, String)>,
}

impl<H: Hook> From<&Version<H>> for PolicyOf {
    fn from(version: &Version<H>) -> Self {
        Self {
            name: version.description.name.clone(),
            version: version.description.version.clone(),
            digest: version.digest().map(|digest| digest.to_string()),
            settings: version.assignment.settings.clone(),
        }
    }
}

/// A function of the contract that was called before the question, and its arguments.
pub type Push = (String, Vec<u32>);

/// The question itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// Function of the contract.
    pub name: String,
    /// Arguments that are numbers, floats as their bits.
    pub scalars: Vec<u64>,
    /// Arguments that are lists.
    pub lists: Vec<Vec<u32>>,
}

impl Call {
    pub(crate) fn schedule(question: &Question) -> Self {
        let (now, words) = (question.now().to_bits(), question.words().to_vec());
        Self { name: "schedule".into(), scalars: vec![now.into()], lists: vec![words] }
    }

    pub(crate) fn select_victims(now_ms: u64, want: u64) -> Self {
        Self { name: "select-victims".into(), scalars: vec![now_ms, want], lists: Vec::new() }
    }

    /// `request`: words as in the contract.
    pub(crate) fn admit_request(request: &[u32], forecast: &Forecast) -> Self {
        let lists = vec![request.to_vec(), bits(&forecast.encode())];
        Self { name: "admit-request".into(), scalars: Vec::new(), lists }
    }

    /// `words`: records of [`BLOCK_WORDS`].
    pub(crate) fn admit_blocks(tier: u32, words: Vec<u32>) -> Self {
        let scalars = vec![tier.into(), BLOCK_WORDS as u64];
        Self { name: "admit-blocks".into(), scalars, lists: vec![words] }
    }

    pub(crate) fn tick(seen: &Snapshot) -> Self {
        let lists = [&seen.cluster()[..], &seen.prefill_queue_ms, &seen.decode_step_ms];
        Self { name: "tick".into(), scalars: vec![seen.now_ms], lists: lists.map(bits).into() }
    }
}

/// What is wrong with one record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    #[error("not a record: {0}")]
    Json(String),
    #[error("field `record` is {0}; this kvasir reads format {FORMAT}")]
    Format(u32),
    #[error("field `slot`: {0}")]
    Slot(#[from] UnknownSlot),
    #[error("field `{field}` names `{name}`, which is no function of a {slot} here; known: {known}")]
    Function { field: String, name: String, slot: SlotKind, known: String },
    #[error("field `{field}`: {problem}")]
    Field { field: String, problem: String },
    #[error("field `{field}` holds {given}; at most {limit} are read")]
    TooMany { field: &'static str, given: usize, limit: usize },
}

/// Why a recording cannot be read on, or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the recording: {0}")]
    Read(io::Error),
    #[error("cannot write the recording: {0}")]
    Write(io::Error),
    #[error(
        "line {line} of the recording has more than {LINE_BYTES_MAX} bytes; it is no recording, or damaged"
    )]
    LineTooLong { line: u64 },
    #[error("line {line} of the recording: {problem}")]
    Bad { line: u64, problem: BadRecord },
    #[error("the recording has more than {RECORDS_MAX} records; split it by lines")]
    TooManyRecords,
}

impl Record {
    /// The slot that decided.
    ///
    /// # Errors
    /// The name is of no slot.
    pub fn slot_kind(&self) -> Result<SlotKind, BadRecord> {
        Ok(self.slot.parse()?)
    }

    /// Reads one line, and checks that it can be played.
    ///
    /// # Errors
    /// The field at fault.
    pub fn parse(line: &str) -> Result<Self, BadRecord> {
        let record: Self = serde_json::from_str(line).map_err(|e| {
            BadRecord::Json(printable(&e.to_string().replace(" at line 1 column", ", column"), 256))
        })?;
        record.check()?;
        Ok(record)
    }

    /// Whether a line is of a recording, complete or not, rather than of a trace.
    pub fn is_line(line: &[u8]) -> bool {
        #[derive(Deserialize)]
        struct Mark {
            #[serde(rename = "record")]
            _format: u32,
        }
        serde_json::from_slice::<Mark>(line).is_ok()
    }

    /// Whether it is complete and within the limits, so that an engine can be asked.
    ///
    /// # Errors
    /// The field at fault.
    pub fn check(&self) -> Result<(), BadRecord> {
        if self.record != FORMAT {
            return Err(BadRecord::Format(self.record));
        }
        let limited = |field, given, limit| {
            if given > limit { Err(BadRecord::TooMany { field, given, limit }) } else { Ok(()) }
        };
        limited("pushed", self.pushed.len(), PUSHES_MAX)?;
        let pushed = self.pushed.iter().map(|(_, words)| words.len());
        let asked = self.asked.lists.iter().map(Vec::len);
        let words = pushed.chain(asked).fold(0, usize::saturating_add);
        limited("pushed` with `asked", words, WORDS_MAX)?;
        limited("answer", self.answer.len(), WORDS_MAX)?;
        limited("scores", self.scores.len(), WORDS_MAX)?;
        shape::check(self)
    }

    /// Writes it as one line.
    ///
    /// # Errors
    /// As the writer.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut *to, self)?;
        to.write_all(b"\n")
    }
}

/// The records of a recording, one after the other, without holding more than one line.
pub struct Records<R> {
    from: R,
    line: u64,
    read: usize,
    buffer: Vec<u8>,
    ended: bool,
}

impl<R: BufRead> Records<R> {
    pub fn new(from: R) -> Self {
        Self { from, line: 0, read: 0, buffer: Vec::new(), ended: false }
    }

    /// The next line that is not empty; `false` at the end.
    fn next_line(&mut self) -> Result<bool, Error> {
        loop {
            self.buffer.clear();
            self.line += 1;
            let limit = LINE_BYTES_MAX as u64 + 1;
            let mut limited = io::Read::take(&mut self.from, limit);
            let bytes = limited.read_until(b'\n', &mut self.buffer).map_err(Error::Read)?;
            if bytes as u64 == limit {
                return Err(Error::LineTooLong { line: self.line });
            }
            if bytes == 0 || !self.buffer.trim_ascii().is_empty() {
                return Ok(bytes > 0);
            }
        }
    }

    fn read(&mut self) -> Result<Option<Record>, Error> {
        if !self.next_line()? {
            return Ok(None);
        }
        self.read += 1;
        if self.read > RECORDS_MAX {
            return Err(Error::TooManyRecords);
        }
        let bad = |problem| Error::Bad { line: self.line, problem };
        let text = str::from_utf8(&self.buffer).map_err(|e| bad(BadRecord::Json(e.to_string())))?;
        Record::parse(text).map(Some).map_err(bad)
    }
}

/// Ends after the first error.
impl<R: BufRead> Iterator for Records<R> {
    type Item = Result<Record, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let record = self.read().transpose();
        self.ended = !matches!(record, Some(Ok(_)));
        record
    }
}

/// Two words, low half first.
pub(crate) fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// The bits of floats.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Bytes as `adopt` and `import-state` are recorded: their number, then four a word.
pub(crate) fn packed(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks(4).map(|four| {
        let mut word = [0; 4];
        word[..four.len()].copy_from_slice(four);
        u32::from_le_bytes(word)
    });
    std::iter::once(bytes.len() as u32).chain(words).collect()
}
