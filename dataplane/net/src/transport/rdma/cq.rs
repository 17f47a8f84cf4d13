//! Completion queues, and the channel on which they announce completions.
//!
//! Polling is adaptive: while completions keep coming the queue is polled; after [`PATIENCE`] empty looks it is
//! armed, and its thread sleeps in `poll(2)` on the channel. So an idle connection costs nothing, a busy one needs no
//! system call per completion, and no loop here runs without bound.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

use super::Error;
use super::device::Device;
use super::load::check;
use super::sys;

/// Completions taken by one look at a queue.
const BATCH: usize = 32;
/// Empty looks, each after giving the processor away, before a queue is armed.
const PATIENCE: u32 = 4;
/// Looks at one queue before the others get their turn.
const TURN: u32 = 64;

/// Where the queues of a device announce completions: a descriptor to sleep on.
pub struct Channel {
    device: Arc<Device>,
    channel: NonNull<sys::CompChannel>,
}

// SAFETY: a handle of the thread-safe library, owned until dropped.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    /// # Errors
    /// What the system said, for example that there are too many open files.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, Error> {
        // SAFETY: the context is open while the device lives.
        let channel = unsafe { (device.verbs.create_comp_channel)(device.context.as_ptr()) };
        let failed = |error: io::Error| device.failed("creating a completion channel")(error);
        let channel = NonNull::new(channel).ok_or_else(|| failed(io::Error::last_os_error()))?;
        let channel = Self { device: Arc::clone(device), channel };
        // Two threads may be woken by one event; the second must not block in reading it.
        let flags = rustix::fs::fcntl_getfl(&channel).map_err(|e| failed(e.into()))?;
        rustix::fs::fcntl_setfl(&channel, flags | OFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
        Ok(Arc::new(channel))
    }

    /// Sleeps until a queue announces completions, and returns that queue's id. Returns `None` if the time is over or
    /// `wake` became readable first.
    ///
    /// # Errors
    /// What the system said; the channel is of no use then.
    pub fn wait(&self, wake: Option<BorrowedFd<'_>>, timeout: Duration) -> Result<Option<u64>, Error> {
        let failed = |error: io::Error| self.device.failed("waiting for completions")(error);
        let mut fds = vec![PollFd::new(self, PollFlags::IN)];
        fds.extend(wake.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let timeout = Timespec::try_from(timeout).ok();
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) if fds[0].revents().is_empty() => Ok(None),
            Ok(_) => self.take_event().map_err(failed),
            Err(rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
    }

    fn take_event(&self) -> io::Result<Option<u64>> {
        let (mut cq, mut id) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is open; both targets are written during the call only.
        if unsafe { (self.device.verbs.get_cq_event)(self.channel.as_ptr(), &mut cq, &mut id) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // SAFETY: destroying a queue waits until its events are acknowledged, so this one is still there.
        unsafe { (self.device.verbs.ack_cq_events)(cq, 1) };
        Ok(Some(id as u64))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open until the channel is destroyed, which `self` outlives.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: every queue holds an `Arc` of this value, so none is left.
        unsafe { (self.device.verbs.destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

/// What a look at a queue left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The queue is empty and armed: the channel will announce what comes next.
    Armed,
    /// The queue had its turn and is still busy; nothing will announce what is left.
    Busy,
}

/// The completions of one connection. A queue of its own cannot overflow because of another connection, and goes with
/// its own.
pub(super) struct CompletionQueue {
    channel: Arc<Channel>,
    cq: NonNull<sys::Cq>,
}

// SAFETY: a handle of the thread-safe library, owned until dropped.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// An armed queue for `capacity` completions that announces itself on `channel` as `id`.
    pub(super) fn new(channel: &Arc<Channel>, capacity: u32, id: u64) -> Result<Self, Error> {
        let device = &channel.device;
        let entries = i32::try_from(capacity).unwrap_or(i32::MAX);
        // SAFETY: context and channel are open. The id is a number passed as a pointer, which is never followed.
        let cq = unsafe {
            (device.verbs.create_cq)(
                device.context.as_ptr(),
                entries,
                id as *mut c_void,
                channel.channel.as_ptr(),
                0,
            )
        };
        let cq = NonNull::new(cq)
            .ok_or_else(|| device.failed("creating a completion queue")(io::Error::last_os_error()))?;
        let queue = Self { channel: Arc::clone(channel), cq };
        queue.arm()?;
        Ok(queue)
    }

    pub(super) fn as_ptr(&self) -> *mut sys::Cq {
        self.cq.as_ptr()
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.channel.device
    }

    /// Passes completions to `each` until none has come for a while, then arms the queue; or until its turn
    /// is over.
    pub(super) fn serve(&self, mut each: impl FnMut(&[sys::Wc])) -> Result<Served, Error> {
        let (mut looks, mut empty) = (0, 0);
        while empty < PATIENCE {
            if looks == TURN {
                return Ok(Served::Busy);
            }
            looks += 1;
            match self.poll(&mut each)? {
                0 => {
                    empty += 1;
                    std::thread::yield_now();
                }
                _ => empty = 0,
            }
        }
        self.arm()?;
        // Nothing announces what came between the last look and the arming.
        while self.poll(&mut each)? > 0 {
            looks += 1;
            if looks > TURN {
                return Ok(Served::Busy);
            }
        }
        Ok(Served::Armed)
    }

    /// Looks once and returns how many completions there were.
    pub(super) fn poll(&self, mut each: impl FnMut(&[sys::Wc])) -> Result<usize, Error> {
        let mut found = [sys::Wc::default(); BATCH];
        // SAFETY: the context is open; its table was filled when it was opened.
        let poll = unsafe { (*self.device().context.as_ptr()).ops.poll_cq };
        let poll = poll.ok_or_else(|| self.unsupported("polling for completions"))?;
        // SAFETY: the queue is open, and there is room for `BATCH` completions.
        let count = unsafe { poll(self.cq.as_ptr(), BATCH as i32, found.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| {
            self.device().failed("polling for completions")(io::Error::from_raw_os_error(-count))
        })?;
        if count > 0 {
            each(&found[..count]);
        }
        Ok(count)
    }

    fn arm(&self) -> Result<(), Error> {
        // SAFETY: as in `poll`.
        let notify = unsafe { (*self.device().context.as_ptr()).ops.req_notify_cq };
        let notify = notify.ok_or_else(|| self.unsupported("completion events"))?;
        // SAFETY: the queue is open. 0: announce every completion, not only solicited ones.
        check(unsafe { notify(self.cq.as_ptr(), 0) })
            .map_err(self.device().failed("arming a completion queue"))
    }

    fn unsupported(&self, what: &'static str) -> Error {
        Error::Unsupported { what, device: self.device().name().into() }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: the queue pair that used it is destroyed before, see `QueuePair`.
        unsafe { (self.device().verbs.destroy_cq)(self.cq.as_ptr()) };
    }
}
