//! The thread of a slot that builds instances, moves state and trips the breaker beside the traffic.

use crate::policy::Error;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Hands work to the thread, which ends with the last of these.
#[derive(Clone)]
pub struct Builder(mpsc::Sender<Job>);

struct Job {
    due: Instant,
    work: Box<dyn FnOnce() + Send>,
}

impl Builder {
    /// # Errors
    /// The thread cannot be started.
    pub fn start() -> Result<Self, Error> {
        let (sender, jobs) = mpsc::channel();
        let thread = std::thread::Builder::new().name("kvasir-policy".into());
        thread
            .spawn(move || run(&jobs))
            .map_err(|e| Error::Engine(format!("cannot start the builder thread: {e}")))?;
        Ok(Self(sender))
    }

    pub(super) fn submit(&self, work: impl FnOnce() + Send + 'static) {
        self.submit_later(Duration::ZERO, work);
    }

    /// Work that waits does not keep the thread alive: it is dropped with the last sender.
    pub(super) fn submit_later(&self, after: Duration, work: impl FnOnce() + Send + 'static) {
        // The receiver ends with the last sender, so this cannot fail while `self` lives.
        let _ = self.0.send(Job { due: Instant::now() + after, work: Box::new(work) });
    }
}

fn run(jobs: &Receiver<Job>) {
    let mut waiting: Vec<Job> = Vec::new();
    loop {
        let next = waiting.iter().map(|job| job.due).min();
        let received = match next {
            None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => jobs.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        match received {
            Ok(job) => waiting.push(job),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        let (due, later) = waiting.into_iter().partition(|job| job.due <= now);
        waiting = later;
        Vec::into_iter(due).for_each(|job: Job| (job.work)());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_holds_nothing_up() {
        let (builder, (sender, done)) = (Builder::start().unwrap(), mpsc::channel());
        let note = |n: u32| {
            let sender = sender.clone();
            move || sender.send(n).expect("the test waits for it")
        };
        builder.submit_later(Duration::from_secs(3600), note(9));
        builder.submit_later(Duration::from_millis(1), note(3));
        for n in [1, 2] {
            builder.submit(note(n));
        }
        let mut got: Vec<_> = done.iter().take(3).collect();
        got.sort_unstable();
        assert_eq!(got, [1, 2, 3]);
        drop((builder, sender));
        assert_eq!(done.recv(), Err(mpsc::RecvError), "what still waits goes with the last builder");
    }
}
