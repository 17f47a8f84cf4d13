//! Compiles Rust policy crates to WebAssembly components.
//!
//! `cargo build` makes a core module for `wasm32-unknown-unknown`; the component type that
//! `wit-bindgen` left in its custom section tells `wit-component` how to wrap it. Used by build
//! scripts (embedded default policies, test guests) and by `cargo xtask policies`.

use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "wasm32-unknown-unknown";

/// Why a policy crate did not become a component.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot start `{command}`: {source}; is cargo on the PATH?")]
    Start { command: String, source: std::io::Error },
    #[error(
        "`{command}` failed for {packages}:\n{stderr}\nif the target is missing: rustup target add {TARGET}"
    )]
    Compile { command: String, packages: String, stderr: String },
    #[error("cannot read {path}: {source}; does the crate have `crate-type = [\"cdylib\"]`?")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a policy module: {reason}; does the crate call an `export_…!` macro?")]
    Encode { path: PathBuf, reason: String },
}

/// Builds `packages` of the workspace at `workspace` and returns one component each, in order.
///
/// `target_dir` must not be the directory a surrounding cargo holds its lock on.
///
/// # Errors
/// The compiler failed (its messages are in the error), or a module is not a policy.
pub fn components(workspace: &Path, packages: &[&str], target_dir: &Path) -> Result<Vec<Vec<u8>>, Error> {
    compile(workspace, packages, target_dir)?;
    packages.iter().map(|package| encode(&module_path(target_dir, package))).collect()
}

fn module_path(target_dir: &Path, package: &str) -> PathBuf {
    target_dir.join(TARGET).join("guest").join(format!("{}.wasm", package.replace('-', "_")))
}

fn compile(workspace: &Path, packages: &[&str], target_dir: &Path) -> Result<(), Error> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace).args([
        "build",
        "--quiet",
        "--locked",
        "--profile",
        "guest",
        "--target",
        TARGET,
    ]);
    cargo.args(packages.iter().flat_map(|p| ["--package", p]));
    cargo.arg("--target-dir").arg(target_dir);
    // What a surrounding cargo or clippy sets for the host's crates must not reach the guests.
    for name in ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER", "RUSTC_WRAPPER", "CARGO_BUILD_TARGET"]
    {
        cargo.env_remove(name);
    }
    cargo.env("RUSTFLAGS", "-C target-feature=+simd128");
    let command = format!("{cargo:?}");
    let output = cargo.output().map_err(|source| Error::Start { command: command.clone(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::Compile { command, packages: packages.join(", "), stderr })
}

fn encode(path: &Path) -> Result<Vec<u8>, Error> {
    let module = std::fs::read(path).map_err(|source| Error::Read { path: path.into(), source })?;
    let encode =
        |module: &[u8]| wit_component::ComponentEncoder::default().validate(true).module(module)?.encode();
    encode(&module).map_err(|e| Error::Encode { path: path.into(), reason: format!("{e:#}") })
}
