//! The way down and the way up: a host whose pool is too small for what is put, with the NVMe tier below, beside the raw
//! device.
//!
//! One client puts chains as fast as it can, over shared memory, and reads them again in their order. Host and client share one
//! process and its cores.

use super::Row;
use crate::config::Config;
use crate::daemon::{Daemon, Running};
use anyhow::{Context, Result, ensure};
use kvasir_client::data::{Client, Endpoint, Options};
use kvasir_dataplane::tier::nvme::bench::{Bench, BenchError};
use kvasir_dataplane::{BlockKey, BlockMeta};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Sizes of a block, and how rows name them.
const SIZES: [(&str, usize); 3] = [("16KiB", 16 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20)];
/// Blocks of a chain; a chain is put and read in calls of [`CALL_BYTES`].
const CHAIN: usize = 2048;
const CALL_BYTES: usize = 2 << 20;
const QUEUE_DEPTH: u32 = 64;
/// For what is queued when all is put.
const DRAINED: Duration = Duration::from_secs(60);

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bytes that are put, of each size of blocks; eight times the pool.
    bytes: u64,
    /// Hosts that are measured.
    hosts: usize,
}

impl Size {
    pub const FULL: Self = Self { bytes: 4 << 30, hosts: 2 * SIZES.len() };
    /// Shows that it runs, measures nothing.
    pub const SMOKE: Self = Self { bytes: 64 << 20, hosts: 1 };
}

/// Of each size: `put`, what a client puts; `offload`, what the tier takes of it meanwhile, and `taken`, its share of what left the pool; the
/// same where puts do not wait for copies; and `onboard`, what a client reads of what is only in the tier.
///
/// # Errors
/// The host does not start, or `dir` has no room. If it refuses unbuffered I/O there are no rows, and a note says so.
pub fn rows(size: Size, dir: &Path) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir_in(dir).with_context(|| format!("a folder in {}", dir.display()))?;
    let mut rows = Vec::new();
    let ways = [("", None), ("/unslowed", Some("tiering.backpressure=0s"))];
    let hosts = SIZES.into_iter().flat_map(|of| ways.map(|way| (of, way)));
    for ((name, block), (how, more)) in hosts.take(size.hosts) {
        let Some((raw_write, raw_read)) = raw(size, folder.path())? else { return Ok(rows) };
        let running = Daemon::start(config(folder.path(), size, more)?)?;
        let measured = Tiers { running: &running, block, bytes: size.bytes }.measure();
        running.shutdown();
        fs::remove_dir_all(folder.path().join("nvme"))?;
        let Measured { put, down, share, up } = measured?;
        rows.push(Row::new(format!("tier/put/{name}{how}"), put, "GB/s"));
        rows.push(Row::new(format!("tier/offload/{name}{how}"), down, "GB/s").beside(raw_write));
        rows.push(Row::new(format!("tier/taken/{name}{how}"), 100.0 * share, "%"));
        if more.is_none() {
            rows.push(Row::new(format!("tier/onboard/{name}"), up, "GB/s").beside(raw_read));
        }
    }
    Ok(rows)
}

/// What the device writes and reads, GB/s. `None`: its file system refuses unbuffered I/O, which is said.
fn raw(size: Size, folder: &Path) -> Result<Option<(f64, f64)>> {
    let raw = Bench { dir: folder, bytes: size.bytes / 4, reads: 0, queue_depth: QUEUE_DEPTH };
    match raw.raw() {
        Err(BenchError::Raw(error)) if error.kind() == ErrorKind::InvalidInput => {
            let folder = folder.display();
            eprintln!("skipped: {folder} refuses unbuffered I/O; name another folder with --dir");
            Ok(None)
        }
        measured => Ok(Some(measured?)),
    }
}

