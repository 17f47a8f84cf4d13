//! A whole run in the virtual machine: rounds of recording, cutting and looking. Each round goes on from a cut of the one before,
//! so recovery is recorded and cut, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};

use crate::chance::Chance;
use crate::cut::{Cut, Kind, Loss, Recording};
use crate::machine;
use crate::model::Expected;

/// So many cuts after each other without a word.
const TOLD_EACH: usize = 100;

#[derive(Args)]
pub(crate) struct SessionArgs {
    /// How often the power is cut, over all rounds.
    #[arg(long, default_value_t = 45)]
    points: usize,
    /// Cut it at every entry of each recording, three times: hours.
    #[arg(long, conflicts_with_all = ["points", "seconds"])]
    all: bool,
    /// Only cuts of this kind.
    #[arg(long)]
    only: Option<Kind>,
    /// What is done, where it is cut, and what is lost follow from it; when threads meet the disk does not.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Recordings, each on the disk that a cut of the one before left.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Calls of each of three clients in a round.
    #[arg(long, default_value_t = 40)]
    calls: u32,
    /// Stop cutting after this long.
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
    /// A folder in which a device is kept that breaks a promise, and what was expected of it.
    #[arg(long)]
    keep: Option<PathBuf>,
    /// A bug that must be found, as `cargo xtask simulate --plant` has them.
    #[arg(long, value_parser = crate::bug)]
    plant: Option<kvasir_os::planted::Bug>,
}

struct Session<'a> {
    args: &'a SessionArgs,
    chance: Chance,
    /// When to stop, if ever.
    until: Option<Instant>,
    cuts: usize,
}

/// # Errors
/// A promise was broken; with `--plant`, none was.
pub(crate) fn run(args: &SessionArgs) -> Result<()> {
    let begun = Instant::now();
    let until = (!args.all).then(|| begun + Duration::from_secs(args.seconds));
    let mut session = Session { args, chance: Chance::new(args.seed), until, cuts: 0 };
    let outcome = session.rounds();
    let (cuts, took) = (session.cuts, begun.elapsed().as_secs());
    match (outcome, args.plant) {
        (Ok(()), None) => println!("{cuts} power cuts in {took} s: every promise kept"),
        (Ok(()), Some(bug)) => bail!("{cuts} power cuts in {took} s have not found `{}`", bug.name()),
        (Err(found), Some(bug)) if found.is::<Violation>() => {
            println!("found `{}` at cut {cuts}, after {took} s: {found:#}", bug.name());
        }
        (Err(error), _) => return Err(error.context(format!("cut {cuts} of seed {}", args.seed))),
    }
    Ok(())
}

/// A promise was not kept.
#[derive(Debug)]
struct Violation;

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("violated")
    }
}

impl Session<'_> {
    fn rounds(&mut self) -> Result<()> {
        let mut image = machine::format()?;
        let mut expected = Expected::nothing();
        for round in 1..=self.args.rounds {
            let begun = Instant::now();
            let (log, left) = self.record(&image, &expected)?;
            let flushes = log.iter().filter(|entry| entry.flush).count();
            let forced = log.iter().filter(|entry| entry.fua).count();
            let bytes: usize = log.iter().map(|entry| entry.data.len()).sum();
            println!(
                "round {round}: {} writes, {flushes} flushes, {forced} forced, {} KiB, in {} ms",
                log.len(),
                bytes >> 10,
                begun.elapsed().as_millis()
            );
            let recording = Recording::new(log, image, &left, &expected)?;
            (image, expected) = self.cut(recording)?;
            if self.is_over() {
                break;
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() > until)
    }

    fn record(&mut self, image: &[u8], expected: &Expected) -> Result<machine::Recorded> {
        let (seed, calls) = (self.chance.any(), self.args.calls);
        machine::record(image, |folder, device, marks_at| {
            let mut work = self.process("work", folder, expected, seed)?;
            work.arg("--device").arg(device).args(["--marks-at", &marks_at.to_string()]);
            let done = answer(work.args(["--calls", &calls.to_string()]))?;
            print!("{done}");
            Ok(())
        })
    }

    /// Cuts a recording, and returns a disk to go on with.
    fn cut(&mut self, mut recording: Recording) -> Result<(Vec<u8>, Expected)> {
        let cuts = if self.args.all {
            recording.all(&mut self.chance)
        } else {
            let kinds = self.args.only.as_ref().map_or(Kind::value_variants(), std::slice::from_ref);
            recording.choose(self.args.points.div_ceil(self.args.rounds), kinds, &mut self.chance)
        };
        ensure!(!cuts.is_empty(), "nothing to cut");
        let (mut go_on, count) = (None, cuts.len());
        for (done, cut) in cuts.into_iter().enumerate() {
            if done > 0 && done.is_multiple_of(TOLD_EACH) {
                println!("{done} of {count} cuts of this round");
            }
            let (image, expected) = recording.cut(cut);
            if !self.is_over() {
                self.cuts += 1;
                self.look(&image, &expected)
                    .inspect_err(|_| self.keep(&image, &expected))
                    .with_context(|| format!("{cut:?} of {}", recording.len()))?;
            }
            let Cut { loss, .. } = cut;
            if go_on.is_none() || matches!(loss, Loss::Some(_)) {
                go_on = Some((image, expected));
            }
        }
        go_on.context("nothing was cut")
    }

    /// Lets three processes see the disk, one after the other.
    fn look(&mut self, image: &[u8], expected: &Expected) -> Result<()> {
        let mounted = machine::replay(image).context(Violation)?;
        let mut expected = expected.clone();
        for ends_at_once in [true, false] {
            let seed = self.chance.any();
            let mut check = self.process("check", &mounted.folder, &expected, seed)?;
            if ends_at_once {
                check.arg("--work");
            }
            expected =
                serde_json::from_str(&answer(&mut check)?).context("what a process says that it left")?;
        }
        Ok(())
    }

    /// Keeps what was found, for a person to mount and look at.
    fn keep(&self, image: &[u8], expected: &Expected) {
        let Some(folder) = &self.args.keep else { return };
        let expected = serde_json::to_vec(expected).map_err(std::io::Error::from);
        let kept = fs::write(folder.join("device.ext4"), image)
            .and_then(|()| fs::write(folder.join("expected.json"), expected?));
        if let Err(error) = kept {
            eprintln!("nothing is kept in {}: {error}", folder.display());
        }
    }

    /// Ourselves, as a process that can be killed.
    fn process(&self, what: &str, folder: &Path, expected: &Expected, seed: u64) -> Result<Command> {
        let mut process = Command::new(std::env::current_exe()?);
        process.arg(what).arg("--folder").arg(folder);
        process.args(["--expected", &serde_json::to_string(expected)?, "--seed", &seed.to_string()]);
        if let Some(bug) = self.args.plant {
            process.args(["--plant", &bug.name()]);
        }
        Ok(process)
    }
}

fn answer(process: &mut Command) -> Result<String> {
    let done = process.output().context("a process that does not start")?;
    if !done.status.success() {
        let why = String::from_utf8_lossy(&done.stderr);
        return Err(anyhow::anyhow!("{}: {}", done.status, why.trim()).context(Violation));
    }
    Ok(String::from_utf8(done.stdout)?)
}
