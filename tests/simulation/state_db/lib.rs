//! In place of `kvasir-state-db`: its databases are those of a simulated world.

use std::path::{Path, PathBuf};

pub use kvasir_simulated_sled::Db;
pub use kvasir_state_db::OpenError;

/// An open database.
pub struct Opened {
    pub db: Db,
    /// None is ever damaged.
    pub set_aside: Option<PathBuf>,
}

/// Opens the database in the folder `path`.
///
/// # Errors
/// The folder cannot be made.
pub fn open(path: &Path, _cache_bytes: u64) -> Result<Opened, OpenError> {
    let failed = |error: std::io::Error| OpenError::Failed { path: path.into(), reason: error.to_string() };
    Ok(Opened { db: Db::open(path).map_err(failed)?, set_aside: None })
}
