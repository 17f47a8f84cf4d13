//! Points in the work of a GPU.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{DriverError, sys};

use super::device::Device;
use super::error::CudaError;

/// A point in a stream's work: complete when everything before it is.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: an event is a handle of the thread-safe driver and not tied to a thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

const BLOCKING: u32 = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
const NO_TIMING: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const SHARED: u32 = sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32;

impl Event {
    /// An event in which nothing was recorded; it counts as complete. Waiting for it sleeps and does not spin.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with_flags(device, BLOCKING | NO_TIMING)
    }

    /// An event that other processes may wait for; see [`ipc::EventHandle`](super::ipc::EventHandle).
    ///
    /// # Errors
    /// What the driver says.
    pub fn shared(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with_flags(device, BLOCKING | NO_TIMING | SHARED)
    }

    fn with_flags(device: &Arc<Device>, flags: u32) -> Result<Self, CudaError> {
        device.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current on this thread, and the driver writes one handle.
        let made = unsafe { sys::cuEventCreate(&mut raw, flags) }.result();
        made.map_err(device.failed("creating an event"))?;
        Ok(Self::from_raw(device, raw))
    }

    /// Takes over a handle.
    pub(super) fn from_raw(device: &Arc<Device>, raw: sys::CUevent) -> Self {
        Self { device: device.clone(), raw }
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Whether the work before it is complete.
    ///
    /// # Errors
    /// The work failed, or the driver did.
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        self.device.bind()?;
        // SAFETY: the handle lives as long as this value.
        match unsafe { sys::cuEventQuery(self.raw) }.result() {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(self.device.failed("copying")(error)),
        }
    }

    /// Sleeps until the work before it is complete.
    ///
    /// # Errors
    /// As [`is_complete`](Self::is_complete).
    pub fn wait(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: the handle lives as long as this value.
        unsafe { sys::cuEventSynchronize(self.raw) }.result().map_err(self.device.failed("copying"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the handle is owned and not used after this. What still waits for it keeps what it needs.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
