//! Settings of the DRAM tier.

use std::time::Duration;

use kvasir_memory::placing::HugePages;

/// Which side computes the checksum that a block carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CommitCheck {
    /// A checksum that the writer supplies is taken as it is. A wrong one costs that writer's block (the
    /// first verified read drops it), never wrong bytes.
    #[default]
    Trust,
    /// The store reads every block once more at commit and refuses one whose checksum differs.
    Verify,
}

/// Settings of one DRAM pool.
#[derive(Clone, Debug, PartialEq)]
pub struct DramConfig {
    /// Bytes of the pool. Default 1 GiB. Rounded up to whole pages; must fit the machine's available memory.
    pub pool_bytes: u64,
    /// The most resident blocks. Default 1,048,576. Each costs about 72 B of memory outside the pool.
    pub blocks_max: u32,
    /// Touch every page at start, so that no put waits for a page fault. Default false: start at once.
    pub prefault: bool,
    /// Whether to ask for pages of 2 MiB. Default `Auto`: if the system grants them.
    pub huge_pages: HugePages,
    /// NUMA node to take the pool from. Default `None`: that of the threads that touch it first.
    pub numa_node: Option<u32>,
    /// Lock the pool in memory, so that it is never swapped out. Default false. Touches every page at start.
    pub lock_memory: bool,
    /// Free share of the pool below which eviction starts. Default 0.05.
    pub low_free: f64,
    /// Free share of the pool at which eviction stops. Default 0.10; at least `low_free`.
    pub high_free: f64,
    /// Victims kept ready for puts that find no space. Default 1,024.
    pub reserve_max: usize,
    /// How long a put waits for eviction before it fails with `PoolFull`. Default 100 ms.
    pub put_wait: Duration,
    /// How long a reader may use a block without asking again. Default 10 s.
    pub lease_ttl: Duration,
    /// How much longer the store itself honours a lease, for a reader that began just in time. Default 1 s.
    pub lease_grace: Duration,
    /// The most leases held at once. Default 1,048,576 (32 B each).
    pub leases_max: usize,
    /// How long a writer may take from reserve to commit. Default 60 s.
    pub reservation_ttl: Duration,
    /// How long a block may stay resident, used or not. Default `None`: until evicted.
    pub block_ttl: Option<Duration>,
    /// Which side computes checksums at commit. Default `Trust`.
    pub commit_check: CommitCheck,
    /// Access events kept for the eviction policy; hits above this are dropped and counted. Default 65,536.
    /// At 16 times this the policy is told to start over from the resident blocks.
    pub events_max: usize,
    /// Settings of tenants; those not listed share the entry of tenant 0. Default none: no quotas, no floors.
    pub tenants: Vec<TenantConfig>,
    /// Share of the pool that a tenant may pin, unless it has a quota of its own. Default 0.10.
    pub pin_share: f64,
    /// The longest a pin lasts. Default 1 h.
    pub pin_max: Duration,
    /// The time in which the weight of a soft pin halves. Default 30 s.
    pub pin_half_life: Duration,
    /// Mixed into the hash of keys, so that no client can aim at one shard. Any number; pick it at random.
    pub hash_seed: u64,
}

