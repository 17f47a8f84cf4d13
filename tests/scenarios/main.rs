//! Whole-system checks, one binary.

mod contract;
mod corpus;
mod decisions;
mod policy_host;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Tests of one binary share a process: the one that watches its memory has it to itself.
static PROCESS: RwLock<()> = RwLock::new(());

/// For every test that takes a notable amount of memory.
fn beside_others() -> RwLockReadGuard<'static, ()> {
    PROCESS.read()
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    PROCESS.write()
}
