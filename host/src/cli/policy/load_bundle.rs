//! `kvasir policy load-bundle`.

use super::Target;
use super::load::source_of;
use super::registry;
use super::stage::StageFlags;
use crate::package::Package;
use crate::package::bundle::{self, Saved};
use clap::Args;
use kvasir_client::control::{Control, PolicyStage};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Put the policies of a bundle into service or on trial, or unpack them.
#[derive(Args, Debug)]
pub(super) struct LoadBundleArgs {
    /// What `kvasir policy save` made.
    file: PathBuf,
    /// Of the policies in it, only those called so; may be given several times.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Write components and signatures into this folder, and load nothing.
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
    #[command(flatten)]
    stage: StageFlags,
    #[command(flatten)]
    target: Target,
}

impl LoadBundleArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { file, only, to, stage, target } = self;
        // All of it is checked before the first policy goes anywhere.
        let packages = chosen(bundle::read(&file)?, &only)?;
        match to {
            Some(folder) => unpack(&packages, &folder, target.json)?,
            None => load(&packages, stage.stage(), &target)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Those that are wanted; all if none is named.
fn chosen(saved: Vec<Saved>, only: &[String]) -> anyhow::Result<Vec<Package>> {
    let names: Vec<_> = saved.iter().map(|saved| saved.package.about.name.clone()).collect();
    if let Some(unknown) = only.iter().find(|name| !names.contains(name)) {
        anyhow::bail!("the bundle has no `{unknown}`; in it are {}", names.join(", "));
    }
    let packages = saved.into_iter().map(|saved| saved.package);
    Ok(packages.filter(|package| only.is_empty() || only.contains(&package.about.name)).collect())
}

fn unpack(packages: &[Package], folder: &Path, json: bool) -> anyhow::Result<()> {
    let mut names = HashSet::new();
    if let Some(twice) = packages.iter().find(|package| !names.insert(package.file_name())) {
        anyhow::bail!("two policies of the bundle are called `{}`, and would be one file", twice.about.name);
    }
    std::fs::create_dir_all(folder)?;
    let mut rows = Vec::new();
    for package in packages {
        let path = folder.join(package.file_name());
        package.write(&path)?;
        if json {
            let mut row = registry::row(package);
            row["file"] = path.display().to_string().into();
            rows.push(row);
        } else {
            println!("{} {}", package.about.slot, path.display());
        }
    }
    if json {
        println!("{}", serde_json::json!({ "policies": rows }));
    }
    Ok(())
}

fn load(packages: &[Package], stage: PolicyStage, target: &Target) -> anyhow::Result<()> {
    let mut slots = HashSet::new();
    if let Some(twice) = packages.iter().find(|package| !slots.insert(package.about.slot)) {
        anyhow::bail!(
            "the bundle has several policies for {}; choose one with --only NAME",
            twice.about.slot
        );
    }
    let mut loaded = Vec::new();
    let load = async |mut control: Control| {
        for package in packages {
            let name = package.about.name.clone();
            let source = source_of(name, package.component.clone(), &package.signatures);
            let slot = package.about.slot.as_str();
            loaded.push(control.load_policy_as(slot, source, &[], stage).await?);
        }
        Ok(())
    };
    let all = target.host.control(load);
    // Also those before one that was refused.
    if !loaded.is_empty() {
        target.print_policies(&loaded);
    }
    all
}
