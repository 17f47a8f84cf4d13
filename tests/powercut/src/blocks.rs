//! The NVMe tier under test: how it is opened, and what its blocks hold.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use kvasir_memory::buffer::Buffer;
use kvasir_nvme::{NvmeConfig, NvmeStore, SyncMode};
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};
use kvasir_store::store::{BlockStore, Get, Put, Stored, TierError};

use crate::model::Outcome;

const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u64 = 12;
const SIZES: [u32; 4] = [512, 4096, 9000, 20_000];
const SIZE_MAX: usize = 20_000;

/// How a life of the process has the tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) io_uring: bool,
    pub(crate) batch: bool,
}

pub(crate) fn open(folder: &Path, settings: Settings) -> Result<NvmeStore> {
    let config = NvmeConfig {
        capacity_bytes: SEGMENTS * SEGMENT,
        segment_bytes: SEGMENT,
        queue_depth: 4,
        io_uring: settings.io_uring,
        sync: if settings.batch { SyncMode::Batch } else { SyncMode::Flush },
        ..NvmeConfig::new(folder.join("blocks"))
    };
    NvmeStore::open(config).context("the tier does not open")
}

/// The only right content of a block.
fn content(number: u32) -> Vec<u8> {
    let size = SIZES[number as usize % SIZES.len()];
    let word = |i: u32| (u64::from(i) ^ (u64::from(number) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..size.div_ceil(8)).flat_map(|i| word(i).to_le_bytes()).take(size as usize).collect()
}

fn key(number: u32) -> BlockKey {
    BlockKey::from_engine_hash("powercut", &number.to_le_bytes())
}

/// Whether the store has the block.
///
/// # Errors
/// It cannot be read, or has wrong bytes.
pub(crate) fn get(store: &NvmeStore, number: u32) -> Result<bool> {
    let get = Get { key: key(number), buffer: Buffer::zeroed(SIZE_MAX) };
    let done = store.get(vec![get]).wait().pop().context("a get of one block has no answer")?;
    let found = done.outcome.with_context(|| format!("block {number} cannot be read"))?;
    let Some(found) = found else { return Ok(false) };
    let whole = done.buffer.bytes().get(..found.meta.size as usize) == Some(&content(number)[..]);
    ensure!(whole, "block {number} is read with wrong bytes");
    Ok(true)
}

/// Puts blocks in one batch, and says how each ended.
pub(crate) fn put(store: &NvmeStore, numbers: &[u32]) -> Vec<Outcome> {
    let put = |&number: &u32| {
        let bytes = content(number);
        let meta = BlockMeta::single(key(number), bytes.len() as u32);
        Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() }
    };
    let done = store.put(numbers.iter().map(put).collect()).wait();
    let outcome = |outcome| match outcome {
        Ok(Stored::Stored) => Outcome::Stored,
        Ok(Stored::AlreadyStored) | Err(TierError::Full { .. } | TierError::Busy { .. }) => Outcome::AsBefore,
        Err(_) => Outcome::Failed,
    };
    done.into_iter().map(|done| outcome(done.outcome)).collect()
}

pub(crate) fn remove(store: &NvmeStore, numbers: &[u32]) -> Vec<Outcome> {
    let done = store.remove(numbers.iter().map(|&number| key(number)).collect()).wait();
    done.into_iter().map(|done| if done.is_ok() { Outcome::Removed } else { Outcome::Failed }).collect()
}

pub(crate) fn flush(store: &NvmeStore) -> bool {
    store.flush().wait().is_ok()
}
