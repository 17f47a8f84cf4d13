//! The connectors under real engines: `cargo xtask test --real-engine`.
//!
//! An engine is gigabytes from a package index, so no ordinary run has one. Each folder below `clients/python/tests` with an
//! `install.sh` gets an environment of its own, `target/python/engine-NAME`, made once by that script.

use crate::python::{self, Environment};
use crate::shell::Shell;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Tests the wheel with every engine that has a script. One that fails does not stop the others.
pub(crate) fn check(shell: &Shell, python: &Path) -> Result<()> {
    let package = shell.root().join("clients/python");
    let tests = package.join("tests");
    let entries = tests.read_dir().with_context(|| format!("cannot list {}", tests.display()))?;
    let mut scripts: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path().join("install.sh"))
        .filter(|script| script.exists())
        .collect();
    scripts.sort();
    if scripts.is_empty() {
        bail!("no engine has an install.sh below {}", tests.display());
    }
    let wheel = python::wheel(shell, python)?;
    python::daemon(shell)?;
    let mut failed = Vec::new();
    for script in scripts {
        let folder = script.parent().context("a script lies in a folder")?;
        let name = folder.file_name().context("a folder has a name")?.to_string_lossy();
        println!("-- {name}");
        if let Err(error) = test(shell, python, &wheel, folder, &name) {
            eprintln!("{name}: {error:#}");
            failed.push(name.into_owned());
        }
    }
    if !failed.is_empty() {
        bail!("under {}; what failed is above", failed.join(" and "));
    }
    Ok(())
}

fn test(shell: &Shell, python: &Path, wheel: &Path, folder: &Path, name: &str) -> Result<()> {
    let engine = Environment::make(shell, python, &format!("engine-{name}"))?;
    shell.run(Command::new("sh").arg(folder.join("install.sh")).arg(engine.path("python")))?;
    shell.run(engine.pip(["--no-index", "--no-deps", "--force-reinstall"]).arg(wheel))?;
    shell.run(&mut python::pytest(shell, &engine, folder))
}
