//! `kvasir config`: the settings that result.

use super::ConfigFlags;
use crate::config::Size;
use anyhow::Context;
use clap::{Args, Subcommand};

/// Print or check settings.
#[derive(Args, Debug)]
pub(super) struct ConfigArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Print the settings in effect as TOML: file, environment and flags on top of the defaults.
    Print(ConfigFlags),
    /// Check the settings, and the files of secrets and certificates that they name, without starting anything.
    Validate(ConfigFlags),
}

impl ConfigArgs {
    /// # Errors
    /// The settings cannot be used.
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Print(flags) => print!("{}", flags.load()?.to_toml()),
            Action::Validate(flags) => {
                let config = flags.load()?;
                crate::lifecycle::cluster::check(&config)?;
                config.listen.tls.files().map(kvasir_tls::HostTls::open).transpose().context("listen.tls")?;
                println!(
                    "valid: node {}, pool {}, data in {}",
                    config.node.name,
                    Size(config.store.dram.pool_bytes),
                    config.node.data_dir.display()
                );
            }
        }
        Ok(())
    }
}
