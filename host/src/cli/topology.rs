//! `kvasir topology`: which NICs serve which memory.

use super::ConfigFlags;
use clap::Args;
use kvasir_dataplane::topology::Topology;
use serde_json::json;
use std::path::PathBuf;

/// Print the NUMA nodes, GPUs and NICs of this machine, and which NICs serve which memory.
///
/// The settings `topology.only`, `topology.exclude` and `topology.locations` override what is found.
#[derive(Args, Debug)]
pub(super) struct TopologyArgs {
    /// Print one JSON object: the machine and the matrix {location: [[preferred], [secondary]]}.
    #[arg(long)]
    json: bool,
    /// Read a copy of another machine's sysfs instead.
    #[arg(long, value_name = "FOLDER", default_value = "/sys")]
    sysfs: PathBuf,
    #[command(flatten)]
    settings: ConfigFlags,
}

impl TopologyArgs {
    /// # Errors
    /// The machine cannot be read, or the settings name a NIC that it does not have.
    pub(super) fn run(self) -> anyhow::Result<()> {
        let overrides = self.settings.load()?.topology;
        let found = Topology::probe(&self.sysfs, overrides)?;
        if self.json {
            println!("{}", json!({"machine": found.machine(), "matrix": found.matrix()}));
        } else {
            print!("{found}");
        }
        Ok(())
    }
}
