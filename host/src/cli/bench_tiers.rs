//! `kvasir bench tiers`.

use crate::bench::{Report, tiers};
use std::path::PathBuf;

/// Measure a host with an NVMe tier below a small pool: what goes down and comes up while a client puts and reads,
/// compared with the raw device.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchTiersArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Run every row with little: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
    /// A folder on the device to measure, with room for 9 GiB; its files are removed at the end. Default: the folder for
    /// temporary files.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl BenchTiersArgs {
    /// # Errors
    /// The host does not start, the folder has no room, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { tiers::Size::SMOKE } else { tiers::Size::FULL };
        let dir = self.dir.unwrap_or_else(std::env::temp_dir);
        Ok(Report::new("tiers", tiers::rows(size, &dir)?).print(self.json)?)
    }
}
