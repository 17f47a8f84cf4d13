//! Bugs that a run plants in the code under test, to see that the checker finds them.

use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    ReportsCopyBeforeItsBytes,
    KeepsCopyOfRemoved,
    LeavesRemovalsUntold,
    BelievesAnEarlierRun,
}

static PLANTED: OnceLock<Bug> = OnceLock::new();

pub fn plant(bug: Bug) {
    let _ = PLANTED.set(bug);
}

pub fn is(bug: Bug) -> bool {
    PLANTED.get() == Some(&bug)
}
