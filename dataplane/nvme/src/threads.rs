//! [`Io`](super::io::Io) over plain system calls on a few threads, for kernels and containers that refuse `io_uring`.
#![allow(unsafe_code)]

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::io::{Done, Op, OpKind};
use kvasir_os::disk;
use kvasir_os::thread::{Builder, JoinHandle};

pub(super) struct Threads {
    jobs: Arc<Jobs>,
    pub(super) events: Arc<Events>,
    workers: Vec<JoinHandle<()>>,
}

/// What the workers have done, for the thread that waits for it.
#[derive(Default)]
pub(super) struct Events {
    /// The ops that are done, and whether it was told to wait no longer.
    list: Mutex<(Vec<Done>, bool)>,
    changed: Condvar,
}

impl Events {
    pub(super) fn wake(&self) {
        self.list.lock().1 = true;
        self.changed.notify_one();
    }

    fn done(&self, one: Done) {
        self.list.lock().0.push(one);
        self.changed.notify_one();
    }

    fn take(&self, block: bool, done: &mut Vec<Done>) {
        let mut list = self.list.lock();
        while block && list.0.is_empty() && !list.1 {
            self.changed.wait(&mut list);
        }
        done.append(&mut list.0);
        list.1 = false;
    }
}

#[derive(Default)]
struct Jobs {
    queue: Mutex<(VecDeque<(u64, Op)>, bool)>,
    added: Condvar,
    faults: Faults,
}

/// Makes some ops fail, for tests: each op asks, in order.
#[derive(Clone, Default)]
pub(super) struct Faults(pub(super) Option<Arc<Fault>>);

/// The answer instead of doing the op, or `None` to do it.
pub(super) type Fault = dyn Fn(&Op) -> Option<io::Result<usize>> + Send + Sync;

impl Faults {
    /// Does the op, unless it is one that fails. Returns the bytes moved.
    pub(super) fn perform(&self, op: &Op) -> io::Result<usize> {
        let fault = self.0.as_ref().and_then(|fault| fault(op));
        fault.unwrap_or_else(|| perform(op))
    }
}

impl Threads {
    pub(super) fn new(workers: usize, faults: Faults) -> io::Result<Self> {
        let jobs = Arc::new(Jobs { faults, ..Jobs::default() });
        let events = Arc::new(Events::default());
        let spawn = |_| {
            let (jobs, events) = (Arc::clone(&jobs), Arc::clone(&events));
            Builder::new().name("nvme-io".into()).spawn(move || work(&jobs, &events))
        };
        let workers = (0..workers).map(spawn).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { jobs, events, workers })
    }

    pub(super) fn submit(&self, token: u64, op: Op) {
        self.jobs.queue.lock().0.push_back((token, op));
        self.jobs.added.notify_one();
    }

    pub(super) fn wait(&self, block: bool, done: &mut Vec<Done>) {
        self.events.take(block, done);
    }
}

impl Drop for Threads {
    /// The workers do what was submitted and end; only then is its memory free again.
    fn drop(&mut self) {
        self.jobs.queue.lock().1 = true;
        self.jobs.added.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked touches no memory any more.
            let _ = worker.join();
        }
    }
}

fn work(jobs: &Jobs, events: &Events) {
    loop {
        let mut queue = jobs.queue.lock();
        let (token, op) = loop {
            match queue.0.pop_front() {
                Some(job) => break job,
                None if queue.1 => return,
                None => jobs.added.wait(&mut queue),
            }
        };
        drop(queue);
        events.done((token, jobs.faults.perform(&op)));
    }
}

pub(super) fn perform(op: &Op) -> io::Result<usize> {
    let len = op.pieces.iter().map(|piece| piece.len).sum();
    match op.kind {
        OpKind::Read => disk::read(&op.file, op.offset, len, || moved(op, libc::preadv)),
        OpKind::Write => disk::write(&op.file, op.offset, len, || moved(op, libc::pwritev)),
        OpKind::Sync => disk::sync(&op.file).map(|()| 0),
        OpKind::SyncFolder => disk::sync_folder(&op.file).map(|()| 0),
    }
}

type Call = unsafe extern "C" fn(c_int, *const libc::iovec, c_int, libc::off_t) -> isize;

/// The kernel is given addresses, because what is written may lie in a pool that others change.
fn moved(op: &Op, call: Call) -> io::Result<usize> {
    let (Ok(count), Ok(offset)) = (op.pieces.len().try_into(), op.offset.try_into()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: a piece is laid out as an iovec, and the submitter of the op keeps its memory valid, and to itself if it is
    // read into, until the completion.
    let moved = unsafe { call(op.file.as_raw_fd(), op.pieces.as_ptr().cast(), count, offset) };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
