//! The host's own forecast for a placement, on the tables that a policy was told and without the host.

use super::Told;
use crate::fleet::{Admission, DecodeCost, PrefillCost};
use kvasir_policy::scheduler::{DECODE_ROW, PREFILL_ROW, Placement, Question, Request};

/// What the host forecasts for one placement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outlook {
    pub ttft_ms: f64,
    pub tbt_ms: f64,
    pub cached_tokens: u64,
}

impl From<&Admission> for Outlook {
    fn from(admission: &Admission) -> Self {
        let Admission { ttft_ms, tbt_ms, cached_tokens, .. } = *admission;
        Self { ttft_ms, tbt_ms, cached_tokens: cached_tokens.into() }
    }
}

impl Told {
    /// As [`Fleet::forecast`](super::super::Fleet::forecast) would make it on these tables. Returns `None` if a slot is not in them.
    pub fn outlook(&self, question: &Question, placement: &Placement) -> Option<Outlook> {
        let &[_, _, busy_until, fixed_ms, ms_per_token, ms_per_pair, ..] =
            row::<PREFILL_ROW>(&self.prefill, placement.prefill)?;
        let &[
            _,
            _,
            sequences,
            context,
            _,
            _,
            step_fixed,
            per_sequence,
            per_token,
            arriving,
            arriving_tokens,
            ..,
        ] = row::<DECODE_ROW>(&self.decode, placement.decode)?;
        let prompt = u64::from(Request::decode(question.request_words()).prompt_tokens);
        let own = question.candidates().prefix_of(placement.prefill as usize);
        let fetched = placement.transfer.map_or(0, |transfer| transfer.blocks);
        let held = u64::from(own) + u64::from(fetched);
        let cached = (held * u64::from(self.layout.block_size_tokens)).min(prompt);
        let cost = PrefillCost { fixed_ms, ms_per_token, ms_per_pair };
        let queue_ms = f64::from(busy_until - question.now()).max(0.0);
        let ttft_ms = queue_ms.max(self.fetch_ms(placement)) + cost.prefill_ms(cached, prompt - cached);
        let cost = DecodeCost {
            fixed_ms: step_fixed,
            ms_per_sequence: per_sequence,
            ms_per_context_token: per_token,
        };
        let tbt_ms =
            cost.step_ms((sequences + arriving) as u32 + 1, (context + arriving_tokens) as u64 + prompt);
        Some(Outlook { ttft_ms, tbt_ms, cached_tokens: cached })
    }

    fn fetch_ms(&self, placement: &Placement) -> f64 {
        let Some(transfer) = placement.transfer else { return 0.0 };
        let rows = [transfer.source, placement.prefill].map(|slot| row::<PREFILL_ROW>(&self.prefill, slot));
        let [Some(source), Some(target)] = rows else { return 0.0 };
        let domain = |row: &[f32; PREFILL_ROW]| row[15] as u32;
        let link = self.links.get(&(domain(source), domain(target)));
        let (link_fixed, factor) = link.map_or((0.0, 1.0), |link| (link[2], link[3]));
        let (fixed, per_block) = (target[6], (factor * target[7]).max(source[19]));
        f64::from(link_fixed + fixed) + f64::from(per_block) * f64::from(transfer.blocks)
    }
}

fn row<const N: usize>(table: &[f32], slot: u32) -> Option<&[f32; N]> {
    table.as_chunks::<N>().0.get(slot as usize)
}
