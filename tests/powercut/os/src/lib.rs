//! In place of `kvasir-os`, where bugs are to be planted: everything else is the system's own, as in the product.

pub use kvasir_os::{disk, net, random, thread, time};

#[path = "../../../simulation/os/src/planted.rs"]
pub mod planted;
