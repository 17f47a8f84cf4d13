//! `kvasir policy pull`.

use super::registry::{self, RegistryFlags};
use crate::package::Reference;
use crate::policy::trust;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Fetch a component from a registry, with its signatures; every part has its digest. Nothing of it is run.
#[derive(Args, Debug)]
pub(super) struct PullArgs {
    /// REGISTRY/REPOSITORY:TAG, or REGISTRY/REPOSITORY@sha256:DIGEST for what can never be another.
    from: Reference,
    /// Where to. Default: its name, ending in `.wasm`, in this folder, if there is no such file.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PullArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { from, output, registry, json } = self;
        let package = registry.open()?.pull(&from)?;
        let path = match output {
            Some(path) => path,
            None => {
                let path = PathBuf::from(package.file_name());
                anyhow::ensure!(
                    !path.exists(),
                    "{} is here already; say with -o where to put the new one",
                    path.display()
                );
                path
            }
        };
        package.write(&path)?;
        if json {
            let mut row = registry::row(&package);
            row["file"] = path.display().to_string().into();
            println!("{row}");
            return Ok(ExitCode::SUCCESS);
        }
        registry::print(&package);
        println!("file       {}", path.display());
        if !package.signatures.is_empty() {
            println!(
                "           {}, as yet unchecked (`kvasir policy verify`)",
                trust::beside(&path).display()
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}
