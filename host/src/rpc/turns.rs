//! The queue before the workers that decide.

use tokio::sync::{Semaphore, SemaphorePermit};

/// The most requests that are being decided or wait for it. A decision takes microseconds, so a host with so long a queue would
/// answer too late to be of use; a router asks another one.
pub(super) const PLACES_MAX: usize = 4096;

/// Requests that wait take up no thread.
pub(super) struct Turns {
    places: Semaphore,
    workers: Semaphore,
}

/// A worker is this request's until it is dropped.
pub(super) struct Turn<'a> {
    _worker: SemaphorePermit<'a>,
    _place: SemaphorePermit<'a>,
}

impl Turns {
    pub(super) fn new(workers: usize, places: usize) -> Self {
        Self { places: Semaphore::new(places), workers: Semaphore::new(workers) }
    }

    /// Waits for a worker, first come first served. `None` at once if the queue is full.
    pub(super) async fn take(&self) -> Option<Turn<'_>> {
        let place = self.places.try_acquire().ok()?;
        let worker = self.workers.acquire().await.expect("never closed");
        Some(Turn { _worker: worker, _place: place })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn a_full_queue_turns_away_and_does_not_wait() {
        let turns = Turns::new(1, 2);
        let mut context = Context::from_waker(Waker::noop());
        let first = match pin!(turns.take()).poll(&mut context) {
            std::task::Poll::Ready(turn) => turn.unwrap(),
            std::task::Poll::Pending => panic!("a worker is free"),
        };
        let mut second = pin!(turns.take());
        assert!(second.as_mut().poll(&mut context).is_pending(), "the worker is taken");
        assert!(matches!(pin!(turns.take()).poll(&mut context), std::task::Poll::Ready(None)));
        drop(first);
        assert!(matches!(second.as_mut().poll(&mut context), std::task::Poll::Ready(Some(_))));
        assert!(matches!(pin!(turns.take()).poll(&mut context), std::task::Poll::Ready(Some(_))));
    }
}
