//! Whole-system checks, one binary.

mod contract;
mod decisions;
mod policy_host;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Tests of one binary share a process: the one that watches its memory has it to itself.
static PROCESS: RwLock<()> = RwLock::new(());

/// For every test that takes a notable amount of memory.
fn beside_others() -> RwLockReadGuard<'static, ()> {
    PROCESS.read().unwrap_or_else(PoisonError::into_inner)
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    PROCESS.write().unwrap_or_else(PoisonError::into_inner)
}
