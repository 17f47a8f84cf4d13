//! The prefix index: lookups of whole chains, and store events.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvasir::bench::index::{Lookups, Size, chains, store_chain};
use kvasir::prefix_index::{Limits, PrefixIndex};

const SEED: u64 = 1;

fn lookup(criterion: &mut Criterion) {
    let size = if kvasir_benches::measuring() { Size::FULL } else { Size::SMOKE };
    let mut group = criterion.benchmark_group("lookup");
    for (depth, workers) in [(16, 8), (1_024, 64), (8_192, 64), (16, 512)] {
        let lookups = Lookups::new(depth, workers, size, SEED);
        let (mut matched, mut i) = (vec![0; workers], 0);
        group.bench_function(BenchmarkId::from_parameter(format!("{depth}x{workers}")), |bencher| {
            bencher.iter_batched_ref(
                || {
                    i += 1;
                    lookups.query(i).to_vec()
                },
                |query| lookups.index.lookup(query, &mut matched),
                BatchSize::PerIteration,
            );
        });
    }
}

/// Chains of 64 blocks in events of 16, into an index that was empty.
fn store(criterion: &mut Criterion) {
    let chains = chains(if kvasir_benches::measuring() { 1_024 } else { 16 }, 64, SEED);
    let mut group = criterion.benchmark_group("store");
    group.throughput(Throughput::Elements(64 * chains.len() as u64));
    group.bench_function("16-block", |bencher| {
        bencher.iter_batched_ref(
            || PrefixIndex::new(Limits::default()),
            |index| chains.iter().for_each(|chain| store_chain(index, 0, chain)),
            BatchSize::LargeInput,
        );
    });
}

criterion_group!(benches, lookup, store);
criterion_main!(benches);
