//! The way to the disk: `io_uring` if the kernel allows it, else a few threads with plain system calls.
//!
//! An [`Op`] points at memory that its submitter owns. The submitter keeps that memory where it is until the op's
//! completion; dropping an [`Io`] first waits for all completions.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvasir_memory::shared::Shared;

use super::ring::Ring;
use super::threads::{Events, Threads};

/// The most pieces of memory in one op (`IOV_MAX`).
pub(super) const PIECES_MAX: usize = 1024;

/// A piece of memory, laid out as `struct iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Piece {
    pub(super) base: *mut u8,
    pub(super) len: usize,
}

// SAFETY: only an address; who may use it is settled by the contract of `Io::submit`.
unsafe impl Send for Piece {}

impl Piece {
    pub(super) fn of(bytes: Shared<'_>) -> Self {
        Self { base: bytes.as_ptr().cast_mut(), len: bytes.len() }
    }

    pub(super) fn of_mut(bytes: &mut [u8]) -> Self {
        Self { base: bytes.as_mut_ptr(), len: bytes.len() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpKind {
    Read,
    Write,
    /// `fdatasync`.
    Sync,
    /// `fsync` of the folder.
    SyncFolder,
}

#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) kind: OpKind,
    pub(super) file: Arc<File>,
    /// The file's slot in the ring's table of registered files; `None` for a file that is not a segment.
    pub(super) slot: Option<u32>,
    pub(super) offset: u64,
    /// At most [`PIECES_MAX`]; empty for a sync.
    pub(super) pieces: Vec<Piece>,
}

/// The outcome of the op with this token: bytes moved, or an error.
pub(super) type Done = (u64, io::Result<usize>);

pub(super) enum Io {
    Ring(Box<Ring>),
    Threads(Threads),
}

/// Ends an [`Io::wait`] early, from any thread.
pub(super) enum Waker {
    Ring(Arc<OwnedFd>),
    Threads(Arc<Events>),
}

impl Io {
    /// Starts an op.
    ///
    /// # Safety
    /// Until [`wait`](Self::wait) has returned `token` or `self` is dropped, the list `op.pieces` stays where it is, and
    /// the memory that it names is valid and, for a read, touched by nobody else.
    pub(super) unsafe fn submit(&mut self, token: u64, op: &Op) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Self::Ring(ring) => unsafe { ring.submit(token, op) },
            Self::Threads(threads) => {
                threads.submit(token, op.clone());
                Ok(())
            }
        }
    }

    /// Collects completions; with `block`, waits for at least one or for the waker.
    pub(super) fn wait(&mut self, block: bool, done: &mut Vec<Done>) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.wait(block, done),
            Self::Threads(threads) => {
                threads.wait(block, done);
                Ok(())
            }
        }
    }

    pub(super) fn waker(&self) -> Waker {
        match self {
            Self::Ring(ring) => Waker::Ring(ring.wake.clone()),
            Self::Threads(threads) => Waker::Threads(Arc::clone(&threads.events)),
        }
    }
}

impl Waker {
    pub(super) fn wake(&self) {
        match self {
            // Full means that it is awake already.
            Self::Ring(fd) => drop(rustix::io::write(fd, &1u64.to_ne_bytes())),
            Self::Threads(events) => events.wake(),
        }
    }
}
