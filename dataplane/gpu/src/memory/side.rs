//! Copies an engine's blocks beside the engine's own work.
//!
//! Calls return when the GPU has stopped touching what they were given, whatever went wrong: where the driver fails to say so it
//! is asked until it does, or until it says that the context is gone, with which its work has ended.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use super::device::Device;
use super::engine::DevicePlan;
use super::error::CudaError;
use super::paged::{Batch, Kernel, Move, begin_2d};
use super::stream::Stream;
use kvasir_memory::shared::{Place, Shared};

/// Runs that are shorter on average are moved by the kernel, longer ones by the driver's copies. A copy costs the same
/// however short it is: on an H100, copies of 64 KiB and the kernel reach 0.9 of the bus, copies of 16 KiB 0.6, of 4 KiB 0.2,
/// and the kernel 0.8 with any. To begin one takes some microseconds besides, in which the engine's own thread can begin
/// nothing.
const KERNEL_RUN_BYTES: usize = 1 << 20;
/// What one launch of the kernel moves, if there is as much: beginning one takes as long as moving some 500 KiB.
const LAUNCH_BYTES: u64 = 8 << 20;
/// Thread blocks of a launch, since the GPU is the engine's: two launches fill the bus, and those of eight threads are about one
/// for each multiprocessor.
const THREAD_BLOCKS: u32 = 16;

/// A stream beside those of the engine, of one thread.
pub struct SideStream {
    stream: Stream,
    /// Given up when it first fails: single copies take longer, and every driver has them.
    batch: Option<Batch>,
    /// For short runs; given up in the same way. It is made at once, since there is no time for it between a reservation and its copies.
    kernel: Option<Kernel>,
}

impl SideStream {
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let stream = Stream::new(device)?;
        Ok(Self { stream, batch: Batch::find(device).ok(), kernel: Kernel::new(device).ok() })
    }

    /// Moves by these ways only; single copies always exist.
    #[cfg(test)]
    pub(super) fn with_only(device: &Arc<Device>, kernel: bool, batch: bool) -> Self {
        let mut side = Self::new(device).unwrap();
        side.batch = side.batch.filter(|_| batch);
        side.kernel = side.kernel.filter(|_| kernel);
        side
    }

    /// Copies blocks to the host. They are there when this returns. Memory that is not page-locked works too, slowly.
    ///
    /// # Errors
    /// What the driver says; then the places' bytes mean nothing. Nothing is under way in any case.
    ///
    /// # Panics
    /// If a block is not in the plan, is not as long as its place, or the plan is of another GPU.
    pub fn gather<'a>(
        &mut self,
        plan: &DevicePlan,
        blocks: impl IntoIterator<Item = (usize, Place<'a>)>,
    ) -> Result<(), CudaError> {
        let copies =
            blocks.into_iter().map(|(block, mut to)| plan.moves(block, to.as_mut_ptr() as u64, to.left()));
        // SAFETY: the plan and the places, which are lent to this call, are as long as the moves; and it returns when none of
        // them is under way.
        unsafe { self.copy(plan, copies, true) }
    }

    /// Copies blocks to the GPU. They are there when this returns. While one is copied, `blocks` is asked for the next.
    ///
    /// # Errors
    /// As [`gather`](Self::gather), of the plan's blocks.
    ///
    /// # Panics
    /// As [`gather`](Self::gather).
    pub fn scatter<'a>(
        &mut self,
        plan: &DevicePlan,
        blocks: impl IntoIterator<Item = (usize, Shared<'a>)>,
    ) -> Result<(), CudaError> {
        let copies =
            blocks.into_iter().map(|(block, from)| plan.moves(block, from.as_ptr() as u64, from.len()));
        // SAFETY: as in `gather`.
        unsafe { self.copy(plan, copies, false) }
    }

    /// # Safety
    /// The moves' memory is there until this returns, and nobody else uses it in a way that copies do not allow.
    unsafe fn copy(
        &mut self,
        plan: &DevicePlan,
        mut copies: impl Iterator<Item = Vec<Move>>,
        gather: bool,
    ) -> Result<(), CudaError> {
        assert!(Arc::ptr_eq(plan.device(), self.stream.device()), "a plan of the stream's GPU");
        let Self { stream, batch, kernel } = self;
        let mut none = None;
        let kernel = if plan.runs_are_shorter(KERNEL_RUN_BYTES) { kernel } else { &mut none };
        // This also runs when `copies` panics.
        let settled = Settled(Some(stream));
        let mut begin = Begin { stream, batch, kernel, gather, waiting: Vec::new(), bytes: 0 };
        // SAFETY: the caller answers for the memory, until what was begun is settled.
        let begun = copies.try_for_each(|moves| unsafe { begin.block(moves) });
        // SAFETY: as above.
        let begun = begun.and_then(|()| unsafe { begin.launch() });
        begun.and(settled.end())
    }
}

/// Begins the moves of blocks, one way.
struct Begin<'a> {
    stream: &'a Stream,
    batch: &'a mut Option<Batch>,
    kernel: &'a mut Option<Kernel>,
    gather: bool,
    /// Moves for the next launch of the kernel.
    waiting: Vec<Move>,
    bytes: u64,
}

impl Begin<'_> {
    /// All moves of a block.
    ///
    /// # Safety
    /// As for [`Batch::begin`].
    unsafe fn block(&mut self, moves: Vec<Move>) -> Result<(), CudaError> {
        let device = self.stream.device();
        let first = moves.first().map_or(0, |first| first.block);
        let bytes: u64 = moves.iter().map(|one| one.run_bytes).sum();
        let place = ptr::with_exposed_provenance(first as usize);
        // The kernel would end the context where the driver's copies only take longer.
        if self.kernel.is_some() && device.is_pinned(place, bytes as usize) {
            self.waiting.extend(moves);
            self.bytes += bytes;
            if self.bytes < LAUNCH_BYTES {
                return Ok(());
            }
            // SAFETY: passed on to the caller.
            return unsafe { self.launch() };
        }
        let Some(together) = *self.batch else {
            // SAFETY: passed on to the caller.
            return unsafe { begin_2d(self.stream, &moves, self.gather) };
        };
        // SAFETY: passed on to the caller.
        unsafe { together.begin(self.stream, &moves, self.gather) }.inspect_err(|_| *self.batch = None)
    }

    /// Begins the moves that wait for the kernel.
    ///
    /// # Safety
    /// As for [`Kernel::begin`].
    unsafe fn launch(&mut self) -> Result<(), CudaError> {
        let waiting = std::mem::take(&mut self.waiting);
        self.bytes = 0;
        // Nothing waits if there is no kernel.
        let Some(kernel) = self.kernel.as_mut().filter(|_| !waiting.is_empty()) else { return Ok(()) };
        // SAFETY: passed on to the caller.
        let begun = unsafe { kernel.begin(self.stream, &waiting, self.gather, THREAD_BLOCKS) };
        begun.inspect_err(|_| {
            // Its lists may still be read.
            let _ = self.stream.settle();
            *self.kernel = None;
        })
    }
}

/// Waits for a stream when it is dropped.
struct Settled<'a>(Option<&'a Stream>);

impl Settled<'_> {
    fn end(mut self) -> Result<(), CudaError> {
        self.0.take().map_or(Ok(()), Stream::settle)
    }
}

impl Drop for Settled<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.0 {
            let _ = stream.settle();
        }
    }
}
