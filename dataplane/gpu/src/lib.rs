//! Memory of NVIDIA GPUs: as [`memory`], as a tier ([`hbm`]) and as a [`transport`] between processes of one host. The driver's
//! library is opened at run time; without it everything else works.

pub mod hbm;
pub mod memory;
pub mod transport;
