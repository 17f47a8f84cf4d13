//! `kvasir policy rollback`.

use super::Target;
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// Put the previous policy of a slot back into service.
#[derive(Args, Debug)]
pub(super) struct RollbackArgs {
    #[arg(value_parser = super::slot)]
    slot: String,
    #[command(flatten)]
    to: Target,
}

impl RollbackArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { slot, to } = self;
        let back = async |mut control: Control| {
            Ok(control.policy.rollback(proto::RollbackRequest { slot }).await?.into_inner().policy)
        };
        to.print_policies(to.host.control(back)?.as_slice());
        Ok(ExitCode::SUCCESS)
    }
}
