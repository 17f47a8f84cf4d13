//! Kvasir's host: decides what to keep, where, and when to move it.

// First, so that its macros are known to all.
#[macro_use]
mod print;

pub mod access;
pub mod authoring;
pub mod bench;
mod calendar;
pub mod cli;
pub mod conductor;
pub mod config;
pub mod daemon;
pub mod data_dir;
pub mod dev;
pub mod doctor;
pub mod explain;
pub mod fleet;
pub mod host;
pub mod lifecycle;
pub mod metrics;
pub mod package;
pub mod policy;
pub mod prefix_index;
pub mod replay;
mod rotated;
pub mod rpc;
mod seed;
mod text;
pub mod traffic;
