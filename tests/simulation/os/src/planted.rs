//! Bugs that a run plants in the code under test, to see that the checker finds them.

use std::sync::OnceLock;

#[path = "../../../../dataplane/os/src/planted/bug.rs"]
mod bug;

pub use self::bug::Bug;

static PLANTED: OnceLock<Bug> = OnceLock::new();

pub fn plant(bug: Bug) {
    let _ = PLANTED.set(bug);
}

pub fn is(bug: Bug) -> bool {
    PLANTED.get() == Some(&bug)
}
