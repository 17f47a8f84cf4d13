//! Settings of policies: the first byte chooses a default policy, the second a recorded decision, and the rest are lines as
//! `--setting` takes them.

use crate::text::told;
use crate::twins::{self, NAMES, recorded};
use kvasir::policy::Error;

pub(crate) fn run(data: &[u8]) {
    let [policy, decision, text @ ..] = data else { return };
    let Ok(text) = str::from_utf8(text) else { return };
    let (slot, name) = NAMES[usize::from(*policy) % NAMES.len()];
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let settings: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let player = twins::native(slot, name, settings.clone()).expect("a native twin");
    if let Err(refusal) = player.describe() {
        let text = told(&refusal);
        assert!(matches!(refusal, Error::Settings { .. } | Error::UnknownSetting { .. }), "{text}");
        // What does not print is escaped.
        let named = |(name, _): &(String, String)| {
            name.len() > 64 || !name.chars().all(|c| c.is_ascii_graphic()) || text.contains(name)
        };
        return assert!(settings.iter().any(named), "names none of its settings: {text}");
    }
    let recorded = recorded(slot);
    let record = recorded[usize::from(*decision) % recorded.len()];
    let play = || player.play(record, true).map_err(|e| e.to_string());
    assert_eq!(play().expect("a native twin takes every recorded decision"), play().expect("twice"));
}
