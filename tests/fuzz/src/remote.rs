//! Objects of the remote tier, as anybody who can write there may leave them: bytes as they are (`r`), a plain object whose sums
//! are right (`p`), and one that was sealed, in which bytes were changed since (`s`).

use crate::input::Input;
use crate::kind;
use crate::threads::calm;
use kvasir_dataplane::memory::buffer::Buffer;
use kvasir_dataplane::tier::remote::{Place, RemoteConfig, RemoteStore, TenantKey};
use kvasir_dataplane::tier::store::{BlockStore, Get, Loaded, Put};
use kvasir_dataplane::{BlockKey, BlockMeta, checksum};
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use tempfile::TempDir;

const HEADER_LEN: usize = 128;
/// The sum of what is before it, and the end of that sum.
const SUM: std::ops::Range<usize> = 112..120;
/// Of the blocks that are sealed.
const SIZES: [usize; 3] = [1, 100, 2_000];
/// Of a buffer: the tier wants room for what it last read under the key, however short the object is now.
const ROOM: usize = 32 << 10;
const TENANT: u16 = 1;
const KEY: BlockKey = BlockKey(0x0123_4567_89ab_cdef);

/// A tier, and the folder where it keeps its objects.
struct Tier {
    folder: TempDir,
    store: RemoteStore,
}

static PLAIN: LazyLock<Tier> = LazyLock::new(|| Tier::new(Vec::new()));
static SEALED: LazyLock<Tier> = LazyLock::new(|| Tier::new(vec![TenantKey { tenant: TENANT, key: [9; 32] }]));
/// What the tier makes of blocks of these sizes.
static OBJECTS: LazyLock<[Vec<u8>; SIZES.len()]> = LazyLock::new(|| SIZES.map(|size| SEALED.seal(size)));

pub(crate) fn run(data: &[u8]) {
    calm(|| match kind(data) {
        Some((b'r', object)) => raw(object),
        Some((b'p', fields)) => plain(&mut Input(fields)),
        Some((b's', changes)) => sealed(&mut Input(changes)),
        _ => {}
    });
}

impl Tier {
    fn new(keys: Vec<TenantKey>) -> Self {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a folder");
        let config = RemoteConfig { keys, ..RemoteConfig::new(Place::Directory(folder.path().into())) };
        Self { store: RemoteStore::open(&config).expect("a tier in a folder"), folder }
    }

    fn file(&self) -> PathBuf {
        let name = KEY.to_string();
        let folder = self.folder.path().join(&name[..2]);
        fs::create_dir_all(&folder).expect("a folder");
        folder.join(name)
    }

    fn seal(&self, size: usize) -> Vec<u8> {
        let bytes = content(size);
        let meta = BlockMeta { tenant: TENANT, ..BlockMeta::single(KEY, size as u32) };
        let put = Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() };
        self.store.put(vec![put]).wait().remove(0).outcome.expect("it is stored");
        let object = fs::read(self.file()).expect("an object");
        assert!(self.store.remove(vec![KEY]).wait().remove(0).expect("it is removed"));
        object
    }

    /// The block that the tier finds in this object: its bytes match what it says of them.
    fn get(&self, object: &[u8]) -> Option<(Loaded, Vec<u8>)> {
        fs::write(self.file(), object).expect("an object");
        let buffer = Buffer::zeroed(object.len().max(ROOM));
        let done = self.store.get(vec![Get { key: KEY, buffer }]).wait().remove(0);
        let loaded = done.outcome.ok()??;
        let size = loaded.meta.size as usize;
        assert_eq!((loaded.meta.key, size), (KEY, object.len() - HEADER_LEN));
        let bytes = done.buffer.bytes()[..size].to_vec();
        assert_eq!(checksum(&bytes), loaded.checksum);
        Some((loaded, bytes))
    }
}

fn content(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 7 + at / 256) as u8).collect()
}

fn raw(object: &[u8]) {
    if let Some((_, bytes)) = PLAIN.get(object) {
        assert_eq!(bytes, object[HEADER_LEN..]);
    }
    assert_eq!(SEALED.get(object), None, "not sealed by this host");
}

/// Written by another host, which has no keys either.
fn plain(input: &mut Input<'_>) {
    let (flags, class, tenant) = (u16::from(input.byte() & 1), input.u16(), input.u16());
    let (parent, depth, ttl_ms) = (u128::from_le_bytes(input.array()), input.u32(), input.u32());
    let bytes = input.0;
    let size = bytes.len() as u32;
    let mut object = b"KVREMOTE".to_vec();
    [1, flags, class, tenant].iter().for_each(|short| object.extend(short.to_le_bytes()));
    [KEY.0, parent].iter().for_each(|key| object.extend(key.to_le_bytes()));
    [depth, size, 0, 0, ttl_ms].iter().for_each(|word| object.extend(word.to_le_bytes()));
    object.resize(SUM.start, 0);
    object.extend(checksum(&object).to_le_bytes());
    object.extend(checksum(bytes).to_le_bytes());
    object.extend(bytes);
    let parent = (flags == 1).then_some(BlockKey(parent));
    let meta = BlockMeta { key: KEY, parent, depth, class, tenant, ttl_ms, size };
    let expected = (size > 0).then(|| (Loaded { meta, checksum: checksum(bytes) }, bytes.to_vec()));
    assert_eq!(PLAIN.get(&object), expected);
    assert_eq!(SEALED.get(&object), None, "not sealed");
}

/// The block as it was sealed, or none.
fn sealed(input: &mut Input<'_>) {
    let which = usize::from(input.byte()) % SIZES.len();
    let original = &OBJECTS[which];
    let (mut object, sums) = (original.clone(), input.byte().is_multiple_of(2));
    while !input.is_empty() {
        let (at, bits) = (usize::from(input.u16()), input.byte());
        match object.get_mut(at) {
            Some(byte) => *byte ^= bits,
            None if bits.is_multiple_of(2) => object.truncate(at % original.len()),
            None => object.push(bits),
        }
    }
    if sums && let Some(head) = object.get(..SUM.start) {
        let sum = checksum(head).to_le_bytes();
        if let Some(place) = object.get_mut(SUM) {
            place.copy_from_slice(&sum);
        }
    }
    let found = SEALED.get(&object).map(|(_, bytes)| bytes);
    assert_eq!(found, (object == *original).then(|| content(SIZES[which])));
    assert!(object == *original || PLAIN.get(&object).is_none(), "it is not plain");
}
