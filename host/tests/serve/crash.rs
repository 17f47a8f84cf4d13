//! `kill -9` while clients write, and what the host after it knows.

use crate::process::{Host, Transport, content};
use kvasir_client::data::{Client, ClientError, Options};
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_tests::guest;
use std::sync::atomic::{AtomicU32, Ordering};

const BLOCK: u32 = 64 << 10;
const BATCH: u32 = 8;
const KEYS: u32 = 256;

/// `KVASIR_KILLS=500` makes a storm of it.
fn kills() -> u32 {
    std::env::var("KVASIR_KILLS").map_or(4, |kills| kills.parse().expect("KVASIR_KILLS is a number"))
}

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("crash", &n.to_le_bytes())
}

/// Bit-exact or missing: every block that comes back must hold what was written under its key.
fn check_all(client: &Client, when: &str) -> usize {
    let mut found = 0;
    for first in (0..KEYS).step_by(BATCH as usize) {
        let keys: Vec<_> = (first..first + BATCH).map(key).collect();
        for (n, block) in (first..).zip(client.get(&keys, 0).unwrap()) {
            let Some(block) = block else { continue };
            assert!(block.bytes().unwrap() == content(n, BLOCK), "block {n} {when}");
            found += 1;
        }
    }
    assert_eq!(client.checksum_failures(), 0, "{when}");
    found
}

/// Puts batches until the host is gone; `writes` counts them.
fn write_until_gone(client: &Client, first: u32, writes: &AtomicU32) {
    for turn in 0.. {
        let numbers: Vec<_> = (0..BATCH).map(|i| (first + turn * BATCH + i) % KEYS).collect();
        let blocks: Vec<_> = numbers.iter().map(|&n| content(n, BLOCK)).collect();
        let batch: Vec<_> =
            numbers.iter().zip(&blocks).map(|(&n, b)| (BlockMeta::single(key(n), BLOCK), &b[..])).collect();
        match client.put_batch(&batch) {
            Ok(_) => drop(writes.fetch_add(1, Ordering::Relaxed)),
            Err(ClientError::Lost { .. } | ClientError::Closed { .. }) => return,
            Err(error) => panic!("a batch in turn {turn}: {error}"),
        }
    }
}

#[test]
fn kill_during_writes_leaves_no_torn_block_and_keeps_the_policies() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.wasm");
    std::fs::write(&file, guest("evictor")).unwrap();
    let mut host = Host::start_to_restart(dir.path(), &[]);
    host.check(&["policy", "load", "scheduler", "round-robin"], b"", 0, "round-robin");
    host.check(&["policy", "load", "evictor", file.to_str().unwrap()], b"", 0, "bad");
    std::fs::remove_file(file).unwrap();
    let digest = host.policy("evictor")["digest"].clone();

    for kill in 0..kills() {
        let writes = AtomicU32::new(0);
        let clients = [Transport::Unix, Transport::Tcp, Transport::Unix].map(|t| host.client(t));
        std::thread::scope(|scope| {
            for (i, client) in clients.iter().enumerate() {
                let writes = &writes;
                scope.spawn(move || write_until_gone(client, i as u32 * KEYS / 3, writes));
            }
            while writes.load(Ordering::Relaxed) < 20 + 7 * (kill % 8) {
                std::thread::yield_now();
            }
            host.kill();
        });
        host = host.restart(dir.path(), &[]);

        let client = host.client(Transport::Unix);
        check_all(&client, "after the restart");
        // What the dead host's clients still hold must not reach into the new pool.
        for old in &clients {
            assert!(old.get(&[key(0)], 0).is_err(), "a connection outlived its host");
        }
        for n in 0..BATCH {
            client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
        }
        assert!(check_all(&client, "written after the restart") > 0);
        assert!(check_all(&host.client(Transport::Tcp), "over TCP") > 0);
        assert_eq!(host.policy("scheduler")["name"], "round-robin");
        assert_eq!(host.policy("evictor")["digest"], digest, "the module itself is kept, not its path");
    }
    let again = Client::connect(&host.endpoint(Transport::Unix), Options::default()).unwrap();
    assert!(again.is_local());
    host.check(&["policy", "rollback", "evictor"], b"", 0, "workload-aware");
    assert_eq!(host.terminate(), Some(0));
}
