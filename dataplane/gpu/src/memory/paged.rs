//! Gathers an engine's pages into a block, and scatters a block over pages, by the descriptors of
//! [`layout::paged`](kvasir_memory::layout::paged).
//!
//! There are three ways ([`Path`]). Which of them this GPU and driver have is found out at the start: those that exist
//! are measured on runs of several lengths, and each call takes what was fastest for runs like its own.
//!
//! **Layer by layer.** A block keeps its layers one after the other, so each can move as soon as the engine has computed
//! it: [`PageMover::offload_layers`] waits, on the GPU, for the engine's event of a layer, gathers it and begins its copy
//! to the host while the next layer is computed. [`PageMover::onboard_layers`] is the way back.
#![allow(unsafe_code)]

mod choice;
mod copies;
mod kernel;
mod layers;
#[cfg(test)]
mod on_host;
mod probe;
mod tiles;

use std::sync::Arc;

pub use self::choice::{Choice, Measured, Path};
pub(super) use self::copies::{Batch, begin_2d};
pub(super) use self::kernel::{Kernel, Kernels};
pub use self::layers::LayerStreams;
pub(super) use self::tiles::Move;
use self::tiles::{Span, moves};
use super::device::Device;
use super::error::CudaError;
use super::event::Event;
use super::stream::Stream;
use kvasir_memory::layout::paged::Descriptor;
use kvasir_memory::region::{LocalRange, Location, Region};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the engine's pages to the block.
    Gather,
    /// From the block to the engine's pages.
    Scatter,
}

/// Moves between an engine's regions and one block.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// The engine's tensors, as [`Regions`](kvasir_memory::layout::paged::Regions) numbers them: memory of this GPU, or of the
    /// host and [pinned](super::Pinned).
    pub engine: &'a [Region],
    /// The block after its header: memory of either kind.
    pub block: &'a LocalRange,
    pub descriptors: &'a [Descriptor],
}

/// Work of a GPU that has begun. Dropping it waits: until it is complete the GPU may touch the memory.
pub struct Underway {
    event: Event,
    memory: Vec<Region>,
    /// Nothing is left to wait for.
    waited: bool,
}

impl Underway {
    /// The point where it is complete, for other streams to [wait for](Stream::after).
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Takes over work that the GPU does before this: it is complete when this is.
    fn after(mut self, mut earlier: Self) -> Self {
        self.memory.append(&mut earlier.memory);
        // The end of this work implies the end of that one, so nobody waits for it.
        earlier.waited = true;
        self
    }

    /// Sleeps until it is complete.
    ///
    /// # Errors
    /// The work failed.
    pub fn wait(mut self) -> Result<(), CudaError> {
        self.waited = true;
        self.event.wait()
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if !self.waited {
            // A caller that wants to know of a failure calls `wait`; the driver ends failed work.
            let _ = self.event.wait();
        }
    }
}

/// Executes descriptors on one GPU.
pub struct PageMover {
    device: Arc<Device>,
    kernel: Result<Kernel, CudaError>,
    batch: Result<Batch, CudaError>,
    choice: Choice,
    measured: Vec<Measured>,
}

impl PageMover {
    /// Bytes that each of [`measured`](Self::measured) moved.
    pub const SAMPLE_BYTES: u64 = probe::SAMPLE_BYTES;

