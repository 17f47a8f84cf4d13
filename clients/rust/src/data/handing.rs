//! Hand-overs between engines, layer by layer, on threads of their own: for a scheduler that must not wait.
//!
//! A prefill engine hands a prompt over in parts, each the blocks that one of its steps completes, and says of each layer when
//! its bytes are final. A decode engine names all blocks of the prompt and where they belong; each layer is copied there when it
//! comes. [`Client::hand_over`](super::Client::hand_over) and [`Client::arrivals`](super::Client::arrivals) are what happens
//! underneath: here the two sides find each other by the name of a [`Transfer`] instead of numbers, nobody waits, and jobs are
//! reported where those of [`Jobs`] are.
//!
//! ```no_run
//! # use kvasir_client::data::*; use std::{io, sync::Arc, time::Duration};
//! # fn both(jobs: &Jobs, host: &Endpoint, plan: &Arc<Plan>, hash: [u8; 32]) -> Result<(), JobError> {
//! let handing = Handing::beside(jobs, host, &Options::default(), HandingOptions::default());
//! let transfer = Transfer::new(b"cmpl-4711", &Namespace::new([0; 32]))?;
//!
//! // At the prefill engine: block 5 of its memory is the first of the prompt.
//! let (layers, peer, blocks) = (32, "decode-3".to_owned(), vec![(transfer.key(&hash), 5)]);
//! handing.hand_over(1, plan, Outgoing { transfer: transfer.clone(), from: 0, peer, blocks, layers })?;
//! for layer in 0..layers {
//!     // … compute it …
//!     handing.layer_ready(1, layer);
//! }
//!
//! // At the decode engine, next to the host that the other calls `decode-3`: it belongs into block 9.
//! let (keys, time) = (vec![transfer.key(&hash)], Duration::from_secs(30));
//! handing.arrive(2, plan, Incoming { transfer, keys, first: 0, blocks: vec![9], layers, time })?;
//! // Both are reported by `jobs.drain()`.
//! # Ok(()) }
//! ```
//!
//! **Threads.** A hand-over waits most of the time, for the engine or for the other side, so each that runs has a thread and a
//! connection. They are started when they are needed. What is above [`HandingOptions::send_threads`] and
//! [`receive_threads`](HandingOptions::receive_threads) waits for one of them to end, and its time runs.
//!
//! **All or nothing.** A part is kept as a whole or not at all (`docs/design/0012`); a prompt of several parts may break between
//! them. The receiver's job is good when all parts are, and otherwise none of its blocks is. The job of the sender is about one
//! part.
//!
//! **Afterwards** the blocks are evicted from both hosts: their keys are those of one transfer, so nobody will ask for them again.
//! Where that fails, or nobody came for them, they leave after [`HandingOptions::keep`].

mod crew;
mod receive;
mod send;
mod signals;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_memory::runs::Plan;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};

use self::crew::Crew;
use self::signals::Signals;
use super::jobs::{self, TIME_MAX};
use super::{ClientError, Done, Endpoint, JobError, Jobs, LAST_WORD, Options, Reconnecting, Transfer};
use crate::sync::Mutex;

/// How long making room at a host may take, once a job is reported.
const TIDY: Duration = Duration::from_secs(1);

/// How hand-overs are run.
#[derive(Clone, Debug)]
pub struct HandingOptions {
    /// The most threads, each with a connection, for parts that are handed over. Default 16.
    pub send_threads: usize,
    /// The same for prompts that are received. Default 32.
    pub receive_threads: usize,
    /// How long handing one part over may take, from when it is given. The hosts have a limit, too: half of
    /// `store.reservation_ttl`. Default 30 s.
    pub send_time: Duration,
    /// How long blocks stay that nobody came for. Default 5 min.
    pub keep: Duration,
    /// How long a thread that has nothing to do keeps its connection; a host has few of these. Default 30 s.
    pub idle: Duration,
    /// Workload class of the blocks, 0 = unknown. Default 0.
    pub class: u16,
}

impl Default for HandingOptions {
    fn default() -> Self {
        Self {
            send_threads: 16,
            receive_threads: 32,
            send_time: Duration::from_secs(30),
            keep: Duration::from_secs(300),
            idle: Duration::from_secs(30),
            class: 0,
        }
    }
}

