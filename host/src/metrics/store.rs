//! The pool, the life of its blocks, and the tiers below it.

use super::page::Page;
use crate::host::Host;
use kvasir_dataplane::metrics::TenantMetrics;
use kvasir_dataplane::tier::ghosts::MissCause;
use kvasir_dataplane::tier::lifecycle::State;

const BLOCK_SECONDS: &str = "How long blocks took: creation (reserve to visible), age_at_eviction, lifetime (however it ended), \
    reuse_interval (between uses), migration (held while sent elsewhere)";

pub(super) fn store(page: &mut Page, host: &Host) {
    let m = host.node.store().metrics();
    page.gauge("kvasir_uptime_seconds", "Time since the host started").is(host.clock.now_ms() as f64 / 1e3);
    page.gauge("kvasir_pool_bytes", "Size of the DRAM pool").is(m.pool_bytes);
    page.gauge("kvasir_pool_free_bytes", "Bytes of the DRAM pool that hold no block").is(m.free_bytes);
    page.gauge("kvasir_pool_largest_free_bytes", "Largest block that fits without eviction")
        .is(m.largest_free_bytes);
    for state in State::ALL {
        let count = m.lifecycle.in_state(state);
        if state.is_gone() {
            page.counter("kvasir_blocks_ended_total", "Blocks whose life has ended, by how it ended").by(
                "how",
                state.name(),
                count,
            );
        } else {
            page.gauge("kvasir_blocks", "Blocks in each state of their life now").by(
                "state",
                state.name(),
                count,
            );
        }
    }
    page.counter(
        "kvasir_lookups_total",
        "Blocks asked for by get, by outcome; exists and stat are not counted",
    )
    .by("outcome", "hit", m.hits)
    .by("outcome", "miss", m.misses);
    for (cause, count) in MissCause::ALL.into_iter().zip(m.misses_by_cause) {
        page.counter("kvasir_misses_total", "Blocks that get did not find, by cause").by(
            "cause",
            cause.name(),
            count,
        );
    }
    page.counter("kvasir_hit_bytes_total", "Bytes of the blocks that get found").is(m.hit_bytes);
    page.counter("kvasir_created_total", "Blocks stored and made visible").is(m.creation.count());
    page.counter("kvasir_migrations_total", "Times a block was held in memory while it was sent elsewhere")
        .is(m.migration.count());
    page.counter(
        "kvasir_migrated_bytes_total",
        "Bytes of the blocks held in memory while they were sent elsewhere",
    )
    .is(m.migrated_bytes);
    page.gauge("kvasir_pool_usage_ratio", "Share of the DRAM pool that holds blocks")
        .is(1.0 - m.free_bytes as f64 / m.pool_bytes.max(1) as f64);
    page.gauge(
        "kvasir_metadata_bytes",
        "Memory of the block records and their index, which is not part of the pool",
    )
    .is(host.node.store().metadata().bytes());
    let times = [
        ("creation", m.creation),
        ("age_at_eviction", m.age_at_eviction),
        ("lifetime", m.lifetime),
        ("reuse_interval", m.reuse_interval),
        ("migration", m.migration),
    ];
    for (of, times) in times {
        page.histogram("kvasir_block_seconds", BLOCK_SECONDS).long_times(&[("of", of)], &times);
    }
    page.counter("kvasir_scrubbed_bytes_total", "Bytes that the scrubber compared with their checksums")
        .is(m.scrub.bytes);
    page.counter(
        "kvasir_scrub_dropped_total",
        "Blocks that the scrubber dropped because their bytes had changed",
    )
    .is(m.scrub.dropped);
    page.counter("kvasir_scrub_passes_total", "Full passes of the scrubber over the store")
        .is(m.scrub.passes);
    if let Some(ended_ms) = m.scrub.last_pass_ms {
        let ago_ms = host.clock.now_ms().saturating_sub(ended_ms);
        page.gauge("kvasir_scrub_last_pass_age_seconds", "Time since the scrubber's last full pass ended")
            .is(ago_ms as f64 / 1e3);
    }
    m.tenants.iter().for_each(|of| tenant(page, of));
    page.counter("kvasir_stored_bytes_total", "Bytes of committed blocks").is(m.stored_bytes);
    page.counter("kvasir_evicted_bytes_total", "Bytes of blocks an evictor chose").is(m.evicted_bytes);
    page.counter(
        "kvasir_checksum_failures_total",
        "Blocks dropped or refused because bytes and checksum differed",
    )
    .is(m.checksum_failures);
    page.counter("kvasir_pool_full_total", "Puts that failed for lack of space").is(m.pool_full);
    page.counter("kvasir_put_waits_total", "Put batches that had to wait for space").is(m.put_waits);
    page.gauge("kvasir_leases", "Leases held by readers").is(m.leases);
    page.counter("kvasir_leases_expired_total", "Leases that ran out before they were released")
        .is(m.leases_expired);
    page.gauge("kvasir_reservations", "Blocks being written").is(m.reservations);
    page.counter(
        "kvasir_reservations_reclaimed_total",
        "Reservations taken back from writers that died or stalled",
    )
    .is(m.reservations_reclaimed);
    page.gauge("kvasir_quarantined_bytes", "Bytes of reservations taken back from clients that may still be writing there; given to nobody until they are done").is(m.quarantined_bytes);
    page.counter(
        "kvasir_quarantined_total",
        "Reservations taken back from clients that may still be writing",
    )
    .is(m.quarantined);
    page.counter(
        "kvasir_quarantine_refused_total",
        "Reservations refused because half of the pool waits for late writers",
    )
    .is(m.quarantine_refused);
    page.counter(
        "kvasir_evictor_hits_dropped_total",
        "Hits not reported to the evictor because its buffer was full",
    )
    .is(m.hits_dropped);
}

