//! An engine's blocks in the memory of a GPU, copied to and from the host by threads that are not the engine's.
//!
//! An engine says once where its blocks lie, a [`DevicePlan`], and with each job up to where its own stream must have come
//! ([`DevicePlan::mark`]). A thread of ours waits for that point and copies in a [`SideStream`], run after run, which is layer
//! after layer. Its calls return when the GPU has stopped touching what they were given, whatever went wrong: where the driver
//! fails to say so it is asked until it does, or until it says that the context is gone, with which its work has ended.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::Device;
use super::error::CudaError;
use super::event::Event;
use super::paged::{Batch, Kernel, Move, begin_2d};
use super::staging::Staging;
use super::stream::Stream;
use kvasir_memory::runs::{Plan, PlanError, Run, block_bytes};
use kvasir_memory::shared::{Place, Shared};

/// Where an engine's blocks lie in the memory of one GPU, all in the same runs. A block is the bytes of its runs, one behind
/// the other, as in a [`Plan`] of host memory.
#[derive(Debug)]
pub struct DevicePlan {
    device: Arc<Device>,
    runs: Box<[Run]>,
    blocks: usize,
    block_bytes: u32,
}

/// Why a plan of a GPU's memory was refused.
#[derive(Debug, thiserror::Error)]
pub enum DevicePlanError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl DevicePlan {
    /// Checks the bounds of `blocks` blocks, and that both ends of each run are memory of this GPU.
    ///
    /// # Safety
    /// Until the plan is dropped, every run of every block is memory of that GPU and stays allocated. While a job names a
    /// block, nobody else writes to it, and where the job fills it nobody else reads it: nothing that is given to the GPU
    /// after the job's [mark](Self::mark) does.
    ///
    /// # Errors
    /// What makes no sense, what the driver does not know as memory of this GPU, or what else it says.
    pub unsafe fn new(device: &Arc<Device>, runs: &[Run], blocks: usize) -> Result<Self, DevicePlanError> {
        let block_bytes = block_bytes(runs, blocks)?;
        for run in runs {
            let end = run.addr + run.stride * (blocks - 1) + run.len;
            for address in [run.addr, end - 1] {
                device.must_own(address as u64)?;
            }
        }
        Ok(Self { device: Arc::clone(device), runs: runs.into(), blocks, block_bytes })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of a block; `None` if there is no such block.
    pub fn block_bytes(&self, block: usize) -> Option<u32> {
        (block < self.blocks).then_some(self.block_bytes)
    }

    /// A point after everything that the engine has given to its stream so far: `stream` is the driver's handle of it, 0 the
    /// default stream. Does not wait, and leaves the calling thread's context as it was.
    ///
    /// # Safety
    /// It is a stream of this GPU that exists, in the process's primary context.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn mark(&self, stream: u64) -> Result<Event, CudaError> {
        let failed = |step| self.device.failed(step);
        let before = result::ctx::get_current().map_err(failed("asking for a thread's context"))?;
        let event = Event::new(&self.device)?;
        let stream = ptr::with_exposed_provenance_mut(stream as usize);
        // SAFETY: the caller names a stream that exists; the event is alive, and its context is current.
        let recorded = unsafe { sys::cuEventRecord(event.raw(), stream) }.result();
        // SAFETY: it was current before this call, or is null, which stands for none.
        let restored = unsafe { sys::cuCtxSetCurrent(before.unwrap_or(ptr::null_mut())) }.result();
        recorded.map_err(failed("recording an event in the engine's stream"))?;
        restored.map_err(failed("giving a thread its context back"))?;
        Ok(event)
    }

    fn runs_are_short(&self) -> bool {
        (self.block_bytes as usize) < self.runs.len() * KERNEL_RUN_BYTES
    }

    /// The moves between a block and as many bytes at `host`.
    ///
    /// # Panics
    /// If there is no such block, or `len` is not its length.
    fn moves(&self, block: usize, host: u64, len: usize) -> Vec<Move> {
        assert_eq!(self.block_bytes(block), u32::try_from(len).ok(), "a whole block of the plan");
        let mut at = host;
        let run = |run: &Run| {
            let (engine, block_at) = ((run.addr + block * run.stride) as u64, at);
            at += run.len as u64;
            let len = run.len as u64;
            Move { engine, block: block_at, run_bytes: len, rows: 1, engine_stride: 0, block_stride: 0 }
        };
        self.runs.iter().map(run).collect()
    }
}

/// Runs that are shorter on average are moved by the kernel, longer ones by the driver's copies. A copy costs the same
/// however short it is: on an H100, copies of 64 KiB and the kernel reach 0.9 of the bus, copies of 16 KiB 0.6, of 4 KiB 0.2,
/// and the kernel 0.8 with any. To begin one takes some microseconds besides, in which the engine's own thread can begin
/// nothing.
const KERNEL_RUN_BYTES: usize = 1 << 20;
/// What one launch of the kernel moves, if there is as much: beginning one takes as long as moving some 500 KiB.
const LAUNCH_BYTES: u64 = 8 << 20;
/// Thread blocks of a launch: as few as fill the bus. The rest of the GPU is the engine's.
const THREAD_BLOCKS: u32 = 32;

/// A stream beside those of the engine, of one thread.
pub struct SideStream {
    stream: Stream,
    /// Given up when it first fails: single copies take longer, and every driver has them.
    batch: Option<Batch>,
    kernel: ForShortRuns,
}

