//! Whether traffic is recorded.

use super::{Error, Size, invalid};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The requests this host schedules, as a trace for `kvasir replay` and `kvasir trace`, in blocks of
/// `conductor.block_size_tokens`. No text of a prompt is in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Record {
    /// File to which they are written; the one of an earlier run becomes `FILE.1`. Empty means none.
    pub file: PathBuf,
    /// A file of this size is renamed to `FILE.1`, in place of the one before.
    pub file_bytes: Size,
}

impl Default for Record {
    fn default() -> Self {
        Self { file: PathBuf::new(), file_bytes: Size::mib(1_024) }
    }
}

impl Record {
    /// `decisions` is the file to which decisions are written.
    pub(super) fn validate(&self, decisions: &Path) -> Result<(), Error> {
        if !self.file.as_os_str().is_empty() && self.file == decisions {
            return Err(invalid(
                "record.file",
                self.file.display(),
                "is explain.file as well; choose another path",
            ));
        }
        if !(1 << 20..=1 << 40).contains(&self.file_bytes.0) {
            return Err(invalid("record.file_bytes", self.file_bytes, "must be 1MiB to 1TiB"));
        }
        Ok(())
    }
}
