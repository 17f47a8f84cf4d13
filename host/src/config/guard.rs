//! When a policy is taken out of service by itself.

use super::{Error, Span, invalid};
use crate::policy::GuardConfig;
use kvasir_dataplane::config::positive;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a policy on trial, or one that came into service a short while ago, may do before it goes. A limit of 0 is off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guard {
    /// How far back the numbers that are judged reach.
    pub window: Span,
    /// Calls, requests or blocks within the window before anything is judged by them.
    pub calls_min: u64,
    /// Largest share of calls that trap; of those that miss their deadline; of those answered outside the contract.
    pub faults_share_max: f64,
    /// Longest p99 of a call, as the clock on the wall has it; off by default, for it depends on what else the machine does.
    pub call_p99_max: Span,
    /// How far the share of blocks that are found stored may be below that of the policy compared with.
    pub hit_rate_fall_max: f64,
    /// How far the share of rejected requests may be above that of the policy compared with.
    pub rejected_rise_max: f64,
    /// For how long a policy that came into service is watched; the one before it is put back if a guard is broken.
    /// 0 means not at all.
    pub watch: Span,
}

impl Default for Guard {
    fn default() -> Self {
        let GuardConfig {
            window,
            calls_min,
            faults_share_max,
            call_p99_max,
            hit_rate_fall_max,
            rejected_rise_max,
            watch,
            every: _,
        } = GuardConfig::default();
        let (window, call_p99_max, watch) = (Span(window), Span(call_p99_max), Span(watch));
        Self {
            window,
            calls_min,
            faults_share_max,
            call_p99_max,
            hit_rate_fall_max,
            rejected_rise_max,
            watch,
        }
    }
}

/// The guards look this many times within a window, and at least once a second.
const LOOKS: u32 = 10;

impl Guard {
    pub(super) fn limits(&self) -> GuardConfig {
        let Self {
            window,
            calls_min,
            faults_share_max,
            call_p99_max,
            hit_rate_fall_max,
            rejected_rise_max,
            watch,
        } = self;
        GuardConfig {
            window: window.0,
            calls_min: *calls_min,
            faults_share_max: *faults_share_max,
            call_p99_max: call_p99_max.0,
            hit_rate_fall_max: *hit_rate_fall_max,
            rejected_rise_max: *rejected_rise_max,
            watch: watch.0,
            every: (window.0 / LOOKS).clamp(Duration::from_millis(10), Duration::from_secs(1)),
        }
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        positive(&[("policy.guard.window", self.window.0)])?;
        if self.calls_min == 0 {
            return Err(invalid("policy.guard.calls_min", 0, "must be at least 1"));
        }
        for (key, share) in [
            ("policy.guard.faults_share_max", self.faults_share_max),
            ("policy.guard.hit_rate_fall_max", self.hit_rate_fall_max),
            ("policy.guard.rejected_rise_max", self.rejected_rise_max),
        ] {
            if !(0.0..=1.0).contains(&share) {
                return Err(invalid(key, share, "must be 0 (off) to 1"));
            }
        }
        Ok(())
    }
}
