//! The admitter slot: `admission` in `wit/policy-0.1/admitter.wit`.

use crate::{Description, Settings};

/// Lets requests into the cluster and blocks into a tier.
pub trait Admitter: Send {
    fn describe(&self) -> Description;

    /// Takes the operator's settings, before the first decision.
    ///
    /// # Errors
    /// A value that cannot be used; the text goes to the operator.
    fn configure(&mut self, _settings: &Settings) -> Result<(), String> {
        Ok(())
    }

    fn update_load(&mut self, _load: &Load) {}

    fn admit_request(&mut self, request: &Ask) -> Verdict;

    /// One answer per block offered to `tier` (1 HBM, 2 DRAM, 3 NVMe, 4 remote).
    fn admit_blocks(&mut self, tier: u32, blocks: Blocks<'_>, answers: &mut Vec<Store>);

    fn export_state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// # Errors
    /// The state cannot be used; the policy starts cold.
    fn import_state(&mut self, _state: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// Load and its forecast (`update-load`).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub prefill_queue_mean_ms: f32,
    pub prefill_queue_least_ms: f32,
    pub decode_step_ms: f32,
    pub decode_step_forecast_ms: f32,
    pub admitted_per_second: f32,
    pub decode_memory_used: f32,
}

impl Load {
    pub fn encode(&self) -> [f32; 6] {
        [
            self.prefill_queue_mean_ms,
            self.prefill_queue_least_ms,
            self.decode_step_ms,
            self.decode_step_forecast_ms,
            self.admitted_per_second,
            self.decode_memory_used,
        ]
    }

    /// Absent values are 0; additional ones are ignored.
    pub fn decode(values: &[f32]) -> Self {
        let value = |i: usize| values.get(i).copied().unwrap_or(0.0);
        Self {
            prefill_queue_mean_ms: value(0),
            prefill_queue_least_ms: value(1),
            decode_step_ms: value(2),
            decode_step_forecast_ms: value(3),
            admitted_per_second: value(4),
            decode_memory_used: value(5),
        }
    }
}

/// A request that asks to enter. Times in ms; SLOs are +infinity if there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub class: u32,
    pub tenant: u32,
    pub priority: u32,
    pub ttft: f32,
    pub tbt: f32,
    pub ttft_slo: f32,
    pub tbt_slo: f32,
    /// Part of the tenant's quota in use, 1 = all of it; without quotas, its part of all tokens in flight.
    pub tenant_share: f32,
}

/// Answer of `admit-request`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    Queue,
    /// `reason` as in [`crate::scheduler::Reason`], below 2^24.
    Reject {
        reason: u32,
        retry_after_ms: u32,
    },
}

impl Verdict {
    pub fn pack(self) -> u64 {
        match self {
            Self::Accept => 0,
            Self::Queue => 1,
            Self::Reject { reason, retry_after_ms } => {
                2 | u64::from(reason & 0x00ff_ffff) << 8 | u64::from(retry_after_ms) << 32
            }
        }
    }

    /// `None` for a verdict the contract does not know.
    pub fn unpack(bits: u64) -> Option<Self> {
        match bits as u8 {
            0 => Some(Self::Accept),
            1 => Some(Self::Queue),
            2 => Some(Self::Reject {
                reason: (bits >> 8) as u32 & 0x00ff_ffff,
                retry_after_ms: (bits >> 32) as u32,
            }),
            _ => None,
        }
    }
}

/// One block offered to a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub class: u16,
    pub uses: u16,
    pub depth: u32,
    pub size_bytes: u32,
    /// Time since it was last offered and not stored; `None` = never.
    pub last_offer_ms: Option<u32>,
}

impl Block {
    pub fn encode(&self) -> [u32; 4] {
        [
            u32::from(self.class) | u32::from(self.uses) << 16,
            self.depth,
            self.size_bytes,
            self.last_offer_ms.unwrap_or(u32::MAX),
        ]
    }
}

/// Blocks offered in one call.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a>(&'a [u32]);

impl<'a> Blocks<'a> {
    /// `words`: whole records of 4; a ragged tail is ignored.
    pub fn new(words: &'a [u32]) -> Self {
        Self(words)
    }

    pub fn iter(&self) -> impl Iterator<Item = Block> + 'a {
        self.0.chunks_exact(4).map(|w| Block {
            class: w[0] as u16,
            uses: (w[0] >> 16) as u16,
            depth: w[1],
            size_bytes: w[2],
            last_offer_ms: (w[3] != u32::MAX).then_some(w[3]),
        })
    }
}

/// What happens to an offered block; the numbers are the contract's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    Skip = 0,
    Store = 1,
    Colder = 2,
}

impl Store {
    /// `None` for an answer the contract does not know.
    pub fn unpack(word: u32) -> Option<Self> {
        [Self::Skip, Self::Store, Self::Colder].get(word as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_survive_packing() {
        let reject = Verdict::Reject { reason: 2, retry_after_ms: u32::MAX };
        for verdict in [Verdict::Accept, Verdict::Queue, reject] {
            assert_eq!(Verdict::unpack(verdict.pack()), Some(verdict));
        }
        assert_eq!(Verdict::unpack(3), None);
        assert_eq!(Store::unpack(2), Some(Store::Colder));
        assert_eq!(Store::unpack(3), None);
        let block = Block { class: 3, uses: 2, depth: 4, size_bytes: 5, last_offer_ms: None };
        assert_eq!(Blocks::new(&block.encode()).iter().collect::<Vec<_>>(), [block]);
    }
}
