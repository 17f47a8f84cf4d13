//! The admitter slot: `admission` in `wit/policy-0.1/admitter.wit`.

pub use crate::request::Request;
use crate::{Description, Settings};

/// Words in one record of [`Block::encode`].
pub const BLOCK_WORDS: usize = 5;

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

    /// Whether a request may enter on the placement that `forecast` is about.
    fn admit_request(&mut self, request: &Request, forecast: &Forecast) -> Verdict;

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

/// What the host expects of a request on the placement that the scheduler chose. Times in ms.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    pub ttft: f32,
    pub tbt: f32,
    /// Part of the tenant's quota in use, 1 = all of it; without quotas, its part of all tokens in flight.
    pub tenant_share: f32,
    /// Time in the queue; it passes together with the transfer.
    pub queue: f32,
    pub prefill: f32,
    pub transfer: f32,
    /// Prompt tokens that need not be computed.
    pub cached_tokens: f32,
    /// From prefill to decode; no part of the TTFT.
    pub handover: f32,
}

impl Forecast {
    pub fn encode(&self) -> [f32; 8] {
        [
            self.ttft,
            self.tbt,
            self.tenant_share,
            self.queue,
            self.prefill,
            self.transfer,
            self.cached_tokens,
            self.handover,
        ]
    }

    /// Absent values are 0; additional ones are ignored.
    pub fn decode(values: &[f32]) -> Self {
        let value = |i: usize| values.get(i).copied().unwrap_or(0.0);
        Self {
            ttft: value(0),
            tbt: value(1),
            tenant_share: value(2),
            queue: value(3),
            prefill: value(4),
            transfer: value(5),
            cached_tokens: value(6),
            handover: value(7),
        }
    }
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
    pub tenant: u32,
}

impl Block {
    pub fn encode(&self) -> [u32; BLOCK_WORDS] {
        [
            u32::from(self.class) | u32::from(self.uses) << 16,
            self.depth,
            self.size_bytes,
            self.last_offer_ms.unwrap_or(u32::MAX),
            self.tenant,
        ]
    }
}

/// Blocks offered in one call.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    stride: usize,
    words: &'a [u32],
}

impl<'a> Blocks<'a> {
    /// `words`: whole records of `stride`; a ragged tail is ignored.
    pub fn new(stride: u32, words: &'a [u32]) -> Self {
        Self { stride: stride.max(1) as usize, words }
    }

    pub fn len(&self) -> usize {
        self.words.len() / self.stride
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Words that a record lacks are 0.
    pub fn iter(&self) -> impl Iterator<Item = Block> + 'a {
        self.words.chunks_exact(self.stride).map(|record| {
            let word = |at: usize| record.get(at).copied().unwrap_or(0);
            Block {
                class: word(0) as u16,
                uses: (word(0) >> 16) as u16,
                depth: word(1),
                size_bytes: word(2),
                last_offer_ms: Some(word(3)).filter(|&ms| ms != u32::MAX),
                tenant: word(4),
            }
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
        let block = Block { class: 3, uses: 2, depth: 4, size_bytes: 5, last_offer_ms: None, tenant: 6 };
        for more in [0, 3] {
            let record = [&block.encode()[..], &vec![7; more]].concat();
            let words = [&record[..], &record, &[1]].concat();
            let blocks = Blocks::new((BLOCK_WORDS + more) as u32, &words);
            assert_eq!((blocks.iter().collect::<Vec<_>>(), blocks.len()), (vec![block; 2], 2), "{more} more");
        }
        let least = Block { class: 9, uses: 0, depth: 0, size_bytes: 0, last_offer_ms: Some(0), tenant: 0 };
        assert_eq!(Blocks::new(0, &[9]).iter().collect::<Vec<_>>(), [least]);
    }

    #[test]
    fn forecasts_survive_their_values() {
        let forecast = Forecast {
            ttft: 1.0,
            tbt: 2.0,
            tenant_share: 3.0,
            queue: 4.0,
            prefill: 5.0,
            transfer: 6.0,
            cached_tokens: 7.0,
            handover: 8.0,
        };
        let values = forecast.encode();
        assert_eq!(Forecast::decode(&values), forecast);
        assert_eq!(Forecast::decode(&[&values[..], &[9.0]].concat()), forecast, "a later host says more");
        assert_eq!(Forecast::decode(&values[..7]), Forecast { handover: 0.0, ..forecast });
    }
}
