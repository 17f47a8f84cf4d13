//! A GPU's memory, divided into ranges.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{DriverError, result, sys};

use super::device::{Device, driver_has};
use super::error::CudaError;
use super::ipc::{self, MemoryHandle};
use kvasir_memory::extents::{Extents, PAGE};
use kvasir_memory::region::{Location, Memory, Region};

/// The driver shares whole pages of this size with another process: a smaller allocation would lie in one with
/// others, and expose them too.
const DRIVER_PAGE: u64 = 2 << 20;

/// One allocation on a GPU, from which [`DeviceRange`]s are taken. The driver's own allocator takes a millisecond and
/// waits for the GPU; this one does neither.
#[derive(Debug)]
pub struct DevicePool {
    device: Arc<Device>,
    base: NonNull<u8>,
    bytes: u64,
    extents: Mutex<Extents>,
}

// SAFETY: `base` is a number to this process, which cannot read what it points to; the allocation is owned.
unsafe impl Send for DevicePool {}
// SAFETY: as above.
unsafe impl Sync for DevicePool {}

impl DevicePool {
    /// Takes `bytes` of the GPU's memory, rounded up to pages of 4 KiB. What the driver allocates is rounded up to 2
    /// MiB.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or what the driver says.
    pub fn open(device: &Arc<Device>, bytes: u64) -> Result<Arc<Self>, CudaError> {
        let (free, total) = device.memory()?;
        let out_of_memory = || CudaError::OutOfMemory { device: device.number(), wanted: bytes, free, total };
        let taken = bytes.max(1).checked_next_multiple_of(DRIVER_PAGE).filter(|&taken| taken <= free);
        let taken = taken.ok_or_else(out_of_memory)?;
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        // SAFETY: the context is current on this thread since `memory`; the allocation is owned by the pool.
        let address = unsafe { result::malloc_sync(taken as usize) };
        let address = address.map_err(|error| match error {
            // Enough is free, but not in one piece.
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => out_of_memory(),
            error => device.failed("allocating memory")(error),
        })?;
        let base = NonNull::new(address as *mut u8);
        let base = base.ok_or_else(|| device.unsupported("give memory", "the driver gave none"))?;
        let extents = Mutex::new(Extents::new(bytes));
        Ok(Arc::new(Self { device: device.clone(), base, bytes, extents }))
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that no range has taken.
    pub fn free_bytes(&self) -> u64 {
        self.extents().free_bytes()
    }

    /// A range of `len` bytes, at least 1, or `None` if no free piece is long enough.
    pub fn allocate(self: &Arc<Self>, len: u64) -> Option<DeviceRange> {
        let offset = self.extents().allocate(len.max(1))?;
        Some(DeviceRange { pool: self.clone(), offset, len: len.max(1) })
    }

    /// All of it, for transfers.
    pub fn region(self: &Arc<Self>) -> Region {
        Region::new(Box::new(PoolMemory(self.clone())))
    }

    /// A dma-buf of the whole pool, by which a network adapter reaches the GPU's memory without the host (GPUDirect).
    ///
    /// # Errors
    /// The GPU or its driver (before 11.7, or without the open kernel modules) cannot.
    pub fn dma_buf(&self) -> Result<OwnedFd, CudaError> {
        const WHAT: &str = "export memory as a dma-buf";
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        let known = self.device.context().attribute(attribute).is_ok_and(|supported| supported > 0);
        if !known || !driver_has("cuMemGetHandleForAddressRange") {
            return Err(self.device.unsupported(WHAT, "GPU or driver do not support it"));
        }
        self.device.bind()?;
        let mut fd = -1i32;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let address = self.base.as_ptr() as u64;
        // SAFETY: the range is the pool's own allocation, whole pages; for this kind the driver writes one descriptor.
        unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, self.bytes as usize, kind, 0)
        }
        .result()
        .map_err(self.device.failed(WHAT))?;
        // SAFETY: the call succeeded, so this is a fresh descriptor that nobody else owns.
        Ok(unsafe { File::from_raw_fd(fd) }.into())
    }

    fn extents(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DevicePool {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by `open`; ranges and regions hold the pool, so nobody names it any more.
            let _ = unsafe { result::free_sync(self.base.as_ptr() as u64) };
        }
    }
}

