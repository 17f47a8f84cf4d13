//! `kvasir policy push`.

use super::registry::{self, RegistryFlags};
use crate::package::reference::Version;
use crate::package::{Package, Reference};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Store a component in a registry, as `wkg` does, with the signatures beside it.
#[derive(Args, Debug)]
pub(super) struct PushArgs {
    file: PathBuf,
    /// REGISTRY/REPOSITORY:TAG.
    to: Reference,
    #[command(flatten)]
    registry: RegistryFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PushArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { file, to, registry, json } = self;
        anyhow::ensure!(
            matches!(to.version, Version::Tag(_)),
            "{to} names a digest; push to a tag, and the registry says by which digest it is found"
        );
        let package = Package::read(&file)?;
        registry.open()?.push(&to, &package)?;
        let at = to.at(Version::Digest(package.manifest_digest()));
        if json {
            let mut row = registry::row(&package);
            row["reference"] = to.to_string().into();
            println!("{row}");
        } else {
            registry::print(&package);
            println!("pushed     {to}\nfor ever   {at}");
        }
        Ok(ExitCode::SUCCESS)
    }
}
