//! Instances in dense slots, with a log of changed rows.

use super::changes::ChangeLog;

/// One of the two tables. A slot freed by an instance that left is given to the next that comes.
#[derive(Debug)]
pub(super) struct Table<I> {
    slots: Vec<Option<I>>,
    log: ChangeLog,
    limit: usize,
}

impl<I> Table<I> {
    pub(super) fn new(limit: usize) -> Self {
        // Twice the table: one full round of changes between two looks of a worker fits.
        Self { slots: Vec::new(), log: ChangeLog::new(2 * limit.min(1 << 14) + 64), limit }
    }

    /// Returns `None` if the table is full.
    pub(super) fn insert(&mut self, instance: I) -> Option<u16> {
        if let Some(free) = self.slots.iter().position(Option::is_none) {
            self.slots[free] = Some(instance);
            self.log.push(free as u16);
            return Some(free as u16);
        }
        if self.slots.len() == self.limit {
            return None;
        }
        self.slots.push(Some(instance));
        self.log.invalidate(); // readers must reopen with the new size
        Some(self.slots.len() as u16 - 1)
    }

    pub(super) fn has_room(&self) -> bool {
        self.slots.len() < self.limit || self.slots.iter().any(Option::is_none)
    }

    pub(super) fn remove(&mut self, slot: u16) -> Option<I> {
        let instance = self.slots.get_mut(usize::from(slot))?.take();
        self.log.push(slot);
        instance
    }

    pub(super) fn get(&self, slot: u16) -> Option<&I> {
        self.slots.get(usize::from(slot))?.as_ref()
    }

    /// For a change, which is logged.
    pub(super) fn change(&mut self, slot: u16) -> Option<&mut I> {
        let instance = self.slots.get_mut(usize::from(slot))?.as_mut()?;
        self.log.push(slot);
        Some(instance)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u16, &I)> {
        self.slots.iter().enumerate().filter_map(|(slot, i)| Some((slot as u16, i.as_ref()?)))
    }

    pub(super) fn version(&self) -> u64 {
        self.log.version()
    }

    pub(super) fn changed_since(&self, version: u64) -> Option<Vec<u16>> {
        self.log.since(version)
    }

    pub(super) fn invalidate(&mut self) {
        self.log.invalidate();
    }
}
