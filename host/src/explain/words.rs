//! A decision in words, and its candidates in rows.

use super::Found;
use crate::policy::chain::{PartSaid, Role};
use kvasir_policy::admitter::Verdict;
use kvasir_policy::scheduler::{Candidates, DECODE_ROW, Decision, Layout, PREFILL_ROW, Placement, Request};

/// Stands for what is not known of a candidate.
pub const UNKNOWN: f32 = f32::NEG_INFINITY;

/// One table as the policy knew it.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Names of the values in each row, with their units.
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub slot: u32,
    /// Number of the registration; 0 for an empty slot.
    pub identity: u32,
    /// Why it could not be chosen.
    pub barred: Option<String>,
    pub values: Vec<f32>,
}

/// A column: its name, and its value for a slot and the row of its table.
type Column<'a> = (&'static str, Box<dyn Fn(usize, &[f32]) -> f32 + 'a>);

pub fn prefill(found: &Found) -> Table {
    let (candidates, now) = (found.question.candidates(), found.question.now());
    let mut columns: Vec<Column<'_>> = Vec::new();
    columns.push(("prefix, blocks", Box::new(move |slot, _| candidates.prefix_of(slot) as f32)));
    columns.extend(near([candidates.prefix_in_hbm(), candidates.prefix_in_dram()]));
    columns.push(("queue, ms", Box::new(move |_, row| (row[2] - now).max(0.0))));
    columns.push(("queued", Box::new(|_, row| row[8])));
    columns.push(("waiting", Box::new(|_, row| known(row[16]))));
    columns.push(("free blocks", Box::new(|_, row| row[9])));
    columns.push(("reported before, ms", Box::new(move |_, row| (now - row[11]).max(0.0))));
    let can = |slot| candidates.can_prefill(slot);
    table(&found.tables.prefill, PREFILL_ROW, columns, can)
}

pub fn decode(found: &Found) -> Table {
    let (candidates, now) = (found.question.candidates(), found.question.now());
    let mut columns: Vec<Column<'_>> = Vec::new();
    if candidates.prefix_at_decode().is_some() {
        columns.push(("prefix, blocks", Box::new(move |slot, _| candidates.prefix_of_decode(slot) as f32)));
    }
    columns.extend(near([candidates.prefix_at_decode_in_hbm(), candidates.prefix_at_decode_in_dram()]));
    columns.push(("sequences", Box::new(|_, row| row[2])));
    columns.push(("arriving", Box::new(|_, row| row[9])));
    columns.push(("context, tokens", Box::new(|_, row| row[3])));
    columns.push(("step, ms", Box::new(|_, row| row[6] + row[7] * row[2] + row[8] * row[3])));
    columns.push(("waiting", Box::new(|_, row| known(row[16]))));
    columns.push(("free blocks", Box::new(|_, row| row[4])));
    columns.push(("reported before, ms", Box::new(move |_, row| (now - row[11]).max(0.0))));
    let can = |slot| candidates.can_decode(slot);
    table(&found.tables.decode, DECODE_ROW, columns, can)
}

/// How much of the prefix is in HBM, and in HBM or DRAM, where instances say it.
fn near<'a>(columns: [Option<&'a [u32]>; 2]) -> impl Iterator<Item = Column<'a>> {
    let named = ["in HBM, blocks", "in HBM or DRAM, blocks"].into_iter().zip(columns);
    named.filter_map(|(name, column)| {
        let column = column?;
        let value = move |slot: usize, _: &[f32]| column.get(slot).map_or(UNKNOWN, |&blocks| blocks as f32);
        Some((name, Box::new(value) as Box<dyn Fn(usize, &[f32]) -> f32>))
    })
}

/// The contract writes -1 for what was not reported.
fn known(value: f32) -> f32 {
    if value < 0.0 { UNKNOWN } else { value }
}

/// Both tables have slot, availability and identity in the same places.
fn table(rows: &[f32], stride: usize, columns: Vec<Column<'_>>, can: impl Fn(usize) -> bool) -> Table {
    let row = |row: &[f32]| {
        let (slot, identity, available) = (row[0] as u32, row[12] as u32, row[1] == 1.0);
        let barred = match (available, can(slot as usize)) {
            (false, _) => Some("takes no requests"),
            (true, false) => Some("serves another model"),
            (true, true) => None,
        };
        let values = columns.iter().map(|(_, value)| value(slot as usize, row)).collect();
        Row { slot, identity, barred: barred.map(str::to_owned), values }
    };
    let stood = |row: &Row| row.identity != 0 || row.barred.is_none();
    let rows = rows.chunks_exact(stride).map(row).filter(stood).collect();
    Table { columns: columns.into_iter().map(|(name, _)| name.to_owned()).collect(), rows }
}

