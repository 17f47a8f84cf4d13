//! How much of a pool each tenant uses, its quotas and floors, and the labels that name tenant and class in records.
//!
//! Counters are atomics, so that a charge needs no lock; two racing puts of one tenant cannot both take the last of
//! its quota. Whether a tenant is above its floor is read without a lock too: an eviction may judge by a number that
//! is one block old.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::record::LABELS;
use crate::config::{ConfigError, DramConfig, TenantConfig, invalid};
use crate::metrics::TenantMetrics;

/// The most tenants with settings of their own, so that each has at least 16 labels.
const TENANTS_MAX: usize = LABELS / 16 - 1;

/// Dense number of a tenant; 0 = all tenants without settings.
pub(super) type TenantIndex = u16;

struct Tenant {
    id: u16,
    quota: u64,
    floor: u64,
    pin_quota: u64,
    used: AtomicU64,
    pinned: AtomicU64,
    quota_full: AtomicU64,
    floor_kept: AtomicU64,
}

pub(super) struct Tenants {
    by_id: HashMap<u16, TenantIndex>,
    all: Vec<Tenant>,
    /// Per tenant, `share` places for a class + 1, filled from the front; 0 = free.
    classes: Box<[AtomicU32]>,
    share: usize,
}

impl Tenants {
    pub(super) fn new(config: &DramConfig, pool_bytes: u64) -> Self {
        let everyone = TenantConfig::default();
        let configs: Vec<&TenantConfig> = match config.tenants.iter().find(|tenant| tenant.tenant == 0) {
            Some(own) => vec![own],
            None => vec![&everyone],
        };
        let configs: Vec<&TenantConfig> =
            configs.into_iter().chain(config.tenants.iter().filter(|tenant| tenant.tenant != 0)).collect();
        let floors = floors(config, pool_bytes);
        let pins = (pool_bytes as f64 * config.pin_share) as u64;
        let tenant = |config: &&TenantConfig| Tenant {
            id: config.tenant,
            quota: config.quota_bytes.unwrap_or(u64::MAX),
            floor: floors.get(&config.tenant).copied().unwrap_or(0),
            pin_quota: config.pin_quota_bytes.unwrap_or(pins),
            used: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            quota_full: AtomicU64::new(0),
            floor_kept: AtomicU64::new(0),
        };
        let all: Vec<Tenant> = configs.iter().map(tenant).collect();
        Self {
            by_id: all.iter().enumerate().map(|(index, tenant)| (tenant.id, index as TenantIndex)).collect(),
            share: LABELS / all.len(),
            classes: (0..LABELS).map(|_| AtomicU32::new(0)).collect(),
            all,
        }
    }

    /// Tenants without settings share those of tenant 0.
    pub(super) fn index(&self, id: u16) -> TenantIndex {
        self.by_id.get(&id).copied().unwrap_or(0)
    }

    pub(super) fn id(&self, tenant: TenantIndex) -> u16 {
        self.all[usize::from(tenant)].id
    }

    /// The label of (tenant, class). A tenant that uses more classes than there are labels for it has the further
    /// ones stored as class 0, unknown.
    pub(super) fn label(&self, tenant: TenantIndex, class: u16) -> u16 {
        let first = usize::from(tenant) * self.share;
        let wanted = u32::from(class) + 1;
        let own = &self.classes[first..first + self.share];
        // The first place is class 0, whichever class comes first.
        let places = if class == 0 { &own[..1] } else { &own[1..] };
        let skipped = usize::from(class != 0);
        for (at, place) in places.iter().enumerate() {
            let found = place.compare_exchange(0, wanted, Ordering::Relaxed, Ordering::Relaxed);
            if found.is_ok() || found == Err(wanted) {
                return (first + skipped + at) as u16;
            }
        }
        first as u16
    }

    pub(super) fn tenant_of(&self, label: u16) -> TenantIndex {
        (usize::from(label) / self.share) as TenantIndex
    }

    pub(super) fn class_of(&self, label: u16) -> u16 {
        self.classes[usize::from(label)].load(Ordering::Relaxed).saturating_sub(1) as u16
    }

    /// Takes `bytes` from the tenant's quota. Returns how much it uses if they do not fit.
    pub(super) fn charge(&self, tenant: TenantIndex, bytes: u64) -> Result<(), u64> {
        let tenant = &self.all[usize::from(tenant)];
        take(&tenant.used, bytes, tenant.quota)
    }

