//! `kvasir policy`: policies from the first line to service on a running host. One file a verb.

mod bench;
mod build;
mod check;
mod history;
mod inspect;
mod life;
mod list;
mod load;
mod load_bundle;
mod logs;
mod new;
mod pause;
mod promote;
mod pull;
mod push;
mod registry;
mod replay;
mod rollback;
mod rollout;
mod run;
mod save;
mod serving;
mod set;
mod sign;
mod stage;
mod status;
mod trust;
mod verify;

pub(super) use crate::calendar::moment;

use super::HostFlags;
use crate::authoring;
use crate::policy::{SlotKind, UnknownSlot};
use clap::{Args, Subcommand};
use kvasir_client::control::ControlError;
use std::process::ExitCode;

/// Write policies, try them on traces, and put them before the traffic of a running host.
#[derive(Args, Debug)]
#[command(help_template = life::TEMPLATE, after_help = life::verbs())]
pub(super) struct PolicyArgs {
    #[command(subcommand)]
    action: Action,
}

/// Each verb has a place in [`life::STAGES`].
#[derive(Subcommand, Debug)]
enum Action {
    New(new::NewArgs),
    Build(build::BuildArgs),
    Check(check::CheckArgs),
    Bench(bench::BenchArgs),
    Replay(Box<replay::ReplayArgs>),
    Inspect(inspect::InspectArgs),
    Run(run::RunArgs),
    Load(load::LoadArgs),
    Promote(promote::PromoteArgs),
    Rollback(rollback::RollbackArgs),
    Pause(pause::PauseArgs),
    Resume(pause::ResumeArgs),
    Set(set::SetArgs),
    Rollout(rollout::RolloutArgs),
    List(list::ListArgs),
    Status(status::StatusArgs),
    Logs(logs::LogsArgs),
    History(history::HistoryArgs),
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

/// One slot of a running host.
#[derive(Args, Debug)]
struct SlotOf {
    /// scheduler, evictor, admitter or balancer.
    #[arg(value_parser = slot)]
    slot: String,
    #[command(flatten)]
    to: Target,
}

impl PolicyArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.action.run().or_else(|error| match error.downcast_ref() {
            // What was asked for is not there: no trial, no previous policy.
            Some(ControlError::Refused { code: tonic::Code::FailedPrecondition, message }) => {
                eprintln!("kvasir: {message}");
                Ok(ExitCode::from(1))
            }
            _ => Err(error),
        })
    }
}

impl Action {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::New(args) => Ok(args.run()),
            Self::Build(args) => Ok(args.run()),
            Self::Check(args) => Ok(args.run()),
            Self::Bench(args) => args.run(),
            Self::Replay(args) => args.run(),
            Self::Inspect(args) => args.run(),
            Self::Run(args) => args.run(),
            Self::Load(args) => args.run(),
            Self::Promote(args) => args.run(),
            Self::Rollback(args) => args.run(),
            Self::Pause(args) => args.run(),
            Self::Resume(args) => args.run(),
            Self::Set(args) => args.run(),
            Self::Rollout(args) => args.run(),
            Self::List(args) => args.run(),
            Self::Status(args) => args.run(),
            Self::Logs(args) => args.run(),
            Self::History(args) => args.run(),
            Self::Push(args) => args.run(),
            Self::Pull(args) => args.run(),
            Self::Save(args) => args.run(),
            Self::LoadBundle(args) => args.run(),
            Self::Sign(args) => args.run(),
            Self::Verify(args) => args.run(),
            Self::Trust(args) => args.run(),
        }
    }
}

/// A slot that a flag or argument names; the host is not asked about one that there is not.
fn slot(text: &str) -> Result<String, UnknownSlot> {
    text.parse().map(|slot: SlotKind| slot.to_string())
}

/// Tells why a verb of authors failed: exit code 2 if it was asked for wrongly, otherwise 1.
fn failed(error: &authoring::Error) -> ExitCode {
    eprintln!("kvasir: {error}");
    ExitCode::from(if error.is_usage() { 2 } else { 1 })
}
