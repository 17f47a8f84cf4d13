//! Memory of devices, and memory of the host that devices know.

use parking_lot::{RwLock, RwLockReadGuard};
use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::outcome::{CudaError, Outcome};

/// What fresh memory holds, and what is left in freed memory that another process has open.
const FRESH: u8 = 0xa7;
const FREED: u8 = 0xde;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Allocated on a device.
    Device,
    /// On a device, and of another process.
    Imported,
    /// Page-locked memory of the driver.
    Host,
    /// Memory of the caller that was registered.
    Registered,
}

/// An address range that the device knows. It stays in the table after it was freed, so that its addresses are refused.
pub(crate) struct Range {
    pub(crate) kind: Kind,
    /// Where it was allocated; for memory of the host, from where.
    pub(crate) device: usize,
    /// What the caller knows as its address.
    pub(crate) base: usize,
    pub(crate) len: usize,
    /// Where the bytes are for us.
    bytes: usize,
    pub(crate) id: u64,
    /// The memory itself, if it can be opened by another process.
    pub(crate) fd: Option<OwnedFd>,
    gone: RwLock<bool>,
    /// How often it was opened.
    pub(crate) opened: AtomicU32,
}

static RANGES: RwLock<BTreeMap<usize, Arc<Range>>> = RwLock::new(BTreeMap::new());
/// Held while a kernel runs, which is the time in which device memory can be touched.
static KERNEL: RwLock<()> = RwLock::new(());
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Where a copy begins: in memory that the device knows, or somewhere else on the host.
#[derive(Clone)]
pub(crate) enum Place {
    Known(Arc<Range>, usize),
    Pageable(usize),
}

/// A place while it is used: the memory is not freed meanwhile.
pub(crate) struct Held<'a> {
    pub(crate) bytes: *mut u8,
    _range: Option<RwLockReadGuard<'a, bool>>,
}

impl Place {
    pub(crate) fn is_pageable(&self) -> bool {
        matches!(self, Self::Pageable(_))
    }

    pub(crate) fn is_on_host(&self) -> bool {
        match self {
            Self::Known(range, _) => matches!(range.kind, Kind::Host | Kind::Registered),
            Self::Pageable(_) => true,
        }
    }

    /// Fails if the memory was freed since the copy was submitted.
    pub(crate) fn hold(&self) -> Outcome<Held<'_>> {
        match self {
            Self::Pageable(address) => Ok(Held { bytes: *address as *mut u8, _range: None }),
            Self::Known(range, offset) => {
                // Source and target may be in the same range.
                let gone = range.gone.read_recursive();
                if *gone {
                    return Err(CudaError::ILLEGAL_ADDRESS);
                }
                Ok(Held { bytes: (range.bytes + offset) as *mut u8, _range: Some(gone) })
            }
        }
    }
}

/// Finds out what `len` bytes at an address are. Bytes of which only a part is known are refused.
pub(crate) fn look_up(address: u64, len: usize) -> Outcome<Place> {
    let address = usize::try_from(address).map_err(|_| CudaError::INVALID_VALUE)?;
    let end = address.checked_add(len).ok_or(CudaError::INVALID_VALUE)?;
    let ranges = RANGES.read();
    if let Some((_, range)) = ranges.range(..=address).next_back()
        && address < range.base + range.len
    {
        let whole = end <= range.base + range.len && !*range.gone.read();
        return if whole {
            Ok(Place::Known(range.clone(), address - range.base))
        } else {
            Err(CudaError::INVALID_VALUE)
        };
    }
    match ranges.range(address..end).next() {
        Some(_) => Err(CudaError::INVALID_VALUE),
        None if address == 0 => Err(CudaError::INVALID_VALUE),
        None => Ok(Place::Pageable(address)),
    }
}

/// The range that has an address, if it was not freed.
pub(crate) fn range_of(address: u64) -> Option<Arc<Range>> {
    match look_up(address, 1) {
        Ok(Place::Known(range, _)) => Some(range),
        _ => None,
    }
}

/// The range that begins at an address and is of one of these kinds.
pub(crate) fn begins(address: u64, kinds: &[Kind]) -> Option<Arc<Range>> {
    range_of(address).filter(|range| range.base as u64 == address && kinds.contains(&range.kind))
}

/// Ranges of a device that were not freed.
pub(crate) fn count(device: usize) -> usize {
    live(|range| range.device == device && range.kind != Kind::Registered).len()
}

/// Bytes that are allocated on a device.
pub(crate) fn used_bytes(device: usize) -> u64 {
    let ours = live(|range| range.device == device && range.kind == Kind::Device);
    ours.iter().map(|range| range.len as u64).sum()
}

pub(crate) fn live(wanted: impl Fn(&Range) -> bool) -> Vec<Arc<Range>> {
    let ranges = RANGES.read();
    ranges.values().filter(|range| wanted(range) && !*range.gone.read()).cloned().collect()
}

/// Memory on a device, full of poison.
pub(crate) fn allocate(device: usize, len: usize) -> Outcome<Arc<Range>> {
    let len = len.checked_next_multiple_of(page()).ok_or(CudaError::OUT_OF_MEMORY)?;
    let id = unique();
    let fd = create(&name(id), len)?;
    let range = map(Kind::Device, device, len, id, fd)?;
    // SAFETY: freshly mapped, and nobody else knows it.
    unsafe { ptr::write_bytes(range.bytes as *mut u8, FRESH, len) };
    Ok(insert(range))
}

