//! Makes durable what `sled` only hands to the system.
//!
//! `sled` 0.34 flushes with `sync_file_range`, which neither writes what belongs to a file besides its bytes (where they are, how
//! many) nor makes the disk write its cache; it does not sync its settings, the files of large values, or any name. A
//! killed process loses nothing by that; a power cut took the whole database.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A database of `sled`, whose [`flush`](Self::flush) is one that outlives a power cut. Clones are the same database.
#[derive(Clone)]
pub struct Db {
    db: sled::Db,
    files: Arc<Files>,
}

/// The files of a database.
struct Files {
    log: File,
    /// `sled` keeps each large value in a file of its own here.
    large: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Large values that are durable.
    synced: HashSet<OsString>,
    /// A sync failed. The system may have dropped what it could not write, and tells of it once.
    broken: bool,
}

impl Db {
    /// `db` is in the folder `path`. What `sled` has written there is durable when this returns.
    pub(crate) fn new(db: sled::Db, path: &Path) -> sled::Result<Self> {
        let files =
            Files { log: File::open(path.join("db"))?, large: path.join("blobs"), state: Mutex::default() };
        let this = Self { db, files: Arc::new(files) };
        this.flush()?;
        File::open(path.join("conf"))?.sync_all()?;
        File::open(path)?.sync_all()?;
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            File::open(folder)?.sync_all()?;
        }
        Ok(this)
    }

    /// Makes durable whatever was written, in every tree. In place of the `flush` of `sled`.
    ///
    /// # Errors
    /// The disk fails, or has failed at an earlier flush: what was written before that may be lost.
    pub fn flush(&self) -> sled::Result<()> {
        self.db.flush()?;
        Ok(self.files.sync()?)
    }
}

/// Everything except [`Db::flush`] is as `sled` has it.
impl Deref for Db {
    type Target = sled::Db;

    fn deref(&self) -> &sled::Db {
        &self.db
    }
}

impl Files {
    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return Err(io::Error::other("a sync failed before; start again once the disk is mended"));
        }
        let done = self.sync_large(&mut state.synced).and_then(|()| self.log.sync_data());
        state.broken = done.is_err();
        done
    }

    /// Large values first: the log names them.
    fn sync_large(&self, synced: &mut HashSet<OsString>) -> io::Result<()> {
        let names = self.large.read_dir()?.map(|entry| Ok(entry?.file_name()));
        let names = names.collect::<io::Result<HashSet<OsString>>>()?;
        let mut new = names.difference(synced).peekable();
        if new.peek().is_some() {
            for name in new {
                match File::open(self.large.join(name)) {
                    Ok(file) => file.sync_all()?,
                    // It has gone meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            File::open(&self.large)?.sync_all()?;
        }
        *synced = names;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn large_values_are_synced_once_and_forgotten_when_they_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let db = crate::open(&dir.path().join("state"), 1 << 20).unwrap().db;
        let synced = || db.files.state.lock().unwrap().synced.len();
        db.insert("small", "value").unwrap();
        db.flush().unwrap();
        assert_eq!(synced(), 0);
        db.insert("large", vec![7; 2 << 20]).unwrap();
        db.flush().unwrap();
        assert!(synced() > 0, "{:?} is where they are", db.files.large);
        std::fs::remove_dir_all(&db.files.large).unwrap();
        std::fs::create_dir(&db.files.large).unwrap();
        db.flush().unwrap();
        assert_eq!(synced(), 0);
    }

    #[test]
    fn after_a_sync_that_failed_none_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        let db = crate::open(&dir.path().join("state"), 1 << 20).unwrap().db;
        let away = dir.path().join("away");
        std::fs::rename(&db.files.large, &away).unwrap();
        assert!(db.flush().is_err());
        std::fs::rename(&away, &db.files.large).unwrap();
        let error = db.clone().flush().unwrap_err().to_string();
        assert!(error.contains("a sync failed before"), "{error}");
    }
}
