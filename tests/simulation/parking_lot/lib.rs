//! In place of the crate `parking_lot`.

pub use kvasir_os::sync::*;