/// A piece of a pool, free again when dropped. Keep it until all work of a GPU on it is done.
#[derive(Debug)]
pub struct DeviceRange {
    pool: Arc<DevicePool>,
    offset: u64,
    len: u64,
}

impl DeviceRange {
    pub fn pool(&self) -> &Arc<DevicePool> {
        &self.pool
    }

    /// Where in the pool it begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false; it is here only because [`len`](Self::len) is.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The address of its first byte, on the GPU.
    pub(crate) fn address(&self) -> u64 {
        self.pool.base.as_ptr() as u64 + self.offset
    }
}

impl Drop for DeviceRange {
    fn drop(&mut self) {
        self.pool.extents().free(self.offset, self.len);
    }
}

struct PoolMemory(Arc<DevicePool>);

// SAFETY: the pool's allocation stays where it is, and the GPU reads and writes it, as long as the pool lives.
unsafe impl Memory for PoolMemory {
    fn base(&self) -> NonNull<u8> {
        self.0.base
    }
    fn len(&self) -> u64 {
        self.0.bytes
    }
    fn location(&self) -> Location {
        Location::Cuda(self.0.device.number())
    }
    fn load(&self, offset: u64, to: &mut [u8]) -> bool {
        self.0.device.load(self.0.base.as_ptr() as u64 + offset, to).is_ok()
    }
    fn store(&self, offset: u64, from: &[u8]) -> bool {
        self.0.device.store(self.0.base.as_ptr() as u64 + offset, from).is_ok()
    }
    fn dma_buf(&self) -> Result<OwnedFd, String> {
        self.0.dma_buf().map_err(|error| error.to_string())
    }
    fn handle(&self) -> Option<MemoryHandle> {
        ipc::handle_of(&self.0.device, self.0.base.as_ptr() as u64).ok()
    }
}

#[cfg(test)]
mod gpu {
    use super::*;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn a_pool_gives_ranges_and_takes_them_back() {
        let device = Device::open(0).unwrap();
        let pool = DevicePool::open(&device, (1 << 20) + 1).unwrap();
        assert_eq!((pool.bytes(), pool.free_bytes()), ((1 << 20) + PAGE, (1 << 20) + PAGE));
        let range = pool.allocate(1 << 20).unwrap();
        assert_eq!((pool.free_bytes(), pool.allocate(PAGE + 1).is_none()), (PAGE, true));
        drop(range);
        assert_eq!(pool.free_bytes(), pool.bytes());
        let (_, total) = device.memory().unwrap();
        let error = DevicePool::open(&device, total + 1).unwrap_err();
        assert!(matches!(error, CudaError::OutOfMemory { .. }), "{error}");
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn bytes_of_a_region_are_copied_in_and_out() {
        let device = Device::open(0).unwrap();
        let region = DevicePool::open(&device, 8192).unwrap().region();
        assert_eq!(region.location(), Location::Cuda(0));
        assert_eq!(region.range(4000, 5).unwrap().copy_in(b"bytes"), 5);
        let mut out = [0; 5];
        assert_eq!(region.range(4000, 5).unwrap().copy_out(&mut out), 5);
        assert_eq!(&out, b"bytes");
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn a_dma_buf_is_given_or_refused_with_the_reason() {
        let device = Device::open(0).unwrap();
        match DevicePool::open(&device, 4 << 20).unwrap().dma_buf() {
            Ok(_) => println!("cuda:0 exports dma-bufs"),
            Err(error) => assert!(error.to_string().contains("dma-buf"), "{error}"),
        }
    }
}
