//! A sequence of work on a GPU.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::device::Device;
use super::error::CudaError;
use super::event::Event;

/// Work that a GPU does one after the other, concurrently with that of other streams. One stream per direction lets
/// both directions of the bus be used at once.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    inner: Arc<CudaStream>,
}

impl Stream {
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let inner = device.context().new_stream().map_err(device.failed("creating a stream"))?;
        Ok(Self { device: device.clone(), inner })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The handle by which the driver, and an engine, knows it.
    pub fn handle(&self) -> u64 {
        self.raw().expose_provenance() as u64
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.inner.cu_stream()
    }

    /// A point after all the work submitted so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn mark(&self) -> Result<Event, CudaError> {
        let event = Event::new(&self.device)?;
        self.record(&event)?;
        Ok(event)
    }

    /// Moves `event` to the point after all the work submitted so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        unsafe { sys::cuEventRecord(event.raw(), self.raw()) }
            .result()
            .map_err(self.device.failed("recording an event"))
    }

    /// Has later work in this stream begin when the work before `event` is complete. The caller does not wait.
    ///
    /// # Errors
    /// What the driver says.
    pub fn after(&self, event: &Event) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: both handles are alive; 0 means no flags.
        unsafe { sys::cuStreamWaitEvent(self.raw(), event.raw(), 0) }
            .result()
            .map_err(self.device.failed("waiting for an event"))
    }

    /// Sleeps until all of its work is complete.
    ///
    /// # Errors
    /// Some of it failed, or the driver did.
    pub fn drain(&self) -> Result<(), CudaError> {
        match self.mark() {
            Ok(event) => event.wait(),
            // There is no event to wait for, and work must not stay under way for lack of one. This wait may spin.
            Err(_) => self.inner.synchronize().map_err(self.device.failed("waiting for a stream")),
        }
    }

    /// As [`drain`](Self::drain), and whatever the driver says, nothing is under way when this returns. A driver that fails
    /// to wait is asked again, until it has waited or the context is gone, with which its work has ended.
    ///
    /// # Errors
    /// As [`drain`](Self::drain), the first of them.
    pub(super) fn settle(&self) -> Result<(), CudaError> {
        /// As long as no processor is kept busy with asking.
        const AGAIN: Duration = Duration::from_millis(1);
        let first = self.drain();
        if first.is_ok() {
            return first;
        }
        while let Err(error) = self.inner.synchronize() {
            if ends_context(error) {
                break;
            }
            thread::sleep(AGAIN);
        }
        first
    }

    /// Begins a copy of `len` bytes between addresses of any GPU or of the host; the driver knows which is which.
    ///
    /// # Safety
    /// Both ranges stay valid, the target is not touched and the source is not written until the copy is complete.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: passed on to the caller.
        unsafe { sys::cuMemcpyAsync(to, from, len, self.raw()) }
            .result()
            .map_err(self.device.failed("starting a copy"))
    }
}

/// Whether the driver says that the context is gone, or takes nothing back from it: then no work of it is under way. These are
/// the errors of which its documentation says that the process must be ended to go on, and those of a context that is no more.
fn ends_context(DriverError(error): DriverError) -> bool {
    use sys::CUresult::*;
    matches!(
        error,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_INVALID_CONTEXT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_MPS_CLIENT_TERMINATED
    )
}
