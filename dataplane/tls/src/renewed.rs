//! A value that is made of files, and made again when they change.

use parking_lot::Mutex;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// What changes when files are replaced.
type Stamps = Vec<Option<(u64, i64, i64, u64)>>;

/// See the [module](self).
#[derive(Debug)]
pub struct Renewed<T> {
    files: Vec<PathBuf>,
    /// What is in use, and the stamps of the files that were last looked at.
    current: Mutex<(Stamps, Arc<T>)>,
}

impl<T> Renewed<T> {
    /// # Errors
    /// The errors of `read`.
    pub fn open<E>(files: Vec<PathBuf>, read: impl FnOnce() -> Result<T, E>) -> Result<Self, E> {
        let stamps = stamps(&files);
        let current = Mutex::new((stamps, Arc::new(read()?)));
        Ok(Self { files, current })
    }

    /// What the files say now. Where they have changed since and cannot be used, `complain` is told once, and what was in
    /// use before stays.
    pub fn now<E>(&self, read: impl FnOnce() -> Result<T, E>, complain: impl FnOnce(E)) -> Arc<T> {
        let mut current = self.current.lock();
        let now = stamps(&self.files);
        if current.0 != now {
            current.0 = now;
            match read() {
                Ok(new) => current.1 = Arc::new(new),
                Err(error) => complain(error),
            }
        }
        Arc::clone(&current.1)
    }
}

fn stamps(files: &[PathBuf]) -> Stamps {
    let stamp = |path: &PathBuf| {
        fs::metadata(path).ok().map(|file| (file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
    };
    files.iter().map(stamp).collect()
}
