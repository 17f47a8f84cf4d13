//! What an earlier run left in the database, which may have been another program: an entry of the history with its number in
//! front (`h`), a rollout (`r`), what serves a slot (`a`); and the state of a policy, with the policy in front (`l`).

use crate::kind;
use crate::text::told;
use crate::twins::{self, NAMES, recorded};
use kvasir::policy::history::{Entry, History};
use kvasir::policy::record::Record;
use kvasir::policy::rollout::Said;
use kvasir::policy::rollout::keeper::{Keeper, Report, Step};
use kvasir::policy::{Catalog, SlotKind};
use std::path::Path;
use std::sync::LazyLock;

const SLOT: SlotKind = SlotKind::Scheduler;
const NOW_MS: u64 = 1_800_000_000_000;

/// In a folder that goes with the process.
static DATABASE: LazyLock<kvasir_state_db::Db> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("kvasir-fuzz-state-{}", std::process::id()));
    kvasir_state_db::open(&folder, 1 << 20).expect("a database").db
});

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b'h', entry)) => history(entry),
        Some((b'r', rollout)) => rollouts(rollout),
        Some((b'a', stored)) => assignment(stored),
        Some((b'l', state)) => learned(state),
        _ => {}
    }
}

fn put(tree: &str, key: &[u8], value: &[u8]) {
    let tree = DATABASE.open_tree(tree).expect("a tree");
    tree.clear().expect("an empty tree");
    tree.insert(key, value).expect("an entry");
}

fn history(data: &[u8]) {
    let Some((number, entry)) = data.split_at_checked(8) else { return };
    put("policy-history", &[SLOT.as_str().as_bytes(), b"/", number].concat(), entry);
    let history = History::open(&DATABASE, Path::new("state")).expect("a journal");
    let newest = || history.read(SLOT, 1).expect("a journal").remove(0);
    let read = newest();
    let Entry { who, cause, action, stage, policy, reason, .. } = &read;
    for text in [who, cause, action, stage, &policy.name, &policy.version, reason] {
        told(text);
    }
    let mut kept = read;
    for again in [false, true] {
        // Numbers end somewhere.
        if let Err(refusal) = history.add(SLOT, kept.clone()) {
            return drop(told(&refusal));
        }
        assert!(!again || newest() == kept, "what was cut is cut again: {kept:?}");
        kept = newest();
    }
}

fn rollouts(data: &[u8]) {
    put("policy-rollouts", SLOT.as_str().as_bytes(), data);
    let keeper = match Keeper::open(&DATABASE, NOW_MS) {
        Ok(keeper) => keeper,
        Err(refusal) => return drop(told(&refusal)),
    };
    let (slot, rollout) = keeper.list().remove(0);
    let reports = |said| vec![Report { slot, id: rollout.id, said }];
    let said = [Said::Other, Said::Paused, Said::Watched, Said::Settled, Said::Failed("it trapped".into())];
    for (host, said) in ["a", "b", "c", "d"].into_iter().zip(said) {
        for now_ms in [NOW_MS, NOW_MS + 1_000, NOW_MS + 1_000_000] {
            if let Err(refusal) = keeper.hear(host, reports(said.clone()), now_ms) {
                told(&refusal);
            }
        }
    }
    for step in [Step::Pause, Step::Resume, Step::Stop] {
        if let Err(refusal) = keeper.change(slot, step, "me") {
            told(&refusal);
        }
    }
    let kept = Keeper::open(&DATABASE, NOW_MS).expect("what was written reads").list();
    let steps = |(_, rollout): &(_, kvasir::policy::rollout::Rollout)| {
        rollout.hosts().map(|(name, step, _)| (name.to_owned(), step.clone())).collect::<Vec<_>>()
    };
    assert!(kept.iter().map(steps).eq(keeper.list().iter().map(steps)));
    let target = rollout.target;
    match keeper.start(slot, target.clone(), b"", "me".into(), 0, NOW_MS) {
        Ok(started) => assert_eq!(started.target, target),
        Err(refusal) => drop(told(&refusal)),
    }
}

fn assignment(data: &[u8]) {
    put("policy-assignments", SLOT.as_str().as_bytes(), data);
    let catalog = Catalog::open(DATABASE.clone(), Path::new("state")).expect("a catalogue");
    match catalog.stored(SLOT) {
        Ok(stored) => {
            let stored = stored.expect("it was put there");
            catalog.assign(SLOT, &stored, &[]).expect("what was read is written");
            assert_eq!(catalog.stored(SLOT).ok().flatten(), Some(stored));
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

fn learned(data: &[u8]) {
    let Some((policy, state)) = data.split_first() else { return };
    let (slot, name) = NAMES[usize::from(*policy) % NAMES.len()];
    let words = state.chunks(4).map(|four| {
        let mut word = [0; 4];
        word[..four.len()].copy_from_slice(four);
        u32::from_le_bytes(word)
    });
    let words: Vec<u32> = std::iter::once(state.len() as u32).chain(words).collect();
    let takes = if matches!(slot, SlotKind::Scheduler | SlotKind::Admitter) { 2 } else { 1 };
    for function in &["import-state", "adopt"][..takes] {
        let mut record: Record = recorded(slot)[0].clone();
        record.pushed.insert(0, ((*function).to_owned(), words.clone()));
        twins::agree(slot, name, &record);
    }
}
