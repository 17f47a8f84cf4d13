//! The thread that does everything: takes commands, starts ops, completes them, keeps the index and the books.
//!
//! One thread means that what happens to a key has an order, and that no lock is held over I/O. The write side is in
//! [`append`](super::append), the read side in [`fetch`](super::fetch).
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashMap;

use super::append::{Append, Group, Head, Moving, Waiter};
use super::checkpoint::Summary;
use super::fetch::Run;
use super::format::{Kind, Place, Tombstone};
use super::index::Found;
use super::io::{Done, Io, Op, OpKind};
use super::segments::State;
use super::shared::{Shared, count, uncount};
use super::{NAME, format};
use kvasir_protocol::block::BlockKey;
use kvasir_store::store::{Completion, Get, GetDone, Put, PutDone, TierError};

/// How often an op that moves only part of its bytes, or is interrupted, is continued.
const TRIES_MAX: u32 = 64;

pub(super) enum Command {
    /// Each put comes with the store's objection to it, if there is one.
    Put(Vec<(Result<(), TierError>, Put)>, Completion<Vec<PutDone>>),
    Get(Vec<Get>, Completion<Vec<GetDone>>),
    Remove(Vec<BlockKey>, Completion<Vec<Result<bool, TierError>>>),
    Flush(Completion<Result<(), TierError>>),
    /// From the janitor: write these again elsewhere. True for each that is no longer needed where it was.
    Move(Vec<Moving>, Completion<Vec<bool>>),
    /// From the janitor: forget these blocks, if they are still there.
    Forget(Vec<(BlockKey, Place)>, Why, Completion<()>),
    /// From the janitor: a segment became free; or, with the next epoch as it was then, none can be made free.
    Space {
        stuck: Option<u64>,
    },
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Evicted,
    Corrupt,
}

pub(super) struct Engine {
    /// This comes first, because dropping it waits for the ops under way, and they use the memory that the rest owns.
    pub(super) io: Io,
    ops: HashMap<u64, Running>,
    next_token: u64,
    pub(super) shared: Arc<Shared>,

    pub(super) heads: [Option<Head>; 2],
    pub(super) puts: VecDeque<Append>,
    pub(super) moves: VecDeque<Append>,
    pub(super) tombstones: VecDeque<Append>,
    /// Keys with a record on its way to the disk, and the waiters for its end.
    pub(super) writing: HashMap<BlockKey, Vec<Waiter>>,
    /// Copies that may be on the disk although nobody can get them, because their write or their removal failed, each as
    /// what would remove it, without a sequence: a removal must not be answered as if there were nothing.
    pub(super) doubtful: BTreeSet<Tombstone>,
    pub(super) groups: BTreeMap<u64, Group>,
    pub(super) next_group: u64,
    pub(super) next_sequence: u64,
    /// Records of segments whose summary the janitor does not have yet.
    pub(super) summaries: HashMap<u32, Summary>,

    pub(super) runs: VecDeque<Run>,
    /// Flushes asked for, each with the first group that it need not wait for.
    flushes: VecDeque<(u64, Completion<Result<(), TierError>>)>,
    round: Option<Round>,
    closing: bool,
}

struct Running {
    op: Op,
    left_bytes: usize,
    tries: u32,
    work: Work,
}

pub(super) enum Work {
    Read(Run),
    Write(u64),
    /// A sync of one group: of its file, or of the folder.
    GroupSync(u64),
    /// One sync of a flush.
    FlushSync,
}

/// A flush under way.
struct Round {
    left: usize,
    failed: Option<String>,
    waiting: Vec<Completion<Result<(), TierError>>>,
}

/// The place of one item's result in its batch.
pub(super) struct Ticket<T> {
    batch: Rc<Batch<T>>,
    at: usize,
}

struct Batch<T> {
    results: RefCell<Vec<Option<T>>>,
    left: Cell<usize>,
    completion: RefCell<Option<Completion<Vec<T>>>>,
    shared: Option<Arc<Shared>>,
}

impl<T> Ticket<T> {
    /// One ticket for each item. `shared` if the items count as under way.
    pub(super) fn batch(
        len: usize,
        completion: Completion<Vec<T>>,
        shared: Option<Arc<Shared>>,
    ) -> Vec<Self> {
        let results = RefCell::new((0..len).map(|_| None).collect());
        let batch =
            Batch { results, left: Cell::new(len), completion: RefCell::new(Some(completion)), shared };
        let batch = Rc::new(batch);
        if len == 0 {
            batch.complete();
        }
        (0..len).map(|at| Self { batch: batch.clone(), at }).collect()
    }