/// A part of a prompt to hand over.
#[derive(Clone, Debug)]
pub struct Outgoing {
    pub transfer: Transfer,
    /// Which block of the prompt is its first, counted from 0.
    pub from: u32,
    /// The name of the other host in the settings of this one.
    pub peer: String,
    /// The blocks in the prompt's order: the [`key`](Transfer::key) of each, and its number in the plan.
    pub blocks: Vec<(BlockKey, usize)>,
    /// The plan's runs are as many groups, a group a layer, of equally many runs and bytes.
    pub layers: u32,
}

/// A prompt to receive.
#[derive(Clone, Debug)]
pub struct Incoming {
    pub transfer: Transfer,
    /// [`Keys`](Transfer::key) of all blocks that are handed over, in the prompt's order.
    pub keys: Vec<BlockKey>,
    /// How many of them, from the beginning, the engine has already.
    pub first: usize,
    /// The number in the plan of each of the others.
    pub blocks: Vec<usize>,
    /// The same number as at the sender.
    pub layers: u32,
    /// How long it may take, from when it is given.
    pub time: Duration,
}

/// Why a hand-over came to nothing, where no host is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandingError {
    #[error("it was given up")]
    Abandoned,
    #[error("it was closed in the middle")]
    Closed,
    #[error("layer {layer} of {layers} was not ready in its time of {ms} ms; the engine said nothing of it")]
    NotReady { layer: u32, layers: u32, ms: u128 },
    #[error(
        "{covered} of {blocks} blocks came in {ms} ms; the prefill engine was slow, gave up, or differs in its namespace: \
         compute the rest"
    )]
    NotArrived { covered: usize, blocks: usize, ms: u128 },
    #[error(
        "block {at} of the transfer is another one than is wanted; the engines disagree about the tokens or how to hash them"
    )]
    OtherBlock { at: usize },
    #[error(
        "it comes in {layers} layers and a block of {size} B, not in {expected_layers} and {expected_size} B; what differs \
         belongs in the namespace"
    )]
    OtherShape { layers: u32, size: u32, expected_layers: u32, expected_size: u32 },
}

/// Threads that hand blocks over and receive them.
///
/// As of [`Jobs`], every job that was taken is reported once, and not before this process has stopped touching its blocks. A plan
/// lives at least until its jobs are reported. Dropping it closes it; the jobs it stands beside may be closed before or after.
pub struct Handing(Arc<Shared>);

struct Shared {
    endpoint: Endpoint,
    options: Options,
    handing: HandingOptions,
    /// Where jobs are counted and reported.
    jobs: Arc<jobs::Shared>,
    /// The signals of jobs that are not reported yet.
    open: Mutex<HashMap<u64, Arc<Signals>>>,
    senders: Crew,
    receivers: Crew,
    /// The host has refused to drop blocks for this engine, and closes a connection that asks again.
    may_not_evict: AtomicBool,
}

struct Task {
    job: u64,
    plan: Arc<Plan>,
    work: Work,
    signals: Arc<Signals>,
    time: Duration,
    until: Instant,
}

enum Work {
    Send(Outgoing),
    Receive(Incoming),
}

impl Handing {
    /// Reports where `jobs` does: one descriptor and one [`drain`](Jobs::drain) for both. The jobs of both have numbers of
    /// one list. Starts no thread and does not connect.
    pub fn beside(jobs: &Jobs, endpoint: &Endpoint, options: &Options, handing: HandingOptions) -> Self {
        let senders = Crew::new("kvasir-send", handing.send_threads, handing.idle);
        let receivers = Crew::new("kvasir-receive", handing.receive_threads, handing.idle);
        let (endpoint, options, jobs) = (endpoint.clone(), options.clone(), Arc::clone(jobs.shared()));
        let open = Mutex::default();
        let may_not_evict = AtomicBool::new(false);
        Self(Arc::new(Shared { endpoint, options, handing, jobs, open, senders, receivers, may_not_evict }))
    }

