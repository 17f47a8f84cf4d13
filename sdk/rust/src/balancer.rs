//! The balancer slot: `balancing` in `wit/policy-0.1/balancer.wit`.

use crate::{Description, Settings};

/// The most thresholds that a tick may answer.
pub const THRESHOLDS_MAX: usize = 64;

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

    /// Thresholds as [`crate::scheduler::Thresholds`] has them; empty = keep.
    fn tick(&mut self, state: &Snapshot) -> Vec<f32>;

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
    /// Since the last tick, like `accepted`; exact up to 2^24.
    pub rejected: u32,
    pub accepted: u32,
    /// What it takes to compute a block in the middle of a mean prompt, and to fetch one from another instance, ms: means of
    /// the available prefill slots; 0 = unknown.
    pub compute_block_ms: f32,
    pub fetch_block_ms: f32,
}

impl Snapshot {
    /// What is said of the cluster as a whole.
    pub fn cluster(&self) -> [f32; 5] {
        let [rejected, accepted] = [self.rejected, self.accepted].map(|count| count as f32);
        [self.hit_rate_percent, rejected, accepted, self.compute_block_ms, self.fetch_block_ms]
    }

    /// What is absent is 0, and further entries are those of a later version.
    pub fn decode(
        now_ms: u64,
        cluster: &[f32],
        prefill_queue_ms: Vec<f32>,
        decode_step_ms: Vec<f32>,
    ) -> Self {
        let at = |i: usize| cluster.get(i).copied().unwrap_or(0.0);
        Self {
            now_ms,
            prefill_queue_ms,
            decode_step_ms,
            hit_rate_percent: at(0),
            rejected: at(1) as u32,
            accepted: at(2) as u32,
            compute_block_ms: at(3),
            fetch_block_ms: at(4),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_survive_encoding_and_may_grow() {
        let (queue, step) = (vec![1.0, -1.0], vec![7.5]);
        let snapshot = Snapshot {
            now_ms: u64::MAX,
            prefill_queue_ms: queue.clone(),
            decode_step_ms: step.clone(),
            hit_rate_percent: 62.5,
            rejected: 3,
            accepted: 1 << 24,
            compute_block_ms: 50.5,
            fetch_block_ms: 0.25,
        };
        let mut cluster = snapshot.cluster().to_vec();
        assert_eq!(Snapshot::decode(u64::MAX, &cluster, queue.clone(), step.clone()), snapshot);
        cluster.push(f32::NAN);
        assert_eq!(Snapshot::decode(u64::MAX, &cluster, queue, step), snapshot);
        assert_eq!(Snapshot::decode(0, &[], Vec::new(), Vec::new()), Snapshot::default());
    }
}
