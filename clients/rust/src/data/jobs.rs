//! Loads and saves of an engine, on threads of their own.
//!
//! An engine gives a job from a thread that must not wait, and hears of its end by a descriptor that becomes readable. Each
//! thread has a connection of its own, made anew when it broke. Loads and saves have different threads, so that a save of
//! gigabytes keeps no request waiting. All loads have the same time, counted from when they are given, and are taken in that
//! order: one that waits behind another ends with it at the latest.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};
use kvasir_protocol::wire::Op;

use super::memory::{Hands, JobMemory, Pools};
use super::scatter::check_labels;
use super::{Client, ClientError, Endpoint, Label, Options, Put, Reconnecting};
use crate::sync::{Condvar, Mutex};

/// Bytes that a thread copies between two looks at the clock: some milliseconds.
pub(super) const BATCH_BYTES: u64 = 32 << 20;
/// As good as no limit, and still a point in time.
pub(super) const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// How jobs are run.
#[derive(Clone, Debug)]
pub struct JobOptions {
    /// Threads for loads, each with a connection. Default 2; at least 1.
    pub load_threads: usize,
    /// Threads for saves, each with a connection. Default 1; at least 1.
    pub save_threads: usize,
    /// How long a load may take, from when it is given. Default 2 s.
    pub load_time: Duration,
    /// How long a save may take, likewise. Default 30 s.
    pub save_time: Duration,
    /// The most jobs that are given and not drained; further ones are refused. Default 65,536.
    pub jobs_max: usize,
    /// Workload class of the loads, 0 = unknown. Default 0.
    pub class: u16,
}

impl Default for JobOptions {
    fn default() -> Self {
        Self {
            load_threads: 2,
            save_threads: 1,
            load_time: Duration::from_secs(2),
            save_time: Duration::from_secs(30),
            jobs_max: 1 << 16,
            class: 0,
        }
    }
}

/// What became of a job.
#[derive(Debug)]
pub struct Done {
    /// As the engine called it.
    pub job: u64,
    /// It is true of all blocks.
    pub ok: bool,
    /// Of each block: a load has brought all of it, and it is what was stored; a save knows it to be stored, or being stored
    /// by another writer.
    pub blocks: Vec<bool>,
    /// Bytes that were copied, of those blocks.
    pub bytes: u64,
    /// The first failure, if it was not just that a block is not there.
    pub error: Option<ClientError>,
}

/// Why a job was not taken. It will not be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    #[error("{max} jobs are given and not drained, the most there may be; drain some and give it again")]
    Full { max: usize },
    #[error("block {block} is not in the plan, which has {blocks}")]
    NoBlock { block: usize, blocks: usize },
    #[error("{labels} labels for {blocks} blocks; give one for each, or none")]
    Labels { labels: usize, blocks: usize },
    #[error("the jobs were closed; start others")]
    Closed,
    #[error("{layers} layers: the plan's {runs} runs are not as many groups of equally many runs and bytes")]
    Layers { layers: u32, runs: usize },
    #[error(
        "{blocks} numbers of blocks for {keys} keys without the first {first}; give one for each, and one key at least"
    )]
    Numbers { blocks: usize, keys: usize, first: usize },
    #[error("a transfer's name is 1 to 256 bytes long, not {len}")]
    Transfer { len: usize },
    #[error(
        "a part from block {from} to block {to} is too long; blocks of a prompt are counted with 32 bits"
    )]
    Part { from: u64, to: u64 },
    #[error("a job {job} is being handed over already and not reported yet; give this one another number")]
    Twice { job: u64 },
    #[error("the system gives no thread for it")]
    NoThread,
}