    pub(super) fn cancelled(&self) -> bool {
        self.batch.completion.borrow().as_ref().is_some_and(|completion| completion.cancelled.is_set())
    }

    pub(super) fn done(self, result: T) {
        self.batch.results.borrow_mut()[self.at] = Some(result);
        self.batch.left.set(self.batch.left.get() - 1);
        if self.batch.left.get() == 0 {
            self.batch.complete();
        }
    }
}

impl<T> Batch<T> {
    fn complete(&self) {
        let results: Vec<T> = self.results.take().into_iter().flatten().collect();
        if let Some(shared) = &self.shared {
            shared.under_way.fetch_sub(results.len(), Ordering::Relaxed);
        }
        if let Some(completion) = self.completion.take() {
            completion.done(results);
        }
    }
}

/// Takes `items` more under way, unless that exceeds `limit`.
pub(super) fn admit(under_way: &AtomicUsize, items: usize, limit: usize) -> bool {
    let take = |now: usize| (now + items <= limit || now == 0).then_some(now + items);
    under_way.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
}

impl Engine {
    pub(super) fn new(io: Io, shared: Arc<Shared>, heads: [Option<Head>; 2], next_sequence: u64) -> Self {
        Self {
            io,
            ops: HashMap::new(),
            next_token: 0,
            shared,
            heads,
            puts: VecDeque::new(),
            moves: VecDeque::new(),
            tombstones: VecDeque::new(),
            writing: HashMap::new(),
            doubtful: BTreeSet::new(),
            groups: BTreeMap::new(),
            next_group: 0,
            next_sequence,
            summaries: HashMap::new(),
            runs: VecDeque::new(),
            flushes: VecDeque::new(),
            round: None,
            closing: false,
        }
    }

    /// Works until it is told to close and nothing is left. Returns the summaries that nobody has saved.
    pub(super) fn run(mut self) -> Vec<Summary> {
        let (mut commands, mut done, mut finished) = (VecDeque::new(), Vec::new(), Vec::new());
        loop {
            self.shared.inbox.take(&mut commands);
            for command in commands.drain(..) {
                self.begin(command);
            }
            self.pump();
            if self.closing && self.ops.is_empty() && self.round.is_none() {
                return self.unsaved();
            }
            let block = done.is_empty() && self.shared.inbox.may_sleep();
            self.wait(block, &mut done);
            finished.extend(done.drain(..).filter_map(|one| self.completed(one)));
            if !finished.is_empty() && self.start_runs() {
                // The device goes on while what it has read is checked.
                self.wait(false, &mut done);
            }
            for (work, end) in finished.drain(..) {
                self.finish(work, end);
            }
        }
    }

    fn wait(&mut self, block: bool, done: &mut Vec<Done>) {
        self.io.wait(block, done).expect("the kernel takes a well-formed wait on a ring that is open");
    }

    /// The summaries of the segments that are still open.
    fn unsaved(&mut self) -> Vec<Summary> {
        let mut segments = self.shared.segments();
        let end = |summary: Summary| Summary { end: segments.at(summary.segment).end, ..summary };
        self.summaries.drain().map(|(_, summary)| summary).map(end).collect()
    }

    fn begin(&mut self, command: Command) {
        match command {
            Command::Put(items, completion) => {
                let tickets = Ticket::batch(items.len(), completion, Some(self.shared.clone()));
                for ((checked, put), ticket) in items.into_iter().zip(tickets) {
                    match checked {
                        Ok(()) => self.start_put(put, ticket),
                        Err(error) => ticket.done(PutDone { buffer: put.buffer, outcome: Err(error) }),
                    }
                }
            }
            Command::Get(items, completion) => {
                let tickets = Ticket::batch(items.len(), completion, Some(self.shared.clone()));
                self.start_gets(items.into_iter().zip(tickets));
            }
            Command::Remove(keys, completion) => {
                let tickets = Ticket::batch(keys.len(), completion, Some(self.shared.clone()));
                for (key, ticket) in keys.into_iter().zip(tickets) {
                    self.start_remove(key, ticket);
                }
            }
            Command::Flush(completion) => self.flushes.push_back((self.next_group, completion)),
            Command::Move(items, completion) => {
                let tickets = Ticket::batch(items.len(), completion, None);
                for (moving, ticket) in items.into_iter().zip(tickets) {
                    self.start_move(moving, ticket);
                }
            }
            Command::Forget(blocks, why, completion) => {
                for (key, place) in blocks {
                    self.forget(key, place, why);
                }
                completion.done(());
            }
            Command::Space { stuck } => {
                let segments = self.shared.segments();
                // Otherwise it has found space since, and will ask again when it needs more.
                let still = stuck == Some(segments.next_epoch) && segments.free_for(Kind::Hot).is_none();
                drop(segments);
                if still {
                    self.refuse_waiting_puts(|put| TierError::Full {
                        tier: NAME,
                        key: put.meta.key,
                        size: put.meta.size.into(),
                    });
                    self.refuse_waiting_tombstones();
                }
            }
            Command::Close => {
                self.closing = true;
                self.refuse_waiting_puts(|_| TierError::Closed { tier: NAME });
            }
        }
    }

