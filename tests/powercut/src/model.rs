//! What must be so after a power cut: the marks of a recording up to the cut, taken together.
//!
//! A mark is a write of its own, at the end of the recorded device, so it stands in the log in its place among the writes of
//! the tier and the file system. "Begins" is written before a call is made, "ended" after it was answered.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Blocks that the workload puts and removes: about two thirds of what fits, so that segments are emptied all the time.
pub(crate) const BLOCKS: u32 = 40;

/// How a call that may change a block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Stored,
    Removed,
    /// It was refused, or there was nothing to do.
    AsBefore,
    Failed,
}

/// What the workload tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mark {
    /// The store is open. With `batch`, a put is durable when it is answered.
    Opened {
        batch: bool,
    },
    /// What the store had of a block when it was opened. Recovery makes durable what it finds.
    Found {
        block: u32,
        there: bool,
    },
    Begins {
        block: u32,
    },
    Ended {
        block: u32,
        outcome: Outcome,
    },
    FlushBegins {
        number: u64,
    },
    FlushEnded {
        number: u64,
    },
    /// The database was opened, and had this version.
    DatabaseFound {
        version: u64,
    },
    DatabaseBegins {
        version: u64,
    },
    /// It was flushed, and answered.
    DatabaseEnded {
        version: u64,
    },
}

/// What must be so of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    /// Never stored, removed, or lost for certain.
    Absent,
    /// `durable`: outlives a power cut.
    Stored { durable: bool },
    /// Something is under way.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    state: State,
    /// Before the call that is under way.
    before: State,
    /// Number of the last call that could change it.
    call: u64,
}

/// What must be so when the machine is up again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) blocks: Vec<State>,
    /// The database has one of these versions: the last that was acknowledged, or one that was begun.
    pub(crate) versions: (u64, u64),
}

impl Expected {
    /// Of an empty disk.
    pub(crate) fn nothing() -> Self {
        Self { blocks: vec![State::Absent; BLOCKS as usize], versions: (0, 0) }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    blocks: Vec<Block>,
    calls: u64,
    batch: bool,
    /// Blocks as they were when each flush began that has not ended.
    flushes: HashMap<u64, Vec<Block>>,
    versions: (u64, u64),
}

impl Model {
    pub(crate) fn new(expected: &Expected) -> Self {
        let block = |&state: &State| Block { state, before: state, call: 0 };
        Self {
            blocks: expected.blocks.iter().map(block).collect(),
            calls: 0,
            batch: false,
            flushes: HashMap::new(),
            versions: expected.versions,
        }
    }

    /// Numbers of blocks that do not exist are passed over.
    pub(crate) fn hear(&mut self, mark: &Mark) {
        self.calls += 1;
        let (calls, batch) = (self.calls, self.batch);
        match *mark {
            Mark::Opened { batch } => self.batch = batch,
            Mark::Found { block, there } => {
                let state = if there { State::Stored { durable: true } } else { State::Absent };
                self.change(block, |_| Block { state, before: state, call: calls });
            }
            Mark::Begins { block } => {
                self.change(block, |was| Block { state: State::Unknown, before: was.state, call: calls });
            }
            Mark::Ended { block, outcome } => self.change(block, |was| {
                let state = match outcome {
                    Outcome::Stored => State::Stored { durable: batch },
                    Outcome::Removed => State::Absent,
                    Outcome::AsBefore => was.before,
                    Outcome::Failed => State::Unknown,
                };
                Block { state, ..was }
            }),
            Mark::FlushBegins { number } => drop(self.flushes.insert(number, self.blocks.clone())),
            Mark::FlushEnded { number } => {
                let before = self.flushes.remove(&number).unwrap_or_default();
                for (before, now) in before.iter().zip(&mut self.blocks) {
                    // It was answered before the flush began, and nothing has changed it since.
                    if before == now && matches!(now.state, State::Stored { .. }) {
                        now.state = State::Stored { durable: true };
                    }
                }
            }
            Mark::DatabaseFound { version } => self.versions = (version, version),
            Mark::DatabaseBegins { version } => self.versions.1 = version,
            Mark::DatabaseEnded { version } => self.versions = (version, version),
        }
    }

    fn change(&mut self, block: u32, to: impl FnOnce(Block) -> Block) {
        if let Some(block) = self.blocks.get_mut(block as usize) {
            *block = to(*block);
        }
    }

    /// If the power goes now.
    pub(crate) fn expected(&self) -> Expected {
        let state = |block: &Block| match block.state {
            State::Stored { durable: false } => State::Unknown,
            state => state,
        };
        Expected { blocks: self.blocks.iter().map(state).collect(), versions: self.versions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURABLE: State = State::Stored { durable: true };

    fn check(marks: &[Mark], expected: State) {
        let mut model = Model::new(&Expected::nothing());
        marks.iter().for_each(|mark| model.hear(mark));
        assert_eq!(model.expected().blocks[1], expected, "{marks:?}");
    }

    #[test]
    fn a_block_is_owed_once_it_was_flushed_and_never_after_its_removal() {
        let begins = Mark::Begins { block: 1 };
        let ended = |outcome| Mark::Ended { block: 1, outcome };
        let (stored, removed) = (ended(Outcome::Stored), ended(Outcome::Removed));
        let (flush, flushed) = (Mark::FlushBegins { number: 3 }, Mark::FlushEnded { number: 3 });
        let put = [begins.clone(), stored.clone()];
        check(&[], State::Absent);
        check(&put[..1], State::Unknown);
        check(&put, State::Unknown);
        check(&[&[Mark::Opened { batch: true }], &put[..]].concat(), DURABLE);
        let durable = [&put[..], &[flush.clone(), flushed.clone()]].concat();
        check(&durable, DURABLE);
        check(&durable[..3], State::Unknown);
        // The answer came after the flush had begun.
        check(&[begins.clone(), flush, stored, flushed], State::Unknown);
        check(&[&durable[..], &[begins.clone(), ended(Outcome::AsBefore)]].concat(), DURABLE);
        check(&[&durable[..], &[begins.clone(), ended(Outcome::Failed)]].concat(), State::Unknown);
        check(&[&durable[..], std::slice::from_ref(&begins)].concat(), State::Unknown);
        check(&[&durable[..], &[begins, removed]].concat(), State::Absent);
        check(&[Mark::Found { block: 1, there: true }], DURABLE);
        check(&[Mark::Begins { block: BLOCKS }, Mark::FlushEnded { number: 9 }], State::Absent);
    }
}
