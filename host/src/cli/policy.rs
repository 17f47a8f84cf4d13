//! `kvasir policy`: which policies serve a running host, and what a component is. One file a verb.

mod inspect;
mod list;
mod load;
mod load_bundle;
mod logs;
mod pull;
mod push;
mod registry;
mod rollback;
mod save;
mod sign;
mod trust;
mod verify;

use super::HostFlags;
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// Look at policies; load, list and roll back those of a running host.
#[derive(Args, Debug)]
pub(super) struct PolicyArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    Load(load::LoadArgs),
    List(list::ListArgs),
    Rollback(rollback::RollbackArgs),
    Inspect(inspect::InspectArgs),
    Logs(logs::LogsArgs),
    Push(push::PushArgs),
    Pull(pull::PullArgs),
    Save(save::SaveArgs),
    LoadBundle(load_bundle::LoadBundleArgs),
    Sign(sign::SignArgs),
    Verify(verify::VerifyArgs),
    Trust(trust::TrustArgs),
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
            Action::Load(args) => args.run(),
            Action::List(args) => args.run(),
            Action::Rollback(args) => args.run(),
            Action::Inspect(args) => args.run(),
            Action::Logs(args) => args.run(),
            Action::Push(args) => args.run(),
            Action::Pull(args) => args.run(),
            Action::Save(args) => args.run(),
            Action::LoadBundle(args) => args.run(),
            Action::Sign(args) => args.run(),
            Action::Verify(args) => args.run(),
            Action::Trust(args) => args.run(),
        }
    }
}
