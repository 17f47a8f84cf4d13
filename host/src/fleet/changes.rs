//! Which rows of a table changed since a version, in bounded memory.

use std::collections::VecDeque;

/// Slots in the order of their changes; a reader that is further behind than the log is long takes
/// the whole table.
#[derive(Debug)]
pub(super) struct ChangeLog {
    version: u64,
    slots: VecDeque<u16>,
    limit: usize,
}

impl ChangeLog {
    pub(super) fn new(limit: usize) -> Self {
        Self { version: 0, slots: VecDeque::new(), limit }
    }

    /// Counts every change so far.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn push(&mut self, slot: u16) {
        if self.slots.len() == self.limit {
            self.slots.pop_front();
        }
        self.slots.push_back(slot);
        self.version += 1;
    }

    /// Forgets the log: every reader behind takes the whole table.
    pub(super) fn invalidate(&mut self) {
        self.slots.clear();
        self.version += 1;
    }

    /// Slots changed after `version`, each once, ascending. Returns `None` if the log does not reach back.
    pub(super) fn since(&self, version: u64) -> Option<Vec<u16>> {
        let behind = usize::try_from(self.version.checked_sub(version)?).ok()?;
        let start = self.slots.len().checked_sub(behind)?;
        let mut changed: Vec<u16> = self.slots.range(start..).copied().collect();
        changed.sort_unstable();
        changed.dedup();
        Some(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_what_changed_or_that_it_cannot() {
        let mut log = ChangeLog::new(4);
        assert_eq!(log.since(0), Some(vec![]));
        for slot in [3, 1, 3] {
            log.push(slot);
        }
        assert_eq!(log.since(0), Some(vec![1, 3]));
        assert_eq!(log.since(2), Some(vec![3]));
        assert_eq!(log.since(3), Some(vec![]));
        assert_eq!(log.since(4), None, "a version from the future");
        for slot in [5, 6] {
            log.push(slot);
        }
        assert_eq!(log.since(0), None, "overflow");
        assert_eq!(log.since(1), Some(vec![1, 3, 5, 6]));
        log.invalidate();
        assert_eq!(log.since(5), None);
        assert_eq!(log.since(log.version()), Some(vec![]));
    }
}
