//! `kvasir policy rollout`.

use super::{Target, load, moment};
use clap::{Args, Subcommand};
use kvasir_client::control::{Control, PolicyStage};
use kvasir_proto as proto;
use std::process::ExitCode;

/// Bring a policy to all hosts that follow this one, one after the other.
///
/// A host follows the one that its `policy.follow` names. One that refuses the policy, or whose guards put it back, or that
/// falls silent stops the rollout, and all go back.
#[derive(Args, Debug)]
pub(super) struct RolloutArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Start one, in place of the slot's last.
    Start {
        #[command(flatten)]
        policy: load::PolicyFlags,
        /// Between the end of one host's watch and the next host.
        #[arg(long, value_name = "TIME", default_value = "1m", value_parser = time)]
        pause: std::time::Duration,
        #[command(flatten)]
        to: Target,
    },
    /// Tell how far they are, host by host.
    Status {
        /// scheduler, evictor, admitter or balancer; without one, all.
        #[arg(value_parser = super::slot)]
        slot: Option<String>,
        #[command(flatten)]
        to: Target,
    },
    /// Tell nobody else; who has it keeps it.
    Pause(Changed),
    /// Go on.
    Resume(Changed),
    /// Take it back from everybody.
    Stop(Changed),
}

#[derive(Args, Debug)]
struct Changed {
    /// scheduler, evictor, admitter or balancer.
    #[arg(value_parser = super::slot)]
    slot: String,
    #[command(flatten)]
    to: Target,
}

impl RolloutArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        use proto::change_rollout_request::Step;
        match self.action {
            Action::Start { policy, pause, to } => {
                let pause_ms = pause.as_millis() as u64;
                let load::ReadPolicy { slot, source, settings } = policy.read()?;
                let start = async |mut control: Control| {
                    let policy =
                        Some(control.load_request(&slot, source, &settings, PolicyStage::Active).await?);
                    let request = proto::StartRolloutRequest { policy, pause_ms };
                    Ok(control.rollouts.start(request).await?.into_inner().rollout)
                };
                print(&to, to.host.control(start)?.as_slice());
            }
            Action::Status { slot, to } => {
                let list = async |mut control: Control| {
                    Ok(control.rollouts.list(proto::ListRolloutsRequest {}).await?.into_inner().rollouts)
                };
                let mut rollouts = to.host.control(list)?;
                rollouts.retain(|rollout| slot.as_ref().is_none_or(|slot| *slot == rollout.slot));
                print(&to, &rollouts);
            }
            Action::Pause(changed) => changed.run(Step::Pause)?,
            Action::Resume(changed) => changed.run(Step::Resume)?,
            Action::Stop(changed) => changed.run(Step::Stop)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Changed {
    fn run(self, step: proto::change_rollout_request::Step) -> anyhow::Result<()> {
        let request = proto::ChangeRolloutRequest { slot: self.slot, step: step.into() };
        let change =
            async |mut control: Control| Ok(control.rollouts.change(request).await?.into_inner().rollout);
        print(&self.to, self.to.host.control(change)?.as_slice());
        Ok(())
    }
}

fn time(text: &str) -> Result<std::time::Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| format!("`{text}` is no time; write one such as 30s, 5m or 1h"))
}

fn print(to: &Target, rollouts: &[proto::Rollout]) {
    if to.json {
        let rollouts: Vec<_> = rollouts.iter().map(object).collect();
        return println!("{}", serde_json::json!({ "rollouts": rollouts }));
    }
    if rollouts.is_empty() {
        return println!("no rollout; start one with `kvasir policy rollout start SLOT POLICY`");
    }
    for rollout in rollouts {
        let proto::Rollout { slot, id, name, phase, reason, by, since_ms, .. } = rollout;
        println!("{slot} {id}: {name}, {phase}, since {} by {by}", moment(*since_ms));
        if !reason.is_empty() {
            println!("    {reason}");
        }
        for proto::RolloutHost { name, step, reason, heard_ms } in &rollout.hosts {
            let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
            println!("  {name:24} {step}{why}, heard of {}", moment(*heard_ms));
        }
    }
}

fn object(rollout: &proto::Rollout) -> serde_json::Value {
    let text = |text: &str| if text.is_empty() { None } else { Some(text.to_owned()) };
    let host = |host: &proto::RolloutHost| {
        serde_json::json!({
            "name": host.name, "step": host.step, "reason": text(&host.reason), "heard_ms": host.heard_ms,
        })
    };
    let settings: serde_json::Map<_, _> =
        rollout.settings.iter().map(|s| (s.name.clone(), s.value.clone().into())).collect();
    serde_json::json!({
        "slot": rollout.slot, "id": rollout.id, "name": rollout.name, "settings": settings, "by": rollout.by,
        "since_ms": rollout.since_ms, "pause_ms": rollout.pause_ms, "phase": rollout.phase,
        "reason": text(&rollout.reason), "hosts": rollout.hosts.iter().map(host).collect::<Vec<_>>(),
    })
}
