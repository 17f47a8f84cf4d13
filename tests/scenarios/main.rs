//! Whole-system checks, one binary.

mod contract;
mod decisions;
mod policy_host;
