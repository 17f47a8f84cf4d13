//! A chain: several schedulers that decide together. Filters take candidates out, scorers say how good those left are, each
//! with a weight, and the picker at the end chooses. To the slot it is one policy.
//!
//! Filters and scorers are asked `explain` (see the contract), for every request and within the deadline of a decision;
//! what any scheduler explains can so be combined with what another one does.

mod file;
#[cfg(test)]
mod tests;

pub use file::{is_chain, parse, read, text};

use super::SlotKind;
use super::fault::{Error, Fault};
use super::record::bits;
use super::scheduler::SchedulerEngine;
use super::slot::{ChainPart, Policy, Source};
use crate::fleet::{Invalid, check_scores};
use kvasir_policy::Description;
use kvasir_policy::scheduler::{Column, Decision, Layout, Question, Reason, eligibility};
use serde::{Deserialize, Serialize};

/// Parts of one chain, the picker among them: each is one more instance per deciding thread, and one more call per decision.
pub const PARTS_MAX: usize = 5;
/// What a router is told to wait if the filters leave nobody.
const RETRY_MS: u32 = 1_000;

/// What a part of a chain is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Takes out the slots of which it says +infinity.
    Filter,
    /// What it says counts from 0 for the best candidate of a request to its weight, in thousandths, for the worst.
    Score { weight_permille: u32 },
    /// Chooses; the last of a chain, and its only one.
    Pick,
}

/// What can be told of a chain before its parts are compiled.
///
/// # Errors
/// [`Error::Chain`].
pub(super) fn check(slot: SlotKind, name: &str, parts: &[ChainPart]) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::Chain { name: name.into(), reason });
    if slot != SlotKind::Scheduler {
        return refuse(format!("the {slot} is one policy; only schedulers form chains"));
    }
    let order = |role: &Role| match role {
        Role::Filter => 0,
        Role::Score { .. } => 1,
        Role::Pick => 2,
    };
    let picks_last = parts.last().is_some_and(|part| part.role == Role::Pick);
    let in_order = parts.is_sorted_by_key(|part| order(&part.role));
    let pickers = parts.iter().filter(|part| part.role == Role::Pick).count();
    match parts.len() {
        2..=PARTS_MAX if picks_last && in_order && pickers == 1 => {}
        2..=PARTS_MAX => return refuse("filters come first, then scorers, then one picker".into()),
        n => return refuse(format!("{n} parts, where 2 to {PARTS_MAX} can be, the picker among them")),
    }
    match parts.iter().find(|part| matches!(part.source, Source::Chain { .. })) {
        Some(_) => refuse("one of its parts is a chain itself".into()),
        None => Ok(()),
    }
}

/// What a filter or scorer said of the candidates of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartSaid {
    pub name: String,
    pub role: Role,
    /// As the part gave them, as bits; of the decode table after those of the prefill table, or of neither.
    pub scores: Vec<u32>,
}

/// A part, ready to be asked.
pub(super) struct Part {
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) engine: Box<dyn SchedulerEngine>,
}

/// See the module documentation. Parts keep no state that a successor could take over, except for the picker.
pub(super) struct Chain {
    description: Description,
    /// Filters and scorers, in their order.
    parts: Vec<Part>,
    picker: Part,
    prefill: Said,
    decode: Said,
    /// In front of the part that is asked next.
    question: Question,
}

/// What the parts said so far of the slots of one table.
#[derive(Default)]
struct Said {
    slots: usize,
    /// Whether a filter took the slot out.
    out: Vec<bool>,
    /// Weighed sum.
    sum: Vec<f32>,
    filtered: bool,
    scored: bool,
}

impl Said {
    fn open(&mut self, slots: u32) {
        *self = Self { slots: slots as usize, ..Self::default() };
    }

    fn begin(&mut self) {
        self.out.clear();
        self.out.resize(self.slots, false);
        self.sum.clear();
        self.sum.resize(self.slots, 0.0);
        (self.filtered, self.scored) = (false, false);
    }

    fn filter(&mut self, scores: &[f32]) {
        for (out, score) in self.out.iter_mut().zip(scores) {
            *out |= *score == f32::INFINITY;
        }
        self.filtered |= !scores.is_empty();
    }

