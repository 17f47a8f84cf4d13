//! Clients on data connections, policies, and requests that are scheduled.

use super::page::Page;
use crate::host::Host;
use crate::policy::{Guard, TrialStatus};
use kvasir_dataplane::server::Call;
use std::sync::atomic::Ordering::Relaxed;

pub(super) fn data_server(page: &mut Page, host: &Host) {
    let m = host.server.metrics();
    page.gauge("kvasir_connections", "Open data connections").is(m.connections);
    page.counter("kvasir_connections_total", "Data connections, by outcome")
        .by("outcome", "accepted", m.accepted)
        .by("outcome", "refused", m.refused)
        .by("outcome", "broken", m.broken);
    page.counter("kvasir_data_requests_total", "Requests on data connections").is(m.requests);
    for (call, times) in Call::ALL.into_iter().zip(&m.times) {
        page.histogram("kvasir_data_request_seconds", "Time of a request on a data connection, from its first bytes until its answer was handed to the connection, by call").times(&[("call", call.name())], times);
    }
    page.counter(
        "kvasir_payload_bytes_total",
        "Bytes of blocks sent in frames, by direction; blocks read in place are not counted",
    )
    .by("direction", "in", m.payload_in_bytes)
    .by("direction", "out", m.payload_out_bytes);
}

pub(super) fn eviction(page: &mut Page, host: &Host) {
    let counts = host.eviction.counts();
    page.counter("kvasir_evictor_events_total", "Access events delivered to the evictor")
        .is(counts.events.load(Relaxed));
    page.counter("kvasir_evictor_victims_total", "Valid victims that the evictor chose")
        .is(counts.victims.load(Relaxed));
    page.counter("kvasir_evictor_refused_total", "Evictor answers refused because they broke the contract")
        .is(counts.invalid.load(Relaxed));
    page.counter(
        "kvasir_evictor_replays_total",
        "Times the resident blocks were replayed to an evictor that did not know them",
    )
    .is(counts.replays.load(Relaxed));
    page.counter(
        "kvasir_evictor_promotions_total",
        "Evictors that took over from another once they had been told what is resident",
    )
    .is(counts.promotions.load(Relaxed));
    page.gauge(
        "kvasir_evictor_stall_seconds",
        "The longest time since the start in which the evictor's thread could not choose victims",
    )
    .is(counts.stall_us.load(Relaxed) as f64 / 1e6);
}

pub(super) fn explain(page: &mut Page, host: &Host) {
    let explain = host.conductor.explain();
    page.gauge("kvasir_explain_memory_bytes", "Memory of the decisions that can be explained")
        .is(explain.memory_bytes() as u64);
    let (written, dropped) = explain
        .written()
        .map_or((0, 0), |counts| (counts.written.load(Relaxed), counts.dropped.load(Relaxed)));
    page.counter("kvasir_explain_records_total", "Decisions sampled to explain.file, by outcome")
        .by("outcome", "written", written)
        .by("outcome", "dropped", dropped);
}

pub(super) fn traffic(page: &mut Page, host: &Host) {
    let Some(traffic) = &host.traffic else { return };
    let counts = traffic.counts();
    page.counter("kvasir_recorded_requests_total", "Requests for record.file, by outcome")
        .by("outcome", "written", counts.written.load(Relaxed))
        .by("outcome", "dropped", counts.dropped.load(Relaxed));
}

pub(super) fn policies(page: &mut Page, host: &Host) {
    for status in host.policies.list() {
        let (slot, totals) = (status.slot.as_str(), status.totals);
        page.counter("kvasir_policy_calls_total", "Policy calls, by slot").by("slot", slot, totals.calls);
        page.counter("kvasir_policy_fallbacks_total", "Decisions made by the native policy instead, by slot")
            .by("slot", slot, totals.fallbacks);
        page.counter("kvasir_policy_traps_total", "Policy calls that trapped, by slot").by(
            "slot",
            slot,
            totals.traps,
        );
        page.counter(
            "kvasir_policy_deadline_misses_total",
            "Policy calls interrupted at their deadline, by slot",
        )
        .by("slot", slot, totals.deadline_misses);
        page.counter(
            "kvasir_policy_invalid_answers_total",
            "Policy answers that broke the contract, by slot",
        )
        .by("slot", slot, totals.invalid_answers);
        page.histogram(
            "kvasir_policy_call_seconds",
            "Time of a policy call, of every sixteenth call, by slot",
        )
        .times(&[("slot", slot)], &totals.times);
        page.gauge(
            "kvasir_policy_generation",
            "Number of the policy in service; rises with each that is loaded or tried, by slot",
        )
        .by("slot", slot, status.generation);
    }
}

