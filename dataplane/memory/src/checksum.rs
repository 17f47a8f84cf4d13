//! The checksum that every block carries.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

/// The checksum of a block's bytes, taken when it is stored and carried with it from then on.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// [`checksum`] of bytes that come in pieces.
#[derive(Default)]
pub struct Checksum(XxHash3_64);

impl Checksum {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub fn finish(&self) -> u64 {
        self.0.finish()
    }
}
