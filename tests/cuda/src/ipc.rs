//! Handles that other processes open: who made them, and under which descriptor the thing is there.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::memory::name;
use crate::outcome::{CudaError, Outcome};

const MAGIC: [u8; 4] = *b"SCU1";

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawHandle(pub(crate) [u8; 64]);

/// What a handle says.
pub(crate) struct Handle {
    pid: u32,
    fd: u32,
    pub(crate) len: u64,
    pub(crate) id: u64,
}

impl Handle {
    pub(crate) fn of(fd: &OwnedFd, len: u64, id: u64) -> Self {
        Self { pid: std::process::id(), fd: fd.as_raw_fd() as u32, len, id }
    }

    pub(crate) fn encode(&self) -> RawHandle {
        let mut bytes = [0; 64];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.pid.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.fd.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.id.to_ne_bytes());
        RawHandle(bytes)
    }

    pub(crate) fn decode(raw: RawHandle) -> Outcome<Self> {
        let bytes = raw.0;
        if bytes[..4] != MAGIC {
            return Err(CudaError::INVALID_VALUE);
        }
        let half = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        Ok(Self { pid: half(4), fd: half(8), len: word(16), id: word(24) })
    }

    /// The thing itself. The driver does not open a handle in the process that made it.
    pub(crate) fn open(&self) -> Outcome<OwnedFd> {
        if self.pid == std::process::id() {
            return Err(CudaError::INVALID_CONTEXT);
        }
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        // The descriptor may be another by now, or the process.
        let named = std::fs::read_link(&path).map_err(|_| CudaError::INVALID_VALUE)?;
        if !named.to_string_lossy().contains(&name(self.id)) {
            return Err(CudaError::INVALID_VALUE);
        }
        let file = OpenOptions::new().read(true).write(true).open(&path);
        file.map(Into::into).map_err(|_| CudaError::INVALID_VALUE)
    }
}
