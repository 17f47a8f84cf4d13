//! In place of `kvasir-state-db`: no database can be opened in a simulated world, because `sled` has threads, locks and a clock
//! of its own. What asks for one goes on without, as it does when a database cannot be opened.

use std::path::Path;

pub use kvasir_state_db::{Db, OpenError, Opened};

/// # Errors
/// Always.
pub fn open(path: &Path, _cache_bytes: u64) -> Result<Opened, OpenError> {
    Err(OpenError::Failed { path: path.into(), reason: "there are no databases in a simulated world".into() })
}
