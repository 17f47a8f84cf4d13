//! Transcendental functions with the same bits natively and in Wasm.
//!
//! `f64::exp` calls the platform's C library natively and a Rust port in Wasm; they differ in the
//! last bit, which is enough for two engines to choose different victims.

pub use libm::{exp, expm1, log as ln, log1p as ln_1p, pow};
