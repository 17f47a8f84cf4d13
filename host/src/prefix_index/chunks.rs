//! A list that grows by chunks of fixed size: nothing moves when it grows, so growing costs the same at every size and no
//! page of memory is touched before it is used.

/// Items in one chunk. An index of few blocks should not pay for many.
const CHUNK: usize = 256;

#[derive(Debug)]
pub(super) struct Chunks<T> {
    chunks: Vec<Box<[T]>>,
    len: usize,
}

impl<T> Default for Chunks<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }
}

impl<T: Default> Chunks<T> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, i: u32) -> &T {
        &self.chunks[i as usize / CHUNK][i as usize % CHUNK]
    }

    pub(super) fn get_mut(&mut self, i: u32) -> &mut T {
        &mut self.chunks[i as usize / CHUNK][i as usize % CHUNK]
    }

    /// Adds an item at the end; its number.
    pub(super) fn push(&mut self) -> u32 {
        if self.len.is_multiple_of(CHUNK) {
            self.chunks.push((0..CHUNK).map(|_| T::default()).collect());
        }
        self.len += 1;
        self.len as u32 - 1
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<T>() + self.chunks.capacity() * size_of::<Box<[T]>>()
    }
}
