//! What the conductor does by itself, on each tick: expiry, and the balancer.

use super::Conductor;
use crate::calendar::unix_ms;
use crate::policy::record::{Call, FORMAT, Record, bits};
use crate::policy::{BalancerWorker, PolicyHost, SlotKind};
use kvasir_dataplane::Clock;
use kvasir_policy::balancer::Snapshot;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ticks until `stopped` ends.
pub async fn run(
    conductor: Arc<Conductor>,
    policies: Arc<PolicyHost>,
    clock: Clock,
    every: Duration,
    stopped: impl Future<Output = ()>,
) {
    let mut balancer = policies.balancer_worker();
    let mut ticks = 0;
    let mut every = tokio::time::interval(every);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    tokio::pin!(stopped);
    loop {
        tokio::select! {
            () = &mut stopped => return,
            _ = every.tick() => {}
        }
        let snapshot = conductor.tick(clock.now_ms());
        // The policies may take long; nothing waits for them.
        let shared = Arc::clone(&conductor);
        let asked = tokio::task::spawn_blocking(move || {
            shared.sweep();
            shared.refresh_idle();
            let start = Instant::now();
            let thresholds = balancer.tick(&snapshot);
            ticks += 1;
            if shared.explain().takes(ticks) {
                let ns = start.elapsed().as_nanos() as u64;
                let record = record(&balancer, ticks, &snapshot, &thresholds, ns);
                shared.explain().write(move || Some(record));
            }
            (balancer, thresholds, ticks)
        });
        let Ok((worker, thresholds, number)) = asked.await else { return };
        (balancer, ticks) = (worker, number);
        policies.set_thresholds(thresholds);
    }
}

fn record(balancer: &BalancerWorker, id: u64, snapshot: &Snapshot, thresholds: &[f32], ns: u64) -> Record {
    Record {
        record: FORMAT,
        slot: SlotKind::Balancer.to_string(),
        id,
        at_ms: unix_ms(),
        policy: balancer.policy_of(),
        pushed: Vec::new(),
        asked: Call::tick(snapshot),
        answer: bits(thresholds).into_iter().map(u64::from).collect(),
        scores: Vec::new(),
        fallback: balancer.fallback().map(ToString::to_string),
        ns,
    }
}
