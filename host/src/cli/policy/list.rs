//! `kvasir policy list`, and how it and its fellows show what serves.

use super::{Target, stage, status};
use clap::Args;
use kvasir_client::control::{Control, ControlError};
use kvasir_proto as proto;
use serde_json::{Value, json};
use std::process::ExitCode;

/// List what serves each slot and what is on trial, and how well.
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
    /// Shows how slots are now; `said` before the table, for people.
    pub(super) fn print_change(&self, said: &str, policy: Option<proto::Policy>) {
        if !self.json {
            println!("{said}");
        }
        self.print_policies(policy.as_slice());
    }

    /// Has a policy take a seat of `slot`, and shows how the slot is then, and which trial that ended.
    pub(super) fn seat(
        &self,
        slot: &str,
        take: impl AsyncFnOnce(Control) -> Result<proto::Policy, ControlError>,
    ) -> anyhow::Result<()> {
        let (ended, policy) = self.host.control(async |mut control: Control| {
            let before = one(&mut control, slot).await;
            let now = take(control).await?;
            let trial = before.and_then(|before| before.trial);
            let goes_on = |old: &proto::Trial| {
                now.trial.as_ref().is_some_and(|trial| trial.generation == old.generation)
            };
            Ok((trial.filter(|old| !goes_on(old)), now))
        })?;
        if let Some(proto::Trial { name, version, .. }) = ended {
            eprintln!(
                "kvasir: the trial of {name} {version} has ended: there is one a slot, and it is held against what serves"
            );
        }
        self.print_policies(&[policy]);
        Ok(())
    }

    pub(super) fn print_policies(&self, policies: &[proto::Policy]) {
        if self.json {
            let rows: Vec<_> = policies.iter().map(row).collect();
            return println!("{}", json!({ "policies": rows }));
        }
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header([
            "slot",
            "stage",
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
        for policy in policies {
            table.add_row(active_cells(policy));
            if let Some(trial) = &policy.trial {
                table.add_row(trial_cells(&policy.slot, trial));
            }
        }
        println!("{table}");
        for p in policies.iter().filter(|p| p.paused) {
            println!(
                "{0}: paused: its trial is not asked, and nothing is swapped by itself; `kvasir policy resume {0}` ends that",
                p.slot
            );
        }
        for p in policies.iter().filter(|p| !p.last_trip.is_empty()) {
            println!("{}: the host stepped in: {}", p.slot, p.last_trip);
        }
    }
}

/// How a slot is. `None`: the caller may not look; who may change it need not be one who may.
pub(super) async fn one(control: &mut Control, slot: &str) -> Option<proto::Policy> {
    let list = control.policy.list(proto::ListPoliciesRequest {}).await.ok()?;
    list.into_inner().policies.into_iter().find(|policy| policy.slot == slot)
}

fn active_cells(p: &proto::Policy) -> [String; 11] {
    let c = p.counters.unwrap_or_default();
    let memory = format!("{:.1} MiB", p.memory_bytes as f64 / f64::from(1 << 20));
    let [calls, ns, faults, fallbacks] = counter_cells(&c);
    let policy = format!("{} {}", p.name, p.version);
    let (slot, engine, generation) = (p.slot.clone(), p.engine.clone(), p.generation.to_string());
    let (stage, previous) = ("active".to_owned(), p.previous.clone());
    [slot, stage, policy, engine, generation, calls, ns, faults, fallbacks, memory, previous]
}

/// The memory of a trial is in that of its slot.
fn trial_cells(slot: &str, t: &proto::Trial) -> [String; 11] {
    let [calls, ns, faults, fallbacks] = counter_cells(&t.counters.unwrap_or_default());
    let policy = format!("{} {}", t.name, t.version);
    let stage = stage::words(&t.stage.unwrap_or_default());
    let (slot, engine, generation) = (slot.to_owned(), t.engine.clone(), t.generation.to_string());
    let none = String::new;
    [slot, stage, policy, engine, generation, calls, ns, faults, fallbacks, none(), none()]
}

fn counter_cells(c: &proto::PolicyCounters) -> [String; 4] {
    let faults = c.traps + c.deadline_misses + c.invalid_answers;
    [c.calls.to_string(), format!("{:.0}", c.call_ns_mean), faults.to_string(), c.fallbacks.to_string()]
}

pub(super) fn row(p: &proto::Policy) -> Value {
    let (c, totals) = (p.counters.unwrap_or_default(), p.totals.unwrap_or_default());
    json!({
        "slot": p.slot, "name": p.name, "version": p.version, "engine": p.engine, "digest": text(&p.digest),
        "generation": p.generation, "settings": settings(&p.settings), "previous": text(&p.previous),
        "last_trip": text(&p.last_trip), "paused": p.paused,
        "calls": c.calls, "ns_mean": c.call_ns_mean, "traps": c.traps, "deadline_misses": c.deadline_misses,
        "invalid_answers": c.invalid_answers, "fallbacks": c.fallbacks,
        "memory_bytes": p.memory_bytes, "memory_bytes_max": p.memory_bytes_max,
        "totals": {
            "calls": totals.calls, "traps": totals.traps, "deadline_misses": totals.deadline_misses,
            "invalid_answers": totals.invalid_answers, "fallbacks": totals.fallbacks,
        },
        "learning": p.learning.as_ref().map(learning),
        "trial": p.trial.as_ref().map(trial),
        "watch": p.watch.as_ref().map(|watch| json!({
            "seconds_left": watch.seconds_left, "window": watch.window.as_ref().map(status::beside),
        })),
    })
}

fn trial(t: &proto::Trial) -> Value {
    let c = t.counters.unwrap_or_default();
    json!({
        "name": t.name, "version": t.version, "engine": t.engine, "digest": text(&t.digest),
        "generation": t.generation, "settings": settings(&t.settings),
        "stage": stage::words(&t.stage.unwrap_or_default()),
        "calls": c.calls, "ns_mean": c.call_ns_mean, "traps": c.traps, "deadline_misses": c.deadline_misses,
        "invalid_answers": c.invalid_answers, "fallbacks": c.fallbacks,
        "asked": t.asked, "same": t.same, "dropped": t.dropped,
        "window": t.window.as_ref().map(status::beside),
        "learning": t.learning.as_ref().map(learning),
    })
}

fn learning(l: &proto::Learning) -> Value {
    json!({
        "outcomes": l.outcomes, "dropped": l.dropped, "faults": l.faults, "published": l.published,
        "knowledge_bytes": l.knowledge_bytes,
    })
}

/// `None` for what is not there.
pub(super) fn text(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

pub(super) fn settings(settings: &[proto::Setting]) -> Value {
    let settings = settings.iter().map(|s| (s.name.clone(), s.value.clone().into()));
    Value::Object(settings.collect())
}
