//! The folder of a store. Whatever was changed in it, the store opens, and a block that it has is the one that was written.

use super::damage;
use crate::input::Input;
use crate::threads::calm;
use kvasir_dataplane::memory::buffer::Buffer;
use kvasir_dataplane::tier::nvme::{NvmeConfig, NvmeStore};
use kvasir_dataplane::tier::store::{BlockStore, Get, Put, TierError};
use kvasir_dataplane::{BlockKey, BlockMeta, checksum};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

pub(super) const SEGMENTS: u32 = 7;
pub(super) const SEGMENT_BYTES: u64 = 64 << 10;
/// Blocks that the store was given; every fifth was removed again.
const BLOCKS: u64 = 24;
/// One that is put after the damage.
const LATER: u64 = 1_000;

/// What an earlier run left: each file's place in the folder, and its content.
pub(super) struct Left {
    files: Vec<(PathBuf, Vec<u8>)>,
    /// The number of the store, which every group has.
    pub(super) store: u64,
}

static LEFT: LazyLock<Left> = LazyLock::new(leave);

/// In memory, where the system has such a place: nothing here is about a disk's speed.
fn folder() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a folder")
}

fn config(dir: &Path) -> NvmeConfig {
    NvmeConfig {
        capacity_bytes: u64::from(SEGMENTS) * SEGMENT_BYTES,
        segment_bytes: SEGMENT_BYTES,
        queue_depth: 2,
        direct_io: false,
        io_uring: false,
        ..NvmeConfig::new(dir)
    }
}

fn key(n: u64) -> BlockKey {
    BlockKey::from_engine_hash("fuzz", &n.to_le_bytes())
}

fn content(n: u64) -> Vec<u8> {
    let len = 1 + n * 911 % 9_000;
    (0..len).map(|at| (n * 31 + at * 7 + at / 256) as u8).collect()
}

fn put(store: &NvmeStore, n: u64) -> Result<(), TierError> {
    let bytes = content(n);
    let meta = BlockMeta::single(key(n), bytes.len() as u32);
    let put = Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() };
    store.put(vec![put]).wait().remove(0).outcome.map(drop)
}

fn leave() -> Left {
    let dir = folder();
    let store = NvmeStore::open(config(dir.path())).expect("a new store");
    (0..BLOCKS).for_each(|n| put(&store, n).expect("it is stored"));
    let removed = (0..BLOCKS).step_by(5).map(key).collect();
    store.remove(removed).wait().into_iter().for_each(|done| assert!(done.expect("it is removed")));
    drop(store);
    let mut files = Vec::new();
    gather(dir.path(), Path::new(""), &mut files);
    let identity = files.iter().find(|(path, _)| path == Path::new("store")).expect("an identity");
    let id = str::from_utf8(&identity.1).ok().and_then(|text| text.split_ascii_whitespace().nth(3));
    let store = id.and_then(|id| u64::from_str_radix(id, 16).ok()).expect("a number");
    Left { files, store }
}

fn gather(root: &Path, below: &Path, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in root.join(below).read_dir().expect("a folder") {
        let entry = entry.expect("an entry");
        let path = below.join(entry.file_name());
        match entry.file_type().expect("a type").is_dir() {
            true => gather(root, &path, files),
            false => files.push((path, fs::read(entry.path()).expect("a file"))),
        }
    }
}

impl Left {
    fn put_into(&self, dir: &Path, with_checkpoint: bool) {
        for (path, content) in &self.files {
            if with_checkpoint || !path.starts_with("checkpoint") {
                let path = dir.join(path);
                fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
                fs::write(path, content).expect("a file");
            }
        }
    }
}

pub(super) fn run(steps: &[u8]) {
    let (dir, mut input) = (folder(), Input(steps));
    LEFT.put_into(dir.path(), input.byte().is_multiple_of(2));
    let forged = damage::all(dir.path(), &LEFT, &mut input);
    calm(|| {
        let store = NvmeStore::open(config(dir.path())).expect("damage is no error");
        let before = intact(&store, &forged.keys);
        // It goes on from there.
        let stored = match put(&store, LATER) {
            Ok(()) => true,
            Err(TierError::Full { .. }) => false,
            Err(error) => panic!("{error}"),
        };
        let gone = before.first().copied();
        store.remove(gone.map(key).into_iter().collect()).wait().into_iter().for_each(|done| {
            assert!(done.expect("it is removed"));
        });
        store.flush().wait().expect("it is written");
        drop(store);
        let store = NvmeStore::open(config(dir.path())).expect("what was found well is well");
        let after = intact(&store, &forged.keys);
        if forged.is_any {
            // It may say of any block that it was removed, or is stored elsewhere.
            return;
        }
        let missing = before.iter().skip(1).find(|n| !after.contains(n));
        assert_eq!(missing, None, "it was there before, and is lost: {before:?}, {after:?}");
        assert!(gone.is_none_or(|gone| !after.contains(&gone)), "it was removed");
        assert_eq!(after.contains(&LATER), stored);
    });
}

/// The blocks that the store has, each compared with what was written; those that were forged with their checksums.
fn intact(store: &NvmeStore, forged: &[BlockKey]) -> Vec<u64> {
    forged.iter().for_each(|&key| drop(read(store, key)));
    let numbers = (0..BLOCKS).chain([LATER]);
    let held = numbers.filter(|&n| {
        read(store, key(n)).is_some_and(|bytes| {
            assert!(bytes == content(n), "block {n} has other bytes than were written");
            true
        })
    });
    held.collect()
}

fn read(store: &NvmeStore, key: BlockKey) -> Option<Vec<u8>> {
    let size = u64::from(store.sizes(&[key])[0]?);
    assert!(size <= SEGMENT_BYTES, "{size} B are not in any segment");
    let buffer = Buffer::zeroed(size as usize);
    let done = store.get(vec![Get { key, buffer }]).wait().remove(0);
    let loaded = done.outcome.expect("damage is no error")?;
    assert_eq!((loaded.meta.key, u64::from(loaded.meta.size)), (key, size));
    assert_eq!(checksum(done.buffer.bytes()), loaded.checksum);
    Some(done.buffer.bytes().to_vec())
}
