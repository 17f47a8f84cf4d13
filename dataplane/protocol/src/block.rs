//! What a block is called and what is known about it before its bytes arrive.

use std::fmt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

pub use kvasir_memory::checksum::{Checksum, checksum};

/// The most items in one batch call, in process and on the wire.
pub const BATCH_MAX: usize = 4096;

/// The low bits of a key, which name the block; the 16 above them name the tenant that it belongs to.
const NAME_BITS: u32 = 112;
const NAME: u128 = (1 << NAME_BITS) - 1;

/// Longer names are hashed piece by piece.
const SHORT: usize = 192;

/// Names one block of KV. Its low 112 bits are equal exactly when the namespaces and engine hashes are equal (up to the
/// collisions of xxh3, about 2^-53 at a billion blocks). The 16 bits above are the tenant's: a client leaves them 0, and the
/// host writes them by the client's identity, so that no client can name a block of another tenant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct BlockKey(pub u128);

impl BlockKey {
    /// The key of a block that an engine names by `engine_hash` (opaque, any length). `namespace` carries
    /// what that hash does not cover: model, dtype, tensor-parallel layout, block size.
    pub fn from_engine_hash(namespace: &str, engine_hash: &[u8]) -> Self {
        // The length goes first, so that no two (namespace, hash) pairs read as the same bytes.
        let len = (namespace.len() as u64).to_le_bytes();
        let parts = [&len[..], namespace.as_bytes(), engine_hash];
        let mut text = [0; SHORT];
        let mut rest = &mut text[..];
        // An engine asks for thousands at once. In one piece they take a third of the time, of which the rest is for an
        // allocation.
        let fits = parts.iter().all(|part| match rest.split_off_mut(..part.len()) {
            Some(to) => {
                to.copy_from_slice(part);
                true
            }
            None => false,
        });
        let free = rest.len();
        if fits {
            return Self(XxHash3_128::oneshot(&text[..SHORT - free]) & NAME);
        }
        let mut hasher = XxHash3_128::new();
        parts.iter().for_each(|part| hasher.write(part));
        Self(hasher.finish_128() & NAME)
    }

    /// The key under which a host keeps this block for `tenant`, whatever tenant the caller wrote into it.
    #[must_use]
    pub fn of_tenant(self, tenant: u16) -> Self {
        Self(self.0 & NAME | u128::from(tenant) << NAME_BITS)
    }

    /// The tenant whose block it names.
    pub fn tenant(self) -> u16 {
        (self.0 >> NAME_BITS) as u16
    }

    /// The key as the tenant's own clients know it.
    #[must_use]
    pub fn without_tenant(self) -> Self {
        Self(self.0 & NAME)
    }

    /// The key of a block that a person names, for the command line.
    pub fn from_name(name: &str) -> Self {
        Self::from_engine_hash("name", name.as_bytes())
    }

    /// The 64 bits that policies see: equal blocks have equal identities across evictions.
    pub fn identity(self) -> u64 {
        self.0 as u64 ^ (self.0 >> 64) as u64
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A block about to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockMeta {
    pub key: BlockKey,
    /// The block before it in its chain; `None` for the first block of a prompt.
    pub parent: Option<BlockKey>,
    /// Position in its chain, 0 = first block of a prompt.
    pub depth: u32,
    /// Workload class of the request that stores it, 0 = unknown.
    pub class: u16,
    /// The tenant that stores it and pays for its bytes, 0 = none in particular.
    pub tenant: u16,
    /// Milliseconds it may stay where it is stored, used or not; 0 = no limit of its own.
    pub ttl_ms: u32,
    /// Bytes, 1 to the size of the pool.
    pub size: u32,
}

impl BlockMeta {
    /// A block that stands alone: no parent, class unknown, no tenant in particular, kept for as long as there is room.
    pub fn single(key: BlockKey, size: u32) -> Self {
        Self { key, parent: None, depth: 0, class: 0, tenant: 0, ttl_ms: 0, size }
    }
}

/// How long, and how firmly, a block must stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The block is not evicted for this long (the store has an upper bound).
    Hard { duration_ms: u32 },
    /// The block is not evicted until `weight`, which halves every half-life of the store, has fallen to 1. A caller that evicts
    /// the block by its key overrides it.
    Soft { weight: u32 },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_hashed_as_a_short_one_is() {
        for len in [0, 1, 16, 32, SHORT - 75, SHORT - 74, SHORT - 73, SHORT - 72, SHORT - 71, 1000] {
            let (namespace, hash) = ("n".repeat(64), vec![7; len]);
            let mut whole = 64_u64.to_le_bytes().to_vec();
            whole.extend_from_slice(namespace.as_bytes());
            whole.extend_from_slice(&hash);
            let expected = XxHash3_128::oneshot(&whole) & NAME;
            assert_eq!(BlockKey::from_engine_hash(&namespace, &hash).0, expected, "{len} B");
        }
    }

    #[test]
    fn keys_separate_namespace_from_hash() {
        assert_ne!(BlockKey::from_engine_hash("ab", b"c"), BlockKey::from_engine_hash("a", b"bc"));
        assert_ne!(BlockKey::from_engine_hash("", b"abc"), BlockKey::from_engine_hash("abc", b""));
        assert_eq!(BlockKey::from_name("x"), BlockKey::from_name("x"));
        // Keys and checksums are stored on disks and sent on the wire: these values never change.
        let key = BlockKey::from_engine_hash("ns", b"hash");
        assert_eq!(
            (key.0, checksum(b"bytes")),
            (0x79e5_e117_e6d9_06ce_2ec0_d38b_9c54, 0xd303_45fe_f8ac_3570)
        );
        let theirs = BlockKey(u128::MAX).of_tenant(3);
        assert_eq!((theirs.0 >> 112, theirs.without_tenant()), (3, BlockKey(u128::MAX >> 16)));
        assert_ne!(theirs, BlockKey(u128::MAX).of_tenant(4));
        assert_eq!(key.of_tenant(0), key);
        assert_eq!(BlockKey(0xab).to_string(), "000000000000000000000000000000ab");
    }
}
