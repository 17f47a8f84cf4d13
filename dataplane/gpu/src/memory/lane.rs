//! Copies of whole batches of blocks between the host and a pool.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::device::Device;
use super::error::CudaError;
use super::event::Event;
use super::pool::DeviceRange;
use super::staging::{Piece, Staging, fillings};
use super::stream::Stream;
use kvasir_memory::shared::Shared;

/// Bytes of one staging buffer. Two mebibytes take about 40 µs on a bus of 50 GB/s, several times the cost of starting
/// a copy and waiting for it.
const BUFFER_BYTES: usize = 2 << 20;
/// While the GPU copies one buffer, the processor fills or empties others.
const BUFFERS: usize = 4;

/// A stream, and page-locked buffers for memory that is not page-locked itself. One per direction and thread.
#[derive(Debug)]
pub struct Lane {
    stream: Stream,
    buffers: [Buffer; BUFFERS],
}

#[derive(Debug)]
struct Buffer {
    memory: Staging,
    /// The point after the copies from or to it that were begun last.
    used: Event,
}

/// A block on its way to the GPU.
pub struct Upload<'a> {
    pub from: Shared<'a>,
    /// At least as long as the source.
    pub to: &'a DeviceRange,
}

/// A block on its way to the host.
pub struct Download<'a> {
    pub from: &'a DeviceRange,
    /// At most as long as the source.
    pub to: &'a mut [u8],
}

impl Lane {
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let buffer = || Ok(Buffer { memory: Staging::new(device, BUFFER_BYTES)?, used: Event::new(device)? });
        Ok(Self { stream: Stream::new(device)?, buffers: [buffer()?, buffer()?, buffer()?, buffer()?] })
    }

    /// Copies blocks to the GPU. They are there when this returns.
    ///
    /// # Errors
    /// What the driver says; then any of the targets may be partly written.
    ///
    /// # Panics
    /// If a target is shorter than its source.
    pub fn upload(&mut self, blocks: &[Upload<'_>]) -> Result<(), CudaError> {
        let begun = self.begin_uploads(blocks);
        // Also after an error: nothing may be under way on memory that is given back.
        self.stream.drain().and(begun)
    }

    fn begin_uploads(&mut self, blocks: &[Upload<'_>]) -> Result<(), CudaError> {
        let mut staged = Vec::new();
        for block in blocks {
            assert!(block.from.len() as u64 <= block.to.len(), "the caller allocated as much");
            if self.is_pinned(block.from.as_ptr(), block.from.len()) {
                let (to, from) = (block.to.address(), block.from.as_ptr() as u64);
                // SAFETY: both are equally long and stay borrowed until `upload` has waited; the range has one user.
                unsafe { self.stream.copy(to, from, block.from.len()) }?;
            } else {
                staged.push(block);
            }
        }
        let plan = fillings(staged.iter().map(|block| block.from.len()), BUFFER_BYTES);
        for (filling, n) in plan.iter().zip((0..BUFFERS).cycle()) {
            let Buffer { memory, used } = &mut self.buffers[n];
            used.wait()?;
            for piece in filling {
                let bytes = staged[piece.block].from.after(piece.offset);
                bytes.copy_to(&mut memory.bytes()[piece.at..][..piece.len]);
            }
            for piece in filling {
                let to = staged[piece.block].to.address() + piece.offset as u64;
                // SAFETY: the piece lies in the block and in the buffer, which nobody touches before `used` is complete.
                unsafe { self.stream.copy(to, memory.address() + piece.at as u64, piece.len) }?;
            }
            self.stream.record(used)?;
        }
        Ok(())
    }

    /// Copies blocks to the host. They are there when this returns.
    ///
    /// # Errors
    /// What the driver says; then the bytes of any of the targets are undefined.
    ///
    /// # Panics
    /// If a source is shorter than its target.
    pub fn download(&mut self, blocks: &mut [Download<'_>]) -> Result<(), CudaError> {
        let begun = self.do_downloads(blocks);
        self.stream.drain().and(begun)
    }

    fn do_downloads(&mut self, blocks: &mut [Download<'_>]) -> Result<(), CudaError> {
        let mut staged = Vec::new();
        for block in blocks {
            assert!(block.to.len() as u64 <= block.from.len(), "the caller knows how long a block is");
            if self.is_pinned(block.to.as_ptr(), block.to.len()) {
                let (to, from) = (block.to.as_mut_ptr() as u64, block.from.address());
                // SAFETY: both are equally long and stay borrowed until `download` has waited.
                unsafe { self.stream.copy(to, from, block.to.len()) }?;
            } else {
                staged.push(block);
            }
        }
        let plan = fillings(staged.iter().map(|block| block.to.len()), BUFFER_BYTES);
        for (n, filling) in plan.iter().enumerate() {
            if n >= BUFFERS {
                self.empty(n, &plan[n - BUFFERS], &mut staged)?;
            }
            let Buffer { memory, used } = &self.buffers[n % BUFFERS];
            for piece in filling {
                let from = staged[piece.block].from.address() + piece.offset as u64;
                // SAFETY: the piece lies in the block and in the buffer, which was emptied and which nobody touches
                // before `used` is complete.
                unsafe { self.stream.copy(memory.address() + piece.at as u64, from, piece.len) }?;
            }
            self.stream.record(used)?;
        }
        for (n, filling) in plan.iter().enumerate().skip(plan.len().saturating_sub(BUFFERS)) {
            self.empty(n, filling, &mut staged)?;
        }
        Ok(())
    }

    /// Waits for a buffer and takes its pieces out.
    fn empty(
        &mut self,
        n: usize,
        filling: &[Piece],
        blocks: &mut [&mut Download<'_>],
    ) -> Result<(), CudaError> {
        let Buffer { memory, used } = &mut self.buffers[n % BUFFERS];
        used.wait()?;
        for piece in filling {
            let to = &mut blocks[piece.block].to[piece.offset..][..piece.len];
            to.copy_from_slice(&memory.bytes()[piece.at..][..piece.len]);
        }
        Ok(())
    }

    fn is_pinned(&self, at: *const u8, len: usize) -> bool {
        self.stream.device().is_pinned(at, len)
    }
}
