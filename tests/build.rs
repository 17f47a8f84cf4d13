//! Compiles the misbehaving policies of `guests/` to components, for `guest(name)`.

use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() -> Result<()> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let workspace = tests.parent().context("workspace folder")?;
    for input in ["sdk/rust", "wit", "Cargo.lock", "tests/guests", "tests/harm"] {
        println!("cargo::rerun-if-changed={}", workspace.join(input).display());
    }
    let mut names = Vec::new();
    for entry in tests.join("guests").read_dir()? {
        names.push(entry?.file_name().into_string().ok().context("the name of a guest is not UTF-8")?);
    }
    names.sort();

    let out = PathBuf::from(std::env::var_os("OUT_DIR").context("OUT_DIR")?);
    // As for the default policies, one guest folder serves every profile.
    let target = out.ancestors().nth(4).context("target folder")?.join("guests");
    let packages: Vec<_> = names.iter().map(|name| format!("guest-{name}")).collect();
    let packages: Vec<_> = packages.iter().map(String::as_str).collect();
    let components = kvasir_policy_build::components(workspace, &packages, &target)?;

    let mut table = String::from("&[");
    for (name, component) in names.iter().zip(components) {
        std::fs::write(out.join(format!("{name}.wasm")), component)?;
        write!(table, "({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.wasm\"))),")?;
    }
    table.push(']');
    std::fs::write(out.join("guests.rs"), table)?;
    Ok(())
}
