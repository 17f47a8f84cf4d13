//! One GPU.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::error::{CudaError, text};
use super::paged::Kernels;
use super::pinned::PinnedRanges;

/// A GPU, with the context that everything in this process shares (the primary one). A process has one value for each.
#[derive(Debug)]
pub struct Device {
    number: u16,
    kernels: OnceLock<Result<Kernels, CudaError>>,
    context: Arc<CudaContext>,
    // Locks of the standard library, which a child of a fork can wait for: see `kvasir_client::sync`.
    pinned: Mutex<PinnedRanges>,
}

/// The PCI addresses of the GPUs that this process may use, in order: the first is `cuda:0`.
///
/// # Errors
/// [`CudaError::NoLibrary`] or [`CudaError::NoDriver`]; the latter also if the driver finds no GPU at all.
pub fn devices() -> Result<Vec<String>, CudaError> {
    let found = by_address()?;
    Ok(found.into_iter().map(|(address, _)| address).collect())
}

impl Device {
    /// Opens `cuda:number`. GPUs count in order of PCI address among those that `CUDA_VISIBLE_DEVICES` leaves visible.
    ///
    /// # Errors
    /// As [`devices`], or [`CudaError::NoDevice`].
    pub fn open(number: u16) -> Result<Arc<Self>, CudaError> {
        /// The devices in use. They are shared, because everyone must know the same pinned memory.
        static OPEN: Mutex<BTreeMap<u16, Weak<Device>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&number).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Self::new(number)?;
        open.insert(number, Arc::downgrade(&device));
        Ok(device)
    }

    fn new(number: u16) -> Result<Arc<Self>, CudaError> {
        let found = by_address()?;
        let there = found.len();
        let (_, ordinal) =
            found.into_iter().nth(number.into()).ok_or(CudaError::NoDevice { device: number, there })?;
        let context = CudaContext::new(ordinal).map_err(CudaError::of(number, "opening"))?;
        Ok(Arc::new(Self { number, kernels: OnceLock::new(), context, pinned: Mutex::default() }))
    }

    /// The N of `cuda:N`.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Opens the GPU that the driver, and an engine, knows by this number, which depends on `CUDA_DEVICE_ORDER`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of_ordinal(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let found = by_address()?;
        let there = found.len();
        let number = found.iter().position(|(_, other)| *other == ordinal);
        // A number that nobody has is missing under either way to count.
        Self::open(number.unwrap_or(ordinal.max(there)).try_into().unwrap_or(u16::MAX))
    }

    /// The driver's own number of it.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// The name that the vendor gives it; empty if the driver does not say.
    pub fn name(&self) -> String {
        self.context.name().unwrap_or_default()
    }

    /// Free bytes, and bytes in total.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (free, total) = result::mem_get_info().map_err(self.failed("asking for its free memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Whether the GPU itself may read and write all `len` bytes of host memory from `address` on.
    pub fn is_pinned(&self, address: *const u8, len: usize) -> bool {
        self.pinned().contains(address as usize, len)
    }

    /// The kernels of `gather.cu`, loaded by the first call.
    pub(super) fn kernels(&self) -> Result<&Kernels, CudaError> {
        self.kernels.get_or_init(|| Kernels::load(self)).as_ref().map_err(Clone::clone)
    }

    pub(super) fn pinned(&self) -> MutexGuard<'_, PinnedRanges> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies bytes of a GPU to the host, and waits.
    pub(super) fn load(&self, from: u64, to: &mut [u8]) -> Result<(), DriverError> {
        self.context().bind_to_thread()?;
        // SAFETY: callers name memory that is theirs; `to` is a unique borrow, and the call returns when it is filled.
        unsafe { result::memcpy_dtoh_sync(to, from) }
    }

    /// Copies bytes of the host to a GPU, and waits.
    pub(super) fn store(&self, to: u64, from: &[u8]) -> Result<(), DriverError> {
        self.context().bind_to_thread()?;
        // SAFETY: callers name memory that is theirs; the call returns when `from` is not needed any more.
        unsafe { result::memcpy_htod_sync(to, from) }?;
        // The driver may still have the bytes in a buffer of its own, and our streams do not wait for that.
        self.context().synchronize()
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes this the GPU to which driver calls of this thread refer.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(self.failed("binding a thread"))
    }

    pub(super) fn failed(&self, step: &'static str) -> impl Fn(DriverError) -> CudaError {
        CudaError::of(self.number, step)
    }

    pub(super) fn unsupported(&self, what: &'static str, reason: &'static str) -> CudaError {
        CudaError::Unsupported { device: self.number, what, reason }
    }
}

/// Whether this driver has a function. Without this check cudarc panics if it is missing. Call it with a device open.
pub(super) fn driver_has(function: &str) -> bool {
    // SAFETY: a device is open, so the library is there; the symbol is looked up and not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(function.as_bytes()) }.is_ok()
}

/// PCI address and the driver's own number of each GPU, sorted.
fn by_address() -> Result<Vec<(String, usize)>, CudaError> {
    // SAFETY: opens libraries by the names of the NVIDIA driver; their initialisers are meant to run.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoLibrary);
    }
    let failed = |error| CudaError::NoDriver { reason: text(error) };
    result::init().map_err(failed)?;
    let count = result::device::get_count().map_err(failed)?;
    let mut found = Vec::new();
    for ordinal in 0..usize::try_from(count).unwrap_or(0) {
        found.push((address_of(ordinal).map_err(failed)?, ordinal));
    }
    found.sort();
    Ok(found)
}

/// The address on the bus, such as `0000:1b:00.0`; of fixed width, so that it sorts as text.
fn address_of(ordinal: usize) -> Result<String, DriverError> {
    let device = result::device::get(ordinal as i32)?;
    let mut text = [0 as c_char; 32];
    // SAFETY: the buffer has the length that is told, and the driver ends what it writes with a zero.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, device) }.result()?;
    // SAFETY: the buffer was zeroed and is longer than an address, so it ends with a zero in any case.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    Ok(text.to_string_lossy().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds on every machine: with a GPU, without one, and without the library.
    #[test]
    fn a_missing_device_is_an_error_that_says_so() {
        let error = Device::open(u16::MAX).expect_err("nobody has that many");
        assert!(error.to_string().starts_with("no CUDA device"), "{error}");
        if error == CudaError::NoLibrary {
            assert!(error.to_string().contains("libcuda.so.1 not found"), "{error}");
            assert_eq!(devices(), Err(CudaError::NoLibrary));
        }
    }
}

#[cfg(test)]
mod gpu {
    use super::*;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn devices_are_found_by_address() {
        let all = devices().unwrap();
        assert!(!all.is_empty() && all.is_sorted());
        let device = Device::open(0).unwrap();
        let (free, total) = device.memory().unwrap();
        println!("cuda:0 is {} at {}, {free} B free of {total} B", device.name(), all[0]);
        assert!(Arc::ptr_eq(&device, &Device::open(0).unwrap()));
        assert!(free <= total && total > 1 << 30 && !device.name().is_empty());
        let missing = Device::open(all.len() as u16).expect_err("one more than there are");
        assert_eq!(missing, CudaError::NoDevice { device: all.len() as u16, there: all.len() });
    }
}
