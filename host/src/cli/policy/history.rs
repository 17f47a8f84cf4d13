//! `kvasir policy history`.

use super::{Target, list, moment, slot};
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// Tell what happened: when, who, what and why, also before a restart.
#[derive(Args, Debug)]
pub(super) struct HistoryArgs {
    /// scheduler, evictor, admitter or balancer; without one, all.
    #[arg(value_parser = slot)]
    slot: Option<String>,
    /// The newest entries only.
    #[arg(long, value_name = "NUMBER", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    to: Target,
}

impl HistoryArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let request = proto::HistoryRequest { slot: self.slot.unwrap_or_default(), limit: self.limit };
        let history =
            async |mut control: Control| Ok(control.policy.history(request).await?.into_inner().entries);
        let entries = self.to.host.control(history)?;
        if self.to.json {
            let entries: Vec<_> = entries.iter().map(object).collect();
            println!("{}", serde_json::json!({ "entries": entries }));
        } else {
            // The newest stands last, where the eye is.
            entries.iter().rev().for_each(print);
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print(entry: &proto::HistoryEntry) {
    let proto::HistoryEntry { slot, who, cause, action, stage, reason, .. } = entry;
    let done = if stage.is_empty() { action } else { stage };
    print!("{} {slot:9} {done:12} {}", moment(entry.at_ms), named(&entry.policy.clone().unwrap_or_default()));
    print_settings(&entry.settings);
    if let Some(before) = &entry.before {
        print!(", before: {}", named(before));
        print_settings(&entry.before_settings);
    }
    let by = if cause == "operator" { who.clone() } else { format!("{who} ({cause})") };
    println!(", by {by}");
    if !reason.is_empty() {
        println!("    {reason}");
    }
}

fn print_settings(settings: &[proto::Setting]) {
    for proto::Setting { name, value } in settings {
        print!(" {name}={value}");
    }
}

/// As `lru 0.1.0 (3f2a91bc)`.
fn named(policy: &proto::NamedPolicy) -> String {
    let proto::NamedPolicy { name, version, digest } = policy;
    let digest = if digest.is_empty() { "native" } else { digest.get(..8).unwrap_or(digest) };
    format!("{name} {version} ({digest})")
}

fn object(entry: &proto::HistoryEntry) -> serde_json::Value {
    let named = |policy: &proto::NamedPolicy| {
        let digest = list::text(&policy.digest);
        serde_json::json!({ "name": policy.name, "version": policy.version, "digest": digest })
    };
    let before = entry.before.as_ref().map(|before| {
        let mut before = named(before);
        before["settings"] = list::settings(&entry.before_settings);
        before
    });
    serde_json::json!({
        "slot": entry.slot, "at_ms": entry.at_ms, "who": entry.who, "cause": entry.cause,
        "action": entry.action, "stage": list::text(&entry.stage),
        "policy": entry.policy.as_ref().map(named), "settings": list::settings(&entry.settings),
        "before": before, "reason": list::text(&entry.reason),
    })
}
