//! How far a transfer is, and everyone who waits for it.

use kvasir_os::time::Instant;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use rustix::event::EventfdFlags;

use super::entry::Entry;
use super::plan::Class;
use crate::transport::{Cancel, Endpoint, OpError};

/// Why an entry did not arrive whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The last rail's reason, after the others were tried.
    #[error("{error} (rail {rail}, attempt {attempts})")]
    Op { error: OpError, rail: String, attempts: u32 },
    #[error("peer {peer} is down: no rail to it works; they are tried again in the background")]
    PeerDown { peer: String },
    #[error("not done before its deadline")]
    TimedOut,
    #[error("cancelled")]
    Cancelled,
}

/// How one entry of a batch stands.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct EntryStatus {
    /// Neither done nor failed: parts of it may still move.
    pub pending: bool,
    /// The first reason why part of it failed.
    pub error: Option<TransferError>,
    /// Bytes of the entry known to be in place, as ranges of it, sorted and apart. Exact once it is not pending.
    pub valid: Vec<Range<u64>>,
}

/// How a whole transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    pub entries: usize,
    pub pending: usize,
    pub failed: usize,
    pub valid_bytes: u64,
}

impl Status {
    pub fn is_complete(&self) -> bool {
        self.pending == 0
    }
}

/// A submitted batch. Freed with its last clone; that does not cancel it.
#[derive(Clone)]
pub struct Transfer(pub(super) Arc<Inner>);

pub(super) struct Inner {
    /// Its number in the engine.
    pub(super) id: u64,
    pub(super) class: Class,
    pub(super) entries: Vec<Entry>,
    pub(super) deadline: Instant,
    pub(super) cancel: Cancel,
    /// Sent to the peer when all entries are done.
    pub(super) notice: Option<Vec<u8>>,
    progress: Mutex<Progress>,
    complete: Condvar,
    announced: AtomicBool,
}

type Callback = Box<dyn FnOnce(Status) + Send>;

#[derive(Default)]
struct Progress {
    entries: Vec<EntryProgress>,
    pending: usize,
    timed_out: bool,
    /// Endpoints that carry slices of it, and how many each.
    flying: Vec<(Arc<dyn Endpoint>, usize)>,
    callbacks: Vec<Callback>,
    wakers: Vec<Waker>,
    eventfds: Vec<Arc<OwnedFd>>,
}

struct EntryProgress {
    /// Bytes neither valid nor given up.
    left: u64,
    attempts: u32,
    error: Option<TransferError>,
    valid: Vec<Range<u64>>,
}

impl Inner {
    pub(super) fn new(
        id: u64,
        class: Class,
        entries: Vec<Entry>,
        deadline: Instant,
        notice: Option<Vec<u8>>,
    ) -> Self {
        let start =
            |entry: &Entry| EntryProgress { left: entry.len(), attempts: 1, error: None, valid: Vec::new() };
        let progress = Progress {
            pending: entries.len(),
            entries: entries.iter().map(start).collect(),
            ..Progress::default()
        };
        let (progress, complete) = (Mutex::new(progress), Condvar::new());
        let announced = AtomicBool::new(false);
        let cancel = Cancel::default();
        Self { id, class, entries, deadline, cancel, notice, progress, complete, announced }
    }

    /// Bytes of an entry are in place.
    pub(super) fn arrived(&self, entry: u32, range: Range<u64>) {
        self.resolve(entry, range.end - range.start, |entry| add(&mut entry.valid, range));
    }

    /// Bytes of an entry are given up.
    pub(super) fn gave_up(&self, entry: u32, bytes: u64, error: TransferError) {
        self.resolve(entry, bytes, |entry| {
            entry.error.get_or_insert(error);
        });
    }

    /// An entry that makes no sense: nothing of it moves.
    pub(super) fn refused(&self, entry: u32, error: OpError) {
        let mut progress = self.progress();
        let entry = &mut progress.entries[entry as usize];
        entry.left = 0;
        entry.error = Some(TransferError::Op { error, rail: "none".into(), attempts: 0 });
        progress.pending -= 1;
    }

    fn resolve(&self, entry: u32, bytes: u64, change: impl FnOnce(&mut EntryProgress)) {
        let mut progress = self.progress();
        let entry = &mut progress.entries[entry as usize];
        change(entry);
        entry.left -= bytes;
        if entry.left == 0 && bytes > 0 {
            progress.pending -= 1;
        }
    }

    /// Counts another try of a part of an entry and returns how many there were.
    pub(super) fn count_attempt(&self, entry: u32) -> u32 {
        let mut progress = self.progress();
        let entry = &mut progress.entries[entry as usize];
        entry.attempts += 1;
        entry.attempts
    }

    /// What a cancelled operation of this transfer means.
    pub(super) fn why_cancelled(&self) -> TransferError {
        if self.progress().timed_out { TransferError::TimedOut } else { TransferError::Cancelled }
    }

    /// True for the first caller only.
    pub(super) fn mark_timed_out(&self) -> bool {
        !std::mem::replace(&mut self.progress().timed_out, true)
    }

    /// A slice of it goes to an endpoint.
    pub(super) fn departed(&self, endpoint: &Arc<dyn Endpoint>) {
        let flying = &mut self.progress().flying;
        match flying.iter_mut().find(|(other, _)| same(other, endpoint)) {
            Some((_, slices)) => *slices += 1,
            None => flying.push((endpoint.clone(), 1)),
        }
    }

    /// A slice of it has ended there.
    pub(super) fn landed(&self, endpoint: &Arc<dyn Endpoint>) {
        let flying = &mut self.progress().flying;
        if let Some(at) = flying.iter().position(|(other, _)| same(other, endpoint)) {
            flying[at].1 -= 1;
            if flying[at].1 == 0 {
                flying.swap_remove(at);
            }
        }
    }

