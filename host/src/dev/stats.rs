//! What is counted while the trace runs, by phase: a phase ends when policies are swapped.

use super::Cluster;
use anyhow::Result;
use comfy_table::{Table, presets};
use hdrhistogram::Histogram;
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// One request that was served.
pub(super) struct Sample {
    /// Trace time.
    pub(super) ttft: Duration,
    pub(super) blocks: usize,
    pub(super) hit_blocks: usize,
}

/// Counters of a run.
#[derive(Default)]
pub(super) struct Stats {
    phases: Mutex<Vec<Counted>>,
    answered: AtomicU64,
    fallbacks: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    wrong_bytes: AtomicU64,
    stale_blocks: AtomicU64,
    not_stored: AtomicU64,
}

struct Counted {
    policies: String,
    asked: u64,
    served: u64,
    rejected: u64,
    failed: u64,
    blocks: u64,
    hit_blocks: u64,
    ttft_ms: Histogram<u64>,
    last_error: Option<String>,
}

impl Counted {
    fn new(policies: String) -> Self {
        let ttft_ms = Histogram::new_with_bounds(1, 3_600_000, 3).expect("bounds are valid");
        Self {
            policies,
            asked: 0,
            served: 0,
            rejected: 0,
            failed: 0,
            blocks: 0,
            hit_blocks: 0,
            ttft_ms,
            last_error: None,
        }
    }
}

/// One row of the closing table.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Phase {
    pub policies: String,
    pub requests: u64,
    pub served: u64,
    pub rejected: u64,
    pub failed: u64,
    pub hit_rate_percent: f64,
    pub ttft_ms_mean: f64,
    pub ttft_ms_p90: f64,
    pub last_error: Option<String>,
}

/// The result of a run; the JSON of `kvasir dev --demo --json`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    pub phases: Vec<Phase>,
    pub seconds: f64,
    pub hosts: usize,
    pub hit_rate_percent: f64,
    pub bytes_moved: u64,
    pub checksum_failures: u64,
    pub wrong_bytes: u64,
    pub evictions: u64,
    /// Blocks that the index promised although an eviction had just taken them: a miss each.
    pub stale_blocks: u64,
    /// Blocks for which there was no room.
    pub not_stored: u64,
    pub decisions: u64,
    pub decisions_per_second: f64,
    /// Time inside the scheduling policy, ns per decision.
    pub decision_ns_mean: f64,
    /// Requests sent that received no decision.
    pub decisions_lost: u64,
    /// Decisions that the native twin made instead of the policy.
    pub fallbacks: u64,
    /// Policy swaps, of all hosts together.
    pub swaps: u64,
}

