//! `kvasir man`: the manual pages.

use super::Cli;
use anyhow::Context;
use clap::{Args, CommandFactory};
use std::path::PathBuf;

/// Write the manual pages, one for each command; a packager puts them into `share/man/man1`.
#[derive(Args, Debug)]
pub(super) struct ManArgs {
    /// The folder for `kvasir.1`, `kvasir-serve.1` and so on; it is made if it is not there.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

impl ManArgs {
    /// # Errors
    /// The folder cannot be written.
    pub(super) fn run(self) -> anyhow::Result<()> {
        let failed = || format!("the manual pages cannot be written to {}", self.out.display());
        std::fs::create_dir_all(&self.out).with_context(failed)?;
        clap_mangen::generate_to(Cli::command(), &self.out).with_context(failed)
    }
}