    pub(super) fn refund(&self, tenant: TenantIndex, bytes: u64) {
        self.all[usize::from(tenant)].used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Takes `bytes` from the tenant's pin quota. Returns whether they fit.
    pub(super) fn charge_pin(&self, tenant: TenantIndex, bytes: u64) -> bool {
        let tenant = &self.all[usize::from(tenant)];
        take(&tenant.pinned, bytes, tenant.pin_quota).is_ok()
    }

    pub(super) fn refund_pin(&self, tenant: TenantIndex, bytes: u64) {
        self.all[usize::from(tenant)].pinned.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn quota(&self, tenant: TenantIndex) -> u64 {
        self.all[usize::from(tenant)].quota
    }

    pub(super) fn count_quota_full(&self, tenant: TenantIndex) {
        self.all[usize::from(tenant)].quota_full.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn is_above_floor(&self, tenant: TenantIndex) -> bool {
        let tenant = &self.all[usize::from(tenant)];
        tenant.used.load(Ordering::Relaxed) > tenant.floor
    }

    /// Whether a block of `tenant` must stay because another tenant uses more than it was promised.
    pub(super) fn is_protected(&self, tenant: TenantIndex) -> bool {
        if self.all.len() == 1 || self.is_above_floor(tenant) {
            return false;
        }
        let others = (0..self.all.len() as TenantIndex).filter(|&other| other != tenant);
        let protected = others.into_iter().any(|other| self.is_above_floor(other));
        self.all[usize::from(tenant)].floor_kept.fetch_add(protected.into(), Ordering::Relaxed);
        protected
    }

    pub(super) fn metrics(&self) -> Vec<TenantMetrics> {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let one = |tenant: &Tenant| TenantMetrics {
            tenant: tenant.id,
            used_bytes: read(&tenant.used),
            pinned_bytes: read(&tenant.pinned),
            quota_bytes: (tenant.quota < u64::MAX).then_some(tenant.quota),
            floor_bytes: tenant.floor,
            quota_full: read(&tenant.quota_full),
            floor_kept: read(&tenant.floor_kept),
        };
        self.all.iter().map(one).collect()
    }
}

/// Adds `bytes` to `used` unless that exceeds `limit`; then returns how much is used.
fn take(used: &AtomicU64, bytes: u64, limit: u64) -> Result<(), u64> {
    let add = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= limit);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map(drop)
}

/// Floors in bytes. Weights share what the pool keeps filled (up to the high watermark) and no byte floor takes.
fn floors(config: &DramConfig, pool_bytes: u64) -> HashMap<u16, u64> {
    let filled = (pool_bytes as f64 * (1.0 - config.high_free)) as u64;
    let promised: u64 = config.tenants.iter().filter_map(|tenant| tenant.floor_bytes).sum();
    let weights: u64 = config.tenants.iter().filter_map(|tenant| tenant.weight).map(u64::from).sum();
    let rest = u128::from(filled.saturating_sub(promised));
    let share = |weight: u32| (rest * u128::from(weight) / u128::from(weights.max(1))) as u64;
    let floor = |tenant: &TenantConfig| tenant.weight.map_or(tenant.floor_bytes.unwrap_or(0), share);
    config.tenants.iter().map(|tenant| (tenant.tenant, floor(tenant))).collect()
}

/// Checks the tenants of a configuration.
///
/// # Errors
/// The first that makes no sense.
pub(crate) fn validate(config: &DramConfig) -> Result<(), ConfigError> {
    if let Some(both) = config.tenants.iter().find(|t| t.floor_bytes.is_some() && t.weight.is_some()) {
        let why = "has floor_bytes and weight; give one of them";
        return Err(invalid("store.tenants.tenant", both.tenant, why));
    }
    let mut seen = std::collections::HashSet::new();
    if let Some(tenant) = config.tenants.iter().find(|tenant| !seen.insert(tenant.tenant)) {
        return Err(ConfigError::TenantTwice { tenant: tenant.tenant });
    }
    if config.tenants.len() > TENANTS_MAX {
        let why = format!("are too many tenants; the most is {TENANTS_MAX}");
        return Err(invalid("store.tenants", config.tenants.len(), &why));
    }
    let promised = config.tenants.iter().filter_map(|tenant| tenant.floor_bytes).fold(0, u64::saturating_add);
    let keeps = (config.pool_bytes as f64 * (1.0 - config.high_free)) as u64;
    if promised > keeps {
        return Err(ConfigError::Floors { promised, keeps, high_free: config.high_free });
    }
    let floors = floors(config, config.pool_bytes);
    let over = |tenant: &&TenantConfig| {
        tenant.quota_bytes.is_some_and(|quota| quota == 0 || quota < floors[&tenant.tenant])
    };
    match config.tenants.iter().find(over) {
        Some(tenant) => Err(ConfigError::Quota {
            tenant: tenant.tenant,
            quota: tenant.quota_bytes.unwrap_or(0),
            floor: floors[&tenant.tenant],
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Floor {
        Bytes(u64),
        Weight(u32),
    }

    fn config(tenants: &[(u16, Option<u64>, Floor)]) -> DramConfig {
        let tenant = |(tenant, quota_bytes, floor): &(u16, Option<u64>, Floor)| {
            let (floor_bytes, weight) = match *floor {
                Floor::Bytes(bytes) => (Some(bytes), None),
                Floor::Weight(weight) => (None, Some(weight)),
            };
            let (tenant, quota_bytes) = (*tenant, *quota_bytes);
            TenantConfig { tenant, quota_bytes, floor_bytes, weight, pin_quota_bytes: None }
        };
        let tenants = tenants.iter().map(tenant).collect();
        DramConfig { pool_bytes: 1000, high_free: 0.1, tenants, ..DramConfig::default() }
    }

    #[test]
    fn weights_share_what_is_not_promised_in_bytes() {
        let config =
            config(&[(7, None, Floor::Bytes(300)), (8, None, Floor::Weight(2)), (9, None, Floor::Weight(1))]);
        assert_eq!(floors(&config, 1000), HashMap::from([(7, 300), (8, 400), (9, 200)]));
        let tenants = Tenants::new(&config, 1000);
        assert_eq!((tenants.index(8), tenants.index(0), tenants.index(5)), (2, 0, 0));
        assert_eq!(tenants.metrics()[1].floor_bytes, 300);
    }

    #[test]
    fn a_floor_holds_while_someone_else_is_above_theirs() {
        let tenants = Tenants::new(&config(&[(1, Some(500), Floor::Bytes(400))]), 1000);
        assert_eq!(tenants.charge(1, 400), Ok(()));
        assert!(!tenants.is_protected(1), "nobody else has anything");
        tenants.charge(0, 1).unwrap();
        assert!(tenants.is_protected(1) && !tenants.is_protected(0));
        tenants.charge(1, 1).unwrap();
        assert!(!tenants.is_protected(1));
        assert_eq!(tenants.charge(1, 100), Err(401));
        assert_eq!(tenants.charge(1, u64::MAX), Err(401));
        tenants.refund(1, 1);
        assert_eq!(tenants.charge(1, 100), Ok(()));
    }

    #[test]
    fn labels_are_a_tenants_own_and_never_run_out() {
        let tenants = Tenants::new(&config(&[(1, None, Floor::Bytes(0)), (2, None, Floor::Bytes(0))]), 1000);
        let label = tenants.label(1, 9);
        assert_eq!((tenants.label(1, 9), tenants.tenant_of(label), tenants.class_of(label)), (label, 1, 9));
        assert_ne!(tenants.label(2, 9), label);
        for class in 0..=u16::MAX {
            let label = tenants.label(2, class);
            assert_eq!(tenants.tenant_of(label), 2);
            assert!([class, 0].contains(&tenants.class_of(label)));
        }
        assert_eq!(
            tenants.class_of(tenants.label(1, 77)),
            77,
            "one tenant's classes do not crowd out another's"
        );
    }

    #[test]
    fn bad_tenants_are_named() {
        let check = |tenants: &[(u16, Option<u64>, Floor)], expected: &str| {
            let message =
                validate(&config(tenants)).map_or_else(|error| error.to_string(), |()| "fine".into());
            assert!(message.contains(expected), "{message}");
        };
        check(&[(1, Some(500), Floor::Bytes(400)), (2, None, Floor::Weight(1))], "fine");
        check(&[(1, None, Floor::Bytes(0)), (1, None, Floor::Bytes(0))], "tenant 1 is listed twice");
        check(&[(1, Some(100), Floor::Bytes(400))], "quota of 100 B and a floor of 400 B");
        check(&[(1, Some(0), Floor::Bytes(0))], "quota of 0 B");
        check(&[(1, None, Floor::Bytes(500)), (2, None, Floor::Bytes(500))], "1000 B are promised");
        let many: Vec<_> = (0..300).map(|tenant| (tenant, None, Floor::Bytes(0))).collect();
        check(&many, "the most is 255");
    }
}