    /// Starts whatever can be started now.
    fn pump(&mut self) {
        self.start_runs();
        self.append();
        self.start_flush();
    }

    /// Returns whether there were any to start.
    fn start_runs(&mut self) -> bool {
        let waiting = self.runs.len();
        while self.may_start()
            && let Some(run) = self.runs.pop_front()
        {
            self.submit_run(run);
        }
        self.runs.len() < waiting
    }

    /// Whether the queue depth allows one more op.
    pub(super) fn may_start(&self) -> bool {
        self.ops.len() < self.shared.config.queue_depth as usize
    }

    pub(super) fn submit(&mut self, op: Op, work: Work) {
        let left_bytes = op.pieces.iter().map(|piece| piece.len).sum();
        self.submit_again(Running { op, left_bytes, tries: 0, work });
    }

    fn submit_again(&mut self, running: Running) {
        self.next_token += 1;
        let token = self.next_token;
        let running = self.ops.entry(token).insert(running);
        // SAFETY: the op is kept in `ops` until its completion, and its work owns the memory: a run its buffers, a
        // group (in `groups`) its buffers and pages. `io` is dropped before either.
        let started = unsafe { self.io.submit(token, &running.get().op) };
        if let Err(error) = started
            && let Some((work, end)) = self.completed((token, Err(error)))
        {
            self.finish(work, end);
        }
    }

