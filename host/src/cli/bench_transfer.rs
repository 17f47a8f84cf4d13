//! `kvasir bench transfer`.

use crate::bench::{Report, transfer};

/// Measure the transfer engine: TCP over loopback compared with a plain socket, shared memory, planning.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchTransferArgs {
    /// Print one JSON object; p50 and p99 are of single operations, in microseconds.
    #[arg(long)]
    json: bool,
    /// Measure only the groups of rows whose first name begins so, e.g. `plan` or `tcp/get/1MiB`.
    #[arg(long, value_name = "PREFIX")]
    only: Vec<String>,
    /// Run every row for a moment: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchTransferArgs {
    /// # Errors
    /// A socket or shared memory is not available, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { transfer::Size::SMOKE } else { transfer::Size::FULL };
        Ok(Report::new("transfer", transfer::rows(size, &self.only)?).print(self.json)?)
    }
}
