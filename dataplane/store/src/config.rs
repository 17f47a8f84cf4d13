//! Settings of the DRAM tier, as code has them and as operators write them in the section `[store]`; and why settings are
//! refused.

use std::fmt::Display;
use std::time::Duration;

use crate::units::{self, Size, Span};
use kvasir_memory::placing::HugePages;
use serde::{Deserialize, Serialize};

/// Which side computes the checksum that a block carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommitCheck {
    /// A checksum that the writer supplies is taken as it is. A wrong one costs that writer's block (the
    /// first verified read drops it), never wrong bytes.
    #[default]
    Trust,
    /// The store reads every block once more at commit and refuses one whose checksum differs.
    Verify,
}

/// Settings of one DRAM pool. A file has them in a section with others, so keys that none of them has are not refused here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DramConfig {
    /// Memory that holds blocks, rounded up to whole pages. Must fit what the machine has free.
    #[serde(with = "units::size")]
    pub pool_bytes: u64,
    /// The most resident blocks. Each costs about 72 B outside the pool.
    #[serde(rename = "block_slots")]
    pub blocks_max: u32,
    /// Take all memory at start, so that no put waits for a page. Otherwise a thread takes it, 64 MiB ahead of the puts.
    pub prefault: bool,
    /// Pages of 2 MiB for the pool. `auto`: if the system grants them. `off`: never. `require`: the host does not start
    /// without them.
    pub huge_pages: HugePages,
    /// NUMA node to take the pool from; -1: as a rule those of the threads that give it pages.
    pub numa_node: i32,
    /// Lock the pool in memory, so that it is never swapped out. Touches every page at start.
    pub lock_memory: bool,
    /// Free share of the pool below which eviction starts.
    pub low_free: f64,
    /// Free share of the pool at which eviction stops; at least `low_free`.
    pub high_free: f64,
    /// Victims kept ready for puts that find no space.
    pub reserve_max: u32,
    /// How long a put waits for eviction before it fails.
    #[serde(with = "units::span")]
    pub put_wait: Duration,
    /// How long a reader may use a block without asking again.
    #[serde(with = "units::span")]
    pub lease_ttl: Duration,
    /// How much longer the store itself honours a lease, for a reader that began just in time.
    #[serde(with = "units::span")]
    pub lease_grace: Duration,
    /// The most leases held at the same time, 32 B each.
    pub leases_max: u32,
    /// How long a writer may take from reserve to commit.
    #[serde(with = "units::span")]
    pub reservation_ttl: Duration,
    /// How long a block may stay in the pool, used or not. `0s`: until evicted.
    #[serde(with = "units::span")]
    pub block_ttl: Duration,
    /// `trust`: take the writer's checksum, readers verify. `verify`: read every block again at commit.
    #[serde(rename = "checksum")]
    pub commit_check: CommitCheck,
    /// Access events kept for the eviction policy; more hits than this are dropped and counted. At 16 times this the policy
    /// is told to start over from the resident blocks.
    pub events_max: u32,
    /// Share of the pool that a tenant may pin, unless its own entry says otherwise.
    pub pin_share: f64,
    /// The longest a pin lasts.
    #[serde(with = "units::span")]
    pub pin_max: Duration,
    /// The time in which the weight of a soft pin halves.
    #[serde(with = "units::span")]
    pub pin_half_life: Duration,
    /// Quotas and floors, one `[[store.tenants]]` each. Tenants that are not listed share the entry of tenant 0.
    pub tenants: Vec<TenantConfig>,
    /// Mixed into the hash of keys, so that no client can aim at one shard. Any number; pick it at random.
    #[serde(skip)]
    pub hash_seed: u64,
}

