//! One line for each administrative act: when, who, what, from where, and what came of it.

use parking_lot::Mutex;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The audit log: lines of JSON in one file, with one older file beside it.
pub struct Audit {
    path: PathBuf,
    bytes_max: u64,
    /// The file and its length; none while it cannot be opened.
    open: Mutex<Option<(File, u64)>>,
}

/// One act.
pub struct Act<'a> {
    pub who: &'a str,
    pub what: &'a str,
    /// `unix`, or the address of the caller.
    pub from: &'a str,
    /// `done`, or why not.
    pub outcome: &'a str,
}

impl Audit {
    /// The log `audit.log` in `folder`. At `bytes_max` it becomes `audit.log.1`, and a new one begins.
    pub fn in_folder(folder: &Path, bytes_max: u64) -> Self {
        Self { path: folder.join("audit.log"), bytes_max, open: Mutex::default() }
    }

    /// Writes a line. An act is not refused because the line cannot be written; the daemon's own log says so instead.
    pub fn note(&self, act: &Act<'_>) {
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let Act { who, what, from, outcome } = act;
        let line =
            serde_json::json!({ "at": at, "who": who, "what": what, "from": from, "outcome": outcome });
        if let Err(error) = self.write(&format!("{line}\n")) {
            tracing::error!(path = %self.path.display(), %error, %line, "the audit log cannot be written");
        }
    }

    fn write(&self, line: &str) -> io::Result<()> {
        let mut open = self.open.lock();
        if let Some((_, len)) = &*open
            && len + line.len() as u64 > self.bytes_max
        {
            *open = None;
            fs::rename(&self.path, self.path.with_extension("log.1"))?;
        }
        let (mut file, len) = match open.take() {
            Some(open) => open,
            None => {
                let file = File::options().create(true).append(true).mode(0o600).open(&self.path)?;
                let len = file.metadata()?.len();
                (file, len)
            }
        };
        file.write_all(line.as_bytes())?;
        *open = Some((file, len + line.len() as u64));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_json_and_the_file_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let audit = Audit::in_folder(dir.path(), 1000);
        for n in 0..50 {
            let what = format!("act {n}\n\u{1b}[31m");
            audit.note(&Act { who: "user 1", what: &what, from: "unix", outcome: "done" });
        }
        let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
        let (new, old) = (read("audit.log"), read("audit.log.1"));
        assert!(new.len() <= 1000 && old.len() <= 1000);
        for line in old.lines().chain(new.lines()) {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["who"], "user 1");
        }
        assert!(new.contains("act 49"));
    }
}
