//! Loads and saves of an engine, on threads of their own.
//!
//! An engine gives a job from a thread that must not wait, and hears of its end by a descriptor that becomes readable. Each
//! thread has a connection of its own, made again when it broke. A job of many bytes is done in parts by several threads: one
//! alone compares checksums slower than a bus copies. Loads and saves have different threads, so that a save of gigabytes
//! keeps no request waiting. All loads have the same time, counted from when they are given, and are taken in that
//! order: one that waits behind another ends with it at the latest.

mod job;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};

use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};

use self::job::{Job, Part, Work};
use super::memory::{Hands, JobMemory, Pools};
use super::scatter::check_labels;
use super::{ClientError, Endpoint, Label, Options, Reconnecting};
use crate::sync::{Condvar, Mutex};

/// Bytes that a thread copies between two looks at the clock: some milliseconds.
pub(super) const BATCH_BYTES: u64 = 32 << 20;
/// Practically no limit, and still a point in time.
pub(super) const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// How jobs are run.
#[derive(Clone, Debug)]
pub struct JobOptions {
    /// Threads for loads, each with a connection. Default 8; at least 1.
    pub load_threads: usize,
    /// Threads for saves, each with a connection. Default 2; at least 1.
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
            load_threads: 8,
            save_threads: 2,
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
    /// The number that the engine gave it.
    pub job: u64,
    /// It is true of all blocks.
    pub ok: bool,
    /// For each block: a load has brought all of it, and it is what was stored; a save knows it to be stored, or being stored
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
    /// Written and read under the lock of `done`, so that it is readable just while there is something.
    event: OwnedFd,
    /// The connection of each thread.
    links: Mutex<Vec<Arc<Reconnecting>>>,
    pools: Arc<Pools>,
}

struct Queue {
    /// `None` once they are closed.
    waiting: Mutex<Option<VecDeque<Part>>>,
    changed: Condvar,
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

    /// [`load`](Self::load) of blocks that were stored with these labels, one each: see [`Client::load_labelled`](super::Client::load_labelled).
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

    /// [`save`](Self::save) with a label behind each block: see [`Client::save_labelled`](super::Client::save_labelled).
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
        let done = {
            let mut done = self.shared.done.lock();
            // It is not readable if there is nothing.
            let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
            std::mem::take(&mut *done)
        };
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
        left.into_iter().flatten().filter_map(Part::end).for_each(|done| self.shared.report(done));
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
        let taken = queue.push(Job::new(id, memory, work, labels, until));
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
        let parts = job.into_parts();
        let several = parts.len() > 1;
        self.waiting.lock().as_mut().ok_or(JobError::Closed)?.extend(parts);
        if several {
            self.changed.notify_all()
        } else {
            self.changed.notify_one()
        }
        Ok(())
    }

    /// Waits for some work. Returns `None` when they are closed.
    fn next(&self) -> Option<Part> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(part) = waiting.as_mut()?.pop_front() {
                return Some(part);
            }
            waiting = self.changed.wait(waiting);
        }
    }

    fn is_closed(&self) -> bool {
        self.waiting.lock().is_none()
    }

    fn close(&self) -> VecDeque<Part> {
        let left = self.waiting.lock().take();
        self.changed.notify_all();
        left.unwrap_or_default()
    }
}

impl Shared {
    fn work(&self, queue: &Queue, link: &Reconnecting) {
        let mut hands = Hands::of(&self.pools);
        while let Some(part) = queue.next() {
            // A fault of ours must not leave the engine waiting.
            let _ = catch_unwind(AssertUnwindSafe(|| part.run(link, queue, &mut hands)));
            part.end().into_iter().for_each(|done| self.report(done));
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
        let mut waiting = self.done.lock();
        waiting.push(done);
        if waiting.len() == 1 {
            // One that was just read takes a number without waiting.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}
