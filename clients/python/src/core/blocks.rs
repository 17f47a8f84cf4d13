//! What a job says of each of its blocks.

use kvasir_client::data::{BlockKey, BlockMeta, Label, Namespace, Plan};
use pyo3::prelude::*;

use crate::bytes;

/// The blocks of a job, each with its number in the plan, and their labels.
pub(super) enum Blocks {
    Load(Vec<(BlockKey, usize)>, Vec<Label>),
    Save(Vec<(BlockMeta, usize)>, Vec<Label>),
}

impl Blocks {
    pub(super) fn of<'a>(
        saves: bool,
        namespace: &Namespace,
        block_bytes: impl Fn(usize) -> Option<u32>,
        hashes: impl ExactSizeIterator<Item = (usize, &'a [u8])>,
    ) -> PyResult<Self> {
        let count = hashes.len();
        let mut blocks = match saves {
            true => Self::Save(Vec::with_capacity(count), Vec::with_capacity(count)),
            false => Self::Load(Vec::with_capacity(count), Vec::with_capacity(count)),
        };
        for (block, hash) in hashes {
            // The job is refused if there is no such block.
            let (meta, label) = named(namespace, hash, block_bytes(block).unwrap_or(0))?;
            match &mut blocks {
                Self::Load(blocks, labels) => {
                    blocks.push((meta.key, block));
                    labels.push(label);
                }
                Self::Save(blocks, labels) => {
                    blocks.push((meta, block));
                    labels.push(label);
                }
            }
        }
        Ok(blocks)
    }
}

/// Bytes of the only block of a plan.
pub(super) fn whole(plan: &Plan) -> u32 {
    plan.block_bytes(0).unwrap_or(0)
}

/// A block of `payload` bytes to be stored under `hash`: its metadata and its label.
pub(super) fn named(namespace: &Namespace, hash: &[u8], payload: u32) -> PyResult<(BlockMeta, Label)> {
    let meta = BlockMeta::single(namespace.key(hash), bytes::with_label(payload)?);
    Ok((meta, namespace.label(hash, payload)))
}