impl Default for DramConfig {
    fn default() -> Self {
        Self {
            pool_bytes: 1 << 30,
            blocks_max: 1 << 20,
            prefault: false,
            huge_pages: HugePages::Auto,
            numa_node: -1,
            lock_memory: false,
            low_free: 0.05,
            high_free: 0.10,
            reserve_max: 1024,
            put_wait: Duration::from_millis(100),
            lease_ttl: Duration::from_secs(10),
            lease_grace: Duration::from_secs(1),
            leases_max: 1 << 20,
            reservation_ttl: Duration::from_secs(60),
            block_ttl: Duration::ZERO,
            commit_check: CommitCheck::Trust,
            events_max: 1 << 16,
            pin_share: 0.10,
            pin_max: Duration::from_secs(3600),
            pin_half_life: Duration::from_secs(30),
            tenants: Vec::new(),
            hash_seed: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

/// What one tenant may take of the pool, and what it is promised: while it uses no more than its floor, eviction takes from
/// tenants that use more than theirs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// The number that its connections give, 0 = all tenants without settings.
    pub tenant: u16,
    /// The most bytes its blocks take; beyond that it loses blocks of its own first. If absent: the whole pool.
    #[serde(default, with = "units::size_if_any", skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// What it keeps while others use more than they are promised. If absent: nothing, or a share by `weight`.
    #[serde(default, with = "units::size_if_any", skip_serializing_if = "Option::is_none")]
    pub floor_bytes: Option<u64>,
    /// Instead of `floor_bytes`: its share, among all weights, of what the floors in bytes leave of the pool up to the high
    /// watermark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The most bytes it may have pinned. If absent: `store.pin_share` of the pool.
    #[serde(default, with = "units::size_if_any", skip_serializing_if = "Option::is_none")]
    pub pin_quota_bytes: Option<u64>,
}

/// What a put does if a tier has no space for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnFull {
    /// It ends with `Full`; the caller evicts.
    #[default]
    Refuse,
    /// It waits until the oldest blocks have made room.
    Evict,
}

/// A setting that makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("`{key}` = {value} {why}")]
    Invalid { key: String, value: String, why: String },
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

/// The refusal of a setting: its key, its value as an operator writes it, and the rule that it breaks.
pub fn invalid(key: &str, value: impl Display, why: &str) -> ConfigError {
    ConfigError::Invalid { key: key.to_owned(), value: value.to_string(), why: why.to_owned() }
}

/// # Errors
/// The first of these numbers that is 0.
pub fn at_least_one(settings: &[(&str, u64)]) -> Result<(), ConfigError> {
    let zero = settings.iter().find(|(_, value)| *value == 0);
    zero.map_or(Ok(()), |(key, _)| Err(invalid(key, 0, "must be at least 1")))
}

/// # Errors
/// The first of these times that is zero.
pub fn positive(settings: &[(&str, Duration)]) -> Result<(), ConfigError> {
    let zero = settings.iter().find(|(_, span)| span.is_zero());
    zero.map_or(Ok(()), |(key, span)| Err(invalid(key, Span(*span), "must be more than no time")))
}

/// The policy contract addresses block slots with 28 bits; shards keep an eighth in reserve.
pub const BLOCKS_MAX: u32 = 200_000_000;

impl DramConfig {
    /// # Errors
    /// The first setting that makes no sense, with its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.pool_bytes == 0 {
            return Err(invalid("store.pool_bytes", Size(0), "must be at least 1"));
        }
        at_least_one(&[
            ("store.leases_max", self.leases_max.into()),
            ("store.events_max", self.events_max.into()),
        ])?;
        if !(1..=BLOCKS_MAX).contains(&self.blocks_max) {
            return Err(invalid("store.block_slots", self.blocks_max, &format!("must be 1 to {BLOCKS_MAX}")));
        }
        positive(&[
            ("store.lease_ttl", self.lease_ttl),
            ("store.reservation_ttl", self.reservation_ttl),
            ("store.pin_max", self.pin_max),
            ("store.pin_half_life", self.pin_half_life),
        ])?;
        let low = self.low_free;
        if !(0.0..1.0).contains(&low) {
            return Err(invalid("store.low_free", low, "must be at least 0 and below 1"));
        }
        if !(low..1.0).contains(&self.high_free) {
            let why = format!("must be at least store.low_free ({low}) and below 1");
            return Err(invalid("store.high_free", self.high_free, &why));
        }
        if !(0.0..=1.0).contains(&self.pin_share) {
            return Err(invalid("store.pin_share", self.pin_share, "must be 0 to 1"));
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
        check(|c| c.pool_bytes = 0, "`store.pool_bytes` = 0B must be at least 1");
        check(|c| c.blocks_max = 0, "`store.block_slots` = 0 must be 1 to 200000000");
        check(|c| c.blocks_max = u32::MAX, "must be 1 to 200000000");
        check(|c| c.low_free = 0.5, "store.low_free (0.5)");
        check(|c| c.low_free = f64::NAN, "`store.low_free` = NaN");
        check(|c| c.high_free = 1.0, "`store.high_free` = 1 must be");
    }
}