/// Threads that load and save.
///
/// Every job that was taken is reported once, whatever becomes of the host, and not before this process has stopped touching
/// its blocks. A plan lives at least until its jobs are reported.
pub struct Jobs {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What all threads of some jobs share, and those of a [`Handing`](super::Handing) beside them.
pub(super) struct Shared {
    options: JobOptions,
    loads: Queue,
    saves: Queue,
    /// Jobs that are given and not drained.
    open: AtomicUsize,
    done: Mutex<Vec<Done>>,
    event: OwnedFd,
    /// One of each thread.
    links: Mutex<Vec<Arc<Reconnecting>>>,
    pools: Arc<Pools>,
}

struct Queue {
    /// `None` once they are closed.
    waiting: Mutex<Option<VecDeque<Job>>>,
    changed: Condvar,
}

struct Job {
    id: u64,
    memory: JobMemory,
    work: Work,
    /// One for each block, or none.
    labels: Vec<Label>,
    until: Instant,
}

enum Work {
    Load { blocks: Vec<(BlockKey, usize)>, class: u16 },
    Save(Vec<(BlockMeta, usize)>),
}

impl Jobs {
    /// Starts the threads. Each connects when its first job comes, so the host need not run yet.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn start(endpoint: &Endpoint, options: &Options, jobs: JobOptions) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let counts = [jobs.load_threads.max(1), jobs.save_threads.max(1)];
        let shared = Arc::new(Shared {
            options: jobs,
            loads: Queue::open(),
            saves: Queue::open(),
            open: AtomicUsize::new(0),
            done: Mutex::default(),
            event,
            links: Mutex::default(),
            pools: Arc::new(Pools::new(&options.counts)),
        });
        // From here on dropping it ends the threads that have started.
        let this = Self { shared, threads: Mutex::default() };
        for (name, saves, count) in [("kvasir-load", false, counts[0]), ("kvasir-save", true, counts[1])] {
            for _ in 0..count {
                let shared = Arc::clone(&this.shared);
                let link = Arc::new(Reconnecting::new(endpoint.clone(), options.clone()));
                shared.links.lock().push(Arc::clone(&link));
                let run = move || shared.work(if saves { &shared.saves } else { &shared.loads }, &link);
                this.threads.lock().push(thread::Builder::new().name(name.into()).spawn(run)?);
            }
        }
        Ok(this)
    }

    /// Gives a load of blocks into those that have these numbers in `memory`, such as an `Arc` of a [`Plan`](super::Plan).
    ///
    /// # Errors
    /// It is not taken, and will not be reported.
    pub fn load(
        &self,
        job: u64,
        memory: impl Into<JobMemory>,
        blocks: Vec<(BlockKey, usize)>,
    ) -> Result<(), JobError> {
        self.load_labelled(job, memory, blocks, Vec::new())
    }

    /// [`load`](Self::load) of blocks that were stored with these labels, one each: see [`Client::load_labelled`].
    ///
    /// # Errors
    /// It is not taken, and will not be reported.
    pub fn load_labelled(
        &self,
        job: u64,
        memory: impl Into<JobMemory>,
        blocks: Vec<(BlockKey, usize)>,
        labels: Vec<Label>,
    ) -> Result<(), JobError> {
        let memory = memory.into();
        check(&memory, &labels, blocks.iter().map(|(_, block)| *block))?;
        let JobOptions { class, load_time, .. } = self.shared.options;
        self.give(&self.shared.loads, (job, labels), memory, Work::Load { blocks, class }, load_time)
    }

    /// Gives a save of those blocks of `memory` that have these numbers.
    ///
    /// # Errors
    /// It is not taken, and will not be reported.
    pub fn save(
        &self,
        job: u64,
        memory: impl Into<JobMemory>,
        blocks: Vec<(BlockMeta, usize)>,
    ) -> Result<(), JobError> {
        self.save_labelled(job, memory, blocks, Vec::new())
    }

    /// [`save`](Self::save) with a label behind each block: see [`Client::save_labelled`].
    ///
    /// # Errors
    /// It is not taken, and will not be reported.
    pub fn save_labelled(
        &self,
        job: u64,
        memory: impl Into<JobMemory>,
        blocks: Vec<(BlockMeta, usize)>,
        labels: Vec<Label>,
    ) -> Result<(), JobError> {
        let memory = memory.into();
        check(&memory, &labels, blocks.iter().map(|(_, block)| *block))?;
        let time = self.shared.options.save_time;
        self.give(&self.shared.saves, (job, labels), memory, Work::Save(blocks), time)
    }