    /// Adds what a scorer says, brought to 0 for its best and `weight` for its worst candidate: so can those that think in
    /// milliseconds be weighed beside those that think in shares.
    fn score(&mut self, scores: &[f32], weight: f32) {
        if scores.is_empty() {
            return;
        }
        let left = || scores.iter().zip(&self.out).filter(|(score, out)| score.is_finite() && !**out);
        let least = left().fold(f32::INFINITY, |least, (&score, _)| least.min(score));
        let most = left().fold(f32::NEG_INFINITY, |most, (&score, _)| most.max(score));
        let per_unit = if most > least { weight / (most - least) } else { 0.0 };
        for (sum, &score) in self.sum.iter_mut().zip(scores) {
            *sum += if score.is_finite() { (score - least) * per_unit } else { f32::INFINITY };
        }
        self.scored = true;
    }

    /// Nobody is left of a table that has slots.
    fn nobody(&self) -> bool {
        self.filtered && self.out.iter().all(|&out| out)
    }

    fn is_out(&self, slot: u32) -> bool {
        self.out.get(slot as usize).copied().unwrap_or(false)
    }

    /// Writes the instances that can serve the request to `column`: those of `before`, as the host said it, without those taken out.
    /// Returns false if nothing restricts them.
    fn eligible(&self, before: Option<&[u32]>, column: &mut [u32]) -> bool {
        match before {
            Some(before) => column.copy_from_slice(before),
            None => column.fill(eligibility::CAN),
        }
        for (word, _) in column.iter_mut().zip(&self.out).filter(|(_, out)| **out) {
            *word = eligibility::CANNOT;
        }
        before.is_some() || self.filtered
    }

    fn scores(&self, column: &mut [u32]) -> bool {
        for (word, sum) in column.iter_mut().zip(&self.sum) {
            *word = sum.to_bits();
        }
        self.scored
    }
}

