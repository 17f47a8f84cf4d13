//! The crate `oneshot`, as far as the data plane uses it, for threads that take turns.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::sync::{Condvar, Mutex};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvTimeoutError {
    Timeout,
    Disconnected,
}

#[derive(Debug)]
pub struct SendError<T>(pub T);

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    /// The sender is gone.
    over: bool,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
pub struct Sender<T>(Arc<Shared<T>>);

#[derive(Debug)]
pub struct Receiver<T>(Arc<Shared<T>>);

pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = Mutex::new(State { value: None, over: false, waker: None });
    let shared = Arc::new(Shared { state, changed: Condvar::new() });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl<T> Sender<T> {
    /// # Errors
    /// Nobody receives any more.
    pub fn send(self, value: T) -> Result<(), SendError<T>> {
        if Arc::strong_count(&self.0) == 1 {
            return Err(SendError(value));
        }
        self.0.state.lock().value = Some(value);
        Ok(())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.state.lock();
            state.over = true;
            state.waker.take()
        };
        self.0.changed.notify_all();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<T> Receiver<T> {
    /// # Errors
    /// The sender is gone, and sent nothing.
    pub fn recv(self) -> Result<T, RecvError> {
        let mut state = self.0.state.lock();
        self.0.changed.wait_while(&mut state, |state| !state.over);
        state.value.take().ok_or(RecvError)
    }

    /// # Errors
    /// The time is over, or the sender is gone, and sent nothing.
    pub fn recv_timeout(&self, time: Duration) -> Result<T, RecvTimeoutError> {
        let mut state = self.0.state.lock();
        if self.0.changed.wait_while_for(&mut state, |state| !state.over, time).timed_out() {
            return Err(RecvTimeoutError::Timeout);
        }
        state.value.take().ok_or(RecvTimeoutError::Disconnected)
    }
}

impl<T> Future for Receiver<T> {
    type Output = Result<T, RecvError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.state.lock();
        if state.over {
            return Poll::Ready(state.value.take().ok_or(RecvError));
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
