//! GPU memory and events of one process, used by another on the same host.
//!
//! An engine keeps its KV cache in memory of its own. It sends a [`MemoryHandle`], and this process reads and writes that
//! cache without a copy between; an [`EventHandle`] says when a layer is ready. The driver refuses to open a handle in
//! the process that made it.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::error::CudaError;
use super::event::Event;
use kvasir_memory::device_handle::RAW;
pub use kvasir_memory::device_handle::{MEMORY_HANDLE_LEN, MemoryHandle};
use kvasir_memory::region::{Location, Memory, Region};

/// The handle of memory that begins at `address`, anywhere in an allocation of this process.
pub(super) fn handle_of(device: &Arc<Device>, address: u64) -> Result<MemoryHandle, CudaError> {
    device.bind()?;
    let (mut base, mut len) = (0, 0);
    // SAFETY: the driver looks the address up in its tables and writes two numbers.
    unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut len, address) }
        .result()
        .map_err(device.failed("looking an allocation up"))?;
    let mut raw = sys::CUipcMemHandle { reserved: [0; RAW] };
    // SAFETY: the driver checks the address and writes one handle.
    unsafe { sys::cuIpcGetMemHandle(&mut raw, base) }
        .result()
        .map_err(device.failed("sharing memory with another process"))?;
    Ok(MemoryHandle { raw: raw.reserved.map(|byte| byte as u8), offset: address - base })
}

/// Opens `len` bytes of another process's memory on `device`, which must be the GPU they are on or one that reaches
/// it. The driver keeps the memory there until all processes have let go of it.
///
/// # Errors
/// The handle is of this very process or of memory that is gone, the memory is shorter, or what the driver says.
pub fn open(handle: &MemoryHandle, device: &Arc<Device>, len: u64) -> Result<Region, CudaError> {
    device.bind()?;
    let mut base = 0;
    let raw = sys::CUipcMemHandle { reserved: handle.raw.map(|byte| byte as _) };
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    // SAFETY: the driver checks the handle, which is plain bytes, and writes one address.
    unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, raw, flags) }
        .result()
        .map_err(device.failed("opening another process's memory"))?;
    let opened = Opened { device: device.clone(), base };
    let memory = opened.part(handle.offset, len)?;
    Ok(Region::new(Box::new(memory)))
}

/// Another process's allocation, until dropped.
struct Opened {
    device: Arc<Device>,
    base: u64,
}

impl Opened {
    fn part(self, offset: u64, len: u64) -> Result<OpenedMemory, CudaError> {
        let (mut base, mut held) = (0, 0);
        // SAFETY: the driver looks the address up in its tables and writes two numbers.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut held, self.base) }
            .result()
            .map_err(self.device.failed("looking an allocation up"))?;
        let inside = len > 0 && offset.checked_add(len).is_some_and(|end| end <= held as u64);
        let start = inside.then(|| NonNull::new((self.base + offset) as *mut u8)).flatten();
        let outside = || self.device.unsupported("open memory", "the handle's allocation is shorter");
        let start = start.ok_or_else(outside)?;
        Ok(OpenedMemory { start, len, opened: self })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Copies under way still use it. If waiting for them fails, the driver has ended them.
        let _ = self.device.context().synchronize();
        // SAFETY: opened once by `open`, and no copy of this process uses it any more.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
    }
}

struct OpenedMemory {
    opened: Opened,
    start: NonNull<u8>,
    len: u64,
}

// SAFETY: an address on a GPU, which this process cannot read; the opened allocation is owned.
unsafe impl Send for OpenedMemory {}
// SAFETY: as above.
unsafe impl Sync for OpenedMemory {}

// SAFETY: the driver keeps an opened allocation where it is until it is closed, which happens when this is dropped.
unsafe impl Memory for OpenedMemory {
    fn base(&self) -> NonNull<u8> {
        self.start
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn location(&self) -> Location {
        Location::Cuda(self.opened.device.number())
    }
    fn load(&self, offset: u64, to: &mut [u8]) -> bool {
        self.opened.device.load(self.start.as_ptr() as u64 + offset, to).is_ok()
    }
    fn store(&self, offset: u64, from: &[u8]) -> bool {
        self.opened.device.store(self.start.as_ptr() as u64 + offset, from).is_ok()
    }
}

/// A right to wait for an [`Event`] of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventHandle(pub [u8; RAW]);

impl EventHandle {
    /// The handle of an event that was made [to be shared](Event::shared).
    ///
    /// # Errors
    /// The event was not made so, or what the driver says.
    pub fn of(device: &Arc<Device>, event: &Event) -> Result<Self, CudaError> {
        device.bind()?;
        let mut raw = sys::CUipcEventHandle { reserved: [0; RAW] };
        // SAFETY: the event is alive, and the driver writes one handle.
        unsafe { sys::cuIpcGetEventHandle(&mut raw, event.raw()) }
            .result()
            .map_err(device.failed("sharing an event with another process"))?;
        Ok(Self(raw.reserved.map(|byte| byte as u8)))
    }

    /// Opens another process's event.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open(&self, device: &Arc<Device>) -> Result<Event, CudaError> {
        device.bind()?;
        let mut event = ptr::null_mut();
        let raw = sys::CUipcEventHandle { reserved: self.0.map(|byte| byte as _) };
        // SAFETY: the driver checks the handle, which is plain bytes, and writes one event.
        unsafe { sys::cuIpcOpenEventHandle(&mut event, raw) }
            .result()
            .map_err(device.failed("opening another process's event"))?;
        Ok(Event::from_raw(device, event))
    }
}
