//! The question that `schedule` answers: a request, and columns of what the host knows of the candidates for it.

use crate::request::{REQUEST_WORDS, Request};

/// Words before the columns: those of the request, and which columns follow.
pub const HEAD_WORDS: usize = REQUEST_WORDS + 1;

/// One value per slot of a table; the numbers are the bits of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Prefix = 0,
    PrefixInHbm = 1,
    PrefixInDram = 2,
    EligiblePrefill = 3,
    PrefixAtDecode = 4,
    EligibleDecode = 5,
    /// Bits of floats; in front of the picker of a chain.
    ScorePrefill = 6,
    ScoreDecode = 7,
    PrefixAtDecodeInHbm = 8,
    PrefixAtDecodeInDram = 9,
}

impl Column {
    /// In the order in which they stand in a question.
    pub const ALL: [Self; 10] = [
        Self::Prefix,
        Self::PrefixInHbm,
        Self::PrefixInDram,
        Self::EligiblePrefill,
        Self::PrefixAtDecode,
        Self::EligibleDecode,
        Self::ScorePrefill,
        Self::ScoreDecode,
        Self::PrefixAtDecodeInHbm,
        Self::PrefixAtDecodeInDram,
    ];

    const fn bit(self) -> u32 {
        1 << self as u32
    }

    const fn of_decode(self) -> bool {
        OF_DECODE & self.bit() != 0
    }
}

/// Columns with one value per decode slot, as bits.
const OF_DECODE: u32 = Column::PrefixAtDecode.bit()
    | Column::EligibleDecode.bit()
    | Column::ScoreDecode.bit()
    | Column::PrefixAtDecodeInHbm.bit()
    | Column::PrefixAtDecodeInDram.bit();

/// Whether an instance can serve a request, as the eligibility columns say it.
pub mod eligibility {
    /// It serves another model.
    pub const CANNOT: u32 = 0;
    pub const CAN: u32 = 1;
    /// It can, and has the request's adapter loaded.
    pub const HAS_ADAPTER: u32 = 2;
}

/// What is known of the instances for one request, by columns with one value per slot of a table.
///
/// A column that the host left out is `None`; the functions that take a slot answer what the absence means.
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    words: &'a [u32],
    /// Which columns there are, as bits.
    present: u32,
    prefill_slots: usize,
    decode_slots: usize,
}

impl<'a> Candidates<'a> {
    /// The columns of a question whose head has `head` words. Columns that are not there in full count as absent.
    #[inline]
    pub fn of_question(question: &'a [u32], head: usize, prefill_slots: usize, decode_slots: usize) -> Self {
        let present = question.get(REQUEST_WORDS).copied().unwrap_or(0);
        Self { words: question.get(head..).unwrap_or(&[]), present, prefill_slots, decode_slots }
    }

    /// Columns with a prefix column and no other.
    pub fn with_prefix(prefix: &'a [u32]) -> Self {
        Self { words: prefix, present: Column::Prefix.bit(), prefill_slots: prefix.len(), decode_slots: 0 }
    }

