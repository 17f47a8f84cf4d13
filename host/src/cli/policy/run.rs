//! `kvasir policy run`.

use crate::explain::rerun::{self, RerunError, Tally};
use crate::explain::{Found, words};
use crate::policy::chain::PartSaid;
use crate::policy::record::{PlayError, Played, Player, PolicyOf, Record, Records};
use crate::policy::{Digest, Engine, PolicyConfig, SlotKind, Source, builtin_names};
use crate::replay::contender::Contender;
use crate::text::printable;
use anyhow::Context;
use clap::Args;
use serde_json::json;
use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;

/// Ask a policy what was decided before, from a recording, and show both choices. With the candidates and the scores of each.
/// No host need run. Exit code 1 if the policy fails.
#[derive(Args, Debug)]
pub(super) struct RunArgs {
    /// Name of a default policy, or file of a component or chain (contains `/` or ends in `.wasm` or `.toml`).
    policy: String,
    /// The recording: a file that `[explain]` of a host has written, or lines of `kvasir explain ID --record`.
    #[arg(long, value_name = "FILE")]
    on: PathBuf,
    /// The decision with this id; without it the first of the policy's slot.
    #[arg(long, value_name = "N", conflicts_with = "all")]
    id: Option<u64>,
    /// Ask about all decisions, and count those that it decides as recorded.
    #[arg(long)]
    all: bool,
    /// A setting of the policy; may be given several times. Default: those of the record, if it is of this very policy.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = super::super::setting)]
    settings: Vec<(String, String)>,
    /// A default policy as it is compiled into this binary, not its component.
    #[arg(long)]
    native: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl RunArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let player = self.player()?;
        let file = File::open(&self.on)
            .with_context(|| format!("cannot open the recording {}", self.on.display()))?;
        let records = Records::new(BufReader::new(file));
        if self.all {
            let tally = rerun::all(&player, records)?;
            if tally.same + tally.different + tally.failed + tally.natively == 0 {
                return Err(RerunError::NoRecord { slot: player.slot() }.into());
            }
            self.print_tally(&tally);
            return Ok(ExitCode::from(u8::from(tally.failed > 0)));
        }
        let record = rerun::find(player.slot(), self.id, records)?;
        match player.play(&record, true) {
            Ok(played) => {
                self.print(&record, &played);
                Ok(ExitCode::SUCCESS)
            }
            Err(PlayError::Fault { function, fault }) => {
                eprintln!("kvasir: the policy failed on decision {}: `{function}` {fault}", record.id);
                if let Some(said) = player.last_words() {
                    eprintln!("kvasir: the last line of its log: {}", printable(&said, 1 << 10));
                }
                Ok(ExitCode::from(1))
            }
            Err(other) => Err(other.into()),
        }
    }

    fn player(&self) -> anyhow::Result<Player> {
        let config = PolicyConfig::unhurried();
        let engine = Engine::new(&config, None)?;
        let (slot, source) = source(&self.policy, self.native)?;
        let settings = match self.settings.is_empty() {
            true => self.recorded_settings(slot, &source)?,
            false => self.settings.clone(),
        };
        Ok(Player::new(&engine, &config, slot, source, settings)?)
    }

    /// Those of the first record that is asked and was decided by this very policy; it answers its own records with them alone.
    fn recorded_settings(&self, slot: SlotKind, source: &Source) -> anyhow::Result<Vec<(String, String)>> {
        let digest = match source {
            Source::File(path) => std::fs::read(path).ok().map(|bytes| Digest::of(&bytes).to_string()),
            _ => None,
        };
        let is_it = |of: &PolicyOf| match source {
            Source::File(_) => digest.is_some() && of.digest == digest,
            named => of.name == named.name(),
        };
        let file = File::open(&self.on)
            .with_context(|| format!("cannot open the recording {}", self.on.display()))?;
        for record in Records::new(BufReader::new(file)) {
            // What cannot be read is told when it is asked.
            let Ok(record) = record else { break };
            let is_asked = record.slot == slot.as_str() && self.id.is_none_or(|id| id == record.id);
            if is_asked && is_it(&record.policy) && !record.policy.settings.is_empty() {
                let settings = record.policy.settings;
                let shown: Vec<_> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
                eprintln!(
                    "kvasir: with the settings of the record: {}",
                    printable(&shown.join(" "), 1 << 10)
                );
                return Ok(settings);
            }
        }
        Ok(Vec::new())
    }

    fn print_tally(&self, tally: &Tally) {
        let Tally { same, different, natively, failed, others, differing, first_failure } = tally;
        if self.json {
            let failure = first_failure.as_ref().map(|(id, reason)| json!({ "id": id, "reason": reason }));
            let object = json!({
                "same": same, "different": different, "natively": natively, "failed": failed, "others": others,
                "differing": differing, "first_failure": failure,
            });
            return println!("{object}");
        }
        println!("same       {same}");
        println!("different  {different}{}", first_ids(differing));
        println!("failed     {failed}");
        println!("not asked  {natively} that a native twin decided, {others} of other slots");
        if let Some((id, reason)) = first_failure {
            println!("decision {id}: {reason}");
        }
    }

    fn print(&self, record: &Record, played: &Played) {
        let same = rerun::is_same(&record.asked.name, &played.answer, &record.answer);
        let found = Found::of_record(record);
        let now = found.clone().and_then(|mut found| {
            found.decided.decision = rerun::decision(&played.answer)?;
            found.scores = played.scores.iter().copied().map(f32::from_bits).collect();
            Some(found)
        });
        if self.json {
            let object = json!({
                "id": record.id, "slot": record.slot, "at_ms": record.at_ms,
                "recorded": { "policy": record.policy.name, "version": record.policy.version,
                    "digest": record.policy.digest, "fallback": record.fallback, "answer": record.answer,
                    "scores": record.scores },
                "answer": played.answer, "scores": played.scores, "same": same,
            });
            return println!("{object}");
        }
        let policy = format!("{} {}", record.policy.name, record.policy.version);
        let answer = rerun::answer(&record.asked.name, &record.answer);
        println!("decision {} of the {}, {}", record.id, record.slot, super::moment(record.at_ms));
        match &record.fallback {
            None => println!("recorded   {answer} by {policy}"),
            Some(reason) if record.answer.is_empty() => {
                println!("recorded   nothing: {policy} failed: {reason}")
            }
            Some(reason) => {
                println!("recorded   {answer} by the native twin of {policy}, which failed: {reason}");
            }
        }
        println!(
            "now        {}, {}",
            rerun::answer(&record.asked.name, &played.answer),
            if same { "the same" } else { "another" }
        );
        if let (Some(then), Some(now)) = (&found, &now) {
            print_tables(then, now, &played.parts);
        }
    }
}

