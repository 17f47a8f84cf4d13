//! Handles: numbers that C takes for pointers. They are looked up and never followed, and none is used twice.
//!
//! A child of `fork` has copies of the tables, but none of the threads, and shares its parent's sockets. So each entry knows
//! the process that made it, and is of no use to another.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use kvasir_client::sync::Mutex;

use crate::failure::Failure;

/// The process that made the latest handle; 0 before the first. Asked before any lock, which a thread of the parent may have
/// held when it forked.
static MAKER: AtomicU32 = AtomicU32::new(0);

pub(crate) struct Handles<T> {
    what: &'static str,
    open: Mutex<Option<HashMap<usize, Entry<T>>>>,
}

struct Entry<T> {
    value: Arc<T>,
    /// The process that made it.
    maker: u32,
}

impl<T> Handles<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, open: Mutex::new(None) }
    }

    pub(crate) fn add(&self, value: T) -> usize {
        /// Steps that leave every handle odd, so that it is the address of nothing that C keeps.
        static NEXT: AtomicUsize = AtomicUsize::new(0x6b76_0001);
        let handle = NEXT.fetch_add(2, Ordering::Relaxed);
        let maker = std::process::id();
        self.open.lock().get_or_insert_default().insert(handle, Entry { value: Arc::new(value), maker });
        MAKER.store(maker, Ordering::Relaxed);
        handle
    }

    pub(crate) fn get<H>(&self, handle: *const H) -> Result<Arc<T>, Failure> {
        let here = self.process()?;
        let open = self.open.lock();
        let entry = open.as_ref().and_then(|open| open.get(&handle.addr()));
        let entry = entry.ok_or_else(|| self.unknown(handle))?;
        if entry.maker == here { Ok(Arc::clone(&entry.value)) } else { Err(self.forked(entry.maker, here)) }
    }

    /// Takes a handle out of use. What is under way with it ends first, by the last who holds the value.
    pub(crate) fn remove<H>(&self, handle: *const H) -> Result<Arc<T>, Failure> {
        // Refuses one of another process, which stays: to drop it would wait for threads that are not here.
        self.get(handle)?;
        let mut open = self.open.lock();
        let entry = open.as_mut().and_then(|open| open.remove(&handle.addr()));
        entry.map(|entry| entry.value).ok_or_else(|| self.unknown(handle))
    }

    /// This process, if some handle can be its own.
    fn process(&self) -> Result<u32, Failure> {
        let (maker, here) = (MAKER.load(Ordering::Relaxed), std::process::id());
        if maker == 0 || maker == here { Ok(here) } else { Err(self.forked(maker, here)) }
    }

    fn forked(&self, maker: u32, here: u32) -> Failure {
        let what = self.what;
        Failure::forked(format!(
            "the handle of a {what} was made by process {maker}, and process {here} was forked from it since; \
             make another one here"
        ))
    }

    fn unknown<H>(&self, handle: *const H) -> Failure {
        let what = self.what;
        Failure::invalid(match handle.is_null() {
            true => format!("the handle of a {what} is null"),
            false => format!("{handle:p} is not the handle of an open {what}"),
        })
    }
}
