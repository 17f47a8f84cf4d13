//! A host with a tier below its pool: what overflows is served from there, also by the host after a `kill -9`.

use crate::process::{Host, Transport, content};
use kvasir_dataplane::{BlockKey, BlockMeta};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

const BLOCK: u32 = 64 << 10;
/// Twice what the pool holds.
const BLOCKS: u32 = 128;

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("tiers", &n.to_le_bytes())
}

/// The numbers of that tier in `kvasir stat`, once nothing is being copied to it.
fn settled(host: &Host, tier: &str) -> serde_json::Value {
    loop {
        if metric(host, "kvasir_offload_queued_blocks{", tier) == 0.0 {
            let stat = host.check(&["stat", "--json"], b"", 0, "tiers");
            return serde_json::from_str::<serde_json::Value>(&stat).unwrap()["tiers"][tier].clone();
        }
        std::thread::yield_now();
    }
}

/// The value of the tier's row that begins like this.
fn metric(host: &Host, name: &str, tier: &str) -> f64 {
    let text = host.page("/metrics");
    let mut rows =
        text.lines().filter(|row| row.starts_with(name) && row.contains(&format!("tier=\"{tier}\"")));
    let row = rows.next().unwrap_or_else(|| panic!("{name} in {text}"));
    row.rsplit(' ').next().unwrap().parse().unwrap()
}

/// How many blocks come back; each bit-exact.
fn found(host: &Host, transport: Transport) -> usize {
    let client = host.client(transport);
    let mut found = 0;
    for first in (0..BLOCKS).step_by(8) {
        let keys: Vec<_> = (first..first + 8).map(key).collect();
        for (n, block) in (first..).zip(client.get(&keys, 0).unwrap()) {
            let Some(block) = block else { continue };
            assert!(block.bytes().unwrap() == content(n, BLOCK), "block {n} over {transport:?}");
            found += 1;
        }
    }
    assert_eq!(client.checksum_failures(), 0);
    found
}

#[test]
fn what_overflows_the_pool_is_served_from_disk_also_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let folder = format!("nvme.dir={}", dir.path().join("blocks").display());
    let set = [
        folder.as_str(),
        "nvme.segment_bytes=1MiB",
        "nvme.capacity_bytes=64MiB",
        "tiering.min_uses=0",
        "tiering.load_timeout=60s",
        "store.put_wait=30s",
    ];
    survives_a_kill(dir.path(), "nvme", &set);
}

#[test]
fn what_overflows_the_pool_is_served_from_a_shared_folder_sealed_with_the_key_of_its_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, key) = (dir.path().join("shared"), dir.path().join("key"));
    std::fs::write(&key, "0f".repeat(32)).unwrap();
    let set = [
        &format!("remote.url={}", folder.display()),
        &format!("remote.keys=[{{ tenant = 0, file = {:?} }}]", key.display().to_string()),
        "tiering.min_uses=0",
        "tiering.load_timeout=60s",
        "store.put_wait=30s",
    ];
    survives_a_kill(dir.path(), "remote", &set);
    let clear: HashSet<Vec<u8>> = (0..BLOCKS).map(|n| content(n, 32)).collect();
    let objects = files(&folder);
    assert!(!objects.is_empty());
    for object in objects {
        let bytes = std::fs::read(object).unwrap();
        assert!(!bytes.windows(32).any(|part| clear.contains(part)), "a block left the host in the clear");
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn survives_a_kill(dir: &Path, tier: &str, set: &[&str]) {
    let host = Host::start_with(dir, set);
    let client = host.client(Transport::Unix);
    for n in 0..BLOCKS {
        client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
    }
    let stat = settled(&host, tier);
    let stored = stat["blocks"].as_u64().unwrap();
    assert!(stored > 0 && stat["offload_failed"] == 0, "{stat}");
    host.check(&["stat"], b"", 0, &format!("tier {tier}"));

    let host = host.restart(dir, set);
    let on_disk = settled(&host, tier)["blocks"].as_u64().unwrap() as usize;
    assert!(on_disk >= stored as usize, "{on_disk} of {stored} are left; more may have gone down meanwhile");
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    let there = host.client(Transport::Tcp).exists(&keys).unwrap();
    assert_eq!(there.iter().filter(|there| **there).count(), on_disk);
    assert_eq!(found(&host, Transport::Tcp), on_disk);
    assert_eq!(found(&host, Transport::Unix), on_disk);
    assert!(metric(&host, "kvasir_onboard_bytes_total{", tier) >= (on_disk * BLOCK as usize) as f64);

    let first = there.iter().position(|there| *there).unwrap() as u32;
    let name = format!("0x{}", key(first));
    host.check(&["stat", &name], b"", 0, &format!("\"{tier}\""));
    host.check(&["rm", &name], b"", 0, "removed");
    host.check(&["exists", &name], b"", 1, "missing");
    settled(&host, tier);
    let host = host.restart(dir, set);
    host.check(&["exists", &name], b"", 1, "missing");
    assert_eq!(host.terminate(), Some(0));
}

#[test]
fn a_planned_stop_saves_what_only_the_pool_has() {
    const FEW: u32 = 24;
    let dir = tempfile::tempdir().unwrap();
    let folder = format!("nvme.dir={}", dir.path().join("blocks").display());
    let set = [
        folder.as_str(),
        "nvme.segment_bytes=1MiB",
        "nvme.capacity_bytes=64MiB",
        "tiering.load_timeout=60s",
        "tiering.shutdown_timeout=120s",
    ];
    let host = Host::start_with(dir.path(), &set);
    let client = host.client(Transport::Unix);
    for n in 0..FEW {
        client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
    }
    assert_eq!(settled(&host, "nvme")["blocks"], 0, "each was used once, and there is room");
    drop(client);
    assert_eq!(host.terminate(), Some(0));
    let host = Host::start_with(dir.path(), &set);
    assert_eq!(settled(&host, "nvme")["blocks"], FEW);
    assert_eq!(found(&host, Transport::Unix), FEW as usize);
}

mod gpu {
    use super::*;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn what_overflows_the_pool_is_served_from_the_memory_of_a_gpu() {
        let dir = tempfile::tempdir().unwrap();
        let set = [
            "hbm.capacity_bytes=32MiB",
            "tiering.min_uses=0",
            "tiering.load_timeout=60s",
            "store.put_wait=30s",
        ];
        let host = Host::start_with(dir.path(), &set);
        let client = host.client(Transport::Unix);
        for n in 0..BLOCKS {
            client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
        }
        let stat = settled(&host, "hbm");
        let stored = stat["blocks"].as_u64().unwrap() as usize;
        assert!(stored > 0 && stat["offload_failed"] == 0, "{stat}");
        for transport in [Transport::Unix, Transport::Tcp] {
            let found = found(&host, transport);
            assert!(found >= stored, "{found} of {stored}: only a victim that found its queue full is lost");
        }
        assert!(metric(&host, "kvasir_onboard_bytes_total{", "hbm") > 0.0);
        assert_eq!(host.terminate(), Some(0));
    }
}
