//! `kvasir bench rpc`.

use crate::bench::{Report, rpc};

/// Measure what a router's calls cost over gRPC, beside a bare server.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchRpcArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Run every row with few calls: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchRpcArgs {
    /// # Errors
    /// The host does not start, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let size = if self.smoke { rpc::Size::SMOKE } else { rpc::Size::FULL };
        Ok(Report::new("rpc", rpc::rows(size)?).print(self.json)?)
    }
}
