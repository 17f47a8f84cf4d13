//! Blocks into a host: filled in place, or sent.

use kvasir_memory::runs::{Plan, checksum_of};
use kvasir_memory::shared::Shared;
use kvasir_os::time::Instant;
use kvasir_protocol::block::BlockMeta;
use kvasir_protocol::stream::Stream;
use kvasir_protocol::wire::{Op, Outcome, Placed, Reply, Request};

use super::block::Local;
use super::error::wrong;
use super::runs::Runs;
use super::scatter::check_labels;
use super::wire::no_payload;
use super::{Client, ClientError, Label};

/// The outcome of putting a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Stored,
    AlreadyStored,
    /// Another writer is storing it.
    InProgress,
}

impl Put {
    pub(super) fn of(meta: &BlockMeta, outcome: Outcome) -> Result<Self, ClientError> {
        match outcome {
            Outcome::Done => Ok(Self::Stored),
            Outcome::AlreadyStored => Ok(Self::AlreadyStored),
            Outcome::InProgress => Ok(Self::InProgress),
            outcome => Err(ClientError::Block { key: meta.key, outcome }),
        }
    }
}

impl Client {
    /// Stores one block.
    pub fn put(&self, meta: &BlockMeta, bytes: &[u8]) -> Result<Put, ClientError> {
        self.put_batch(&[(*meta, bytes)])?.remove(0)
    }

    /// Stores blocks. Each may fail on its own, for instance because the pool is full.
    pub fn put_batch(
        &self,
        blocks: &[(BlockMeta, &[u8])],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        let metas: Vec<BlockMeta> = blocks.iter().map(|(meta, _)| *meta).collect();
        self.put_runs(&metas, &blocks.iter().map(|(_, bytes)| [Shared::from(*bytes)]).collect())
    }

    /// [`put_batch`](Self::put_batch) of blocks that lie in many places: the bytes of a block are its runs, one behind the
    /// other. They are gathered in the pass that writes or sends them.
    pub fn put_gathered(
        &self,
        blocks: &[(BlockMeta, &[&[u8]])],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        let metas: Vec<BlockMeta> = blocks.iter().map(|(meta, _)| *meta).collect();
        let parts = blocks.iter().map(|(_, runs)| runs.iter().map(|&run| Shared::from(run)));
        self.put_runs(&metas, &parts.collect())
    }

    /// Stores blocks of an engine, each with its number in `plan`.
    pub fn save(
        &self,
        plan: &Plan,
        blocks: &[(BlockMeta, usize)],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        self.save_labelled(plan, blocks, &[])
    }

