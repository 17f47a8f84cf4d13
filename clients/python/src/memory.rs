//! Addresses of Python's memory, and streams of its GPUs: the one place that takes its word for them.
//!
//! Why unsafe: an engine's KV is known by its address alone, and a buffer's bytes are written while Python holds the buffer too;
//! no safe type says either.
#![allow(unsafe_code)]

use std::sync::Arc;

use kvasir_client::data::{CudaError, Device, DevicePlan, DevicePlanError, Event, Plan, Run};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// A plan of an engine's memory. The bounds of every block are checked here, the numbers of blocks with each job.
pub(crate) fn plan(runs: &[Run], blocks: usize) -> PyResult<Arc<Plan>> {
    // SAFETY: the caller of `Core.plan` promises that the runs are its memory and stay so until `unplan`, and hands in as
    // `owner` what keeps them alive. The table of plans holds the owner as long as the plan, and the plan cannot be taken out
    // of it while a job of it is not drained, so no thread of ours touches the addresses afterwards. Blocks that a job names
    // are the engine's to give: it does not use them until the job is drained. Nobody keeps Rust references to them.
    let plan = unsafe { Plan::new(runs, blocks) };
    plan.map(Arc::new).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The same for an engine's memory on a GPU.
pub(crate) fn device_plan(
    device: &Arc<Device>,
    runs: &[Run],
    blocks: usize,
) -> Result<DevicePlan, DevicePlanError> {
    // SAFETY: as in `plan`. The caller names with each job the stream in which the engine uses the blocks, and gives the GPU
    // nothing more to do with them until the job is drained.
    unsafe { DevicePlan::new(device, runs, blocks) }
}

/// A point after what the engine has given to its stream so far.
pub(crate) fn mark(plan: &DevicePlan, stream: u64) -> Result<Event, CudaError> {
    // SAFETY: the caller of `Core.load` and `Core.save` promises that it is the handle of a stream of the plan's GPU, of the
    // primary context, which is the one that CUDA's run-time library and PyTorch use. It exists during the call.
    unsafe { plan.mark(stream) }
}

/// Buffers of Python's, held open: while this exists, they neither move nor change their size.
pub(crate) struct Buffers {
    /// They are not used, only kept.
    _held: Vec<PyBuffer<u8>>,
    pieces: Vec<(usize, usize)>,
}

impl Buffers {
    /// Opens them, for writing if `writable`.
    ///
    /// # Errors
    /// `BufferError`: one is no buffer of contiguous bytes, holds Python objects, is empty, or is read-only and `writable` is set.
    pub(crate) fn open(buffers: &[Bound<'_, PyAny>], writable: bool) -> PyResult<Self> {
        let (mut held, mut pieces) = (Vec::with_capacity(buffers.len()), Vec::with_capacity(buffers.len()));
        for (at, object) in buffers.iter().enumerate() {
            let refused = |why: &str| PyBufferError::new_err(format!("buffer {at} {why}"));
            let view =
                PyMemoryView::from(object).map_err(|error| refused(&format!("cannot be used: {error}")))?;
            // Its bytes are addresses that other processes know nothing of, and to write some would crash Python.
            if holds_objects(&view.getattr("format")?.extract::<String>()?) {
                return Err(refused(
                    "holds Python objects, which are no bytes; pickle them, or give numbers",
                ));
            }
            // Whatever its elements are: their bytes. Python refuses that where they do not lie one behind the other.
            let bytes = view.call_method1("cast", ("B",));
            let bytes = bytes.map_err(|error| refused(&format!("has no contiguous bytes: {error}")))?;
            let buffer = PyBuffer::<u8>::get(&bytes)?;
            if writable && buffer.readonly() {
                return Err(refused("is read-only, and is to be filled"));
            }
            if buffer.len_bytes() == 0 {
                return Err(refused("is empty"));
            }
            pieces.push((buffer.buf_ptr().expose_provenance(), buffer.len_bytes()));
            held.push(buffer);
        }
        Ok(Self { _held: held, pieces })
    }

    /// A plan with one block for each. It must not be used after this is dropped.
    pub(crate) fn plan(&self) -> PyResult<Arc<Plan>> {
        // SAFETY: Python exports each buffer at this address and with this length until it is released, which happens when
        // `self` is dropped: after the call that waits, or when the job of it is drained, and a job is reported only when its
        // threads have stopped. Bytes are initialised. Python's code may look at them meanwhile and see anything, or write
        // and have other bytes stored, but nobody keeps Rust references to them. Buffers that are only read are not written:
        // such a plan is given to saves alone.
        let plan = unsafe { Plan::of_pieces(&self.pieces) };
        plan.map(Arc::new).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// Whether a buffer's elements are references to Python objects, or have some, by its format (PEP 3118): an `O` that is not
/// in the name of a field, which stands between colons.
fn holds_objects(format: &str) -> bool {
    format.split(':').step_by(2).any(|outside| outside.contains('O'))
}

#[cfg(test)]
mod tests {
    use super::holds_objects;

    #[test]
    fn objects_are_known_by_the_format_and_not_by_names() {
        for format in ["O", "<O", "4O", "T{O:a:i:b:}", "T{i:a:T{=d:O:O:x:}:b:}", "(2,3)O"] {
            assert!(holds_objects(format), "{format}");
        }
        for format in ["B", "<d", "T{i:O:d:OO:}", "T{B:a:T{d:O:}:O:}", "Zd", ""] {
            assert!(!holds_objects(format), "{format}");
        }
    }
}
