//! `kvasir bench index`.

use crate::bench::{Report, index};

/// Measure the prefix index: lookups, store events, memory per entry.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchIndexArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Seed of the chains and of the order of lookups.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run every row on a small index: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchIndexArgs {
    /// # Errors
    /// Standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { index::Size::SMOKE } else { index::Size::FULL };
        Ok(Report::new("index", index::rows(size, self.seed)?).print(self.json)?)
    }
}