impl Stats {
    fn phases(&self) -> MutexGuard<'_, Vec<Counted>> {
        self.phases.lock()
    }

    pub(super) fn next_phase(&self, policies: String) {
        self.phases().push(Counted::new(policies));
    }

    /// Counts a request as sent; returns the phase it belongs to.
    pub(super) fn asked(&self) -> usize {
        let mut phases = self.phases();
        if let Some(phase) = phases.last_mut() {
            phase.asked += 1;
        }
        phases.len().saturating_sub(1)
    }

    pub(super) fn answered(&self, fallback: bool) {
        self.answered.fetch_add(1, Relaxed);
        self.fallbacks.fetch_add(fallback.into(), Relaxed);
    }

    pub(super) fn served(&self, phase: usize, sample: &Sample) {
        if let Some(phase) = self.phases().get_mut(phase) {
            phase.served += 1;
            phase.blocks += sample.blocks as u64;
            phase.hit_blocks += sample.hit_blocks as u64;
            phase.ttft_ms.saturating_record(sample.ttft.as_millis().max(1) as u64);
        }
    }

    pub(super) fn rejected(&self, phase: usize) {
        if let Some(phase) = self.phases().get_mut(phase) {
            phase.rejected += 1;
        }
    }

    pub(super) fn failed(&self, phase: usize, error: &anyhow::Error) {
        if let Some(phase) = self.phases().get_mut(phase) {
            phase.failed += 1;
            phase.last_error = Some(format!("{error:#}"));
        }
    }

    pub(super) fn read(&self, bytes: usize) {
        self.bytes_read.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn written(&self, bytes: usize) {
        self.bytes_written.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn wrong_bytes(&self) {
        self.wrong_bytes.fetch_add(1, Relaxed);
    }

    pub(super) fn stale(&self, blocks: usize) {
        self.stale_blocks.fetch_add(blocks as u64, Relaxed);
    }

    pub(super) fn not_stored(&self, blocks: usize) {
        self.not_stored.fetch_add(blocks as u64, Relaxed);
    }

    /// Requests that have ended, hit blocks and all blocks, so far.
    pub(super) fn progress(&self) -> (u64, u64, u64) {
        self.phases().iter().fold((0, 0, 0), |(ended, hits, blocks), p| {
            (ended + p.served + p.rejected + p.failed, hits + p.hit_blocks, blocks + p.blocks)
        })
    }

    pub(super) fn bytes_moved(&self) -> u64 {
        self.bytes_read.load(Relaxed) + self.bytes_written.load(Relaxed)
    }

    pub(super) async fn summary(&self, cluster: &Cluster, took: Duration) -> Result<Summary> {
        let (mut checksum_failures, mut evictions, mut generations) = (0, 0, 0);
        for host in &cluster.hosts {
            let usage = host.control.store.clone().usage(kvasir_proto::UsageRequest {}).await?.into_inner();
            checksum_failures += usage.checksum_failures;
            evictions += usage.evicted_blocks;
            let slots = host.running.host().policies.list();
            generations += slots.iter().map(|slot| slot.generation - 1).sum::<u64>();
        }
        let scheduler =
            cluster.conductor().running.host().policies.status(crate::policy::SlotKind::Scheduler);
        let phases: Vec<Phase> = self.phases().iter().map(Phase::of).collect();
        let asked: u64 = phases.iter().map(|p| p.requests).sum();
        let (_, hits, blocks) = self.progress();
        let answered = self.answered.load(Relaxed);
        Ok(Summary {
            phases,
            seconds: took.as_secs_f64(),
            hosts: cluster.hosts.len(),
            hit_rate_percent: percent(hits, blocks),
            bytes_moved: self.bytes_moved(),
            checksum_failures,
            wrong_bytes: self.wrong_bytes.load(Relaxed),
            evictions,
            stale_blocks: self.stale_blocks.load(Relaxed),
            not_stored: self.not_stored.load(Relaxed),
            decisions: answered,
            decisions_per_second: answered as f64 / took.as_secs_f64(),
            decision_ns_mean: scheduler.counters.ns_mean,
            decisions_lost: asked - answered,
            fallbacks: self.fallbacks.load(Relaxed),
            swaps: generations,
        })
    }
}

impl Phase {
    fn of(counted: &Counted) -> Self {
        Self {
            policies: counted.policies.clone(),
            requests: counted.asked,
            served: counted.served,
            rejected: counted.rejected,
            failed: counted.failed,
            hit_rate_percent: percent(counted.hit_blocks, counted.blocks),
            ttft_ms_mean: counted.ttft_ms.mean(),
            ttft_ms_p90: counted.ttft_ms.value_at_quantile(0.9) as f64,
            last_error: counted.last_error.clone(),
        }
    }
}

impl Summary {
    /// What was not right, of the bytes and of the requests, each of which gets a decision and ends. `None` if all was.
    pub fn faults(&self) -> Option<String> {
        let counts = [
            (self.checksum_failures, "checksum failures"),
            (self.wrong_bytes, "blocks with wrong bytes"),
            (self.decisions_lost, "decisions lost"),
            (self.phases.iter().map(|p| p.failed).sum(), "requests failed"),
        ];
        let named = counts.into_iter().filter(|&(count, _)| count > 0);
        let named: Vec<_> = named.map(|(count, what)| format!("{count} {what}")).collect();
        let last_error = self.phases.iter().rev().find_map(|p| p.last_error.as_ref());
        let reason = last_error.map(|error| format!("; the last error: {error}")).unwrap_or_default();
        (!named.is_empty()).then(|| named.join(", ") + &reason)
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(["policies", "requests", "rejected", "failed", "hit rate", "TTFT mean", "TTFT p90"]);
        for p in &self.phases {
            table.add_row([
                p.policies.clone(),
                p.requests.to_string(),
                p.rejected.to_string(),
                p.failed.to_string(),
                format!("{:.1} %", p.hit_rate_percent),
                format!("{:.2} s", p.ttft_ms_mean / 1e3),
                format!("{:.2} s", p.ttft_ms_p90 / 1e3),
            ]);
        }
        let decision = if self.decision_ns_mean > 0.0 {
            format!(", {:.1} µs of it in the policy", self.decision_ns_mean / 1e3)
        } else {
            String::new()
        };
        writeln!(f, "{table}")?;
        writeln!(f, "hit rate           {:.1} %", self.hit_rate_percent)?;
        writeln!(
            f,
            "bytes moved        {:.1} MiB, every byte read compared",
            self.bytes_moved as f64 / f64::from(1 << 20)
        )?;
        writeln!(f, "checksum failures  {} ({} wrong blocks)", self.checksum_failures, self.wrong_bytes)?;
        writeln!(
            f,
            "evictions          {} ({} blocks gone before they were used)",
            self.evictions, self.stale_blocks
        )?;
        writeln!(
            f,
            "decisions          {}, {:.0} per second{decision}",
            self.decisions, self.decisions_per_second
        )?;
        writeln!(
            f,
            "policy swaps       {} under load, {} decisions lost, {} native fallbacks",
            self.swaps, self.decisions_lost, self.fallbacks
        )?;
        for error in self.phases.iter().filter_map(|p| p.last_error.as_ref()) {
            writeln!(f, "last error         {error}")?;
        }
        Ok(())
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named_with_their_reason() {
        let failed = |failed, reason: Option<&str>| Phase {
            failed,
            last_error: reason.map(str::to_owned),
            ..Phase::default()
        };
        let mut summary = Summary { phases: vec![failed(0, None)], ..Summary::default() };
        assert_eq!(summary.faults(), None);
        summary.phases = vec![failed(2, Some("the lease has ended")), failed(0, None)];
        assert_eq!(summary.faults().unwrap(), "2 requests failed; the last error: the lease has ended");
        summary.wrong_bytes = 1;
        assert!(summary.faults().unwrap().starts_with("1 blocks with wrong bytes, 2 requests failed; "));
    }
}
