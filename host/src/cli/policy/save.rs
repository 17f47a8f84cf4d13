//! `kvasir policy save`.

use super::registry::{self, Place, RegistryFlags};
use crate::package::bundle::{self, Saved};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Put policies and their signatures into one file, for hosts without a network.
#[derive(Args, Debug)]
pub(super) struct SaveArgs {
    /// Files of components, or `oci://REGISTRY/REPOSITORY:TAG`.
    #[arg(required = true)]
    policies: Vec<Place>,
    /// The bundle: an OCI image layout in a tar.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    registry: RegistryFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl SaveArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { policies, output, registry, json } = self;
        let registries = registry.open()?;
        let save = |place: &Place| {
            let package = place.fetch(&registries)?;
            let name = match place {
                Place::Registry(reference) => reference.to_string(),
                Place::File(_) => format!("{}:{}", package.about.name, package.about.version),
            };
            Ok(Saved { name, package })
        };
        let saved: Vec<_> = policies.iter().map(save).collect::<anyhow::Result<_>>()?;
        bundle::write(&output, &saved)?;
        if json {
            let rows: Vec<_> = saved.iter().map(|saved| registry::row(&saved.package)).collect();
            println!("{}", serde_json::json!({ "file": output.display().to_string(), "policies": rows }));
            return Ok(ExitCode::SUCCESS);
        }
        for Saved { name, package } in &saved {
            let (slot, signatures) = (package.about.slot, package.signatures.len());
            println!("{slot} {name}, {} B, {signatures} signatures", package.component.len());
        }
        println!("saved in {}; `kvasir policy load-bundle` takes it", output.display());
        Ok(ExitCode::SUCCESS)
    }
}