impl Chain {
    /// `parts` as [`check`] has them, the picker apart.
    pub(super) fn new(name: &str, parts: Vec<Part>, picker: Part) -> Self {
        let description = Description::scheduler(name, env!("CARGO_PKG_VERSION"));
        let (prefill, decode, question) = Default::default();
        Self { description, parts, picker, prefill, decode, question }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Part> {
        self.parts.iter_mut().chain([&mut self.picker])
    }

    fn tell(
        &mut self,
        f: impl Fn(&mut (dyn SchedulerEngine + 'static)) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.all().try_for_each(|part| f(&mut *part.engine).map_err(|fault| of(part, fault)))
    }

    /// Asks filters and scorers one after the other, each about what those before it left. `hear` is told what each says.
    fn ask_parts(&mut self, question: &Question, mut hear: impl FnMut(&Part, &[f32])) -> Result<(), Fault> {
        let Self { parts, prefill, decode, question: asked, .. } = self;
        prefill.begin();
        decode.begin();
        write(asked, question, prefill, decode, false);
        for part in parts {
            let scores = part.engine.score(asked).map_err(|fault| of(part, fault))?;
            let invalid = |e: Invalid| Fault::Invalid(e.to_string());
            check_scores(&scores, prefill.slots, decode.slots).map_err(|e| of(part, invalid(e)))?;
            hear(part, &scores);
            let (of_prefill, of_decode) = scores.split_at(scores.len().min(prefill.slots));
            match part.role {
                Role::Filter => {
                    prefill.filter(of_prefill);
                    decode.filter(of_decode);
                    write(asked, question, prefill, decode, false);
                }
                Role::Score { weight_permille } => {
                    let weight = weight_permille as f32 / 1e3;
                    prefill.score(of_prefill, weight);
                    decode.score(of_decode, weight);
                }
                Role::Pick => {}
            }
        }
        write(asked, question, prefill, decode, true);
        Ok(())
    }

    fn pick(&mut self) -> Result<Decision, Fault> {
        if self.prefill.nobody() || self.decode.nobody() {
            return Ok(Decision::reject(Reason::NoInstance, RETRY_MS));
        }
        let Self { picker, question, prefill, decode, .. } = self;
        let decision = picker.engine.schedule(question).map_err(|fault| of(picker, fault))?;
        match decision {
            Decision::Run(run) if prefill.is_out(run.prefill) || decode.is_out(run.decode) => {
                let Part { name, .. } = picker;
                Err(Fault::Invalid(format!("`{name}` chose what a filter of the chain took out")))
            }
            decision => Ok(decision),
        }
    }
}

/// The question as the host asked it, with what the chain's parts made of it.
fn write(into: &mut Question, from: &Question, prefill: &Said, decode: &Said, to_picker: bool) {
    into.begin_like(from);
    let columns = from.candidates();
    for column in Column::ALL {
        let before = columns.column(column);
        into.add(column, |_, slots| match column {
            Column::EligiblePrefill => prefill.eligible(before, slots),
            Column::EligibleDecode => decode.eligible(before, slots),
            Column::ScorePrefill => to_picker && prefill.scores(slots),
            Column::ScoreDecode => to_picker && decode.scores(slots),
            _ => before.map(|before| slots.copy_from_slice(before)).is_some(),
        });
    }
}

/// The same, naming the part at fault, and the function of it that was called.
fn of(part: &Part, fault: Fault) -> Fault {
    let name = match (&part.name, part.engine.called()) {
        (name, "") => format!("`{name}`"),
        (name, called) => format!("`{name}` in `{called}`"),
    };
    match fault {
        Fault::Trap(text) => Fault::Trap(format!("{name}: {text}")),
        Fault::Invalid(text) => Fault::Invalid(format!("{name}: {text}")),
        other => other,
    }
}

impl Policy for Chain {
    fn describe(&mut self) -> Result<Description, Fault> {
        Ok(self.description.clone())
    }

    /// Each part has settings of its own, and got them when it was made.
    fn configure(&mut self, settings: &[(String, String)]) -> Result<Result<(), String>, Fault> {
        Ok(match settings.first() {
            Some((name, _)) => Err(format!("`{name}`: a chain has no settings; its parts have, in its file")),
            None => Ok(()),
        })
    }

    fn export_state(&mut self) -> Result<Vec<u8>, Fault> {
        self.picker.engine.export_state()
    }

    fn import_state(&mut self, state: &[u8]) -> Result<Result<(), String>, Fault> {
        self.picker.engine.import_state(state)
    }
}

impl SchedulerEngine for Chain {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        let Layout { prefill_slots, decode_slots, .. } = Layout::decode(layout);
        self.prefill.open(prefill_slots);
        self.decode.open(decode_slots);
        self.tell(|engine| engine.open(layout))
    }

    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.tell(|engine| engine.update_prefill(rows))
    }

    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.tell(|engine| engine.update_decode(rows))
    }

    fn update_links(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.tell(|engine| engine.update_links(rows))
    }

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.tell(|engine| engine.set_thresholds(values))
    }

    fn schedule(&mut self, question: &Question) -> Result<Decision, Fault> {
        self.ask_parts(question, |_, _| {})?;
        self.pick()
    }

    /// The weighed sums; what the picker says if nobody scored.
    fn explain(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        self.ask_parts(question, |_, _| {})?;
        if !self.prefill.scored && !self.decode.scored {
            let Self { picker, question, .. } = self;
            return picker.engine.explain(question).map_err(|fault| of(picker, fault));
        }
        let shown = |said: &Said| -> Vec<f32> {
            let score = |(sum, out): (&f32, &bool)| if *out { f32::INFINITY } else { *sum };
            said.sum.iter().zip(&said.out).map(score).collect()
        };
        Ok([shown(&self.prefill), shown(&self.decode)].concat())
    }

    fn score(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        self.explain(question)
    }

    fn parts(&mut self, question: &Question) -> Result<Vec<PartSaid>, Fault> {
        let mut said = Vec::new();
        self.ask_parts(question, |part, scores| {
            said.push(PartSaid { name: part.name.clone(), role: part.role, scores: bits(scores) });
        })?;
        Ok(said)
    }
}
