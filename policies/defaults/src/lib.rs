//! The default policies: each as a component, embedded, and as its native twin.
//!
//! Both come from one source, so the twin is the same algorithm without the boundary; parity tests
//! pin them to each other. The host falls back to the twins.

use kvasir_policy::{Admitter, Balancer, Evictor, Scheduler};

/// A default policy: name as in `kvasir policy load`, component bytes, native constructor.
pub struct Default<T: ?Sized + 'static> {
    pub name: &'static str,
    pub component: &'static [u8],
    pub native: fn() -> Box<T>,
}

macro_rules! defaults {
    ($slot:ty: $($name:literal, $file:literal, $policy:ty;)*) => {
        &[$(Default {
            name: $name,
            component: include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".wasm")),
            native: || Box::<$policy>::default(),
        }),*]
    };
}

/// Schedulers; the first is the default.
pub static SCHEDULERS: &[Default<dyn Scheduler>] = defaults! { dyn Scheduler:
    "mooncake", "mooncake-scheduler", mooncake_scheduler::Mooncake;
    "round-robin", "round-robin-scheduler", round_robin_scheduler::RoundRobin;
    "random", "random-scheduler", random_scheduler::Random;
    "netkv", "netkv-scheduler", netkv_scheduler::NetKv;
    "overlap-cost", "overlap-cost-scheduler", overlap_cost_scheduler::OverlapCost;
    "score", "score-scheduler", score_scheduler::Score;
    "vtc", "vtc-scheduler", vtc_scheduler::Vtc;
    "pick", "pick-scheduler", pick_scheduler::Pick;
    "fitted-cost", "fitted-cost-scheduler", fitted_cost_scheduler::FittedCost;
    "lora-affinity", "lora-affinity-scheduler", lora_affinity_scheduler::LoraAffinity;
    "local-cache-aware", "local-cache-aware-scheduler", local_cache_aware_scheduler::LocalCacheAware;
    "local-or-remote", "local-or-remote-scheduler", local_or_remote_scheduler::LocalOrRemote;
    "lbgr", "lbgr-scheduler", lbgr_scheduler::Lbgr;
    "affinity", "affinity-scheduler", affinity_scheduler::Affinity;
};

/// Evictors; the first is the default.
pub static EVICTORS: &[Default<dyn Evictor>] = defaults! { dyn Evictor:
    "workload-aware", "workload-aware-evictor", workload_aware_evictor::WorkloadAware;
    "kvasir", "kvasir-evictor", kvasir_evictor::Kvasir;
    "lru", "lru-evictor", lru_evictor::Lru;
    "fifo", "fifo-evictor", fifo_evictor::Fifo;
    "lfu", "lfu-evictor", lfu_evictor::Lfu;
    "sieve", "sieve-evictor", sieve_evictor::Sieve;
    "s3fifo", "s3fifo-evictor", s3fifo_evictor::S3Fifo;
    "arc", "arc-evictor", arc_evictor::Arc;
    "gdsf", "gdsf-evictor", gdsf_evictor::Gdsf;
    "lhd", "lhd-evictor", lhd_evictor::Lhd;
    "rlt", "rlt-evictor", rlt_evictor::Rlt;
};

/// Admitters; the first is the default.
pub static ADMITTERS: &[Default<dyn Admitter>] = defaults! { dyn Admitter:
    "slo", "slo-admitter", slo_admitter::Slo;
    "early-rejection", "early-rejection-admitter", early_rejection_admitter::EarlyRejection;
};

/// Balancers; the first is the default.
pub static BALANCERS: &[Default<dyn Balancer>] = defaults! { dyn Balancer:
    "static", "static-balancer", static_balancer::Static;
    "adaptive", "adaptive-balancer", adaptive_balancer::Adaptive;
};
