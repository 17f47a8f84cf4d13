//! A recording: what reads of it is written again as the same, and both twins of a default policy answer it alike.

use crate::text::told;
use crate::twins::{self, NAMES};
use kvasir::policy::record::{PUSHES_MAX, Record, Records, WORDS_MAX};

pub(crate) fn run(data: &[u8]) {
    for record in Records::new(data) {
        match record {
            Ok(record) => check(&record),
            Err(refusal) => drop(told(&refusal)),
        }
    }
}

fn check(record: &Record) {
    let mut line = Vec::new();
    record.write(&mut line).expect("memory takes everything");
    let line = str::from_utf8(&line).expect("a record is text");
    assert_eq!(Record::parse(line).as_ref(), Ok(record));
    let words = record.pushed.iter().map(|(_, words)| words.len()).sum::<usize>();
    assert!(record.pushed.len() <= PUSHES_MAX && words <= WORDS_MAX);
    let slot = record.slot_kind().expect("it was checked");
    let policies: Vec<_> = NAMES.iter().filter(|(of, _)| *of == slot).collect();
    let (_, name) = policies[(record.id % policies.len() as u64) as usize];
    twins::agree(slot, name, record);
}
