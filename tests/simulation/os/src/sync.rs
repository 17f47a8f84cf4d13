//! `parking_lot`'s locks, as far as the data plane uses them, for threads that take turns.
//!
//! Each is the standard library's lock, of which only `try_lock` is called: a thread that finds it taken waits for its turn
//! instead. Outside of a world they are ordinary locks.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{self, PoisonError, TryLockError};

use crate::order::{self, Place};
use crate::schedule::{self, On};
use crate::time::{Duration, Instant};

/// Those that wait for a lock.
struct Queue {
    key: AtomicU64,
    waiting: AtomicUsize,
    /// Where the lock is made.
    made: Place,
}

impl Queue {
    #[track_caller]
    const fn new() -> Self {
        Self { key: AtomicU64::new(0), waiting: AtomicUsize::new(0), made: Location::caller() }
    }

    /// Repeats `attempt` until it succeeds, with other threads' turns in between.
    #[track_caller]
    fn until<T>(&self, mut attempt: impl FnMut() -> Option<T>) -> T {
        order::wants(self.made, Location::caller());
        schedule::maybe_yield();
        let mut waits = None;
        loop {
            if let Some(done) = attempt() {
                if let Some(wait) = waits {
                    order::waited(self.made, Location::caller(), wait);
                }
                self.is_held();
                return done;
            }
            if schedule::me().is_none() {
                std::thread::yield_now();
                continue;
            }
            waits.get_or_insert_with(order::Wait::begin);
            self.waiting.fetch_add(1, Ordering::Relaxed);
            schedule::wait(On::Key(schedule::key(&self.key)), None);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[track_caller]
    fn is_held(&self) {
        order::has(self.lock(), self.made, Location::caller());
    }

    /// What tells the lock from others as long as it is held.
    fn lock(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The lock is free again.
    fn wake(&self) {
        order::lets_go(self.lock());
        if self.waiting.load(Ordering::Relaxed) > 0 && schedule::me().is_some() {
            schedule::world().wake_all(&On::Key(self.key.load(Ordering::Relaxed)));
        }
    }
}

/// Poison is no concern: a thread that panics ends the world.
fn taken<G>(attempt: Result<G, TryLockError<G>>) -> Option<G> {
    match attempt {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub struct Mutex<T: ?Sized> {
    queue: Queue,
    inner: sync::Mutex<T>,
}

pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    inner: Option<sync::MutexGuard<'a, T>>,
}

impl<T: Default> Default for Mutex<T> {
    #[track_caller]
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Mutex<T> {
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self { queue: Queue::new(), inner: sync::Mutex::new(value) }
    }

    pub fn into_inner(self) -> T {
        self.inner.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let inner = self.queue.until(|| taken(self.inner.try_lock()));
        MutexGuard { mutex: self, inner: Some(inner) }
    }

    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = taken(self.inner.try_lock())?;
        self.queue.is_held();
        Some(MutexGuard { mutex: self, inner: Some(inner) })
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: fmt::Debug + ?Sized> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<'a, T: ?Sized> MutexGuard<'a, T> {
    /// Does `work` without the lock, which is taken again behind it.
    #[track_caller]
    pub fn unlocked<R>(guard: &mut Self, work: impl FnOnce() -> R) -> R {
        drop(guard.inner.take());
        guard.mutex.queue.wake();
        let done = work();
        guard.inner = Some(guard.mutex.queue.until(|| taken(guard.mutex.inner.try_lock())));
        done
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held but while it waits")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held but while it waits")
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.inner.take());
        self.mutex.queue.wake();
    }
}

pub struct RwLock<T: ?Sized> {
    queue: Queue,
    inner: sync::RwLock<T>,
}

pub struct RwLockReadGuard<'a, T: ?Sized> {
    queue: &'a Queue,
    inner: Option<sync::RwLockReadGuard<'a, T>>,
}

pub struct RwLockWriteGuard<'a, T: ?Sized> {
    queue: &'a Queue,
    inner: Option<sync::RwLockWriteGuard<'a, T>>,
}

impl<T: Default> Default for RwLock<T> {
    #[track_caller]
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> RwLock<T> {
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self { queue: Queue::new(), inner: sync::RwLock::new(value) }
    }
}

impl<T: ?Sized> RwLock<T> {
    #[track_caller]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let inner = self.queue.until(|| taken(self.inner.try_read()));
        RwLockReadGuard { queue: &self.queue, inner: Some(inner) }
    }

    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let inner = self.queue.until(|| taken(self.inner.try_write()));
        RwLockWriteGuard { queue: &self.queue, inner: Some(inner) }
    }
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until it is dropped")
    }
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until it is dropped")
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held until it is dropped")
    }
}

impl<T: ?Sized> Drop for RwLockReadGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.inner.take());
        self.queue.wake();
    }
}

impl<T: ?Sized> Drop for RwLockWriteGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.inner.take());
        self.queue.wake();
    }
}

#[derive(Debug, Default)]
pub struct Condvar {
    key: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    pub const fn new() -> Self {
        Self { key: AtomicU64::new(0) }
    }

    pub fn notify_all(&self) {
        let key = schedule::key(&self.key);
        if schedule::me().is_some() {
            schedule::world().wake_all(&On::Key(key));
        }
    }

    pub fn notify_one(&self) {
        let key = schedule::key(&self.key);
        if schedule::me().is_some() {
            schedule::world().wake_one(&On::Key(key));
        }
    }

    #[track_caller]
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_till(guard, None);
    }

    #[track_caller]
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> WaitTimeoutResult {
        let until = schedule::now().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        WaitTimeoutResult(!self.wait_till(guard, Some(until)))
    }

    #[track_caller]
    pub fn wait_until<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        WaitTimeoutResult(!self.wait_till(guard, Some(until.nanos())))
    }

    #[track_caller]
    pub fn wait_while<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, mut wait: impl FnMut(&mut T) -> bool) {
        while wait(guard) {
            self.wait(guard);
        }
    }

    #[track_caller]
    pub fn wait_while_for<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut wait: impl FnMut(&mut T) -> bool,
        time: Duration,
    ) -> WaitTimeoutResult {
        let until = schedule::now().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        while wait(guard) {
            if !self.wait_till(guard, Some(until)) {
                return WaitTimeoutResult(wait(guard));
            }
        }
        WaitTimeoutResult(false)
    }

    /// Whether it was notified, and not too late.
    #[track_caller]
    fn wait_till<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, until: Option<u64>) -> bool {
        let mutex = guard.mutex;
        drop(guard.inner.take());
        mutex.queue.wake();
        let notified = schedule::wait(On::Key(schedule::key(&self.key)), until);
        guard.inner = Some(mutex.queue.until(|| taken(mutex.inner.try_lock())));
        notified
    }
}
