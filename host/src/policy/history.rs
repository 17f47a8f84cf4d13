//! What happened to each slot: who did it, when, with which code and settings, and why.
//!
//! A journal in the host's `sled` database, bounded per slot. An entry is on disk when [`History::add`] returns, so it
//! outlives a crash; that takes a write to the disk, so no decision may wait for it.

use super::{Action, Cause, Change, Error, PolicyHost, PolicyId, SlotKind, SlotStatus, catalog};
use crate::calendar::unix_ms;
use crate::text::printable;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Entries kept of one slot; the oldest go first.
pub const ENTRIES_MAX: usize = 1_000;
/// Settings are kept to tell one version from another, not to be loaded again: a longer value is cut, and so is what
/// exceeds this in total. A thousand entries fit into one answer to a client.
const SETTINGS_BYTES: usize = 4 << 10;
const VALUE_BYTES: usize = 256;
const NAME_BYTES: usize = 128;
const REASON_BYTES: usize = 1 << 10;

/// The name in the history for what no person asked for.
pub const HOST: &str = "host";
/// What serves since a start of the host.
pub const STARTED: &str = "started";

/// One policy, as the history names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    pub name: String,
    pub version: String,
    /// SHA-256 of the component; `None` for native.
    pub digest: Option<String>,
}

/// Something that happened to a slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Unix time in milliseconds.
    pub at_ms: u64,
    /// As in the audit log, or [`HOST`].
    pub who: String,
    /// `operator`, `folder`, `guard`, `breaker` or `restart`.
    #[serde(default)]
    pub cause: String,
    /// One word: `loaded`, `set`, `promoted`, and so on.
    pub action: String,
    /// The stage of a policy that goes on trial.
    #[serde(default)]
    pub stage: String,
    /// What it was done to.
    pub policy: Named,
    pub settings: Vec<(String, String)>,
    /// What served before, if it does not any more.
    #[serde(default)]
    pub before: Option<Named>,
    /// The settings of `before`.
    #[serde(default)]
    pub before_settings: Vec<(String, String)>,
    #[serde(default)]
    pub reason: String,
}

impl From<&PolicyId> for Named {
    fn from(policy: &PolicyId) -> Self {
        let PolicyId { name, version, digest, .. } = policy;
        Self { name: name.clone(), version: version.clone(), digest: digest.clone() }
    }
}

