//! Opens the `sled` databases in which this half keeps small state beside the blocks.
//!
//! What is in them is worth something: how many copies are wanted of a block is a promise. So a database is never
//! deleted. One that `sled` calls corrupt, or panics on, is renamed and kept for a person to look at, and an empty one
//! takes its place. Anything else that goes wrong (rights, descriptors, a full disk) says nothing about the content, and
//! is an error.
//!
//! What a [`flush`](Db::flush) returned for outlives a power cut, which the flush of `sled` does not promise.
//!
//! A lock that is held is waited for, because `sled` ends its threads, and with them the lock, a little after a handle was
//! dropped.

mod durable;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub use self::durable::Db;

/// How long the lock of another handle is waited for.
const LOCK_WAIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why a database was not opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "{path} is still locked after {waited_s} s; another process, most likely a second host, uses this folder: stop it or \
         choose another folder",
        path = path.display()
    )]
    Locked { path: PathBuf, waited_s: u64 },
    #[error("{path} cannot be opened: {reason}; it was left as it is", path = path.display())]
    Failed { path: PathBuf, reason: String },
    #[error(
        "{path} is damaged ({reason}) and cannot be renamed: {source}; move it away by hand",
        path = path.display()
    )]
    NotSetAside { path: PathBuf, reason: String, source: io::Error },
}

/// An open database.
pub struct Opened {
    pub db: Db,
    /// Where a damaged one was put, in whose place this one is.
    pub set_aside: Option<PathBuf>,
}

enum Failure {
    Locked,
    Damaged(String),
    Other(String),
}

/// Opens the database in the folder `path`, with `cache_bytes` of cache.
///
/// # Errors
/// See [`OpenError`].
pub fn open(path: &Path, cache_bytes: u64) -> Result<Opened, OpenError> {
    open_within(path, cache_bytes, LOCK_WAIT)
}

fn open_within(path: &Path, cache_bytes: u64, lock_wait: Duration) -> Result<Opened, OpenError> {
    let until = Instant::now() + lock_wait;
    let mut set_aside = None;
    loop {
        match try_open(path, cache_bytes) {
            Ok(db) => return Ok(Opened { db, set_aside }),
            Err(Failure::Locked) if Instant::now() < until => thread::sleep(LOOK_AGAIN),
            Err(Failure::Locked) => {
                return Err(OpenError::Locked { path: path.into(), waited_s: lock_wait.as_secs() });
            }
            Err(Failure::Damaged(reason)) if set_aside.is_none() => {
                let kept = free_name(path);
                std::fs::rename(path, &kept).map_err(|source| OpenError::NotSetAside {
                    path: path.into(),
                    reason,
                    source,
                })?;
                set_aside = Some(kept);
            }
            // A new database that is damaged at once did not become so over time.
            Err(Failure::Damaged(reason) | Failure::Other(reason)) => {
                return Err(OpenError::Failed { path: path.into(), reason });
            }
        }
    }
}

fn try_open(path: &Path, cache_bytes: u64) -> Result<Db, Failure> {
    let config = sled::Config::new().path(path).cache_capacity(cache_bytes).flush_every_ms(None);
    // Its reader of damaged files panics now and then.
    match catch_unwind(AssertUnwindSafe(|| Db::new(config.open()?, path))) {
        Ok(Ok(db)) => Ok(db),
        Ok(Err(error @ sled::Error::Corruption { .. })) => Err(Failure::Damaged(error.to_string())),
        Ok(Err(sled::Error::Io(error))) if is_lock(&error) => Err(Failure::Locked),
        Ok(Err(error)) => Err(Failure::Other(error.to_string())),
        Err(_) => Err(Failure::Damaged("reading it panicked".to_owned())),
    }
}

/// `sled` 0.34 tells a held lock by its text alone; a test keeps watch over that.
fn is_lock(error: &io::Error) -> bool {
    error.to_string().contains("could not acquire lock")
}

/// The first name beside `path` that nothing has.
fn free_name(path: &Path) -> PathBuf {
    let name = |n: u32| path.with_added_extension(format!("damaged-{n}"));
    (1..).map(name).find(|name| !name.exists()).unwrap_or_else(|| name(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: u64 = 1 << 20;

    fn holds(db: &Db, key: &str) -> bool {
        db.get(key).unwrap().is_some()
    }

    fn filled(path: &Path) {
        let opened = open(path, CACHE).unwrap();
        opened.db.insert("key", "value").unwrap();
        opened.db.flush().unwrap();
    }

    #[test]
    fn a_damaged_database_is_renamed_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        for n in 1..3 {
            filled(&path);
            std::fs::write(path.join("conf"), "this is no configuration").unwrap();
            let opened = open(&path, CACHE).unwrap();
            let kept = opened.set_aside.unwrap();
            assert_eq!(kept, dir.path().join(format!("state.damaged-{n}")));
            assert!(kept.join("db").exists() && !holds(&opened.db, "key"));
        }
    }

    #[test]
    fn a_held_lock_is_waited_for_and_then_refused_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        filled(&path);
        let holder = open(&path, CACHE).unwrap();
        let Err(error) = open_within(&path, CACHE, Duration::ZERO) else { panic!("it is held") };
        assert!(matches!(error, OpenError::Locked { .. }), "{error}");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| open_within(&path, CACHE, Duration::from_secs(120)));
            drop(holder);
            let opened = waiting.join().unwrap().unwrap();
            assert!(holds(&opened.db, "key") && opened.set_aside.is_none());
        });
    }

    #[test]
    fn another_failure_is_an_error_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        filled(&path);
        // A folder where the file of records belongs: what opening it says is no word about its content.
        let (file, away) = (path.join("db"), dir.path().join("db"));
        std::fs::rename(&file, &away).unwrap();
        std::fs::create_dir(&file).unwrap();
        let Err(error) = open(&path, CACHE) else { panic!("a folder is no file") };
        assert!(matches!(error, OpenError::Failed { .. }), "{error}");
        std::fs::remove_dir(&file).unwrap();
        std::fs::rename(&away, &file).unwrap();
        assert!(holds(&open(&path, CACHE).unwrap().db, "key"));
    }
}
