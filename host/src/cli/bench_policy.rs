//! `kvasir bench policy`.

use crate::bench::{Report, policy};

/// Measure the default policies: calls, decisions, evictions, swaps.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchPolicyArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Seed of the instances, the prompts and the trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run every row with few calls: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchPolicyArgs {
    /// # Errors
    /// A default policy does not start, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { policy::Size::SMOKE } else { policy::Size::FULL };
        Ok(Report::new("policy", policy::rows(size, self.seed)?).print(self.json)?)
    }
}