thread_local! {
    static ACTOR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Does something on behalf of `who`, to whom the history ascribes what it changes on this thread.
pub fn acting_for<R>(who: &str, act: impl FnOnce() -> R) -> R {
    struct Nobody;
    impl Drop for Nobody {
        fn drop(&mut self) {
            ACTOR.take();
        }
    }
    ACTOR.replace(who.to_owned());
    let _nobody = Nobody; // also after a panic: the thread goes on to work for others
    act()
}

impl From<&Change> for Entry {
    /// Done now, on this thread.
    fn from(change: &Change) -> Self {
        let Change { action, cause, before, after, reason, .. } = change;
        let cause_word = match cause {
            Cause::Operator => "operator",
            Cause::Folder => "folder",
            Cause::Guard(_) => "guard",
            Cause::Breaker => "breaker",
            Cause::Restart => "restart",
        };
        let who = match cause {
            Cause::Operator => {
                ACTOR.with_borrow(|who| if who.is_empty() { "unknown".into() } else { who.clone() })
            }
            _ => HOST.to_owned(),
        };
        let (action, stage) = match action {
            Action::Loaded => ("loaded", None),
            Action::Set => ("set", None),
            Action::Tried(stage) => ("tried", Some(stage)),
            Action::Promoted => ("promoted", None),
            Action::TrialEnded => ("trial-ended", None),
            Action::RolledBack => ("rolled-back", None),
            Action::Paused => ("paused", None),
            Action::Resumed => ("resumed", None),
        };
        // What is gone is named where nothing came in its place.
        let (policy, before) = match (before, after) {
            (before, Some(after)) => (Some(after), before.as_ref().filter(|before| *before != after)),
            (before, None) => (before.as_ref(), None),
        };
        Self {
            at_ms: unix_ms(),
            who,
            cause: cause_word.to_owned(),
            action: action.to_owned(),
            stage: stage.map(ToString::to_string).unwrap_or_default(),
            policy: policy.map(Named::from).unwrap_or_default(),
            settings: policy.map(|policy| policy.settings.clone()).unwrap_or_default(),
            before: before.map(Named::from),
            before_settings: before.map(|before| before.settings.clone()).unwrap_or_default(),
            reason: reason.clone().unwrap_or_default(),
        }
    }
}

/// The journal of all slots.
pub struct History {
    db: kvasir_state_db::Db,
    tree: sled::Tree,
    path: PathBuf,
    /// Number of the newest entry of each slot, from 1; held while one is written.
    newest: Mutex<[u64; 4]>,
}

impl History {
    /// The journal in `db`; `path` is where that lives, for messages.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn open(db: &kvasir_state_db::Db, path: &Path) -> Result<Self, Error> {
        let failed = |e| catalog::state_error(path, "opened", e);
        let tree = db.open_tree("policy-history").map_err(failed)?;
        let mut newest = [0; 4];
        for slot in SlotKind::ALL {
            let last = tree.scan_prefix(prefix(slot)).keys().next_back().transpose().map_err(failed)?;
            newest[slot as usize] = last.map_or(0, |key| number(&key));
        }
        Ok(Self { db: db.clone(), tree, path: path.into(), newest: Mutex::new(newest) })
    }

    /// Notes what serves, and hears of every change from now on.
    pub fn follow(self: &Arc<Self>, policies: &PolicyHost) {
        let history = Arc::clone(self);
        policies.on_change(Box::new(move |change| history.note(change)));
        for (slot, status) in SlotKind::ALL.into_iter().zip(policies.list()) {
            if let Err(error) = self.add_started(slot, started(status)) {
                tracing::error!(%slot, %error, "the start is not in the history of the policies");
            }
        }
    }

    /// What happened is not undone because its entry cannot be written; the log says so instead.
    fn note(&self, change: &Change) {
        let (slot, entry) = (change.slot, Entry::from(change));
        if let Err(error) = self.add(slot, entry.clone()) {
            tracing::error!(%slot, %error, ?entry, "not in the history of the policies");
        }
    }

    /// Writes an entry, and drops the oldest if there are too many.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn add(&self, slot: SlotKind, entry: Entry) -> Result<(), Error> {
        let mut newest = self.newest.lock();
        let number = newest[slot as usize].checked_add(1);
        let number =
            number.ok_or_else(|| self.error("written", "the newest entry has the last number there is"))?;
        self.write(slot, number, entry)?;
        newest[slot as usize] = number;
        let kept_from = number.saturating_add(1).saturating_sub(ENTRIES_MAX as u64);
        for old in self.tree.range(key(slot, 0)..key(slot, kept_from)).keys() {
            let removed = old.and_then(|old| self.tree.remove(old));
            removed.map_err(|e| self.error("written", e))?;
        }
        Ok(())
    }

    /// Notes what serves since a start of the host. A host that starts again and again with the same policy has one
    /// entry of it, so that it does not push out what people did.
    ///
    /// # Errors
    /// As [`History::add`].
    pub fn add_started(&self, slot: SlotKind, entry: Entry) -> Result<(), Error> {
        let newest = self.newest.lock();
        let number = newest[slot as usize];
        let last = self.tree.get(key(slot, number)).map_err(|e| self.error("read", e))?;
        let same = |last: &Entry| {
            last.action == STARTED && last.policy == entry.policy && last.settings == entry.settings
        };
        if last.is_some_and(|bytes| same(&parse(&bytes))) {
            return self.write(slot, number, entry);
        }
        drop(newest);
        self.add(slot, entry)
    }

    /// The newest `limit` entries, newest first.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn read(&self, slot: SlotKind, limit: usize) -> Result<Vec<Entry>, Error> {
        let values = self.tree.scan_prefix(prefix(slot)).values().rev().take(limit);
        values.map(|bytes| Ok(parse(&bytes.map_err(|e| self.error("read", e))?))).collect()
    }

    /// The newest `limit` entries of all of `slots` together, newest first.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn newest(&self, slots: &[SlotKind], limit: usize) -> Result<Vec<(SlotKind, Entry)>, Error> {
        let mut all = Vec::new();
        for &slot in slots {
            all.extend(self.read(slot, limit)?.into_iter().map(|entry| (slot, entry)));
        }
        // Stable: entries of one slot keep their order, whatever the clock did.
        all.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.at_ms));
        all.truncate(limit);
        Ok(all)
    }

    fn write(&self, slot: SlotKind, number: u64, entry: Entry) -> Result<(), Error> {
        let bytes = serde_json::to_vec(&bounded(entry)).map_err(|e| self.error("written", e))?;
        self.tree.insert(key(slot, number), bytes).map_err(|e| self.error("written", e))?;
        self.db.flush().map_err(|e| self.error("written", e))
    }

    fn error(&self, action: &'static str, reason: impl std::fmt::Display) -> Error {
        catalog::state_error(&self.path, action, reason)
    }
}

