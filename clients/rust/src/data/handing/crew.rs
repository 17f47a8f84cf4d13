//! Threads that are started when there is work for them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvasir_os::time::Duration;

use super::{Shared, Task};
use crate::data::{JobError, Reconnecting};
use crate::sync::{Condvar, Mutex};

/// Some threads, and what waits for them.
pub(super) struct Crew {
    name: &'static str,
    max: usize,
    idle: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Task>,
    /// Threads that wait for a task.
    idle: usize,
    threads: Vec<(JoinHandle<()>, Arc<Reconnecting>)>,
    closed: bool,
}

impl Crew {
    /// `idle` is how long a thread waits for a task before it ends.
    pub(super) fn new(name: &'static str, max: usize, idle: Duration) -> Self {
        Self { name, max: max.max(1), idle, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Has a task run by a thread that is free, a new one, or the next that gets free.
    ///
    /// # Errors
    /// It is closed, or has no thread and gets none.
    pub(super) fn push(&self, shared: &Arc<Shared>, task: Task) -> Result<(), JobError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(JobError::Closed);
        }
        if state.idle <= state.waiting.len() && state.threads.len() < self.max {
            let link = Arc::new(Reconnecting::new(shared.endpoint.clone(), shared.options.clone()));
            let (ours, shared, sends) =
                (Arc::clone(&link), Arc::clone(shared), matches!(task.work, super::Work::Send(_)));
            let run = move || {
                let crew = if sends { &shared.senders } else { &shared.receivers };
                shared.work(crew, &ours);
            };
            match thread::Builder::new().name(self.name.to_owned()).spawn(run) {
                Ok(thread) => state.threads.push((thread, link)),
                Err(_) if state.threads.is_empty() => return Err(JobError::NoThread),
                Err(_) => {}
            }
        }
        state.waiting.push_back(task);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for a task. Returns `None` when it is closed, or when there was none for so long that the thread should end.
    pub(super) fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        while !state.closed {
            if let Some(task) = state.waiting.pop_front() {
                return Some(task);
            }
            state.idle += 1;
            let in_vain;
            (state, in_vain) = self.changed.wait_for(state, self.idle);
            state.idle -= 1;
            if in_vain && state.waiting.is_empty() {
                let me = thread::current().id();
                state.threads.retain(|(thread, _)| thread.thread().id() != me);
                break;
            }
        }
        None
    }

    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        self.state.lock().threads.len()
    }

    /// Takes no more tasks. Returns those that nobody has begun.
    pub(super) fn close(&self) -> VecDeque<Task> {
        let mut state = self.state.lock();
        state.closed = true;
        self.changed.notify_all();
        std::mem::take(&mut state.waiting)
    }

    /// Ends the connections, for good.
    pub(super) fn hang_up(&self) {
        self.state.lock().threads.iter().for_each(|(_, link)| link.close());
    }

    /// Waits for the threads of one that was closed.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut self.state.lock().threads);
        for (thread, _) in threads {
            // It reports what it was doing in any case.
            let _ = thread.join();
        }
    }
}
