//! `kvasir policy`: which policies serve a running host, how one is written, and what a component is. One file a verb.

mod bench;
mod build;
mod history;
mod inspect;
mod list;
mod load;
mod logs;
mod new;
mod replay;
mod rollback;

use super::HostFlags;
use crate::authoring;
use crate::policy::{SlotKind, UnknownSlot};
use clap::{Args, Subcommand};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// Write policies; look at them; load, list and roll back those of a running host.
#[derive(Args, Debug)]
pub(super) struct PolicyArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    New(new::NewArgs),
    Build(build::BuildArgs),
    Bench(bench::BenchArgs),
    Replay(replay::ReplayArgs),
    Load(load::LoadArgs),
    List(list::ListArgs),
    Rollback(rollback::RollbackArgs),
    Inspect(inspect::InspectArgs),
    Logs(logs::LogsArgs),
    History(history::HistoryArgs),
}

/// The running host that a verb is about, and how to print what it says.
#[derive(Args, Debug)]
struct Target {
    #[command(flatten)]
    host: HostFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PolicyArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::New(args) => Ok(args.run()),
            Action::Build(args) => Ok(args.run()),
            Action::Bench(args) => args.run(),
            Action::Replay(args) => args.run(),
            Action::Load(args) => args.run(),
            Action::List(args) => args.run(),
            Action::Rollback(args) => args.run(),
            Action::Inspect(args) => args.run(),
            Action::Logs(args) => args.run(),
            Action::History(args) => args.run(),
        }
    }
}

/// A slot that a flag or argument names; the host is not asked about one that there is not.
fn slot(text: &str) -> Result<String, UnknownSlot> {
    text.parse().map(|slot: SlotKind| slot.to_string())
}

/// Unix time in milliseconds, as people write it.
fn moment(at_ms: u64) -> String {
    // Beyond the year 9999 there is nothing to print, and such a time comes from no clock.
    let at_ms = at_ms.min(253_402_300_799_999);
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(at_ms)).to_string()
}

/// Tells why a verb of authors failed: exit code 2 if it was asked for wrongly, otherwise 1.
fn failed(error: &authoring::Error) -> ExitCode {
    eprintln!("kvasir: {error}");
    ExitCode::from(if error.is_usage() { 2 } else { 1 })
}