    /// Gives a part to hand over. It goes layer by layer, as [`layer_ready`](Self::layer_ready) is called; until it is reported
    /// its blocks must not change in layers that are ready.
    ///
    /// # Errors
    /// It is not taken, and will not be reported.
    pub fn hand_over(&self, job: u64, plan: &Arc<Plan>, part: Outgoing) -> Result<(), JobError> {
        let blocks = part.blocks.len();
        check(plan, part.layers, part.blocks.iter().map(|(_, block)| *block))?;
        if blocks == 0 {
            return Err(JobError::Numbers { blocks, keys: 0, first: 0 });
        }
        let to = u64::from(part.from) + blocks as u64;
        if to > u64::from(u32::MAX) {
            return Err(JobError::Part { from: part.from.into(), to });
        }
        let (layers, time) = (part.layers, self.0.handing.send_time);
        self.give(job, plan, Work::Send(part), Signals::new(layers), time)
    }

    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        self.0.senders.threads() + self.0.receivers.threads()
    }

    /// Says that the bytes of a layer are final, in all blocks of the job: they go now. Never waits. Returns false if it was said
    /// before, or there is no such layer or job, for instance because it has failed.
    pub fn layer_ready(&self, job: u64, layer: u32) -> bool {
        self.signals(job).is_some_and(|signals| signals.ready(layer))
    }

    /// Gives a prompt to receive. Until it is reported its blocks are the job's; if it is not good, what lies in them means
    /// nothing.
    ///
    /// # Errors
    /// It is not taken, and will not be reported.
    pub fn arrive(&self, job: u64, plan: &Arc<Plan>, prompt: Incoming) -> Result<(), JobError> {
        let (blocks, keys, first) = (prompt.blocks.len(), prompt.keys.len(), prompt.first);
        check(plan, prompt.layers, prompt.blocks.iter().copied())?;
        if keys == 0 || keys.checked_sub(first) != Some(blocks) {
            return Err(JobError::Numbers { blocks, keys, first });
        }
        if keys > u32::MAX as usize {
            return Err(JobError::Part { from: 0, to: keys as u64 });
        }
        let time = prompt.time;
        self.give(job, plan, Work::Receive(prompt), Signals::new(0), time)
    }

    /// Gives a job up. It is reported as failed when its copying has stopped, unless it has just ended. Returns false if there is no such
    /// job any more.
    pub fn abandon(&self, job: u64) -> bool {
        self.signals(job).map(|signals| signals.end(&HandingError::Abandoned)).is_some()
    }

    /// Takes no more jobs, hangs up, waits until what is being copied has ended, and reports all jobs that are left as failed.
    pub fn close(&self) {
        let shared = &self.0;
        let left = [shared.senders.close(), shared.receivers.close()];
        // This comes before it hangs up, so that each says why it ended.
        let open: Vec<_> = shared.open.lock().values().cloned().collect();
        open.iter().for_each(|signals| signals.end(&HandingError::Closed));
        let crews = [&shared.senders, &shared.receivers];
        crews.iter().for_each(|crew| crew.hang_up());
        crews.iter().for_each(|crew| crew.join());
        left.into_iter().flatten().for_each(|task| {
            // One may have been given up before.
            let why = task.signals.check().err().unwrap_or(HandingError::Closed);
            shared.report(task.failed(why.into()));
        });
    }

    fn signals(&self, job: u64) -> Option<Arc<Signals>> {
        self.0.open.lock().get(&job).cloned()
    }

    fn give(
        &self,
        job: u64,
        plan: &Arc<Plan>,
        work: Work,
        signals: Signals,
        time: Duration,
    ) -> Result<(), JobError> {
        let (plan, signals) = (Arc::clone(plan), Arc::new(signals));
        let until = Instant::now() + time.min(TIME_MAX);
        let crew = self.0.crew(&work);
        match self.0.open.lock().entry(job) {
            Entry::Occupied(_) => return Err(JobError::Twice { job }),
            Entry::Vacant(free) => drop(free.insert(Arc::clone(&signals))),
        }
        let given = self.0.jobs.take().and_then(|()| {
            let pushed = crew.push(&self.0, Task { job, plan, work, signals, time, until });
            pushed.inspect_err(|_| self.0.jobs.untake())
        });
        given.inspect_err(|_| drop(self.0.open.lock().remove(&job)))
    }
}

