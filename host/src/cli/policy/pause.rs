//! `kvasir policy pause` and `resume`.

use super::SlotOf;
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// Leave the trial unasked, and let nothing be swapped by itself.
///
/// The watched folder waits; a guard still puts a policy back.
#[derive(Args, Debug)]
pub(super) struct PauseArgs {
    #[command(flatten)]
    of: SlotOf,
}

/// End a pause.
#[derive(Args, Debug)]
pub(super) struct ResumeArgs {
    #[command(flatten)]
    of: SlotOf,
}

impl PauseArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let SlotOf { slot, to } = self.of;
        let said = format!("{slot}: paused");
        let pause = async |mut control: Control| {
            Ok(control.policy.pause(proto::PauseRequest { slot }).await?.into_inner().policy)
        };
        to.print_change(&said, to.host.control(pause)?);
        Ok(ExitCode::SUCCESS)
    }
}

impl ResumeArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let SlotOf { slot, to } = self.of;
        let said = format!("{slot}: goes on");
        let resume = async |mut control: Control| {
            Ok(control.policy.resume(proto::ResumeRequest { slot }).await?.into_inner().policy)
        };
        to.print_change(&said, to.host.control(resume)?);
        Ok(ExitCode::SUCCESS)
    }
}
