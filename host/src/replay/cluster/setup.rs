//! What a simulated cluster consists of.

use super::super::pool;
use super::super::profile::Profile;
use super::super::trace::BLOCK_SIZE_TOKENS;
use crate::conductor::Registration;
use crate::config::Link;
use crate::fleet::{DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};

/// Costs of one instance, roughly an 8-GPU node serving a 70B model (Mooncake, FAST '25, §5): 30 ms + 45 µs a
/// token + quadratic attention; 512-token blocks of 160 MiB over 4 × 200 Gbit/s.
pub const PREFILL: PrefillCost = PrefillCost { fixed_ms: 30.0, ms_per_token: 0.045, ms_per_pair: 2e-6 };
const BLOCK_BYTES: u64 = 160 << 20;
pub const TRANSFER: TransferCost = TransferCost { fixed_ms: 2.0, ms_per_block: 1.7 };
const LAYERS: u32 = 80;
pub const DECODE: DecodeCost =
    DecodeCost { fixed_ms: 20.0, ms_per_sequence: 0.15, ms_per_context_token: 5e-5 };

/// The most instances of a simulated cluster.
pub const INSTANCES_MAX: u32 = 1_024;
/// How much faster or slower than it was recorded a trace may run.
const SPEEDS: std::ops::RangeInclusive<f64> = 1e-3..=1e3;
/// The most racks: there is a link in each direction between any two.
const RACKS_MAX: u32 = 32;
const CHUNKS: std::ops::RangeInclusive<u32> = 16..=1 << 20;
const TICKS_MS: std::ops::RangeInclusive<u64> = 10..=600_000;

/// Why a cluster cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(
        "{prefill} prefill, {decode} decode and {both} instances that do both: each request needs one of each role, and \
         there may be {INSTANCES_MAX} in total"
    )]
    Instances { prefill: u32, decode: u32, both: u32 },
    #[error("speed {0} is outside {min} to {max}", min = SPEEDS.start(), max = SPEEDS.end())]
    Speed(f64),
    #[error("a tick of {0} ms is outside {min} to {max}", min = TICKS_MS.start(), max = TICKS_MS.end())]
    Tick(u64),
    #[error("{0} racks: there may be 1 to {RACKS_MAX}")]
    Racks(u32),
    #[error("racks that are oversubscribed {0} times: 1 to 1000 times can be simulated")]
    Oversubscription(f64),
    #[error("chunks of {0} tokens are outside {min} to {max}; 0 computes prompts in one go", min = CHUNKS.start(), max = CHUNKS.end())]
    Chunks(u32),
    #[error("prompts are computed in chunks by instances that do both, and there are none")]
    NoneInChunks,
    #[error("decode memory of 0 blocks holds no request; give 1 or more")]
    DecodeMemory,
    #[error("prefill pools: {0}")]
    Pool(pool::Error),
}

/// A cluster of like instances.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// What the costs are those of.
    pub instance: String,
    /// Instances that do prefill only, decode only, and both.
    pub prefill: u32,
    pub decode: u32,
    pub both: u32,
    /// Prefix cache of an instance that does prefill, blocks.
    pub pool_blocks: u32,
    /// Tokens in a block of the trace.
    pub block_size_tokens: u32,
    pub block_bytes: u64,
    /// KV memory for the batch of an instance that decodes, blocks.
    pub decode_blocks: u32,
    pub prefill_cost: PrefillCost,
    pub decode_cost: DecodeCost,
    /// Tokens of a step of an instance that does both, of which prompts have what the batch leaves. 0: prompts are computed in one go,
    /// and the batch stands still.
    pub chunk_tokens: u32,
    /// Cost of a prefix that is fetched, and of a request that is handed over, by itself.
    pub transfer: TransferCost,
    /// Layers of the model, and whether hand-overs go on layer by layer while prompts are computed.
    pub layers: u32,
    pub layer_wise: bool,
    /// Instances are spread over so many, those of each role in turn.
    pub racks: u32,
    /// Of a rack: what its instances can send or receive together, beside what it can send to or receive from others.
    pub oversubscription: f64,
    /// What each request asks for, ms; +infinity = nothing.
    pub ttft_slo_ms: f32,
    pub tbt_slo_ms: f32,
    /// Whether instances that decode turn away who comes from prefill and would make their steps longer than that.
    pub check_at_decode: bool,
    /// Seconds of the trace per second of the simulation.
    pub speed: f64,
    /// Between reports of the instances, and between ticks of the balancer.
    pub tick_ms: u64,
    /// Seed of the chance that requests bring to policies.
    pub seed: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            instance: "about a 70B model on 8 GPUs".to_owned(),
            prefill: 4,
            decode: 4,
            both: 0,
            // About 1 TB of DRAM, and what the weights leave of 8 × 80 GB of HBM.
            pool_blocks: 6_000,
            decode_blocks: 3_000,
            block_size_tokens: BLOCK_SIZE_TOKENS,
            block_bytes: BLOCK_BYTES,
            prefill_cost: PREFILL,
            decode_cost: DECODE,
            chunk_tokens: 0,
            transfer: TRANSFER,
            layers: LAYERS,
            layer_wise: false,
            racks: 1,
            oversubscription: 1.0,
            // As the Mooncake paper has them.
            ttft_slo_ms: 30_000.0,
            tbt_slo_ms: 100.0,
            check_at_decode: false,
            speed: 1.0,
            tick_ms: 1_000,
            seed: 1,
        }
    }
}

