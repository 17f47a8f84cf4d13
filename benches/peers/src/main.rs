//! The prefix index beside the one of NVIDIA Dynamo's router: the same chains, in turns in one process, on one thread.
//!
//! The rows are those of `kvasir bench index`, except for the trace, which goes through the index alone here: no conductor, no
//! policy, and the instance that has most of a request gets the rest.

mod index;
// The very files of the daemon, without the daemon.
#[expect(dead_code, unused_imports)]
#[path = "../../../host/src/prefix_index/mod.rs"]
mod prefix_index;
mod trace;

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use hdrhistogram::Histogram;
use index::{Dynamo, Index, Kvasir};
use prefix_index::Slot;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Blocks in one store event, as engines send them.
const EVENT: usize = 16;
const BLOCKS: usize = 1 << 20;
const LOOKUPS: usize = 50_000;
const SEED: u64 = 1;
/// Instances of the trace.
const INSTANCES: usize = 16;

/// Prefix indexes beside each other.
#[derive(Parser)]
#[command(name = "cargo xtask bench --peers")]
struct Args {
    /// How often each is measured, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// One JSON document instead of the table.
    #[arg(long)]
    json: bool,
}

/// What one index did in one run.
type Measured = Vec<(String, f64)>;

/// A row of the report: minimum, median and maximum of each.
#[derive(Serialize)]
struct Row {
    name: String,
    unit: &'static str,
    kvasir: [f64; 3],
    dynamo: [f64; 3],
}

fn main() -> Result<()> {
    let args = Args::parse();
    let folder = std::env::var_os("KVASIR_TRACES").map_or_else(|| "../shared/traces".into(), PathBuf::from);
    let path = folder.join("conversation.jsonl.gz");
    let trace = if path.exists() {
        trace::chains(&path)?
    } else {
        eprintln!("skipped: trace: none at {}; set KVASIR_TRACES to its folder", path.display());
        Vec::new()
    };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..args.runs {
        ours.push(measure::<Kvasir>(&trace));
        theirs.push(measure::<Dynamo>(&trace));
    }
    let rows = rows(&ours, &theirs);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        print(&rows);
    }
    Ok(())
}

fn measure<I: Index>(trace: &[Vec<u64>]) -> Measured {
    let shapes = [(16, 8), (1_024, 64), (8_192, 64), (16, 512)];
    let mut rows: Measured = shapes
        .map(|(depth, workers)| (format!("lookup/{depth}x{workers}"), lookups::<I>(depth, workers)))
        .into();
    rows.push(("store/16-block".into(), store::<I>()));
    if !trace.is_empty() {
        let (speed, hits) = replay::<I>(trace);
        rows.push(("trace/conversation-16".into(), speed));
        rows.push(("trace/conversation-16/hit-blocks".into(), hits as f64));
    }
    rows
}

/// Median nanoseconds. Whole chains looked up at random among many; every worker holds each of them to a depth of its own.
fn lookups<I: Index>(depth: usize, workers: usize) -> f64 {
    let chains = chains((BLOCKS / depth).min(BLOCKS / workers), depth);
    let mut rng = ChaCha8Rng::seed_from_u64(SEED ^ 1);
    let mut index = I::default();
    for chain in &chains {
        for worker in 0..workers {
            let held = rng.next_u32() as usize % depth + 1;
            store_chain(&mut index, worker as Slot, &chain[..held]);
        }
    }
    let (mut matched, clock_ns) = (vec![0; workers], clock_cost_ns());
    let mut times = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3).expect("bounds are valid");
    for i in 0..LOOKUPS + LOOKUPS / 10 {
        // In the cache, as a request's hashes are that was just decoded; the index may not be.
        let query = chains[rng.next_u32() as usize % chains.len()].clone();
        let start = Instant::now();
        index.lookup(&query, &mut matched);
        let ns = start.elapsed().as_nanos() as u64;
        black_box(&matched);
        if i >= LOOKUPS / 10 {
            times.saturating_record(ns.saturating_sub(clock_ns).max(1));
        }
    }
    times.value_at_quantile(0.5) as f64
}

/// Blocks a CPU-second: chains of 64 blocks that nobody shares, into an index that was empty.
fn store<I: Index>() -> f64 {
    let (chains, mut index) = (chains(BLOCKS / 64, 64), I::default());
    let start = cpu_ns();
    for (i, chain) in chains.iter().enumerate() {
        store_chain(&mut index, (i % 64) as Slot, chain);
    }
    BLOCKS as f64 * 1e9 / (cpu_ns() - start) as f64
}

/// Requests a CPU-second, and blocks that were found.
fn replay<I: Index>(trace: &[Vec<u64>]) -> (f64, u64) {
    let (mut index, mut matched) = (I::default(), [0; INSTANCES]);
    let (mut spent_ns, mut hits) = (0, 0);
    for (i, chain) in trace.iter().enumerate() {
        let chain = chain.clone();
        let start = cpu_ns();
        index.lookup(&chain, &mut matched);
        // Where nobody has any, each in turn.
        let (mut slot, mut held) = (i % INSTANCES, matched[i % INSTANCES]);
        for (other, &holds) in matched.iter().enumerate() {
            if holds > held {
                (slot, held) = (other, holds);
            }
        }
        let held = held as usize;
        if held < chain.len() {
            index.store(slot as Slot, held.checked_sub(1).map(|last| chain[last]), &chain[held..]);
        }
        spent_ns += cpu_ns() - start;
        hits += held as u64;
    }
    (trace.len() as f64 * 1e9 / spent_ns as f64, hits)
}

/// Chains that share no block.
fn chains(count: usize, depth: usize) -> Vec<Vec<u64>> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    (0..count).map(|_| (0..depth).map(|_| rng.next_u64()).collect()).collect()
}

fn store_chain(index: &mut impl Index, slot: Slot, chain: &[u64]) {
    let mut parent = None;
    for event in chain.chunks(EVENT) {
        index.store(slot, parent, event);
        parent = event.last().copied();
    }
}

/// Processor time of this thread.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn clock_cost_ns() -> u64 {
    let mut costs: Vec<u64> = (0..1_000).map(|_| Instant::now().elapsed().as_nanos() as u64).collect();
    costs.sort_unstable();
    costs[costs.len() / 2]
}

fn rows(ours: &[Measured], theirs: &[Measured]) -> Vec<Row> {
    let spread = |runs: &[Measured], row: usize| {
        let mut values: Vec<f64> = runs.iter().map(|run| run[row].1).collect();
        values.sort_by(f64::total_cmp);
        [values[0], values[values.len() / 2], values[values.len() - 1]]
    };
    let row = |(i, (name, _)): (usize, &(String, f64))| {
        let unit = match name.split('/').collect::<Vec<_>>()[..] {
            ["lookup", ..] => "ns",
            ["store", ..] => "blocks/cpu-s",
            [.., "hit-blocks"] => "blocks",
            _ => "requests/cpu-s",
        };
        Row { name: name.clone(), unit, kvasir: spread(ours, i), dynamo: spread(theirs, i) }
    };
    ours[0].iter().enumerate().map(row).collect()
}

fn print(rows: &[Row]) {
    let cells = |values: [f64; 3]| values.map(|value| format!("{value:>11.0}")).join(" ");
    println!("{:<34}{:>35}{:>38}", "minimum, median, maximum", Kvasir::NAME, Dynamo::NAME);
    for row in rows {
        println!("{:<34}{}   {}  {}", row.name, cells(row.kvasir), cells(row.dynamo), row.unit);
    }
}
