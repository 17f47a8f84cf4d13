//! How a block looks as an object: 128 bytes that say what it is, then its bytes.
//!
//! | at  | bytes | little-endian                                                     |
//! |-----|-------|-------------------------------------------------------------------|
//! | 0   | 8     | `KVREMOTE`                                                        |
//! | 8   | 2     | version, 1                                                        |
//! | 10  | 2     | bit 0: has a parent                                               |
//! | 12  | 2     | class                                                             |
//! | 14  | 2     | tenant                                                            |
//! | 16  | 16    | key                                                               |
//! | 32  | 16    | key of the parent, or 0                                           |
//! | 48  | 4     | depth                                                             |
//! | 52  | 4     | size of the block                                                 |
//! | 56  | 8     | id of the key that sealed it, 0 = stored in clear                 |
//! | 64  | 4     | milliseconds it may stay, as its writer put it                    |
//! | 68  | 4     | 0                                                                 |
//! | 72  | 24    | nonce                                                             |
//! | 96  | 16    | tag, over bytes 0 to 72 and the sealed bytes                      |
//! | 112 | 8     | xxh3 of bytes 0 to 112                                            |
//! | 120 | 8     | xxh3 of the block; sealed together with its bytes, as it tells of them |
//!
//! An object is as long as its block plus [`FRAME_BYTES`], sealed or not, so that a listing tells sizes.

use bytes::Bytes;

use super::seal::{Key, KeyId, KeyRing, NONCE_BYTES, Sealed, TAG_BYTES};
use kvasir_memory::shared::Shared;
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};
use kvasir_store::store::Loaded;

pub(super) const FRAME_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"KVREMOTE";
const VERSION: u16 = 1;
const HAS_PARENT: u16 = 1;
/// End of the bytes to which a seal is bound.
const CONTEXT: usize = 72;
const TAG: usize = CONTEXT + NONCE_BYTES;
const HEADER_SUM: usize = TAG + TAG_BYTES;
/// Where the sealed bytes begin.
const BODY: usize = HEADER_SUM + 8;

/// Why an object gives no block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is not what was stored: cut short, changed, or written by someone else. Counts as a miss.
    Damaged,
    /// It is sealed with a key that this host does not have.
    UnknownKey(KeyId),
    /// It is not sealed, although it must be: anybody who can write there may have put it in the place of a sealed one.
    Plain,
}

/// The object for a block, sealed if there is a key. Returns `None` if sealing failed.
pub(super) fn encode(loaded: &Loaded, bytes: Shared<'_>, key: Option<&Key>) -> Option<Vec<u8>> {
    let meta = &loaded.meta;
    let mut object = Vec::with_capacity(FRAME_BYTES + bytes.len());
    let flags = if meta.parent.is_some() { HAS_PARENT } else { 0 };
    object.extend(MAGIC);
    for short in [VERSION, flags, meta.class, meta.tenant] {
        object.extend(short.to_le_bytes());
    }
    object.extend(meta.key.0.to_le_bytes());
    object.extend(meta.parent.unwrap_or_default().0.to_le_bytes());
    object.extend(meta.depth.to_le_bytes());
    object.extend(meta.size.to_le_bytes());
    object.extend(key.map_or(0, |key| key.id.0).to_le_bytes());
    object.extend(meta.ttl_ms.to_le_bytes());
    object.resize(BODY, 0);
    object.extend(loaded.checksum.to_le_bytes());
    let begin = object.len();
    object.resize(begin + bytes.len(), 0);
    bytes.copy_to(&mut object[begin..]);
    if let Some(key) = key {
        let (context, body) = object.split_at_mut(BODY);
        let (nonce, tag) = key.seal(&context[..CONTEXT], body)?;
        context[CONTEXT..TAG].copy_from_slice(&nonce);
        context[TAG..HEADER_SUM].copy_from_slice(&tag);
    }
    let sum = checksum(&object[..HEADER_SUM]).to_le_bytes();
    object[HEADER_SUM..BODY].copy_from_slice(&sum);
    Some(object)
}

/// The block `key` and its bytes from its object.
pub(super) fn decode(key: BlockKey, object: Bytes, keys: &KeyRing) -> Result<(Loaded, Bytes), Unusable> {
    let header = object.first_chunk::<FRAME_BYTES>().ok_or(Unusable::Damaged)?;
    let sound = header[..8] == MAGIC
        && short(header, 8) == VERSION
        && checksum(&header[..HEADER_SUM]) == u64::from_le_bytes(part(header, HEADER_SUM));
    let size = u32::from_le_bytes(part(header, 52));
    let fits = size > 0 && object.len() == FRAME_BYTES + size as usize;
    let meta = BlockMeta {
        parent: (short(header, 10) & HAS_PARENT != 0)
            .then(|| BlockKey(u128::from_le_bytes(part(header, 32)))),
        depth: u32::from_le_bytes(part(header, 48)),
        class: short(header, 12),
        tenant: short(header, 14),
        ttl_ms: u32::from_le_bytes(part(header, 64)),
        key: BlockKey(u128::from_le_bytes(part(header, 16))),
        size,
    };
    if !sound || !fits || meta.key != key {
        return Err(Unusable::Damaged);
    }
    let id = KeyId(u64::from_le_bytes(part(header, 56)));
    let sealed: Sealed = (part(header, CONTEXT), part(header, TAG));
    let object = match id.0 {
        0 if keys.takes_plain() => object,
        0 => return Err(Unusable::Plain),
        _ => open(object, id, sealed, keys)?,
    };
    let expected = u64::from_le_bytes(part(&object, BODY));
    let bytes = object.slice(FRAME_BYTES..);
    if checksum(&bytes) != expected {
        return Err(Unusable::Damaged);
    }
    Ok((Loaded { meta, checksum: expected }, bytes))
}

