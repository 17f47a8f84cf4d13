//! Memory of buffers that were dropped, for those that come.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::buffer::{Buffer, Memory};

/// Keeps the memory of buffers, up to a bound: what was used before needs neither zeros nor the kernel's pages, which cost
/// more than reading a disk does.
pub struct Spares {
    bytes_max: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Oldest first.
    memory: VecDeque<Memory>,
    bytes: usize,
}

impl Spares {
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes_max, kept: Mutex::default() })
    }

    /// A buffer of `len` bytes that hold anything: zeros, or what an earlier buffer held. Its memory comes back here.
    ///
    /// # Panics
    /// If `len` is beyond what this machine can address.
    pub fn buffer(self: &Arc<Self>, len: usize) -> Buffer {
        let memory = self.take(len).unwrap_or_else(|| Memory::zeroed(len));
        Buffer::of(memory, Some(Arc::clone(self)))
    }

    fn take(&self, len: usize) -> Option<Memory> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // The newest is the likeliest to be in the processor's cache.
        let at = kept.memory.iter().rposition(|memory| memory.len == len)?;
        let memory = kept.memory.remove(at)?;
        kept.bytes -= memory.bytes();
        Some(memory)
    }

    /// The oldest are given back to the system where that is too much.
    pub(super) fn keep(&self, memory: Memory) {
        if memory.bytes() > self.bytes_max {
            return;
        }
        let mut surplus = Vec::new();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += memory.bytes();
        kept.memory.push_back(memory);
        while kept.bytes > self.bytes_max
            && let Some(oldest) = kept.memory.pop_front()
        {
            kept.bytes -= oldest.bytes();
            surplus.push(oldest);
        }
        // Not under the lock.
        drop(kept);
        drop(surplus);
    }

    /// Bytes that are kept now.
    pub fn bytes(&self) -> usize {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }
}

impl fmt::Debug for Spares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spares").field("bytes_max", &self.bytes_max).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::BUFFER_ALIGN;

    #[test]
    fn memory_comes_back_and_goes_to_the_next_buffer_of_its_length() {
        let spares = Spares::new(100_000);
        let mut first = spares.buffer(30_000);
        first.bytes_mut().fill(7);
        let place = first.bytes().as_ptr();
        drop(first);
        assert_eq!(spares.bytes(), 30_000 + BUFFER_ALIGN);
        assert!(spares.buffer(10_000).bytes().iter().all(|&byte| byte == 0), "another length");
        let again = spares.buffer(30_000);
        assert_eq!((again.bytes().as_ptr(), again.bytes()[29_999]), (place, 7));
        assert_eq!(spares.bytes(), 10_000 + BUFFER_ALIGN);
    }

    #[test]
    fn no_more_is_kept_than_the_bound_and_the_oldest_go_first() {
        let spares = Spares::new(100_000);
        let buffers: Vec<Buffer> = [60_000, 30_000, 20_000].map(|len| spares.buffer(len)).into();
        buffers.into_iter().for_each(drop);
        assert_eq!(spares.bytes(), 50_000 + 2 * BUFFER_ALIGN);
        drop(spares.buffer(200_000));
        assert_eq!(spares.bytes(), 50_000 + 2 * BUFFER_ALIGN, "one beyond the bound pushes nothing out");
        let empty: Vec<Buffer> = (0..100).map(|_| spares.buffer(0)).collect();
        drop(empty);
        assert!(spares.bytes() <= 100_000, "buffers of no bytes have memory, too");
    }
}
