//! Why a block is missing: a small memory of the keys of blocks that are gone.
//!
//! A table of fixed size, one cell per hash; a later block with the same cell overwrites an earlier one, which then
//! counts as never stored. 61 bits of the hash are compared, so a wrong cause is practically impossible.

/// Why a lookup found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MissCause {
    /// It is not in this memory: at least not among about the last 65,536 that went.
    NeverStored = 0,
    Evicted = 1,
    Expired = 2,
    /// Removed on request.
    Removed = 3,
    /// Its bytes no longer matched its checksum.
    Corrupted = 4,
}

pub const MISS_CAUSES: usize = 5;

impl MissCause {
    pub const ALL: [Self; MISS_CAUSES] =
        [Self::NeverStored, Self::Evicted, Self::Expired, Self::Removed, Self::Corrupted];

    pub const fn name(self) -> &'static str {
        match self {
            Self::NeverStored => "never_stored",
            Self::Evicted => "evicted",
            Self::Expired => "expired",
            Self::Removed => "removed",
            Self::Corrupted => "corrupted",
        }
    }
}

/// Cells of one shard; 32 shards make 65,536, in 512 KiB.
const CELLS: usize = 2048;
const CAUSE: u64 = 7;

/// The ghosts of one shard.
#[derive(Default)]
pub(super) struct Ghosts(Vec<u64>);

impl Ghosts {
    pub(super) fn note(&mut self, hash: u64, cause: MissCause) {
        if self.0.is_empty() {
            self.0 = vec![0; CELLS];
        }
        self.0[cell(hash)] = hash & !CAUSE | cause as u64;
    }

    pub(super) fn cause(&self, hash: u64) -> MissCause {
        let found = self.0.get(cell(hash)).filter(|&&ghost| ghost & !CAUSE == hash & !CAUSE);
        found.map_or(MissCause::NeverStored, |&ghost| MissCause::ALL[(ghost & CAUSE) as usize % MISS_CAUSES])
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<u64>()
    }
}

/// Bits that neither the choice of the shard nor the comparison depends on alone.
fn cell(hash: u64) -> usize {
    (hash >> 40) as usize % CELLS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ghost_tells_until_another_takes_its_cell() {
        let mut ghosts = Ghosts::default();
        assert_eq!(ghosts.cause(0), MissCause::NeverStored);
        let (one, other) = (5 << 40 | 8, 5 << 40 | 16);
        ghosts.note(one, MissCause::Expired);
        assert_eq!((ghosts.cause(one), ghosts.cause(other)), (MissCause::Expired, MissCause::NeverStored));
        ghosts.note(other, MissCause::Corrupted);
        assert_eq!((ghosts.cause(one), ghosts.cause(other)), (MissCause::NeverStored, MissCause::Corrupted));
        assert!(MissCause::ALL.iter().enumerate().all(|(at, &cause)| cause as usize == at));
    }
}
