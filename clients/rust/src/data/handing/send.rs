//! The side that hands a part over.

use kvasir_memory::checksum::Checksum;
use kvasir_memory::runs::Plan;
use kvasir_memory::shared::Shared;
use kvasir_os::time::Duration;
use kvasir_protocol::block::{BlockKey, BlockMeta};

use super::signals::Next;
use super::{HandingError, Outgoing, Task};
use crate::data::handover::HandOver;
use crate::data::{Client, ClientError};

/// The most blocks of one hand-over between hosts; a part of more is several.
const BLOCKS_MAX: usize = 1024;

/// A hand-over between the hosts: the part, or as much of it as one may have.
struct Piece<'a> {
    blocks: &'a [(BlockKey, usize)],
    handing: HandOver<'a>,
    sums: Vec<Checksum>,
}

/// Hands the part over. Returns how many bytes were copied.
pub(super) fn run(
    task: &Task,
    part: &Outgoing,
    client: &Client,
    (keep, class): (Duration, u16),
) -> Result<u64, ClientError> {
    let size = task.plan.block_bytes(0).unwrap_or(0);
    let ttl_ms = u32::try_from(keep.as_millis()).unwrap_or(u32::MAX);
    let mut pieces = Vec::new();
    for (at, blocks) in part.blocks.chunks(BLOCKS_MAX).enumerate() {
        task.signals.check()?;
        let metas: Vec<BlockMeta> = blocks
            .iter()
            .map(|(key, _)| BlockMeta { class, ttl_ms, ..BlockMeta::single(*key, size) })
            .collect();
        // They were counted when the job was given.
        let request = part.transfer.request(part.from + (at * BLOCKS_MAX) as u32);
        let handing = client.hand_over(request, &part.peer, &metas, part.layers)?;
        pieces.push(Piece { blocks, handing, sums: blocks.iter().map(|_| Checksum::default()).collect() });
    }
    send_layers(task, part.layers, &mut pieces)?;
    for Piece { handing, sums, .. } in &mut pieces {
        handing.finish(&sums.iter().map(Checksum::finish).collect::<Vec<_>>())?;
    }
    Ok(u64::from(size) * part.blocks.len() as u64)
}

/// Sends the layers as they become ready, and sums them up while none is.
fn send_layers(task: &Task, layers: u32, pieces: &mut [Piece<'_>]) -> Result<(), ClientError> {
    let mut sent = vec![false; layers as usize];
    let mut summed = 0;
    let hosts_until = pieces.iter().map(|piece| piece.handing.until()).min();
    let until = hosts_until.map_or(task.until, |until| until.min(task.until));
    while summed < layers {
        let can_sum = sent.get(summed as usize) == Some(&true);
        match task.signals.next((!can_sum).then_some(until))? {
            Next::Layer(layer) => {
                for piece in &*pieces {
                    piece.send(&task.plan, layer, layers)?;
                }
                if let Some(sent) = sent.get_mut(layer as usize) {
                    *sent = true;
                }
            }
            Next::Nothing if can_sum => {
                pieces.iter_mut().for_each(|piece| piece.handing.sum_layer(summed, &mut piece.sums));
                summed += 1;
            }
            Next::Nothing => {
                let layer = sent.iter().position(|sent| !sent).unwrap_or_default() as u32;
                return Err(HandingError::NotReady { layer, layers, ms: task.time.as_millis() }.into());
            }
        }
    }
    Ok(())
}

impl Piece<'_> {
    fn send(&self, plan: &Plan, layer: u32, layers: u32) -> Result<(), ClientError> {
        let each = plan.runs() / layers as usize;
        let mut parts: Vec<Shared<'_>> = Vec::with_capacity(each);
        for (at, &(_, block)) in self.blocks.iter().enumerate() {
            parts.clear();
            let runs = plan.parts(block).ok_or(ClientError::NoBlock { block, blocks: plan.blocks() })?;
            parts.extend(runs.skip(each * layer as usize).take(each));
            self.handing.fill_parts(at, layer, &parts)?;
        }
        self.handing.layer_done(layer)
    }
}
