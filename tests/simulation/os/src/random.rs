//! Chance, all of it from the seed.

use crate::schedule;

/// SplitMix64 (Steele, Lea, Flood: OOPSLA '14): the same numbers on every machine and with every version of every library.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

pub fn fill(bytes: &mut [u8]) {
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&number().to_le_bytes()[..chunk.len()]));
}

pub fn number() -> u64 {
    schedule::world().rng.next()
}
