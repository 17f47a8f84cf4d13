//! Events: how often they were recorded, and how often a stream came there.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::device::{self, Device};
use crate::memory;
use crate::outcome::{CudaError, Outcome};

/// How long a waiting thread sleeps between two looks. An event may be another process's, so there is nothing to wait on.
const LOOK: Duration = Duration::from_micros(30);
const SHARED_BYTES: usize = 4096;

#[derive(Default)]
struct Counts {
    recorded: AtomicU64,
    complete: AtomicU64,
}

pub(crate) struct Event {
    device: usize,
    counts: Where,
    /// To be opened by other processes, under this number.
    pub(crate) shared: Option<(u64, OwnedFd)>,
}

enum Where {
    Here(Counts),
    /// At this address of a shared mapping, which ends with the event.
    Mapped(usize),
}

static EVENTS: Mutex<BTreeMap<usize, Arc<Event>>> = Mutex::new(BTreeMap::new());

pub(crate) fn create(device: usize, shared: bool) -> Outcome<usize> {
    if !shared {
        return Ok(insert(Event { device, counts: Where::Here(Counts::default()), shared: None }));
    }
    let id = memory::unique();
    let fd = memory::create(&memory::name(id), SHARED_BYTES)?;
    let counts = mapped(&fd)?;
    Ok(insert(Event { device, counts, shared: Some((id, fd)) }))
}

pub(crate) fn import(device: usize, fd: &OwnedFd) -> Outcome<usize> {
    Ok(insert(Event { device, counts: mapped(fd)?, shared: None }))
}

pub(crate) fn get(handle: usize) -> Outcome<Arc<Event>> {
    EVENTS.lock().get(&handle).cloned().ok_or(CudaError::INVALID_HANDLE)
}

pub(crate) fn destroy(handle: usize) -> Outcome<()> {
    EVENTS.lock().remove(&handle).map(drop).ok_or(CudaError::INVALID_HANDLE)
}

pub(crate) fn count(device: usize) -> usize {
    EVENTS.lock().values().filter(|event| event.device == device).count()
}

fn insert(event: Event) -> usize {
    let handle = crate::api::handle();
    EVENTS.lock().insert(handle, Arc::new(event));
    handle
}

fn mapped(fd: &OwnedFd) -> Outcome<Where> {
    memory::map_file(fd, SHARED_BYTES, libc::PROT_READ | libc::PROT_WRITE).map(Where::Mapped)
}

impl Event {
    fn counts(&self) -> &Counts {
        match &self.counts {
            Where::Here(counts) => counts,
            // SAFETY: mapped until this is dropped, aligned to a page, zeroed at first, and atomics have no invalid bytes.
            Where::Mapped(address) => unsafe { &*(*address as *const Counts) },
        }
    }

    /// A new point, which [`reach`](Self::reach) completes.
    pub(crate) fn record(&self) -> u64 {
        self.counts().recorded.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn reach(&self, point: u64) {
        self.counts().complete.fetch_max(point, Ordering::SeqCst);
    }

    /// The point that was recorded last.
    pub(crate) fn point(&self) -> u64 {
        self.counts().recorded.load(Ordering::SeqCst)
    }

    pub(crate) fn is_complete(&self, point: u64) -> bool {
        self.counts().complete.load(Ordering::SeqCst) >= point
    }

    /// Waits, for as long as the device works.
    pub(crate) fn wait(&self, point: u64, device: &Device) -> Outcome<()> {
        while !self.is_complete(point) {
            device.check()?;
            thread::sleep(LOOK);
        }
        device.check()
    }

    pub(crate) fn device(&self) -> Outcome<&'static Device> {
        device::get(self.device as i32)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Where::Mapped(address) = self.counts {
            // SAFETY: mapped by `mapped`, and this is the last that knows it.
            unsafe { libc::munmap(address as *mut _, SHARED_BYTES) };
        }
    }
}
