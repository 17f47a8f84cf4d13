//! `kvasir policy`: which policies serve a running host.

mod build;
mod new;

use super::HostFlags;
use crate::authoring;
use crate::config::Assigned;
use crate::policy::PolicyConfig;
use crate::policy::inspect::{Inspection, inspect};
use crate::text::printable;
use anyhow::Context;
use clap::{Args, Subcommand};
use kvasir_client::control::PolicySource;
use kvasir_proto as proto;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Look at policies; load, list and roll back those of a running host.
#[derive(Args, Debug)]
pub(super) struct PolicyArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    New(new::NewArgs),
    Build(build::BuildArgs),
    /// Put a policy into service while traffic flows; on any error the present one stays.
    Load {
        /// scheduler, evictor, admitter or balancer.
        slot: String,
        /// Name of a default policy, or file of a component (contains `/` or ends in `.wasm`).
        source: String,
        /// A setting of the policy; may be given several times.
        #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = super::setting)]
        settings: Vec<(String, String)>,
        #[command(flatten)]
        to: Target,
    },
    /// List what serves each slot, and how well.
    List {
        #[command(flatten)]
        to: Target,
    },
    /// Put the previous policy of a slot back into service.
    Rollback {
        slot: String,
        #[command(flatten)]
        to: Target,
    },
    /// Tell what a component is, as a host would find it: its slot, settings, digest, time to load. No host need run.
    Inspect {
        file: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Show what the policies of a slot logged.
    Logs {
        slot: String,
        #[command(flatten)]
        to: Target,
    },
}

#[derive(Args, Debug)]
struct Target {
    #[command(flatten)]
    host: HostFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PolicyArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::New(args) => return Ok(args.run()),
            Action::Build(args) => return Ok(args.run()),
            Action::Load { slot, source, settings, to } => {
                let source = policy_source(source)?;
                let load = async |mut control: kvasir_client::control::Control| {
                    control.load_policy(&slot, source, &settings).await
                };
                to.print_policies(&[to.host.control(load)?]);
            }
            Action::List { to } => {
                let list = async |mut control: kvasir_client::control::Control| {
                    Ok(control.policy.list(proto::ListPoliciesRequest {}).await?.into_inner().policies)
                };
                to.print_policies(&to.host.control(list)?);
            }
            Action::Rollback { slot, to } => {
                let back = async |mut control: kvasir_client::control::Control| {
                    Ok(control.policy.rollback(proto::RollbackRequest { slot }).await?.into_inner().policy)
                };
                to.print_policies(to.host.control(back)?.as_slice());
            }
            Action::Inspect { file, json } => {
                print_inspection(&inspect(&PolicyConfig::default(), &file)?, json)
            }
            Action::Logs { slot, to } => {
                let logs = async |mut control: kvasir_client::control::Control| {
                    Ok(control.policy.logs(proto::LogsRequest { slot }).await?.into_inner())
                };
                to.print_logs(&to.host.control(logs)?);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Target {
    fn print_policies(&self, policies: &[proto::Policy]) {
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

    fn print_logs(&self, logs: &proto::LogsResponse) {
        if self.json {
            let line = |l: &proto::LogLine| serde_json::json!({ "at_ms": l.at_ms, "level": level(l.level), "text": l.text });
            let lines: Vec<_> = logs.lines.iter().map(line).collect();
            println!("{}", serde_json::json!({ "lines": lines, "dropped": logs.dropped }));
            return;
        }
        for l in &logs.lines {
            println!("{:>10.3} s {:5} {}", l.at_ms as f64 / 1e3, level(l.level), l.text);
        }
        if logs.dropped > 0 {
            println!("{} lines over the rate limit were dropped", logs.dropped);
        }
    }
}

/// Tells why a verb of authors failed: exit code 2 if it was asked for wrongly, otherwise 1.
fn failed(error: &authoring::Error) -> ExitCode {
    eprintln!("kvasir: {error}");
    ExitCode::from(if error.is_usage() { 2 } else { 1 })
}

/// The longest text of a policy on one line of a terminal.
const LINE_BYTES: usize = 200;

fn print_inspection(found: &Inspection, json: bool) {
    let Inspection { slot, description, digest, bytes, imports, exports, load_time } = found;
    let setting = |s: &kvasir_policy::Setting| serde_json::json!({ "name": s.name, "default": s.default, "doc": s.doc });
    if json {
        let settings: Vec<_> = description.settings.iter().map(setting).collect();
        let object = serde_json::json!({
            "slot": slot.as_str(), "name": description.name, "version": description.version,
            "digest": digest.to_string(), "bytes": bytes, "imports": imports, "exports": exports,
            "settings": settings, "load_ms": load_time.as_secs_f64() * 1e3,
        });
        return println!("{object}");
    }
    println!("{slot} {} {}", description.name, description.version);
    println!("digest   {digest}");
    println!("size     {bytes} B");
    println!("load     {:.1} ms, compiled anew", load_time.as_secs_f64() * 1e3);
    for (word, names) in [("imports", imports), ("exports", exports)] {
        names.iter().for_each(|name| println!("{word:<8} {}", printable(name, LINE_BYTES)));
    }
    for s in &description.settings {
        let [default, doc] = [&s.default, &s.doc].map(|text| printable(text, LINE_BYTES));
        println!("setting  {}={default}  {doc}", s.name);
    }
}

fn level(level: u32) -> &'static str {
    ["error", "warn", "info", "debug"].get(level.wrapping_sub(1) as usize).copied().unwrap_or("debug")
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

fn policy_source(source: String) -> anyhow::Result<PolicySource> {
    if !Assigned::is_path(&source) {
        return Ok(PolicySource::Builtin(source));
    }
    let bytes = std::fs::read(&source).with_context(|| format!("cannot read policy file {source}"))?;
    let name = Path::new(&source).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(PolicySource::Component { name, bytes })
}
