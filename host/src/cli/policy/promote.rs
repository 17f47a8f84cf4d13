//! `kvasir policy promote`.

use super::{SlotOf, list};
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
            let trial = list::one(&mut control, &slot).await.and_then(|policy| policy.trial);
            let promoted = control.policy.promote(proto::PromoteRequest { slot }).await?.into_inner();
            Ok((trial, promoted.policy.unwrap_or_default()))
        };
        let (trial, policy) = to.host.control(promote)?;
        let said = format!("{}: `{} {}` serves now", policy.slot, policy.name, policy.version);
        let asked = trial.filter(|trial| trial.asked > 0);
        let how =
            asked.map(|t| format!("; {} of {} of its answers were those of what served", t.same, t.asked));
        let said = said + &how.unwrap_or_default();
        to.print_change(&said, Some(policy));
        Ok(ExitCode::SUCCESS)
    }
}
