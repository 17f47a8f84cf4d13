//! What was decided lately, and why: kept in bounded memory beside the decisions, and never in their way.
//!
//! Each worker writes to a [`Tape`] of its own, whose lock nobody else takes except a caller that asks for an explanation,
//! for the time of a copy. What a policy was asked is kept as it was asked; of the tables only what changed since the
//! decision before, so that a decision costs the words of its question and no allocation.

pub mod blocks;
pub mod rerun;
mod sampler;
mod tape;
#[cfg(test)]
mod tests;
pub mod words;

pub use sampler::{Counts, Sampling};
pub use tape::{Admitted, Copied, Decided, Found, Tape};

use crate::calendar::unix_ms;
use crate::fleet::Told;
use crate::policy::SlotKind;
use crate::policy::record::{Call, FORMAT, Push, Record, bits, decision_words, packed};
use crate::policy::scheduler::pushes;
use kvasir_dataplane::Clock;
use parking_lot::Mutex;
use sampler::{Sample, Sampler};
use std::io;
use std::sync::Arc;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Decisions about requests. 0 means none.
    pub decisions: usize,
    /// Memory of all of them together.
    pub memory_bytes: usize,
}

/// The decisions of one host that can be explained.
#[derive(Debug)]
pub struct Explain {
    limits: Limits,
    tapes: Arc<Tapes>,
    sampler: Option<Sampler>,
}

/// One tape a worker.
#[derive(Debug, Default)]
struct Tapes(Mutex<Vec<Arc<Mutex<Tape>>>>);

impl Tapes {
    fn all(&self) -> Vec<Arc<Mutex<Tape>>> {
        self.0.lock().clone()
    }

    fn find(&self, id: u64) -> Option<Found> {
        // The lock is released before the tables are put together.
        let copied = self.all().iter().find_map(|tape| tape.lock().find(id));
        copied.map(Copied::found)
    }
}

impl Explain {
    /// Keeps decisions, and writes no file.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, tapes: Arc::default(), sampler: None })
    }

    /// Also writes a sample of them to a file. Times of decisions are on `clock`.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn sampled(limits: Limits, sampling: &Sampling, clock: Clock) -> io::Result<Arc<Self>> {
        let tapes = Arc::<Tapes>::default();
        let sampler = Some(Sampler::start(sampling, Arc::clone(&tapes), clock)?);
        Ok(Arc::new(Self { limits, tapes, sampler }))
    }

    /// Keeps nothing.
    pub fn off() -> Arc<Self> {
        Self::new(Limits { decisions: 0, memory_bytes: 0 })
    }

    /// Notes that a decision about a request was kept; it is written if it is sampled.
    pub fn kept(&self, id: u64) {
        if let Some(sampler) = self.sampler.as_ref().filter(|sampler| sampler.takes(id)) {
            sampler.offer(Sample::Decision(id));
        }
    }

    /// Whether a decision that is not about a request is sampled: the `number`th of its slot.
    pub fn takes(&self, number: u64) -> bool {
        self.sampler.as_ref().is_some_and(|sampler| sampler.takes(number))
    }

    /// Writes such a decision. The writing thread makes it into a record; `None` drops it.
    pub fn write(&self, make: impl FnOnce() -> Option<Record> + Send + 'static) {
        if let Some(sampler) = &self.sampler {
            sampler.offer(Sample::Other(Box::new(make)));
        }
    }

    /// What was written of samples. `None` means that none are.
    pub fn written(&self) -> Option<&Counts> {
        self.sampler.as_ref().map(Sampler::counts)
    }

    /// Where one of `workers` workers keeps its decisions. `None` means that nothing is kept.
    pub fn tape(&self, workers: usize) -> Option<Arc<Mutex<Tape>>> {
        if self.limits.decisions == 0 {
            return None;
        }
        let workers = workers.max(1);
        let tape = Tape::new(self.limits.decisions.div_ceil(workers), self.limits.memory_bytes / workers);
        let tape = Arc::new(Mutex::new(tape));
        self.tapes.0.lock().push(Arc::clone(&tape));
        Some(tape)
    }

    /// A decision with all that its policy knew. `None` means that it was never made here, or too long ago.
    pub fn find(&self, id: u64) -> Option<Found> {
        self.tapes.find(id)
    }

    /// The ids of the oldest and the newest decision that are kept.
    pub fn range(&self) -> Option<(u64, u64)> {
        let tapes = self.tapes.all();
        let ranges = tapes.iter().filter_map(|tape| tape.lock().range());
        ranges.reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)))
    }

    /// What the decisions that are kept take, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let tapes = self.tapes.all();
        tapes.iter().map(|tape| tape.lock().bytes()).sum()
    }
}

/// Unix time of a moment on the host's clock, ms.
pub fn unix_ms_of(at_ms: u64, now_ms: u64) -> u64 {
    unix_ms().saturating_sub(now_ms.saturating_sub(at_ms))
}

impl Found {
    /// The tables as the policy knew them.
    pub fn told(&self) -> Told {
        let mut told = Told::default();
        told.apply(&self.tables);
        told
    }

    /// Makes a record that any scheduler can be asked again. `at_ms` is Unix time.
    pub fn record(&self, at_ms: u64) -> Record {
        let decided = &self.decided;
        let mut pushed: Vec<Push> = Vec::new();
        if let Some(knowledge) = &decided.knowledge {
            pushed.push(("adopt".to_owned(), packed(knowledge)));
        }
        pushed.extend(pushes(&self.tables));
        pushed.push(("set-thresholds".to_owned(), bits(&decided.thresholds)));
        Record {
            record: FORMAT,
            slot: SlotKind::Scheduler.to_string(),
            id: decided.id,
            at_ms,
            policy: (*decided.policy).clone(),
            pushed,
            asked: Call::schedule(&self.question),
            answer: decision_words(decided.decision),
            scores: bits(&self.scores),
            fallback: decided.fallback.clone(),
            ns: decided.ns,
        }
    }

    /// What the admitter was asked about it, as a record. `None` means that it was not asked.
    pub fn admitter_record(&self, at_ms: u64) -> Option<Record> {
        let admitted = self.decided.admitted.as_ref()?;
        Some(Record {
            record: FORMAT,
            slot: SlotKind::Admitter.to_string(),
            id: self.decided.id,
            at_ms,
            policy: (*admitted.policy).clone(),
            pushed: vec![("update-load".to_owned(), bits(&admitted.load.encode()))],
            asked: Call::admit_request(self.question.request_words(), &admitted.forecast),
            answer: vec![admitted.verdict.pack()],
            scores: Vec::new(),
            fallback: admitted.fallback.clone(),
            ns: admitted.ns,
        })
    }
}
