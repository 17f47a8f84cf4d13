//! Hosts of the data plane, the real code, in one simulated world: time, chance, threads and network come from one seed.
//!
//! ```text
//! cargo xtask simulate --seeds 0..100                each seed in a process of its own; says which fail
//! cargo xtask simulate --replay 17 --trace           one of them again, with everything that happened
//! cargo xtask simulate --replay 17 --shrink          the shortest schedule with which it fails in the same way
//! cargo xtask simulate --seeds 0..100 --hosts 5      five hosts instead of two
//! cargo xtask simulate --seeds 0..100 --disk         one host's NVMe tier on a disk that fails
//! cargo xtask simulate --seeds 0..100 --faults network,pauses
//! cargo xtask simulate --seeds 0..100 --plant NAME   with a bug, which must be found
//! ```

mod bucket;
mod client;
mod disk;
mod engines;
mod evictor;
mod host;
mod lent;
mod model;
mod plan;
mod scenario;
mod shrink;
mod slow;
mod sweep;
mod trial;

use std::io::Write;
use std::ops::Range;
use std::process::{ExitCode, exit};
use std::sync::OnceLock;

use clap::Parser;
use kvasir_os::planted::{self, Bug};
use kvasir_os::world;

use model::Counts;
use plan::{Fault, Steps};
use scenario::Scenario;
use sweep::Sweep;
use trial::Trial;

#[derive(Parser)]
#[command(about = "Runs hosts of the data plane in a simulated world", version)]
struct Args {
    /// Seeds to try, FROM..TO without TO; each gets a process of its own.
    #[arg(long, value_parser = range, required_unless_present = "replay", conflicts_with = "replay")]
    seeds: Option<Range<u64>>,
    /// One seed, in this process.
    #[arg(long)]
    replay: Option<u64>,
    /// How many hosts the world has, 2 to 30.
    #[arg(long, default_value_t = 2, value_parser = hosts)]
    hosts: usize,
    /// The NVMe tier of one host on a disk that fails, instead of hosts among each other.
    #[arg(long, conflicts_with = "hosts")]
    disk: bool,
    /// Says everything that happened in it.
    #[arg(long, requires = "replay", conflicts_with = "shrink")]
    trace: bool,
    /// Leaves out steps of the seed, or of the first that fails, as long as it fails in the same way, and says what is left.
    #[arg(long, conflicts_with = "disk")]
    shrink: bool,
    /// With faults of these kinds alone.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "disk")]
    faults: Option<Vec<Fault>>,
    /// These steps of the seed alone, as --shrink found them: 0-3,7.
    #[arg(long, value_parser = plan::from_text, requires = "replay", conflicts_with = "disk")]
    only: Option<Steps>,
    /// Threads take turns in the order of this seed.
    #[arg(long, requires = "replay")]
    turns: Option<u64>,
    /// Plants a bug in the code under test.
    #[arg(long, value_parser = bug)]
    plant: Option<Bug>,
    /// Stops at the first seed that fails.
    #[arg(long, requires = "seeds")]
    first: bool,
    /// Seeds at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

fn bug(name: &str) -> Result<Bug, String> {
    let names = || Bug::ALL.iter().map(|bug| bug.name()).collect::<Vec<_>>().join(", ");
    let found = Bug::ALL.iter().find(|bug| bug.name() == name);
    found.copied().ok_or_else(|| format!("there is no such bug; there are {}", names()))
}

fn hosts(text: &str) -> Result<usize, String> {
    let hosts = text.parse().map_err(|error| format!("{text:?}: {error}"))?;
    if (2..=30).contains(&hosts) { Ok(hosts) } else { Err("a world has 2 to 30 hosts".into()) }
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let parse = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?}: {error}"));
    let (from, to) = text.split_once("..").ok_or("write FROM..TO, for example 0..100")?;
    let range = parse(from)?..parse(to)?;
    if range.is_empty() { Err("there is no seed in it".into()) } else { Ok(range) }
}

static TRACED: OnceLock<bool> = OnceLock::new();

fn main() -> ExitCode {
    let args = Args::parse();
    let Args { hosts, disk, plant, faults, only, turns, .. } = args;
    let (seed, hosts) = (args.replay.unwrap_or_default(), if disk { 1 } else { hosts });
    let trial = Trial { seed, hosts, disk, plant, faults, only, turns };
    match args.seeds {
        Some(seeds) => {
            Sweep { seeds, trial, first: args.first, shrink: args.shrink, jobs: args.jobs.max(1) }.run()
        }
        None if args.shrink => shrink::shrink(trial),
        None => replay(trial, args.trace),
    }
}

/// Runs one seed here.
fn replay(trial: Trial, trace: bool) -> ! {
    let _ = TRACED.set(trace);
    if let Some(plant) = trial.plant {
        planted::plant(plant);
    }
    std::panic::set_hook(Box::new(|panic| violated(&format!("panic: {panic}"))));
    world::stay_on_core(trial.seed as usize);
    world::begin(trial.turns.unwrap_or(trial.seed), over);
    let folder = trial::folder(std::process::id());
    // One with this number that was ended may have left something.
    let _ = std::fs::remove_dir_all(&folder);
    let counts = if trial.disk {
        disk::run(trial.seed, folder)
    } else {
        Scenario::run(trial.seed, &trial.plan(), folder)
    };
    if trace {
        print(&world::so_far().0);
    }
    say(trial.seed, &counts);
    leave(0)
}

/// As [`Trial::run`] reads it.
fn say(seed: u64, counts: &Counts) {
    let (_, turns, fingerprint, nanos) = world::so_far();
    let ms = nanos / 1_000_000;
    println!("seed {seed}: {turns} turns, fingerprint {fingerprint:016x}, in its world {ms} ms");
    println!("coverage: {counts}");
}

/// Something that was promised is not so. The run ends here, at whatever its threads are doing.
fn violated(why: &str) -> ! {
    world::note(&format!("VIOLATED: {why}"));
    over(&world::so_far().0, why);
    leave(1)
}

fn over(trace: &[String], why: &str) {
    if TRACED.get() == Some(&true) {
        print(trace);
    }
    println!("violated: {why}");
    leave(1)
}

/// The world is not taken down: its threads wait for turns that never come.
fn leave(code: i32) -> ! {
    let _ = std::fs::remove_dir_all(trial::folder(std::process::id()));
    exit(code)
}

fn print(trace: &[String]) {
    let mut out = std::io::stdout().lock();
    // Whoever reads it may have seen enough.
    let _ = trace.iter().try_for_each(|line| writeln!(out, "{line}"));
}
