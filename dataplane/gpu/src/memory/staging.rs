//! Page-locked memory that bytes pass through, and the plan by which they do.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::Device;
use super::error::CudaError;

/// Page-locked memory of the driver.
#[derive(Debug)]
pub(super) struct Staging {
    device: Arc<Device>,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory owned by this value, not tied to a thread.
unsafe impl Send for Staging {}

impl Staging {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        // SAFETY: the context is current; the memory is owned by this value.
        let base = unsafe { result::malloc_host(len, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let base = base.map_err(device.failed("allocating page-locked memory"))?;
        let base = NonNull::new(base.cast::<u8>());
        let base =
            base.ok_or_else(|| device.unsupported("give page-locked memory", "the driver gave none"))?;
        // SAFETY: `len` bytes were just allocated there. What is read from here is initialised, whatever was copied in.
        unsafe { base.write_bytes(0, len) };
        device.pinned().add(base.as_ptr() as usize, len);
        Ok(Self { device: device.clone(), base, len })
    }

    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Its bytes. Call it only while no copy of a GPU from or to it is under way.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes, and `&mut self` is the only access of this process; callers wait for the
        // GPU's copies before they ask.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.device.pinned().remove(self.base.as_ptr() as usize);
        // Copies under way still use it. If waiting for them fails, the driver has ended them.
        let _ = self.device.context().synchronize();
        // SAFETY: allocated by `new`, and no copy uses it any more.
        let _ = unsafe { result::free_host(self.base.as_ptr().cast()) };
    }
}

/// A piece of one block that passes through a staging buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Which block.
    pub(super) block: usize,
    /// Where in the block it begins.
    pub(super) offset: usize,
    /// Where in the buffer.
    pub(super) at: usize,
    pub(super) len: usize,
}

/// Distributes blocks of these lengths over buffers of `buffer` bytes, in order. Returns what each filling of a buffer
/// holds. Small blocks share a buffer, long ones take several. A length of 0 has no piece.
pub(super) fn fillings(lens: impl IntoIterator<Item = usize>, buffer: usize) -> Vec<Vec<Piece>> {
    let mut fillings: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for (block, len) in lens.into_iter().enumerate() {
        let mut offset = 0;
        while offset < len {
            if room == 0 {
                fillings.push(Vec::new());
                room = buffer;
            }
            let piece = Piece { block, offset, at: buffer - room, len: room.min(len - offset) };
            if let Some(filling) = fillings.last_mut() {
                filling.push(piece);
            }
            offset += piece.len;
            room -= piece.len;
        }
    }
    fillings
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_blocks_share_and_long_ones_span() {
        let found = fillings([3, 0, 12], 8);
        let pieces: Vec<Vec<_>> =
            found.iter().map(|f| f.iter().map(|p| (p.block, p.offset, p.at, p.len)).collect()).collect();
        assert_eq!(pieces, [vec![(0, 0, 0, 3), (2, 0, 3, 5)], vec![(2, 5, 0, 7)]]);
    }

    proptest! {
        /// Copying block by block through the buffers gives the blocks.
        #[test]
        fn every_byte_passes_once(lens in prop::collection::vec(0usize..50, 0..20), buffer in 1usize..40) {
            let blocks: Vec<Vec<u8>> = (0u8..).zip(&lens).map(|(n, &len)| (0..len).map(|i| n ^ i as u8).collect()).collect();
            let mut out: Vec<Vec<u8>> = lens.iter().map(|_| Vec::new()).collect();
            let found = fillings(lens.iter().copied(), buffer);
            for (n, filling) in found.iter().enumerate() {
                let mut staged = vec![0; buffer];
                let used: usize = filling.iter().map(|piece| piece.len).sum();
                prop_assert!(used == buffer || (n + 1 == found.len() && used > 0), "only the last is not full");
                for piece in filling {
                    let bytes = &blocks[piece.block][piece.offset..][..piece.len];
                    staged[piece.at..][..piece.len].copy_from_slice(bytes);
                }
                for piece in filling {
                    prop_assert_eq!(out[piece.block].len(), piece.offset, "in order");
                    out[piece.block].extend(&staged[piece.at..][..piece.len]);
                }
            }
            prop_assert_eq!(out, blocks);
        }
    }
}
