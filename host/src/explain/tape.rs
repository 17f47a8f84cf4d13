//! The last decisions of one worker.

use crate::fleet::{Changes, Recent, Told};
use crate::policy::record::PolicyOf;
use kvasir_policy::admitter::{Forecast, Load, Verdict};
use kvasir_policy::scheduler::{Decision, Question};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Decisions that share one copy of the tables.
const SEGMENT: usize = 128;

/// A decision, as far as it is not in the tables and the question.
#[derive(Clone, Debug)]
pub struct Decided {
    pub id: u64,
    /// On the host's clock.
    pub at_ms: u64,
    pub policy: Arc<PolicyOf>,
    /// Generation of the policy in its slot.
    pub generation: u64,
    pub decision: Decision,
    /// Why the native twin decided in the policy's place.
    pub fallback: Option<String>,
    pub ns: u64,
    pub thresholds: Arc<Vec<f32>>,
    /// What the policy had adopted of its learner.
    pub knowledge: Option<Arc<[u8]>>,
    /// `None` means that the admitter was not asked.
    pub admitted: Option<Admitted>,
}

/// What the admitter said of a decision.
#[derive(Clone, Debug)]
pub struct Admitted {
    pub policy: Arc<PolicyOf>,
    pub generation: u64,
    pub load: Load,
    pub forecast: Forecast,
    pub verdict: Verdict,
    pub fallback: Option<String>,
    pub ns: u64,
}

/// A decision with all that its policy knew.
#[derive(Clone, Debug)]
pub struct Found {
    pub decided: Decided,
    /// The tables, whole.
    pub tables: Changes,
    pub question: Question,
    /// The scores that were asked for with the decision; empty if none were.
    pub scores: Vec<f32>,
}

/// See the module documentation. Bounded by a number of decisions and by memory, whichever is less.
#[derive(Debug)]
pub struct Tape {
    segments: VecDeque<Segment>,
    segments_max: usize,
    bytes_max: usize,
}

/// Decisions that follow each other, with the tables as the first of them found them.
#[derive(Debug, Default)]
struct Segment {
    base: Changes,
    /// Changed rows, questions and scores, floats as bits, each where its entry says.
    words: Vec<u32>,
    entries: Vec<Entry>,
    /// What learners published, which is kept once.
    knowledge_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    decided: Decided,
    now: f32,
    slots: [usize; 2],
    prefill: Range<usize>,
    decode: Range<usize>,
    links: Range<usize>,
    question: Range<usize>,
    scores: Range<usize>,
}

impl Segment {
    fn begin(&mut self, base: Changes) {
        self.base = base;
        self.words.clear();
        self.entries.clear();
        self.knowledge_bytes = 0;
    }

    fn bytes(&self) -> usize {
        let Changes { prefill, decode, links, .. } = &self.base;
        let words = prefill.len() + decode.len() + links.len() + self.words.len();
        words * size_of::<u32>() + self.entries.len() * size_of::<Entry>() + self.knowledge_bytes
    }

    fn floats(&mut self, values: &[f32]) -> Range<usize> {
        let start = self.words.len();
        self.words.extend(values.iter().map(|value| value.to_bits()));
        start..self.words.len()
    }

    fn push(&mut self, decided: Decided, changes: &Changes, question: &Question, scores: &[f32]) {
        let (prefill, decode) = (self.floats(&changes.prefill), self.floats(&changes.decode));
        let links = self.floats(&changes.links);
        let start = self.words.len();
        self.words.extend_from_slice(question.words());
        let asked = start..self.words.len();
        let scores = self.floats(scores);
        let known = self.entries.last().and_then(|last| last.decided.knowledge.as_ref());
        if let Some(knowledge) = &decided.knowledge
            && known.is_none_or(|known| !Arc::ptr_eq(known, knowledge))
        {
            self.knowledge_bytes += knowledge.len();
        }
        let (now, slots) = (question.now(), question.slots());
        self.entries.push(Entry { decided, now, slots, prefill, decode, links, question: asked, scores });
    }

