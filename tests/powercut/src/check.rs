//! What follows a power cut: a process that opens tier and database by their own recovery and compares what is there with what
//! was promised; then it works a little and is killed, and another one looks again.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use kvasir_nvme::NvmeStore;

use crate::blocks::{self, Settings};
use crate::chance::Chance;
use crate::database::Database;
use crate::model::{BLOCKS, Expected, Outcome, State};

#[derive(Args)]
pub(crate) struct CheckArgs {
    #[arg(long)]
    folder: PathBuf,
    /// What must be found, as JSON.
    #[arg(long, value_parser = crate::expected)]
    expected: Expected,
    /// How it is opened, and what is done afterwards.
    #[arg(long)]
    seed: u64,
    /// Put some blocks that are not there and end at once.
    #[arg(long)]
    work: bool,
}

/// Prints what the next process must find, as JSON; what is violated is an error.
pub(crate) fn run(args: &CheckArgs) -> Result<()> {
    let mut chance = Chance::new(args.seed);
    let store = blocks::open(&args.folder, Settings { io_uring: chance.below(2) == 0, batch: false })?;
    let (_database, version) = Database::open(&args.folder, args.expected.versions)?;
    let mut found = Vec::new();
    for block in 0..BLOCKS {
        found.push(blocks::get(&store, block)?);
    }
    let violations = violations(&args.expected.blocks, &found);
    anyhow::ensure!(violations.is_empty(), "{}; the tier says {:?}", violations.join("; "), store.report());
    let state = |&there: &bool| if there { State::Stored { durable: true } } else { State::Absent };
    let mut next = Expected { blocks: found.iter().map(state).collect(), versions: (version, version) };
    if args.work {
        put_some(&store, &mut next, &mut chance);
    }
    println!("{}", serde_json::to_string(&next)?);
    if args.work {
        // As a kill does: no destructor runs.
        std::process::exit(0);
    }
    Ok(())
}

/// Promises that are not kept.
fn violations(promised: &[State], found: &[bool]) -> Vec<String> {
    let broken = |(block, (state, found)): (usize, (&State, &bool))| match (state, found) {
        (State::Absent, true) => Some(format!("block {block} is back, though it was removed or lost")),
        (State::Stored { durable: true }, false) => {
            Some(format!("block {block} was durable, and is missing"))
        }
        _ => None,
    };
    promised.iter().zip(found).enumerate().filter_map(broken).collect()
}

/// A kill loses nothing of what was answered, so nothing of this may be lost, and nothing else may be there.
fn put_some(store: &NvmeStore, next: &mut Expected, chance: &mut Chance) {
    // Enough that often another segment is begun.
    for _ in 0..chance.below(16) {
        let block = chance.below(BLOCKS.into()) as u32;
        let state = &mut next.blocks[block as usize];
        if *state == State::Absent {
            *state = match blocks::put(store, &[block])[..] {
                [Outcome::Stored] => State::Stored { durable: true },
                [Outcome::AsBefore] => State::Absent,
                _ => State::Unknown,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_block_and_one_that_is_back_are_both_found() {
        let promised = [State::Absent, State::Stored { durable: true }, State::Unknown];
        assert!(violations(&promised, &[false, true, true]).is_empty());
        assert!(violations(&promised, &[false, true, false]).is_empty());
        assert_eq!(
            violations(&promised, &[true, true, true]),
            ["block 0 is back, though it was removed or lost"]
        );
        assert_eq!(violations(&promised, &[false, false, true]), ["block 1 was durable, and is missing"]);
    }

    /// A doctored store: what a recovery must not find, and what it must.
    #[test]
    fn a_real_store_that_breaks_a_promise_does_not_pass() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { io_uring: false, batch: false };
        let store = blocks::open(dir.path(), settings).unwrap();
        assert_eq!(blocks::put(&store, &[3, 4]), [Outcome::Stored; 2]);
        assert_eq!(blocks::remove(&store, &[4]), [Outcome::Removed]);
        drop(store);
        let check = |state: [State; 2], why: Option<&str>| {
            let mut expected = Expected::nothing();
            expected.blocks[3..5].copy_from_slice(&state);
            let args = CheckArgs { folder: dir.path().into(), expected, seed: 1, work: false };
            let error = run(&args).err().map(|error| error.to_string());
            assert_eq!(error.is_some(), why.is_some(), "{error:?}");
            assert!(error.unwrap_or_default().contains(why.unwrap_or_default()));
        };
        let durable = State::Stored { durable: true };
        check([durable, State::Absent], None);
        check([State::Absent, State::Absent], Some("block 3 is back"));
        check([durable, durable], Some("block 4 was durable, and is missing"));
    }
}
