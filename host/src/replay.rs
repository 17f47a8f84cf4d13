//! Replays request traces through the components that run in production.

pub mod cache;
pub mod caches;
pub mod chains;
pub mod classes;
pub mod cluster;
pub mod compare;
pub mod contender;
pub mod content;
pub mod convert;
pub mod generate;
mod heat;
pub mod optimum;
pub mod page;
mod parts;
mod plot;
pub mod pool;
pub mod profile;
pub mod recorded;
pub mod stats;
pub mod store;
pub mod tally;
pub mod tiers;
pub mod timeline;
pub mod trace;

use std::path::Path;

/// A file beside `path` that takes its name once it is whole, and is removed if it never is.
fn partial_file(path: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The mode with which other programs make files; the user's mask takes away what it must.
    let readable: std::fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    tempfile::Builder::new().permissions(readable).tempfile_in(folder)
}
