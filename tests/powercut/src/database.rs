//! The small state: a `sled` database, opened and written as hosts open and write theirs. Each version is one batch, flushed
//! before it is answered; so whatever survives must be one version, whole.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};

const CACHE_BYTES: u64 = 4 << 20;
const KEYS: u64 = 48;
const KEYS_OF_BATCH: u64 = 5;

pub(crate) struct Database(kvasir_state_db::Db);

type Content = BTreeMap<u64, Vec<u8>>;

/// What a version changes: `None` removes.
fn changes(version: u64) -> impl Iterator<Item = (u64, Option<Vec<u8>>)> {
    let value = move |key: u64| {
        let word = (version << 8 | key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.to_be_bytes().repeat(4 + (word % 160) as usize)
    };
    (0..KEYS_OF_BATCH).map(move |number| {
        let key = (version * 7 + number * 11) % KEYS;
        (key, (!(version + number).is_multiple_of(4)).then(|| value(key)))
    })
}

fn content(version: u64) -> Content {
    let mut content = Content::new();
    for (key, value) in (1..=version).flat_map(changes) {
        match value {
            Some(value) => drop(content.insert(key, value)),
            None => drop(content.remove(&key)),
        }
    }
    content
}

/// Which of the versions it is.
fn version_of(found: &Content, (from, to): (u64, u64)) -> Result<u64> {
    let is = |version: &u64| content(*version) == *found;
    (from..=to).find(is).with_context(|| {
        let near =
            (0..=to + 1).find(is).map_or("none at all".to_owned(), |version| format!("version {version}"));
        format!("the database has {near}, not one of {from} to {to}; {} keys", found.len())
    })
}

impl Database {
    /// Opens it, and says which of the versions it has.
    ///
    /// # Errors
    /// It does not open, is damaged, or has something else than one of these versions.
    pub(crate) fn open(folder: &Path, versions: (u64, u64)) -> Result<(Self, u64)> {
        let opened = kvasir_state_db::open(&folder.join("database"), CACHE_BYTES)
            .context("the database does not open")?;
        if let Some(kept) = opened.set_aside {
            bail!("the database was damaged and put aside, as {}", kept.display());
        }
        let database = Self(opened.db);
        let version = version_of(&database.read()?, versions)?;
        Ok((database, version))
    }

    fn read(&self) -> Result<Content> {
        let entry = |found: sled::Result<(sled::IVec, sled::IVec)>| {
            let (key, value) = found.context("the database cannot be read")?;
            let key: [u8; 8] = key.as_ref().try_into().context("a key of the database is none of ours")?;
            Ok((u64::from_be_bytes(key), value.to_vec()))
        };
        self.0.iter().map(entry).collect()
    }

    /// Writes a version; it is on the disk when this returns.
    pub(crate) fn write(&self, version: u64) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        for (key, value) in changes(version) {
            match value {
                Some(value) => batch.insert(&key.to_be_bytes(), value),
                None => batch.remove(&key.to_be_bytes()),
            }
        }
        self.0.apply_batch(batch)?;
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_apart_and_half_of_one_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (database, version) = Database::open(dir.path(), (0, 0)).unwrap();
        assert_eq!(version, 0);
        (1..=9).for_each(|version| database.write(version).unwrap());
        let check = |versions, expected: Option<u64>| {
            assert_eq!(version_of(&database.read().unwrap(), versions).ok(), expected, "{versions:?}");
        };
        check((9, 9), Some(9));
        check((8, 10), Some(9));
        check((3, 8), None);
        check((10, 11), None);
        let half = changes(10).find_map(|(key, value)| value.map(|value| (key, value))).unwrap();
        database.0.insert(half.0.to_be_bytes(), half.1).unwrap();
        check((9, 10), None);
    }
}