    fn copy(&self, id: u64) -> Option<Copied> {
        let at = self.entries.iter().position(|entry| entry.decided.id == id)?;
        let mut since = Changes::default();
        for entry in &self.entries[..=at] {
            self.append(&entry.prefill, &mut since.prefill);
            self.append(&entry.decode, &mut since.decode);
            self.append(&entry.links, &mut since.links);
        }
        let entry = &self.entries[at];
        let [prefill_slots, decode_slots] = entry.slots;
        let words = &self.words[entry.question.clone()];
        let mut scores = Vec::new();
        self.append(&entry.scores, &mut scores);
        let found = Found {
            decided: entry.decided.clone(),
            tables: self.base.clone(),
            question: Question::of_words(entry.now, words, prefill_slots, decode_slots),
            scores,
        };
        Some(Copied { found, since })
    }

    fn append(&self, range: &Range<usize>, to: &mut Vec<f32>) {
        to.extend(self.words[range.clone()].iter().copied().map(f32::from_bits));
    }
}

/// A decision as it was copied under the lock of its tape.
#[derive(Debug)]
pub struct Copied {
    /// The tables as they were when its segment began.
    found: Found,
    /// What changed since then, oldest first.
    since: Changes,
}

impl Copied {
    /// Puts the tables together. Must not be called under a lock.
    pub fn found(self) -> Found {
        let mut tables = Told::default();
        tables.apply(&self.found.tables);
        tables.apply(&self.since);
        Found { tables: tables.all(), ..self.found }
    }
}

impl Tape {
    pub fn new(decisions: usize, bytes_max: usize) -> Self {
        let segments_max = decisions.div_ceil(SEGMENT).max(1) + 1;
        Self { segments: VecDeque::new(), segments_max, bytes_max }
    }

    /// Keeps a decision; `tables` copies all that the policy was told. The memory has room for two segments, so that one that
    /// is full does not take all others with it.
    pub fn keep(
        &mut self,
        decided: Decided,
        recent: &mut Recent,
        tables: impl FnOnce() -> Changes,
        question: &Question,
        scores: &[f32],
    ) {
        let full = |segment: &Segment| {
            segment.entries.len() == SEGMENT
                || segment.bytes() + question.words().len() * 4 > self.bytes_max / 2
        };
        if recent.start_over || self.segments.back().is_none_or(full) {
            self.begin(tables());
            recent.clear();
            recent.start_over = false;
        }
        if let Some(segment) = self.segments.back_mut() {
            segment.push(decided, &recent.changes, question, scores);
        }
        recent.clear();
        while self.bytes() > self.bytes_max && self.segments.len() > 1 {
            self.segments.pop_front();
        }
        // One decision over more instances than there is memory for.
        if self.bytes() > self.bytes_max {
            self.segments.clear();
            recent.start_over = true;
        }
    }

    /// Begins a segment, in the memory of the oldest if there are enough.
    fn begin(&mut self, base: Changes) {
        let full = self.segments.len() >= self.segments_max;
        let mut segment =
            if full { self.segments.pop_front().unwrap_or_default() } else { Segment::default() };
        segment.begin(base);
        self.segments.push_back(segment);
    }

    /// Copies a decision; [`Copied::found`] makes sense of it.
    pub fn find(&self, id: u64) -> Option<Copied> {
        // The ids of one worker rise.
        let holds = |segment: &&Segment| segment.entries.first().is_some_and(|first| first.decided.id <= id);
        self.segments.iter().rev().find(holds)?.copy(id)
    }

    /// The ids of the oldest and the newest decision.
    pub fn range(&self) -> Option<(u64, u64)> {
        let mut entries =
            self.segments.iter().flat_map(|segment| [segment.entries.first(), segment.entries.last()]);
        let first = entries.find_map(|entry| entry)?;
        let last = self.segments.iter().rev().find_map(|segment| segment.entries.last())?;
        Some((first.decided.id, last.decided.id))
    }

