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
    let mean_tokens = (blocks as f32 / placed.max(1) as f32) * fleet.block_size_tokens() as f32;
    let costs = block_costs(&prefill, fleet.block_size_tokens() as f32, mean_tokens);
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
        compute_block_ms: costs.0,
        fetch_block_ms: costs.1,
    }
}

/// What computing a block in the middle of a prompt of that many tokens takes, and what fetching one takes, ms: means of the available
/// instances, 0 if there is none.
fn block_costs(prefill: &[PrefillRow], block_tokens: f32, prompt_tokens: f32) -> (f32, f32) {
    let available = || prefill.iter().filter(|row| row.available);
    let mean = |of: &dyn Fn(&PrefillRow) -> f32| {
        available().map(of).sum::<f32>() / available().count().max(1) as f32
    };
    let compute =
        |row: &PrefillRow| block_tokens * (row.cost_per_token + row.cost_per_pair * 0.5 * prompt_tokens);
    (mean(&compute), mean(&|row| row.transfer_per_block))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_blocks_cost_is_the_mean_of_who_is_there() {
        let row = |available, cost_per_token, transfer_per_block| PrefillRow {
            available,
            cost_per_token,
            cost_per_pair: 0.001,
            transfer_per_block,
            ..PrefillRow::default()
        };
        let rows = [row(true, 0.1, 10.0), row(false, 9.0, 900.0), row(true, 0.3, 30.0)];
        // 16 tokens of 0.2 ms, and half of the pairs of 1,000 tokens.
        let (compute, fetch) = block_costs(&rows, 16.0, 1_000.0);
        assert!((compute - 16.0 * (0.2 + 0.5)).abs() < 1e-4 && fetch == 20.0, "{compute} {fetch}");
        assert_eq!(block_costs(&rows[1..2], 16.0, 0.0), (0.0, 0.0));
    }
}
