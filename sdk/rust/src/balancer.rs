//! The balancer slot: `balancing` in `wit/policy-0.1/balancer.wit`.

use crate::{Description, Settings};

/// Steers the cluster on control ticks.
pub trait Balancer: Send {
    fn describe(&self) -> Description;

    /// Takes the operator's settings, before the first tick.
    ///
    /// # Errors
    /// A value that cannot be used; the text goes to the operator.
    fn configure(&mut self, _settings: &Settings) -> Result<(), String> {
        Ok(())
    }

    fn tick(&mut self, state: &Snapshot) -> Plan;

    fn export_state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// # Errors
    /// The state cannot be used; the policy starts cold.
    fn import_state(&mut self, _state: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// State of the cluster; columns are one value per slot, negative if the slot is unavailable.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub now_ms: u64,
    pub prefill_queue_ms: Vec<f32>,
    pub decode_step_ms: Vec<f32>,
    pub hit_rate_percent: f32,
    pub rejected: u32,
    pub accepted: u32,
    pub hot: Vec<HotPrefix>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotPrefix {
    pub id: u32,
    pub blocks: u32,
    pub hits: u32,
    pub holders: Vec<u32>,
}

/// One proposed copy operation: 1 replicate, 2 migrate, 3 drop a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    pub kind: u32,
    pub prefix: u32,
    pub source: u32,
    pub target: u32,
}

/// Answer of `tick`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// As [`crate::scheduler::Thresholds`]; empty = keep.
    pub thresholds: Vec<f32>,
    pub actions: Vec<Action>,
}
