//! `kvasir policy status`.

use super::{SlotOf, list, moment, stage};
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;

/// Tell how one slot does: since when, how the trial compares, what the guards allow.
#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    of: SlotOf,
}

/// What the host says of one slot.
struct Status {
    policy: proto::Policy,
    guards: proto::Guards,
    /// How the policy came into service, and the trial on trial, if the history still has it.
    served: Option<proto::HistoryEntry>,
    tried: Option<proto::HistoryEntry>,
}

impl StatusArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let SlotOf { slot, to } = self.of;
        let status = to.host.control(async |control| Status::of(control, &slot).await)?;
        if to.json {
            println!("{}", status.json())
        } else {
            status.print()
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Status {
    async fn of(mut control: Control, slot: &str) -> Result<Self, kvasir_client::control::ControlError> {
        let list = control.policy.list(proto::ListPoliciesRequest {}).await?.into_inner();
        let history = proto::HistoryRequest { slot: slot.to_owned(), limit: 0 };
        let entries = control.policy.history(history).await?.into_inner().entries;
        let newest =
            |actions: &[&str]| entries.iter().find(|e| actions.contains(&e.action.as_str())).cloned();
        let policy = list.policies.into_iter().find(|policy| policy.slot == slot).unwrap_or_default();
        Ok(Self {
            served: newest(&["loaded", "set", "promoted", "rolled-back", "started"]),
            tried: newest(&["tried"]).filter(|_| policy.trial.is_some()),
            policy,
            guards: list.guards.unwrap_or_default(),
        })
    }

    fn json(&self) -> Value {
        let came = |entry: &Option<proto::HistoryEntry>| {
            entry.as_ref().map(|e| json!({ "at_ms": e.at_ms, "action": e.action, "who": e.who }))
        };
        let g = &self.guards;
        json!({
            "policy": list::row(&self.policy),
            "serves_since": came(&self.served),
            "on_trial_since": came(&self.tried),
            "guards": {
                "window_s": g.window_s, "calls_min": g.calls_min, "faults_share_max": g.faults_share_max,
                "call_p99_ns_max": g.call_p99_ns_max, "hit_rate_fall_max": g.hit_rate_fall_max,
                "rejected_rise_max": g.rejected_rise_max, "watch_s": g.watch_s,
            },
        })
    }

    fn print(&self) {
        let p = &self.policy;
        println!(
            "{}: {} {}, generation {}{}",
            p.slot,
            p.name,
            p.version,
            p.generation,
            came(self.served.as_ref())
        );
        print_code(&p.engine, &p.digest, &p.settings);
        print_counters(&p.counters.unwrap_or_default());
        print_learning(p.learning.as_ref());
        if !p.previous.is_empty() {
            println!("  previous  {}", p.previous);
        }
        if !p.last_trip.is_empty() {
            println!("  the host stepped in: {}", p.last_trip);
        }
        if p.paused {
            println!("  paused: the trial is not asked, and nothing is swapped by itself");
        }
        if let Some(watch) = &p.watch {
            let left = Duration::from_secs(watch.seconds_left);
            println!(
                "watched for another {}: if a guard is broken, the one before comes back{}",
                humantime::format_duration(left),
                if p.trial.is_some() {
                    "; it is not asked beside the newcomer first, for a trial has its seat"
                } else {
                    ""
                },
            );
            self.print_window(["now", "before"], watch.window.as_ref());
        }
        match &p.trial {
            Some(trial) => self.print_trial(trial),
            None => println!("no trial"),
        }
    }

    fn print_trial(&self, t: &proto::Trial) {
        let stage = stage::words(&t.stage.unwrap_or_default());
        println!(
            "{stage}: {} {}, generation {}{}",
            t.name,
            t.version,
            t.generation,
            came(self.tried.as_ref())
        );
        print_code(&t.engine, &t.digest, &t.settings);
        print_counters(&t.counters.unwrap_or_default());
        if t.asked > 0 {
            let share = percent(Some(t.same as f64 / t.asked as f64));
            println!("  agreement {share}: {} of {} answers are those of the active policy", t.same, t.asked);
        }
        if t.dropped > 0 {
            println!("  not told  {} decisions, for it was behind", t.dropped);
        }
        print_learning(t.learning.as_ref());
        self.print_window(["trial", "active"], t.window.as_ref());
    }

    /// Newcomer and what it is compared with side by side, and where a guard acts.
    fn print_window(&self, heads: [&str; 2], window: Option<&proto::Beside>) {
        let Some(proto::Beside { newcomer: Some(new), compared }) = window else { return };
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        let last = format!("  last {:.0} s", new.seconds);
        table.set_header([&last, heads[0], heads[1], "guard acts"]);
        for (name, value, limit) in rows(&self.guards) {
            // An evictor decides about no request.
            if self.policy.slot == "evictor" && OF_REQUESTS.contains(&name) {
                continue;
            }
            let other = compared.as_ref().map_or_else(none, value);
            table.add_row([format!("  {name}"), value(new), other, limit]);
        }
        println!("{table}");
    }
}

fn print_learning(learning: Option<&proto::Learning>) {
    let Some(proto::Learning { outcomes, dropped, faults, published, knowledge_bytes }) = learning else {
        return;
    };
    println!(
        "  learner   {outcomes} outcomes heard, {dropped} dropped, {faults} failures; published {published} times, \
         {knowledge_bytes} B at last"
    );
}

/// Rows of [`rows`] about requests that were decided.
const OF_REQUESTS: [&str; 5] = ["requests", "rejected", "TTFT, forecast", "TBT, forecast", "cached tokens"];

/// How one number of a window is written.
type Cell = fn(&proto::PolicyWindow) -> String;

/// The numbers of a window, and from where on a guard acts.
fn rows(g: &proto::Guards) -> [(&'static str, Cell, String); 11] {
    let limit = |limit: f64, text: String| if limit > 0.0 { text } else { String::new() };
    let faults = || limit(g.faults_share_max, format!("above {}", percent(Some(g.faults_share_max))));
    let p99 = Duration::from_nanos(g.call_p99_ns_max as u64);
    let points = |share: f64| format!("{:.1} points", 100.0 * share);
    [
        ("calls", |w| count(w.calls), format!("from {} on", g.calls_min)),
        ("trapped", |w| percent(w.trap_share), faults()),
        ("late", |w| percent(w.deadline_miss_share), faults()),
        ("invalid", |w| percent(w.invalid_share), faults()),
        (
            "p99 of a call",
            |w| w.call_ns_p99.map_or_else(none, |ns| format!("{:?}", Duration::from_nanos(ns))),
            limit(g.call_p99_ns_max, format!("above {p99:?}")),
        ),
        ("requests", |w| count(w.requests), String::new()),
        (
            "rejected",
            |w| percent(w.rejected_share),
            limit(g.rejected_rise_max, format!("{} above", points(g.rejected_rise_max))),
        ),
        (
            "hit rate",
            |w| percent(w.hit_rate),
            limit(g.hit_rate_fall_max, format!("{} below", points(g.hit_rate_fall_max))),
        ),
        ("TTFT, forecast", |w| milliseconds(w.ttft_ms), String::new()),
        ("TBT, forecast", |w| milliseconds(w.tbt_ms), String::new()),
        (
            "cached tokens",
            |w| w.cached_tokens.map_or_else(none, |tokens| format!("{tokens:.0}")),
            String::new(),
        ),
    ]
}

fn count(number: u64) -> String {
    if number == 0 { none() } else { number.to_string() }
}

fn none() -> String {
    "-".to_owned()
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(none, |share| format!("{:.1}%", 100.0 * share))
}

fn milliseconds(ms: Option<f64>) -> String {
    ms.map_or_else(none, |ms| format!("{ms:.1} ms"))
}

/// How and when something took its seat.
fn came(entry: Option<&proto::HistoryEntry>) -> String {
    let Some(proto::HistoryEntry { at_ms, action, who, .. }) = entry else { return String::new() };
    format!(", {action} {} by {who}", moment(*at_ms))
}

fn print_code(engine: &str, digest: &str, settings: &[proto::Setting]) {
    println!("  code      {}", list::text(digest).unwrap_or(engine));
    for setting in settings {
        println!("  setting   {}={}", setting.name, setting.value);
    }
}

fn print_counters(c: &proto::PolicyCounters) {
    println!(
        "  calls     {}, {:.0} ns each; {} trapped, {} late, {} invalid; {} decided by the native twin instead",
        c.calls, c.call_ns_mean, c.traps, c.deadline_misses, c.invalid_answers, c.fallbacks
    );
}

pub(super) fn beside(window: &proto::Beside) -> Value {
    let proto::Beside { newcomer, compared } = window;
    json!({ "newcomer": newcomer.as_ref().map(values), "compared": compared.as_ref().map(values) })
}

fn values(w: &proto::PolicyWindow) -> Value {
    json!({
        "seconds": w.seconds, "calls": w.calls, "trap_share": w.trap_share,
        "deadline_miss_share": w.deadline_miss_share, "invalid_share": w.invalid_share,
        "call_ns_p99": w.call_ns_p99, "requests": w.requests, "rejected_share": w.rejected_share,
        "blocks": w.blocks, "hit_rate": w.hit_rate, "ttft_ms": w.ttft_ms, "tbt_ms": w.tbt_ms,
        "cached_tokens": w.cached_tokens,
    })
}
