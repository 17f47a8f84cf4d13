//! What the conductor does by itself, ever so often: expiry, and the balancer.

use super::Conductor;
use crate::policy::PolicyHost;
use kvasir_dataplane::Clock;
use std::sync::Arc;
use std::time::Duration;

/// Ticks until `stopped` ends.
pub async fn run(
    conductor: Arc<Conductor>,
    policies: Arc<PolicyHost>,
    clock: Clock,
    every: Duration,
    stopped: impl Future<Output = ()>,
) {
    let mut balancer = policies.balancer_worker();
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
            shared.refresh_idle();
            let thresholds = balancer.tick(&snapshot);
            (balancer, thresholds)
        });
        let Ok((worker, thresholds)) = asked.await else { return };
        balancer = worker;
        policies.set_thresholds(thresholds);
    }
}
