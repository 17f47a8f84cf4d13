//! Encryption at rest, before a block leaves this process: XChaCha20-Poly1305 with one key per tenant.
//!
//! A key is named by what it does, not by a label: its id is derived from it one way, so a block sealed with
//! another key is told from a damaged one. Nonces are random; at 192 bits they never repeat.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use chacha20poly1305::aead::{AeadInOut, Generate, KeyInit};
use chacha20poly1305::{Tag, XChaCha20Poly1305, XNonce};

pub(super) const NONCE_BYTES: usize = 24;
pub(super) const TAG_BYTES: usize = 16;

/// The key that seals one tenant's blocks.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantKey {
    pub tenant: u16,
    /// 32 random bytes. If they are lost, so are the blocks.
    pub key: [u8; 32],
}

impl fmt::Debug for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantKey").field("tenant", &self.tenant).finish_non_exhaustive()
    }
}

/// Names a key without giving it away; 0 stands for no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KeyId(pub(super) u64);

/// All keys of this host. Several keys of one tenant open its blocks, the last one seals new ones.
#[derive(Default)]
pub(super) struct KeyRing {
    by_tenant: HashMap<u16, Arc<Key>>,
    by_id: HashMap<KeyId, Arc<Key>>,
    allow_plain: bool,
}

pub(super) struct Key {
    pub(super) id: KeyId,
    cipher: XChaCha20Poly1305,
}

/// The result of sealing: what must be stored beside the sealed bytes.
pub(super) type Sealed = ([u8; NONCE_BYTES], [u8; TAG_BYTES]);

impl KeyRing {
    pub(super) fn new(keys: &[TenantKey], allow_plain: bool) -> Self {
        let mut ring = Self { allow_plain, ..Self::default() };
        for TenantKey { tenant, key } in keys {
            let key = Arc::new(Key::new(key));
            ring.by_id.insert(key.id, Arc::clone(&key));
            ring.by_tenant.insert(*tenant, key);
        }
        ring
    }

    /// The key for a tenant's new blocks, or `None` if they are stored in clear.
    pub(super) fn of_tenant(&self, tenant: u16) -> Option<&Key> {
        self.by_tenant.get(&tenant).map(|key| &**key)
    }

    /// Whether blocks may be stored in clear.
    pub(super) fn takes_plain(&self) -> bool {
        self.allow_plain || self.by_id.is_empty()
    }

    pub(super) fn by_id(&self, id: KeyId) -> Option<&Key> {
        self.by_id.get(&id).map(|key| &**key)
    }
}

impl Key {
    fn new(key: &[u8; 32]) -> Self {
        let cipher = XChaCha20Poly1305::new(key.into());
        // The tag over fixed text under a fixed nonce, which no block will get by chance.
        let tag = cipher.encrypt_inout_detached(&XNonce::default(), b"kvasir key id", (&mut [][..]).into());
        let id = tag.map_or([0; 8], |tag| std::array::from_fn(|i| tag[i]));
        Self { id: KeyId(u64::from_le_bytes(id).max(1)), cipher }
    }

    /// Encrypts `bytes` in place, bound to `context`. Returns `None` without randomness, or if it is too long for the cipher (256 GiB).
    pub(super) fn seal(&self, context: &[u8], bytes: &mut [u8]) -> Option<Sealed> {
        let nonce = XNonce::try_generate().ok()?;
        let tag = self.cipher.encrypt_inout_detached(&nonce, context, bytes.into()).ok()?;
        Some((nonce.into(), tag.into()))
    }

    /// Undoes [`seal`](Self::seal). Returns false if the bytes or their context were changed.
    pub(super) fn open(&self, context: &[u8], (nonce, tag): Sealed, bytes: &mut [u8]) -> bool {
        let (nonce, tag) = (XNonce::from(nonce), Tag::from(tag));
        self.cipher.decrypt_inout_detached(&nonce, context, bytes.into(), &tag).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_with_the_same_key_and_context_alone() {
        let ring = KeyRing::new(
            &[TenantKey { tenant: 1, key: [1; 32] }, TenantKey { tenant: 2, key: [2; 32] }],
            false,
        );
        let (one, two) = (ring.of_tenant(1).unwrap(), ring.of_tenant(2).unwrap());
        assert_ne!(one.id, two.id);
        let mut bytes = *b"some bytes of a block";
        let sealed = one.seal(b"about it", &mut bytes).unwrap();
        assert_ne!(&bytes, b"some bytes of a block");
        for (key, context, expected) in
            [(one, "about it", true), (two, "about it", false), (one, "about me", false)]
        {
            let mut copy = bytes;
            assert_eq!(key.open(context.as_bytes(), sealed, &mut copy), expected);
            assert_eq!(&copy == b"some bytes of a block", expected);
        }
        assert_ne!(
            one.seal(b"", &mut [0; 4]).unwrap().0,
            one.seal(b"", &mut [0; 4]).unwrap().0,
            "nonces differ"
        );
    }

    #[test]
    fn a_tenants_last_key_seals_and_all_open() {
        let keys = [1, 2].map(|byte| TenantKey { tenant: 7, key: [byte; 32] });
        let (old, ring) = (KeyRing::new(&keys[..1], false), KeyRing::new(&keys, false));
        let old = old.of_tenant(7).unwrap().id;
        assert!(ring.by_id(old).is_some() && ring.of_tenant(7).unwrap().id != old);
        assert!(ring.of_tenant(8).is_none() && ring.by_id(KeyId(0)).is_none());
        assert!(!format!("{keys:?}").contains("32") && format!("{keys:?}").contains("tenant: 7"));
    }
}
