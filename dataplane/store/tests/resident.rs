//! What a store of blocks costs in resident memory, in a process of its own.

use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};
use kvasir_store::config::DramConfig;
use kvasir_store::dram::DramStore;
use kvasir_store::dram::{OwnerId, Reserve};

#[test]
fn resident_memory_is_the_pool_and_what_the_store_says_of_itself() {
    check_resident(256 << 20, 1 << 18);
}

#[test]
#[ignore = "needs some minutes and 9 GB"]
fn ten_million_blocks_and_then_a_mix_in_8_gib() {
    check_resident(8 << 30, 10_000_000);
}

/// What the pool takes ahead of its puts at most, with the step that it is taking.
const AHEAD: u64 = 96 << 20;

/// Many small blocks, then blocks of 64 KiB to 32 MiB that replace each other at random: at both points the memory of
/// the process is the pool's pages, those taken ahead, and its metadata within 5 %.
fn check_resident(pool_bytes: u64, small: u32) {
    let put_wait = std::time::Duration::ZERO;
    let config =
        DramConfig { pool_bytes, blocks_max: small, events_max: 1, put_wait, ..DramConfig::default() };
    let content = vec![7; 32 << 20];
    let small_keys: Vec<BlockKey> = (0..small).map(|n| BlockKey(mixed(n.into()))).collect();
    let (anon, shared) = (resident("RssAnon:"), resident("RssShmem:"));
    let store = DramStore::open(config).unwrap();
    let put = |key: BlockKey, size: u32| {
        let meta = BlockMeta::single(key, size);
        store.put(OwnerId(0), &meta, &content[..size as usize], 0).unwrap()
    };
    let explained = |stage: &str, used_bytes: u64| {
        let (metadata, pages) = (resident("RssAnon:") - anon, resident("RssShmem:") - shared);
        let expected = used_bytes + store.metadata().bytes();
        let ahead = AHEAD.min(pool_bytes - used_bytes);
        println!("{stage}: {metadata} + {pages} B resident, {expected} B explained, {ahead} B ahead at most");
        let is_near = |found: u64, least: u64, most: u64| {
            let few = expected / 20;
            assert!(
                found + few >= least && found <= most + few,
                "{stage}: {found} B, explained {least} to {most}"
            );
        };
        is_near(metadata, store.metadata().bytes(), store.metadata().bytes());
        is_near(metadata + pages, expected, expected + ahead);
    };

    let size = (pool_bytes / 2 / u64::from(small)) as u32;
    for &key in &small_keys {
        assert!(matches!(put(key, size), Reserve::Reserved(_)));
    }
    explained("small blocks", pool_bytes - store.pressure().free_bytes);

    for keys in small_keys.chunks(BATCH_MAX) {
        store.remove(keys, 0).unwrap();
    }
    let largest = (pool_bytes / 16).min(32 << 20).ilog2();
    let (mut stored, mut number) = (Vec::new(), 0u64);
    let mut written = 0;
    while written < 3 * pool_bytes {
        number += 1;
        let random = mixed(number) as u64;
        let (key, size) = (BlockKey(mixed(number ^ 1 << 63)), 1 << (16 + random % (u64::from(largest) - 15)));
        while !matches!(put(key, size), Reserve::Reserved(_)) {
            let at = mixed(number ^ stored.len() as u64) as usize % stored.len();
            store.remove(&[stored.swap_remove(at)], 0).unwrap();
        }
        stored.push(key);
        written += u64::from(size);
    }
    // Pages once touched stay with the pool, whatever is in them now.
    explained("a mix", pool_bytes);
}

/// Well spread over all bits.
fn mixed(n: u64) -> u128 {
    u128::from(n ^ n >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835) >> 1
}

/// Bytes of one line of `/proc/self/status`.
fn resident(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}
