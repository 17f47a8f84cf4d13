//! Bugs that a simulation plants, to see that it finds them. Here there are none: the answer is a constant, and what depends
//! on it is not compiled in.

/// A bug that a test may plant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A host reports a copy as made when it has a place for it, before its bytes have come.
    ReportsCopyBeforeItsBytes,
    /// A copy that is on its way while its block is removed is kept when it arrives.
    KeepsCopyOfRemoved,
    /// A peer that comes back is not told what was removed while it was away.
    LeavesRemovalsUntold,
    /// What a peer said before it was started again counts as if it still said so.
    BelievesAnEarlierRun,
}

/// Whether it is planted.
#[inline(always)]
pub const fn is(_: Bug) -> bool {
    false
}
