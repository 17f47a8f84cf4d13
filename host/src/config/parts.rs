//! Settings as the parts of a host take them.

use super::Config;
use crate::policy::chain::PARTS_MAX;
use crate::policy::{PolicyConfig, SPARES_MAX, SlotKind, Source, Wanted};
use std::path::{Path, PathBuf};

/// Limits of the policy host. `data_dir` also keeps the compiled code; `slots` are those of the pool.
pub(crate) fn policy_config(config: &Config, data_dir: &Path, slots: u32) -> PolicyConfig {
    let policy = &config.policy;
    PolicyConfig {
        watch_dir: Some(policy.dir.clone()).filter(|dir| !dir.as_os_str().is_empty()),
        trust_file: Some(policy.trust.file.clone()).filter(|file| !file.as_os_str().is_empty()),
        cache_dir: policy.compile_cache.then(|| data_dir.join("compiled")),
        hot_deadline: policy.hot_deadline.0,
        cold_deadline: policy.cold_deadline.0,
        memory_bytes: policy.memory_bytes.0 as usize,
        slot_memory_bytes: SlotKind::ALL.map(|slot| {
            let given = match slot {
                SlotKind::Scheduler => &policy.scheduler,
                SlotKind::Evictor => &policy.evictor,
                SlotKind::Admitter => &policy.admitter,
                SlotKind::Balancer => &policy.balancer,
            };
            Some(given.memory_bytes.0 as usize).filter(|bytes| *bytes > 0)
        }),
        core_instances: policy.core_instances_max,
        evictor_slots: slots,
        instances: instances(config.conductor.workers),
        max_module_bytes: policy.component_bytes_max.0,
        breaker_faults: policy.breaker_faults,
        breaker_window: policy.breaker_window.0,
        guard: policy.guard.limits(),
        ..PolicyConfig::default()
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
        if Source::is_path(&assigned.source) {
            *source = Source::File(PathBuf::from(&assigned.source));
        } else if !assigned.source.is_empty() {
            *source = Source::Builtin(assigned.source.clone());
        }
        *settings = assigned.settings.clone().into_iter().collect();
    }
    wanted
}

/// A scheduler and an admitter per worker, and a few more of each slot, spare ones, learners and ghosts among them: for the
/// version in service, for the one on trial, for the one that follows, and for that one again with the state it takes over. In a
/// chain each part has its own: there is room for one in service and one that follows.
fn instances(workers: u32) -> u32 {
    let chains = 2 * (PARTS_MAX as u32 - 1) * (workers + SPARES_MAX as u32);
    4 * (2 * workers + 6 + 4 * SPARES_MAX as u32) + chains
}
