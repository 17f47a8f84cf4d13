//! The thread that has the guards look.

use super::Error;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ends, and waits for a look under way, when dropped.
pub(super) struct Looking {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Looking {
    /// Calls `look` at this interval, with the milliseconds since now.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(every: Duration, look: impl Fn(u64) + Send + 'static) -> Result<Self, Error> {
        let (stop, stopped) = mpsc::channel();
        let start = Instant::now();
        let run = move || {
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                look(start.elapsed().as_millis() as u64);
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-guard".into()).spawn(run);
        let thread = thread.map_err(|e| Error::Engine(format!("cannot start the guards' thread: {e}")))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
