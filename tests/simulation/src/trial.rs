//! One run of one seed, in a process of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kvasir_os::planted::Bug;
use kvasir_os::world;

use clap::ValueEnum;

use crate::plan::{Fault, Plan, Steps, to_text};

/// A seed takes about a second, one with 30 hosts a minute. One that takes this long waits for something outside of its world,
/// where nobody gives it a turn.
const SEED_MAX: Duration = Duration::from_secs(300);
const SEED_OF_MANY_MAX: Duration = Duration::from_secs(1200);

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    pub(crate) seed: u64,
    pub(crate) hosts: usize,
    /// A disk instead of hosts.
    pub(crate) disk: bool,
    pub(crate) plant: Option<Bug>,
    /// Faults of these kinds alone.
    pub(crate) faults: Option<Vec<Fault>>,
    /// These steps of its plan alone.
    pub(crate) only: Option<Steps>,
    /// Threads take turns as with this seed.
    pub(crate) turns: Option<u64>,
}

/// What it did.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// How long it was in its world, in milliseconds.
    pub(crate) ms: u64,
    /// How often what happened.
    pub(crate) coverage: BTreeMap<String, u64>,
}

impl Trial {
    /// What repeats it, after `cargo xtask simulate`.
    pub(crate) fn args(&self) -> Vec<String> {
        let mut args = vec!["--replay".to_owned(), self.seed.to_string()];
        match self.disk {
            true => args.push("--disk".into()),
            false => args.extend(["--hosts".into(), self.hosts.to_string()]),
        }
        if let Some(bug) = self.plant {
            args.extend(["--plant".into(), bug.name()]);
        }
        for fault in self.faults.iter().flatten() {
            let name = fault.to_possible_value().map(|value| value.get_name().to_owned());
            args.extend(name.into_iter().flat_map(|name| ["--faults".into(), name]));
        }
        if let Some(only) = &self.only {
            args.extend(["--only".into(), to_text(only)]);
        }
        if let Some(turns) = self.turns {
            args.extend(["--turns".into(), turns.to_string()]);
        }
        args
    }

    pub(crate) fn plan(&self) -> Plan {
        let mut plan = Plan::of(self.seed, self.hosts);
        if let Some(faults) = &self.faults {
            plan = plan.faults(faults);
        }
        if let Some(only) = &self.only {
            plan = plan.only(only);
        }
        plan
    }

    /// Runs it. An error: how it fails.
    pub(crate) fn run(&self) -> Result<Done, String> {
        let output = self.output(&[])?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        match done(&said) {
            Some(done) if output.status.success() => Ok(done),
            _ => Err(format!("{said} ({})", output.status)),
        }
    }

    /// All that happens in it.
    pub(crate) fn trace(&self) -> Result<String, String> {
        let output = self.output(&["--trace"])?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn output(&self, more: &[&str]) -> Result<Output, String> {
        let this = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
        let mut command = Command::new(this);
        command.args(self.args()).args(more).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn().map_err(|error| format!("it cannot be started: {error}"))?;
        let files = folder(child.id());
        let limit = if self.hosts > 7 { SEED_OF_MANY_MAX } else { SEED_MAX };
        let output = ended(child, limit);
        // One that was ended has left them.
        let _ = std::fs::remove_dir_all(files);
        output
    }
}

/// What a process says of itself that has ended well ([`crate::say`]).
fn done(said: &str) -> Option<Done> {
    let (rest, coverage) = said.rsplit_once("coverage: ")?;
    let (_, ms) = rest.rsplit_once("in its world ")?;
    let count = |item: &str| {
        let (what, count) = item.rsplit_once(' ')?;
        Some((what.to_owned(), count.parse().ok()?))
    };
    Some(Done {
        ms: ms.trim().strip_suffix(" ms")?.parse().ok()?,
        coverage: coverage.split(", ").filter_map(count).collect(),
    })
}

/// More than thirty hosts need for their disks, some at a time. In a container there may be 64 MiB.
const ROOM: u64 = 1 << 30;

/// Where the process with this number keeps the files on its disks: in memory where there is room, which takes a fifth less time.
pub(crate) fn folder(process: u32) -> PathBuf {
    let memory = Path::new("/dev/shm");
    let parent = if world::has_room(memory, ROOM) { memory.to_owned() } else { std::env::temp_dir() };
    parent.join(format!("kvasir-simulation-{process}"))
}

/// What it says is read meanwhile, because a trace does not fit into the pipe.
fn ended(mut child: Child, limit: Duration) -> Result<Output, String> {
    let mut said = child.stdout.take().ok_or("it cannot say anything")?;
    let read = thread::spawn(move || {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut said, &mut bytes).map(|_| bytes)
    });
    let until = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|error| format!("it is lost: {error}"))? {
            break status;
        }
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it did not end within {limit:?}; a thread waits outside of the world"));
        }
        thread::sleep(Duration::from_millis(2));
    };
    match read.join() {
        Ok(Ok(stdout)) => Ok(Output { status, stdout, stderr: Vec::new() }),
        _ => Err("what it said is lost".into()),
    }
}
