//! A host with a disk below its pool: what overflows is served from there, also by the host after a `kill -9`.

use crate::process::{Host, Transport, content};
use kvasir_dataplane::{BlockKey, BlockMeta};
use std::io::{Read, Write};

const BLOCK: u32 = 64 << 10;
/// Twice what the pool holds.
const BLOCKS: u32 = 128;

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("tiers", &n.to_le_bytes())
}

/// The numbers of the disk tier in `kvasir stat`, once nothing is being copied to it.
fn settled(host: &Host) -> serde_json::Value {
    loop {
        if metric(host, "kvasir_offload_queued_blocks{") == 0.0 {
            let stat = host.check(&["stat", "--json"], b"", 0, "tiers");
            return serde_json::from_str::<serde_json::Value>(&stat).unwrap()["tiers"]["nvme"].clone();
        }
        std::thread::yield_now();
    }
}

/// The value of the disk tier's row that begins like this.
fn metric(host: &Host, name: &str) -> f64 {
    let mut stream = std::net::TcpStream::connect(host.addr("http")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let mut rows = text.lines().filter(|row| row.starts_with(name) && row.contains(r#"tier="nvme""#));
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
    let host = Host::start_with(dir.path(), &set);
    let client = host.client(Transport::Unix);
    for n in 0..BLOCKS {
        client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
    }
    let nvme = settled(&host);
    let stored = nvme["blocks"].as_u64().unwrap();
    assert!(stored > 0 && nvme["offload_failed"] == 0, "{nvme}");
    host.check(&["stat"], b"", 0, "tier nvme");

    let host = host.restart(dir.path(), &set);
    let on_disk = settled(&host)["blocks"].as_u64().unwrap() as usize;
    assert!(on_disk >= stored as usize, "{on_disk} of {stored} are left; more may have gone down meanwhile");
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    let there = host.client(Transport::Tcp).exists(&keys).unwrap();
    assert_eq!(there.iter().filter(|there| **there).count(), on_disk);
    assert_eq!(found(&host, Transport::Tcp), on_disk);
    assert_eq!(found(&host, Transport::Unix), on_disk);
    assert!(metric(&host, "kvasir_onboard_bytes_total{") >= (on_disk * BLOCK as usize) as f64);

    let first = there.iter().position(|there| *there).unwrap() as u32;
    let name = format!("0x{}", key(first));
    host.check(&["rm", &name], b"", 0, "removed");
    host.check(&["exists", &name], b"", 1, "missing");
    settled(&host);
    let host = host.restart(dir.path(), &set);
    host.check(&["exists", &name], b"", 1, "missing");
    assert_eq!(host.terminate(), Some(0));
}
