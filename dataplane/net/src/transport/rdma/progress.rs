//! The thread of a device that handles completions, and grants whose time is over.

use kvasir_os::time::{Duration, Instant};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::event::{EventfdFlags, eventfd};

use super::Error;
use super::cq::Channel;
use super::device::Device;
use super::qp::Served;

/// A party that waits for completions.
pub(super) trait Waiting: Send + Sync {
    fn serve(&self) -> Served;

    /// Nobody will call `serve` any more.
    fn abandon(&self, reason: &str);
}

/// Wakes up at least this often.
const NAP_MAX: Duration = Duration::from_secs(1);

pub(super) struct Progress {
    pub(super) channel: Arc<Channel>,
    waiting: Mutex<HashMap<u64, Weak<dyn Waiting>>>,
    next: AtomicU64,
    wake: OwnedFd,
    stop: AtomicBool,
}

impl Progress {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| device.failed("creating an event descriptor")(error.into()))?;
        Ok(Self {
            channel: Channel::new(device)?,
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
            wake,
            stop: AtomicBool::new(false),
        })
    }

    /// An id under which a queue pair can announce completions.
    pub(super) fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Has `who` told of completions announced as `id`, from here on. Returns false if the thread has ended.
    pub(super) fn attend(&self, id: u64, who: Weak<dyn Waiting>) -> bool {
        // The flag is read under the lock: a thread that ends sets it first and empties the table afterwards.
        let mut waiting = self.waiting();
        waiting.insert(id, who);
        !self.stop.load(Ordering::Acquire)
    }

    pub(super) fn forget(&self, id: u64) {
        self.waiting().remove(&id);
    }

    /// Makes the thread check the time again.
    pub(super) fn wake(&self) {
        // Fails only if the counter is at its end, and then it is readable anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    /// The thread. `expire` ends what is over and says when the next thing ends. Returns when stopped, or when the
    /// device fails; everyone who waits then is told.
    pub(super) fn run(&self, expire: impl Fn() -> Option<Instant>) {
        let failed = self.serve_until_stopped(expire).err();
        let reason = failed.map_or_else(|| "the transport is closed".to_owned(), |error| error.to_string());
        self.stop();
        let waiting = std::mem::take(&mut *self.waiting());
        waiting.into_values().filter_map(|who| who.upgrade()).for_each(|who| who.abandon(&reason));
    }

    fn serve_until_stopped(&self, expire: impl Fn() -> Option<Instant>) -> Result<(), Error> {
        // Queues that had their turn and were not empty afterwards.
        let mut busy = VecDeque::new();
        let mut look_again = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            if now >= look_again {
                let latest = now + NAP_MAX;
                look_again = expire().map_or(latest, |at| at.min(latest));
            }
            let nap =
                if busy.is_empty() { look_again.saturating_duration_since(now) } else { Duration::ZERO };
            let announced = self.channel.wait(Some(self.wake.as_fd()), nap)?;
            // Empties the counter; most of the time it is empty already.
            if rustix::io::read(&self.wake, &mut [0; 8]).is_ok() {
                look_again = now;
            }
            busy.extend(announced.filter(|id| !busy.contains(id)));
            let Some(id) = busy.pop_front() else { continue };
            if self.serve(id) == Served::Busy {
                busy.push_back(id);
            }
        }
        Ok(())
    }

    fn serve(&self, id: u64) -> Served {
        let who = self.waiting().get(&id).and_then(Weak::upgrade);
        who.map_or(Served::Armed, |who| who.serve())
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, Weak<dyn Waiting>>> {
        self.waiting.lock()
    }
}
