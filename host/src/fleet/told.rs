//! What a reader of the tables must be told, and what it was told.

mod outlook;
#[cfg(test)]
mod tests;

pub use self::outlook::Outlook;

use super::answer::{self, Slots};
use super::{Fleet, Invalid, Version};
use kvasir_policy::scheduler::{
    Candidates, DECODE_ROW, Decision, DecodeRow, LINK_ROW, Layout, PREFILL_ROW, PrefillRow,
};
use std::collections::BTreeMap;

/// What a reader has to push to its policy instance; rows encoded as in the contract.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// `open` with this first; the rows are all there are.
    pub open: Option<Layout>,
    pub prefill: Vec<f32>,
    pub decode: Vec<f32>,
    pub links: Vec<f32>,
}

/// The tables as one reader was told them last. It decides on this copy, so the lock of the fleet
/// is held for the copying of changed rows only, and an answer can be held against exactly what the
/// policy knew.
#[derive(Clone, Debug, Default)]
pub struct Told {
    version: Version,
    layout: Layout,
    /// One row per slot; those of empty slots are unavailable.
    prefill: Vec<f32>,
    decode: Vec<f32>,
    /// By pairs of domains: a later row of a pair replaces an earlier one.
    links: BTreeMap<(u32, u32), [f32; LINK_ROW]>,
}

impl Told {
    /// Takes over what changed since the last call. Returns `None` if nothing did.
    pub fn catch_up(&mut self, fleet: &Fleet) -> Option<Changes> {
        let changes = fleet.changes_since(&mut self.version)?;
        self.apply(&changes);
        Some(changes)
    }

    /// Takes over changes that another reader was told. Rows of slots outside the tables are skipped.
    pub fn apply(&mut self, changes: &Changes) {
        if let Some(layout) = changes.open {
            self.layout = layout;
            self.links.clear();
            let slots = 0..layout.prefill_slots as u16;
            self.prefill =
                slots.flat_map(|slot| PrefillRow { slot, ..Default::default() }.encode()).collect();
            let slots = 0..layout.decode_slots as u16;
            self.decode = slots.flat_map(|slot| DecodeRow { slot, ..Default::default() }.encode()).collect();
        }
        put_rows(&mut self.prefill, &changes.prefill, PREFILL_ROW);
        put_rows(&mut self.decode, &changes.decode, DECODE_ROW);
        for row in changes.links.as_chunks::<LINK_ROW>().0 {
            self.links.insert((row[0] as u32, row[1] as u32), *row);
        }
    }

    /// Everything, for a policy instance that knows nothing yet.
    pub fn all(&self) -> Changes {
        Changes {
            open: Some(self.layout),
            prefill: self.prefill.clone(),
            decode: self.decode.clone(),
            links: self.links.values().flatten().copied().collect(),
        }
    }

    /// What an instance that knows these tables must be told to know those of `other`. `None` means nothing.
    pub fn changes_to(&self, other: &Self) -> Option<Changes> {
        if self.layout != other.layout {
            return Some(other.all());
        }
        let links = other.links.iter().filter(|(path, row)| self.links.get(path) != Some(row));
        let changes = Changes {
            open: None,
            prefill: changed_rows(&self.prefill, &other.prefill, PREFILL_ROW),
            decode: changed_rows(&self.decode, &other.decode, DECODE_ROW),
            links: links.flat_map(|(_, row)| *row).collect(),
        };
        let Changes { prefill, decode, links, .. } = &changes;
        let nothing = prefill.is_empty() && decode.is_empty() && links.is_empty();
        (!nothing).then_some(changes)
    }

    /// Whether an answer keeps to what the policy was told. `candidates` are those that were given to it.
    ///
    /// # Errors
    /// The reason: the policy is at fault.
    pub fn check(&self, decision: &Decision, candidates: Candidates<'_>) -> Result<(), Invalid> {
        let Layout { prefill_slots, decode_slots, .. } = self.layout;
        let prefill =
            Slots { len: prefill_slots, available: &|slot| available(&self.prefill, slot, PREFILL_ROW) };
        let decode =
            Slots { len: decode_slots, available: &|slot| available(&self.decode, slot, DECODE_ROW) };
        answer::check(decision, candidates, &prefill, &decode)
    }

    /// Whether scores fit what the policy was told.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_scores(&self, scores: &[f32]) -> Result<(), Invalid> {
        answer::check_scores(scores, self.layout.prefill_slots as usize, self.layout.decode_slots as usize)
    }
}

fn changed_rows(from: &[f32], to: &[f32], stride: usize) -> Vec<f32> {
    let rows = to.chunks_exact(stride).zip(from.chunks_exact(stride));
    rows.filter(|(to, from)| to != from).flat_map(|(to, _)| to.iter().copied()).collect()
}

fn put_rows(table: &mut [f32], rows: &[f32], stride: usize) {
    for row in rows.chunks_exact(stride) {
        let at = usize::from(row[0] as u16) * stride;
        if let Some(old) = table.get_mut(at..at + stride) {
            old.copy_from_slice(row);
        }
    }
}

/// The second value of a row of either table.
fn available(table: &[f32], slot: u16, stride: usize) -> bool {
    table.get(usize::from(slot) * stride + 1).is_some_and(|&value| value == 1.0)
}
