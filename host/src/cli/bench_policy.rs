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
    /// Blocks resident while the evictor is swapped under load; each takes some 150 bytes.
    #[arg(long, value_name = "BLOCKS")]
    resident: Option<u32>,
    /// Run every row with few calls: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchPolicyArgs {
    /// # Errors
    /// A default policy does not start, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { policy::Size::SMOKE } else { policy::Size::FULL };
        let size = policy::Size { resident: self.resident.unwrap_or(size.resident).max(1), ..size };
        Ok(Report::new("policy", policy::rows(size, self.seed)?).print(self.json)?)
    }
}
