//! What survives a restart: which policy serves each slot, and the components it needs.

use super::chain::Role;
use super::engine::Digest;
use super::fault::TEXT_BYTES;
use super::trust::Signature;
use super::{Error, SlotKind, Stage};
use crate::text::printable;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A policy and the operator's settings for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    pub origin: Origin,
    pub settings: Vec<(String, String)>,
}

/// Where the code of a policy is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Embedded component of a default policy.
    Builtin { name: String },
    /// Its native twin.
    Native { name: String },
    /// A component kept in the catalogue.
    Module {
        name: String,
        digest: String,
        /// Signatures that came with it; empty if nobody signed it.
        #[serde(default)]
        signatures: Vec<Signature>,
    },
    /// Several that decide together.
    Chain { name: String, parts: Vec<StoredPart> },
}

/// A part of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredPart {
    pub role: Role,
    #[serde(flatten)]
    pub assignment: Assignment,
}

impl Origin {
    pub fn name(&self) -> &str {
        let (Self::Builtin { name }
        | Self::Native { name }
        | Self::Module { name, .. }
        | Self::Chain { name, .. }) = self;
        name
    }

    /// Digests of the components it needs.
    fn digests(&self) -> Vec<&str> {
        match self {
            Self::Module { digest, .. } => vec![digest],
            Self::Chain { parts, .. } => {
                parts.iter().flat_map(|part| part.assignment.origin.digests()).collect()
            }
            Self::Builtin { .. } | Self::Native { .. } => Vec::new(),
        }
    }
}

/// What is stored of one slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    pub current: Assignment,
    pub previous: Option<Assignment>,
    /// What the previous policy calls itself.
    #[serde(default)]
    pub previous_name: Option<String>,
    /// Why the breaker or a guard put `current` in its place; `None` if a person did.
    #[serde(default)]
    pub trip: Option<String>,
    #[serde(default)]
    pub trial: Option<StoredTrial>,
    #[serde(default)]
    pub paused: bool,
}

/// A policy on trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredTrial {
    pub assignment: Assignment,
    pub stage: Stage,
}

/// The policy part of the host's `sled` database. Every change is on disk when its call returns.
#[derive(Clone)]
pub struct Catalog {
    db: kvasir_state_db::Db,
    assignments: sled::Tree,
    modules: sled::Tree,
    /// What learners exported, by slot and name of the policy.
    learned: sled::Tree,
    path: std::path::PathBuf,
    /// Held while modules and assignments change together.
    change: Arc<Mutex<()>>,
    /// Stands for a full disk.
    #[cfg(test)]
    pub(super) full: Arc<std::sync::atomic::AtomicBool>,
}

impl Catalog {
    /// `path` is where `db` lives, for messages.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn open(db: kvasir_state_db::Db, path: &std::path::Path) -> Result<Self, Error> {
        let open = |name| db.open_tree(name).map_err(|e| state_error(path, "opened", e));
        let (assignments, modules) = (open("policy-assignments")?, open("policy-modules")?);
        let learned = open("policy-learned")?;
        Ok(Self {
            assignments,
            modules,
            learned,
            db,
            path: path.into(),
            change: Arc::default(),
            #[cfg(test)]
            full: Arc::default(),
        })
    }

    /// What serves a slot, and what served it before.
    ///
    /// # Errors
    /// The database cannot be read, or holds something else.
    pub fn stored(&self, slot: SlotKind) -> Result<Option<Stored>, Error> {
        let read = self.assignments.get(slot.as_str()).map_err(|e| self.error("read", e))?;
        let parse = |bytes: sled::IVec| serde_json::from_slice::<Stored>(&bytes);
        read.map(parse).transpose().map_err(|e| self.error("read", e))
    }

    /// # Errors
    /// The database cannot be read, or no such module is stored.
    pub fn module(&self, digest: &str) -> Result<Vec<u8>, Error> {
        let bytes = self.modules.get(digest).map_err(|e| self.error("read", e))?;
        bytes.map(|b| b.to_vec()).ok_or_else(|| self.error("read", format!("module {digest} is missing")))
    }

    /// Stores what serves a slot with the components it needs, and drops components that no slot
    /// names any more.
    ///
    /// # Errors
    /// The disk is full or fails. A component that was written for nothing goes at the next change.
    pub fn assign(&self, slot: SlotKind, stored: &Stored, modules: &[&[u8]]) -> Result<(), Error> {
        let _change = self.change.lock();
        #[cfg(test)]
        if self.full.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(self.error("written", "no space left"));
        }
        for bytes in modules {
            let digest = Digest::of(bytes).to_string();
            self.modules.insert(digest, *bytes).map_err(|e| self.error("written", e))?;
        }
        if !modules.is_empty() {
            self.flush()?;
        }
        let bytes = serde_json::to_vec(stored).map_err(|e| self.error("written", e))?;
        let old = self.assignments.insert(slot.as_str(), bytes).map_err(|e| self.error("written", e))?;
        if let Err(e) = self.flush() {
            let _ = old.map(|old| self.assignments.insert(slot.as_str(), old));
            return Err(e);
        }
        self.drop_unnamed_modules()
    }

    /// What the learner of a policy exported last.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn learned(&self, slot: SlotKind, name: &str) -> Result<Option<Arc<[u8]>>, Error> {
        let read = self.learned.get(format!("{slot}/{name}")).map_err(|e| self.error("read", e))?;
        Ok(read.map(|bytes| Arc::from(&*bytes)))
    }

    /// Keeps it, and of the slot's other policies only what belongs to those of `named`.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn keep_learned(
        &self,
        slot: SlotKind,
        name: &str,
        state: &[u8],
        named: &[&str],
    ) -> Result<(), Error> {
        let written = |e| self.error("written", e);
        let prefix = format!("{slot}/");
        for key in self.learned.scan_prefix(&prefix).keys() {
            let key = key.map_err(|e| self.error("read", e))?;
            if !named.iter().any(|named| named.as_bytes() == &key[prefix.len()..]) {
                self.learned.remove(key).map_err(written)?;
            }
        }
        self.learned.insert(format!("{prefix}{name}"), state).map_err(written)?;
        self.flush()
    }

    /// While every assignment can be read.
    fn drop_unnamed_modules(&self) -> Result<(), Error> {
        let mut named = Vec::new();
        for entry in &self.assignments {
            let (_, bytes) = entry.map_err(|e| self.error("read", e))?;
            // What cannot be read may name any of them.
            let Ok(stored) = serde_json::from_slice::<Stored>(&bytes) else { return Ok(()) };
            let trial = stored.trial.map(|trial| trial.assignment);
            for assignment in std::iter::once(stored.current).chain(stored.previous).chain(trial) {
                named.extend(assignment.origin.digests().into_iter().map(str::to_owned));
            }
        }
        for key in self.modules.iter().keys() {
            let key = key.map_err(|e| self.error("read", e))?;
            if !named.iter().any(|n| n.as_bytes() == &*key) {
                self.modules.remove(key).map_err(|e| self.error("written", e))?;
            }
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), Error> {
        self.db.flush().map_err(|e| self.error("written", e))
    }

    fn error(&self, action: &'static str, reason: impl std::fmt::Display) -> Error {
        state_error(&self.path, action, reason)
    }
}

pub(super) fn state_error(
    path: &std::path::Path,
    action: &'static str,
    reason: impl std::fmt::Display,
) -> Error {
    Error::State { path: path.into(), action, reason: printable(&reason.to_string(), TEXT_BYTES) }
}
