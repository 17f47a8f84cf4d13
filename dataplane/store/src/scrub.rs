//! Finds blocks whose bytes have changed, before somebody asks for them.

use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::dram::DramStore;
use kvasir_os::thread::JoinHandle;
use kvasir_protocol::clock::Clock;

/// Work is done in steps of this length, so that the rate is kept over any second.
const STEP: Duration = Duration::from_millis(100);
/// The shortest rest after a full pass: a store with little in it need not be read all the time.
const REST: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Stop {
    now: AtomicBool,
    lock: Mutex<()>,
    woken: Condvar,
}

/// A thread that compares every resident block with its checksum, again and again, at a bounded rate. What differs is
/// dropped and counted ([`StoreMetrics::scrub`](crate::metrics::StoreMetrics)). Stopped and joined on drop.
pub struct Scrubber {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Reads at most `rate` bytes per second (and at least one block per step, however large).
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(store: Arc<DramStore>, clock: Clock, rate: u64) -> io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let stopping = Arc::clone(&stop);
        let run = move || {
            let mut from = 0;
            while !stopping.now.load(Ordering::Relaxed) {
                let done = store.scrub(from, rate / 10, clock.now_ms());
                from = done.next.unwrap_or(0);
                let rest = if done.next.is_none() { REST } else { STEP };
                stopping.wait(pause(done.bytes, rate).max(rest));
            }
        };
        let thread = kvasir_os::thread::Builder::new().name("kvasir-scrub".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        self.stop.now.store(true, Ordering::Relaxed);
        drop(self.stop.lock.lock());
        self.stop.woken.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Stop {
    fn wait(&self, pause: Duration) {
        let mut guard = self.lock.lock();
        let going_on = |_: &mut ()| !self.now.load(Ordering::Relaxed);
        self.woken.wait_while_for(&mut guard, going_on, pause);
    }
}

/// How long to rest after reading `bytes`.
fn pause(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_kept() {
        assert_eq!(pause(0, 1000), Duration::ZERO);
        assert_eq!(pause(100, 1000), STEP);
        assert_eq!(pause(5000, 1000), Duration::from_secs(5), "a block larger than a step is paid for later");
        assert_eq!(pause(5, 0), Duration::from_secs(5));
    }
}
