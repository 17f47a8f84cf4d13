//! Whose a cover is, and whose covers count no more.

use super::Slot;

/// Instances that may have a slot after each other before the covers of the first are taken out.
const TURNS: u32 = 16;
const TURN_BITS: u32 = TURNS.ilog2();

/// An instance until its blocks are forgotten: its slot, and the how-manieth it is there, modulo [`TURNS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Holder(u32);

impl Holder {
    pub(super) const BITS: u32 = Slot::BITS + TURN_BITS;

    fn new(slot: Slot, turn: u32) -> Self {
        Self((u32::from(slot) << TURN_BITS) | turn)
    }

    pub(super) fn slot(self) -> Slot {
        (self.0 >> TURN_BITS) as Slot
    }

    fn turn(self) -> u32 {
        self.0 % TURNS
    }

    pub(super) fn number(self) -> u64 {
        self.0.into()
    }

    pub(super) fn of_number(number: u64) -> Self {
        Self(number as u32)
    }
}

/// The holders of all slots.
#[derive(Debug, Default)]
pub(super) struct Holders(Vec<Turns>);

#[derive(Clone, Copy, Debug, Default)]
struct Turns {
    present: u32,
    /// One bit for each whose covers may still be there.
    gone: u32,
}

impl Holders {
    /// The present one.
    pub(super) fn of(&self, slot: Slot) -> Holder {
        Holder::new(slot, self.0.get(usize::from(slot)).map_or(0, |turns| turns.present))
    }

    pub(super) fn is_gone(&self, holder: Holder) -> bool {
        self.0.get(usize::from(holder.slot())).is_some_and(|turns| turns.gone >> holder.turn() & 1 == 1)
    }

    /// The present holder of a slot is gone, and the next one has nothing. Returns false if there is none that has not.
    pub(super) fn next(&mut self, slot: Slot) -> bool {
        let at = usize::from(slot);
        self.0.resize(self.0.len().max(at + 1), Turns::default());
        let turns = &mut self.0[at];
        let next = (turns.present + 1) % TURNS;
        if turns.gone >> next & 1 == 1 {
            return false;
        }
        turns.gone |= 1 << turns.present;
        turns.present = next;
        true
    }

    /// No covers are left of those that are gone.
    pub(super) fn forget_gone(&mut self) {
        self.0.iter_mut().for_each(|turns| turns.gone = 0);
    }
}
