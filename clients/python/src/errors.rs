//! What Python sees of errors.

use kvasir_client::data::{ClientError, JobError};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

create_exception!(kvasir, Error, PyException, "Something failed between this process and its host.");
create_exception!(
    kvasir,
    Unavailable,
    Error,
    "The host cannot be asked now. What is stored there counts as missing."
);
create_exception!(kvasir, Refused, Unavailable, "The host was asked and refuses.");
create_exception!(kvasir, Mismatch, Error, "What is stored under this key is not what was asked for.");

/// The Python error for one of a client.
pub(crate) fn client_error(error: &ClientError) -> PyErr {
    use ClientError as E;
    let text = error.to_string();
    match error {
        E::Endpoint { .. } | E::NoBlock { .. } | E::Size { .. } | E::Batch { .. } => {
            PyValueError::new_err(text)
        }
        E::Refused { .. } | E::Block { .. } | E::Payload { .. } => Refused::new_err(text),
        E::OtherSize { .. } | E::OtherLabel { .. } | E::Buffer { .. } => Mismatch::new_err(text),
        _ => Unavailable::new_err(text),
    }
}

/// The Python error for a job that was not taken.
pub(crate) fn job_error(error: JobError) -> PyErr {
    let text = error.to_string();
    match error {
        JobError::NoBlock { .. }
        | JobError::Labels { .. }
        | JobError::Layers { .. }
        | JobError::Numbers { .. }
        | JobError::Transfer { .. }
        | JobError::Part { .. }
        | JobError::Twice { .. } => PyValueError::new_err(text),
        JobError::Full { .. } | JobError::Closed | JobError::NoThread => Error::new_err(text),
    }
}