    /// [`save`](Self::save) with a label behind each block, by which its size is [`Label::BYTES`] larger than in the plan.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_labelled(
        &self,
        plan: &Plan,
        blocks: &[(BlockMeta, usize)],
        labels: &[Label],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        check_labels(labels, blocks.len())?;
        let mut labels = labels.iter();
        let mut parts = Runs::with_capacity(blocks.len(), plan.runs() + 1);
        for &(_, block) in blocks {
            let runs = plan.parts(block).ok_or(ClientError::NoBlock { block, blocks: plan.blocks() })?;
            parts.push(runs.chain(labels.next().map(|label| Shared::from(label.as_bytes()))));
        }
        let metas: Vec<BlockMeta> = blocks.iter().map(|(meta, _)| *meta).collect();
        self.put_runs(&metas, &parts)
    }

    fn put_runs(
        &self,
        blocks: &[BlockMeta],
        parts: &Runs<Shared<'_>>,
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        self.check_batch(blocks.len())?;
        for (at, meta) in blocks.iter().enumerate() {
            let len = parts.of(at).iter().map(Shared::len).fold(0, usize::saturating_add);
            if len as u64 != u64::from(meta.size) {
                return Err(ClientError::Size { len, size: meta.size });
            }
        }
        let outcomes = match &self.local {
            Some(local) => self.put_in_place(local, blocks, parts)?,
            None => self.put_inline(blocks, parts)?,
        };
        Ok(blocks.iter().zip(outcomes).map(|(meta, outcome)| Put::of(meta, outcome)).collect())
    }

    fn put_in_place(
        &self,
        local: &Local,
        blocks: &[BlockMeta],
        parts: &Runs<Shared<'_>>,
    ) -> Result<Vec<Outcome>, ClientError> {
        // The host counts from later, so ours ends first.
        let until = Instant::now() + local.filling;
        let placed = self.reserve(blocks)?;
        let mut sums = Vec::with_capacity(blocks.len());
        for (at, placed) in placed.iter().enumerate() {
            let last = at + 1 == blocks.len();
            sums.push(match *placed {
                // After that the place may soon be another's.
                Placed::At { .. } if Instant::now() >= until => None,
                Placed::At { offset, .. } => {
                    let soon = || {
                        if last {
                            self.announce()
                        }
                    };
                    let Some(sum) = local.mapping.gather(offset, parts.of(at), soon) else {
                        return Err(self.misplaced());
                    };
                    (Instant::now() < until).then_some(sum)
                }
                Placed::Not(_) => None,
            });
        }
        self.commit(&placed, &sums)
    }

    /// Places in the pool for blocks.
    pub(super) fn reserve(&self, blocks: &[BlockMeta]) -> Result<Vec<Placed>, ClientError> {
        match self.call(&Request::Reserve(blocks.to_vec()))? {
            Reply::Reserve(placed) if placed.len() == blocks.len() => Ok(placed),
            other => Err(wrong(&self.endpoint, Op::Reserve, other)),
        }
    }

    /// The host gave a place that does not lie in its pool.
    pub(super) fn misplaced(&self) -> ClientError {
        ClientError::WrongReply { endpoint: self.endpoint.clone(), op: Op::Reserve }
    }

    /// Tells the host what became of the places that it gave: with its checksum, a block is whole. Without, nothing is written
    /// there any more.
    pub(super) fn commit(
        &self,
        placed: &[Placed],
        sums: &[Option<u64>],
    ) -> Result<Vec<Outcome>, ClientError> {
        let mut outcomes = Vec::with_capacity(placed.len());
        let (mut commits, mut given_up) = (Vec::with_capacity(placed.len()), Vec::new());
        for (at, (placed, sum)) in placed.iter().zip(sums).enumerate() {
            outcomes.push(match (*placed, *sum) {
                (Placed::At { reservation, .. }, Some(sum)) => {
                    commits.push((at, (reservation, sum)));
                    Outcome::Internal
                }
                (Placed::At { reservation, .. }, None) => {
                    given_up.push(reservation);
                    Outcome::Aborted
                }
                (Placed::Not(outcome), _) => outcome,
            });
        }
        if !given_up.is_empty() {
            let count = given_up.len();
            self.outcomes(&Request::Abort(given_up), count)?;
        }
        if !commits.is_empty() {
            let items: Vec<_> = commits.iter().map(|(_, item)| *item).collect();
            let results = self.outcomes(&Request::Commit(items), commits.len())?;
            commits.iter().zip(results).for_each(|((at, _), result)| outcomes[*at] = result);
        }
        Ok(outcomes)
    }

    /// Has the host awake when the next call comes, in a few microseconds.
    fn announce(&self) {
        // While another call is on its way the host is awake; an error will show up in the next call.
        if let Some(wire) = self.wire.try_lock()
            && let Stream::Ring(ring) = &wire.writer
        {
            let _ = ring.announce();
        }
    }

    fn put_inline(
        &self,
        blocks: &[BlockMeta],
        parts: &Runs<Shared<'_>>,
    ) -> Result<Vec<Outcome>, ClientError> {
        let bytes: u64 = blocks.iter().map(|meta| u64::from(meta.size)).sum();
        if bytes > self.payload_max {
            return Err(ClientError::Payload { bytes, max: self.payload_max });
        }
        let summed = |(at, meta): (usize, &BlockMeta)| (*meta, checksum_of(parts.of(at)));
        let request = Request::Put(blocks.iter().enumerate().map(summed).collect());
        let reply = self.exchange(&request, parts.all(), no_payload)?;
        self.expect_outcomes(Op::Put, reply, blocks.len())
    }
}
