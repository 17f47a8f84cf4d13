//! Memory that the adapter may reach.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Error;
use super::device::Device;
use super::sys;
use crate::transport::Access;
use kvasir_memory::region::Region;

/// A region known to the adapter, pinned until dropped.
///
/// Registering pins every page and takes milliseconds per gibibyte: it belongs to the start, not to a transfer.
pub struct MemoryRegion {
    device: Arc<Device>,
    mr: NonNull<sys::Mr>,
    /// Keeps the memory where it is.
    region: Region,
}

// SAFETY: the registration is a handle of the thread-safe library; the pointer is owned until dropped.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; no method gives access to the bytes.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a region: of the host as it is, of a GPU by its dma-buf.
    ///
    /// # Errors
    /// As [`new`](Self::new) or [`of_dmabuf`](Self::of_dmabuf), or that the GPU exports no dma-buf.
    pub fn of(device: &Arc<Device>, region: &Region, peers: Option<Access>) -> Result<Arc<Self>, Error> {
        let location = region.location();
        if location.is_host() {
            return Self::new(device, region, peers);
        }
        let none = |reason| Error::DeviceMemory { device: device.name().into(), location, reason };
        let dma_buf = region.dma_buf().map_err(none)?;
        // The kernel holds the buffer from here on; the descriptor is not needed any more.
        Self::of_dmabuf(device, region, dma_buf.as_fd(), 0, peers)
    }

    /// Registers memory of the host, for operations of our own, and for what `peers` that get the key may do.
    ///
    /// # Errors
    /// What the system said; often a limit on locked memory (`ulimit -l`).
    pub fn new(device: &Arc<Device>, region: &Region, peers: Option<Access>) -> Result<Arc<Self>, Error> {
        region.fill();
        let (base, len, flags) = (region.base(), region.len(), access_flags(region, peers));
        // SAFETY: the domain is alive; the region's memory has this base and length for as long as it lives.
        let mr =
            unsafe { (device.verbs.reg_mr)(device.pd.as_ptr(), base.as_ptr().cast(), len as usize, flags) };
        let mr = NonNull::new(mr)
            .ok_or_else(|| device.failed("registering memory")(io::Error::last_os_error()))?;
        Ok(Arc::new(Self { device: Arc::clone(device), mr, region: region.clone() }))
    }

    /// Registers device memory that its driver exported as a dma-buf (from `offset` in it on), so that the adapter
    /// reaches it without a copy through the host.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the library, the driver or the adapter cannot do it.
    pub fn of_dmabuf(
        device: &Arc<Device>,
        region: &Region,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        peers: Option<Access>,
    ) -> Result<Arc<Self>, Error> {
        let unsupported =
            || Error::Unsupported { what: "registering a dma-buf", device: device.name().into() };
        let register = device.verbs.reg_dmabuf_mr.ok_or_else(unsupported)?;
        let (pd, fd) = (device.pd.as_ptr(), dmabuf.as_raw_fd());
        let (base, len, flags) = (region.base().as_ptr() as u64, region.len(), access_flags(region, peers));
        // SAFETY: the domain is alive; the kernel checks descriptor and range and holds its own reference to
        // the buffer.
        let mr = unsafe { register(pd, offset, len as usize, base, fd, flags) };
        let Some(mr) = NonNull::new(mr) else {
            let error = io::Error::last_os_error();
            let known = error.kind() == io::ErrorKind::Unsupported;
            return Err(if known { unsupported() } else { device.failed("registering a dma-buf")(error) });
        };
        Ok(Arc::new(Self { device: Arc::clone(device), mr, region: region.clone() }))
    }

    pub fn len(&self) -> u64 {
        self.region.len()
    }

    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// The address at which a peer finds the first byte.
    pub fn address(&self) -> u64 {
        self.region.base().as_ptr() as u64
    }

    /// The key that lets peers connected to this device reach the region.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the registration lives until `self` is dropped; the key never changes.
        unsafe { (*self.mr.as_ptr()).rkey }
    }

    /// Whether the processor can read it: what an inline write needs.
    pub(super) fn is_host(&self) -> bool {
        self.region.location().is_host()
    }

    pub(super) fn belongs_to(&self, device: &Device) -> bool {
        std::ptr::eq(&*self.device, device)
    }

    /// The scatter/gather element of a range.
    pub(super) fn element(&self, offset: u64, len: u32) -> Result<sys::Sge, Error> {
        let outside = Error::OutOfRegion { offset, len: len.into(), region_bytes: self.len() };
        let end = offset.checked_add(len.into()).filter(|&end| end <= self.len());
        end.ok_or(outside)?;
        // SAFETY: as in `remote_key`.
        let lkey = unsafe { (*self.mr.as_ptr()).lkey };
        Ok(sys::Sge { addr: self.address() + offset, length: len, lkey })
    }
}

fn access_flags(region: &Region, peers: Option<Access>) -> c_int {
    let local = if region.writable() { sys::ACCESS_LOCAL_WRITE } else { 0 };
    let remote = match peers {
        None => 0,
        Some(Access::Read) => sys::ACCESS_REMOTE_READ,
        Some(Access::Write) => sys::ACCESS_REMOTE_WRITE,
        Some(Access::ReadWrite) => sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE,
    };
    local | remote
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: operations in flight hold an `Arc` of this value, so the adapter no longer writes here on our
        // account; a peer's access after this is refused by the adapter. The memory is released after the call.
        unsafe { (self.device.verbs.dereg_mr)(self.mr.as_ptr()) };
    }
}