    /// Finds the ways that exist and measures them, which takes about 16 MiB of the GPU's memory and less than a
    /// second.
    ///
    /// # Errors
    /// What the driver says. A way that is missing is no error.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let mut mover = Self {
            device: device.clone(),
            kernel: Kernel::new(device),
            batch: Batch::find(device),
            choice: Choice::of(&[]),
            measured: Vec::new(),
        };
        mover.measured = probe::measure(&mut mover)?;
        mover.choice = Choice::of(&mover.measured);
        Ok(mover)
    }

    /// Copies in batches by the form of the call that older drivers have.
    #[cfg(test)]
    pub(super) fn take_older_batch(&mut self) {
        self.batch = Batch::find_older(&self.device);
    }

    /// Gives up a way that exists but does not work. `Copies2d` is never given up: its error is returned.
    fn forget(&mut self, path: Path, error: CudaError) -> Result<(), CudaError> {
        match path {
            Path::Kernel => self.kernel = Err(error),
            Path::Batch => self.batch = Err(error),
            Path::Copies2d => return Err(error),
        }
        Ok(())
    }

    /// The ways that exist.
    pub fn paths(&self) -> Vec<Path> {
        let kernel = self.kernel.is_ok().then_some(Path::Kernel);
        let batch = self.batch.is_ok().then_some(Path::Batch);
        [kernel, batch, Some(Path::Copies2d)].into_iter().flatten().collect()
    }

    /// Why ways are missing: the library, or the error when they were tried.
    pub fn missing(&self) -> Vec<&CudaError> {
        self.kernel.as_ref().err().into_iter().chain(self.batch.as_ref().err()).collect()
    }

    /// The results of the measurements at the start.
    pub fn measured(&self) -> &[Measured] {
        &self.measured
    }

    /// Begins to move pages in `stream`, by the way that was fastest for runs like these.
    ///
    /// # Errors
    /// [`CudaError::OutOfRange`], memory that this GPU does not reach, or what the driver says; some of the moves may
    /// have been made then.
    pub fn begin(&mut self, stream: &Stream, pages: Pages<'_>, way: Way) -> Result<Underway, CudaError> {
        let rows: u64 = pages.descriptors.iter().map(|d| u64::from(d.rows)).sum();
        let bytes: u64 = pages.descriptors.iter().map(Descriptor::bytes).sum();
        let path = self.choice.path(bytes / rows.max(1));
        self.begin_by(path, stream, pages, way)
    }

    /// Like [`begin`](Self::begin), by a way that the caller chose.
    ///
    /// # Errors
    /// As `begin`, or that the way is missing.
    pub fn begin_by(
        &mut self,
        path: Path,
        stream: &Stream,
        pages: Pages<'_>,
        way: Way,
    ) -> Result<Underway, CudaError> {
        let target_writable = match way {
            Way::Gather => pages.block.region().writable(),
            Way::Scatter => pages.engine.iter().all(Region::writable),
        };
        if !target_writable {
            return Err(self.device.unsupported("write the target", "it is read-only"));
        }
        let spans = pages.engine.iter().map(|region| {
            let whole = region.whole();
            whole.map_or(Ok(Span { address: 0, len: 0 }), |whole| self.span(&whole))
        });
        let spans = spans.collect::<Result<Vec<_>, _>>()?;
        let moves = moves(&spans, self.span(pages.block)?, pages.descriptors)
            .map_err(|outside| CudaError::OutOfRange { nth: outside.nth })?;
        let begun = self.execute(path, stream, &moves, way);
        let memory = pages.engine.iter().chain([pages.block.region()]).cloned().collect();
        match stream.mark() {
            // After an error it is dropped at once, which waits for the moves that were begun.
            Ok(event) => begun.map(|()| Underway { event, memory, waited: false }),
            Err(error) => {
                // There is nothing to wait with later, so the moves are waited for now.
                let _ = stream.drain();
                begun.and(Err(error))
            }
        }
    }

    /// The addresses of a range, if the GPU may touch them.
    fn span(&self, range: &LocalRange) -> Result<Span, CudaError> {
        let reached = match range.region().location() {
            Location::Cuda(number) => number == self.device.number(),
            Location::Cpu(_) => self.device.is_pinned(range.address(), range.len() as usize),
        };
        if !reached {
            let reason = "it is on another GPU, or memory of the host that is not pinned";
            return Err(self.device.unsupported("reach the memory", reason));
        }
        Ok(Span { address: range.address() as u64, len: range.len() })
    }

    fn execute(&mut self, path: Path, stream: &Stream, moves: &[Move], way: Way) -> Result<(), CudaError> {
        let gather = way == Way::Gather;
        // SAFETY, for all three: `moves` lie in memory that this GPU reaches, which `begin_by` has checked, and which
        // `Underway` holds until they are complete.
        match path {
            Path::Kernel => {
                let kernel = self.kernel.as_mut().map_err(|missing| missing.clone())?;
                // SAFETY: as above.
                unsafe { kernel.begin(stream, moves, gather, u32::MAX) }
            }
            // SAFETY: as above.
            Path::Batch => unsafe { self.batch.clone()?.begin(stream, moves, gather) },
            // SAFETY: as above.
            Path::Copies2d => unsafe { begin_2d(stream, moves, gather) },
        }
    }
}

/// Walks the descriptors on the host, run by run: every way is compared with this.
#[cfg(test)]
pub(super) fn by_hand(engine: &mut [Vec<u8>], block: &mut [u8], list: &[Descriptor], way: Way) {
    for d in list {
        for row in 0..u64::from(d.rows) {
            let (e, b) = (d.engine_offset + row * d.engine_stride, d.block_offset + row * d.block_stride);
            let engine = &mut engine[d.region as usize][e as usize..][..d.run_bytes as usize];
            let block = &mut block[b as usize..][..d.run_bytes as usize];
            match way {
                Way::Gather => block.copy_from_slice(engine),
                Way::Scatter => engine.copy_from_slice(block),
            }
        }
    }
}