    /// The jobs that have ended since the last call, in that order. Never waits.
    pub fn drain(&self) -> Vec<Done> {
        // First, so that what ends from here on makes it readable again. It is not if there is nothing.
        let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
        let done = std::mem::take(&mut *self.shared.done.lock());
        self.shared.open.fetch_sub(done.len(), Ordering::Relaxed);
        done
    }

    /// A descriptor that is readable while there is something to [`drain`](Self::drain). Only wait for it.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Takes no more jobs, hangs up, waits until what is being copied has ended, and reports all jobs that are left as failed.
    /// They can still be drained. A thread that is just connecting to a host that says nothing is waited for until the job's
    /// time is over, or [`Options::timeout`].
    pub fn close(&self) {
        let queues = [&self.shared.loads, &self.shared.saves];
        let left = queues.map(Queue::close);
        self.shared.links.lock().iter().for_each(|link| link.close());
        for thread in self.threads.lock().drain(..) {
            // It reports what it was doing in any case.
            let _ = thread.join();
        }
        left.into_iter().flatten().for_each(|job| self.shared.report(job.failed(None)));
        self.shared.pools.close();
    }

    fn give(
        &self,
        queue: &Queue,
        (id, labels): (u64, Vec<Label>),
        memory: JobMemory,
        work: Work,
        time: Duration,
    ) -> Result<(), JobError> {
        self.shared.take()?;
        let until = Instant::now() + time.min(TIME_MAX);
        let taken = queue.push(Job { id, memory, work, labels, until });
        taken.inspect_err(|_| self.shared.untake())
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.close();
    }
}

fn check(
    memory: &JobMemory,
    labels: &[Label],
    mut numbers: impl ExactSizeIterator<Item = usize>,
) -> Result<(), JobError> {
    let blocks = numbers.len();
    check_labels(labels, blocks).map_err(|_| JobError::Labels { labels: labels.len(), blocks })?;
    let blocks = memory.blocks();
    numbers.find(|&block| block >= blocks).map_or(Ok(()), |block| Err(JobError::NoBlock { block, blocks }))
}

impl Queue {
    fn open() -> Self {
        Self { waiting: Mutex::new(Some(VecDeque::new())), changed: Condvar::new() }
    }

    fn push(&self, job: Job) -> Result<(), JobError> {
        self.waiting.lock().as_mut().ok_or(JobError::Closed)?.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for a job; `None` when they are closed.
    fn next(&self) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(job) = waiting.as_mut()?.pop_front() {
                return Some(job);
            }
            waiting = self.changed.wait(waiting);
        }
    }

    fn is_closed(&self) -> bool {
        self.waiting.lock().is_none()
    }

    fn close(&self) -> VecDeque<Job> {
        let left = self.waiting.lock().take();
        self.changed.notify_all();
        left.unwrap_or_default()
    }
}

impl Shared {
    fn work(&self, queue: &Queue, link: &Reconnecting) {
        let mut hands = Hands::of(&self.pools);
        while let Some(job) = queue.next() {
            // A fault of ours must not leave the engine waiting.
            let done = catch_unwind(AssertUnwindSafe(|| job.run(link, queue, &mut hands)));
            self.report(done.unwrap_or_else(|_| job.failed(None)));
        }
    }

    /// Counts a job in, if it may be: it is reported later, or taken back now.
    pub(super) fn take(&self) -> Result<(), JobError> {
        let max = self.options.jobs_max;
        let more = |open: usize| (open < max).then_some(open + 1);
        let taken = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(drop).map_err(|_| JobError::Full { max })
    }

