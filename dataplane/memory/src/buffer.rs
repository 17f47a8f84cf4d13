//! Memory lent to a tier for the length of one operation.
//!
//! A [`Buffer`] goes into an operation by value and comes back with its result, so nothing else can touch the
//! bytes while a kernel or a device still works on them, whatever became of the caller.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::host::HostPool;

/// Every buffer of ours begins at a multiple of this; `O_DIRECT` requires it.
pub const BUFFER_ALIGN: usize = 4096;

/// Bytes with a fixed address: page-aligned memory of its own, or a block held in the DRAM pool (read-only).
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    Heap(Layout),
    /// Keeps the pool mapped, and whatever keeps the block there.
    Pool {
        _pool: Arc<HostPool>,
        _hold: Box<dyn Send + Sync>,
    },
}

// SAFETY: the memory is owned (or held) by this value alone and not tied to a thread; shared access only reads.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Page-aligned memory of `len` zero bytes.
    ///
    /// # Panics
    /// If `len` is beyond what this machine can address.
    pub fn zeroed(len: usize) -> Self {
        let Ok(layout) = Layout::from_size_align(len.max(1), BUFFER_ALIGN) else {
            panic!("a buffer of {len} B is beyond what this machine addresses")
        };
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Self { base, len, owner: Owner::Heap(layout) }
    }

    /// A copy of `bytes` in page-aligned memory.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        if let Some(to) = buffer.bytes_mut() {
            to.copy_from_slice(bytes);
        }
        buffer
    }

    /// A part of `pool`, read-only. `hold` keeps its bytes from changing and is dropped with the buffer. `None`: the part
    /// does not lie in the pool.
    pub fn of_pool(
        pool: &Arc<HostPool>,
        offset: u64,
        len: u64,
        hold: impl Send + Sync + 'static,
    ) -> Option<Self> {
        let bytes = pool.mapping().bytes(offset, len)?;
        let (base, len) = (NonNull::new(bytes.as_ptr().cast_mut())?, bytes.len());
        Some(Self { base, len, owner: Owner::Pool { _pool: Arc::clone(pool), _hold: Box::new(hold) } })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `base` points to `len` initialised bytes that live as long as the owner.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The bytes for writing, or `None` if they are lent read-only.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: as for `bytes`, and `&mut self` is the only access.
        self.is_writable().then(|| unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) })
    }

    pub fn is_writable(&self) -> bool {
        matches!(self.owner, Owner::Heap(_))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &self.owner {
            // SAFETY: allocated with this very layout, and nobody borrows from a value being dropped.
            Owner::Heap(layout) => unsafe { dealloc(self.base.as_ptr(), *layout) },
            Owner::Pool { .. } => {}
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .field("writable", &self.is_writable())
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
            buffer.bytes_mut().unwrap().fill(7);
            assert_eq!(Buffer::copy_of(buffer.bytes()).bytes(), vec![7; len]);
        }
    }

    #[test]
    #[should_panic(expected = "beyond what this machine addresses")]
    fn no_buffer_claims_more_than_it_has() {
        assert_eq!(Buffer::zeroed(usize::MAX).len(), 1);
    }
}
