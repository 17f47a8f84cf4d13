//! Memory of NVIDIA GPUs: as [`memory`], as a tier ([`hbm`]) and as a [`transport`] between processes of one host. The driver's
//! library is opened at run time; without it everything else works.

#[cfg(feature = "tier")]
pub mod hbm;
pub mod memory;
#[cfg(feature = "transport")]
pub mod transport;

/// What the test harness calls a test of a module, for tests that start another as a process of its own.
#[cfg(test)]
fn test_named(module: &str, test: &str) -> String {
    let (_, module) = module.split_once("::").unwrap_or(("", module));
    format!("{module}::{test}")
}
