//! What stands behind a block of an engine, and says which block it is.
//!
//! A key has 112 bits of a hash that anybody can compute. An engine that reads another block's KV for its own answers wrong and
//! nobody notices, so its blocks carry the names they were made of in full, and these are compared after each load. A label
//! stands at the end of its block, where it leaves the payload in front as aligned as it was.

use std::fmt;

use kvasir_protocol::block::{BlockKey, checksum};
use sha2::{Digest, Sha256};

/// Magic, version, namespace, engine hash, bytes of the payload, checksum of all that.
const BYTES: usize = 4 + 4 + 32 + 32 + 8 + 8;
const MAGIC: [u8; 4] = *b"KVLB";
/// Labels are stored on disks: what an earlier version means never changes.
const VERSION: u32 = 1;
/// Where the checksum begins.
const SEALED: usize = BYTES - 8;

/// What engine hashes do not cover, as a digest of 32 bytes: model, dtype, layout, and which part of it each rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    digest: [u8; 32],
    /// In hexadecimal.
    name: String,
}

impl Namespace {
    pub fn new(digest: [u8; 32]) -> Self {
        Self { digest, name: digest.iter().map(|byte| format!("{byte:02x}")).collect() }
    }

    pub(super) fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The key of the block that an engine names by `engine_hash`: [`BlockKey::from_engine_hash`] over the digest in
    /// hexadecimal.
    pub fn key(&self, engine_hash: &[u8]) -> BlockKey {
        BlockKey::from_engine_hash(&self.name, engine_hash)
    }

    /// The label of that block.
    pub fn label(&self, engine_hash: &[u8], payload_bytes: u32) -> Label {
        let hash = engine_hash.try_into().unwrap_or_else(|_| Sha256::digest(engine_hash).into());
        Label::new(&self.digest, &hash, payload_bytes.into())
    }
}

/// The label of one block, as it is stored: little-endian, [`Label::BYTES`] long.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Label([u8; BYTES]);

impl Label {
    /// How much larger than its payload a block with a label is.
    pub const BYTES: u32 = BYTES as u32;

    /// The label of no block, for memory into which one will be read.
    pub(super) const BLANK: Self = Self([0; BYTES]);

    fn new(namespace: &[u8; 32], hash: &[u8; 32], payload_bytes: u64) -> Self {
        let mut label = [0; BYTES];
        let fields: [&[u8]; 5] =
            [&MAGIC, &VERSION.to_le_bytes(), namespace, hash, &payload_bytes.to_le_bytes()];
        let mut at = 0;
        for field in fields {
            label[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        let sum = checksum(&label[..SEALED]);
        label[SEALED..].copy_from_slice(&sum.to_le_bytes());
        Self(label)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn as_mut_bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// In what `found` differs. Returns `None` if it is the same.
    pub(super) fn fault(&self, found: &Self) -> Option<LabelFault> {
        let differs = |from: usize, to: usize| self.0[from..to] != found.0[from..to];
        match () {
            () if self == found => None,
            () if found.0[SEALED..] != checksum(&found.0[..SEALED]).to_le_bytes() => {
                Some(LabelFault::Damaged)
            }
            () if differs(0, 4) => Some(LabelFault::Damaged),
            () if differs(4, 8) => Some(LabelFault::Version),
            () if differs(8, 40) => Some(LabelFault::Namespace),
            () if differs(40, 72) => Some(LabelFault::Hash),
            () => Some(LabelFault::Length),
        }
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Label").field(&format_args!("{:02x?}", &self.0[8..SEALED])).finish()
    }
}

/// How the label of a block differs from the one that it should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelFault {
    #[error("its label is damaged, or it was stored without one")]
    Damaged,
    #[error("its label has another version")]
    Version,
    #[error("it belongs to another namespace")]
    Namespace,
    #[error("it has another engine hash")]
    Hash,
    #[error("it was stored as a block of another size")]
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_says_which_block_it_is() {
        let (ours, theirs) = (Namespace::new([1; 32]), Namespace::new([2; 32]));
        let label = ours.label(b"hash", 4096);
        let check = |found: Label, expected| assert_eq!(label.fault(&found), expected, "{found:?}");
        check(ours.label(b"hash", 4096), None);
        check(theirs.label(b"hash", 4096), Some(LabelFault::Namespace));
        check(ours.label(b"hush", 4096), Some(LabelFault::Hash));
        check(ours.label(b"hash", 4097), Some(LabelFault::Length));
        check(Label::BLANK, Some(LabelFault::Damaged));
        for at in 0..BYTES {
            let mut damaged = label;
            damaged.0[at] ^= 0x40;
            check(damaged, Some(LabelFault::Damaged));
        }
        let mut later = label;
        later.0[4] += 1;
        let sum = checksum(&later.0[..SEALED]);
        later.0[SEALED..].copy_from_slice(&sum.to_le_bytes());
        check(later, Some(LabelFault::Version));
    }

    #[test]
    fn labels_and_keys_are_those_that_lie_on_disks() {
        let namespace = Namespace::new(std::array::from_fn(|at| at as u8));
        let hash: [u8; 32] = std::array::from_fn(|at| 100 + at as u8);
        let label = namespace.label(&hash, 7).0;
        assert_eq!(
            (&label[..8], &label[8..40], &label[40..72]),
            (&b"KVLB\x01\0\0\0"[..], &namespace.digest[..], &hash[..])
        );
        assert_eq!(label[72..80], [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(
            namespace.label(b"of another length", 7).0[40..72],
            Sha256::digest(b"of another length")[..]
        );
        let name = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
        assert_eq!(namespace.key(b"hash"), BlockKey::from_engine_hash(name, b"hash"));
    }
}
