//! What policies are asked about a request.

use super::State;
use crate::conductor::blocks::{Found, fill};
use crate::fleet::Ask;
use crate::prefix_index::Near;
use kvasir_policy::scheduler::{Candidates, Column, Question, Request};

impl State {
    /// What policies are asked about a request for which this was `found`, in a buffer that is used again. `hints` are added
    /// to those of the request.
    pub(in crate::conductor) fn question(
        &self,
        ask: &Ask,
        found: &Found,
        hints: u32,
        now_ms: u64,
        question: &mut Question,
    ) {
        let fleet = &self.fleet;
        let request = fleet.request(ask);
        let session_memo = if ask.session == 0 { 0 } else { self.sessions.get((ask.tenant, ask.session)) };
        let tenant_memo = self.tenants.get(ask.tenant);
        let request = Request { hints: request.hints | hints, session_memo, tenant_memo, ..request };
        question.begin(fleet.table_time(now_ms), &request, fleet.prefill_slots(), fleet.decode_slots());
        question.add(Column::Prefix, |_, slots| fill(slots, &found.prefill.all));
        if found.prefill.names_tiers {
            for (column, near) in [(Column::PrefixInHbm, Near::Hbm), (Column::PrefixInDram, Near::Dram)] {
                question.add(column, |before, slots| {
                    fill(slots, found.prefill.near(near));
                    before.prefix().is_some()
                });
            }
        }
        let (catalogue, needs) = (&self.catalogue, ask.needs);
        if catalogue.prefill.says_something(needs) {
            question.add(Column::EligiblePrefill, |_, slots| catalogue.prefill.fill(needs, slots));
        }
        if fleet.has_peers() || !found.decode.is_empty {
            question.add(Column::PrefixAtDecode, |before, slots| self.at_decode(found, before, slots));
        }
        if catalogue.decode.says_something(needs) {
            question.add(Column::EligibleDecode, |_, slots| catalogue.decode.fill(needs, slots));
        }
        if found.prefill.names_tiers || found.decode.names_tiers {
            for (column, near) in
                [(Column::PrefixAtDecodeInHbm, Near::Hbm), (Column::PrefixAtDecodeInDram, Near::Dram)]
            {
                question.add(column, |before, slots| self.near_at_decode(near, found, before, slots));
            }
        }
    }

    /// The part that is near by decode slot: of instances that do both as their prefill half has it, which is the same memory.
    /// Returns whether there is such a part.
    fn near_at_decode(&self, near: Near, found: &Found, before: Candidates<'_>, slots: &mut [u32]) -> bool {
        let Some(all) = before.prefix_at_decode() else { return false };
        fill(slots, found.decode.near(near));
        let at_prefill = match near {
            Near::Hbm => before.prefix_in_hbm(),
            Near::Dram => before.prefix_in_dram(),
        };
        for (decode, prefill) in self.fleet.peers() {
            let decode = usize::from(decode);
            let near = |column: &[u32]| column.get(usize::from(prefill)).copied().unwrap_or(0);
            slots[decode] = at_prefill.map_or(all[decode], near);
        }
        at_prefill.is_some() || found.decode.names_tiers
    }

    /// Leading blocks of the chain by decode slot: as told by instances that only decode, and for those that do both what
    /// their prefill half holds, which is the same memory. Returns whether there are any.
    fn at_decode(&self, found: &Found, before: Candidates<'_>, slots: &mut [u32]) -> bool {
        let mut any = fill(slots, &found.decode.all);
        if let Some(prefix) = before.prefix() {
            for (decode, prefill) in self.fleet.peers() {
                let held = prefix.get(usize::from(prefill)).copied().unwrap_or(0);
                any |= held > 0;
                slots[usize::from(decode)] = held;
            }
        }
        any
    }
}
