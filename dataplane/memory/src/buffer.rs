//! Memory lent to a tier for the length of one operation.
//!
//! A [`Buffer`], or a [`Source`] to store from, goes into an operation by value and comes back with its result, so it stays
//! where it is while a kernel or a device still works on it, whatever became of the caller.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::host::HostPool;
use super::shared::Shared;
use super::spares::Spares;

/// Every buffer of ours begins at a multiple of this; `O_DIRECT` requires it.
pub const BUFFER_ALIGN: usize = 4096;

/// Page-aligned memory of its own.
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    /// Gone only while this is dropped.
    memory: Option<Memory>,
    /// Where the memory goes then.
    home: Option<Arc<Spares>>,
}

// SAFETY: the memory is owned by this value alone and not tied to a thread; shared access only reads.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Page-aligned memory of `len` zero bytes. A large buffer becomes resident page by page, as it is used.
    ///
    /// # Panics
    /// If `len` is beyond what this machine can address.
    pub fn zeroed(len: usize) -> Self {
        Self::of(Memory::zeroed(len), None)
    }

    /// A copy of `bytes` in page-aligned memory.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    pub(super) fn of(memory: Memory, home: Option<Arc<Spares>>) -> Self {
        Self { base: memory.base, len: memory.len, memory: Some(memory), home }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `base` points to `len` initialised bytes that live as long as this value.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(home), Some(memory)) = (&self.home, self.memory.take()) {
            home.keep(memory);
        }
    }
}

/// What a buffer lies in. Its bytes are initialised.
pub(super) struct Memory {
    base: NonNull<u8>,
    pub(super) len: usize,
    /// A page longer.
    allocated: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned by this value alone and not tied to a thread.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) fn zeroed(len: usize) -> Self {
        // Aligned here and not by the allocator: asked for more than its own alignment, the standard one writes the zeros,
        // and every page of a large buffer is resident from the start.
        let layout = len.checked_add(BUFFER_ALIGN).and_then(|len| Layout::array::<u8>(len).ok());
        let Some(layout) = layout else {
            panic!("a buffer of {len} B is beyond what this machine addresses")
        };
        // SAFETY: the layout's size is not zero.
        let allocated = unsafe { alloc_zeroed(layout) };
        let Some(allocated) = NonNull::new(allocated) else { handle_alloc_error(layout) };
        let skip = allocated.as_ptr().addr().wrapping_neg() % BUFFER_ALIGN;
        // SAFETY: less than `BUFFER_ALIGN` is skipped, by which what was allocated is longer than `len`.
        let base = unsafe { allocated.add(skip) };
        Self { base, len, allocated, layout }
    }

    /// What it takes of the machine.
    pub(super) fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout, and no buffer lies in a value being dropped.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// What a tier stores: a buffer, or a block where it lies in the DRAM pool. Others may be changing the latter, so no
/// reference to its bytes is given out; the block's checksum tells.
#[derive(Debug)]
pub enum Source {
    Own(Buffer),
    Pool(PoolPart),
}

/// A part of a pool that is held.
pub struct PoolPart {
    pool: Arc<HostPool>,
    offset: u64,
    len: u64,
    /// Keeps the pool from giving the part to another writer.
    _hold: Box<dyn Send + Sync>,
}

impl Source {
    /// `len` bytes of `pool` at `offset`. `hold` keeps the pool from giving them to another writer, and is dropped with this.
    /// `None` means that they do not lie in the pool.
    pub fn of_pool(
        pool: &Arc<HostPool>,
        offset: u64,
        len: u64,
        hold: impl Send + Sync + 'static,
    ) -> Option<Self> {
        pool.mapping().bytes(offset, len)?;
        Some(Self::Pool(PoolPart { pool: Arc::clone(pool), offset, len, _hold: Box::new(hold) }))
    }

    pub fn shared(&self) -> Shared<'_> {
        match self {
            Self::Own(buffer) => buffer.bytes().into(),
            Self::Pool(PoolPart { pool, offset, len, .. }) => {
                // It was looked for when the part was made.
                pool.mapping().bytes(*offset, *len).unwrap_or(Shared::from(&[][..]))
            }
        }
    }

    pub fn len(&self) -> usize {
        self.shared().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Buffer> for Source {
    fn from(buffer: Buffer) -> Self {
        Self::Own(buffer)
    }
}

impl fmt::Debug for PoolPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolPart")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_keep_their_bytes() {
        for len in [0, 1, 4096, 100_000] {
            let mut buffer = Buffer::zeroed(len);
            assert_eq!(buffer.bytes().as_ptr() as usize % BUFFER_ALIGN, 0);
            assert!(buffer.bytes().iter().all(|&byte| byte == 0) && buffer.len() == len);
            buffer.bytes_mut().fill(7);
            assert_eq!(Buffer::copy_of(buffer.bytes()).bytes(), vec![7; len]);
        }
    }

    #[test]
    #[should_panic(expected = "beyond what this machine addresses")]
    fn no_buffer_claims_more_than_it_has() {
        assert_eq!(Buffer::zeroed(usize::MAX).len(), 1);
    }
}
