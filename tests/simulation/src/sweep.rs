//! Many seeds, each in a process of its own.

use std::ops::Range;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvasir_os::planted::Bug;

/// A seed takes about a second. One that takes this long waits for something outside of its world, where nobody gives it a
/// turn.
const SEED_MAX: Duration = Duration::from_secs(120);

/// What to try.
pub(crate) struct Sweep {
    pub(crate) seeds: Range<u64>,
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
        let work = || {
            while !over.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= self.seeds.end {
                    return;
                }
                if let Err(why) = self.replay(seed) {
                    println!("seed {seed}: {why}");
                    failed.lock().expect("nobody panics with it").push(seed);
                    over.store(self.first, Ordering::Relaxed);
                }
            }
        };
        thread::scope(|scope| (0..self.jobs).for_each(|_| drop(scope.spawn(work))));
        let tried = next.load(Ordering::Relaxed).min(self.seeds.end) - self.seeds.start;
        let failed = failed.into_inner().expect("nobody panics with it");
        println!("{} of {tried} seeds failed, in {:.1} s", failed.len(), begun.elapsed().as_secs_f64());
        if failed.is_empty() == self.plant.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// How a seed fails.
    fn replay(&self, seed: u64) -> Result<(), String> {
        let this = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
        let mut command = Command::new(this);
        command.args(["--replay", &seed.to_string()]).stdin(Stdio::null()).stdout(Stdio::piped());
        if let Some(name) = self.plant.map(Bug::name) {
            command.args(["--plant", &name]);
        }
        let child = command.spawn().map_err(|error| format!("it cannot be started: {error}"))?;
        let output = ended(child)?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.success() { Ok(()) } else { Err(format!("{said} ({})", output.status)) }
    }
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
