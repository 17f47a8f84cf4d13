//! `kvasir policy rollback`.

use super::SlotOf;
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// End the trial; where there is none, put the previous policy back into service.
#[derive(Args, Debug)]
pub(super) struct RollbackArgs {
    #[command(flatten)]
    of: SlotOf,
}

impl RollbackArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let SlotOf { slot, to } = self.of;
        let back = async |mut control: Control| {
            Ok(control.policy.rollback(proto::RollbackRequest { slot }).await?.into_inner())
        };
        let proto::RollbackResponse { policy, trial_ended } = to.host.control(back)?;
        let policy = policy.unwrap_or_default();
        let did = if trial_ended { "the trial is over; what serves is still" } else { "back to" };
        let said = format!("{}: {did} `{} {}`", policy.slot, policy.name, policy.version);
        to.print_change(&said, Some(policy));
        Ok(ExitCode::SUCCESS)
    }
}