fn first_ids(ids: &[u64]) -> String {
    if ids.is_empty() {
        return String::new();
    }
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    format!(", the first: {}", ids.join(", "))
}

/// The slot of a policy, and where it comes from.
fn source(policy: &str, native: bool) -> anyhow::Result<(SlotKind, Source)> {
    if Source::is_path(policy) {
        anyhow::ensure!(!native, "--native is for default policies, by name");
        let found = Contender::find(policy, None, Vec::new())?;
        return Ok((found.slot, found.choice.source));
    }
    let slot = SlotKind::ALL.into_iter().find(|slot| builtin_names(*slot).contains(&policy));
    let slot = slot.with_context(|| {
        let known: Vec<&str> = SlotKind::ALL.into_iter().flat_map(builtin_names).collect();
        let near = crate::config::did_you_mean(policy, known.iter().copied());
        format!(
            "no default policy is called `{policy}`; {near}known: {}; a file contains `/` or ends in .wasm",
            known.join(", ")
        )
    })?;
    let name = policy.to_owned();
    Ok((slot, if native { Source::Native(name) } else { Source::Builtin(name) }))
}

/// What the policy saw of each candidate, with the choice and the scores of then and now; `parts` are those of a chain, now.
fn print_tables(then: &Found, now: &Found, parts: &[PartSaid]) {
    let slots = then.question.slots()[0];
    let prefill = words::prefill(then).with_parts(parts, |slot| slot as usize);
    let decode = words::decode(then).with_parts(parts, |slot| slots + slot as usize);
    for (title, prefill, table) in [("prefill", true, prefill), ("decode", false, decode)] {
        let score = |found: &Found, slot: u32| {
            let at = if prefill { slot as usize } else { slots + slot as usize };
            found.scores.get(at).map_or(String::new(), |score| super::super::explain::number(*score))
        };
        let is = |found: &Found, slot: u32| match found.decided.decision {
            kvasir_policy::scheduler::Decision::Run(p) => slot == if prefill { p.prefill } else { p.decode },
            kvasir_policy::scheduler::Decision::Reject { .. } => false,
        };
        let mut out = comfy_table::Table::new();
        out.load_style(comfy_table::presets::NOTHING);
        let headers = ["", title, "score then", "score now"];
        out.set_header(headers.into_iter().chain(table.columns.iter().map(String::as_str)));
        for row in &table.rows {
            let mark = match (is(then, row.slot), is(now, row.slot)) {
                (true, true) => "chosen",
                (true, false) => "then",
                (false, true) => "now",
                (false, false) => row.barred.as_deref().unwrap_or_default(),
            };
            let slot = format!("slot {}", row.slot);
            let first = [mark.to_owned(), slot, score(then, row.slot), score(now, row.slot)];
            let values = row.values.iter().copied().map(super::super::explain::number);
            out.add_row(first.into_iter().chain(values));
        }
        println!("{out}");
    }
}
