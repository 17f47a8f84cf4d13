//! Streams: threads that do what they are given, late.

use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::chance::Chance;
use crate::outcome::{CudaError, Outcome};
use crate::{device, fault};

type Run = Box<dyn FnOnce(&mut Chance) -> Outcome<()> + Send>;

/// A piece of work.
enum Work {
    /// Left out once the device has failed.
    Do(Run),
    /// Done in any case: it tells others that the work before it is over.
    Mark(Box<dyn FnOnce() + Send>),
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    submitted: u64,
    done: u64,
    /// Nothing more comes.
    closed: bool,
}

/// Those that have a handle.
static STREAMS: Mutex<BTreeMap<usize, Arc<Stream>>> = Mutex::new(BTreeMap::new());
/// Those whose thread runs.
static RUNNING: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

pub(crate) fn create(device: usize) -> usize {
    let handle = crate::api::handle();
    STREAMS.lock().insert(handle, Stream::start(device));
    handle
}

/// The stream of a handle; null is the default stream.
pub(crate) fn get(handle: usize) -> Outcome<Arc<Stream>> {
    if handle == 0 {
        return Ok(device::current()?.default_stream());
    }
    STREAMS.lock().get(&handle).cloned().ok_or(CudaError::INVALID_HANDLE)
}

/// Ends a stream once its work is done. Does not wait.
pub(crate) fn destroy(handle: usize) -> Outcome<()> {
    let stream = STREAMS.lock().remove(&handle).ok_or(CudaError::INVALID_HANDLE)?;
    stream.queue.lock().closed = true;
    stream.changed.notify_all();
    Ok(())
}

pub(crate) fn count(device: usize) -> usize {
    STREAMS.lock().values().filter(|stream| stream.device == device).count()
}

/// Those of a device that may have work, whether they have a handle or not.
pub(crate) fn running(device: usize) -> Vec<Arc<Stream>> {
    RUNNING.lock().iter().filter(|stream| stream.device == device).cloned().collect()
}

impl Stream {
    pub(crate) fn start(device: usize) -> Arc<Self> {
        let stream = Arc::new(Self { device, queue: Mutex::default(), changed: Condvar::new() });
        RUNNING.lock().push(stream.clone());
        let (ours, chance) = (stream.clone(), Chance::of(NEXT.fetch_add(1, Ordering::Relaxed)));
        let thread = thread::Builder::new().name("software-cuda".into());
        let started = thread.spawn(move || ours.work(chance));
        started.expect("a thread for a stream; raise the limit on threads");
        stream
    }

    pub(crate) fn submit(&self, run: impl FnOnce(&mut Chance) -> Outcome<()> + Send + 'static) {
        self.push(Work::Do(Box::new(run)));
    }

    pub(crate) fn mark(&self, run: impl FnOnce() + Send + 'static) {
        self.push(Work::Mark(Box::new(run)));
    }

    fn push(&self, work: Work) {
        let mut queue = self.queue.lock();
        queue.work.push_back(work);
        queue.submitted += 1;
        self.changed.notify_all();
    }

    /// Waits for what was submitted up to now.
    pub(crate) fn wait_for_all(&self) {
        let mut queue = self.queue.lock();
        let until = queue.submitted;
        while queue.done < until {
            self.changed.wait(&mut queue);
        }
    }

    fn work(self: Arc<Self>, mut chance: Chance) {
        while let Some(work) = self.next() {
            chance.delay();
            self.run(work, &mut chance);
            self.queue.lock().done += 1;
            self.changed.notify_all();
        }
        RUNNING.lock().retain(|stream| !Arc::ptr_eq(stream, &self));
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(work) = queue.work.pop_front() {
                return Some(work);
            }
            if queue.closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn run(&self, work: Work, chance: &mut Chance) {
        let Ok(device) = device::get(self.device as i32) else { return };
        match work {
            Work::Do(run) if device.check().is_ok() => {
                if let Err(error) = fault::of(fault::WORK).and_then(|()| run(chance)) {
                    device.fail(error);
                }
            }
            Work::Do(_) => {}
            Work::Mark(run) => run(),
        }
    }
}