impl Default for DramConfig {
    fn default() -> Self {
        Self {
            pool_bytes: 1 << 30,
            blocks_max: 1 << 20,
            prefault: false,
            huge_pages: HugePages::Auto,
            numa_node: None,
            lock_memory: false,
            low_free: 0.05,
            high_free: 0.10,
            reserve_max: 1024,
            put_wait: Duration::from_millis(100),
            lease_ttl: Duration::from_secs(10),
            lease_grace: Duration::from_secs(1),
            leases_max: 1 << 20,
            reservation_ttl: Duration::from_secs(60),
            block_ttl: None,
            commit_check: CommitCheck::Trust,
            events_max: 1 << 16,
            tenants: Vec::new(),
            pin_share: 0.10,
            pin_max: Duration::from_secs(3600),
            pin_half_life: Duration::from_secs(30),
            hash_seed: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

/// What one tenant may take of a pool, and what it is promised.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TenantConfig {
    /// The number that its connections give, 0 = all tenants without settings.
    pub tenant: u16,
    /// The most bytes its blocks occupy; beyond that it loses blocks of its own first. Default `None`: the pool.
    pub quota_bytes: Option<u64>,
    /// What it keeps while others use more than they are promised. Default `None`.
    pub floor: Floor,
    /// The most bytes it may have pinned. Default `None`: `pin_share` of the pool.
    pub pin_quota_bytes: Option<u64>,
}

/// What a tenant is promised: while it uses no more than this, eviction takes from tenants that use more than theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floor {
    Bytes(u64),
    /// A share, in proportion to all weights, of what floors in bytes leave of the pool up to the high watermark.
    Weight(u32),
}

impl Default for Floor {
    fn default() -> Self {
        Self::Bytes(0)
    }
}

/// A setting that makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("{name} is 0; it must be at least 1")]
    Zero { name: &'static str },
    #[error("{name} is {value}; the most is {max}")]
    TooLarge { name: &'static str, value: u64, max: u64 },
    #[error("watermarks must satisfy 0 <= low_free <= high_free < 1; low_free is {low}, high_free is {high}")]
    Watermarks { low: f64, high: f64 },
    #[error("store.pin_share is {share}; it must be 0 to 1")]
    PinShare { share: f64 },
    #[error("tenant {tenant} is listed twice in store.tenants; merge its entries")]
    TenantTwice { tenant: u16 },
    #[error(
        "tenant {tenant} has a quota of {quota} B and a floor of {floor} B; a quota must be at least 1 B and the floor"
    )]
    Quota { tenant: u16, quota: u64, floor: u64 },
    #[error(
        "{promised} B are promised as floors, but eviction keeps only {keeps} B of the pool filled (store.high_free is \
         {high_free}); lower the floors or enlarge store.pool_bytes"
    )]
    Floors { promised: u64, keeps: u64, high_free: f64 },
}

/// The policy contract addresses block slots with 28 bits; shards keep an eighth in reserve.
pub const BLOCKS_MAX: u32 = 200_000_000;

impl DramConfig {
    /// # Errors
    /// The first setting that makes no sense, with its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let zero = [
            ("store.pool_bytes", self.pool_bytes == 0),
            ("store.block_slots", self.blocks_max == 0),
            ("store.leases_max", self.leases_max == 0),
            ("store.events_max", self.events_max == 0),
            ("store.lease_ttl", self.lease_ttl.is_zero()),
            ("store.pin_max", self.pin_max.is_zero()),
            ("store.pin_half_life", self.pin_half_life.is_zero()),
            ("store.reservation_ttl", self.reservation_ttl.is_zero()),
            ("store.block_ttl", self.block_ttl.is_some_and(|ttl| ttl.is_zero())),
        ];
        if let Some((name, _)) = zero.into_iter().find(|(_, bad)| *bad) {
            return Err(ConfigError::Zero { name });
        }
        if self.blocks_max > BLOCKS_MAX {
            let (value, max) = (self.blocks_max.into(), BLOCKS_MAX.into());
            return Err(ConfigError::TooLarge { name: "store.block_slots", value, max });
        }
        let ordered = 0.0 <= self.low_free && self.low_free <= self.high_free && self.high_free < 1.0;
        if !ordered {
            return Err(ConfigError::Watermarks { low: self.low_free, high: self.high_free });
        }
        if !(0.0..=1.0).contains(&self.pin_share) {
            return Err(ConfigError::PinShare { share: self.pin_share });
        }
        crate::tenants::validate(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_settings_are_named() {
        let check = |change: fn(&mut DramConfig), expected: &str| {
            let mut config = DramConfig::default();
            change(&mut config);
            let message = config.validate().map_or_else(|error| error.to_string(), |()| "fine".into());
            assert!(message.contains(expected), "{message}");
        };
        check(|_| (), "fine");
        check(|c| c.pool_bytes = 0, "store.pool_bytes is 0");
        check(|c| c.blocks_max = 0, "store.block_slots is 0");
        check(|c| c.blocks_max = u32::MAX, "the most is 200000000");
        check(|c| c.block_ttl = Some(Duration::ZERO), "store.block_ttl is 0");
        check(|c| c.low_free = 0.5, "low_free is 0.5");
        check(|c| c.low_free = f64::NAN, "watermarks");
        check(|c| c.high_free = 1.0, "watermarks");
    }
}
