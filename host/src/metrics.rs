//! `/metrics`: the counts of a host in the Prometheus text format.
//!
//! Each host has a recorder of its own, so several fit in one process; what other parts count
//! already is copied in when somebody looks.

use crate::daemon::Host;
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

    /// Everything countable, as text.
    pub fn render(&self, host: &Host) -> String {
        with_local_recorder(&self.recorder, || {
            store(host);
            data_server(host);
            eviction(host);
            policies(host);
            routing(host);
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
    describe_gauge!("kvasir_pool_free_bytes", "Part of the DRAM pool that holds nothing");
    describe_gauge!("kvasir_pool_largest_free_bytes", "Largest block that fits without eviction");
    describe_gauge!("kvasir_blocks", "Blocks now in each state of their life");
    describe_counter!("kvasir_blocks_ended_total", "Blocks whose life has ended, by how it ended");
    describe_counter!(
        "kvasir_lookups_total",
        "Blocks asked for by get, by outcome; exists and stat are not counted"
    );
    describe_counter!("kvasir_hit_bytes_total", "Bytes of the blocks that get found");
    describe_counter!("kvasir_stored_bytes_total", "Bytes of committed blocks");
    describe_counter!("kvasir_evicted_bytes_total", "Bytes of blocks an evictor chose");
    describe_counter!(
        "kvasir_checksum_failures_total",
        "Blocks dropped or refused because bytes and checksum differed"
    );
    describe_counter!("kvasir_pool_full_total", "Puts that failed for want of space");
    describe_counter!("kvasir_put_waits_total", "Put batches that had to wait for space");
    describe_gauge!("kvasir_leases", "Leases held by readers");
    describe_counter!("kvasir_leases_expired_total", "Leases that ran out before they were released");
    describe_gauge!("kvasir_reservations", "Blocks being written");
    describe_counter!(
        "kvasir_reservations_reclaimed_total",
        "Reservations taken back from writers that died or stalled"
    );
    describe_gauge!("kvasir_connections", "Open data connections");
    describe_counter!("kvasir_connections_total", "Data connections, by what became of them");
    describe_counter!("kvasir_data_requests_total", "Requests on data connections");
    describe_counter!(
        "kvasir_payload_bytes_total",
        "Bytes of blocks that travelled in frames, by direction; blocks read in place are not counted"
    );
    describe_counter!("kvasir_evictor_events_total", "Access events told to the evictor");
    describe_counter!(
        "kvasir_evictor_hits_dropped_total",
        "Hits the evictor was not told about because its buffer was full"
    );
    describe_counter!("kvasir_evictor_victims_total", "Valid victims the evictor chose");
    describe_counter!(
        "kvasir_evictor_refused_total",
        "Answers of the evictor refused because they broke the contract"
    );
    describe_counter!(
        "kvasir_evictor_replays_total",
        "Times the resident pool was told to an evictor that was new"
    );
    describe_counter!("kvasir_policy_calls_total", "Calls of policies, by slot");
    describe_counter!("kvasir_policy_traps_total", "Calls of policies that trapped, by slot");
    describe_counter!(
        "kvasir_policy_deadline_misses_total",
        "Calls of policies that were interrupted, by slot"
    );
    describe_counter!(
        "kvasir_policy_invalid_answers_total",
        "Answers of policies outside the contract, by slot"
    );
    describe_counter!("kvasir_policy_fallbacks_total", "Decisions the native policy made instead, by slot");
    describe_gauge!("kvasir_policy_call_seconds", "Mean time of a call, over a sample, by slot");
    describe_gauge!("kvasir_policy_generation", "Swaps of the slot since the host started");
    describe_counter!("kvasir_decisions_total", "Requests scheduled, by outcome");
    describe_gauge!("kvasir_requests", "Requests scheduled and not finished");
    describe_gauge!("kvasir_instances", "Instances known, by role");
    describe_gauge!("kvasir_index_entries", "Distinct blocks in the prefix index");
    describe_gauge!("kvasir_index_bytes", "Memory of the prefix index");
    describe_counter!("kvasir_index_refused_total", "Blocks the prefix index refused because it was full");
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
    counter!("kvasir_hit_bytes_total").absolute(m.hit_bytes);
    counter!("kvasir_stored_bytes_total").absolute(m.stored_bytes);
    counter!("kvasir_evicted_bytes_total").absolute(m.evicted_bytes);
    counter!("kvasir_checksum_failures_total").absolute(m.checksum_failures);
    counter!("kvasir_pool_full_total").absolute(m.pool_full);
    counter!("kvasir_put_waits_total").absolute(m.put_waits);
    gauge!("kvasir_leases").set(m.leases as f64);
    counter!("kvasir_leases_expired_total").absolute(m.leases_expired);
    gauge!("kvasir_reservations").set(m.reservations as f64);
    counter!("kvasir_reservations_reclaimed_total").absolute(m.reservations_reclaimed);
    counter!("kvasir_evictor_hits_dropped_total").absolute(m.hits_dropped);
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
}

fn routing(host: &Host) {
    let c = host.routing.counts();
    counter!("kvasir_decisions_total", "outcome" => "placed").absolute(c.placed);
    counter!("kvasir_decisions_total", "outcome" => "rejected").absolute(c.rejected);
    gauge!("kvasir_requests").set(c.in_flight as f64);
    gauge!("kvasir_instances", "role" => "prefill").set(c.prefill as f64);
    gauge!("kvasir_instances", "role" => "decode").set(c.decode as f64);
    let index = host.routing.index_stats();
    gauge!("kvasir_index_entries").set(index.entries as f64);
    gauge!("kvasir_index_bytes").set(index.bytes as f64);
    counter!("kvasir_index_refused_total").absolute(index.refused);
}
