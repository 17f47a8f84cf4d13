//! A component: refused with a reason, or compiled, asked what it is, and asked to decide.

use crate::text::told;
use crate::twins::{CONFIG, ENGINE, recorded};
use kvasir::policy::record::Player;
use kvasir::policy::{Source, inspect};

const NAME: &str = "it";

pub(crate) fn run(bytes: &[u8]) {
    let slot = match inspect::slot_of(NAME, bytes) {
        Ok(slot) => slot,
        Err(refusal) => return drop(told(&refusal)),
    };
    let source = Source::Bytes { name: NAME.to_owned(), bytes: bytes.to_vec() };
    let player = match Player::new(&ENGINE, &CONFIG, slot, source, Vec::new()) {
        Ok(player) => player,
        Err(refusal) => return drop(told(&refusal)),
    };
    let described = match player.describe() {
        Ok(described) => described,
        Err(refusal) => return drop(told(&refusal)),
    };
    assert_eq!(described.slot, slot.as_str());
    assert!(described.name.len() <= 64 && described.version.len() <= 64 && described.settings.len() <= 64);
    told(&described.name);
    told(&described.version);
    for record in recorded(slot).into_iter().take(4) {
        if let Err(fault) = player.play(record, true) {
            told(&fault);
        }
    }
}
