//! `/metrics`: the counts of a host in the Prometheus text format.
//!
//! Each host has its own recorder, so several hosts fit in one process. What other parts already
//! count is copied in when the metrics are read.

use crate::host::Host;
use kvasir_dataplane::cluster::{Cluster, Kind, LinkState, PeerView};
use kvasir_dataplane::metrics::{Histogram, TenantMetrics};
use kvasir_dataplane::tier::ghosts::MissCause;
use kvasir_dataplane::tier::lifecycle::State;
use metrics::{counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use std::sync::atomic::Ordering::Relaxed;

pub struct Metrics {
    recorder: PrometheusRecorder,
}

impl Metrics {
    pub fn new(node: &str) -> Self {
        let recorder = PrometheusBuilder::new().add_global_label("node", node).build_recorder();
        with_local_recorder(&recorder, describe);
        Self { recorder }
    }

    /// All counts, as text.
    pub fn render(&self, host: &Host) -> String {
        with_local_recorder(&self.recorder, || {
            store(host);
            tiers(host);
            host.cluster.iter().for_each(|cluster| replicas(cluster));
            data_server(host);
            eviction(host);
            policies(host);
            conductor(host);
        });
        self.recorder.handle().render()
    }
}

fn policies(host: &Host) {
    for status in host.policies.list() {
        let (slot, totals) = (status.slot, status.totals);
        let set = |name: &'static str, value| counter!(name, "slot" => slot.clone()).absolute(value);
        set("kvasir_policy_calls_total", totals.calls);
        set("kvasir_policy_fallbacks_total", totals.fallbacks);
        set("kvasir_policy_traps_total", totals.traps);
        set("kvasir_policy_deadline_misses_total", totals.deadline_misses);
        set("kvasir_policy_invalid_answers_total", totals.invalid_answers);
        gauge!("kvasir_policy_call_seconds", "slot" => slot.clone()).set(totals.ns_mean / 1e9);
        gauge!("kvasir_policy_generation", "slot" => slot).set(status.generation as f64);
    }
}

fn describe() {
    describe_gauge!("kvasir_uptime_seconds", "Time since the host started");
    describe_gauge!("kvasir_pool_bytes", "Size of the DRAM pool");
    describe_gauge!("kvasir_pool_free_bytes", "Bytes of the DRAM pool that hold no block");
    describe_gauge!("kvasir_pool_largest_free_bytes", "Largest block that fits without eviction");
    describe_gauge!("kvasir_blocks", "Blocks in each state of their life now");
    describe_counter!("kvasir_blocks_ended_total", "Blocks whose life has ended, by how it ended");
    describe_counter!(
        "kvasir_lookups_total",
        "Blocks asked for by get, by outcome; exists and stat are not counted"
    );
    describe_counter!(
        "kvasir_misses_total",
        "Blocks that get did not find, by cause; misses that others reported are included"
    );
    describe_counter!("kvasir_created_total", "Blocks stored and made visible");
    describe_counter!(
        "kvasir_migrations_total",
        "Times a block was held in memory while it was sent elsewhere"
    );
    describe_counter!(
        "kvasir_migrated_bytes_total",
        "Bytes of the blocks held in memory while they were sent elsewhere"
    );
    describe_gauge!("kvasir_pool_usage_ratio", "Share of the DRAM pool that holds blocks");
    describe_gauge!(
        "kvasir_metadata_bytes",
        "Memory of the block records and their index, which is not part of the pool"
    );
    describe_counter!(
        "kvasir_block_seconds_bucket",
        "How long blocks took, cumulative: creation (reserve to visible), age_at_eviction, lifetime (however \
         it ended), reuse_interval (between uses), migration (held while sent elsewhere)"
    );
    describe_counter!("kvasir_block_seconds_count", "Number of times in kvasir_block_seconds_bucket");
    describe_gauge!("kvasir_block_seconds_sum", "Sum of the times in kvasir_block_seconds_bucket");
    describe_counter!("kvasir_scrubbed_bytes_total", "Bytes that the scrubber compared with their checksums");
    describe_counter!(
        "kvasir_scrub_dropped_total",
        "Blocks that the scrubber dropped because their bytes had changed"
    );
    describe_counter!("kvasir_scrub_passes_total", "Full passes of the scrubber over the store");
    describe_gauge!("kvasir_scrub_last_pass_age_seconds", "Time since the scrubber's last full pass ended");
    describe_gauge!(
        "kvasir_tenant_used_bytes",
        "Bytes that a tenant's blocks take; tenant 0 stands for all tenants without settings"
    );
    describe_gauge!("kvasir_tenant_pinned_bytes", "Bytes that a tenant has pinned");
    describe_gauge!(
        "kvasir_tenant_floor_bytes",
        "Bytes that a tenant keeps while others are above their floors"
    );
    describe_counter!("kvasir_tenant_quota_full_total", "Puts refused because the tenant's quota was full");
    describe_counter!(
        "kvasir_tenant_floor_kept_total",
        "Victims not evicted because the tenant had no more than its floor"
    );
    describe_counter!("kvasir_hit_bytes_total", "Bytes of the blocks that get found");
    describe_counter!("kvasir_stored_bytes_total", "Bytes of committed blocks");
    describe_counter!("kvasir_evicted_bytes_total", "Bytes of blocks an evictor chose");
    describe_counter!(
        "kvasir_checksum_failures_total",
        "Blocks dropped or refused because bytes and checksum differed"
    );
    describe_counter!("kvasir_pool_full_total", "Puts that failed for lack of space");
    describe_counter!("kvasir_put_waits_total", "Put batches that had to wait for space");
    describe_gauge!("kvasir_leases", "Leases held by readers");
    describe_counter!("kvasir_leases_expired_total", "Leases that ran out before they were released");
    describe_gauge!("kvasir_reservations", "Blocks being written");
    describe_counter!(
        "kvasir_reservations_reclaimed_total",
        "Reservations taken back from writers that died or stalled"
    );
    describe_gauge!(
        "kvasir_quarantined_bytes",
        "Bytes of reservations taken back from clients that may still be writing there; given to nobody until they are done"
    );
    describe_counter!(
        "kvasir_quarantined_total",
        "Reservations taken back from clients that may still be writing"
    );
    describe_counter!(
        "kvasir_quarantine_refused_total",
        "Reservations refused because a quarter of the pool waits for late writers"
    );
    describe_gauge!("kvasir_tier_blocks", "Blocks in each tier below the pool");
    describe_gauge!("kvasir_tier_block_bytes", "Bytes of those blocks");
    describe_gauge!(
        "kvasir_tier_used_bytes",
        "Bytes that the tier occupies, including dead blocks that are not reclaimed yet"
    );
    describe_gauge!(
        "kvasir_tier_capacity_bytes",
        "The most bytes of blocks that the tier holds; absent if it knows no limit"
    );
    describe_gauge!(
        "kvasir_tier_broken",
        "1 once a sync of the tier's device failed: it takes nothing more until a restart, and serves what it holds"
    );
    describe_counter!("kvasir_tier_lookups_total", "Blocks loaded from the tier, by outcome");
    describe_counter!("kvasir_tier_read_bytes_total", "Bytes of blocks read from the tier");
    describe_counter!("kvasir_tier_written_bytes_total", "Bytes of blocks written to the tier");
    describe_counter!("kvasir_tier_corrupt_total", "Damaged blocks found in the tier; each counts as a miss");
    describe_counter!("kvasir_tier_io_errors_total", "Operations that failed on the tier's device");
    describe_counter!("kvasir_tier_evicted_total", "Blocks that the tier dropped for lack of space");
    describe_counter!(
        "kvasir_offload_total",
        "Victims of the pool offered to the tier, by outcome; all but stored and held were evicted without a copy"
    );
    describe_gauge!(
        "kvasir_offload_queued_blocks",
        "Victims waiting to be copied to the tier or being copied now"
    );
    describe_gauge!("kvasir_offload_queued_bytes", "Bytes of the pool that those victims occupy");
    describe_counter!("kvasir_onboard_total", "Blocks requested from the tier for a reader, by outcome");
    describe_counter!("kvasir_onboard_bytes_total", "Bytes of the blocks loaded from the tier for a reader");
    describe_counter!(
        "kvasir_promotions_total",
        "Blocks loaded from a tier below: promoted went into the pool, served_without did not"
    );
    describe_counter!(
        "kvasir_loads_refused_total",
        "Blocks not loaded because too many were being loaded already"
    );
    describe_gauge!("kvasir_loading_bytes", "Memory that holds the blocks being loaded now");
    describe_replicas();
    describe_gauge!("kvasir_connections", "Open data connections");
    describe_counter!("kvasir_connections_total", "Data connections, by outcome");
    describe_counter!("kvasir_data_requests_total", "Requests on data connections");
    describe_counter!(
        "kvasir_payload_bytes_total",
        "Bytes of blocks sent in frames, by direction; blocks read in place are not counted"
    );
    describe_counter!("kvasir_evictor_events_total", "Access events delivered to the evictor");
    describe_counter!(
        "kvasir_evictor_hits_dropped_total",
        "Hits not reported to the evictor because its buffer was full"
    );
    describe_counter!("kvasir_evictor_victims_total", "Valid victims that the evictor chose");
    describe_counter!(
        "kvasir_evictor_refused_total",
        "Evictor answers refused because they broke the contract"
    );
    describe_counter!(
        "kvasir_evictor_replays_total",
        "Times the resident blocks were replayed to an evictor that did not know them"
    );
    describe_counter!(
        "kvasir_evictor_promotions_total",
        "Evictors that took over from another once they had been told what is resident"
    );
    describe_gauge!(
        "kvasir_evictor_stall_seconds",
        "The longest time since the start in which the evictor's thread could not choose victims"
    );
    describe_counter!("kvasir_policy_calls_total", "Policy calls, by slot");
    describe_counter!("kvasir_policy_traps_total", "Policy calls that trapped, by slot");
    describe_counter!(
        "kvasir_policy_deadline_misses_total",
        "Policy calls interrupted at their deadline, by slot"
    );
    describe_counter!(
        "kvasir_policy_invalid_answers_total",
        "Policy answers that broke the contract, by slot"
    );
    describe_counter!(
        "kvasir_policy_fallbacks_total",
        "Decisions made by the native policy instead, by slot"
    );
    describe_gauge!(
        "kvasir_policy_call_seconds",
        "Mean time of a policy call over a sample of the calls, by slot"
    );
    describe_gauge!("kvasir_policy_generation", "Policy swaps in the slot since the host started");
    describe_counter!("kvasir_decisions_total", "Requests scheduled, by outcome");
    describe_gauge!("kvasir_requests", "Requests scheduled and not finished");
    describe_counter!(
        "kvasir_instances_forgotten_total",
        "Instances forgotten because they were silent for too long"
    );
    describe_gauge!("kvasir_instances", "Instances known, by role");
    describe_gauge!("kvasir_index_entries", "Distinct blocks in the prefix index");
    describe_gauge!("kvasir_index_bytes", "Memory of the prefix index");
    describe_counter!(
        "kvasir_index_refused_total",
        "Blocks that the prefix index refused because it was full"
    );
}

fn describe_replicas() {
    describe_gauge!("kvasir_replicated_blocks", "Replicated blocks that this host knows of");
    describe_gauge!("kvasir_replicas_own", "Replicated blocks of which this host holds a copy");
    describe_gauge!("kvasir_replicas_short", "Replicated blocks held by fewer hosts than requested");
    describe_counter!(
        "kvasir_copies_total",
        "Copies that peers were asked to take, by outcome; had: the peer had the block already"
    );
    describe_counter!("kvasir_copy_bytes_total", "Bytes of copies that arrived intact, by direction");
    describe_counter!(
        "kvasir_copy_resumed_bytes_total",
        "Bytes not sent again when a broken transfer was resumed"
    );
    describe_counter!("kvasir_peer_reads_total", "Blocks read from peers for a reader here, by outcome");
    describe_counter!(
        "kvasir_peer_read_bytes_total",
        "Bytes of the blocks read from peers for a reader here"
    );
    describe_counter!(
        "kvasir_peer_read_failovers_total",
        "Times a read moved on to the next holder of a block"
    );
    describe_counter!("kvasir_blocks_lent_total", "Blocks lent to peers for reading");
    describe_counter!(
        "kvasir_peer_corrupt_total",
        "Blocks from peers that were damaged or wrong; they were not used"
    );
    describe_counter!(
        "kvasir_repairs_total",
        "Attempts to fetch a damaged block again from a peer, by outcome"
    );
    describe_counter!("kvasir_replicas_dropped_total", "Copies that this host no longer holds, by reason");
    describe_counter!("kvasir_replicas_refused_total", "Blocks whose copies are not tracked, by reason");
    describe_counter!(
        "kvasir_targets_restored_total",
        "Copies that this host held before its last start and still knew of"
    );
    describe_gauge!(
        "kvasir_targets_unkept",
        "Changes to this host's copies not yet safe on disk: a crash would forget how many copies are wanted"
    );
    describe_gauge!("kvasir_removals_kept", "Removals kept in mind for hosts that were away");
    describe_counter!(
        "kvasir_removals_late_total",
        "Blocks dropped here because a peer told of their removal later, and removals forgotten because there were too many"
    );
    describe_counter!(
        "kvasir_cluster_strangers_total",
        "Connections refused at the cluster's port, such as for a wrong secret or an unknown name"
    );
    describe_gauge!("kvasir_transfer_endpoints", "Connections to peers for transfers, open now");
    describe_counter!(
        "kvasir_transfer_endpoint_failures_total",
        "Transfer connections that could not be made or broke"
    );
    describe_counter!(
        "kvasir_transfer_endpoints_evicted_total",
        "Transfer connections closed to make room for others"
    );
    describe_gauge!("kvasir_peer_up", "1 while the peer answers and all its copies are known, else 0");
    describe_gauge!("kvasir_peer_free_bytes", "Free bytes of the peer's pool");
    describe_gauge!(
        "kvasir_peer_load",
        "Blocks that the peer is copying or lending, plus copies queued there"
    );
    describe_gauge!("kvasir_peer_queued_copies", "Copies waiting to be sent to the peer");
    describe_gauge!("kvasir_peer_last_seen_age_seconds", "Time since the peer was last heard");
    describe_counter!("kvasir_peer_copied_total", "Copies that the peer took from this host");
    describe_counter!("kvasir_peer_read_blocks_total", "Blocks that this host read from the peer");
    describe_counter!("kvasir_peer_failed_calls_total", "Calls to the peer that failed");
    describe_counter!("kvasir_peer_lost_total", "Times the connection to the peer was lost");
    describe_counter!(
        "kvasir_peer_transfer_bytes_total",
        "Bytes read from the peer and written to it, by transport"
    );
}

fn store(host: &Host) {
    let m = host.store.metrics();
    gauge!("kvasir_uptime_seconds").set(host.clock.now_ms() as f64 / 1e3);
    gauge!("kvasir_pool_bytes").set(m.pool_bytes as f64);
    gauge!("kvasir_pool_free_bytes").set(m.free_bytes as f64);
    gauge!("kvasir_pool_largest_free_bytes").set(m.largest_free_bytes as f64);
    for state in State::ALL {
        let count = m.lifecycle.in_state(state);
        if state.is_gone() {
            counter!("kvasir_blocks_ended_total", "how" => state.name()).absolute(count);
        } else {
            gauge!("kvasir_blocks", "state" => state.name()).set(count as f64);
        }
    }
    counter!("kvasir_lookups_total", "outcome" => "hit").absolute(m.hits);
    counter!("kvasir_lookups_total", "outcome" => "miss").absolute(m.misses);
    for (cause, count) in MissCause::ALL.into_iter().zip(m.misses_by_cause) {
        counter!("kvasir_misses_total", "cause" => cause.name()).absolute(count);
    }
    counter!("kvasir_hit_bytes_total").absolute(m.hit_bytes);
    counter!("kvasir_created_total").absolute(m.creation.count());
    counter!("kvasir_migrations_total").absolute(m.migration.count());
    counter!("kvasir_migrated_bytes_total").absolute(m.migrated_bytes);
    gauge!("kvasir_pool_usage_ratio").set(1.0 - m.free_bytes as f64 / m.pool_bytes.max(1) as f64);
    gauge!("kvasir_metadata_bytes").set(host.store.metadata().bytes() as f64);
    let times = [
        ("creation", m.creation),
        ("age_at_eviction", m.age_at_eviction),
        ("lifetime", m.lifetime),
        ("reuse_interval", m.reuse_interval),
        ("migration", m.migration),
    ];
    times.iter().for_each(|(of, times)| histogram(of, times));
    counter!("kvasir_scrubbed_bytes_total").absolute(m.scrub.bytes);
    counter!("kvasir_scrub_dropped_total").absolute(m.scrub.dropped);
    counter!("kvasir_scrub_passes_total").absolute(m.scrub.passes);
    if let Some(ended_ms) = m.scrub.last_pass_ms {
        let ago_ms = host.clock.now_ms().saturating_sub(ended_ms);
        gauge!("kvasir_scrub_last_pass_age_seconds").set(ago_ms as f64 / 1e3);
    }
    m.tenants.iter().for_each(tenant);
    counter!("kvasir_stored_bytes_total").absolute(m.stored_bytes);
    counter!("kvasir_evicted_bytes_total").absolute(m.evicted_bytes);
    counter!("kvasir_checksum_failures_total").absolute(m.checksum_failures);
    counter!("kvasir_pool_full_total").absolute(m.pool_full);
    counter!("kvasir_put_waits_total").absolute(m.put_waits);
    gauge!("kvasir_leases").set(m.leases as f64);
    counter!("kvasir_leases_expired_total").absolute(m.leases_expired);
    gauge!("kvasir_reservations").set(m.reservations as f64);
    counter!("kvasir_reservations_reclaimed_total").absolute(m.reservations_reclaimed);
    gauge!("kvasir_quarantined_bytes").set(m.quarantined_bytes as f64);
    counter!("kvasir_quarantined_total").absolute(m.quarantined);
    counter!("kvasir_quarantine_refused_total").absolute(m.quarantine_refused);
    counter!("kvasir_evictor_hits_dropped_total").absolute(m.hits_dropped);
}

/// Times of blocks as a cumulative histogram: one counter per bound, as in Prometheus.
fn histogram(of: &'static str, times: &Histogram) {
    let mut below = 0;
    for (power, count) in times.buckets.into_iter().enumerate() {
        below += count;
        let last = power + 1 == times.buckets.len();
        let bound = if last { "+Inf".to_owned() } else { (2f64.powi(power as i32) / 1e3).to_string() };
        counter!("kvasir_block_seconds_bucket", "of" => of, "le" => bound).absolute(below);
    }
    counter!("kvasir_block_seconds_count", "of" => of).absolute(below);
    gauge!("kvasir_block_seconds_sum", "of" => of).set(times.sum_ms as f64 / 1e3);
}

fn tenant(tenant: &TenantMetrics) {
    let id = tenant.tenant.to_string();
    let set = |name: &'static str, value: u64| gauge!(name, "tenant" => id.clone()).set(value as f64);
    set("kvasir_tenant_used_bytes", tenant.used_bytes);
    set("kvasir_tenant_pinned_bytes", tenant.pinned_bytes);
    set("kvasir_tenant_floor_bytes", tenant.floor_bytes);
    counter!("kvasir_tenant_quota_full_total", "tenant" => id.clone()).absolute(tenant.quota_full);
    counter!("kvasir_tenant_floor_kept_total", "tenant" => id).absolute(tenant.floor_kept);
}

fn tiers(host: &Host) {
    let stats = host.tiering.stats();
    for level in &stats.levels {
        let (tier, s) = (level.capabilities.tier.name(), &level.store);
        gauge!("kvasir_tier_blocks", "tier" => tier).set(s.blocks as f64);
        gauge!("kvasir_tier_block_bytes", "tier" => tier).set(s.block_bytes as f64);
        gauge!("kvasir_tier_used_bytes", "tier" => tier).set(s.used_bytes as f64);
        if let Some(capacity) = level.capabilities.capacity_bytes {
            gauge!("kvasir_tier_capacity_bytes", "tier" => tier).set(capacity as f64);
        }
        gauge!("kvasir_tier_broken", "tier" => tier).set(f64::from(u8::from(s.broken)));
        counter!("kvasir_tier_lookups_total", "tier" => tier, "outcome" => "hit").absolute(s.hits);
        counter!("kvasir_tier_lookups_total", "tier" => tier, "outcome" => "miss").absolute(s.misses);
        counter!("kvasir_tier_read_bytes_total", "tier" => tier).absolute(s.read_bytes);
        counter!("kvasir_tier_written_bytes_total", "tier" => tier).absolute(s.written_bytes);
        counter!("kvasir_tier_corrupt_total", "tier" => tier).absolute(s.corrupt);
        counter!("kvasir_tier_io_errors_total", "tier" => tier).absolute(s.io_errors);
        counter!("kvasir_tier_evicted_total", "tier" => tier).absolute(s.evicted);
        let o = &level.offload;
        let outcomes = [
            ("stored", o.stored),
            ("held", o.held_below),
            ("refused", o.refused),
            ("skipped", o.skipped),
            ("failed", o.failed),
        ];
        for (outcome, count) in outcomes {
            counter!("kvasir_offload_total", "tier" => tier, "outcome" => outcome).absolute(count);
        }
        gauge!("kvasir_offload_queued_blocks", "tier" => tier).set(o.queued as f64);
        gauge!("kvasir_offload_queued_bytes", "tier" => tier).set(o.queued_bytes as f64);
        let o = &level.onboard;
        let outcomes = [
            ("loaded", o.loaded),
            ("missing", o.missing),
            ("corrupt", o.corrupt),
            ("failed", o.failed),
            ("timed_out", o.timed_out),
        ];
        for (outcome, count) in outcomes {
            counter!("kvasir_onboard_total", "tier" => tier, "outcome" => outcome).absolute(count);
        }
        counter!("kvasir_onboard_bytes_total", "tier" => tier).absolute(o.loaded_bytes);
    }
    counter!("kvasir_promotions_total", "outcome" => "promoted").absolute(stats.promoted);
    counter!("kvasir_promotions_total", "outcome" => "served_without").absolute(stats.not_promoted);
    counter!("kvasir_read_ahead_blocks_total", "outcome" => "asked").absolute(stats.read_ahead);
    counter!("kvasir_read_ahead_blocks_total", "outcome" => "landed").absolute(stats.read_ahead_landed);
    counter!("kvasir_loads_refused_total").absolute(stats.load_refused);
    gauge!("kvasir_loading_bytes").set(stats.loading_bytes as f64);
}

fn replicas(cluster: &Cluster) {
    let s = cluster.stats();
    gauge!("kvasir_replicated_blocks").set(s.blocks as f64);
    gauge!("kvasir_replicas_own").set(s.own as f64);
    gauge!("kvasir_replicas_short").set(s.short as f64);
    let copies =
        [("taken", s.copied - s.had), ("had", s.had), ("no_room", s.no_room), ("failed", s.copy_failed)];
    for (outcome, count) in copies {
        counter!("kvasir_copies_total", "outcome" => outcome).absolute(count);
    }
    counter!("kvasir_copy_bytes_total", "direction" => "out").absolute(s.copied_bytes);
    counter!("kvasir_copy_bytes_total", "direction" => "in").absolute(s.taken_bytes);
    counter!("kvasir_copy_resumed_bytes_total").absolute(s.resumed_bytes);
    counter!("kvasir_peer_reads_total", "outcome" => "hit").absolute(s.read_hits);
    counter!("kvasir_peer_reads_total", "outcome" => "miss").absolute(s.read_misses);
    counter!("kvasir_peer_read_bytes_total").absolute(s.read_bytes);
    counter!("kvasir_peer_read_failovers_total").absolute(s.failovers);
    counter!("kvasir_blocks_lent_total").absolute(s.lent);
    counter!("kvasir_peer_corrupt_total").absolute(s.corrupt);
    counter!("kvasir_repairs_total", "outcome" => "repaired").absolute(s.repaired);
    counter!("kvasir_repairs_total", "outcome" => "failed").absolute(s.not_repaired);
    let dropped = [("too_many", s.trimmed), ("evicted", s.let_go), ("removed", s.removed)];
    for (why, count) in dropped {
        counter!("kvasir_replicas_dropped_total", "why" => why).absolute(count);
    }
    counter!("kvasir_replicas_refused_total", "why" => "table_full").absolute(s.table_full);
    counter!("kvasir_replicas_refused_total", "why" => "conflict").absolute(s.conflicts);
    counter!("kvasir_targets_restored_total").absolute(s.targets_restored);
    gauge!("kvasir_targets_unkept").set(s.targets_unkept as f64);
    gauge!("kvasir_removals_kept").set(s.removals_kept as f64);
    counter!("kvasir_removals_late_total", "outcome" => "told").absolute(s.removals_told_late);
    counter!("kvasir_removals_late_total", "outcome" => "forgotten").absolute(s.removals_forgotten);
    counter!("kvasir_cluster_strangers_total").absolute(s.strangers);
    gauge!("kvasir_transfer_endpoints").set(s.endpoints as f64);
    counter!("kvasir_transfer_endpoint_failures_total").absolute(s.endpoint_failures);
    counter!("kvasir_transfer_endpoints_evicted_total").absolute(s.endpoints_evicted);
    cluster.peers().iter().for_each(peer);
}

fn peer(peer: &PeerView) {
    let name = || peer.name.clone();
    let up = if peer.state == LinkState::Up { 1.0 } else { 0.0 };
    gauge!("kvasir_peer_up", "peer" => name(), "rack" => peer.rack.clone()).set(up);
    gauge!("kvasir_peer_free_bytes", "peer" => name()).set(peer.status.free_bytes as f64);
    gauge!("kvasir_peer_load", "peer" => name()).set(peer.status.load as f64);
    gauge!("kvasir_peer_queued_copies", "peer" => name()).set(peer.queued as f64);
    if let Some(ago) = peer.last_seen {
        gauge!("kvasir_peer_last_seen_age_seconds", "peer" => name()).set(ago.as_secs_f64());
    }
    counter!("kvasir_peer_copied_total", "peer" => name()).absolute(peer.copied);
    counter!("kvasir_peer_read_blocks_total", "peer" => name()).absolute(peer.read);
    counter!("kvasir_peer_failed_calls_total", "peer" => name()).absolute(peer.failed);
    counter!("kvasir_peer_lost_total", "peer" => name()).absolute(peer.lost);
    for kind in [Kind::Rdma, Kind::Shm, Kind::Tcp] {
        let bytes = peer.rails.iter().filter(|rail| rail.kind == kind).map(|rail| rail.bytes).sum();
        let labels = [("peer", name()), ("transport", kind.name().to_owned())];
        counter!("kvasir_peer_transfer_bytes_total", &labels).absolute(bytes);
    }
}

fn data_server(host: &Host) {
    let m = host.server.metrics();
    gauge!("kvasir_connections").set(m.connections as f64);
    counter!("kvasir_connections_total", "outcome" => "accepted").absolute(m.accepted);
    counter!("kvasir_connections_total", "outcome" => "refused").absolute(m.refused);
    counter!("kvasir_connections_total", "outcome" => "broken").absolute(m.broken);
    counter!("kvasir_data_requests_total").absolute(m.requests);
    counter!("kvasir_payload_bytes_total", "direction" => "in").absolute(m.payload_in_bytes);
    counter!("kvasir_payload_bytes_total", "direction" => "out").absolute(m.payload_out_bytes);
}

fn eviction(host: &Host) {
    let counts = host.eviction.counts();
    counter!("kvasir_evictor_events_total").absolute(counts.events.load(Relaxed));
    counter!("kvasir_evictor_victims_total").absolute(counts.victims.load(Relaxed));
    counter!("kvasir_evictor_refused_total").absolute(counts.invalid.load(Relaxed));
    counter!("kvasir_evictor_replays_total").absolute(counts.replays.load(Relaxed));
    counter!("kvasir_evictor_promotions_total").absolute(counts.promotions.load(Relaxed));
    gauge!("kvasir_evictor_stall_seconds").set(counts.stall_us.load(Relaxed) as f64 / 1e6);
}

fn conductor(host: &Host) {
    let c = host.conductor.counts();
    counter!("kvasir_decisions_total", "outcome" => "placed").absolute(c.placed);
    counter!("kvasir_decisions_total", "outcome" => "rejected").absolute(c.rejected);
    gauge!("kvasir_requests").set(c.in_flight as f64);
    counter!("kvasir_instances_forgotten_total").absolute(c.forgotten);
    gauge!("kvasir_instances", "role" => "prefill").set(c.prefill as f64);
    gauge!("kvasir_instances", "role" => "decode").set(c.decode as f64);
    let index = host.conductor.index_stats();
    gauge!("kvasir_index_entries").set(index.entries as f64);
    gauge!("kvasir_index_bytes").set(index.bytes as f64);
    counter!("kvasir_index_refused_total").absolute(index.refused);
}
