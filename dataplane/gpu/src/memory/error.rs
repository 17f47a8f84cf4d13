//! What can go wrong with a GPU.

use cudarc::driver::DriverError;

/// Why there is no GPU memory, or why a GPU did not do what it was asked.
///
/// After a [`Driver`](Self::Driver) error of running work, the driver refuses everything else on that GPU as well,
/// until the process is restarted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    #[error("no CUDA device: libcuda.so.1 not found; install the NVIDIA driver, or run without a GPU")]
    NoLibrary,
    #[error("no CUDA device: the driver does not start: {reason}")]
    NoDriver { reason: String },
    #[error(
        "no CUDA device cuda:{device}: {there} are visible here; check the number and CUDA_VISIBLE_DEVICES"
    )]
    NoDevice { device: u16, there: usize },
    #[error("{step} failed on cuda:{device}: {reason}")]
    Driver { device: u16, step: &'static str, reason: String },
    #[error(
        "{wanted} B do not fit on cuda:{device}, which has {free} B free of {total} B; ask for less or stop what uses it"
    )]
    OutOfMemory { device: u16, wanted: u64, free: u64, total: u64 },
    #[error(
        "descriptor {nth} names bytes outside of its region or of the block; compute them from the layout in use"
    )]
    OutOfRange { nth: usize },
    #[error("cuda:{device} cannot {what}: {reason}")]
    Unsupported { device: u16, what: &'static str, reason: &'static str },
}

impl CudaError {
    /// Turns what the driver says about one step into an error.
    pub(super) fn of(device: u16, step: &'static str) -> impl Fn(DriverError) -> Self {
        move |error| Self::Driver { device, step, reason: text(error) }
    }
}

/// Name and meaning, as the driver gives them.
pub(super) fn text(error: DriverError) -> String {
    let meaning = error.error_string().map(|text| text.to_string_lossy().into_owned());
    format!("{:?} ({})", error.0, meaning.unwrap_or_else(|_| "no description".to_owned()))
}
