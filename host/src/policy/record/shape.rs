//! What a record must hold to be played: the functions of each slot, and how long their arguments are.

use super::{BadRecord, Record};
use crate::policy::SlotKind;
use kvasir_policy::admitter::BLOCK_WORDS;
use kvasir_policy::evictor::{EVENT, EVENTS_MAX, Layout as Pool, VICTIMS_MAX};
use kvasir_policy::scheduler::{HEAD_WORDS, Layout};

/// The largest pool, and the largest table, that an engine is opened with for a record: what a line can describe.
const SLOTS_MAX: u32 = 1 << 20;

/// A question of a slot: its function, how many numbers and lists it takes, and the words of the answer.
struct Question {
    name: &'static str,
    scalars: usize,
    lists: usize,
    /// `None` means as many as the policy says.
    answer: Option<usize>,
}

const fn question(name: &'static str, scalars: usize, lists: usize, answer: Option<usize>) -> Question {
    Question { name, scalars, lists, answer }
}

fn questions(slot: SlotKind) -> &'static [Question] {
    const SCHEDULER: &[Question] = &[question("schedule", 1, 1, Some(8))];
    const EVICTOR: &[Question] = &[question("select-victims", 2, 0, None)];
    const ADMITTER: &[Question] =
        &[question("admit-request", 0, 2, Some(1)), question("admit-blocks", 2, 1, None)];
    const BALANCER: &[Question] = &[question("tick", 1, 3, None)];
    match slot {
        SlotKind::Scheduler => SCHEDULER,
        SlotKind::Evictor => EVICTOR,
        SlotKind::Admitter => ADMITTER,
        SlotKind::Balancer => BALANCER,
    }
}

/// What can stand in `pushed` of a slot, and the least words of each.
fn pushes(slot: SlotKind) -> &'static [(&'static str, usize)] {
    match slot {
        SlotKind::Scheduler => &[
            ("open", 8),
            ("update-prefill", 0),
            ("update-decode", 0),
            ("update-links", 0),
            ("set-thresholds", 0),
            ("schedule", 1 + HEAD_WORDS),
            ("import-state", 1),
            ("adopt", 1),
        ],
        SlotKind::Evictor => {
            &[("open", 3), ("update-tiers", 0), ("on-events", 2), ("select-victims", 3), ("import-state", 1)]
        }
        SlotKind::Admitter => &[("update-load", 6), ("import-state", 1), ("adopt", 1)],
        SlotKind::Balancer => &[("import-state", 1)],
    }
}

pub(super) fn check(record: &Record) -> Result<(), BadRecord> {
    let slot = record.slot_kind()?;
    for (at, (name, words)) in record.pushed.iter().enumerate() {
        let field = || format!("pushed[{at}]");
        let known = pushes(slot);
        let Some((_, least)) = known.iter().find(|(known, _)| known == name) else {
            return Err(unknown(field(), name, slot, known.iter().map(|(name, _)| *name)));
        };
        if words.len() < *least {
            return Err(bad(field(), format!("{} words for `{name}`; at least {least}", words.len())));
        }
        check_push(slot, name, words).map_err(|problem| bad(field(), problem))?;
    }
    check_question(slot, record)
}

fn check_push(slot: SlotKind, name: &str, words: &[u32]) -> Result<(), String> {
    match (slot, name) {
        (SlotKind::Scheduler, "open") => {
            let Layout { prefill_slots, decode_slots, domains, prefill_row, decode_row, link_row, .. } =
                Layout::decode(words);
            let table = [prefill_slots, decode_slots].into_iter().find(|slots| *slots > u32::from(u16::MAX));
            if let Some(slots) = table {
                return Err(format!("a table of {slots} slots; at most {}", u16::MAX));
            }
            if domains > 256 {
                return Err(format!("{domains} domains; at most 256"));
            }
            if [prefill_row, decode_row, link_row].contains(&0) {
                return Err("rows of no values".to_owned());
            }
            Ok(())
        }
        (SlotKind::Evictor, "open") => {
            let Pool { slots, .. } = Pool::decode(words);
            if slots > SLOTS_MAX { Err(format!("{slots} block slots; at most {SLOTS_MAX}")) } else { Ok(()) }
        }
        (_, "on-events") if words.len() > 2 + 2 * EVENT * EVENTS_MAX => {
            Err(format!("{} words; at most {EVENTS_MAX} events", words.len()))
        }
        (_, "select-victims") => check_want(u64::from(words[2])),
        (_, "import-state" | "adopt") if words[0].div_ceil(4) as usize != words.len() - 1 => {
            Err(format!("{} words for {} bytes", words.len() - 1, words[0]))
        }
        _ => Ok(()),
    }
}

fn check_want(want: u64) -> Result<(), String> {
    if want > u64::from(VICTIMS_MAX) {
        Err(format!("{want} victims wanted; at most {VICTIMS_MAX}"))
    } else {
        Ok(())
    }
}

fn check_question(slot: SlotKind, record: &Record) -> Result<(), BadRecord> {
    let (asked, known) = (&record.asked, questions(slot));
    let Some(question) = known.iter().find(|question| question.name == asked.name) else {
        return Err(unknown("asked.name".to_owned(), &asked.name, slot, known.iter().map(|q| q.name)));
    };
    let exactly = |field: &str, given: usize, expected: usize| {
        let problem = || format!("{given} for `{}`, which has {expected}", asked.name);
        if given == expected { Ok(()) } else { Err(bad(field.to_owned(), problem())) }
    };
    exactly("asked.scalars", asked.scalars.len(), question.scalars)?;
    exactly("asked.lists", asked.lists.len(), question.lists)?;
    if let Some(answer) = question.answer.filter(|_| !record.answer.is_empty()) {
        exactly("answer", record.answer.len(), answer)?;
    }
    match asked.name.as_str() {
        "schedule" if asked.lists[0].len() < HEAD_WORDS => Err(bad(
            "asked.lists[0]".into(),
            format!("{} words; at least {HEAD_WORDS}", asked.lists[0].len()),
        )),
        "select-victims" => check_want(asked.scalars[1]).map_err(|p| bad("asked.scalars[1]".into(), p)),
        "admit-blocks" if asked.scalars[1] != BLOCK_WORDS as u64 => {
            let problem = format!("records of {} words; this host has {BLOCK_WORDS}", asked.scalars[1]);
            Err(bad("asked.scalars[1]".into(), problem))
        }
        _ => Ok(()),
    }
}

fn bad(field: String, problem: String) -> BadRecord {
    BadRecord::Field { field, problem }
}

fn unknown<'a>(field: String, name: &str, slot: SlotKind, known: impl Iterator<Item = &'a str>) -> BadRecord {
    let known: Vec<&str> = known.collect();
    BadRecord::Function { field, name: crate::text::printable(name, 64), slot, known: known.join(", ") }
}
