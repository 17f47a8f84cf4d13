//! `kvasir bench engine`.

use crate::bench::{Report, attached};
use std::time::Duration;

/// Measure what an engine pays for an attached host, without an engine: questions and jobs of a simulated scheduler over paged
/// memory, compared with memcpy of the same runs and a plain socket.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchEngineArgs {
    /// Print one JSON object; p50 and p99 are of single calls or jobs, in microseconds.
    #[arg(long)]
    json: bool,
    /// Run every row for a moment: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
}

impl BenchEngineArgs {
    /// # Errors
    /// The pool does not fit this machine, a socket cannot be opened, or standard output cannot take the report.
    pub fn run(self) -> anyhow::Result<()> {
        let each = Duration::from_millis(if self.smoke { 2 } else { 1000 });
        Ok(Report::new("engine", attached::rows(each)?).print(self.json)?)
    }
}
