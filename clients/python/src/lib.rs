//! `kvasir._core`: what the Python package does natively. Bytes in, bytes out; connectors to engines are Python.
//!
//! Every call that can wait gives the GIL away while it does. Copying threads never take it: what they touch are addresses,
//! which the [`jobs`] table keeps alive until a job is drained. A lock of ours is never held while Python code may run, and
//! that is whenever the GIL is taken or an object is dropped.

mod bytes;
mod core;
mod device;
mod errors;
mod jobs;
mod link;
mod memory;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::core::Core;
    #[pymodule_export]
    use super::errors::{Error, Mismatch, Refused, Unavailable};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("LABEL_BYTES", kvasir_client::data::Label::BYTES)?;
        module.add("PROTOCOL", kvasir_client::data::VERSIONS.to_string())?;
        // Memory of Python's goes away at exit in no particular order. Before that, copying must have stopped.
        let close = wrap_pyfunction!(super::core::close_all, module)?;
        module.py().import("atexit")?.call_method1("register", (close,)).map(drop)
    }
}
