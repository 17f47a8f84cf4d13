//! Puts what `kvasir policy new` writes into the binary: the templates, the SDKs and the contract. Also the stub that
//! `kvasir policy build` answers WASI with.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders of `sdk` that are for Kvasir's own workspace.
const NOT_FOR_AUTHORS: [&str; 2] = ["build", "testing"];
/// Folders that tools make.
const MADE: [&str; 4] = ["node_modules", "target", "__pycache__", ".zig-cache"];
/// How sources end. Whatever else lies about in a working tree stays there.
const SOURCES: [&str; 20] = [
    "c", "cpp", "go", "h", "hpp", "js", "json", "lock", "md", "mjs", "mod", "py", "rs", "sh", "sum", "toml",
    "ts", "txt", "wit", "zig",
];

fn main() -> io::Result<()> {
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sdk");
    println!("cargo::rerun-if-changed={}", sdk.display());
    println!("cargo::rerun-if-changed={}", sdk.join("wit").canonicalize()?.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(&sdk)? {
        let path = entry?.path();
        let wanted = path.file_name().is_some_and(|name| NOT_FOR_AUTHORS.iter().all(|not| name != *not));
        if wanted && path.is_dir() {
            collect(&path, &mut files)?;
        }
    }
    files.sort();

    let mut table = String::from("&[\n");
    for path in files {
        let name = path.strip_prefix(&sdk).map_err(io::Error::other)?;
        writeln!(table, "({:?}, include_bytes!({:?})),", name, path.canonicalize()?)
            .map_err(io::Error::other)?;
    }
    table.push(']');
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from).ok_or_else(|| io::Error::other("no OUT_DIR"))?;
    fs::write(out.join("sdk.rs"), table)?;
    let stub = wat::parse_file(sdk.join("wasi-stub.wat")).map_err(io::Error::other)?;
    fs::write(out.join("wasi-stub.wasm"), stub)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if path.is_dir() {
            if MADE.iter().all(|made| name != *made) {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|end| SOURCES.iter().any(|source| end == *source)) {
            files.push(path);
        }
    }
    Ok(())
}
