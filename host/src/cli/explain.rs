//! `kvasir explain`: why a request went where it did, and where a block is.

use super::HostFlags;
use anyhow::Context;
use clap::{Args, Subcommand};
use kvasir_client::control::{Control, ControlError};
use kvasir_proto as proto;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Tell why a request went where it did, or where a block is and who evicted it. Changes nothing.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct ExplainArgs {
    #[command(subcommand)]
    what: Option<What>,
    /// Id of a decision, as in the answer of `Schedule`: the same as `kvasir explain request ID`. Without one, the newest.
    #[arg(value_name = "ID")]
    id: Option<u64>,
    #[command(flatten)]
    flags: DecisionFlags,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Tell why a request went where it did; exit code 1 if the decision is not kept any more.
    Request {
        /// Id of the decision, as in the answer of `Schedule`.
        id: u64,
        #[command(flatten)]
        flags: DecisionFlags,
    },
    /// Tell where a block is, or who evicted it, when, why and at which rank; exit code 1 if it is nowhere.
    Block {
        /// Name of a block, or 0x and 32 hexadecimal digits.
        key: String,
        #[command(flatten)]
        host: HostFlags,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args, Debug)]
struct DecisionFlags {
    #[command(flatten)]
    host: HostFlags,
    /// Print one JSON object.
    #[arg(long, conflicts_with = "record")]
    json: bool,
    /// Print the decision as a line of a recording, for `kvasir policy run --on`.
    #[arg(long)]
    record: bool,
}

impl ExplainArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match (self.what, self.id) {
            (Some(What::Request { id, flags }), _) => flags.decision(id),
            (Some(What::Block { key, host, json }), _) => block(&key, &host, json),
            (None, Some(id)) => self.flags.decision(id),
            (None, None) => self.flags.decision(0),
        }
    }
}

