//! Many seeds, each in a process of its own.

use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvasir_os::planted::Bug;
use kvasir_os::world;

/// A seed takes about a second. One that takes this long waits for something outside of its world, where nobody gives it a
/// turn.
const SEED_MAX: Duration = Duration::from_secs(120);

/// What to try.
pub(crate) struct Sweep {
    pub(crate) seeds: Range<u64>,
    /// Hosts of each world.
    pub(crate) hosts: usize,
    /// A disk instead of hosts.
    pub(crate) disk: bool,
    pub(crate) plant: Option<Bug>,
    /// Stops at the first that fails.
    pub(crate) first: bool,
    /// Seeds at a time.
    pub(crate) jobs: usize,
}

impl Sweep {
    /// Tries the seeds, and says which fail and how. Success: none failed; with a planted bug, one did.
    pub(crate) fn run(&self) -> ExitCode {
        let (next, begun) = (AtomicU64::new(self.seeds.start), Instant::now());
        let (failed, over) = (Mutex::new(Vec::new()), AtomicBool::new(false));
        let simulated_ms = AtomicU64::new(0);
        let work = |job: usize| {
            world::stay_on_core(job);
            while !over.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= self.seeds.end {
                    return;
                }
                match self.replay(seed) {
                    Ok(ms) => drop(simulated_ms.fetch_add(ms, Ordering::Relaxed)),
                    Err(why) => {
                        println!("seed {seed}: {why}");
                        failed.lock().expect("nobody panics with it").push(seed);
                        over.store(self.first, Ordering::Relaxed);
                    }
                }
            }
        };
        let work = &work;
        thread::scope(|scope| (0..self.jobs).for_each(|job| drop(scope.spawn(move || work(job)))));
        let tried = next.load(Ordering::Relaxed).min(self.seeds.end) - self.seeds.start;
        let failed = failed.into_inner().expect("nobody panics with it");
        let (took, hosts) = (begun.elapsed().as_secs_f64(), self.hosts as f64);
        let speed = simulated_ms.into_inner() as f64 / 1000.0 * hosts / (took * self.jobs as f64);
        println!(
            "{} of {tried} seeds failed, in {took:.1} s: {speed:.0} host-hours an hour and job",
            failed.len()
        );
        if failed.is_empty() == self.plant.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// How long it was in its world, in milliseconds, or how it fails.
    fn replay(&self, seed: u64) -> Result<u64, String> {
        let this = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
        let mut command = Command::new(this);
        command.args(["--replay", &seed.to_string()]);
        match self.disk {
            true => command.arg("--disk"),
            false => command.args(["--hosts", &self.hosts.to_string()]),
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if let Some(name) = self.plant.map(Bug::name) {
            command.args(["--plant", &name]);
        }
        let child = command.spawn().map_err(|error| format!("it cannot be started: {error}"))?;
        let files = folder(child.id());
        let output = ended(child);
        // One that was ended has left them.
        let _ = std::fs::remove_dir_all(files);
        let output = output?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let ms = said.rsplit_once("in its world ").and_then(|(_, ms)| ms.strip_suffix(" ms")?.parse().ok());
        match ms {
            Some(ms) if output.status.success() => Ok(ms),
            _ => Err(format!("{said} ({})", output.status)),
        }
    }
}

/// Where the process with this number keeps the files on its disks.
pub(crate) fn folder(process: u32) -> PathBuf {
    std::env::temp_dir().join(format!("kvasir-simulation-{process}"))
}

fn ended(mut child: Child) -> Result<Output, String> {
    let until = Instant::now() + SEED_MAX;
    while child.try_wait().map_err(|error| format!("it is lost: {error}"))?.is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it did not end within {SEED_MAX:?}; a thread waits outside of the world"));
        }
        thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().map_err(|error| format!("what it said is lost: {error}"))
}
