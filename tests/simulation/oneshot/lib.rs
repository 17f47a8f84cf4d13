//! In place of the crate `oneshot`.

pub use kvasir_os::oneshot::*;
