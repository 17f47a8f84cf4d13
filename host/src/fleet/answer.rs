//! Whether a policy's answer can be acted on.

use super::Invalid;
use kvasir_policy::scheduler::{Candidates, Decision, Placement, REASONS, RETRY_MAX_MS};

/// Which slots of one table may be chosen.
pub(super) struct Slots<'a> {
    pub(super) len: u32,
    /// Whether an instance stands in that slot and takes requests.
    pub(super) available: &'a dyn Fn(u16) -> bool,
}

impl Slots<'_> {
    fn check(&self, table: &'static str, slot: u32) -> Result<(), Invalid> {
        match u16::try_from(slot).ok().filter(|_| slot < self.len) {
            None => Err(Invalid::SlotOutside { table, slot, slots: self.len }),
            Some(known) if !(self.available)(known) => Err(Invalid::Unavailable { table, slot }),
            Some(_) => Ok(()),
        }
    }
}

/// What a policy says of its scores: one per prefill slot, one per slot of both tables, or none.
///
/// # Errors
/// The reason: the policy is at fault.
pub fn check_scores(scores: &[f32], prefill: usize, decode: usize) -> Result<(), Invalid> {
    if ![0, prefill, prefill + decode].contains(&scores.len()) {
        return Err(Invalid::Scores { scores: scores.len(), prefill, decode });
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
    candidates: Candidates<'_>,
    prefill_slots: &Slots<'_>,
    decode_slots: &Slots<'_>,
) -> Result<(), Invalid> {
    let (prefill, decode, transfer) = match *decision {
        Decision::Run(Placement { prefill, decode, transfer, .. }) => (prefill, decode, transfer),
        Decision::Reject { retry_after_ms, .. } if retry_after_ms > RETRY_MAX_MS => {
            return Err(Invalid::RetryTooLong { retry_after_ms });
        }
        Decision::Reject { reason, .. } if !REASONS.contains(&reason) => {
            return Err(Invalid::UnknownReason { reason });
        }
        Decision::Reject { .. } => return Ok(()),
    };
    prefill_slots.check("prefill", prefill)?;
    decode_slots.check("decode", decode)?;
    if !candidates.can_prefill(prefill as usize) {
        return Err(Invalid::Ineligible { table: "prefill", slot: prefill });
    }
    if !candidates.can_decode(decode as usize) {
        return Err(Invalid::Ineligible { table: "decode", slot: decode });
    }
    let Some(transfer) = transfer else { return Ok(()) };
    if transfer.source == prefill {
        return Err(Invalid::TransferToItself { slot: prefill });
    }
    prefill_slots.check("prefill", transfer.source)?;
    let held = |slot: u32| candidates.prefix_of(slot as usize);
    let beyond = held(transfer.source).saturating_sub(held(prefill));
    if transfer.blocks > beyond {
        let (source_slot, blocks) = (transfer.source, transfer.blocks);
        return Err(Invalid::TransferTooLong { source_slot, blocks, beyond });
    }
    Ok(())
}