fn started(status: SlotStatus) -> Entry {
    Entry {
        at_ms: unix_ms(),
        who: HOST.into(),
        cause: "restart".into(),
        action: STARTED.into(),
        policy: Named { name: status.name, version: status.version, digest: status.digest },
        settings: status.settings,
        reason: status.last_trip.unwrap_or_default(),
        ..Entry::default()
    }
}

/// An entry that cannot be read says so in its place: the others are still worth reading.
fn parse(bytes: &[u8]) -> Entry {
    bounded(serde_json::from_slice(bytes).unwrap_or_else(|error| Entry {
        who: HOST.into(),
        action: "unreadable".into(),
        reason: format!("this entry of the history cannot be read: {error}"),
        ..Entry::default()
    }))
}

/// Names and values come from operators and policies, and what is read was perhaps written by another program.
fn bounded(entry: Entry) -> Entry {
    let short = |text: &str| printable(text, NAME_BYTES);
    let named = |named: Named| Named {
        name: short(&named.name),
        version: short(&named.version),
        digest: named.digest.as_deref().map(short),
    };
    Entry {
        who: short(&entry.who),
        cause: short(&entry.cause),
        action: short(&entry.action),
        stage: short(&entry.stage),
        policy: named(entry.policy),
        settings: bounded_settings(&entry.settings),
        before: entry.before.map(named),
        before_settings: bounded_settings(&entry.before_settings),
        reason: printable(&entry.reason, REASON_BYTES),
        ..entry
    }
}

fn bounded_settings(settings: &[(String, String)]) -> Vec<(String, String)> {
    let (mut kept, mut bytes) = (Vec::new(), 0);
    for (name, value) in settings {
        let setting = (printable(name, NAME_BYTES), printable(value, VALUE_BYTES));
        bytes += setting.0.len() + setting.1.len();
        if bytes > SETTINGS_BYTES {
            kept.push(("…".to_owned(), format!("{} more", settings.len() - kept.len())));
            break;
        }
        kept.push(setting);
    }
    kept
}

/// No slot's name begins with that of another.
fn prefix(slot: SlotKind) -> String {
    format!("{slot}/")
}

fn key(slot: SlotKind, number: u64) -> Vec<u8> {
    [prefix(slot).as_bytes(), &number.to_be_bytes()].concat()
}

