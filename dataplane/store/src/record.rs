//! What the store keeps per block, packed.
//!
//! The [index](super::index) has 7.7 B for each slot, of which there are an eighth more than blocks, and 16 B for the key. With 36 B
//! here a resident block costs 61 B when the store is full. Therefore: no padding (all fields are words of 32
//! bits), an offset in units of the smallest block, a label of 12 bits for (tenant, class), and nothing that most
//! blocks do not need: readers beyond the first, pins and times to live are kept aside ([`super::extras`]).

use super::events::NO_SLOT;
use super::lifecycle::State;
use kvasir_memory::extents::SMALLEST;
use kvasir_protocol::block::{BlockKey, BlockMeta};

/// Bits of each packed field, and where it begins.
struct Field {
    at: u32,
    bits: u32,
}

impl Field {
    const fn after(self, bits: u32) -> Self {
        Self { at: self.at + self.bits, bits }
    }

    const fn max(&self) -> u64 {
        (1 << self.bits) - 1
    }

    fn get(&self, word: u64) -> u64 {
        word >> self.at & self.max()
    }

    /// Values that do not fit become the largest one that does.
    fn set(&self, word: &mut u64, value: u64) {
        *word = *word & !(self.max() << self.at) | value.min(self.max()) << self.at;
    }
}

// In `place`. 38 bits of 64 B are the 16 TiB that a pool may have; a depth of 2^20 blocks is 16 M tokens at 16 each.
const OFFSET: Field = Field { at: 0, bits: 38 };
const DEPTH: Field = OFFSET.after(20);
const STATE: Field = DEPTH.after(4);
const IN_RESERVE: Field = STATE.after(1);
const HAS_EXTRAS: Field = IN_RESERVE.after(1);
// In `counts`.
const LABEL: Field = Field { at: 0, bits: 12 };
const USES: Field = LABEL.after(11);
const WAS_BROUGHT: Field = USES.after(1);
const EPOCH: Field = WAS_BROUGHT.after(8);
// In `parent`.
const PARENT_SLOT: Field = Field { at: 0, bits: 28 };
const PARENT_TAG: Field = PARENT_SLOT.after(4);

/// Labels for (tenant, class) that a store can tell apart.
pub(super) const LABELS: usize = 1 << LABEL.bits;

#[derive(Clone)]
pub(super) struct Record {
    checksum: [u32; 2],
    place: [u32; 2],
    parent: u32,
    pub(super) size: u32,
    /// Units of 10 ms, so that 32 bits last 16 months.
    pub(super) inserted: u32,
    pub(super) used: u32,
    counts: u32,
}

const _: () = assert!(size_of::<Record>() == 36 && HAS_EXTRAS.at + HAS_EXTRAS.bits == 64);

impl Record {
    pub(super) fn new(meta: &BlockMeta, label: u16, offset: u64, state: State) -> Self {
        let mut record = Self {
            checksum: [0; 2],
            place: [0; 2],
            parent: meta.parent.map_or(0, |parent| word(PARENT_TAG, u64::from(tag(parent)))),
            size: meta.size,
            inserted: 0,
            used: 0,
            counts: word(LABEL, label.into()),
        };
        record.set_place(OFFSET, offset / SMALLEST);
        record.set_place(DEPTH, meta.depth.into());
        record.set_state(state);
        record.set_parent_slot(NO_SLOT);
        record
    }

    pub(super) fn checksum(&self) -> u64 {
        join(self.checksum)
    }

    pub(super) fn set_checksum(&mut self, checksum: u64) {
        self.checksum = cut(checksum);
    }

    pub(super) fn offset(&self) -> u64 {
        OFFSET.get(join(self.place)) * SMALLEST
    }

    /// Saturates at 2^20 - 1.
    pub(super) fn depth(&self) -> u32 {
        DEPTH.get(join(self.place)) as u32
    }

    pub(super) fn state(&self) -> State {
        State::ALL[STATE.get(join(self.place)) as usize]
    }

    pub(super) fn set_state(&mut self, state: State) {
        self.set_place(STATE, state as u64);
    }

    pub(super) fn is_resident(&self) -> bool {
        self.state().is_resident()
    }

    /// The policy chose it as a victim and nothing has used it since.
    pub(super) fn in_reserve(&self) -> bool {
        IN_RESERVE.get(join(self.place)) == 1
    }

    pub(super) fn set_in_reserve(&mut self, yes: bool) {
        self.set_place(IN_RESERVE, yes.into());
    }

    /// Whether [`super::extras`] has more about it.
    pub(super) fn has_extras(&self) -> bool {
        HAS_EXTRAS.get(join(self.place)) == 1
    }

