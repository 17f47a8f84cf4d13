//! `kvasir policy sign`.

use super::registry::{self, Place, RegistryFlags};
use crate::policy::trust::{SecretKey, write_beside};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Sign a component for its slot. The signature goes into a file beside it, or into its registry, where cosign finds it
/// too.
#[derive(Args, Debug)]
pub(super) struct SignArgs {
    /// File of a component, or `oci://REGISTRY/REPOSITORY:TAG`.
    policy: Place,
    /// Ed25519 key in PEM (PKCS#8), readable by you alone; `kvasir policy trust keygen` makes one.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    #[command(flatten)]
    registry: RegistryFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl SignArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { policy, key, registry, json } = self;
        let key = SecretKey::read(&key)?;
        let registries = registry.open()?;
        let mut package = policy.fetch(&registries)?;
        let at = match &policy {
            Place::File(path) => {
                package.sign(&key, package.about.name.clone());
                write_beside(path, &package.signatures)?.display().to_string()
            }
            Place::Registry(reference) => {
                package.sign(&key, reference.place());
                registries.push_signatures(reference, &package)?;
                reference.place()
            }
        };
        if json {
            let mut row = registry::row(&package);
            row["key"] = key.public().id().to_string().into();
            row["signature"] = at.into();
            println!("{row}");
        } else {
            registry::print(&package);
            println!("key        {}\nsigned in  {at}", key.public().id());
        }
        Ok(ExitCode::SUCCESS)
    }
}
