//! The life of a block as a table: which state may follow which, counted.

use crate::error::StoreError;

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Reserved: its writer is filling it. Not visible.
    Creating,
    /// Filled; the store is making it visible.
    Storing,
    /// Resident and idle.
    Active,
    /// Resident and lent to at least one local reader.
    Reused,
    /// Resident and being sent elsewhere.
    Migrating,
    /// Invisible; its memory is given back when the last reader is done.
    Evicting,
    /// Gone: chosen by the eviction policy.
    Evicted,
    /// Gone: its time to live passed.
    Expired,
    /// Gone: removed by request or because its bytes no longer matched its checksum.
    Removed,
    /// Gone before it was visible: given up by its writer, or the writer died.
    Aborted,
}

pub const STATES: usize = 10;

impl State {
    pub const ALL: [Self; STATES] = [
        Self::Creating,
        Self::Storing,
        Self::Active,
        Self::Reused,
        Self::Migrating,
        Self::Evicting,
        Self::Evicted,
        Self::Expired,
        Self::Removed,
        Self::Aborted,
    ];

    /// The states that may follow.
    pub const fn next(self) -> &'static [Self] {
        match self {
            Self::Creating => &[Self::Storing, Self::Aborted],
            Self::Storing => &[Self::Active, Self::Aborted],
            Self::Active => &[Self::Reused, Self::Migrating, Self::Evicting, Self::Expired],
            Self::Reused => &[Self::Active, Self::Migrating, Self::Evicting],
            Self::Migrating => &[Self::Active, Self::Reused, Self::Evicting],
            Self::Evicting => &[Self::Evicted, Self::Removed],
            Self::Evicted | Self::Expired | Self::Removed | Self::Aborted => &[],
        }
    }

    /// Whether lookups find the block.
    pub const fn is_resident(self) -> bool {
        matches!(self, Self::Active | Self::Reused | Self::Migrating)
    }

    /// Whether the block's slot is free for another.
    pub const fn is_gone(self) -> bool {
        self.next().is_empty()
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Storing => "storing",
            Self::Active => "active",
            Self::Reused => "reused",
            Self::Migrating => "migrating",
            Self::Evicting => "evicting",
            Self::Evicted => "evicted",
            Self::Expired => "expired",
            Self::Removed => "removed",
            Self::Aborted => "aborted",
        }
    }
}

/// How many blocks are in each state (for the last four: have ended in it) and took each step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LifecycleCounts {
    pub blocks: [u64; STATES],
    pub steps: [[u64; STATES]; STATES],
}

impl LifecycleCounts {
    /// A new block comes to life.
    pub fn begin(&mut self) -> State {
        self.blocks[State::Creating as usize] += 1;
        State::Creating
    }

    /// Takes one step.
    ///
    /// # Errors
    /// [`StoreError::IllegalTransition`] if the table has no such step; nothing changes.
    pub fn advance(&mut self, state: &mut State, to: State) -> Result<(), StoreError> {
        if !state.next().contains(&to) {
            return Err(StoreError::IllegalTransition { from: *state, to });
        }
        self.blocks[*state as usize] -= 1;
        self.blocks[to as usize] += 1;
        self.steps[*state as usize][to as usize] += 1;
        *state = to;
        Ok(())
    }

    pub fn in_state(&self, state: State) -> u64 {
        self.blocks[state as usize]
    }

    pub fn add(&mut self, other: &Self) {
        let add = |mine: &mut [u64; STATES], theirs: &[u64; STATES]| {
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        };
        add(&mut self.blocks, &other.blocks);
        self.steps.iter_mut().zip(&other.steps).for_each(|(mine, theirs)| add(mine, theirs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair of states: allowed exactly where the published state diagram (and the two ways out that it
    /// leaves open, abort and removal) has an arrow.
    #[test]
    fn only_the_steps_of_the_table_are_taken() {
        use State::*;
        let arrows = [
            (Creating, Storing),
            (Creating, Aborted),
            (Storing, Active),
            (Storing, Aborted),
            (Active, Reused),
            (Active, Migrating),
            (Active, Evicting),
            (Active, Expired),
            (Reused, Active),
            (Reused, Migrating),
            (Reused, Evicting),
            (Migrating, Active),
            (Migrating, Reused),
            (Migrating, Evicting),
            (Evicting, Evicted),
            (Evicting, Removed),
        ];
        for from in State::ALL {
            for to in State::ALL {
                let mut counts = LifecycleCounts::default();
                counts.blocks[from as usize] = 1;
                let mut state = from;
                let result = counts.advance(&mut state, to);
                if arrows.contains(&(from, to)) {
                    assert_eq!(
                        (result, state, counts.in_state(to), counts.in_state(from)),
                        (Ok(()), to, 1, 0)
                    );
                } else {
                    assert_eq!(result, Err(StoreError::IllegalTransition { from, to }));
                    assert_eq!((state, counts.in_state(from)), (from, 1));
                }
            }
        }
    }
}
