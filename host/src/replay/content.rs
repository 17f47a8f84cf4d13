//! Bytes that follow from a block's key, so that a reader of the block can tell whether it is the
//! right one, whole and unchanged.

use kvasir_dataplane::BlockKey;

/// Fills a block with the bytes that belong to its key.
pub fn fill(key: BlockKey, bytes: &mut [u8]) {
    let mut words = Words::new(key);
    let mut chunks = bytes.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&words.next().to_le_bytes());
    }
    let last = words.next().to_le_bytes();
    let tail = chunks.into_remainder();
    tail.copy_from_slice(&last[..tail.len()]);
}

/// Whether every byte is the one [`fill`] writes.
pub fn matches(key: BlockKey, bytes: &[u8]) -> bool {
    let mut words = Words::new(key);
    let mut differs = 0;
    let chunks = bytes.chunks_exact(8);
    let tail = chunks.remainder();
    for chunk in chunks {
        let word: [u8; 8] = chunk.try_into().expect("chunks of 8");
        differs |= u64::from_le_bytes(word) ^ words.next();
    }
    differs == 0 && tail == &words.next().to_le_bytes()[..tail.len()]
}

/// A Weyl sequence started from the key and mixed: every word depends on key and position.
struct Words {
    state: u64,
    step: u64,
}

impl Words {
    fn new(key: BlockKey) -> Self {
        Self { state: key.0 as u64, step: (key.0 >> 64) as u64 | 1 }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(self.step);
        let z = (self.state ^ self.state >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        z ^ z >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_byte_or_another_key_is_seen() {
        let key = BlockKey(0x1234_5678_9abc_def0_0fed_cba9_8765_4321);
        for len in [1, 7, 8, 9, 100, 4096] {
            let mut bytes = vec![0; len];
            fill(key, &mut bytes);
            assert!(matches(key, &bytes));
            assert!(!matches(BlockKey(key.0 ^ 1), &bytes) && !matches(BlockKey(key.0 ^ 1 << 100), &bytes));
            for at in [0, len / 2, len - 1] {
                bytes[at] ^= 0x40;
                assert!(!matches(key, &bytes), "{len} {at}");
                bytes[at] ^= 0x40;
            }
        }
    }
}