    pub fn bytes(&self) -> usize {
        self.segments.iter().map(Segment::bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, Layout, PREFILL_ROW, PrefillRow, Request};

    fn decided(id: u64) -> Decided {
        Decided {
            id,
            at_ms: id * 10,
            policy: Arc::default(),
            generation: 1,
            decision: Decision::run(0, 0),
            fallback: None,
            ns: 5,
            thresholds: Arc::default(),
            knowledge: None,
            admitted: None,
        }
    }

    fn row(slot: u16, queued: u32) -> Vec<f32> {
        PrefillRow { slot, available: true, queued, ..PrefillRow::default() }.encode().to_vec()
    }

    /// A worker that is told of one changed row with each decision.
    struct Worker {
        tape: Tape,
        told: Told,
        recent: Recent,
        id: u64,
    }

    impl Worker {
        fn new(tape: Tape) -> Self {
            let mut worker = Self { tape, told: Told::default(), recent: Recent::default(), id: 0 };
            worker.hear(Changes { open: Some(Layout::of(4, 1, 16)), ..Changes::default() });
            worker
        }

        fn hear(&mut self, changes: Changes) {
            self.told.apply(&changes);
            self.recent.note(&changes);
        }

        fn decide(&mut self) {
            self.id += 1;
            self.hear(Changes { prefill: row((self.id % 4) as u16, self.id as u32), ..Changes::default() });
            let request = Request { prompt_tokens: self.id as u32, ..Request::default() };
            let prefix = [self.id as u32, 0, 0, 0];
            let question = Question::new(self.id as f32, &request, 4, 1).with(Column::Prefix, &prefix);
            let Self { tape, told, recent, id } = self;
            tape.keep(decided(*id), recent, || told.all(), &question, &[*id as f32]);
        }
    }

    #[test]
    fn each_decision_is_found_with_the_tables_as_they_were() {
        let mut worker = Worker::new(Tape::new(1_000, 64 << 20));
        for _ in 0..700 {
            worker.decide();
        }
        for id in 1..=700u64 {
            let found = worker.tape.find(id).unwrap().found();
            assert_eq!((found.decided.id, found.decided.at_ms), (id, id * 10));
            assert_eq!((found.question.now(), found.scores[0]), (id as f32, id as f32));
            assert_eq!(found.question.candidates().prefix_of(0), id as u32);
            // Each of the four rows as it was told last.
            let queued: Vec<f32> = found.tables.prefill.chunks(PREFILL_ROW).map(|row| row[8]).collect();
            let last = |slot: u64| (1..=id).rev().find(|told| told % 4 == slot).unwrap_or(0) as f32;
            assert_eq!(queued, (0..4).map(last).collect::<Vec<_>>(), "{id}");
        }
        assert_eq!((worker.tape.find(0).is_none(), worker.tape.find(701).is_none()), (true, true));
        assert_eq!(worker.tape.range(), Some((1, 700)));
    }

    #[test]
    fn the_oldest_go_when_there_are_enough_or_the_memory_is_full() {
        for (decisions, bytes) in [(256, 64 << 20), (100_000, 64 << 10)] {
            let mut worker = Worker::new(Tape::new(decisions, bytes));
            for _ in 0..5_000 {
                worker.decide();
                assert!(worker.tape.bytes() <= bytes, "{} bytes", worker.tape.bytes());
            }
            let (first, last) = worker.tape.range().unwrap();
            assert!(first > 1 && last == 5_000, "{first}");
            assert!(worker.tape.find(first - 1).is_none());
            assert_eq!(worker.tape.find(first).unwrap().found().decided.id, first);
            assert!(last - first < decisions as u64 + 2 * SEGMENT as u64, "{first}");
        }
    }

    #[test]
    fn what_does_not_fit_is_not_kept() {
        let mut worker = Worker::new(Tape::new(100, 100));
        for _ in 0..10 {
            worker.decide();
        }
        assert_eq!((worker.tape.range(), worker.tape.bytes()), (None, 0));
    }

    #[test]
    fn news_without_decisions_do_not_pile_up() {
        let mut worker = Worker::new(Tape::new(100, 1 << 20));
        worker.decide();
        for _ in 0..10_000 {
            worker.hear(Changes { prefill: row(2, 77), ..Changes::default() });
        }
        assert!(worker.recent.changes.prefill.capacity() < 4 * Recent::VALUES_MAX);
        worker.decide();
        assert_eq!(worker.tape.find(2).unwrap().found().tables.prefill[2 * PREFILL_ROW + 8], 2.0);
        assert_eq!(worker.tape.find(1).unwrap().found().tables.prefill[PREFILL_ROW + 8], 1.0);
    }
}
