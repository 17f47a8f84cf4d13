//! Handles: numbers that C takes for pointers. They are looked up and never followed, and none is used twice.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::failure::Failure;

pub(crate) struct Handles<T> {
    what: &'static str,
    open: RwLock<Option<HashMap<usize, Arc<T>>>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, open: RwLock::new(None) }
    }

    pub(crate) fn add(&self, value: T) -> usize {
        /// Steps that leave every handle odd, so that it is the address of nothing that C keeps.
        static NEXT: AtomicUsize = AtomicUsize::new(0x6b76_0001);
        let handle = NEXT.fetch_add(2, Ordering::Relaxed);
        self.open.write().get_or_insert_default().insert(handle, Arc::new(value));
        handle
    }

    pub(crate) fn get<H>(&self, handle: *const H) -> Result<Arc<T>, Failure> {
        let open = self.open.read();
        open.as_ref().and_then(|open| open.get(&handle.addr()).cloned()).ok_or_else(|| self.unknown(handle))
    }

    /// Takes a handle out of use. What is under way with it ends first, by the last who holds the value.
    pub(crate) fn remove<H>(&self, handle: *const H) -> Result<Arc<T>, Failure> {
        let mut open = self.open.write();
        open.as_mut().and_then(|open| open.remove(&handle.addr())).ok_or_else(|| self.unknown(handle))
    }

    fn unknown<H>(&self, handle: *const H) -> Failure {
        let what = self.what;
        Failure::invalid(match handle.is_null() {
            true => format!("the handle of a {what} is null"),
            false => format!("{handle:p} is not the handle of an open {what}"),
        })
    }
}