/// Memory of another process.
pub(crate) fn import(device: usize, len: usize, id: u64, fd: OwnedFd) -> Outcome<Arc<Range>> {
    Ok(insert(map(Kind::Imported, device, len, id, fd)?))
}

/// Page-locked memory of the host, full of poison.
pub(crate) fn allocate_on_host(device: usize, len: usize) -> Outcome<Arc<Range>> {
    let len = len.checked_next_multiple_of(page()).ok_or(CudaError::OUT_OF_MEMORY)?;
    let base = reserve(len, libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: freshly mapped, and nobody else knows it.
    unsafe { ptr::write_bytes(base as *mut u8, FRESH, len) };
    Ok(insert(Range::new(Kind::Host, device, (base, base), len, unique(), None)))
}

/// Memory of the caller, which it keeps until it unregisters it.
pub(crate) fn register(device: usize, base: u64, len: usize) -> Outcome<()> {
    match look_up(base, len.max(1)) {
        Ok(Place::Pageable(base)) => {
            insert(Range::new(Kind::Registered, device, (base, base), len, unique(), None));
            Ok(())
        }
        Ok(Place::Known(..)) | Err(_) => Err(CudaError::HOST_MEMORY_ALREADY_REGISTERED),
    }
}

impl Range {
    fn new(
        kind: Kind,
        device: usize,
        (base, bytes): (usize, usize),
        len: usize,
        id: u64,
        fd: Option<OwnedFd>,
    ) -> Self {
        let gone = RwLock::new(false);
        Self { kind, device, base, len, bytes, id, fd, gone, opened: AtomicU32::new(1) }
    }

    /// Frees it, and waits for no work: what comes to it later fails.
    pub(crate) fn free(&self) {
        let _no_kernel = KERNEL.write();
        let mut gone = self.gone.write();
        *gone = true;
        match self.kind {
            Kind::Registered => {
                // Its addresses belong to the caller, who may register them again.
                drop(gone);
                RANGES.write().remove(&self.base);
            }
            Kind::Host => forbid(self.base, self.len),
            Kind::Device | Kind::Imported => {
                forbid(self.base, self.len);
                if self.kind == Kind::Device {
                    // SAFETY: still mapped, and `gone` keeps copies away.
                    unsafe { ptr::write_bytes(self.bytes as *mut u8, FREED, self.len) };
                }
                // SAFETY: mapped by `map`, known to this range only, and `gone` keeps copies away.
                unsafe { libc::munmap(self.bytes as *mut _, self.len) };
            }
        }
    }
}

/// Runs a kernel: meanwhile the memory that its device reaches can be touched.
pub(crate) fn with_access(device: usize, run: impl FnOnce()) {
    let _alone = KERNEL.write();
    let reached = live(|range| range.device == device && matches!(range.kind, Kind::Device | Kind::Imported));
    let protect = |access| {
        for range in &reached {
            // SAFETY: the range's own addresses, which are not freed while `KERNEL` is held.
            unsafe { libc::mprotect(range.base as *mut _, range.len, access) };
        }
    };
    protect(libc::PROT_READ | libc::PROT_WRITE);
    run();
    protect(libc::PROT_NONE);
}

fn insert(range: Range) -> Arc<Range> {
    let range = Arc::new(range);
    RANGES.write().insert(range.base, range.clone());
    range
}

/// Maps a file twice: without access where the caller is told, with access where only we know.
fn map(kind: Kind, device: usize, len: usize, id: u64, fd: OwnedFd) -> Outcome<Range> {
    let base = map_file(&fd, len, libc::PROT_NONE)?;
    let bytes = map_file(&fd, len, libc::PROT_READ | libc::PROT_WRITE)?;
    // What is imported is not given on, so its descriptor is not needed.
    let fd = (kind == Kind::Device).then_some(fd);
    Ok(Range::new(kind, device, (base, bytes), len, id, fd))
}

pub(crate) fn map_file(fd: &OwnedFd, len: usize, access: c_int) -> Outcome<usize> {
    // SAFETY: a new mapping, at an address of the system's choice.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED { Err(CudaError::OUT_OF_MEMORY) } else { Ok(mapped as usize) }
}

fn reserve(len: usize, access: c_int) -> Outcome<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, at an address of the system's choice.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED { Err(CudaError::OUT_OF_MEMORY) } else { Ok(mapped as usize) }
}

/// Takes memory away and keeps its addresses, so that nothing else ever gets them.
fn forbid(base: usize, len: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces a mapping of ours, which its owner has freed.
    unsafe { libc::mmap(base as *mut _, len, libc::PROT_NONE, flags, -1, 0) };
}

/// A file in memory.
pub(crate) fn create(name: &str, len: usize) -> Outcome<OwnedFd> {
    let name = CString::new(name).map_err(|_| CudaError::INVALID_VALUE)?;
    // SAFETY: a text that ends with a zero; the call returns a new descriptor or -1.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(CudaError::OUT_OF_MEMORY);
    }
    // SAFETY: new, and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len as u64).map_err(|_| CudaError::OUT_OF_MEMORY)?;
    Ok(file.into())
}

/// What a file is called by which another process opens it.
pub(crate) fn name(id: u64) -> String {
    format!("kvasir-cuda-{id:016x}")
}

/// A number that is used once on this machine, in all likelihood.
pub(crate) fn unique() -> u64 {
    let mut random = 0u64;
    // SAFETY: eight bytes are written to a place of eight.
    unsafe { libc::getrandom((&raw mut random).cast(), 8, 0) };
    random ^ NEXT.fetch_add(1, Ordering::Relaxed)
}

fn page() -> usize {
    4096
}