    /// Leading blocks of the prompt stored at each prefill slot, in any tier; `None` if there are none anywhere.
    #[inline]
    pub fn prefix(&self) -> Option<&'a [u32]> {
        self.column(Column::Prefix)
    }

    /// The leading part of [`Self::prefix`] that is in HBM; `None` if it is not known.
    pub fn prefix_in_hbm(&self) -> Option<&'a [u32]> {
        self.column(Column::PrefixInHbm)
    }

    /// The leading part of [`Self::prefix`] that is in HBM or DRAM; `None` if it is not known.
    pub fn prefix_in_dram(&self) -> Option<&'a [u32]> {
        self.column(Column::PrefixInDram)
    }

    /// By prefill slot, one of [`eligibility`]. `None` means that all can serve the request.
    #[inline]
    pub fn eligible_prefill(&self) -> Option<&'a [u32]> {
        self.column(Column::EligiblePrefill)
    }

    /// Leading blocks of the prompt stored at each decode slot; `None` if there are none anywhere.
    pub fn prefix_at_decode(&self) -> Option<&'a [u32]> {
        self.column(Column::PrefixAtDecode)
    }

    /// The leading part of [`Self::prefix_at_decode`] that is in HBM; `None` if it is not known.
    pub fn prefix_at_decode_in_hbm(&self) -> Option<&'a [u32]> {
        self.column(Column::PrefixAtDecodeInHbm)
    }

    /// The leading part of [`Self::prefix_at_decode`] that is in HBM or DRAM; `None` if it is not known.
    pub fn prefix_at_decode_in_dram(&self) -> Option<&'a [u32]> {
        self.column(Column::PrefixAtDecodeInDram)
    }

    /// By decode slot, one of [`eligibility`]. `None` means that all can serve the request.
    #[inline]
    pub fn eligible_decode(&self) -> Option<&'a [u32]> {
        self.column(Column::EligibleDecode)
    }

    /// Leading blocks of the prompt stored at this prefill slot.
    pub fn prefix_of(&self, prefill: usize) -> u32 {
        value(self.prefix(), prefill, 0)
    }

    /// Leading blocks of the prompt at this prefill slot by how near they are: in HBM, behind these in DRAM or HBM, and
    /// behind these in any tier; their sum is [`Self::prefix_of`]. Where it is not known, all count as in HBM.
    pub fn prefix_by_tier(&self, prefill: usize) -> [u32; 3] {
        let all = self.prefix_of(prefill);
        let near = value(self.prefix_in_dram(), prefill, all).min(all);
        let in_hbm = value(self.prefix_in_hbm(), prefill, near).min(near);
        [in_hbm, near - in_hbm, all - near]
    }

    /// Leading blocks of the prompt stored at this decode slot.
    pub fn prefix_of_decode(&self, decode: usize) -> u32 {
        value(self.prefix_at_decode(), decode, 0)
    }

    /// Whether the instance in this prefill slot serves the request's model.
    pub fn can_prefill(&self, prefill: usize) -> bool {
        value(self.eligible_prefill(), prefill, eligibility::CAN) != eligibility::CANNOT
    }

    /// Whether the instance in this decode slot serves the request's model.
    pub fn can_decode(&self, decode: usize) -> bool {
        value(self.eligible_decode(), decode, eligibility::CAN) != eligibility::CANNOT
    }

    /// Whether the instance in this prefill slot has the request's adapter loaded.
    pub fn prefill_has_adapter(&self, prefill: usize) -> bool {
        value(self.eligible_prefill(), prefill, eligibility::CAN) == eligibility::HAS_ADAPTER
    }

    /// Whether the instance in this decode slot has the request's adapter loaded.
    pub fn decode_has_adapter(&self, decode: usize) -> bool {
        value(self.eligible_decode(), decode, eligibility::CAN) == eligibility::HAS_ADAPTER
    }

    /// What the scorers of a chain say of this prefill slot, smaller is better; 0 if there are none.
    pub fn score_of(&self, prefill: usize) -> f32 {
        f32::from_bits(value(self.column(Column::ScorePrefill), prefill, 0))
    }

    /// The same for this decode slot.
    pub fn score_of_decode(&self, decode: usize) -> f32 {
        f32::from_bits(value(self.column(Column::ScoreDecode), decode, 0))
    }

    /// One word per slot of its table. `None` means that the host left it out.
    // Columns stand in the order of their bits, so those with lower bits stand before it.
    #[inline]
    pub fn column(&self, column: Column) -> Option<&'a [u32]> {
        let before = self.present & (column.bit() - 1);
        if self.present & column.bit() == 0 {
            return None;
        }
        let of_prefill = (before & !OF_DECODE).count_ones() as usize;
        let of_decode = (before & OF_DECODE).count_ones() as usize;
        let start = of_prefill * self.prefill_slots + of_decode * self.decode_slots;
        let len = if column.of_decode() { self.decode_slots } else { self.prefill_slots };
        self.words.get(start..)?.get(..len)
    }
}

/// A slot beyond the column is one that the host says nothing of.
fn value(column: Option<&[u32]>, slot: usize, absent: u32) -> u32 {
    column.and_then(|column| column.get(slot)).copied().unwrap_or(absent)
}

/// A question as the host writes it, in a buffer that can be used again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Question {
    now: f32,
    words: Vec<u32>,
    prefill_slots: usize,
    decode_slots: usize,
}

impl Question {
    /// A question without columns, over tables of the given sizes.
    pub fn new(now: f32, request: &Request, prefill_slots: usize, decode_slots: usize) -> Self {
        let mut question = Self::default();
        question.begin(now, request, prefill_slots, decode_slots);
        question
    }

    /// A question that was written before, over tables of the given sizes. `now`: ms on the table clock.
    pub fn of_words(now: f32, words: &[u32], prefill_slots: usize, decode_slots: usize) -> Self {
        Self { now, words: words.to_vec(), prefill_slots, decode_slots }
    }

    /// Replaces what was asked before. `now`: ms on the table clock.
    pub fn begin(&mut self, now: f32, request: &Request, prefill_slots: usize, decode_slots: usize) {
        self.words.clear();
        self.words.extend(request.encode());
        self.words.push(0);
        (self.now, self.prefill_slots, self.decode_slots) = (now, prefill_slots, decode_slots);
    }

    /// Replaces what was asked before by the request of `other`, without its columns.
    pub fn begin_like(&mut self, other: &Self) {
        self.words.clear();
        self.words.extend_from_slice(other.request_words());
        self.words.resize(HEAD_WORDS, 0);
        self.words[REQUEST_WORDS] = 0;
        (self.now, self.prefill_slots, self.decode_slots) =
            (other.now, other.prefill_slots, other.decode_slots);
    }

