//! Many seeds, each in a process of its own.

use std::collections::BTreeMap;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use kvasir_os::world;

use crate::shrink::shrink;
use crate::trial::{Done, Trial};

/// What to try.
pub(crate) struct Sweep {
    pub(crate) seeds: Range<u64>,
    /// What to do with each.
    pub(crate) trial: Trial,
    /// Stops at the first that fails.
    pub(crate) first: bool,
    /// Finds the shortest schedule of the first that fails.
    pub(crate) shrink: bool,
    /// Seeds at a time.
    pub(crate) jobs: usize,
}

/// What the seeds did so far.
#[derive(Default)]
struct Sum {
    failed: Vec<u64>,
    ms: u64,
    coverage: BTreeMap<String, u64>,
}

impl Sum {
    fn add(&mut self, done: Done) {
        self.ms += done.ms;
        for (what, count) in done.coverage {
            *self.coverage.entry(what).or_default() += count;
        }
    }
}

impl Sweep {
    /// Tries the seeds, and says which fail and how. Success: none failed; with a planted bug, one did.
    pub(crate) fn run(&self) -> ExitCode {
        let (next, begun) = (AtomicU64::new(self.seeds.start), Instant::now());
        let (sum, over) = (Mutex::new(Sum::default()), AtomicBool::new(false));
        let work = |job: usize| {
            world::stay_on_core(job);
            while !over.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= self.seeds.end {
                    return;
                }
                let done = Trial { seed, ..self.trial.clone() }.run();
                let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
                match done {
                    Ok(done) => sum.add(done),
                    Err(why) => {
                        println!("seed {seed}: {why}");
                        sum.failed.push(seed);
                        over.store(self.first || self.shrink, Ordering::Relaxed);
                    }
                }
            }
        };
        let work = &work;
        thread::scope(|scope| (0..self.jobs).for_each(|job| drop(scope.spawn(move || work(job)))));
        let tried = next.load(Ordering::Relaxed).min(self.seeds.end) - self.seeds.start;
        let sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (took, hosts) = (begun.elapsed().as_secs_f64(), self.trial.hosts as f64);
        let speed = sum.ms as f64 / 1000.0 * hosts / (took * self.jobs as f64);
        let coverage: Vec<String> =
            sum.coverage.iter().map(|(what, count)| format!("{what} {count}")).collect();
        println!("{}", coverage.join(", "));
        println!(
            "{} of {tried} seeds failed, in {took:.1} s: {speed:.0} host-hours an hour and job",
            sum.failed.len()
        );
        if let (true, Some(&seed)) = (self.shrink, sum.failed.iter().min()) {
            shrink(Trial { seed, ..self.trial.clone() });
        }
        if sum.failed.is_empty() == self.trial.plant.is_none() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}