fn tenant(page: &mut Page, tenant: &TenantMetrics) {
    let id = tenant.tenant.to_string();
    page.gauge(
        "kvasir_tenant_used_bytes",
        "Bytes that a tenant's blocks take; tenant 0 stands for all tenants without settings",
    )
    .by("tenant", &id, tenant.used_bytes);
    page.gauge("kvasir_tenant_pinned_bytes", "Bytes that a tenant has pinned").by(
        "tenant",
        &id,
        tenant.pinned_bytes,
    );
    page.gauge("kvasir_tenant_floor_bytes", "Bytes that a tenant keeps while others are above their floors")
        .by("tenant", &id, tenant.floor_bytes);
    page.counter("kvasir_tenant_quota_full_total", "Puts refused because the tenant's quota was full").by(
        "tenant",
        &id,
        tenant.quota_full,
    );
    page.counter(
        "kvasir_tenant_floor_kept_total",
        "Victims not evicted because the tenant had no more than its floor",
    )
    .by("tenant", &id, tenant.floor_kept);
}

pub(super) fn tiers(page: &mut Page, host: &Host) {
    let stats = host.node.tiering().stats();
    for level in &stats.levels {
        let (tier, s) = (level.capabilities.tier.name(), &level.store);
        page.gauge("kvasir_tier_blocks", "Blocks in each tier below the pool").by("tier", tier, s.blocks);
        page.gauge("kvasir_tier_block_bytes", "Bytes of those blocks").by("tier", tier, s.block_bytes);
        page.gauge(
            "kvasir_tier_used_bytes",
            "Bytes that the tier occupies, including dead blocks that are not reclaimed yet",
        )
        .by("tier", tier, s.used_bytes);
        if let Some(capacity) = level.capabilities.capacity_bytes {
            page.gauge(
                "kvasir_tier_capacity_bytes",
                "The most bytes of blocks that the tier holds; absent if it knows no limit",
            )
            .by("tier", tier, capacity);
        }
        page.gauge(
            "kvasir_tier_broken",
            "1 once a sync of the tier's device failed: it takes nothing more until a restart, and serves what it holds",
        )
        .by("tier", tier, u8::from(s.broken));
        page.counter("kvasir_tier_lookups_total", "Blocks loaded from the tier, by outcome")
            .with(&[("tier", tier), ("outcome", "hit")], s.hits)
            .with(&[("tier", tier), ("outcome", "miss")], s.misses);
        page.counter("kvasir_tier_read_bytes_total", "Bytes of blocks read from the tier").by(
            "tier",
            tier,
            s.read_bytes,
        );
        page.counter("kvasir_tier_written_bytes_total", "Bytes of blocks written to the tier").by(
            "tier",
            tier,
            s.written_bytes,
        );
        page.counter("kvasir_tier_corrupt_total", "Damaged blocks found in the tier; each counts as a miss")
            .by("tier", tier, s.corrupt);
        page.counter(
            "kvasir_tier_scrubbed_bytes_total",
            "Bytes that the tier compared with their checksums though nobody had asked for them",
        )
        .by("tier", tier, s.scrubbed_bytes);
        page.counter("kvasir_tier_io_errors_total", "Operations that failed on the tier's device").by(
            "tier",
            tier,
            s.io_errors,
        );
        page.counter("kvasir_tier_evicted_total", "Blocks that the tier dropped for lack of space")
            .by("tier", tier, s.evicted);
        let o = &level.offload;
        let outcomes = [
            ("stored", o.stored),
            ("held", o.held_below),
            ("refused", o.refused),
            ("skipped", o.skipped),
            ("failed", o.failed),
        ];
        for (outcome, count) in outcomes {
            page.counter("kvasir_offload_total", "Victims of the pool offered to the tier, by outcome; all but stored and held were evicted without a copy").with(&[("tier", tier), ("outcome", outcome)], count);
        }
        page.gauge(
            "kvasir_offload_queued_blocks",
            "Victims waiting to be copied to the tier or being copied now",
        )
        .by("tier", tier, o.queued);
        page.gauge("kvasir_offload_queued_bytes", "Bytes of the pool that those victims occupy").by(
            "tier",
            tier,
            o.queued_bytes,
        );
        let o = &level.onboard;
        let outcomes = [
            ("loaded", o.loaded),
            ("missing", o.missing),
            ("corrupt", o.corrupt),
            ("failed", o.failed),
            ("timed_out", o.timed_out),
        ];
        for (outcome, count) in outcomes {
            page.counter("kvasir_onboard_total", "Blocks requested from the tier for a reader, by outcome")
                .with(&[("tier", tier), ("outcome", outcome)], count);
        }
        page.counter("kvasir_onboard_bytes_total", "Bytes of the blocks loaded from the tier for a reader")
            .by("tier", tier, o.loaded_bytes);
        page.histogram(
            "kvasir_onboard_seconds",
            "How long readers waited for a batch of blocks from the tier, including the waits that timed out",
        )
        .times(&[("tier", tier)], &level.load_times);
    }
    page.counter(
        "kvasir_promotions_total",
        "Blocks loaded from a tier below: promoted went into the pool, served_without did not",
    )
    .by("outcome", "promoted", stats.promoted)
    .by("outcome", "served_without", stats.not_promoted);
    page.counter("kvasir_read_ahead_blocks_total", "Blocks asked of a tier before a reader wanted them: asked counts all, landed those that came in time to be kept").by("outcome", "asked", stats.read_ahead).by("outcome", "landed", stats.read_ahead_landed);
    page.counter(
        "kvasir_loads_refused_total",
        "Blocks not loaded because too many were being loaded already",
    )
    .is(stats.load_refused);
    page.gauge("kvasir_loading_bytes", "Memory that holds the blocks being loaded now")
        .is(stats.loading_bytes);
}
