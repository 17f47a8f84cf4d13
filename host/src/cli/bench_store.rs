//! `kvasir bench store`.

use crate::bench::{Report, store};

/// Measure the block store: keys asked for, blocks read and written, beside memcpy and a plain socket.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchStoreArgs {
    /// Print one JSON object; p50 and p99 are of single calls, in microseconds.
    #[arg(long)]
    json: bool,
    /// Every row for a moment: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchStoreArgs {
    /// # Errors
    /// The pool does not fit this machine, a socket cannot be opened, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { store::Size::SMOKE } else { store::Size::FULL };
        Ok(Report::new("store", store::rows(size)?).print(self.json)?)
    }
}
