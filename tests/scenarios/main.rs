//! Whole-system checks, one binary.

mod contract;
mod policy_host;