fn open(object: Bytes, id: KeyId, sealed: Sealed, keys: &KeyRing) -> Result<Bytes, Unusable> {
    let key = keys.by_id(id).ok_or(Unusable::UnknownKey(id))?;
    let mut object = Vec::from(object);
    let (context, body) = object.split_at_mut(BODY);
    let intact = key.open(&context[..CONTEXT], sealed, body);
    intact.then(|| object.into()).ok_or(Unusable::Damaged)
}

fn short(header: &[u8; FRAME_BYTES], at: usize) -> u16 {
    u16::from_le_bytes(part(header, at))
}

/// `N` bytes of the frame; the caller has checked that they are there.
fn part<const N: usize>(frame: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| frame[at + i])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::seal::TenantKey;
    use kvasir_store::conformance::block;

    fn ring() -> KeyRing {
        KeyRing::new(&[TenantKey { tenant: 1, key: [9; 32] }], true)
    }

    fn framed(n: u64, size: u32, tenant: u16) -> (Loaded, Vec<u8>, Vec<u8>) {
        let put = block(n, size);
        let meta = BlockMeta { tenant, ttl_ms: 77, ..put.meta };
        let loaded = Loaded { meta, checksum: put.checksum };
        let bytes = put.buffer.shared().to_vec();
        let object = encode(&loaded, bytes[..].into(), ring().of_tenant(tenant)).unwrap();
        (loaded, bytes, object)
    }

    #[test]
    fn blocks_come_back_in_clear_and_sealed() {
        for (n, size, tenant) in [(0, 1, 0), (1, 5000, 0), (2, 1, 1), (3, 5000, 1)] {
            let (loaded, bytes, object) = framed(n, size, tenant);
            assert_eq!(object.len(), FRAME_BYTES + size as usize);
            assert_eq!(
                object.windows(bytes.len()).any(|part| part == bytes) && size > 1,
                tenant == 0 && size > 1
            );
            let found = decode(loaded.meta.key, object.into(), &ring()).unwrap();
            assert_eq!(found, (loaded, bytes.into()));
        }
    }

    /// What lies in folders and stores.
    #[test]
    fn the_layout_is_fixed() {
        let (mut meta, body) = (BlockMeta::single(BlockKey(0x0102), 3), [7, 8, 9]);
        (meta.class, meta.tenant, meta.depth, meta.ttl_ms) = (0x1112, 0, 0x2122, 0x3132);
        meta.parent = Some(BlockKey(0x4142));
        let loaded = Loaded { meta, checksum: checksum(&body) };
        let object = encode(&loaded, body[..].into(), None).unwrap();
        let mut header = b"KVREMOTE\x01\x00\x01\x00\x12\x11\x00\x00".to_vec();
        for (value, len) in
            [(0x0102, 16), (0x4142, 16), (0x2122, 4), (3, 4), (0, 8), (0x3132, 4), (0, 4), (0, 24), (0, 16)]
        {
            header.extend(&[&u128::to_le_bytes(value)[..], &[0; 8]].concat()[..len]);
        }
        let sum = checksum(&header);
        header.extend(sum.to_le_bytes());
        header.extend(loaded.checksum.to_le_bytes());
        header.extend(body);
        assert_eq!(object, header);
        let (_, bytes, sealed) = framed(1, 3, 1);
        let id = ring().of_tenant(1).unwrap().id.0;
        assert_eq!((&sealed[56..64], &sealed[68..72]), (&id.to_le_bytes()[..], &[0; 4][..]));
        assert_eq!(sealed[112..120], checksum(&sealed[..112]).to_le_bytes());
        assert_ne!(sealed[128..], bytes);
    }

    #[test]
    fn a_plain_object_is_refused_where_blocks_are_sealed() {
        let (loaded, _, plain) = framed(1, 100, 0);
        let keys = [TenantKey { tenant: 1, key: [9; 32] }];
        let decode = |ring: KeyRing| decode(loaded.meta.key, plain.clone().into(), &ring).err();
        assert_eq!(decode(KeyRing::new(&keys, false)), Some(Unusable::Plain));
        assert_eq!(decode(KeyRing::new(&keys, true)), None);
        assert_eq!(decode(KeyRing::new(&[], false)), None, "without a key nothing is sealed");
    }

    #[test]
    fn a_missing_key_is_told_from_damage() {
        let (loaded, _, object) = framed(1, 100, 1);
        let id = ring().of_tenant(1).unwrap().id;
        let other = KeyRing::new(&[TenantKey { tenant: 1, key: [8; 32] }], false);
        assert_eq!(decode(loaded.meta.key, object.clone().into(), &other), Err(Unusable::UnknownKey(id)));
        assert_eq!(decode(BlockKey(1), object.into(), &ring()), Err(Unusable::Damaged), "misplaced");
    }

    proptest! {
        #[test]
        fn any_change_is_noticed(size in 1u32..300, tenant in 0u16..2, at: prop::sample::Index, flip in 1u8..) {
            let (loaded, _, mut object) = framed(1, size, tenant);
            let at = at.index(object.len());
            object[at] ^= flip;
            prop_assert_eq!(decode(loaded.meta.key, object.clone().into(), &ring()), Err(Unusable::Damaged));
            object[at] ^= flip;
            for len in [at, object.len() - 1] {
                let cut = object[..len].to_vec();
                prop_assert_eq!(decode(loaded.meta.key, cut.into(), &ring()), Err(Unusable::Damaged));
            }
            object.push(0);
            prop_assert_eq!(decode(loaded.meta.key, object.into(), &ring()), Err(Unusable::Damaged));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            prop_assert_eq!(decode(BlockKey(1), bytes.into(), &ring()), Err(Unusable::Damaged));
        }
    }
}