/// The kernel, loaded when the first plan has short runs, and given up when it first fails.
enum ForShortRuns {
    Untried,
    Loaded(Kernel),
    Missing,
}

impl ForShortRuns {
    fn get(&mut self, device: &Arc<Device>) -> Option<&mut Kernel> {
        if matches!(self, Self::Untried) {
            *self = Kernel::new(device).map_or(Self::Missing, Self::Loaded);
        }
        if let Self::Loaded(kernel) = self { Some(kernel) } else { None }
    }
}

impl SideStream {
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let (stream, batch) = (Stream::new(device)?, Batch::find(device).ok());
        Ok(Self { stream, batch, kernel: ForShortRuns::Untried })
    }

    /// Moves by these ways only; single copies always exist.
    #[cfg(test)]
    pub(super) fn with_only(device: &Arc<Device>, kernel: bool, batch: bool) -> Self {
        let mut side = Self::new(device).unwrap();
        side.batch = side.batch.filter(|_| batch);
        if !kernel {
            side.kernel = ForShortRuns::Missing;
        }
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
        let mut none = ForShortRuns::Missing;
        let kernel = if plan.runs_are_short() { kernel } else { &mut none };
        // Also where `copies` panics.
        let settled = Settled(Some(stream));
        let mut begin = Begin { stream, batch, kernel, gather, waiting: Vec::new(), bytes: 0 };
        // SAFETY, for both: the caller answers for the memory, until what was begun is settled.
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
    kernel: &'a mut ForShortRuns,
    gather: bool,
    /// For the next launch of the kernel.
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
        // The kernel would end the context where the driver's copies only take longer.
        if device.is_pinned(ptr::with_exposed_provenance(first as usize), bytes as usize)
            && self.kernel.get(device).is_some()
        {
            self.waiting.extend(moves);
            self.bytes += bytes;
            // SAFETY: passed on to the caller.
            return if self.bytes < LAUNCH_BYTES { Ok(()) } else { unsafe { self.launch() } };
        }
        let Some(together) = *self.batch else {
            // SAFETY: passed on to the caller.
            return unsafe { begin_2d(self.stream, &moves, self.gather) };
        };
        // SAFETY: passed on to the caller.
        unsafe { together.begin(self.stream, &moves, self.gather) }.inspect_err(|_| *self.batch = None)
    }

    /// What waits for the kernel.
    ///
    /// # Safety
    /// As for [`Kernel::begin`].
    unsafe fn launch(&mut self) -> Result<(), CudaError> {
        let ForShortRuns::Loaded(kernel) = self.kernel else { return Ok(()) };
        // SAFETY: passed on to the caller.
        let begun = unsafe { kernel.begin(self.stream, &self.waiting, self.gather, THREAD_BLOCKS) };
        self.waiting.clear();
        self.bytes = 0;
        begun.inspect_err(|_| *self.kernel = ForShortRuns::Missing)
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

/// Page-locked memory with room for some blocks of a plan, as a plan of its own: for blocks that cannot go straight.
pub struct Room {
    // Before the memory that it names.
    plan: Plan,
    _memory: Staging,
}

impl Room {
    /// Room for `blocks` blocks of `block_bytes` each.
    ///
    /// # Errors
    /// There is not as much, or what else the driver says.
    pub fn new(device: &Arc<Device>, block_bytes: u32, blocks: usize) -> Result<Self, CudaError> {
        let len = block_bytes as usize;
        let whole = len.checked_mul(blocks);
        let whole = whole.ok_or_else(|| device.unsupported("give page-locked memory", "it is too much"))?;
        let memory = Staging::new(device, whole)?;
        let run = Run { addr: memory.address() as usize, len, stride: len };
        // SAFETY: the run is all of the memory, which is initialised and lives longer than the plan; nobody else knows it. The
        // plan is only lent out, and a stream's copies from and to it end before the call that makes them.
        let plan = unsafe { Plan::new(&[run], blocks) };
        let plan = plan.map_err(|_| device.unsupported("give page-locked memory", "the blocks are empty"))?;
        Ok(Self { plan, _memory: memory })
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// A block of it, to be read; `None` if there is no such block.
    pub fn bytes(&self, block: usize) -> Option<Shared<'_>> {
        self.plan.parts(block)?.next()
    }

    /// A block of it, to be filled; `None` if there is no such block.
    pub fn place(&self, block: usize) -> Option<Place<'_>> {
        self.plan.places(block)?.next()
    }
}

impl Device {
    /// # Errors
    /// The driver does not know the address as memory of this GPU.
    fn must_own(&self, address: u64) -> Result<(), CudaError> {
        use sys::CUpointer_attribute as Ask;
        self.bind()?;
        let ask = |what| {
            let mut answer = 0_u32;
            // SAFETY: the driver looks the address up in its tables, and both answers have four bytes.
            unsafe { sys::cuPointerGetAttribute((&raw mut answer).cast(), what, address) }
                .result()
                .map(|()| answer)
        };
        let kind = ask(Ask::CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
        let owner = ask(Ask::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
        match (kind, owner) {
            (Ok(kind), Ok(owner))
                if kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32
                    && owner as usize == self.ordinal() =>
            {
                Ok(())
            }
            _ => Err(self.unsupported(
                "copy an engine's blocks",
                "a run does not begin and end in memory that the driver knows as this GPU's",
            )),
        }
    }
}
