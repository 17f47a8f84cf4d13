//! The C interface of `kvasir-client`: `include/kvasir.h`, which a test makes from this source with `cbindgen` and compares.
//!
//! A thin layer. What it adds is what C cannot be trusted with: handles are numbers that are looked up, so one that is
//! closed, foreign or of another kind is refused and never followed; null and misaligned pointers and impossible lengths are
//! refused; a panic becomes a status. What cannot be seen stays the caller's word: that memory is there, and as long as
//! it says.
//!
//! `unsafe` is allowed in the whole crate because every function that C can call is marked so; pointers are followed in
//! `raw` alone.
#![allow(unsafe_code)]

mod calls;
mod client;
mod failure;
mod handles;
mod jobs;
mod options;
mod raw;

pub use calls::*;
pub use client::*;
pub use failure::{Status, kvasir_v1_error};
pub use jobs::*;
pub use options::*;