/// What one instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) prefill: bool,
    pub(super) decode: bool,
}

impl Setup {
    /// The default with blocks of `block_size_tokens`: the same memory in tokens, the same time for the same bytes.
    pub fn of_blocks(block_size_tokens: u32) -> Self {
        let default = Self::default();
        let parts = f64::from(BLOCK_SIZE_TOKENS) / f64::from(block_size_tokens.max(1));
        let blocks = |usual: u32| ((f64::from(usual) * parts).round() as u32).max(1);
        let ms_per_block = (f64::from(default.transfer.ms_per_block) / parts) as f32;
        Self {
            pool_blocks: blocks(default.pool_blocks),
            decode_blocks: blocks(default.decode_blocks),
            transfer: TransferCost { ms_per_block, ..default.transfer },
            block_size_tokens,
            block_bytes: (BLOCK_BYTES as f64 / parts) as u64,
            ..default
        }
    }

    /// The default with instances of this kind.
    pub fn of_profile(profile: &Profile, block_size_tokens: u32) -> Self {
        Self {
            instance: profile.name.clone(),
            pool_blocks: profile.host_blocks(block_size_tokens),
            decode_blocks: profile.gpu_blocks(block_size_tokens),
            block_size_tokens,
            block_bytes: profile.block_bytes(block_size_tokens) as u64,
            prefill_cost: profile.prefill(),
            decode_cost: profile.decode(),
            transfer: profile.transfer(block_size_tokens),
            layers: profile.model.layers(),
            ..Self::default()
        }
    }

    /// # Errors
    /// The first value that cannot be simulated.
    pub fn check(&self) -> Result<(), SetupError> {
        let &Self { prefill, decode, both, .. } = self;
        let total = u64::from(prefill) + u64::from(decode) + u64::from(both);
        let complete = both > 0 || (prefill > 0 && decode > 0);
        if !complete || total > u64::from(INSTANCES_MAX) {
            return Err(SetupError::Instances { prefill, decode, both });
        }
        if !SPEEDS.contains(&self.speed) {
            return Err(SetupError::Speed(self.speed));
        }
        if !TICKS_MS.contains(&self.tick_ms) {
            return Err(SetupError::Tick(self.tick_ms));
        }
        if !(1..=RACKS_MAX).contains(&self.racks) {
            return Err(SetupError::Racks(self.racks));
        }
        if !(1.0..=1e3).contains(&self.oversubscription) {
            return Err(SetupError::Oversubscription(self.oversubscription));
        }
        if self.chunk_tokens > 0 && !CHUNKS.contains(&self.chunk_tokens) {
            return Err(SetupError::Chunks(self.chunk_tokens));
        }
        if self.chunk_tokens > 0 && both == 0 {
            return Err(SetupError::NoneInChunks);
        }
        if self.decode_blocks == 0 {
            return Err(SetupError::DecodeMemory);
        }
        pool::check_capacity(self.pool_blocks).map_err(SetupError::Pool)
    }

    /// Instances with a prefix cache.
    pub fn pools(&self) -> u32 {
        self.prefill + self.both
    }

    /// Name, role and rack of each instance.
    pub(super) fn instances(&self) -> impl Iterator<Item = (String, Role, u32)> {
        let roles = [
            ("prefill", self.prefill, Role { prefill: true, decode: false }),
            ("decode", self.decode, Role { prefill: false, decode: true }),
            ("both", self.both, Role { prefill: true, decode: true }),
        ];
        let racks = self.racks;
        roles.into_iter().flat_map(move |(name, count, role)| {
            (0..count).map(move |n| (format!("{name}-{n}"), role, n % racks))
        })
    }

    /// What blocks take on their way if nothing else is, without what is fixed.
    pub(super) fn alone_ms(&self, blocks: u32) -> f64 {
        f64::from(self.transfer.ms_per_block) * f64::from(blocks)
    }

    /// What policies are told of the ways between racks: the rate of one transfer by itself, and how many have it beside each other.
    pub(super) fn links(&self) -> Vec<Link> {
        let mut instances = vec![0_u32; self.racks as usize];
        self.instances().for_each(|(.., rack)| instances[rack as usize] += 1);
        let ports = |rack: u32| f64::from(instances[rack as usize]) / self.oversubscription;
        let pairs = (0..self.racks).flat_map(|from| (0..self.racks).map(move |to| (from, to)));
        let link = |(from, to): (u32, u32)| {
            let ports = ports(from).min(ports(to));
            Link {
                from: domain(from),
                to: domain(to),
                fixed_ms: 0.0,
                factor: (1.0 / ports).max(1.0) as f32,
                parallel: (ports as u32).max(1),
            }
        };
        let between = |&(from, to): &(u32, u32)| from != to && ports(from) > 0.0 && ports(to) > 0.0;
        pairs.filter(between).map(link).collect()
    }

    pub(super) fn registration(&self, role: Role, rack: u32) -> Registration {
        let prefill = PrefillSpec {
            cost: self.prefill_cost,
            transfer: self.transfer,
            capacity_blocks: self.pool_blocks,
        };
        let decode = DecodeSpec {
            cost: self.decode_cost,
            handover: self.transfer,
            capacity_blocks: self.decode_blocks,
        };
        Registration {
            prefill: role.prefill.then_some(prefill),
            decode: role.decode.then_some(decode),
            domain: domain(rack),
            ..Registration::default()
        }
    }
}

fn domain(rack: u32) -> String {
    format!("rack-{rack}")
}
