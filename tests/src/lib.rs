//! What the scenarios share: misbehaving policies, files that are no policies, real processes.

mod guests;
pub mod hostile;

pub use guests::{
    bytes_of_100_mb, component_names, guest, import_not_granted, several_versions, wrong_version,
};

use std::path::PathBuf;

/// A public trace, from `KVASIR_TRACES` or the folder beside the project; `None`, and a note about it, if it is not there.
pub fn public_trace(name: &str) -> Option<PathBuf> {
    let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces"));
    let path = std::env::var_os("KVASIR_TRACES").map_or_else(beside, PathBuf::from).join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: no trace at {}; set KVASIR_TRACES to its folder", path.display());
    None
}
