//! The side that receives a prompt.

use std::sync::atomic::{Ordering, fence};

use kvasir_memory::runs::Scatter;
use kvasir_memory::shared::Place;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};

use super::{HandingError, Incoming, Task};
use crate::data::handover::Arrivals;
use crate::data::jobs::BATCH_BYTES;
use crate::data::{Client, ClientError};

/// How long it waits at a time for a part to begin, before it looks whether the blocks came in another way.
const STEP: Duration = Duration::from_millis(500);

/// Receives the prompt. Returns how many bytes were copied.
pub(super) fn run(task: &Task, prompt: &Incoming, client: &Client, class: u16) -> Result<u64, ClientError> {
    let mut receiver = Receiver { task, prompt, client, class, covered: 0, bytes: 0 };
    let received = receiver.receive();
    if received.is_err() {
        // Says to the host that nobody reads any more, without waiting for one that may hang.
        client.hang_up();
    }
    match received {
        Err(_) if Instant::now() >= task.until => Err(receiver.late()),
        received => received.map(|()| receiver.bytes),
    }
}

struct Receiver<'a> {
    task: &'a Task,
    prompt: &'a Incoming,
    client: &'a Client,
    class: u16,
    /// How many blocks of the prompt, from the first, are here.
    covered: usize,
    bytes: u64,
}

impl Receiver<'_> {
    fn receive(&mut self) -> Result<(), ClientError> {
        let mut wait = Duration::ZERO;
        while self.covered < self.prompt.keys.len() {
            self.task.signals.check()?;
            // They were counted when the job was given.
            let request = self.prompt.transfer.request(self.covered as u32);
            let before = self.covered;
            match self.client.arrivals(request, wait) {
                Ok(arrivals) => self.part(&arrivals)?,
                Err(ClientError::NotArrived { .. }) => self.stored()?,
                Err(error) => return Err(error),
            }
            wait = if self.covered > before { Duration::ZERO } else { STEP.min(self.left()) };
            if self.covered == before && wait.is_zero() {
                return Err(self.late());
            }
        }
        Ok(())
    }

    fn left(&self) -> Duration {
        self.task.until.saturating_duration_since(Instant::now())
    }

    fn late(&self) -> ClientError {
        let (covered, blocks, ms) = (self.covered, self.prompt.keys.len(), self.task.time.as_millis());
        HandingError::NotArrived { covered, blocks, ms }.into()
    }

    /// The keys of those blocks that are not here, as many as one call takes.
    fn missing(&self) -> &[BlockKey] {
        let rest = &self.prompt.keys[self.covered..];
        &rest[..rest.len().min(BATCH_MAX)]
    }

    /// Where the prompt's block `at` belongs. Returns `None` if it is not wanted.
    fn wanted(&self, at: usize) -> Option<usize> {
        self.prompt.blocks.get(at.checked_sub(self.prompt.first)?).copied()
    }

    /// A part is coming: copies each layer when it is here, and waits until all of it was compared.
    fn part(&mut self, arrivals: &Arrivals<'_>) -> Result<(), ClientError> {
        self.compare(arrivals)?;
        let layers = self.prompt.layers;
        for layer in 0..layers {
            arrivals.wait_layer(layer, self.left())?;
            self.copy(arrivals, layer)?;
        }
        arrivals.settled(self.left())?;
        self.covered += arrivals.blocks().len();
        Ok(())
    }

    /// Whether these are the blocks that come next, in the same shape.
    fn compare(&self, arrivals: &Arrivals<'_>) -> Result<(), ClientError> {
        let (expected_layers, layers) = (self.prompt.layers, arrivals.layers());
        let expected_size = self.task.plan.block_bytes(0).unwrap_or(0);
        if arrivals.blocks().is_empty() {
            // Otherwise it would be asked for again and again.
            return Err(HandingError::OtherBlock { at: self.covered }.into());
        }
        for (nth, block) in arrivals.blocks().iter().enumerate() {
            let at = self.covered + nth;
            if self.prompt.keys.get(at) != Some(&block.key) {
                return Err(HandingError::OtherBlock { at }.into());
            }
            let size = block.size;
            if (layers, size) != (expected_layers, expected_size) {
                let other = HandingError::OtherShape { layers, size, expected_layers, expected_size };
                return Err(other.into());
            }
        }
        Ok(())
    }

    fn copy(&mut self, arrivals: &Arrivals<'_>, layer: u32) -> Result<(), ClientError> {
        let plan = &self.task.plan;
        let each = plan.runs() / self.prompt.layers as usize;
        let mut places: Vec<Place<'_>> = Vec::with_capacity(each);
        for nth in 0..arrivals.blocks().len() {
            let Some(block) = self.wanted(self.covered + nth) else { continue };
            self.task.signals.check()?;
            let from = arrivals.layer(nth, layer)?;
            let runs = plan.places(block).ok_or(ClientError::NoBlock { block, blocks: plan.blocks() })?;
            places.clear();
            places.extend(runs.skip(each * layer as usize).take(each));
            self.bytes += Scatter::new(&mut places, false).copy(from) as u64;
            // What is asked from here on is asked after the last byte was read: whether the place was still lent.
            fence(Ordering::Acquire);
            arrivals.layer(nth, layer)?;
        }
        Ok(())
    }

    /// Looks whether the next blocks are here as any others are: their part was settled so long ago that the host has forgotten
    /// how they came. Their keys are this transfer's, so they are the right ones.
    fn stored(&mut self) -> Result<(), ClientError> {
        let here = self.client.exists(self.missing())?.iter().take_while(|&&here| here).count();
        let plan = &self.task.plan;
        let at_once = (BATCH_BYTES / u64::from(plan.block_bytes(0).unwrap_or(0).max(1))).max(1) as usize;
        let end = self.covered + here.min(at_once);
        while self.covered < end && self.wanted(self.covered).is_none() {
            self.covered += 1;
        }
        let wanted: Vec<(BlockKey, usize)> = (self.covered..end)
            .filter_map(|at| Some((*self.prompt.keys.get(at)?, self.wanted(at)?)))
            .collect();
        if wanted.is_empty() {
            return Ok(());
        }
        for loaded in self.client.load(plan, &wanted, self.class)? {
            // A block that has gone since counts as one that has not come.
            if !loaded? {
                break;
            }
            self.covered += 1;
            self.bytes += u64::from(plan.block_bytes(0).unwrap_or(0));
        }
        Ok(())
    }
}