    /// Returns what is finished, if it need not be tried again.
    fn completed(&mut self, (token, result): Done) -> Option<(Work, End)> {
        let mut running = self.ops.remove(&token)?;
        match result {
            Ok(moved) if moved < running.left_bytes && moved > 0 && running.tries < TRIES_MAX => {
                running.tries += 1;
                running.left_bytes -= moved;
                advance(&mut running.op, moved);
                self.submit_again(running);
                None
            }
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::Interrupted | std::io::ErrorKind::WouldBlock
                ) && running.tries < TRIES_MAX =>
            {
                running.tries += 1;
                self.submit_again(running);
                None
            }
            Ok(moved) => {
                Some((running.work, if moved == running.left_bytes { End::Done } else { End::Short }))
            }
            Err(error) => {
                count(&self.shared.counters.io_errors, 1);
                Some((running.work, End::Failed(error.to_string())))
            }
        }
    }

    fn finish(&mut self, work: Work, end: End) {
        match work {
            Work::Read(run) => self.finish_run(run, end),
            Work::Write(group) => self.finish_write(group, end),
            Work::GroupSync(group) => self.finish_group_sync(group, end.reason()),
            Work::FlushSync => self.finish_flush_sync(end.reason()),
        }
    }

    /// Starts the flushes whose groups are all written, as one round, unless one is under way.
    fn start_flush(&mut self) {
        let oldest = self.groups.first_key_value().map_or(u64::MAX, |(&group, _)| group);
        let ready = self.flushes.iter().take_while(|(before, _)| *before <= oldest).count();
        if self.round.is_some() || ready == 0 {
            return;
        }
        let waiting = self.flushes.drain(..ready).map(|(_, completion)| completion).collect();
        let targets = self.unsynced();
        // What was written before a sync that failed may be lost, whatever a later one says.
        self.round = Some(Round { left: targets.len() + 1, failed: self.shared.broken(), waiting });
        for op in targets {
            self.submit(op, Work::FlushSync);
        }
        self.end_of_sync();
    }

    /// The syncs that make everything written so far durable. The folder is synced with the first group of each file.
    fn unsynced(&self) -> Vec<Op> {
        let mut targets = Vec::new();
        for (number, segment) in (0u32..).zip(&mut self.shared.segments().list) {
            if let (true, Some(file)) = (segment.unsynced, &segment.file) {
                segment.unsynced = false;
                targets.push(sync(file.clone(), Some(number)));
            }
        }
        targets
    }

    fn finish_flush_sync(&mut self, failed: Option<String>) {
        if let Some(reason) = &failed {
            self.shared.breaks(reason);
        }
        if let Some(round) = &mut self.round {
            round.failed = failed.or(round.failed.take());
        }
        self.end_of_sync();
    }

    fn end_of_sync(&mut self) {
        let Some(round) = &mut self.round else { return };
        round.left -= 1;
        if round.left == 0
            && let Some(round) = self.round.take()
        {
            let result = match round.failed.or_else(|| self.shared.broken()) {
                None => Ok(()),
                Some(reason) => Err(self.error("sync", BlockKey::default(), &reason)),
            };
            for completion in round.waiting {
                completion.done(result.clone());
            }
        }
    }

    /// Why an operation failed. Trying again makes no sense once the disk is broken.
    pub(super) fn error(&self, step: &'static str, key: BlockKey, reason: &str) -> TierError {
        let broken = self.shared.broken();
        let (retryable, reason) = (broken.is_none(), broken.unwrap_or_else(|| reason.to_owned()));
        TierError::Io { tier: NAME, step, key, reason, retryable }
    }

    /// Forgets a block that is still at `place`.
    pub(super) fn forget(&mut self, key: BlockKey, place: Place, why: Why) {
        if let Some(found) = self.shared.index.remove(key, Some(place)) {
            self.dead(&found);
            let counters = &self.shared.counters;
            count(if why == Why::Evicted { &counters.evicted } else { &counters.corrupt }, 1);
            if why == Why::Corrupt {
                self.shared.note_damaged(key);
                // It may be read after a restart; or what a sync lost of a block that was moved, where it was moved from.
                let tombstone = self.tombstone(key, place, 0);
                self.doubt(tombstone);
            }
        }
    }

    /// Books a block that has just left the index.
    pub(super) fn dead(&mut self, found: &Found) {
        if let Some(departures) = self.shared.departures.get() {
            departures.note(found.meta.key);
        }
        let pages = format::pages(found.meta.size);
        let counters = &self.shared.counters;
        uncount(&counters.blocks, 1);
        uncount(&counters.block_bytes, found.meta.size.into());
        uncount(&counters.claimed_pages, pages.into());
        let mut segments = self.shared.segments();
        let segment = segments.at(found.place.segment);
        segment.dies(pages);
        let empty = segment.live_blocks == 0 && segment.state == State::Sealed;
        drop(segments);
        if empty {
            self.shared.chore(|chores| chores.look = true);
        }
    }

    /// The tombstone of what is (or was) at `place`, if that life of the segment goes on.
    pub(super) fn tombstone(&self, key: BlockKey, target: Place, sequence: u64) -> Tombstone {
        let target_epoch = self.shared.segments().at(target.segment).epoch;
        Tombstone { key, sequence, target, target_epoch }
    }
}

/// How an op ended.
pub(super) enum End {
    Done,
    /// The file is shorter than it should be, or the device stopped short again and again.
    Short,
    Failed(String),
}

impl End {
    pub(super) fn reason(self) -> Option<String> {
        match self {
            Self::Done => None,
            Self::Short => Some("fewer bytes than asked for".into()),
            Self::Failed(reason) => Some(reason),
        }
    }
}

pub(super) fn io_error(step: &'static str, key: BlockKey, reason: String) -> TierError {
    TierError::Io { tier: NAME, step, key, reason, retryable: true }
}

/// `fdatasync` of a file; `slot` for that of a segment.
pub(super) fn sync(file: Arc<File>, slot: Option<u32>) -> Op {
    Op { kind: OpKind::Sync, file, slot, offset: 0, pieces: Vec::new() }
}

/// `fsync` of the folder of all segments.
pub(super) fn sync_folder(folder: Arc<File>) -> Op {
    Op { kind: OpKind::SyncFolder, ..sync(folder, None) }
}

/// Skips the first `moved` bytes of an op.
fn advance(op: &mut Op, moved: usize) {
    op.offset += moved as u64;
    let mut left = moved;
    op.pieces.retain_mut(|piece| {
        let skip = left.min(piece.len);
        left -= skip;
        // SAFETY: `skip` is at most the length of the piece.
        piece.base = unsafe { piece.base.add(skip) };
        piece.len -= skip;
        piece.len > 0
    });
}
