//! The DRAM tier in process: no socket, no client.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvasir_dataplane::tier::dram::{Lookup, OwnerId, Reserve};
use kvasir_dataplane::{BlockKey, BlockMeta, DramConfig, DramStore};

const NOW_MS: u64 = 1;

fn store() -> (DramStore, OwnerId) {
    let config = DramConfig { pool_bytes: 64 << 20, prefault: true, ..DramConfig::default() };
    let store = DramStore::open(config).expect("64 MiB are there");
    let owner = store.new_owner();
    (store, owner)
}

fn put_one(store: &DramStore, owner: OwnerId, key: BlockKey, bytes: &[u8]) {
    let meta = BlockMeta::single(key, bytes.len() as u32);
    let outcome = store.put(owner, &meta, bytes, NOW_MS).expect("the block fits");
    assert!(matches!(outcome, Reserve::Reserved(_)), "{outcome:?}");
}

fn exists(criterion: &mut Criterion) {
    let (store, owner) = store();
    let keys: Vec<BlockKey> = (0..1_024).map(|n| BlockKey::from_name(&format!("block {n}"))).collect();
    keys.iter().for_each(|&key| put_one(&store, owner, key, &[7; 4096]));
    let mut group = criterion.benchmark_group("exists");
    for batch in [1, 32, 1_024] {
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
            bencher.iter(|| store.exists(&keys[..batch]).expect("the batch is within bounds"));
        });
    }
}

/// A lease on a block and its end; the bytes stay where they are.
fn get(criterion: &mut Criterion) {
    let (store, owner) = store();
    let key = BlockKey::from_name("block");
    put_one(&store, owner, key, &[7; 4096]);
    let mut drained = Vec::new();
    criterion.bench_function("get-and-release/4KiB", |bencher| {
        bencher.iter(|| {
            let found = store.get(owner, &[key], 0, NOW_MS).expect("the batch is within bounds");
            let Lookup::Hit(lease) = found[0] else { panic!("{found:?}") };
            store.release(owner, &[lease.id]).expect("the batch is within bounds");
            drained.clear();
            store.drain_events(&mut drained);
        });
    });
}

/// Reserve, copy, checksum, commit, and remove again.
fn put(criterion: &mut Criterion) {
    let (store, owner) = store();
    let key = BlockKey::from_name("block");
    let mut drained = Vec::new();
    let mut group = criterion.benchmark_group("put-and-remove");
    for (name, size) in [("4KiB", 4 << 10), ("1MiB", 1 << 20), ("16MiB", 16 << 20)] {
        let bytes = vec![3; size];
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                put_one(&store, owner, key, &bytes);
                store.remove(&[key], NOW_MS).expect("the batch is within bounds");
                drained.clear();
                store.drain_events(&mut drained);
            });
        });
    }
}

criterion_group!(benches, exists, get, put);
criterion_main!(benches);
