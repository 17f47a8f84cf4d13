//! The functions that are exported, by the names and with the arguments of `cuda.h`.

mod contexts;
mod copies;
mod memories;
mod modules;
mod shared;
mod streams;

use std::sync::atomic::{AtomicUsize, Ordering};

/// A handle: a number that was never one before, and no address, so that using one after its end is noticed.
pub(crate) fn handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x5c0d_0001);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// All of them, for tests.
#[cfg(test)]
pub(crate) mod calls {
    pub(crate) use super::{contexts::*, copies::*, memories::*, modules::*, streams::*};
}