impl DecisionFlags {
    fn decision(&self, id: u64) -> anyhow::Result<ExitCode> {
        let request = proto::ExplainDecisionRequest { id, record: self.record };
        let asked = self
            .host
            .control(async |mut control: Control| Ok(control.explain.decision(request).await?.into_inner()));
        let Some(found) = or_nothing(asked)? else { return Ok(ExitCode::from(1)) };
        if self.record {
            anyhow::ensure!(!found.record.is_empty(), "decision {id} is too long for one answer");
            println!("{}", found.record);
        } else if self.json {
            println!("{}", decision_json(&found));
        } else {
            print_decision(&found);
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What is not there is told on standard error, and is no error.
fn or_nothing<R>(asked: anyhow::Result<R>) -> anyhow::Result<Option<R>> {
    let error = match asked {
        Ok(found) => return Ok(Some(found)),
        Err(error) => error,
    };
    match error.downcast_ref() {
        Some(ControlError::Refused { code, message }) if *code == tonic::Code::NotFound => {
            eprintln!("kvasir: {message}");
            Ok(None)
        }
        _ => Err(error),
    }
}

fn print_decision(found: &proto::ExplainDecisionResponse) {
    println!("decision {}, {}", found.id, super::policy::moment(found.at_ms));
    println!("{}", found.summary);
    let output =
        if found.output_tokens == 0 { "unknown".to_owned() } else { found.output_tokens.to_string() };
    println!(
        "request    {} prompt tokens, {output} output tokens expected, class {}, tenant {}, session {}{}",
        found.prompt_tokens,
        found.class,
        found.tenant,
        found.session,
        if found.asked_again { "; asked twice, for another decision came between" } else { "" },
    );
    print_policy("scheduler", found.scheduler.as_ref());
    if let Some(admitted) = &found.admitter {
        print_policy("admitter", admitted.policy.as_ref());
        println!(
            "           {}; expected TTFT {:.1} ms (queue {:.1}, transfer {:.1}, prefill {:.1}), TBT {:.1} ms, hand-over {:.1} ms",
            admitted.verdict,
            admitted.ttft_ms,
            admitted.queue_ms,
            admitted.transfer_ms,
            admitted.prefill_ms,
            admitted.tbt_ms,
            admitted.handover_ms,
        );
    }
    println!("scores     {}", scores_from(found.scores_from()));
    for (title, table) in [("prefill", &found.prefill), ("decode", &found.decode)] {
        if let Some(table) = table {
            print_candidates(title, table);
        }
    }
}

fn print_policy(title: &str, policy: Option<&proto::PolicyUsed>) {
    let Some(policy) = policy else { return };
    let settings: String = policy.settings.iter().map(|s| format!(" {}={}", s.name, s.value)).collect();
    let digest =
        if policy.digest.is_empty() { "native" } else { &policy.digest[..12.min(policy.digest.len())] };
    let took = policy.ns as f64 / 1e3;
    let proto::PolicyUsed { name, version, generation, .. } = policy;
    println!("{title:<10} {name} {version}, {digest}, generation {generation},{settings} {took:.1} µs");
}

fn scores_from(from: proto::ScoresFrom) -> &'static str {
    match from {
        proto::ScoresFrom::Unspecified => "none: the policy gives none, or serves no more",
        proto::ScoresFrom::Decision => "as they were with the decision",
        proto::ScoresFrom::AskedAgain => "of another instance of the policy, asked just now",
        proto::ScoresFrom::AskedAgainOtherwise => {
            "of another instance of the policy, which decides otherwise: the policy remembers earlier decisions"
        }
    }
}

/// A row for each instance; `score` only if there are any.
fn print_candidates(title: &str, table: &proto::Candidates) {
    let scored = table.rows.iter().any(|row| row.score.is_some());
    let mut out = comfy_table::Table::new();
    out.load_style(comfy_table::presets::NOTHING);
    let columns = table.columns.iter().map(String::as_str);
    out.set_header(["", title].into_iter().chain(scored.then_some("score")).chain(columns));
    for row in &table.rows {
        let mark = match (row.chosen, row.source, row.barred.as_str()) {
            (true, ..) => "chosen",
            (_, true, _) => "source",
            (.., barred) => barred,
        };
        let name = if row.instance.is_empty() { format!("slot {}", row.slot) } else { row.instance.clone() };
        let score = scored.then(|| row.score.map_or(String::new(), number));
        let values = row.values.iter().copied().map(number);
        out.add_row([mark.to_owned(), name].into_iter().chain(score).chain(values));
    }
    println!("{out}");
}

/// Empty for what is not known, a dash for what was not considered.
pub(super) fn number(value: f32) -> String {
    match value {
        f32::NEG_INFINITY => String::new(),
        value if !value.is_finite() => "-".to_owned(),
        value if value.fract() == 0.0 => format!("{value}"),
        value => format!("{value:.2}"),
    }
}

/// The shortest decimal number that is this float; null for what is not finite.
fn exact(value: f32) -> Value {
    format!("{value}").parse::<f64>().ok().filter(|value| value.is_finite()).map_or(Value::Null, |v| json!(v))
}

fn decision_json(found: &proto::ExplainDecisionResponse) -> Value {
    let rejected = found.rejected.as_ref();
    let admitter = found.admitter.as_ref().map(|admitted| {
        json!({
            "policy": admitted.policy.as_ref().map(policy_json), "verdict": admitted.verdict,
            "reason": admitted.reason, "retry_after_ms": admitted.retry_after_ms,
            "ttft_ms": exact(admitted.ttft_ms), "tbt_ms": exact(admitted.tbt_ms),
            "tenant_share": exact(admitted.tenant_share), "queue_ms": exact(admitted.queue_ms),
            "prefill_ms": exact(admitted.prefill_ms), "transfer_ms": exact(admitted.transfer_ms),
            "cached_tokens": exact(admitted.cached_tokens), "handover_ms": exact(admitted.handover_ms),
        })
    });
    let scores = match found.scores_from() {
        proto::ScoresFrom::Unspecified => "none",
        proto::ScoresFrom::Decision => "decision",
        proto::ScoresFrom::AskedAgain => "asked_again",
        proto::ScoresFrom::AskedAgainOtherwise => "asked_again_otherwise",
    };
    json!({
        "id": found.id, "at_ms": found.at_ms, "summary": found.summary,
        "request": {
            "prompt_tokens": found.prompt_tokens, "output_tokens": found.output_tokens, "class": found.class,
            "tenant": found.tenant, "session": found.session, "asked_again": found.asked_again,
        },
        "scheduler": found.scheduler.as_ref().map(policy_json),
        "transfer_blocks": found.chosen.as_ref().map(|chosen| chosen.transfer_blocks),
        "rejected": rejected.map(|r| json!({ "reason": r.reason, "retry_after_ms": r.retry_after_ms })),
        "admitter": admitter,
        "scores_from": scores,
        "prefill": found.prefill.as_ref().map(candidates_json),
        "decode": found.decode.as_ref().map(candidates_json),
    })
}

fn policy_json(policy: &proto::PolicyUsed) -> Value {
    let settings: serde_json::Map<String, Value> =
        policy.settings.iter().map(|s| (s.name.clone(), Value::String(s.value.clone()))).collect();
    json!({
        "name": policy.name, "version": policy.version, "digest": policy.digest,
        "generation": policy.generation, "settings": settings, "fallback": policy.fallback, "ns": policy.ns,
    })
}

fn candidates_json(table: &proto::Candidates) -> Value {
    let row = |row: &proto::Candidate| {
        let values: serde_json::Map<String, Value> = table
            .columns
            .iter()
            .zip(&row.values)
            .map(|(name, value)| (name.clone(), exact(*value)))
            .collect();
        json!({
            "slot": row.slot, "instance": row.instance, "chosen": row.chosen, "source": row.source,
            "barred": row.barred, "score": row.score.map(exact), "values": values,
        })
    };
    Value::Array(table.rows.iter().map(row).collect())
}

fn block(key: &str, host: &HostFlags, as_json: bool) -> anyhow::Result<ExitCode> {
    let keys = super::blocks::keys(&[key.to_owned()])?;
    let key = keys.first().context("a key")?;
    let request = proto::ExplainBlockRequest { key: key.0.to_be_bytes().into() };
    let found =
        host.control(async |mut control: Control| Ok(control.explain.block(request).await?.into_inner()))?;
    if as_json {
        println!("{}", block_json(&key.to_string(), &found));
    } else {
        print_block(&found);
    }
    Ok(super::there(found.block.is_some()))
}

fn print_block(found: &proto::ExplainBlockResponse) {
    println!("{}", found.summary);
    if let Some(block) = &found.block {
        println!("tiers      {}", super::blocks::tier_names(block.tiers as u8).join(", "));
    }
    if !found.peers.is_empty() {
        println!("peers      {}", found.peers.join(", "));
    }
    for eviction in &found.evictions {
        println!(
            "chosen     {} by {} (generation {}{}), place {} of {}; {:.1} s in the pool, {} uses, idle for {:.1} s; to {}",
            super::policy::moment(eviction.at_ms),
            eviction.policy,
            eviction.generation,
            if eviction.fallback { ", its native twin" } else { "" },
            eviction.rank,
            eviction.of,
            eviction.resident_ms as f64 / 1e3,
            eviction.uses,
            eviction.idle_ms as f64 / 1e3,
            if eviction.to == "host" { "where the host decides" } else { &eviction.to },
        );
    }
}

fn block_json(key: &str, found: &proto::ExplainBlockResponse) -> Value {
    let eviction = |e: &proto::Eviction| {
        json!({
            "at_ms": e.at_ms, "policy": e.policy, "generation": e.generation, "fallback": e.fallback,
            "rank": e.rank, "of": e.of, "resident_ms": e.resident_ms, "idle_ms": e.idle_ms, "uses": e.uses,
            "to": e.to,
        })
    };
    json!({
        "key": key, "summary": found.summary,
        "tiers": found.block.as_ref().map(|block| super::blocks::tier_names(block.tiers as u8)),
        "peers": found.peers,
        "cause": found.cause, "remembered_since_ms": found.remembered_since_ms,
        "evictions": found.evictions.iter().map(eviction).collect::<Vec<_>>(),
    })
}