impl Table {
    /// Puts what the filters and scorers of a chain said of the rows in front of the other columns, `number` being that of a
    /// slot among what a part says; one that says nothing of this table has no column. Whom a filter took out could not be chosen.
    pub fn with_parts(mut self, parts: &[PartSaid], number: impl Fn(u32) -> usize) -> Self {
        let heard = |part: &&PartSaid| self.rows.iter().any(|row| number(row.slot) < part.scores.len());
        let parts: Vec<_> = parts.iter().filter(heard).collect();
        for (at, PartSaid { name, role, scores }) in parts.into_iter().enumerate() {
            self.columns.insert(at, part_title(name, *role));
            for row in &mut self.rows {
                let score = scores.get(number(row.slot)).map_or(UNKNOWN, |bits| f32::from_bits(*bits));
                row.values.insert(at, score);
                if *role == Role::Filter && score == f32::INFINITY && row.barred.is_none() {
                    row.barred = Some(format!("out by {name}"));
                }
            }
        }
        self
    }
}

fn part_title(name: &str, role: Role) -> String {
    match role {
        Role::Filter => format!("{name}, filter"),
        Role::Score { weight_permille } => format!("{name}, weight {}", f64::from(weight_permille) / 1e3),
        Role::Pick => name.to_owned(),
    }
}

/// Why a request was rejected, by the numbers of the contract.
pub fn reason(number: u32) -> String {
    match number {
        1 => "its TTFT is out of reach".to_owned(),
        2 => "its TBT is out of reach".to_owned(),
        3 => "no instance is available for it".to_owned(),
        4 => "there is no memory for it".to_owned(),
        5 => "a reason of the policy's own".to_owned(),
        own => format!("the policy's own reason {own}"),
    }
}

/// One or two sentences. `name` gives the instance in a slot of the prefill (`true`) or of the decode table.
pub fn summary(found: &Found, scores: &[f32], name: &dyn Fn(bool, u32) -> String) -> String {
    let decided = &found.decided;
    let by = match &decided.fallback {
        None => format!("`{}`", decided.policy.name),
        Some(why) => format!("The native twin, for `{}` {},", decided.policy.name, failed(why)),
    };
    let chosen = match decided.decision {
        Decision::Reject { reason: number, retry_after_ms } => {
            return format!(
                "{by} rejected it: {}; it may come again after {retry_after_ms} ms.",
                reason(number)
            );
        }
        Decision::Run(placement) => placement,
    };
    let Placement { prefill, decode, transfer, .. } = chosen;
    let mut text = format!(
        "{by} chose {} for the prefill and {} for decoding",
        name(true, prefill),
        name(false, decode)
    );
    text += &standing(scores, found.question.slots()[0], prefill, name);
    text += &prefix(found, prefill);
    if let Some(transfer) = transfer {
        text += &format!(" {} more are fetched from {}.", transfer.blocks, name(true, transfer.source));
    }
    if let Some(admitted) = &decided.admitted {
        let (policy, must_run) = (&admitted.policy.name, Request::decode(found.question.words()).must_run());
        text += &match admitted.verdict {
            Verdict::Accept => String::new(),
            _ if must_run => format!(" The admitter `{policy}` would not have let it in, but it had to run."),
            Verdict::Queue => format!(" The admitter `{policy}` had it wait: it was not booked."),
            Verdict::Reject { reason: number, .. } => {
                format!(" The admitter `{policy}` refused it: {}.", reason(number))
            }
        };
    }
    text
}

/// A fault, after the name of its policy.
fn failed(why: &str) -> String {
    match why {
        "no instance ready" => "had no instance ready".to_owned(),
        why if why.starts_with("invalid answer") => format!("gave an {why}"),
        why if why.starts_with("overtaken") || why.starts_with("overruled") => format!("was {why}"),
        why => why.to_owned(),
    }
}

/// How the chosen one stands among the scores of the prefill table.
fn standing(scores: &[f32], slots: usize, chosen: u32, name: &dyn Fn(bool, u32) -> String) -> String {
    let column = scores.get(..slots.min(scores.len())).unwrap_or(&[]);
    let Some(&own) = column.get(chosen as usize).filter(|score| score.is_finite()) else {
        return ".".to_owned();
    };
    let mut ranked: Vec<(f32, u32)> = column
        .iter()
        .zip(0..)
        .filter(|(score, _)| score.is_finite())
        .map(|(&score, slot)| (score, slot))
        .collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let others = ranked.iter().find(|(_, slot)| *slot != chosen);
    let better = ranked.iter().filter(|(score, _)| *score < own).count();
    match (better, others) {
        (_, None) => format!(", the only one it considered (score {own})."),
        (0, Some((next, slot))) => format!(
            ": the best of {} scores, {own}; next is {} with {next}.",
            ranked.len(),
            name(true, *slot)
        ),
        (better, Some((best, slot))) => format!(
            ", which has score {own}, place {} of {}; the best is {} with {best}.",
            better + 1,
            ranked.len(),
            name(true, *slot)
        ),
    }
}

fn prefix(found: &Found, prefill: u32) -> String {
    let Layout { block_size_tokens, .. } = found.tables.open.unwrap_or_default();
    let candidates: Candidates<'_> = found.question.candidates();
    let tokens = Request::decode(found.question.words()).prompt_tokens;
    let blocks = tokens.div_ceil(block_size_tokens.max(1));
    format!(" {} of {blocks} blocks of the prompt are there.", candidates.prefix_of(prefill as usize))
}
