//! What a reader of the tables has to be told, and what it was told.

use super::answer::{self, Slots};
use super::{Fleet, Invalid, Version};
use kvasir_policy::scheduler::{Decision, ROW};

/// What a reader has to push to its policy instance; rows encoded as in the contract.
#[derive(Clone, Debug, PartialEq)]
pub enum Changes {
    Rows {
        prefill: Vec<f32>,
        decode: Vec<f32>,
    },
    /// `open` with these sizes, then all rows.
    Full {
        prefill_slots: u32,
        decode_slots: u32,
        block_size_tokens: u32,
        prefill: Vec<f32>,
        decode: Vec<f32>,
    },
}

/// The tables as one reader was told them last. It decides on this copy, so the lock of the fleet
/// is held for the copying of changed rows only, and an answer can be held against exactly what the
/// policy knew.
#[derive(Clone, Debug, Default)]
pub struct Told {
    version: Version,
    block_size_tokens: u32,
    /// One row per slot; those of empty slots are zeros but for the slot, thus unavailable.
    prefill: Vec<f32>,
    decode: Vec<f32>,
}

impl Told {
    /// Takes over what changed since the last call; `None` if nothing did.
    pub fn catch_up(&mut self, fleet: &Fleet) -> Option<Changes> {
        let changes = fleet.changes_since(&mut self.version)?;
        match &changes {
            Changes::Rows { prefill, decode } => {
                put_rows(&mut self.prefill, prefill);
                put_rows(&mut self.decode, decode);
            }
            Changes::Full { prefill_slots, decode_slots, block_size_tokens, prefill, decode } => {
                self.block_size_tokens = *block_size_tokens;
                self.prefill = empty_rows(*prefill_slots);
                self.decode = empty_rows(*decode_slots);
                put_rows(&mut self.prefill, prefill);
                put_rows(&mut self.decode, decode);
            }
        }
        Some(changes)
    }

    /// Everything, for a policy instance that knows nothing yet.
    pub fn all(&self) -> Changes {
        Changes::Full {
            prefill_slots: (self.prefill.len() / ROW) as u32,
            decode_slots: (self.decode.len() / ROW) as u32,
            block_size_tokens: self.block_size_tokens,
            prefill: self.prefill.clone(),
            decode: self.decode.clone(),
        }
    }

    /// Whether an answer keeps to what the policy was told. `prefix_blocks` as it was given to it.
    ///
    /// # Errors
    /// The reason: the policy is at fault.
    pub fn check(&self, decision: &Decision, prefix_blocks: &[u32]) -> Result<(), Invalid> {
        let slots = |rows: &[f32]| rows.len() / ROW;
        let prefill = Slots { len: slots(&self.prefill), available: &|slot| available(&self.prefill, slot) };
        let decode = Slots { len: slots(&self.decode), available: &|slot| available(&self.decode, slot) };
        answer::check(decision, prefix_blocks, &prefill, &decode)
    }

    /// Whether scores fit what the policy was told.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_scores(&self, scores: &[f32]) -> Result<(), Invalid> {
        answer::check_scores(scores, self.prefill.len() / ROW)
    }
}

fn empty_rows(slots: u32) -> Vec<f32> {
    let mut rows = vec![0.0; slots as usize * ROW];
    rows.chunks_exact_mut(ROW).enumerate().for_each(|(slot, row)| row[0] = slot as f32);
    rows
}

fn put_rows(table: &mut [f32], rows: &[f32]) {
    for row in rows.chunks_exact(ROW) {
        let at = row[0] as usize * ROW;
        table[at..at + ROW].copy_from_slice(row);
    }
}

/// The second value of a row of either table.
fn available(table: &[f32], slot: u16) -> bool {
    table.get(usize::from(slot) * ROW + 1).is_some_and(|&value| value == 1.0)
}
