//! The load of the cluster, as balancer and admitters are told it.

use super::Placed;
use crate::fleet::Fleet;
use kvasir_policy::admitter::Load;
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::scheduler::{DecodeRow, PrefillRow};
use std::time::Duration;

/// What happened since the last tick.
#[derive(Default)]
pub(super) struct Window {
    placed: u32,
    rejected: u32,
    hit_blocks: u64,
    blocks: u64,
}

impl Window {
    /// Counts a request with `blocks` blocks; `placed` is `None` if it was rejected.
    pub(super) fn count(&mut self, placed: Option<&Placed>, blocks: usize) {
        let Some(placed) = placed else {
            self.rejected += 1;
            return;
        };
        self.placed += 1;
        self.hit_blocks += placed.hit_blocks();
        self.blocks += blocks as u64;
    }
}

pub(super) fn snapshot(fleet: &Fleet, window: &Window, now_ms: u64) -> Snapshot {
    let Window { placed, rejected, hit_blocks, blocks } = *window;
    let (prefill, decode) = fleet.rows();
    let now = fleet.table_time(now_ms);
    let queue = |row: &PrefillRow| if row.available { (row.busy_until - now).max(0.0) } else { -1.0 };
    let step = |row: &DecodeRow| {
        let (b, c) = (row.sequences as f32, row.context_tokens as f32);
        if row.available { row.step_fixed + row.step_per_sequence * b + row.step_per_token * c } else { -1.0 }
    };
    Snapshot {
        now_ms,
        prefill_queue_ms: prefill.iter().map(queue).collect(),
        decode_step_ms: decode.iter().map(step).collect(),
        hit_rate_percent: if blocks == 0 { 0.0 } else { 100.0 * hit_blocks as f32 / blocks as f32 },
        rejected,
        accepted: placed,
    }
}

/// Means over the instances that take requests. A request admitted now reaches decode when the mean prefill
/// queue has passed: that is how far the forecast looks ahead.
pub(super) fn cluster_load(fleet: &Fleet, state: &Snapshot, every: Duration, now_ms: u64) -> Load {
    let available = |column: &[f32]| column.iter().copied().filter(|v| *v >= 0.0).collect::<Vec<_>>();
    let least = |values: &[f32]| values.iter().copied().reduce(f32::min).unwrap_or(0.0);
    let queue = available(&state.prefill_queue_ms);
    let queue_mean = queue.iter().sum::<f32>() / queue.len().max(1) as f32;
    Load {
        prefill_queue_mean_ms: queue_mean,
        prefill_queue_least_ms: least(&queue),
        decode_step_ms: least(&available(&state.decode_step_ms)),
        decode_step_forecast_ms: fleet.decode_step_forecast_ms(queue_mean.into(), now_ms) as f32,
        admitted_per_second: state.accepted as f32 / every.as_secs_f32(),
        decode_memory_used: fleet.decode_memory_used() as f32,
    }
}
