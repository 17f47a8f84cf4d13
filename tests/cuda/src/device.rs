//! The devices, and which of them a thread has bound.

use parking_lot::Mutex;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::chance::number;
use crate::outcome::{CudaError, Outcome};
use crate::stream::Stream;
use crate::{event, kernel, memory, stream};

pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) bytes: u64,
    /// The error of work, after which nothing is accepted any more. 0 is none.
    failed: AtomicU32,
    /// Users of the primary context.
    users: Mutex<u32>,
    /// The stream of calls that name none.
    default_stream: Mutex<Option<Arc<Stream>>>,
}

static INITIALISED: AtomicBool = AtomicBool::new(false);
static DEVICES: LazyLock<Vec<Device>> = LazyLock::new(|| {
    let bytes = number("KVASIR_CUDA_BYTES", 4 << 30);
    let device = |ordinal| Device {
        ordinal,
        bytes,
        failed: AtomicU32::new(0),
        users: Mutex::new(0),
        default_stream: Mutex::new(None),
    };
    (0..number("KVASIR_CUDA_DEVICES", 2) as usize).map(device).collect()
});

thread_local! {
    /// The bound context: the device's ordinal and 1, or 0.
    static BOUND: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn initialise() {
    INITIALISED.store(true, Ordering::Relaxed);
}

pub(crate) fn all() -> Outcome<&'static [Device]> {
    if !INITIALISED.load(Ordering::Relaxed) {
        return Err(CudaError::NOT_INITIALIZED);
    }
    Ok(&DEVICES)
}

pub(crate) fn get(ordinal: i32) -> Outcome<&'static Device> {
    let found = usize::try_from(ordinal).ok().and_then(|ordinal| all().ok()?.get(ordinal));
    found.ok_or(CudaError::INVALID_DEVICE)
}

/// The device that this thread has bound, if it still accepts work.
pub(crate) fn current() -> Outcome<&'static Device> {
    let bound = BOUND.get().checked_sub(1).and_then(|ordinal| all().ok()?.get(ordinal));
    let device = bound.ok_or(CudaError::INVALID_CONTEXT)?;
    if *device.users.lock() == 0 {
        return Err(CudaError::INVALID_CONTEXT);
    }
    device.check()?;
    Ok(device)
}

pub(crate) fn bound() -> *mut c_void {
    BOUND.get() as *mut c_void
}

pub(crate) fn bind(context: *mut c_void) -> Outcome<()> {
    if context as usize > all()?.len() {
        return Err(CudaError::INVALID_CONTEXT);
    }
    BOUND.set(context as usize);
    Ok(())
}

impl Device {
    pub(crate) fn retain(&self) -> *mut c_void {
        *self.users.lock() += 1;
        (self.ordinal + 1) as *mut c_void
    }

    pub(crate) fn release(&self) -> Outcome<()> {
        let mut users = self.users.lock();
        *users = users.checked_sub(1).ok_or(CudaError::INVALID_CONTEXT)?;
        if *users > 0 {
            return Ok(());
        }
        let left = [
            ("allocations", memory::count(self.ordinal)),
            ("streams", stream::count(self.ordinal)),
            ("events", event::count(self.ordinal)),
            ("modules", kernel::count(self.ordinal)),
        ];
        // A device that has failed takes nothing back.
        if self.check().is_ok() && left.iter().any(|(_, count)| *count > 0) {
            eprintln!(
                "software CUDA device {}: its context ends, and there are left: {left:?}",
                self.ordinal
            );
            std::process::abort();
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Outcome<()> {
        match self.failed.load(Ordering::SeqCst) {
            0 => Ok(()),
            error => Err(CudaError(error)),
        }
    }

    pub(crate) fn fail(&self, error: CudaError) {
        let _ = self.failed.compare_exchange(0, error.0, Ordering::SeqCst, Ordering::SeqCst);
    }

    pub(crate) fn default_stream(&self) -> Arc<Stream> {
        self.default_stream.lock().get_or_insert_with(|| Stream::start(self.ordinal)).clone()
    }

    /// Waits for all work that was submitted, also of streams that were destroyed since.
    pub(crate) fn synchronise(&self) -> Outcome<()> {
        for stream in stream::running(self.ordinal) {
            stream.wait_for_all();
        }
        self.check()
    }
}