fn config(folder: &Path, size: Size, more: Option<&str>) -> Result<Config> {
    let set = [
        format!("node.data_dir={}", folder.join("host").display()),
        "listen.http=127.0.0.1:0".into(),
        format!("store.pool_bytes={}B", size.bytes / 8),
        "store.prefault=true".into(),
        format!("nvme.dir={}", folder.join("nvme").display()),
        // All of it fits, and compaction has nothing to do.
        format!("nvme.capacity_bytes={}B", (2 * size.bytes).max(512 << 20)),
        format!("nvme.queue_depth={QUEUE_DEPTH}"),
        "tiering.min_uses=0".into(),
    ];
    let set: Vec<String> = set.into_iter().chain(more.map(str::to_owned)).collect();
    Ok(Config::load(None, [], &set)?)
}

struct Tiers<'a> {
    running: &'a Running,
    block: usize,
    bytes: u64,
}

struct Measured {
    /// GB/s, like the next and the last.
    put: f64,
    down: f64,
    /// Of what left the pool, the part that the tier has.
    share: f64,
    up: f64,
}

impl Tiers<'_> {
    fn measure(&self) -> Result<Measured> {
        let client = Client::connect(&Endpoint::Unix(self.running.socket_path().into()), Options::default())?;
        let blocks = (self.bytes / self.block as u64) as usize;
        let begun = Instant::now();
        self.put(&client, blocks)?;
        let put = self.bytes as f64 / 1e9 / begun.elapsed().as_secs_f64();
        let tiering = self.running.host().node.tiering();
        ensure!(tiering.drain(begun + DRAINED), "what is queued for the tier does not end");
        let took = begun.elapsed().as_secs_f64();
        let level = tiering.stats().levels.into_iter().next().context("no tier below the pool")?;
        let down = level.offload.stored_bytes as f64 / 1e9 / took;
        let share = level.offload.stored as f64 / level.offload.offered.max(1) as f64;
        let up = self.read(&client, blocks)?;
        Ok(Measured { put, down, share, up })
    }

    fn put(&self, client: &Client, blocks: usize) -> Result<()> {
        let bytes = vec![7; self.block];
        let all: Vec<usize> = (0..blocks).collect();
        for call in all.chunks((CALL_BYTES / self.block).max(1)) {
            let puts: Vec<_> = call.iter().map(|&n| (self.meta(n), bytes.as_slice())).collect();
            for put in client.put_batch(&puts)? {
                put?;
            }
        }
        Ok(())
    }

    /// Reads the half that was put first, of which nothing is left in the pool.
    fn read(&self, client: &Client, blocks: usize) -> Result<f64> {
        let all: Vec<usize> = (0..blocks / 2).collect();
        let (begun, mut read) = (Instant::now(), 0);
        for call in all.chunks((CALL_BYTES / self.block).max(1)) {
            let keys: Vec<BlockKey> = call.iter().map(|&n| self.meta(n).key).collect();
            let found = client.get(&keys, 0)?;
            read += found.iter().flatten().count();
            client.release(found.into_iter().flatten())?;
        }
        Ok((read * self.block) as f64 / 1e9 / begun.elapsed().as_secs_f64())
    }

    fn meta(&self, n: usize) -> BlockMeta {
        let key = |n: usize| BlockKey::from_engine_hash("tiers", &n.to_le_bytes());
        let depth = (n % CHAIN) as u32;
        let parent = (depth > 0).then(|| key(n - 1));
        BlockMeta { parent, depth, ..BlockMeta::single(key(n), self.block as u32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_published_names() {
        let rows = rows(Size::SMOKE, &std::env::temp_dir()).unwrap();
        if rows.is_empty() {
            return; // a folder in memory, which was said
        }
        let row = |name: &str| rows.iter().find(|row| row.name == name).unwrap();
        assert!(row("tier/put/16KiB").value > 0.0 && row("tier/taken/16KiB").value > 0.0, "{rows:?}");
        let [offload, onboard] = ["tier/offload/16KiB", "tier/onboard/16KiB"].map(row);
        assert!(offload.value > 0.0 && offload.ratio.is_some() && onboard.ratio.is_some(), "{rows:?}");
    }
}
