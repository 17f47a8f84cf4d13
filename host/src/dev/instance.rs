//! A simulated engine: a cost model and the time until which it is busy.

use crate::replay::cluster::{DECODE, PREFILL, TRANSFER};
use kvasir_proto as proto;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

/// The cost model for the conductor, which works in real time, so everything is shorter.
pub(super) fn cost_model(speed: f64) -> proto::CostModel {
    let real = |ms: f32| f64::from(ms) / speed;
    proto::CostModel {
        prefill_fixed_ms: real(PREFILL.fixed_ms),
        prefill_per_token_ms: real(PREFILL.ms_per_token),
        prefill_per_pair_ms: real(PREFILL.ms_per_pair),
        transfer_fixed_ms: real(TRANSFER.fixed_ms),
        transfer_per_block_ms: real(TRANSFER.ms_per_block),
        step_fixed_ms: real(DECODE.fixed_ms),
        step_per_sequence_ms: real(DECODE.ms_per_sequence),
        step_per_token_ms: real(DECODE.ms_per_context_token),
        handover_fixed_ms: None,
        handover_per_block_ms: None,
    }
}

/// The prefill and the decode engine of one host.
#[derive(Default)]
pub struct Instance {
    busy_until: Mutex<Option<Instant>>,
    sequences: AtomicU32,
    context_tokens: AtomicU64,
}

impl Instance {
    /// Books a prefill that starts once the engine is free and `ready` has passed. Returns its end, and its time without
    /// the wait.
    pub(super) fn prefill(
        &self,
        ready: Instant,
        cached_tokens: u64,
        computed_tokens: u64,
        speed: f64,
    ) -> (Instant, Duration) {
        let work_ms = PREFILL.prefill_ms(cached_tokens, computed_tokens) / speed;
        let work = Duration::from_secs_f64(work_ms / 1_000.0);
        let mut busy_until = self.busy_until.lock();
        let start = busy_until.map_or(ready, |busy| busy.max(ready));
        let end = start + work;
        *busy_until = Some(end);
        (end, work)
    }

    /// Joins the batch and returns how long the output takes at its present size.
    pub(super) fn join(&self, tokens: u64, output_tokens: u32, speed: f64) -> Duration {
        let sequences = self.sequences.fetch_add(1, Relaxed) + 1;
        let context = self.context_tokens.fetch_add(tokens, Relaxed) + tokens;
        let step_ms = DECODE.step_ms(sequences, context);
        Duration::from_secs_f64(step_ms * f64::from(output_tokens) / 1_000.0 / speed)
    }

    pub(super) fn leave(&self, tokens: u64) {
        self.sequences.fetch_sub(1, Relaxed);
        self.context_tokens.fetch_sub(tokens, Relaxed);
    }
}
