//! Memory of the host that a GPU reads and writes itself.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::error::CudaError;
use kvasir_memory::region::{Location, Memory, Region};

/// A region of the host that the driver knows, page-locked, until this is dropped.
///
/// Copies from and to such memory run at the speed of the bus and do not block the caller; others go through a buffer
/// of the driver. Registering costs time per page, so it is done at the start.
pub struct Pinned {
    device: Arc<Device>,
    /// Keeps the memory where it is.
    region: Region,
}

impl Pinned {
    /// Registers a region. It may be a mapping that is shared with other processes. All of its pages are taken from the
    /// system at once, and stay taken.
    ///
    /// # Errors
    /// It is not writable memory of the host, is registered already, or the system does not lock that much.
    pub fn new(device: &Arc<Device>, region: &Region) -> Result<Self, CudaError> {
        if !region.location().is_host() || !region.writable() {
            return Err(device.unsupported("register memory", "it is not writable memory of the host"));
        }
        device.bind()?;
        region.fill();
        let (base, len) = (region.base().as_ptr(), region.len() as usize);
        // SAFETY: the region has these bytes for as long as it lives, which is as long as this value.
        unsafe { sys::cuMemHostRegister_v2(base.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE) }
            .result()
            .map_err(device.failed("registering memory of the host"))?;
        device.pinned().add(base as usize, len);
        Ok(Self { device: device.clone(), region: region.clone() })
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The same memory as a region that is registered for as long as it lives.
    pub fn into_region(self) -> Region {
        Region::new(Box::new(PinnedMemory(self)))
    }
}

struct PinnedMemory(Pinned);

// SAFETY: the memory is that of another region, which this one holds.
unsafe impl Memory for PinnedMemory {
    fn base(&self) -> NonNull<u8> {
        self.0.region.base()
    }
    fn len(&self) -> u64 {
        self.0.region.len()
    }
    fn location(&self) -> Location {
        self.0.region.location()
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.region.fd()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let base = self.region.base().as_ptr();
        self.device.pinned().remove(base as usize);
        // Copies under way still use it. If waiting for them fails, the driver has ended them.
        let _ = self.device.context().synchronize();
        // SAFETY: registered by `new`, and no copy uses it any more.
        let _ = unsafe { sys::cuMemHostUnregister(base.cast()) };
    }
}

/// Which addresses are registered. Ranges do not overlap: the driver refuses that.
#[derive(Debug, Default)]
pub(super) struct PinnedRanges(BTreeMap<usize, usize>);

impl PinnedRanges {
    pub(super) fn add(&mut self, base: usize, len: usize) {
        self.0.insert(base, len);
    }

    pub(super) fn remove(&mut self, base: usize) {
        self.0.remove(&base);
    }

    /// Whether one registered range has all of these bytes. Two adjoining ranges do not count: the driver copies within
    /// one.
    pub(super) fn contains(&self, address: usize, len: usize) -> bool {
        let before = self.0.range(..=address).next_back();
        before.is_some_and(|(&base, &held)| held >= len && address - base <= held - len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_inside_one_range_is_pinned() {
        let mut ranges = PinnedRanges::default();
        ranges.add(100, 50);
        ranges.add(150, 50);
        for (address, len, expected) in [
            (100, 50, true),
            (149, 1, true),
            (150, 50, true),
            (149, 2, false),
            (99, 1, false),
            (200, 1, false),
            (120, usize::MAX, false),
        ] {
            assert_eq!(ranges.contains(address, len), expected, "{len} B at {address}");
        }
        ranges.remove(100);
        assert!(!ranges.contains(100, 1) && ranges.contains(150, 1));
    }
}
