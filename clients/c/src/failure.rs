//! How a call says that it failed, and why.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvasir_client::data::{ClientError, JobError, PlanError};

/// How a call ended.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It did what it says.
    Ok = 0,
    /// An argument makes no sense; nothing was done.
    Invalid = 1,
    /// The host cannot be asked now, or not by this client any more. The same may succeed later, on a new client if this one
    /// is closed to it.
    Unavailable = 2,
    /// The host, or the protocol, does not allow it. The same call fails again.
    Refused = 3,
    /// The buffer is too small for the block.
    Buffer = 4,
    /// A fault of this library. The handle may be closed, and should not be used for anything else.
    Fault = 5,
    /// The handle was made before this process was forked: it is the parent's. Nothing was done; make another one here.
    Forked = 6,
}

/// What became of a call that failed.
pub(crate) struct Failure {
    status: Status,
    text: String,
}

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { status: Status::Invalid, text: text.into() }
    }

    pub(crate) fn forked(text: String) -> Self {
        Self { status: Status::Forked, text }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let status = match &error {
            ClientError::Endpoint { .. }
            | ClientError::Batch { .. }
            | ClientError::Size { .. }
            | ClientError::NoBlock { .. } => Status::Invalid,
            ClientError::Buffer { .. } => Status::Buffer,
            error if error.retryable() => Status::Unavailable,
            _ => Status::Refused,
        };
        Self { status, text: error.to_string() }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<JobError> for Failure {
    fn from(error: JobError) -> Self {
        let status = match error {
            JobError::Full { .. } => Status::Unavailable,
            _ => Status::Invalid,
        };
        Self { status, text: error.to_string() }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self {
            status: Status::Unavailable,
            text: format!("the system gives no thread or descriptor: {error}"),
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What the last call of this thread that failed has to say. Never null; empty if none has failed. It is valid until the next
/// call of this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_v1_error() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// Runs a call. Neither an error nor a panic gets past it.
pub(crate) fn call(run: impl FnOnce() -> Result<(), Failure>) -> Status {
    let fault = |_| {
        let text = "a fault in libkvasir, printed to standard error; close the handle and report it";
        Err(Failure { status: Status::Fault, text: text.into() })
    };
    match catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(fault) {
        Ok(()) => Status::Ok,
        Err(failure) => {
            let text = CString::new(failure.text.replace('\0', "?")).unwrap_or_default();
            LAST.set(text);
            failure.status
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_status() {
        assert_eq!(call(|| panic!("as ordered")), Status::Fault);
        assert!(LAST.with_borrow(|text| text.to_string_lossy().starts_with("a fault in libkvasir")));
        assert_eq!(call(|| Err(Failure::invalid("with a zero: \0"))), Status::Invalid);
        assert_eq!(LAST.with_borrow(|text| text.clone()), c"with a zero: ?".to_owned());
    }
}
