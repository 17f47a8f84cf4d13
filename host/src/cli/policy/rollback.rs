//! `kvasir policy rollback`.

use super::{SlotOf, list};
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
        let said = format!("{}: {did} `{} {}`{}", policy.slot, policy.name, policy.version, which(&policy));
        to.print_change(&said, Some(policy));
        Ok(ExitCode::SUCCESS)
    }
}

/// What tells a policy from others of its name: the first of its digest, and its settings.
fn which(policy: &proto::Policy) -> String {
    const DIGEST_CHARS: usize = "sha256:".len() + 12;
    let digest = list::text(&policy.digest).map(|digest| digest.chars().take(DIGEST_CHARS).collect());
    let settings = policy.settings.iter().map(|setting| format!("{}={}", setting.name, setting.value));
    let parts: Vec<String> = digest.into_iter().chain(settings).collect();
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}
