//! Learning from what came of decisions: `learning` in `wit/policy-0.1/learning.wit`.
//!
//! A policy that implements [`Learner`] beside its slot's trait, and is exported by `export_learning_scheduler!` or
//! `export_learning_admitter!`, has one more instance in the host: that one hears outcomes and publishes what it makes of
//! them, the others adopt it. Keep both halves in one type; the learner's instance is never asked for a decision.

/// Words of an outcome that this SDK knows; a later host may send longer ones, and an earlier one shorter ones.
pub const OUTCOME: usize = 24;
/// The most outcomes in one call of `observe`.
pub const OUTCOMES_MAX: usize = 1_024;
/// The longest answer of `publish`, bytes.
pub const KNOWLEDGE_MAX: usize = 1 << 20;

/// Hears what came of requests, and tells the instances that decide.
pub trait Learner {
    /// Called on the learner's instance alone; oldest first.
    fn observe(&mut self, outcomes: Outcomes<'_>);

    /// What deciding instances should know, in a format of the policy's own, at most [`KNOWLEDGE_MAX`] bytes.
    fn publish(&mut self) -> Vec<u8>;

    /// Takes what the learner published; called on deciding instances, before a decision. Ignore what cannot be read.
    fn adopt(&mut self, knowledge: &[u8]);
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    #[default]
    Finished = 1,
    /// By the scheduler.
    Rejected = 2,
    /// By the admitter.
    Refused = 3,
    /// Nothing was heard of it for too long.
    GivenUp = 4,
}

/// What came of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    pub end: End,
    /// The reason of a rejection or refusal.
    pub reason: u32,
    /// Id of the decision; 0 if it was not booked.
    pub decision: u64,
    pub tenant: u32,
    pub class: u32,
    pub model: u32,
    pub adapter: u32,
    pub session: u64,
    /// Identity of the instance, as in its row; 0 if the request was sent nowhere.
    pub prefill: u32,
    pub decode: u32,
    pub prompt_tokens: u32,
    /// How many of these were not computed, since they were stored.
    pub cached_tokens: u32,
    /// Fetched from another instance.
    pub fetched_blocks: u32,
    pub decoded_tokens: u32,
    pub ttft_ms: Times,
    /// The mean over the request.
    pub tbt_ms: Times,
    /// Predicted; `None` = not known.
    pub queue_ms: Option<f32>,
    /// Measured by the instance, without the waits before it.
    pub prefill_ms: Times,
    /// Run of the host, another number after each restart: identities and dense numbers are those of one run. 0
    /// means that it does not say.
    pub run: u32,
}

/// A time as it was predicted when the request was booked, and as it was measured. `None` = not known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    pub predicted: Option<f32>,
    pub measured: Option<f32>,
}

/// What is not known.
const UNKNOWN: f32 = -1.0;

impl Outcome {
    pub fn encode(&self) -> [u32; OUTCOME] {
        let (low, high) = (|n: u64| n as u32, |n: u64| (n >> 32) as u32);
        let ms = |time: Option<f32>| time.unwrap_or(UNKNOWN).to_bits();
        [
            self.end as u32,
            self.reason,
            low(self.decision),
            high(self.decision),
            self.tenant,
            self.class,
            self.model,
            self.adapter,
            low(self.session),
            high(self.session),
            self.prefill,
            self.decode,
            self.prompt_tokens,
            self.cached_tokens,
            self.fetched_blocks,
            self.decoded_tokens,
            ms(self.ttft_ms.predicted),
            ms(self.ttft_ms.measured),
            ms(self.tbt_ms.predicted),
            ms(self.tbt_ms.measured),
            ms(self.queue_ms),
            ms(self.prefill_ms.predicted),
            ms(self.prefill_ms.measured),
            self.run,
        ]
    }

    /// Returns `None` if it ended in a way that this SDK does not know.
    fn decode(word: &[u32; OUTCOME]) -> Option<Self> {
        let end = match word[0] {
            1 => End::Finished,
            2 => End::Rejected,
            3 => End::Refused,
            4 => End::GivenUp,
            _ => return None,
        };
        let long = |at: usize| u64::from(word[at]) | u64::from(word[at + 1]) << 32;
        let ms = |at: usize| Some(f32::from_bits(word[at])).filter(|ms| *ms >= 0.0);
        let times = |at: usize| Times { predicted: ms(at), measured: ms(at + 1) };
        Some(Self {
            end,
            reason: word[1],
            decision: long(2),
            tenant: word[4],
            class: word[5],
            model: word[6],
            adapter: word[7],
            session: long(8),
            prefill: word[10],
            decode: word[11],
            prompt_tokens: word[12],
            cached_tokens: word[13],
            fetched_blocks: word[14],
            decoded_tokens: word[15],
            ttft_ms: times(16),
            tbt_ms: times(18),
            queue_ms: ms(20),
            prefill_ms: times(21),
            run: word[23],
        })
    }
}

/// The outcomes of one call, oldest first; records of an unknown end are skipped.
#[derive(Clone, Copy, Debug)]
pub struct Outcomes<'a> {
    stride: usize,
    words: &'a [u32],
}

impl<'a> Outcomes<'a> {
    /// `words`: whole records of `stride` words; a ragged tail is ignored.
    pub fn new(stride: usize, words: &'a [u32]) -> Self {
        Self { stride: stride.max(1), words }
    }

    pub fn iter(&self) -> impl Iterator<Item = Outcome> + use<'a> {
        let records = self.words.chunks_exact(self.stride);
        records.filter_map(|record| {
            let mut known = Outcome::default().encode();
            known.iter_mut().zip(record).for_each(|(known, &said)| *known = said);
            Outcome::decode(&known)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_survive_encoding_and_may_grow() {
        let outcome = Outcome {
            end: End::GivenUp,
            reason: 3,
            decision: u64::MAX - 5,
            tenant: 4,
            class: 5,
            model: 6,
            adapter: 7,
            session: 1 << 40,
            prefill: 10,
            decode: 11,
            prompt_tokens: 12,
            cached_tokens: 13,
            fetched_blocks: 14,
            decoded_tokens: 15,
            ttft_ms: Times { predicted: Some(16.5), measured: None },
            tbt_ms: Times { predicted: None, measured: Some(0.0) },
            queue_ms: Some(20.0),
            prefill_ms: Times { predicted: None, measured: Some(21.0) },
            run: 23,
        };
        let unknown = [[99, 0].as_slice(), &[0; OUTCOME - 2]].concat();
        for more in [0, 3] {
            let mut words = Vec::new();
            for record in [&outcome.encode()[..], &unknown, &outcome.encode()] {
                words.extend_from_slice(record);
                words.extend(std::iter::repeat_n(u32::MAX, more));
            }
            words.push(1); // ragged
            let back: Vec<_> = Outcomes::new(OUTCOME + more, &words).iter().collect();
            assert_eq!(back, [outcome; 2]);
        }
        let ends = [End::Finished, End::Rejected, End::Refused, End::GivenUp];
        let back =
            |end| Outcomes::new(OUTCOME, &Outcome { end, ..outcome }.encode()).iter().next().unwrap().end;
        assert_eq!(ends.map(back), ends);
        let short = Outcomes::new(21, &outcome.encode()[..21]).iter().next().unwrap();
        assert_eq!(short, Outcome { prefill_ms: Times::default(), run: 0, ..outcome }, "of an earlier host");
    }
}
