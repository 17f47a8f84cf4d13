//! `kvasir policy pull`.

use super::registry::{self, RegistryFlags};
use super::serving::{self, Served};
use crate::cli::HostFlags;
use crate::package::{self, Reference, write_file, write_signed};
use crate::policy::trust::{self, Signature};
use crate::policy::{ChainPart, SlotKind, Source, chain, description};
use anyhow::{bail, ensure};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Fetch a component from a registry, or what serves a host, with its signatures. Nothing of it is run.
///
/// From a registry, every part has its digest. What a host serves may be a chain: its file comes with its components beside it.
#[derive(Args, Debug)]
pub(super) struct PullArgs {
    /// REGISTRY/REPOSITORY:TAG, or REGISTRY/REPOSITORY@sha256:DIGEST for what can never be another; or scheduler, evictor,
    /// admitter or balancer, for what serves there in the running host.
    from: From,
    /// Where to. Default: its name, ending in `.wasm` (`.toml` for a chain), in this folder, if there is no such file.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryFlags,
    #[command(flatten)]
    host: HostFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug)]
enum From {
    Registry(Reference),
    Host(SlotKind),
}

impl FromStr for From {
    type Err = package::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self::Host).or_else(|_| text.parse().map(Self::Registry))
    }
}

impl PullArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { from, output, registry, host, json } = self;
        match from {
            From::Registry(reference) => from_registry(&reference, output, registry, json),
            From::Host(slot) => from_host(slot, output, &host, json),
        }
    }
}

fn from_registry(
    from: &Reference,
    output: Option<PathBuf>,
    registry: RegistryFlags,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let package = registry.open()?.pull(from)?;
    let path = new_file(output, package.file_name())?;
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
        println!("           {}, as yet unchecked (`kvasir policy verify`)", trust::beside(&path).display());
    }
    Ok(ExitCode::SUCCESS)
}

/// 1 if a default policy serves, which has no file.
fn from_host(
    slot: SlotKind,
    output: Option<PathBuf>,
    host: &HostFlags,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let Served { source, settings } = serving::fetch(host, slot, false)?;
    let name = source.name().to_owned();
    // The name came from the host, and becomes that of a file.
    let stem = if description::is_name(&name) { name.as_str() } else { slot.as_str() };
    let files = match &source {
        Source::Chain { parts, .. } => write_chain(&new_file(output, format!("{stem}.toml"))?, parts)?,
        Source::Signed { bytes, signatures, .. } => {
            write_component(new_file(output, format!("{stem}.wasm"))?, bytes, signatures)?
        }
        _ => {
            eprintln!("kvasir: the host's own `{name}` serves {slot}, which every host has by that name");
            return Ok(ExitCode::from(1));
        }
    };
    let files: Vec<_> = files.iter().map(|path| path.display().to_string()).collect();
    if json {
        let settings: serde_json::Map<_, _> = settings.into_iter().map(|(n, v)| (n, v.into())).collect();
        println!(
            "{}",
            serde_json::json!({ "slot": slot.as_str(), "name": name, "settings": settings, "files": files })
        );
        return Ok(ExitCode::SUCCESS);
    }
    println!("{slot} {name}");
    files.iter().for_each(|file| println!("file       {file}"));
    settings.iter().for_each(|(name, value)| println!("--setting  {name}={value}"));
    Ok(ExitCode::SUCCESS)
}

fn write_component(path: PathBuf, bytes: &[u8], signatures: &[Signature]) -> anyhow::Result<Vec<PathBuf>> {
    write_signed(&path, bytes, signatures)?;
    Ok(vec![path])
}

/// The file of a chain, and its components beside it, called as the host calls them: a chain of the same digest.
fn write_chain(path: &Path, parts: &[ChainPart]) -> anyhow::Result<Vec<PathBuf>> {
    ensure!(chain::is_chain(path), "a chain serves, and the name of its file ends in .toml");
    let called = |place: usize, part: &ChainPart| match &part.source {
        Source::Builtin(name) => name.clone(),
        // The name came from the host, and becomes that of a file.
        source if description::is_name(source.name()) => format!("{}.wasm", source.name()),
        _ => format!("part-{}.wasm", place + 1),
    };
    let mut files = vec![path.to_path_buf()];
    for (place, part) in parts.iter().enumerate() {
        match &part.source {
            Source::Signed { bytes, signatures, .. } => {
                let beside = path.with_file_name(called(place, part));
                let is_other = std::fs::read(&beside).is_ok_and(|there| there != *bytes);
                ensure!(!is_other, "{} is another component; take another folder", beside.display());
                files.extend(write_component(beside, bytes, signatures)?);
            }
            Source::Builtin(_) => {}
            _ => bail!("part {} of the chain came without its code", place + 1),
        }
    }
    write_file(path, chain::text(parts, called).as_bytes())?;
    Ok(files)
}

fn new_file(output: Option<PathBuf>, name: String) -> anyhow::Result<PathBuf> {
    if let Some(path) = output {
        return Ok(path);
    }
    ensure!(!Path::new(&name).exists(), "{name} is here already; say with -o where to put the new one");
    Ok(name.into())
}
