//! Threads that take turns.

use std::io;
use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::schedule::{self, On, Runs, State, Turn};

/// One, so that nobody polls: a thread that spins gains nothing where only one runs.
pub fn available_parallelism() -> io::Result<NonZero<usize>> {
    Ok(NonZero::<usize>::MIN)
}

/// Turns are given by seed, and to all alike.
pub fn give_way() -> io::Result<()> {
    Ok(())
}

pub fn sleep(time: Duration) {
    schedule::wait(On::Time, Some(schedule::now() + time.as_nanos() as u64));
}

pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    Builder::new().spawn(work).expect("a thread is left")
}

#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
}

impl Builder {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn name(self, name: String) -> Self {
        Self { name: Some(name) }
    }

    pub fn spawn<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let result = Arc::new(Mutex::new(None));
        let kept = Arc::clone(&result);
        let run = move || {
            let done = work();
            *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
            drop(kept);
            schedule::leave();
        };
        let id =
            schedule::adopt(self.name.unwrap_or_else(|| "unnamed".into()), Runs::Fiber(Some(Box::new(run))));
        schedule::maybe_yield();
        Ok(JoinHandle { id, result })
    }
}

pub struct JoinHandle<T> {
    id: usize,
    result: Arc<Mutex<Option<T>>>,
}

impl<T> JoinHandle<T> {
    pub fn join(self) -> std::thread::Result<T> {
        join(self.id);
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that panics ends the world.
        Ok(result.expect("a thread that has ended has a result"))
    }

    pub fn is_finished(&self) -> bool {
        matches!(schedule::world().tasks[self.id].state, State::Ended)
    }
}

fn join(id: usize) {
    while !matches!(schedule::world().tasks[id].state, State::Ended) {
        schedule::wait(On::End(id), None);
    }
}

/// As [`std::thread::scope`], by value.
pub fn scope<'env, T>(work: impl for<'scope> FnOnce(Scope<'scope, 'env>) -> T) -> T {
    std::thread::scope(|scope| {
        let started = Mutex::new(Vec::new());
        // The list lives as long as this closure, which is as long as anybody can spawn.
        let scope = Scope { scope, started: Arc::new(started) };
        let all = Arc::clone(&scope.started);
        let done = work(scope);
        for id in std::mem::take(&mut *all.lock().unwrap_or_else(PoisonError::into_inner)) {
            join(id);
        }
        done
    })
}

#[derive(Clone)]
pub struct Scope<'scope, 'env: 'scope> {
    scope: &'scope std::thread::Scope<'scope, 'env>,
    started: Arc<Mutex<Vec<usize>>>,
}

impl<'scope> Scope<'scope, '_> {
    pub fn spawn<T: Send + 'scope>(
        &self,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> ScopedJoinHandle<'scope, T> {
        let turn = Arc::<Turn>::default();
        let id = schedule::adopt("scoped".into(), Runs::Thread(Arc::clone(&turn)));
        let handle = self.scope.spawn(move || {
            turn.wait();
            let done = work();
            schedule::leave();
            done
        });
        self.started.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        ScopedJoinHandle { id, handle }
    }
}

pub struct ScopedJoinHandle<'scope, T> {
    id: usize,
    handle: std::thread::ScopedJoinHandle<'scope, T>,
}

impl<T> ScopedJoinHandle<'_, T> {
    pub fn join(self) -> std::thread::Result<T> {
        join(self.id);
        self.handle.join()
    }
}

pub fn yield_now() {
    schedule::yield_now();
}

impl<T> JoinHandle<T> {
    /// Its process has crashed: it never ends.
    pub fn is_crashed(&self) -> bool {
        matches!(schedule::world().tasks[self.id].state, State::Crashed)
    }
}