impl Drop for Handing {
    fn drop(&mut self) {
        self.close();
    }
}

fn check(plan: &Plan, layers: u32, mut numbers: impl Iterator<Item = usize>) -> Result<(), JobError> {
    if plan.layer_bytes(layers as usize).is_none() {
        return Err(JobError::Layers { layers, runs: plan.runs() });
    }
    let blocks = plan.blocks();
    numbers.find(|&block| block >= blocks).map_or(Ok(()), |block| Err(JobError::NoBlock { block, blocks }))
}

impl Shared {
    fn crew(&self, work: &Work) -> &Crew {
        match work {
            Work::Send(_) => &self.senders,
            Work::Receive(_) => &self.receivers,
        }
    }

    /// Runs tasks until the crew is closed.
    fn work(&self, crew: &Crew, link: &Arc<Reconnecting>) {
        while let Some(task) = crew.next() {
            let keep = (self.handing.keep, self.handing.class);
            // A fault of ours must not leave the engine waiting.
            let done = catch_unwind(AssertUnwindSafe(|| task.run(link, keep)));
            self.report(done.unwrap_or_else(|_| task.failed(HandingError::Closed.into())));
            self.tidy(&task, link);
        }
    }

    /// Makes room at the host. The engine does not wait for this, nor does it matter much: see [`HandingOptions::keep`].
    fn tidy(&self, task: &Task, link: &Reconnecting) {
        if self.may_not_evict.load(Ordering::Relaxed) {
            return;
        }
        let (client, keys) = match &task.work {
            Work::Send(part) => (link.current(), part.blocks.iter().map(|(key, _)| *key).collect()),
            // A job that failed has hung up, and its blocks may be there all the same.
            Work::Receive(prompt) => (link.client_within(TIDY).ok(), prompt.keys.clone()),
        };
        let Some(client) = client else { return };
        client.set_deadline(Some(Instant::now() + TIDY));
        for keys in keys.chunks(BATCH_MAX) {
            if let Err(ClientError::Refused { .. }) = client.evict(keys) {
                self.may_not_evict.store(true, Ordering::Relaxed);
                return;
            }
        }
    }

    fn report(&self, done: Done) {
        self.open.lock().remove(&done.job);
        self.jobs.report(done);
    }
}

impl Task {
    fn failed(&self, error: ClientError) -> Done {
        Done { job: self.job, ok: false, blocks: vec![false; self.len()], bytes: 0, error: Some(error) }
    }

    fn len(&self) -> usize {
        match &self.work {
            Work::Send(part) => part.blocks.len(),
            Work::Receive(prompt) => prompt.blocks.len(),
        }
    }

    fn run(&self, link: &Arc<Reconnecting>, (keep, class): (Duration, u16)) -> Done {
        self.signals.begin(link);
        let result = self.signals.check().map_err(ClientError::from).and_then(|()| {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.late().into());
            }
            let client = link.client_within(left)?;
            // A job that receives has the host wait until then, and hears afterwards that nothing came.
            let answer = if matches!(self.work, Work::Receive(_)) { LAST_WORD } else { Duration::ZERO };
            client.set_deadline(Some(self.until + answer));
            match &self.work {
                Work::Send(part) => send::run(self, part, &client, (keep, class)),
                Work::Receive(prompt) => receive::run(self, prompt, &client, class),
            }
        });
        // From here on nobody hangs up because of this job.
        self.signals.leave();
        match result {
            Ok(bytes) => Done { job: self.job, ok: true, blocks: vec![true; self.len()], bytes, error: None },
            // The reason why it was ended says more than the call that met it.
            Err(error) => self.failed(self.signals.check().err().map_or(error, ClientError::from)),
        }
    }

    /// Nothing was done within its time.
    fn late(&self) -> HandingError {
        let ms = self.time.as_millis();
        match &self.work {
            Work::Send(part) => HandingError::NotReady { layer: 0, layers: part.layers, ms },
            Work::Receive(prompt) => HandingError::NotArrived { covered: 0, blocks: prompt.keys.len(), ms },
        }
    }
}
