//! `kvasir policy`: which policies serve a running host, how one is written, and what a component is. One file a verb.

mod build;
mod check;
mod inspect;
mod list;
mod load;
mod logs;
mod new;
mod rollback;

use super::HostFlags;
use crate::authoring;
use clap::{Args, Subcommand};
use std::process::ExitCode;

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
    Check(check::CheckArgs),
    Load(load::LoadArgs),
    List(list::ListArgs),
    Rollback(rollback::RollbackArgs),
    Inspect(inspect::InspectArgs),
    Logs(logs::LogsArgs),
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
            Action::Check(args) => Ok(args.run()),
            Action::Load(args) => args.run(),
            Action::List(args) => args.run(),
            Action::Rollback(args) => args.run(),
            Action::Inspect(args) => args.run(),
            Action::Logs(args) => args.run(),
        }
    }
}

/// Tells why a verb of authors failed: exit code 2 if it was asked for wrongly, otherwise 1.
fn failed(error: &authoring::Error) -> ExitCode {
    eprintln!("kvasir: {error}");
    ExitCode::from(if error.is_usage() { 2 } else { 1 })
}
