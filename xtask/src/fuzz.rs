//! `cargo xtask fuzz`: libFuzzer on what a host reads from outside (`tests/fuzz`).

use crate::shell::Shell;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longer inputs than any target takes are never tried.
const BYTES_MAX: u32 = 32 << 10;
/// The most bytes of an input that is added to a corpus, so that it stays small.
const KEPT_BYTES_MAX: u32 = 2 << 10;
/// A target that takes this long for one input, or this much memory, has failed.
const SECONDS_MAX: u32 = 25;
const MEMORY_MIB_MAX: u32 = 2_048;
/// What inputs spend their time in.
const FASTER: [&str; 9] = [
    "kvasir",
    "kvasir-cluster",
    "kvasir-fuzz",
    "kvasir-memory",
    "kvasir-nvme",
    "kvasir-policy",
    "kvasir-protocol",
    "kvasir-server",
    "kvasir-store",
];

/// Runs the named targets one after the other, all if none is named. With `keep`, what reached new code is added to their corpora.
///
/// # Errors
/// A target is not known or fails on an input, which is kept; or the fuzzer cannot be built.
pub(crate) fn run(shell: &Shell, targets: &[String], minutes: f64, keep: bool) -> Result<()> {
    let known = folders(&corpora(shell))?;
    if let Some(unknown) = targets.iter().find(|target| !known.contains(target)) {
        bail!("no target `{unknown}`; targets: {}", known.join(", "));
    }
    build(shell)?;
    for target in if targets.is_empty() { &known } else { targets } {
        println!("== {target}, for {minutes} minutes");
        fuzz(shell, target, minutes)?;
        if keep {
            merge(shell, target)?;
        }
    }
    Ok(())
}

fn corpora(shell: &Shell) -> PathBuf {
    shell.root().join("tests/fuzz/corpus")
}

/// Names of the folders in a folder, sorted.
fn folders(at: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in at.read_dir().with_context(|| format!("cannot list {}", at.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.extend(entry.file_name().into_string().ok());
        }
    }
    names.sort();
    Ok(names)
}

/// In the folder of the tests: only our own crates are compiled once more, with what libFuzzer is told by, and faster.
fn build(shell: &Shell) -> Result<()> {
    let mut cargo = shell.cargo();
    cargo.args(["build", "--locked", "--package", "kvasir-fuzz", "--features", "libfuzzer"]);
    cargo.args(["--config", "build.rustc-workspace-wrapper='tests/fuzz/rustc-wrapper'"]);
    for package in FASTER {
        cargo.args(["--config", &format!("profile.dev.package.{package}.opt-level=1")]);
    }
    shell.run(&mut cargo).context("libFuzzer needs a C++ compiler, such as Debian's package `g++`")
}

fn fuzzer(shell: &Shell, target: &str) -> Command {
    let mut fuzzer = Command::new(shell.target("debug/kvasir-fuzz"));
    fuzzer.env("KVASIR_FUZZ_TARGET", target);
    fuzzer.args([format!("-timeout={SECONDS_MAX}"), format!("-rss_limit_mb={MEMORY_MIB_MAX}")]);
    fuzzer
}

/// What earlier runs found, and this one will.
fn found(shell: &Shell, target: &str) -> Result<PathBuf> {
    let folder = shell.target("fuzz").join(target);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

fn fuzz(shell: &Shell, target: &str, minutes: f64) -> Result<()> {
    let (found, kept) = (found(shell, target)?, corpora(shell).join(target));
    let failing = format!("{}-", found.display());
    let mut fuzzer = fuzzer(shell, target);
    fuzzer.arg(format!("-max_len={BYTES_MAX}"));
    fuzzer.arg(format!("-max_total_time={:.0}", (minutes * 60.0).max(1.0)));
    fuzzer.arg(format!("-dict={}", shell.root().join("tests/fuzz/dictionary.txt").display()));
    fuzzer.arg(format!("-artifact_prefix={failing}")).arg("-print_final_stats=1");
    shell.run(fuzzer.arg(found).arg(kept)).with_context(|| {
        format!(
            "`{target}` fails on an input, which is in {failing}*, with its panic above. Mend the code, move the input to \
             tests/fuzz/corpus/{target}/ under a name that says what it is, and run `cargo test -p kvasir-fuzz`"
        )
    })
}

/// Adds to the kept corpus what reaches code that nothing in it reaches, in beginnings of at most [`KEPT_BYTES_MAX`].
fn merge(shell: &Shell, target: &str) -> Result<()> {
    let (found, kept) = (found(shell, target)?, corpora(shell).join(target));
    let mut fuzzer = fuzzer(shell, target);
    // How often code is reached is for the search alone: it would keep ten times as many.
    fuzzer.args(["-merge=1", "-use_counters=0", &format!("-max_len={KEPT_BYTES_MAX}")]);
    shell.run(fuzzer.arg(kept).arg(found))
}