/// Policies on trial, and those that the host took out by itself.
pub(super) fn trials(page: &mut Page, host: &Host) {
    for status in host.policies.list() {
        let slot = status.slot.as_str();
        let mut rollbacks = page.counter(
            "kvasir_policy_rollbacks_total",
            "Policies that a guard or the breaker took out of service, or whose trial it ended, by slot",
        );
        for (guard, count) in Guard::ALL.into_iter().zip(status.guard_rollbacks) {
            rollbacks = rollbacks.with(&[("slot", slot), ("guard", guard.as_str())], count);
        }
        rollbacks.with(&[("slot", slot), ("guard", "breaker")], status.breaker_trips);
        page.gauge("kvasir_policy_paused", "Whether the slot is paused: its trial is not asked, by slot").by(
            "slot",
            slot,
            u8::from(status.paused),
        );
        page.gauge("kvasir_policy_trials", "Policies on trial, by slot").by(
            "slot",
            slot,
            u8::from(status.trial.is_some()),
        );
        if let Some(trial) = status.trial {
            on_trial(page, slot, &trial);
        }
    }
}

/// Rows that start again with each trial.
fn on_trial(page: &mut Page, slot: &str, trial: &TrialStatus) {
    let generation = trial.generation.to_string();
    let labels = [("slot", slot), ("generation", generation.as_str())];
    let counters = trial.counters;
    page.counter("kvasir_policy_trial_calls_total", "Calls of the policy on trial, by slot")
        .with(&labels, counters.calls);
    page.counter("kvasir_policy_trial_traps_total", "Calls of the policy on trial that trapped, by slot")
        .with(&labels, counters.traps);
    page.counter(
        "kvasir_policy_trial_deadline_misses_total",
        "Calls of the policy on trial interrupted at their deadline, by slot",
    )
    .with(&labels, counters.deadline_misses);
    page.counter(
        "kvasir_policy_trial_invalid_answers_total",
        "Answers of the policy on trial that broke the contract, by slot",
    )
    .with(&labels, counters.invalid_answers);
    page.counter("kvasir_policy_trial_compared_total", "Answers of a shadow that were compared, by slot")
        .with(&labels, trial.agreement.asked);
    page.counter(
        "kvasir_policy_trial_same_total",
        "Answers of a shadow that were those of the active policy, by slot",
    )
    .with(&labels, trial.agreement.same);
    page.counter(
        "kvasir_policy_trial_dropped_total",
        "Decisions that a shadow was not told of because it was behind, by slot",
    )
    .with(&labels, trial.dropped);
}

pub(super) fn learning(page: &mut Page, host: &Host) {
    for status in host.policies.list().into_iter().filter(|status| status.has_outcomes) {
        let (slot, learning) = (status.slot.as_str(), status.learning);
        page.counter(
            "kvasir_policy_outcomes_total",
            "Ends of requests that a learning policy was told, by slot",
        )
        .by("slot", slot, learning.outcomes);
        page.counter(
            "kvasir_policy_outcomes_dropped_total",
            "Ends of requests that a learning policy was not told because it was slow, by slot",
        )
        .by("slot", slot, learning.dropped);
        page.counter(
            "kvasir_policy_learner_faults_total",
            "Times the learner of a policy failed and was made anew; decisions are not touched, by slot",
        )
        .by("slot", slot, learning.faults);
        page.counter(
            "kvasir_policy_published_total",
            "Times a learner published something new to the instances that decide, by slot",
        )
        .by("slot", slot, learning.published);
        page.gauge("kvasir_policy_knowledge_bytes", "Bytes that a learner published last, by slot").by(
            "slot",
            slot,
            learning.knowledge_bytes,
        );
    }
}

pub(super) fn conductor(page: &mut Page, host: &Host) {
    let c = host.conductor.counts();
    page.counter("kvasir_decisions_total", "Requests scheduled, by outcome")
        .by("outcome", "placed", c.placed)
        .by("outcome", "rejected", c.rejected);
    page.counter(
        "kvasir_requests_turned_away_total",
        "Requests that were not scheduled, because too many waited for it",
    )
    .is(host.conductor.turned_away());
    page.histogram(
        "kvasir_decision_seconds",
        "How long it took to decide where a request goes, once a worker was free",
    )
    .times(&[], &host.conductor.decision_times());
    page.gauge("kvasir_requests", "Requests scheduled and not finished").is(c.in_flight);
    page.counter(
        "kvasir_instances_forgotten_total",
        "Instances forgotten because they were silent for too long",
    )
    .is(c.forgotten);
    page.counter(
        "kvasir_memos_forgotten_total",
        "Memos of sessions and tenants that were forgotten to make room for others (conductor.sessions_max)",
    )
    .is(c.memos_forgotten);
    page.counter(
        "kvasir_names_refused_total",
        "Names of machines, network domains, models and adapters that got no number, because too many are known",
    )
    .is(c.names_refused);
    page.gauge("kvasir_instances", "Instances known, by role")
        .by("role", "prefill", c.prefill)
        .by("role", "decode", c.decode);
    let index = host.conductor.index_stats();
    page.gauge("kvasir_index_entries", "Distinct blocks in the prefix index").is(index.entries);
    page.gauge("kvasir_index_bytes", "Memory of the prefix index").is(index.bytes);
    page.counter("kvasir_index_refused_total", "Blocks that the prefix index refused because it was full")
        .is(index.refused);
}
