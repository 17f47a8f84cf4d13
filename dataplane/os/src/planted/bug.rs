//! The list of bugs that a simulation may plant: one for the product, in which none of them is, and for the simulated machine.

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A bug that a test may plant.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$doc])* $name,)*
        }

        impl Bug {
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Whether it is one of a tier on a disk, not of hosts among each other.
            pub fn is_of_disk(self) -> bool {
                self as usize >= Self::BeginsSegmentUnsynced as usize
            }

            /// As it is called on the command line: `LeavesOrphans` is `leaves-orphans`.
            pub fn name(self) -> String {
                let mut name = String::new();
                for letter in format!("{self:?}").chars() {
                    if letter.is_uppercase() && !name.is_empty() {
                        name.push('-');
                    }
                    name.push(letter.to_ascii_lowercase());
                }
                name
            }
        }
    };
}

bugs! {
    /// A host reports a copy as made when it has a place for it, before its bytes have come.
    ReportsCopyBeforeItsBytes,
    /// A copy that is on its way while its block is removed is kept when it arrives.
    KeepsCopyOfRemoved,
    /// A peer that comes back is not told what was removed while it was away.
    LeavesRemovalsUntold,
    /// What a peer said before it was started again counts as if it still said so.
    BelievesAnEarlierRun,
    /// A block that is there in another version than the one that is offered does not count as a copy.
    CountsOneVersionAlone,
    /// A heartbeat waits for the table, and what a lost peer held is looked for in it for seconds.
    BeatsBehindTheTable,
    /// A host that has a block which nobody claims any more does not take over.
    LeavesOrphans,
    /// A host orders puts and removals by its own clock, though it has heard of later ones.
    FollowsNoOtherClock,
    /// When a block was put is told by what the clock says now, though it may have been set since.
    TrustsTheClockOfNow,
    /// What was removed before a host was started again is not read from its disk.
    ForgetsRemovalsAtRestart,
    /// A removal that a tier could not do is taken for done.
    ForgetsUnfinishedRemovals,
    /// What a peer removes is removed from the pool, and stays on the disk.
    LeavesRemovedOnDisk,
    /// A block that is removed on its way to the disk stays there when it has come.
    KeepsRemovedOnItsWayDown,
    /// A host says that it has let go of a block that has left its pool for its disk.
    LetsGoOfWhatIsOnDisk,
    /// A host that drops its surplus copy of a block deletes it from the place that all hosts share, too.
    TrimsWhatHostsShare,
    /// Whoever names a lease ends it, whosever it is.
    EndsLeasesOfOthers,
    /// A peer's pool is looked at under the lock of what the peer said, which others take while they look at the pool.
    LooksAtPoolUnderState,
    /// What a client had reserved and was lent stays so when its connection has ended.
    KeepsPlacesOfTheGone,
    /// A place that is taken back from a client which maps the pool goes to others at once, though it may still be writing there.
    GivesPlacesOfWritersAway,
    /// What a peer was writing is given up, and it may write on.
    LetsPeersWriteOn,
    /// A put that is cut short is made visible as far as it came.
    KeepsPutsCutShort,
    /// A caller that acts for one tenant reaches the blocks of the one whose number it writes into a key.
    TakesTenantsAtTheirWord,
    /// A client waits for an answer beyond its deadline.
    WaitsBeyondDeadline,
    /// The first group of a segment, with which its epoch goes, is not made durable before others follow.
    BeginsSegmentUnsynced,
    /// A removal is answered before its tombstone is durable.
    AnswersRemovalUnsynced,
    /// After a sync that failed the next one is believed.
    BelievesSyncAfterFailure,
    /// What is read from the disk is not compared with its checksum.
    ServesDamaged,
    /// What may be on the disk because its write or removal failed is removed by doing nothing.
    ForgetsFailedWrites,
    /// A block that compaction moves waits for a put of it, which waits for space.
    MoveWaitsForPut,
    /// A block that compaction moves waits for a removal of it, which waits for space.
    MoveWaitsForRemoval,
    /// What compaction moved out of a segment that it could then not free is not removed there.
    LeavesMovedCopies,
    /// A segment that a killed process has marked free is taken for free before that is durable.
    TrustsFreeUnsynced,
    /// The epoch of a segment whose file a power cut has taken is given again, though the checkpoint knows it.
    GivesEpochAgain,
    /// A block whose removal failed is served on, though what removes it may be on the disk.
    ServesOnIfRemovalFails,
}
