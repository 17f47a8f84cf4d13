//! Measures the tiers: DRAM through its client in this process, NVMe compared with the raw device.

use super::Row;
use super::local::{self, Setup};
use anyhow::{Context, Result, bail};
use kvasir_dataplane::tier::nvme::bench::{self as nvme, Bench, BenchError};
use kvasir_dataplane::{BlockKey, BlockMeta, DramConfig, DramStore};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// How long each row is timed.
    each: Duration,
    /// Blocks behind `memory/block`.
    blocks: u32,
    /// Bytes that each sequential row of the NVMe tier moves, and how many small reads there are.
    nvme_bytes: u64,
    nvme_reads: usize,
}

impl Size {
    pub const FULL: Self =
        Self { each: Duration::from_secs(1), blocks: 1 << 20, nvme_bytes: 1 << 30, nvme_reads: 50_000 };
    /// Shows that every row runs, measures nothing.
    pub const SMOKE: Self =
        Self { each: Duration::from_millis(2), blocks: 1 << 12, nvme_bytes: 64 << 20, nvme_reads: 64 };
}

/// Every row. A host on a temporary socket and a loopback port serves the rows of DRAM. Files in a folder of their own
/// in `dir` serve those of NVMe; the report leaves these out, visibly, if `dir` refuses unbuffered I/O.
///
/// p50 and p99 are of single calls, in microseconds, even if the value is a rate.
///
/// # Errors
/// The pool does not fit this machine, a socket cannot be opened, or `dir` has no room.
pub fn rows(size: Size, dir: &Path) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("store.sock");
    // Measured first, while this process has freed nothing that the store could be given again.
    let memory = Row::new("memory/block", bytes_per_block(size.blocks)?, "bytes");
    let setup = Setup { each: size.each, socket: &socket };
    let measured = local::store(&setup).map_err(anyhow::Error::from_boxed)?;
    Ok(measured.into_iter().chain([memory]).chain(nvme_rows(size, dir)?).collect())
}

fn nvme_rows(size: Size, dir: &Path) -> Result<Vec<Row>> {
    let folder = dir.join(format!("kvasir-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let bench = Bench { dir: &folder, bytes: size.nvme_bytes, reads: size.nvme_reads, queue_depth: 32 };
    let measured = bench.run();
    std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    match measured {
        Ok(rows) => Ok(rows.into_iter().map(nvme_row).collect()),
        Err(BenchError::Raw(error)) if error.kind() == ErrorKind::InvalidInput => {
            let dir = dir.display();
            eprintln!("rows nvme/* skipped: {dir} refuses unbuffered I/O; name another folder with --dir");
            Ok(Vec::new())
        }
        Err(error) => Err(error.into()),
    }
}

fn nvme_row(measured: nvme::Row) -> Row {
    let row = Row::new(measured.name, measured.value, measured.unit);
    if measured.reference > 0.0 { row.beside(measured.reference) } else { row }
}

/// Memory of a full store outside its pool, per block: pages that this process shares with no other.
/// Memory of the evictor is not included.
fn bytes_per_block(blocks: u32) -> Result<f64> {
    const BLOCK: u32 = 64;
    // Shards divide the slots: there are a few more than blocks, so that no shard is full before the rest.
    let slots = blocks + blocks / 16;
    let pool_bytes = u64::from(slots) * u64::from(BLOCK) * 2;
    let config = DramConfig { pool_bytes, blocks_max: slots, low_free: 0.0, ..DramConfig::default() };
    let before = private_bytes()?;
    let store = DramStore::open(config)?;
    let owner = store.new_owner();
    let mut events = Vec::new();
    for number in 0..blocks {
        let meta = BlockMeta::single(BlockKey::from_engine_hash("bench", &number.to_le_bytes()), BLOCK);
        store.put(owner, &meta, &[7; BLOCK as usize], 1)?;
        if number % 1024 == 0 {
            events.clear();
            store.drain_events(&mut events);
        }
    }
    let after = private_bytes()?;
    Ok((after as f64 - before as f64) / f64::from(blocks))
}

/// Resident memory without what is mapped from files, as the pool is.
fn private_bytes() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let mut pages = statm.split(' ').skip(1).map_while(|field| field.parse::<u64>().ok());
    let (Some(resident), Some(shared)) = (pages.next(), pages.next()) else {
        bail!("/proc/self/statm holds no sizes: {statm}");
    };
    Ok(resident.saturating_sub(shared) * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_published_names() {
        let rows = rows(Size::SMOKE, &std::env::temp_dir()).unwrap();
        for (name, unit) in
            [("exists/1024", "keys/s"), ("get/4KiB/cpu", "us"), ("put/1MiB", "GB/s"), ("put/16MiB", "GB/s")]
        {
            let row = rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"));
            assert_eq!(row.unit, unit, "{name}");
            assert!(row.value > 0.0 && row.p99 >= row.p50, "{row:?}");
            assert_eq!(row.ratio, row.reference.map(|reference| row.value / reference), "{name}");
            assert_eq!(row.reference.is_some(), name != "exists/1024", "{name}");
        }
        let memory = rows.iter().find(|row| row.name == "memory/block").unwrap();
        assert!(memory.value.is_finite() && memory.unit == "bytes", "{memory:?}");
    }
}
