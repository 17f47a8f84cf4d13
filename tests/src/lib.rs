//! What the scenarios share: misbehaving policies, files that are no policies, real processes.

mod guests;
pub mod hostile;

pub use guests::{
    bytes_of_100_mb, component_names, guest, import_not_granted, several_versions, wrong_version,
};
