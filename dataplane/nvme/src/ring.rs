//! [`Io`](super::io::Io) over `io_uring`: one ring, segment files registered, an `eventfd` to be woken by.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};
use rustix::event::{EventfdFlags, eventfd};

use super::io::{Done, Op, OpKind};

const WAKE: u64 = u64::MAX;

pub(super) struct Ring {
    ring: IoUring,
    pub(super) wake: Arc<OwnedFd>,
    /// A poll of `wake` is in the ring.
    armed: bool,
    in_flight: usize,
    /// Which descriptor each slot of the ring's file table holds.
    registered: Vec<RawFd>,
}

/// Why the kernel refuses `io_uring` here. Returns `None` if it does not. The tier then does plain system calls.
pub fn io_uring_refusal() -> Option<io::Error> {
    IoUring::new(2).err()
}

impl Ring {
    /// A ring for `depth` ops at once over `slots` files.
    ///
    /// # Errors
    /// Whatever the kernel says where `io_uring` is missing or forbidden.
    ///
    /// `lock` joins the files: a killed process is gone before its writes are, and with the lock in the ring it stays
    /// locked until the last of them has ended.
    pub(super) fn new(depth: u32, slots: u32, lock: &File) -> io::Result<Self> {
        // One more for the poll of the waker.
        let ring = IoUring::new((depth + 1).next_power_of_two())?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        ring.submitter().register_files_sparse(slots + 1)?;
        ring.submitter().register_files_update(slots, &[lock.as_raw_fd()])?;
        let registered = vec![-1; slots as usize];
        Ok(Self { ring, wake, armed: false, in_flight: 0, registered })
    }

    /// # Safety
    /// See [`Io::submit`](super::io::Io::submit).
    pub(super) unsafe fn submit(&mut self, token: u64, op: &Op) -> io::Result<()> {
        let entry = match op.slot.and_then(|slot| self.register(slot, op.file.as_raw_fd())) {
            Some(slot) => entry(op, types::Fixed(slot), Flags::FIXED_FILE),
            None => entry(op, types::Fixed(op.file.as_raw_fd() as u32), Flags::empty()),
        };
        // SAFETY: the memory outlives the op by the caller's promise; the descriptor is open for as long as `op.file`.
        unsafe { self.push(entry.user_data(token)) }?;
        self.in_flight += 1;
        Ok(())
    }

    pub(super) fn wait(&mut self, block: bool, done: &mut Vec<Done>) -> io::Result<()> {
        if !self.armed {
            let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), 1).build().user_data(WAKE);
            // SAFETY: a poll uses no memory of ours, and the descriptor lives as long as the ring.
            unsafe { self.push(poll) }?;
            self.armed = true;
        }
        match self.ring.submit_and_wait(usize::from(block)) {
            Ok(_) => {}
            // Interrupted, or the kernel is short of memory or of room for completions: what has completed is taken out
            // below, and the rest is submitted with the next call (io_uring_enter(2), EAGAIN and EBUSY).
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock
                ) => {}
            Err(error) => return Err(error),
        }
        self.collect(done);
        Ok(())
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
                self.armed = false;
                continue;
            }
            self.in_flight -= 1;
            let result = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            done.push((completion.user_data(), result));
        }
    }

    /// # Safety
    /// What `entry` names must live until its completion.
    unsafe fn push(&mut self, entry: Entry) -> io::Result<()> {
        // SAFETY: the caller's promise.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    fn register(&mut self, slot: u32, fd: RawFd) -> Option<u32> {
        let held = self.registered.get_mut(slot as usize)?;
        if *held != fd {
            self.ring.submitter().register_files_update(slot, &[fd]).ok()?;
            *held = fd;
        }
        Some(slot)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            if self.wait(true, &mut done).is_err() {
                // The kernel may still write into buffers that are about to be freed.
                std::process::abort();
            }
        }
        // Releases the lock now. Otherwise the kernel would release it at some later time.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// `file` is the slot of a registered file, or with no flags a plain descriptor.
fn entry(op: &Op, file: types::Fixed, flags: Flags) -> Entry {
    let (pieces, count) = (op.pieces.as_ptr().cast(), op.pieces.len() as u32);
    macro_rules! build {
        ($file:expr) => {
            match op.kind {
                OpKind::Read => opcode::Readv::new($file, pieces, count).offset(op.offset).build(),
                OpKind::Write => opcode::Writev::new($file, pieces, count).offset(op.offset).build(),
                OpKind::Sync => opcode::Fsync::new($file).flags(types::FsyncFlags::DATASYNC).build(),
                OpKind::SyncFolder => opcode::Fsync::new($file).build(),
            }
        };
    }
    if flags.contains(Flags::FIXED_FILE) { build!(file) } else { build!(types::Fd(file.0 as i32)) }
}
