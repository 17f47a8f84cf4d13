//! `kvasir policy set`.

use super::{Target, slot, stage::StageFlags};
use clap::Args;
use kvasir_client::control::Control;
use std::process::ExitCode;

/// Change settings of what serves, without its file and without compiling it.
///
/// With `--shadow` or `--canary` what serves stays as it is, and the same policy with the other settings goes on trial.
#[derive(Args, Debug)]
pub(super) struct SetArgs {
    /// scheduler, evictor, admitter or balancer.
    #[arg(value_parser = slot)]
    slot: String,
    /// A setting and its new value; the others stay as they are.
    #[arg(value_name = "NAME=VALUE", value_parser = crate::cli::setting, required_unless_present = "unset")]
    changes: Vec<(String, String)>,
    /// Put a setting back to the policy's own default; may be given several times.
    #[arg(long, value_name = "NAME")]
    unset: Vec<String>,
    #[command(flatten)]
    stage: StageFlags,
    #[command(flatten)]
    to: Target,
}

impl SetArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { slot, changes, unset, stage, to } = self;
        let configure = async |mut control: Control| {
            control.configure_policy(&slot, &changes, unset, stage.stage()).await
        };
        to.seat(&slot, configure)?;
        Ok(ExitCode::SUCCESS)
    }
}
