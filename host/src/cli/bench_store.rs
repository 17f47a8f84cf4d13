//! `kvasir bench store`.

use crate::bench::{Report, store};
use std::path::PathBuf;

/// Measure the block store: key lookups, block reads and writes, compared with memcpy, a plain socket and the raw
/// device.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchStoreArgs {
    /// Print one JSON object; p50 and p99 are of single calls, in microseconds.
    #[arg(long)]
    json: bool,
    /// Run every row for a moment: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
    /// A folder on the device to measure; its files are removed at the end. Default: the folder for temporary
    /// files.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl BenchStoreArgs {
    /// # Errors
    /// The pool does not fit this machine, a socket cannot be opened, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { store::Size::SMOKE } else { store::Size::FULL };
        let dir = self.dir.unwrap_or_else(std::env::temp_dir);
        Ok(Report::new("store", store::rows(size, &dir)?).print(self.json)?)
    }
}
