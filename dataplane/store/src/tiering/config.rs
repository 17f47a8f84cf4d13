//! Settings of the traffic between tiers: the section `[tiering]`.

use std::time::Duration;

use crate::config::{ConfigError, at_least_one, positive};
use crate::units;
use serde::{Deserialize, Serialize};

/// What goes down to the tiers below the pool, and comes back up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TieringConfig {
    /// `all`: every block about to be evicted is offered to the nearest tier below, unless the evictor names another.
    /// `policy`: only those for which the evictor names a tier.
    pub offload: Offload,
    /// How many times a block must be used after it was first stored to be offered; a block that was turned away before
    /// and came back counts as used once more. 0 leaves it to the admitter ([`Admit`](super::Admit)) alone.
    pub min_uses: u32,
    /// The most blocks per tier being copied down. A victim that finds the queue full is evicted without a copy.
    pub queue_blocks: u32,
    /// The same in bytes; a quarter of the pool at most, because these cannot be evicted.
    #[serde(with = "units::size")]
    pub queue_bytes: u64,
    /// How long a put waits for victims to be copied down, before half of them go without a copy; half of `store.put_wait` at most. Where that
    /// was in vain, no put waits so for as long; for up to twenty times as long where it is again and again. 0 means that none waits.
    #[serde(with = "units::span")]
    pub backpressure: Duration,
    /// The most memory for blocks being loaded; lookups beyond it are told to try again. Half of it at most is for blocks
    /// that are sent away as they are, and held until their reader has them. Of what they took a quarter of it is kept for the next.
    #[serde(with = "units::size")]
    pub load_bytes: u64,
    /// How long a lookup waits for one tier before the block counts as missing there.
    #[serde(with = "units::span")]
    pub load_timeout: Duration,
    /// How many blocks are remembered as turned away (per tier), and as requested; sixteen times as many as followed by another. 304 B
    /// in total.
    pub recent_blocks: u32,
    /// The most blocks brought up at a time ahead of a reader that walks a chain a few blocks at a time, in two steps: each of as many as it
    /// asks for at once, at least eight, and 16 MiB at most. 0 means none.
    pub read_ahead_blocks: u32,
    /// How long a stopping host may take to copy blocks that only the pool has to the NVMe tier, most used first, to
    /// finish copies, and to make them durable. What is not done then is lost. The caller must keep to this time.
    #[serde(with = "units::span")]
    pub shutdown_timeout: Duration,
}

/// Which victims are offered to the tiers below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    All,
    Policy,
}

impl Default for TieringConfig {
    fn default() -> Self {
        Self {
            offload: Offload::All,
            min_uses: 1,
            queue_blocks: 1024,
            queue_bytes: 256 << 20,
            backpressure: Duration::from_millis(50),
            load_bytes: 256 << 20,
            load_timeout: Duration::from_secs(2),
            recent_blocks: 1 << 16,
            read_ahead_blocks: 256,
            shutdown_timeout: Duration::from_secs(5),
        }
    }
}

impl TieringConfig {
    /// # Errors
    /// The first setting that makes no sense, with its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        at_least_one(&[
            ("tiering.queue_blocks", self.queue_blocks.into()),
            ("tiering.queue_bytes", self.queue_bytes),
            ("tiering.load_bytes", self.load_bytes),
            ("tiering.recent_blocks", self.recent_blocks.into()),
        ])?;
        positive(&[
            ("tiering.load_timeout", self.load_timeout),
            ("tiering.shutdown_timeout", self.shutdown_timeout),
        ])
    }
}
