//! Measures the DRAM store through its client, in this process.

use super::Row;
use anyhow::{Context, Result, bail};
use kvasir_client::bench::{self, Setup};
use kvasir_dataplane::{BlockKey, BlockMeta, DramConfig, DramStore};
use std::time::Duration;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// How long each row is timed.
    each: Duration,
    /// Blocks behind `memory/block`.
    blocks: u32,
}

impl Size {
    pub const FULL: Self = Self { each: Duration::from_secs(1), blocks: 1 << 20 };
    /// Shows that every row runs, measures nothing.
    pub const SMOKE: Self = Self { each: Duration::from_millis(2), blocks: 1 << 12 };
}

/// Every row. A host on a temporary socket and a loopback port serves them.
///
/// p50 and p99 are of single calls, in microseconds, also where the value is a rate.
///
/// # Errors
/// The pool does not fit this machine, or a socket cannot be opened.
pub fn rows(size: Size) -> Result<Vec<Row>> {
    let socket = std::env::temp_dir().join(format!("kvasir-bench-{}.sock", std::process::id()));
    // First, while this process has freed nothing that the store could be given again.
    let memory = Row::new("memory/block", bytes_per_block(size.blocks)?, "bytes");
    let setup = Setup { each: size.each, socket: &socket };
    let measured = bench::store(&setup).map_err(anyhow::Error::from_boxed)?;
    Ok(measured.into_iter().map(row).chain([memory]).collect())
}

/// Memory of a full store outside its pool, per block: pages of this process that it shares with nobody.
/// What the evictor keeps comes on top.
fn bytes_per_block(blocks: u32) -> Result<f64> {
    const BLOCK: u32 = 64;
    // Shards share out the slots: a few more than blocks, so that none of them is full before the rest.
    let slots = blocks + blocks / 4;
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

fn row(measured: bench::Row) -> Row {
    let bench::Row { name, value, unit, p50, p99, reference, ratio } = measured;
    Row { name, value, unit, p50: Some(p50), p99: Some(p99), reference, ratio }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_published_names() {
        let rows = rows(Size::SMOKE).unwrap();
        for (name, unit) in
            [("exists/1024", "keys/s"), ("get/4KiB/cpu", "us"), ("put/1MiB", "GB/s"), ("put/16MiB", "GB/s")]
        {
            let row = rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"));
            assert_eq!(row.unit, unit, "{name}");
            assert!(row.value > 0.0 && row.p99 >= row.p50, "{row:?}");
            assert_eq!(row.ratio, row.reference.map(|reference| row.value / reference), "{name}");
            assert_eq!(row.reference.is_some(), name.starts_with("put/"), "{name}");
        }
        let memory = rows.iter().find(|row| row.name == "memory/block").unwrap();
        assert!(memory.value.is_finite() && memory.unit == "bytes", "{memory:?}");
    }
}
