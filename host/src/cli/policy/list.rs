//! `kvasir policy list`, and how it and its fellows show what serves.

use super::Target;
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// List what serves each slot, and how well.
#[derive(Args, Debug)]
pub(super) struct ListArgs {
    #[command(flatten)]
    to: Target,
}

impl ListArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let list = async |mut control: Control| {
            Ok(control.policy.list(proto::ListPoliciesRequest {}).await?.into_inner().policies)
        };
        self.to.print_policies(&self.to.host.control(list)?);
        Ok(ExitCode::SUCCESS)
    }
}

impl Target {
    pub(super) fn print_policies(&self, policies: &[proto::Policy]) {
        if self.json {
            let rows: Vec<_> = policies.iter().map(row).collect();
            println!("{}", serde_json::json!({ "policies": rows }));
            return;
        }
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header([
            "slot",
            "policy",
            "engine",
            "generation",
            "calls",
            "ns",
            "faults",
            "fallbacks",
            "memory",
            "previous",
        ]);
        for p in policies {
            let c = p.counters.unwrap_or_default();
            table.add_row([
                p.slot.clone(),
                format!("{} {}", p.name, p.version),
                p.engine.clone(),
                p.generation.to_string(),
                c.calls.to_string(),
                format!("{:.0}", c.call_ns_mean),
                (c.traps + c.deadline_misses + c.invalid_answers).to_string(),
                c.fallbacks.to_string(),
                format!("{:.1} MiB", p.memory_bytes as f64 / f64::from(1 << 20)),
                p.previous.clone(),
            ]);
        }
        println!("{table}");
        for p in policies.iter().filter(|p| !p.last_trip.is_empty()) {
            println!("{}: taken out of service: {}", p.slot, p.last_trip);
        }
    }
}

fn row(p: &proto::Policy) -> serde_json::Value {
    let (c, totals) = (p.counters.unwrap_or_default(), p.totals.unwrap_or_default());
    let settings: serde_json::Map<_, _> =
        p.settings.iter().map(|s| (s.name.clone(), s.value.clone().into())).collect();
    let text = |text: &str| if text.is_empty() { None } else { Some(text.to_owned()) };
    serde_json::json!({
        "slot": p.slot, "name": p.name, "version": p.version, "engine": p.engine, "digest": text(&p.digest),
        "generation": p.generation, "settings": settings, "previous": text(&p.previous), "last_trip": text(&p.last_trip),
        "calls": c.calls, "ns_mean": c.call_ns_mean, "traps": c.traps, "deadline_misses": c.deadline_misses,
        "invalid_answers": c.invalid_answers, "fallbacks": c.fallbacks,
        "memory_bytes": p.memory_bytes, "memory_bytes_max": p.memory_bytes_max,
        "totals": {
            "calls": totals.calls, "traps": totals.traps, "deadline_misses": totals.deadline_misses,
            "invalid_answers": totals.invalid_answers, "fallbacks": totals.fallbacks,
        },
    })
}