/// What [`key`] was made of.
fn number(key: &[u8]) -> u64 {
    let (_, last) = key.split_at(key.len().saturating_sub(8));
    last.try_into().map_or(0, u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Guard, Stage};

    fn database(dir: &Path) -> kvasir_state_db::Db {
        kvasir_state_db::open(&dir.join("state"), 1 << 20).unwrap().db
    }

    fn entry(at_ms: u64, action: &str) -> Entry {
        let policy = Named { name: "lru".into(), version: "1.0.0".into(), digest: None };
        Entry { at_ms, who: "user 7".into(), action: action.into(), policy, ..Entry::default() }
    }

    #[test]
    fn the_newest_come_first_and_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let history = History::open(&database(dir.path()), dir.path()).unwrap();
        history.add(SlotKind::Scheduler, entry(1, "loaded")).unwrap();
        for at_ms in 0..ENTRIES_MAX as u64 + 7 {
            history.add(SlotKind::Evictor, entry(at_ms, "loaded")).unwrap();
        }
        let all = history.read(SlotKind::Evictor, usize::MAX).unwrap();
        let times: Vec<_> = all.iter().map(|entry| entry.at_ms).collect();
        assert_eq!(times, (7..ENTRIES_MAX as u64 + 7).rev().collect::<Vec<_>>());
        assert_eq!(history.read(SlotKind::Evictor, 2).unwrap(), all[..2]);
        assert_eq!(history.read(SlotKind::Scheduler, 9).unwrap(), [entry(1, "loaded")]);
        assert_eq!(history.read(SlotKind::Balancer, 9).unwrap(), []);
    }

    #[test]
    fn a_restart_neither_loses_nor_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        for at_ms in 1..=3 {
            let history = History::open(&database(dir.path()), dir.path()).unwrap();
            history.add(SlotKind::Balancer, entry(at_ms, "loaded")).unwrap();
        }
        let history = History::open(&database(dir.path()), dir.path()).unwrap();
        let all = history.read(SlotKind::Balancer, 9).unwrap();
        assert_eq!(all, [3, 2, 1].map(|at_ms| entry(at_ms, "loaded")));
    }

    #[test]
    fn starts_with_the_same_policy_are_one_entry() {
        let dir = tempfile::tempdir().unwrap();
        let history = History::open(&database(dir.path()), dir.path()).unwrap();
        let read = || history.read(SlotKind::Admitter, 99).unwrap();
        for at_ms in 1..=5 {
            history.add_started(SlotKind::Admitter, entry(at_ms, STARTED)).unwrap();
        }
        assert_eq!(read(), [entry(5, STARTED)]);
        history.add(SlotKind::Admitter, entry(6, "loaded")).unwrap();
        history.add_started(SlotKind::Admitter, entry(7, STARTED)).unwrap();
        let other = Entry { settings: vec![("a".into(), "1".into())], ..entry(8, STARTED) };
        history.add_started(SlotKind::Admitter, other.clone()).unwrap();
        assert_eq!(read(), [other, entry(7, STARTED), entry(6, "loaded"), entry(5, STARTED)]);
    }

    #[test]
    fn long_and_strange_texts_are_cut_and_one_bad_entry_hides_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let history = History::open(&database(dir.path()), dir.path()).unwrap();
        let long = "\u{1b}é".repeat(1 << 16);
        let given = Entry {
            settings: vec![(long.clone(), long.clone()); 64],
            reason: long.clone(),
            before: Some(Named { name: long, ..Named::default() }),
            ..entry(1, "loaded")
        };
        history.add(SlotKind::Evictor, given).unwrap();
        let read = history.read(SlotKind::Evictor, 9).unwrap();
        assert!(serde_json::to_vec(&read).unwrap().len() < 8 << 10, "bounded");
        assert!(!format!("{read:?}").contains('\u{1b}') && read[0].reason.ends_with('…'));
        history.tree.insert(key(SlotKind::Evictor, 2), b"{\"at_ms\":tru").unwrap();
        let read = history.read(SlotKind::Evictor, 9).unwrap();
        assert_eq!([&read[0].action, &read[1].action], ["unreadable", "loaded"]);
    }

    #[test]
    fn a_change_is_told_with_who_and_why() {
        let id = |name: &str| PolicyId {
            name: name.into(),
            version: "1.0.0".into(),
            digest: None,
            generation: 1,
            settings: vec![("a".into(), name.into())],
        };
        let change = |action, cause, before: Option<&str>, after: Option<&str>| Change {
            slot: SlotKind::Scheduler,
            action,
            cause,
            before: before.map(id),
            after: after.map(id),
            reason: None,
        };
        let tried = change(Action::Tried(Stage::Shadow), Cause::Operator, None, Some("new"));
        let entry = acting_for("user 7", || Entry::from(&tried));
        assert_eq!((entry.who.as_str(), entry.cause.as_str()), ("user 7", "operator"));
        assert_eq!((entry.action.as_str(), entry.stage.as_str()), ("tried", "shadow"));
        assert_eq!((entry.policy.name.as_str(), entry.before), ("new", None));
        assert_eq!(Entry::from(&tried).who, "unknown", "the act is over");

        let panics = || acting_for("user 7", || panic!("as told"));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(Entry::from(&tried).who, "unknown");

        let ended = change(Action::TrialEnded, Cause::Guard(Guard::Traps), Some("new"), None);
        let entry = Entry::from(&Change { reason: Some("it trapped".into()), ..ended });
        assert_eq!((entry.who.as_str(), entry.cause.as_str()), (HOST, "guard"));
        assert_eq!((entry.policy.name.as_str(), entry.before), ("new", None));
        assert_eq!((entry.reason.as_str(), entry.settings.len()), ("it trapped", 1));

        let back = change(Action::RolledBack, Cause::Breaker, Some("new"), Some("old"));
        let entry = Entry::from(&back);
        assert_eq!((entry.policy.name.as_str(), entry.before.unwrap().name.as_str()), ("old", "new"));
    }
}
