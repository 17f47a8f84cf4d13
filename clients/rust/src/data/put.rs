//! Blocks into a host: filled in place, or sent.

use std::time::Instant;

use kvasir_memory::runs::{Plan, checksum_of};
use kvasir_memory::shared::Shared;
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
        let results = blocks.iter().zip(outcomes).map(|(meta, outcome)| match outcome {
            Outcome::Done => Ok(Put::Stored),
            Outcome::AlreadyStored => Ok(Put::AlreadyStored),
            Outcome::InProgress => Ok(Put::InProgress),
            outcome => Err(ClientError::Block { key: meta.key, outcome }),
        });
        Ok(results.collect())
    }

    fn put_in_place(
        &self,
        local: &Local,
        blocks: &[BlockMeta],
        parts: &Runs<Shared<'_>>,
    ) -> Result<Vec<Outcome>, ClientError> {
        // The host counts from later, so ours ends first.
        let until = Instant::now() + local.filling;
        let placed = match self.call(&Request::Reserve(blocks.to_vec()))? {
            Reply::Reserve(placed) if placed.len() == blocks.len() => placed,
            other => return Err(wrong(&self.endpoint, Op::Reserve, other)),
        };
        let mut outcomes = Vec::with_capacity(blocks.len());
        let (mut commits, mut late) = (Vec::with_capacity(blocks.len()), Vec::new());
        for (at, placed) in placed.iter().enumerate() {
            let last = at + 1 == blocks.len();
            match *placed {
                // After that the place may soon be another's.
                Placed::At { reservation, .. } if Instant::now() >= until => {
                    late.push(reservation);
                    outcomes.push(Outcome::Aborted);
                }
                Placed::At { reservation, offset } => {
                    let soon = || {
                        if last {
                            self.announce()
                        }
                    };
                    let Some(sum) = local.mapping.gather(offset, parts.of(at), soon) else {
                        return Err(ClientError::WrongReply {
                            endpoint: self.endpoint.clone(),
                            op: Op::Reserve,
                        });
                    };
                    if Instant::now() >= until {
                        late.push(reservation);
                        outcomes.push(Outcome::Aborted);
                    } else {
                        commits.push((at, (reservation, sum)));
                        outcomes.push(Outcome::Internal);
                    }
                }
                Placed::Not(outcome) => outcomes.push(outcome),
            }
        }
        if !late.is_empty() {
            // Tells the host that nothing is written there any more.
            let count = late.len();
            self.outcomes(&Request::Abort(late), count)?;
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
