//! `kvasir policy promote`.

use super::SlotOf;
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// Bring the policy on trial into service.
///
/// For a while it is watched, and put back if it breaks a guard (`policy.guard`).
#[derive(Args, Debug)]
pub(super) struct PromoteArgs {
    #[command(flatten)]
    of: SlotOf,
}

impl PromoteArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let SlotOf { slot, to } = self.of;
        let promote = async |mut control: Control| {
            Ok(control.policy.promote(proto::PromoteRequest { slot }).await?.into_inner().policy)
        };
        let policy = to.host.control(promote)?.unwrap_or_default();
        let said = format!("{}: `{} {}` serves now", policy.slot, policy.name, policy.version);
        to.print_change(&said, Some(policy));
        Ok(ExitCode::SUCCESS)
    }
}
