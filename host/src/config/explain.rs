//! What is kept of decisions, to explain them.

use super::{Error, Size, invalid};
use crate::explain::{Limits, Sampling};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What is kept of decisions, for `kvasir explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Explain {
    /// Decisions about requests that can be explained. 0 means none. Fewer if they take more than `memory_bytes`.
    pub decisions: u32,
    /// Memory for them. A decision over 64 prefill and as many decode instances takes about 1 KiB.
    pub memory_bytes: Size,
    /// Choices of evictors that are remembered, about 100 B each. 0 means none.
    pub evictions: u32,
    /// File to which a sample of the decisions of all slots is written, for `kvasir policy run` and `replay`. Empty means none.
    pub file: PathBuf,
    /// A file of this size is renamed to `FILE.1`, in place of the one before.
    pub file_bytes: Size,
    /// Share of the decisions that are written, 0 to 1.
    pub sample: f64,
}

impl Default for Explain {
    fn default() -> Self {
        Self {
            decisions: 8_192,
            memory_bytes: Size::mib(32),
            evictions: 65_536,
            file: PathBuf::new(),
            file_bytes: Size::mib(256),
            sample: 0.01,
        }
    }
}

impl Explain {
    pub(super) fn validate(&self) -> Result<(), Error> {
        let Self { decisions, memory_bytes, evictions, file, file_bytes, sample } = self;
        if *decisions > 1 << 20 {
            return Err(invalid("explain.decisions", decisions, "must be at most 1048576"));
        }
        if *decisions > 0 && !(1 << 20..=16 << 30).contains(&memory_bytes.0) {
            return Err(invalid("explain.memory_bytes", memory_bytes, "must be 1MiB to 16GiB"));
        }
        if *evictions > 1 << 24 {
            return Err(invalid("explain.evictions", evictions, "must be at most 16777216"));
        }
        if !(0.0..=1.0).contains(sample) {
            return Err(invalid("explain.sample", sample, "must be 0 to 1"));
        }
        if !(1 << 20..=1 << 40).contains(&file_bytes.0) {
            return Err(invalid("explain.file_bytes", file_bytes, "must be 1MiB to 1TiB"));
        }
        if !file.as_os_str().is_empty() && *decisions == 0 {
            let why = "leaves nothing to write to explain.file; keep some decisions";
            return Err(invalid("explain.decisions", decisions, why));
        }
        Ok(())
    }

    /// What to write. `None` means that nothing is written.
    pub fn sampling(&self) -> Option<Sampling> {
        let named = !self.file.as_os_str().is_empty();
        named.then(|| Sampling {
            file: self.file.clone(),
            file_bytes_max: self.file_bytes.0,
            share: self.sample,
        })
    }

    /// The same as the conductor takes it.
    pub fn limits(&self) -> Limits {
        Limits { decisions: self.decisions as usize, memory_bytes: self.memory_bytes.0 as usize }
    }
}
