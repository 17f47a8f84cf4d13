//! One line for each administrative act: when, who, what, from where, and what came of it.

use kvasir_dataplane::server::access::Act;
use parking_lot::Mutex;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// The most lines about refusals in a [`WINDOW`]; the others are counted. Strangers must not push acts out of the log.
const REFUSALS_MAX: u32 = 60;
const WINDOW: Duration = Duration::from_secs(60);

/// The audit log: lines of JSON in one file, with one older file beside it.
pub struct Audit {
    path: PathBuf,
    bytes_max: u64,
    refusals: Mutex<Refusals>,
}

/// Refusals of the present window.
struct Refusals {
    since: Instant,
    noted: u32,
    left_out: u64,
}

impl Audit {
    /// The log `audit.log` in `folder`. At `bytes_max` it becomes `audit.log.1`, and a new one begins.
    pub fn in_folder(folder: &Path, bytes_max: u64) -> Self {
        let refusals = Refusals { since: Instant::now(), noted: 0, left_out: 0 };
        Self { path: folder.join("audit.log"), bytes_max, refusals: Mutex::new(refusals) }
    }

    /// Writes a line. An act is not refused because the line cannot be written; the daemon's own log says so instead.
    pub fn note(&self, act: &Act<'_>) {
        let mut refusals = self.refusals.lock();
        if act.refused && !refusals.have_room() {
            return;
        }
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let Act { who, what, on, from, outcome, .. } = act;
        let mut line = serde_json::json!({ "at": at, "who": who, "what": what, "on": on, "from": from, "outcome": outcome });
        let left_out = std::mem::take(&mut refusals.left_out);
        if left_out > 0 {
            line["refusals_left_out_before"] = left_out.into();
        }
        // The lock is still held, so that two do not rotate the file at once.
        if let Err(error) = self.write(&format!("{line}\n")) {
            tracing::error!(path = %self.path.display(), %error, %line, "the audit log cannot be written");
        }
    }

    /// Opens the file each time: acts are rare, and `kvasir token` writes to it too.
    fn write(&self, line: &str) -> io::Result<()> {
        let mut file = self.open()?;
        if file.metadata()?.len() + line.len() as u64 > self.bytes_max {
            fs::rename(&self.path, self.path.with_extension("log.1"))?;
            file = self.open()?;
        }
        file.write_all(line.as_bytes())
    }

    fn open(&self) -> io::Result<File> {
        let file = File::options().create(true).append(true).mode(0o600).open(&self.path)?;
        super::give_to_daemon(&file, &self.path)?;
        Ok(file)
    }
}

impl Refusals {
    fn have_room(&mut self) -> bool {
        if self.since.elapsed() >= WINDOW {
            (self.since, self.noted) = (Instant::now(), 0);
        }
        let room = self.noted < REFUSALS_MAX;
        if room {
            self.noted += 1;
        } else {
            self.left_out += 1;
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn act(refused: bool) -> Act<'static> {
        Act { who: "user 1", what: "Evict", on: "a block", from: "unix", outcome: "done", refused }
    }

    #[test]
    fn refusals_push_no_act_out_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let audit = Audit::in_folder(dir.path(), 1 << 20);
        audit.note(&Act { what: "the first", ..act(false) });
        (0..100_000).for_each(|_| audit.note(&act(true)));
        audit.note(&Act { what: "the last", ..act(false) });
        let text = fs::read_to_string(dir.path().join("audit.log")).unwrap();
        assert!(text.contains("the first") && text.contains("the last"));
        // A slow machine may see a window or two end.
        assert!(text.lines().count() < 1000, "{} lines", text.lines().count());
        assert!(text.lines().last().unwrap().contains("refusals_left_out_before"), "they are counted");
    }

    #[test]
    fn lines_are_json_and_the_file_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let audit = Audit::in_folder(dir.path(), 1000);
        for n in 0..50 {
            let what = format!("act {n}\n\u{1b}[31m");
            audit.note(&Act { what: &what, ..act(false) });
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