    /// The endpoints that slices of it are on.
    pub(super) fn flying(&self) -> Vec<Arc<dyn Endpoint>> {
        self.progress().flying.iter().map(|(endpoint, _)| endpoint.clone()).collect()
    }

    /// Whether all is valid; `None` while something is pending.
    pub(super) fn outcome(&self) -> Option<bool> {
        let progress = self.progress();
        (progress.pending == 0).then(|| progress.entries.iter().all(|entry| entry.error.is_none()))
    }

    /// True for the first caller only, which must then announce.
    pub(super) fn claim_announcement(&self) -> bool {
        !self.announced.swap(true, Ordering::AcqRel)
    }

    /// Tells everyone who waits. Called once, when nothing is pending any more.
    pub(super) fn announce(&self) {
        let (status, callbacks, wakers, eventfds) = {
            let mut progress = self.progress();
            (
                status_of(&progress),
                std::mem::take(&mut progress.callbacks),
                std::mem::take(&mut progress.wakers),
                std::mem::take(&mut progress.eventfds),
            )
        };
        // The lock is free by now: a thread woken under it would only wait for it.
        self.complete.notify_all();
        eventfds.iter().for_each(|fd| signal(fd));
        wakers.into_iter().for_each(Waker::wake);
        callbacks.into_iter().for_each(|callback| callback(status));
    }

    pub(super) fn status(&self) -> Status {
        status_of(&self.progress())
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }
}

impl Transfer {
    /// How it stands now.
    pub fn poll(&self) -> Status {
        self.0.status()
    }

    /// How one entry stands now, or `None` if there is no such entry.
    pub fn poll_entry(&self, index: usize) -> Option<EntryStatus> {
        let progress = self.0.progress();
        let entry = progress.entries.get(index)?;
        let EntryProgress { left, error, valid, .. } = entry;
        Some(EntryStatus { pending: *left > 0, error: error.clone(), valid: valid.clone() })
    }

    /// Waits until it is complete or `until` has passed.
    pub fn wait(&self, until: Instant) -> Status {
        let mut progress = self.0.progress();
        while progress.pending > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                break;
            };
            self.0.complete.wait_for(&mut progress, left);
        }
        status_of(&progress)
    }

    /// Calls `callback` once it is complete: at once if it is already, otherwise from a transport's thread, so it must
    /// return soon.
    pub fn on_complete(&self, callback: impl FnOnce(Status) + Send + 'static) {
        let mut progress = self.0.progress();
        if progress.pending > 0 {
            progress.callbacks.push(Box::new(callback));
            return;
        }
        let status = status_of(&progress);
        drop(progress);
        callback(status);
    }

    /// A descriptor that becomes readable when it is complete, for event loops.
    pub fn eventfd(&self) -> io::Result<Arc<OwnedFd>> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let fd = Arc::new(fd);
        let mut progress = self.0.progress();
        if progress.pending > 0 {
            progress.eventfds.push(fd.clone())
        } else {
            signal(&fd)
        }
        Ok(fd)
    }

    /// Resolves when it is complete.
    pub fn completed(&self) -> impl Future<Output = Status> + Send + use<> {
        Completed(self.clone())
    }
}

struct Completed(Transfer);

impl Future for Completed {
    type Output = Status;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Status> {
        let mut progress = self.0.0.progress();
        if progress.pending == 0 {
            return Poll::Ready(status_of(&progress));
        }
        if !progress.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            progress.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}

fn status_of(progress: &Progress) -> Status {
    let bytes = |entry: &EntryProgress| entry.valid.iter().map(|range| range.end - range.start).sum::<u64>();
    Status {
        entries: progress.entries.len(),
        pending: progress.pending,
        failed: progress.entries.iter().filter(|entry| entry.left == 0 && entry.error.is_some()).count(),
        valid_bytes: progress.entries.iter().map(bytes).sum(),
    }
}

/// Whether both are one endpoint.
pub(super) fn same(one: &Arc<dyn Endpoint>, other: &Arc<dyn Endpoint>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

fn signal(fd: &OwnedFd) {
    // It fails only if it is readable already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Adds a range to sorted ranges that lie apart, and keeps them so. They never overlap: each byte arrives once.
fn add(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    if range.is_empty() {
        return;
    }
    let at = ranges.partition_point(|other| other.start < range.start);
    let joins_left = at > 0 && ranges[at - 1].end == range.start;
    let joins_right = ranges.get(at).is_some_and(|next| next.start == range.end);
    match (joins_left, joins_right) {
        (true, true) => {
            ranges[at - 1].end = ranges[at].end;
            ranges.remove(at);
        }
        (true, false) => ranges[at - 1].end = range.end,
        (false, true) => ranges[at].start = range.start,
        (false, false) => ranges.insert(at, range),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_add_up(order in Just((0..40u64).collect::<Vec<_>>()).prop_shuffle(), upto in 0usize..40) {
            let mut ranges = Vec::new();
            let mut model = [false; 40];
            for &n in &order[..upto] {
                add(&mut ranges, n * 10..n * 10 + 10);
                model[n as usize] = true;
            }
            let mut expected: Vec<Range<u64>> = Vec::new();
            for n in (0..40u64).filter(|&n| model[n as usize]) {
                match expected.last_mut() {
                    Some(last) if last.end == n * 10 => last.end += 10,
                    _ => expected.push(n * 10..n * 10 + 10),
                }
            }
            prop_assert_eq!(ranges, expected);
        }
    }
}
