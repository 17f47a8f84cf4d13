//! Settings as the parts of a host take them.

use super::{Assigned, Checksum, Config};
use crate::policy::{PolicyConfig, Source, Wanted};
use kvasir_dataplane::config::{Floor, TenantConfig};
use kvasir_dataplane::memory::placing::HugePages;
use kvasir_dataplane::{CommitCheck, DramConfig, ServerConfig};
use std::path::{Path, PathBuf};

/// Settings of the pool.
pub(crate) fn dram_config(config: &Config) -> DramConfig {
    let store = &config.store;
    DramConfig {
        pool_bytes: store.pool_bytes.0,
        blocks_max: store.block_slots,
        prefault: store.prefault,
        huge_pages: match store.huge_pages {
            super::HugePages::Auto => HugePages::Auto,
            super::HugePages::Off => HugePages::Off,
            super::HugePages::Require => HugePages::Require,
        },
        numa_node: u32::try_from(store.numa_node).ok(),
        lock_memory: store.lock_memory,
        low_free: store.low_free,
        high_free: store.high_free,
        reserve_max: store.reserve_max as usize,
        put_wait: store.put_wait.0,
        lease_ttl: store.lease_ttl.0,
        lease_grace: store.lease_grace.0,
        leases_max: store.leases_max as usize,
        reservation_ttl: store.reservation_ttl.0,
        block_ttl: Some(store.block_ttl.0).filter(|ttl| !ttl.is_zero()),
        commit_check: match store.checksum {
            Checksum::Trust => CommitCheck::Trust,
            Checksum::Verify => CommitCheck::Verify,
        },
        events_max: store.events_max as usize,
        pin_share: store.pin_share,
        pin_max: store.pin_max.0,
        pin_half_life: store.pin_half_life.0,
        tenants: store.tenants.iter().map(tenant_config).collect(),
        hash_seed: crate::seed::random(),
    }
}

fn tenant_config(tenant: &super::Tenant) -> TenantConfig {
    let bytes = |size: Option<super::Size>| size.map(|size| size.0);
    TenantConfig {
        tenant: tenant.tenant,
        quota_bytes: bytes(tenant.quota_bytes),
        floor: match tenant.weight {
            Some(weight) => Floor::Weight(weight),
            None => Floor::Bytes(bytes(tenant.floor_bytes).unwrap_or(0)),
        },
        pin_quota_bytes: bytes(tenant.pin_quota_bytes),
    }
}

/// Settings of the data server.
pub(crate) fn server_config(config: &Config) -> ServerConfig {
    let store = &config.store;
    ServerConfig {
        connections_max: store.connections_max as usize,
        stall_timeout: store.stall_timeout.0,
        idle_timeout: store.idle_timeout.0,
        payload_max: store.payload_max.0,
        ..ServerConfig::default()
    }
}

/// Limits of the policy host. `data_dir` also keeps the compiled code; `slots` are those of the pool.
pub(crate) fn policy_config(config: &Config, data_dir: &Path, slots: u32) -> PolicyConfig {
    let policy = &config.policy;
    PolicyConfig {
        watch_dir: Some(policy.dir.clone()).filter(|dir| !dir.as_os_str().is_empty()),
        cache_dir: policy.compile_cache.then(|| data_dir.join("compiled")),
        hot_deadline: policy.hot_deadline.0,
        cold_deadline: policy.cold_deadline.0,
        memory_bytes: policy.memory_bytes.0 as usize,
        evictor_slots: slots,
        instances: instances(config.conductor.workers),
        max_module_bytes: policy.component_bytes_max.0,
        breaker_faults: policy.breaker_faults,
        breaker_window: policy.breaker_window.0,
    }
}

/// The policies that serve where nothing is stored.
pub(crate) fn wanted(config: &Config) -> Wanted {
    let policy = &config.policy;
    let mut wanted = Wanted::default();
    let pairs = [
        (&policy.scheduler, &mut wanted.scheduler),
        (&policy.evictor, &mut wanted.evictor),
        (&policy.admitter, &mut wanted.admitter),
        (&policy.balancer, &mut wanted.balancer),
    ];
    for (assigned, (source, settings)) in pairs {
        if Assigned::is_path(&assigned.source) {
            *source = Source::File(PathBuf::from(&assigned.source));
        } else if !assigned.source.is_empty() {
            *source = Source::Builtin(assigned.source.clone());
        }
        *settings = assigned.settings.clone().into_iter().collect();
    }
    wanted
}

/// A scheduler and an admitter per worker, and a few more of each slot: of the version in service, of the one
/// that follows it, and of that one again with the state it takes over.
fn instances(workers: u32) -> u32 {
    3 * (2 * workers + 4)
}
