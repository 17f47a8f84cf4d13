//! Compiles the guest of `shapes.rs`.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

fn main() -> Result<()> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("workspace folder")?;
    println!("cargo::rerun-if-changed={}", workspace.join("benches/shapes").display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").context("OUT_DIR")?);
    // As for the default policies, one guest folder serves every profile.
    let target = out.ancestors().nth(4).context("target folder")?.join("guests");
    let components = kvasir_policy_build::components(workspace, &["bench-shapes"], &target)?;
    std::fs::write(out.join("shapes.component.wasm"), &components[0])?;
    std::fs::copy(target.join("wasm32-unknown-unknown/guest/bench_shapes.wasm"), out.join("shapes.wasm"))?;
    Ok(())
}
