//! Analytic cost model: how long prefill, transfer and decode take on an instance.

use super::links::Toll;

/// Time of one prefill, ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillCost {
    pub fixed_ms: f32,
    pub ms_per_token: f32,
    /// Per pair of tokens that attend to each other.
    pub ms_per_pair: f32,
}

impl PrefillCost {
    /// Prefill of `computed` tokens behind a prefix of `cached`: c0 + c1·n + c2·n·(p + n/2).
    pub fn prefill_ms(&self, cached_tokens: u64, computed_tokens: u64) -> f64 {
        let (p, n) = (cached_tokens as f64, computed_tokens as f64);
        let pairs = n * (p + n / 2.0);
        f64::from(self.fixed_ms) + f64::from(self.ms_per_token) * n + f64::from(self.ms_per_pair) * pairs
    }
}

/// Time to fetch a prefix from another instance, ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferCost {
    pub fixed_ms: f32,
    /// Bytes of one block over the rate of an idle link.
    pub ms_per_block: f32,
}

impl TransferCost {
    /// The cost over a link: a block of `block_bytes` over `bytes_per_second`, set up in `fixed_ms`.
    pub fn of_link(block_bytes: u64, bytes_per_second: f64, fixed_ms: f32) -> Self {
        Self { fixed_ms, ms_per_block: (block_bytes as f64 * 1e3 / bytes_per_second) as f32 }
    }

    /// Per block while `active` other transfers share the link evenly.
    pub fn congested_ms_per_block(&self, active: u32) -> f32 {
        self.ms_per_block * (active as f32 + 1.0)
    }

    /// The cost where nothing is known of the way, nor of the sender.
    pub fn transfer_ms(&self, blocks: u32, active: u32) -> f64 {
        Toll::FREE.transfer_ms(self, blocks, active, 0.0)
    }
}

/// Time of one decode step, ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeCost {
    pub fixed_ms: f32,
    pub ms_per_sequence: f32,
    pub ms_per_context_token: f32,
}

impl DecodeCost {
    /// Time between tokens: d0 + d1·b + d2·c.
    pub fn step_ms(&self, sequences: u32, context_tokens: u64) -> f64 {
        f64::from(self.fixed_ms)
            + f64::from(self.ms_per_sequence) * f64::from(sequences)
            + f64::from(self.ms_per_context_token) * context_tokens as f64
    }
}

/// Whether every coefficient is a time: finite and not negative.
pub(super) fn usable(coefficients: &[f32]) -> bool {
    coefficients.iter().all(|c| c.is_finite() && *c >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_the_contract() {
        let prefill = PrefillCost { fixed_ms: 5.0, ms_per_token: 0.5, ms_per_pair: 0.25 };
        assert_eq!(prefill.prefill_ms(0, 0), 5.0);
        assert_eq!(prefill.prefill_ms(8, 4), 5.0 + 2.0 + 0.25 * 4.0 * 10.0);
        let transfer = TransferCost::of_link(1 << 20, (1u64 << 30) as f64, 2.0);
        assert_eq!(transfer.ms_per_block, 1e3 / 1024.0);
        assert_eq!(transfer.transfer_ms(0, 7), 0.0);
        assert_eq!(transfer.transfer_ms(1024, 0), 1002.0);
        assert_eq!(transfer.transfer_ms(1024, 1), 2002.0);
        let decode = DecodeCost { fixed_ms: 10.0, ms_per_sequence: 0.5, ms_per_context_token: 0.125 };
        assert_eq!(decode.step_ms(4, 80), 22.0);
    }
}
