//! Whether a policy's answer can be acted on.

use super::Invalid;
use kvasir_policy::scheduler::Decision;

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

/// # Errors
/// The reason, for the count of invalid answers and the log.
pub(super) fn check(
    decision: &Decision,
    prefix_blocks: &[u32],
    prefill_slots: &Slots<'_>,
    decode_slots: &Slots<'_>,
) -> Result<(), Invalid> {
    let &Decision::Run { prefill, decode, transfer } = decision else { return Ok(()) };
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
