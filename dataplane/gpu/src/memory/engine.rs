//! An engine's blocks in the memory of a GPU, copied to and from the host by threads that are not the engine's.
//!
//! An engine says once where its blocks lie, a [`DevicePlan`], and with each job up to where its own stream must have come
//! ([`DevicePlan::mark`]). A thread of ours waits for that point and copies in a [`SideStream`](super::SideStream).
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::Device;
use super::error::CudaError;
use super::event::Event;
use super::paged::Move;
use super::staging::Staging;
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
        // Loaded now, so that no job has to wait for it.
        let _ = device.kernels();
        Ok(Self { device: Arc::clone(device), runs: runs.into(), blocks, block_bytes })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of a block. Returns `None` if there is no such block.
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

    /// Whether runs have fewer bytes on average.
    pub(super) fn runs_are_shorter(&self, limit: usize) -> bool {
        (self.block_bytes as usize) < self.runs.len() * limit
    }

    /// The moves between a block and as many bytes at `host`.
    ///
    /// # Panics
    /// If there is no such block, or `len` is not its length.
    pub(super) fn moves(&self, block: usize, host: u64, len: usize) -> Vec<Move> {
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

/// Page-locked memory with room for some blocks of a plan, as a plan of its own: for blocks that cannot go straight.
pub struct Room {
    // It is dropped before the memory that it names.
    plan: Plan,
    _memory: Staging,
}

impl Room {
    /// Room for `blocks` blocks of `block_bytes` each.
    ///
    /// # Errors
    /// There is not enough memory, or whatever else the driver says.
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

    /// A block of it, for reading. Returns `None` if there is no such block.
    pub fn bytes(&self, block: usize) -> Option<Shared<'_>> {
        self.plan.parts(block)?.next()
    }

    /// A block of it, for filling. Returns `None` if there is no such block.
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