    /// One that was counted in was refused.
    pub(super) fn untake(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn report(&self, done: Done) {
        self.done.lock().push(done);
        // It fails where so much is unread that it is readable anyway.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl Job {
    fn len(&self) -> usize {
        match &self.work {
            Work::Load { blocks, .. } => blocks.len(),
            Work::Save(blocks) => blocks.len(),
        }
    }

    fn failed(&self, error: Option<ClientError>) -> Done {
        Done { job: self.id, ok: false, blocks: vec![false; self.len()], bytes: 0, error }
    }

    /// Works until all is done, its time is over, the host cannot be asked, or the jobs are closed.
    fn run(&self, link: &Reconnecting, queue: &Queue, hands: &mut Hands) -> Done {
        let mut done = self.failed(None);
        // Before anything is lent or reserved for it, which has its own time.
        if let Err(error) = self.memory.wait_until_ready(self.until, || queue.is_closed()) {
            return self.failed(Some(error));
        }
        let mut at = 0;
        while at < self.len() && !queue.is_closed() {
            match self.step(link, hands, at, &mut done) {
                Ok(next) => at = next,
                Err(error) => {
                    done.error = Some(error);
                    break;
                }
            }
        }
        done.ok = done.blocks.iter().all(|&here| here) && done.error.is_none();
        done
    }

    /// Loads or saves some blocks from `at` on. Returns where the next ones begin.
    fn step(
        &self,
        link: &Reconnecting,
        hands: &mut Hands,
        at: usize,
        done: &mut Done,
    ) -> Result<usize, ClientError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let op = if matches!(self.work, Work::Load { .. }) { Op::Get } else { Op::Reserve };
            return Err(ClientError::DeadlinePassed { endpoint: link.endpoint().clone(), op });
        }
        let client = link.client_within(left)?;
        client.set_deadline(Some(self.until));
        let next = self.batch(&client, at);
        let size = |at| u64::from(self.bytes(at));
        // Empty where there are none.
        let labels = self.labels.get(at..next).unwrap_or_default();
        // Of each block: whether it is there, and how many bytes were copied.
        let results: Vec<Result<(bool, u64), ClientError>> = match &self.work {
            Work::Load { blocks, class } => {
                let loaded = self.memory.load(hands, &client, &blocks[at..next], labels, *class)?;
                let bytes = |at, here| if here { size(at) } else { 0 };
                let each = (at..next).zip(loaded);
                each.map(|(at, result)| result.map(|here| (here, bytes(at, here)))).collect()
            }
            Work::Save(blocks) => {
                let saved = self.memory.save(hands, &client, &blocks[at..next], labels)?;
                let bytes = |at, put| if put == Put::Stored { size(at) } else { 0 };
                let each = (at..next).zip(saved);
                each.map(|(at, result)| result.map(|put| (true, bytes(at, put)))).collect()
            }
        };
        for (here, result) in done.blocks[at..next].iter_mut().zip(results) {
            match result {
                Ok((is_here, bytes)) => {
                    *here = is_here;
                    done.bytes += bytes;
                }
                Err(error) => {
                    done.error.get_or_insert(error);
                }
            }
        }
        Ok(next)
    }

    /// Bytes of the payload of the block at `at`.
    fn bytes(&self, at: usize) -> u32 {
        let block = match &self.work {
            Work::Load { blocks, .. } => blocks.get(at).map(|(_, block)| *block),
            Work::Save(blocks) => blocks.get(at).map(|(_, block)| *block),
        };
        block.and_then(|block| self.memory.block_bytes(block)).unwrap_or(0)
    }

    /// Where the blocks end that go into one call, if they begin at `at`.
    fn batch(&self, client: &Client, at: usize) -> usize {
        let most = if client.is_local() { BATCH_BYTES } else { BATCH_BYTES.min(client.payload_max) };
        let label = if self.labels.is_empty() { 0 } else { Label::BYTES };
        let mut left = most;
        let fits = |at: &usize| {
            let rest = left.checked_sub(u64::from(self.bytes(*at)) + u64::from(label));
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let until = self.len().min(at + BATCH_MAX);
        // One at least; the host says what it thinks of a block that is too large.
        at + (at..until).take_while(fits).count().max(1)
    }
}
