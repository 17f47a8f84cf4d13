//! `kvasir policy build`: a component of a project's sources.

use super::project::MANIFEST;
use super::{Error, Project, component};
use crate::policy::inspect::{Inspection, inspect};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A component that a host would load.
pub struct Built {
    pub path: PathBuf,
    pub found: Inspection,
}

/// Compiles a project by the tools of its language, makes a component of that, and writes it to `out` once it is known that a
/// host would load it. What the tools say goes to standard error.
///
/// # Errors
/// A tool is missing, the sources do not compile, a host would refuse the component, or it is of another slot than the manifest says. `out` is as it was.
pub fn build(project: &Project, out: &Path) -> Result<Built, Error> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| Error::File { action, path, source }
    };
    let scratch = tempfile::tempdir().map_err(failed("make a folder in", &std::env::temp_dir()))?;
    let compiled = scratch.path().join("compiled.wasm");
    compile(project, &compiled)?;
    let compiled = fs::read(&compiled).map_err(failed("read", &compiled))?;
    let component = component::of(&compiled, project.language.stub_wasi)?;

    let ready = scratch.path().join(format!("{}.wasm", project.name));
    fs::write(&ready, &component).map_err(failed("write", &ready))?;
    let found = inspect(&project.limits(), &ready)?;
    if found.slot != project.slot {
        return Err(Error::OtherSlot {
            path: project.dir.join(MANIFEST),
            named: project.slot,
            found: found.slot,
        });
    }
    let beside = out.with_extension("wasm.partial");
    fs::write(&beside, &component).map_err(failed("write", &beside))?;
    fs::rename(&beside, out).map_err(failed("write", out))?;
    Ok(Built { path: out.into(), found })
}

fn compile(project: &Project, out: &Path) -> Result<(), Error> {
    let Project { dir, sdk, language, .. } = project;
    let search_path = language.search_path(sdk, dir);
    if let Some(tool) = language.missing_tool(&search_path) {
        return Err(Error::Tool { language: language.name, tool });
    }
    let recipe = sdk.join(language.folder).join("compile.sh");
    let recipe =
        recipe.canonicalize().map_err(|source| Error::File { action: "find", path: recipe, source })?;
    let mut command = Command::new("sh");
    command.arg(&recipe).arg(".").arg(out).current_dir(dir);
    if let Ok(path) = std::env::join_paths(absolute(search_path)) {
        command.env("PATH", path);
    }
    // Standard output is for what this command says itself.
    let run = std::io::stderr()
        .as_fd()
        .try_clone_to_owned()
        .and_then(|stderr| command.stdout(Stdio::from(stderr)).status());
    let status = run.map_err(|source| Error::File { action: "run", path: recipe, source })?;
    if status.success() { Ok(()) } else { Err(Error::Compile { path: dir.clone(), status }) }
}

/// The recipe runs in another folder than this process.
fn absolute(folders: Vec<PathBuf>) -> impl Iterator<Item = PathBuf> {
    folders.into_iter().map(|folder| std::path::absolute(&folder).unwrap_or(folder))
}
