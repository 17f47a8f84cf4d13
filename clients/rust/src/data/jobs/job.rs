//! One job, and the parts of it that threads do beside each other.

use std::sync::Arc;

use kvasir_os::time::Instant;
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};
use kvasir_protocol::wire::Op;

use super::{BATCH_BYTES, Done, Queue};
use crate::data::memory::{Hands, JobMemory};
use crate::data::{Client, ClientError, Label, Put, Reconnecting};
use crate::sync::Mutex;

pub(super) struct Job {
    memory: JobMemory,
    work: Work,
    /// One for each block, or none.
    labels: Vec<Label>,
    until: Instant,
    state: Mutex<State>,
}

pub(super) enum Work {
    Load { blocks: Vec<(BlockKey, usize)>, class: u16 },
    Save(Vec<(BlockMeta, usize)>),
}

struct State {
    done: Done,
    /// Parts that have not ended.
    left: usize,
    /// A part could not go on, so no other begins.
    stopped: bool,
}

/// Some blocks of a job, one after the other. The thread that takes one [ends](Part::end) it.
pub(super) struct Part {
    job: Arc<Job>,
    from: usize,
    to: usize,
}

impl Job {
    pub(super) fn new(id: u64, memory: JobMemory, work: Work, labels: Vec<Label>, until: Instant) -> Self {
        let blocks = match &work {
            Work::Load { blocks, .. } => blocks.len(),
            Work::Save(blocks) => blocks.len(),
        };
        let done = Done { job: id, ok: false, blocks: vec![false; blocks], bytes: 0, error: None };
        let state = Mutex::new(State { done, left: 0, stopped: false });
        Self { memory, work, labels, until, state }
    }

    /// Cuts it where [`BATCH_BYTES`] are full. One part at least.
    pub(super) fn into_parts(self) -> Vec<Part> {
        let (mut ends, mut bytes) = (Vec::new(), 0);
        for at in 0..self.len() {
            let block = self.bytes(at);
            if bytes > 0 && bytes + block > BATCH_BYTES {
                ends.push(at);
                bytes = 0;
            }
            bytes += block;
        }
        ends.push(self.len());
        self.state.lock().left = ends.len();
        let job = Arc::new(self);
        let begins = std::iter::once(0).chain(ends.clone());
        begins.zip(ends).map(|(from, to)| Part { job: Arc::clone(&job), from, to }).collect()
    }

    fn len(&self) -> usize {
        match &self.work {
            Work::Load { blocks, .. } => blocks.len(),
            Work::Save(blocks) => blocks.len(),
        }
    }

    /// Lets no further part begin.
    fn stop(&self, error: ClientError) {
        let mut state = self.state.lock();
        state.stopped = true;
        state.done.error.get_or_insert(error);
    }

    /// Bytes of the payload and the label of the block at `at`.
    fn bytes(&self, at: usize) -> u64 {
        let label = if self.labels.is_empty() { 0 } else { Label::BYTES };
        u64::from(self.payload(at)) + u64::from(label)
    }

    fn payload(&self, at: usize) -> u32 {
        let block = match &self.work {
            Work::Load { blocks, .. } => blocks.get(at).map(|(_, block)| *block),
            Work::Save(blocks) => blocks.get(at).map(|(_, block)| *block),
        };
        block.and_then(|block| self.memory.block_bytes(block)).unwrap_or(0)
    }
}

impl Part {
    /// Works until all is done, the job's time is over, the host cannot be asked, or the jobs are closed.
    pub(super) fn run(&self, link: &Reconnecting, queue: &Queue, hands: &mut Hands) {
        let job = &self.job;
        if job.state.lock().stopped {
            return;
        }
        // This comes before anything is lent or reserved for it, because that has a limit of its own.
        if let Err(error) = job.memory.wait_until_ready(job.until, || queue.is_closed()) {
            return job.stop(error);
        }
        let mut at = self.from;
        while at < self.to && !queue.is_closed() {
            match self.step(link, hands, at) {
                Ok(next) => at = next,
                Err(error) => return job.stop(error),
            }
        }
    }

    /// Returns what became of the job, if this was its last part.
    pub(super) fn end(self) -> Option<Done> {
        let mut state = self.job.state.lock();
        state.left -= 1;
        if state.left > 0 {
            return None;
        }
        let done = &mut state.done;
        let error = done.error.take();
        let ok = error.is_none() && done.blocks.iter().all(|&here| here);
        Some(Done { job: done.job, ok, blocks: std::mem::take(&mut done.blocks), bytes: done.bytes, error })
    }

    /// Loads or saves some blocks from `at` on. Returns where the next ones begin.
    fn step(&self, link: &Reconnecting, hands: &mut Hands, at: usize) -> Result<usize, ClientError> {
        let job = &self.job;
        let left = job.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let op = if matches!(job.work, Work::Load { .. }) { Op::Get } else { Op::Reserve };
            return Err(ClientError::DeadlinePassed { endpoint: link.endpoint().clone(), op });
        }
        let client = link.client_within(left)?;
        client.set_deadline(Some(job.until));
        let next = self.batch(&client, at);
        let size = |at| u64::from(job.payload(at));
        // Empty where there are none.
        let labels = job.labels.get(at..next).unwrap_or_default();
        // For each block: whether it is there, and how many bytes were copied.
        let results: Vec<Result<(bool, u64), ClientError>> = match &job.work {
            Work::Load { blocks, class } => {
                let loaded = job.memory.load(hands, &client, &blocks[at..next], labels, *class)?;
                let bytes = |at, here| if here { size(at) } else { 0 };
                let each = (at..next).zip(loaded);
                each.map(|(at, result)| result.map(|here| (here, bytes(at, here)))).collect()
            }
            Work::Save(blocks) => {
                let saved = job.memory.save(hands, &client, &blocks[at..next], labels)?;
                let bytes = |at, put| if put == Put::Stored { size(at) } else { 0 };
                let each = (at..next).zip(saved);
                each.map(|(at, result)| result.map(|put| (true, bytes(at, put)))).collect()
            }
        };
        let done = &mut job.state.lock().done;
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

    /// Where the blocks end that go into one call, if they begin at `at`.
    fn batch(&self, client: &Client, at: usize) -> usize {
        let mut left = if client.is_local() { BATCH_BYTES } else { BATCH_BYTES.min(client.payload_max) };
        let fits = |at: &usize| {
            let rest = left.checked_sub(self.job.bytes(*at));
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let until = self.to.min(at + BATCH_MAX);
        // One at least; the host says what it thinks of a block that is too large.
        at + (at..until).take_while(fits).count().max(1)
    }
}
