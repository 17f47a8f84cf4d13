//! Errors on demand.
//!
//! A test looks `kvasir_cuda_fail` up in the library that it finds as `libcuda`; a real driver does not have it.

use parking_lot::Mutex;

use crate::outcome::{CudaError, Outcome, Text};

/// The name under which a piece of work of a stream fails when its turn comes, long after the call that began it. As on a
/// GPU, the device then refuses everything else in this process.
pub(crate) const WORK: &str = "work";

struct Fault {
    function: String,
    /// Calls that succeed before.
    after: u32,
    error: CudaError,
}

static ORDERED: Mutex<Vec<Fault>> = Mutex::new(Vec::new());

/// Lets the call of `function` fail with `error` that comes after `after` others, once. `"work"` stands for the work of
/// streams.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvasir_cuda_fail(function: Text, after: u32, error: u32) -> u32 {
    match function.get() {
        Ok(function) => {
            ORDERED.lock().push(Fault { function, after, error: CudaError(error) });
            0
        }
        Err(error) => error.0,
    }
}

/// The error that was ordered for this call, if any.
pub(crate) fn of(function: &str) -> Outcome<()> {
    let mut ordered = ORDERED.lock();
    let Some(nth) = ordered.iter().position(|fault| fault.function == function) else { return Ok(()) };
    if ordered[nth].after > 0 {
        ordered[nth].after -= 1;
        return Ok(());
    }
    Err(ordered.remove(nth).error)
}