    /// Adds a column, which `fill` makes of zeros, one per slot, and of the columns before it. It is left out if `fill`
    /// returns false: absence says the same.
    ///
    /// # Panics
    /// A column with a higher bit was added before.
    pub fn add(&mut self, column: Column, fill: impl FnOnce(Candidates<'_>, &mut [u32]) -> bool) {
        assert!(self.present() < column.bit(), "{column:?} is added behind a later column");
        let len = if column.of_decode() { self.decode_slots } else { self.prefill_slots };
        let start = self.words.len();
        self.words.resize(start + len, 0);
        let (before, slots) = self.words.split_at_mut(start);
        let before = Candidates::of_question(before, HEAD_WORDS, self.prefill_slots, self.decode_slots);
        if fill(before, slots) {
            self.words[REQUEST_WORDS] |= column.bit();
        } else {
            self.words.truncate(start);
        }
    }

    /// The same question with one more column.
    ///
    /// # Panics
    /// As [`Question::add`], or the column has not one value per slot.
    #[must_use]
    pub fn with(mut self, column: Column, values: &[u32]) -> Self {
        self.add(column, |_, slots| {
            slots.copy_from_slice(values);
            true
        });
        self
    }

    /// ms on the table clock.
    pub fn now(&self) -> f32 {
        self.now
    }

    /// Slots of the prefill and of the decode table.
    pub fn slots(&self) -> [usize; 2] {
        [self.prefill_slots, self.decode_slots]
    }

    /// The whole question, as `schedule` takes it.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The request alone, as `admit-request` takes it.
    pub fn request_words(&self) -> &[u32] {
        self.words.get(..HEAD_WORDS).unwrap_or(&[])
    }

    pub fn candidates(&self) -> Candidates<'_> {
        Candidates::of_question(&self.words, HEAD_WORDS, self.prefill_slots, self.decode_slots)
    }

    fn present(&self) -> u32 {
        self.words.get(REQUEST_WORDS).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_whatever_others_there_are() {
        let (prefill, decode) = (3, 2);
        for present in 0..1u32 << Column::ALL.len() {
            let mut question = Question::new(1.0, &Request::default(), prefill, decode);
            for column in Column::ALL.into_iter().filter(|column| present & column.bit() != 0) {
                let slots = if column.of_decode() { decode } else { prefill };
                question = question.with(column, &vec![column as u32 + 1; slots]);
            }
            let candidates = question.candidates();
            for column in Column::ALL {
                let slots = if column.of_decode() { decode } else { prefill };
                let expected = (present & column.bit() != 0).then(|| vec![column as u32 + 1; slots]);
                assert_eq!(
                    candidates.column(column).map(<[u32]>::to_vec),
                    expected,
                    "{present:b} {column:?}"
                );
            }
        }
    }

    #[test]
    fn a_column_that_says_nothing_is_left_out() {
        let mut question = Question::new(0.0, &Request::default(), 2, 1);
        question.add(Column::Prefix, |_, _| false);
        assert_eq!(question.words().len(), HEAD_WORDS);
        assert_eq!((question.candidates().prefix(), question.candidates().prefix_of(1)), (None, 0));
        assert!(question.candidates().can_prefill(0) && !question.candidates().prefill_has_adapter(0));
        question.add(Column::EligiblePrefill, |_, slots| {
            slots.copy_from_slice(&[eligibility::CANNOT, eligibility::HAS_ADAPTER]);
            true
        });
        let candidates = question.candidates();
        assert_eq!([0, 1, 9].map(|slot| candidates.can_prefill(slot)), [false, true, true]);
        assert_eq!([0, 1, 9].map(|slot| candidates.prefill_has_adapter(slot)), [false, true, false]);
    }

    #[test]
    fn a_prefix_is_told_by_tier() {
        let question = Question::new(0.0, &Request::default(), 3, 0).with(Column::Prefix, &[9, 5, 4]);
        let by_tier = |question: &Question| [0, 1, 3].map(|slot| question.candidates().prefix_by_tier(slot));
        assert_eq!(by_tier(&question), [[9, 0, 0], [5, 0, 0], [0; 3]]);
        let question = question.with(Column::PrefixInHbm, &[2, 5, 9]).with(Column::PrefixInDram, &[6, 5, 9]);
        assert_eq!(by_tier(&question), [[2, 4, 3], [5, 0, 0], [0; 3]]);
        assert_eq!(question.candidates().prefix_by_tier(2), [4, 0, 0], "never more than are stored");
    }

    #[test]
    fn words_that_are_missing_are_columns_that_are_absent() {
        let question = Question::new(0.0, &Request::default(), 3, 2)
            .with(Column::Prefix, &[1, 2, 3])
            .with(Column::PrefixAtDecode, &[4, 5])
            .with(Column::EligibleDecode, &[1, 1]);
        for len in 0..question.words().len() {
            let words = &question.words()[..len];
            let candidates = Candidates::of_question(words, HEAD_WORDS, 3, 2);
            assert_eq!(candidates.prefix().is_some(), len >= HEAD_WORDS + 3, "{len}");
            assert_eq!(candidates.prefix_at_decode().is_some(), len >= HEAD_WORDS + 5, "{len}");
            assert_eq!(candidates.eligible_decode(), None, "{len}");
            assert_eq!(candidates.eligible_prefill(), None, "{len}");
        }
        let beyond = Candidates::of_question(question.words(), usize::MAX, usize::MAX / 4, 2);
        assert_eq!((beyond.prefix(), beyond.prefix_in_hbm(), beyond.prefix_at_decode()), (None, None, None));
    }
}