    pub(super) fn set_has_extras(&mut self, yes: bool) {
        self.set_place(HAS_EXTRAS, yes.into());
    }

    /// Its tenant and class, for [`super::tenants`].
    pub(super) fn label(&self) -> u16 {
        LABEL.get(self.counts.into()) as u16
    }

    /// Saturates at 2,047.
    pub(super) fn uses(&self) -> u32 {
        USES.get(self.counts.into()) as u32
    }

    pub(super) fn count_use(&mut self) {
        self.set_count(USES, u64::from(self.uses()) + 1);
    }

    /// Whether it came from another tier or host: it was put earlier than it was inserted here.
    pub(super) fn was_brought(&self) -> bool {
        WAS_BROUGHT.get(self.counts.into()) == 1
    }

    pub(super) fn set_was_brought(&mut self, yes: bool) {
        self.set_count(WAS_BROUGHT, yes.into());
    }

    /// Epoch of the event buffer at this block's last event.
    pub(super) fn epoch(&self) -> u8 {
        EPOCH.get(self.counts.into()) as u8
    }

    pub(super) fn set_epoch(&mut self, epoch: u8) {
        self.set_count(EPOCH, epoch.into());
    }

    /// Where the parent was when this block came; [`NO_SLOT`] = nowhere. The parent may be gone since.
    pub(super) fn parent_slot(&self) -> u32 {
        let slot = PARENT_SLOT.get(self.parent.into());
        if slot == PARENT_SLOT.max() { NO_SLOT } else { slot as u32 }
    }

    pub(super) fn set_parent_slot(&mut self, slot: u32) {
        let mut parent = self.parent.into();
        PARENT_SLOT.set(&mut parent, slot.into());
        self.parent = parent as u32;
    }

    /// Whether `other`, found where the parent was, still is the parent as far as 4 bits of its key, its depth and
    /// its age can tell.
    pub(super) fn is_child_of(&self, other: &Self, other_key: BlockKey) -> bool {
        let same_key = PARENT_TAG.get(self.parent.into()) == u64::from(tag(other_key));
        other.is_resident()
            && same_key
            && other.depth() + 1 == self.depth()
            && other.inserted <= self.inserted
    }

    fn set_place(&mut self, field: Field, value: u64) {
        let mut place = join(self.place);
        field.set(&mut place, value);
        self.place = cut(place);
    }

    fn set_count(&mut self, field: Field, value: u64) {
        let mut counts = self.counts.into();
        field.set(&mut counts, value);
        self.counts = counts as u32;
    }
}

fn tag(key: BlockKey) -> u8 {
    (key.0 & 0xf) as u8
}

fn word(field: Field, value: u64) -> u32 {
    let mut word = 0;
    field.set(&mut word, value);
    word as u32
}

fn join([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn cut(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Setting one field changes that field alone, and what does not fit saturates.
        #[test]
        fn fields_do_not_touch_each_other(
            key: u128, parent: u128, depth: u32, size: u32, label in 0u16..4096, offset in 0u64..1 << 38, sum: u64,
            slot in 0u32..(1 << 28) - 1, epoch: u8, uses in 0u32..6000, brought: bool, reserve: bool, extras: bool, state in 0usize..10,
        ) {
            let (key, parent) = (BlockKey(key), BlockKey(parent));
            let meta = BlockMeta { parent: Some(parent), depth, ..BlockMeta::single(key, size) };
            let mut record = Record::new(&meta, label, offset * SMALLEST, State::Creating);
            prop_assert_eq!(record.parent_slot(), NO_SLOT);
            record.set_checksum(sum);
            record.set_state(State::ALL[state]);
            record.set_in_reserve(reserve);
            record.set_has_extras(extras);
            record.set_was_brought(brought);
            record.set_epoch(epoch);
            record.set_parent_slot(slot);
            (0..uses).for_each(|_| record.count_use());
            prop_assert_eq!((record.checksum(), record.offset(), record.size), (sum, offset * SMALLEST, size));
            prop_assert_eq!((record.depth(), record.uses()), (depth.min((1 << 20) - 1), uses.min(2047)));
            prop_assert_eq!((record.label(), record.epoch(), record.parent_slot()), (label, epoch, slot));
            prop_assert_eq!(record.was_brought(), brought);
            prop_assert_eq!((record.state(), record.in_reserve(), record.has_extras()), (State::ALL[state], reserve, extras));
            record.set_parent_slot(NO_SLOT);
            prop_assert_eq!(record.parent_slot(), NO_SLOT);
        }
    }
}
