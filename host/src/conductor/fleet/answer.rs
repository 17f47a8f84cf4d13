//! Whether a policy's answer can be acted on.

use super::Invalid;
use kvasir_policy::scheduler::Decision;

/// The longest that a rejected request is told to wait, a day. More is a mistake of unit.
pub const RETRY_MAX_MS: u32 = 24 * 3600 * 1000;

/// Which slots of one table may be chosen.
pub(super) struct Slots<'a> {
    pub(super) len: usize,
    /// Whether an instance stands in that slot and takes requests.
    pub(super) available: &'a dyn Fn(u16) -> bool,
}

impl Slots<'_> {
    fn check(&self, table: &'static str, slot: u16) -> Result<(), Invalid> {
        if usize::from(slot) >= self.len {
            return Err(Invalid::SlotOutside { table, slot, slots: self.len });
        }
        if !(self.available)(slot) {
            return Err(Invalid::Unavailable { table, slot });
        }
        Ok(())
    }
}

/// What a policy says of its scores: one per prefill slot, or none.
///
/// # Errors
/// As [`check`].
pub(super) fn check_scores(scores: &[f32], slots: usize) -> Result<(), Invalid> {
    if !scores.is_empty() && scores.len() != slots {
        return Err(Invalid::Scores { scores: scores.len(), slots });
    }
    let no_order = |&score: &f32| score.is_nan() || score == f32::NEG_INFINITY;
    match scores.iter().position(no_order) {
        Some(slot) => Err(Invalid::Score { slot, score: scores[slot].to_string() }),
        None => Ok(()),
    }
}

/// # Errors
/// The reason, for the count of invalid answers and the log.
pub(super) fn check(
    decision: &Decision,
    prefix_blocks: &[u32],
    prefill_slots: &Slots<'_>,
    decode_slots: &Slots<'_>,
) -> Result<(), Invalid> {
    let (prefill, decode, transfer) = match *decision {
        Decision::Run { prefill, decode, transfer } => (prefill, decode, transfer),
        Decision::Reject { retry_after_ms, .. } if retry_after_ms > RETRY_MAX_MS => {
            return Err(Invalid::RetryTooLong { retry_after_ms });
        }
        Decision::Reject { .. } => return Ok(()),
    };
    prefill_slots.check("prefill", prefill)?;
    decode_slots.check("decode", decode)?;
    let Some(transfer) = transfer else { return Ok(()) };
    if transfer.source == prefill {
        return Err(Invalid::TransferToItself { slot: prefill });
    }
    prefill_slots.check("prefill", transfer.source)?;
    let held = |slot: u16| prefix_blocks.get(usize::from(slot)).copied().unwrap_or(0);
    let beyond = held(transfer.source).saturating_sub(held(prefill));
    if u32::from(transfer.blocks) > beyond {
        let (source_slot, blocks) = (transfer.source, transfer.blocks);
        return Err(Invalid::TransferTooLong { source_slot, blocks, beyond });
    }
    Ok(())
}
