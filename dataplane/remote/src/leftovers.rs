//! Files of puts that a crash cut short.
//!
//! An object is written beside its place and then moved there: `name#1` becomes `name`. A writer that dies in between
//! leaves the first, which no listing shows.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A file that was not written to for this long has no writer any more. Other hosts may be at work in the same place.
pub(super) const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Removes such files below `root` that were last written before `before`; returns how many.
pub(super) fn clear(root: &Path, before: SystemTime) -> io::Result<u64> {
    let mut removed = 0;
    for folder in std::fs::read_dir(root)? {
        let folder = folder?;
        if !folder.file_type()?.is_dir() {
            continue;
        }
        for file in std::fs::read_dir(folder.path())? {
            let file = file?;
            let staged = file.file_name().to_str().is_some_and(is_staged);
            // It has gone meanwhile: its writer moved it.
            let Ok(modified) = file.metadata().and_then(|about| about.modified()) else { continue };
            if staged && modified < before {
                std::fs::remove_file(file.path())?;
                removed += 1;
            }
        }
    }
    Ok(removed)
}

fn is_staged(name: &str) -> bool {
    name.split_once('#').is_some_and(|(key, n)| key.len() == 32 && n.parse::<u64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_staged_files_go() {
        let dir = tempfile::TempDir::new().unwrap();
        let folder = dir.path().join("ab");
        std::fs::create_dir(&folder).unwrap();
        let (now, name) = (SystemTime::now(), "ab00000000000000000000000000000f");
        let make = |name: &str, age: u64| {
            let file = std::fs::File::create(folder.join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
        };
        for (name, age) in [(name, 9), (&format!("{name}#1"), 9), (&format!("{name}#2"), 1), ("notes#1", 9)] {
            make(name, age);
        }
        assert_eq!(clear(dir.path(), now - Duration::from_secs(5)).unwrap(), 1);
        assert!(!folder.join(format!("{name}#1")).exists());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3);
    }
}
