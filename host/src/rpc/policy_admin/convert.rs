//! Between what the policy host says and what the contract calls it.

use crate::policy::guard::WindowValues;
use crate::policy::history::{Entry, Named};
use crate::policy::{
    Beside, CounterValues, GuardConfig, LearningStatus, Share, SlotKind, SlotStatus, Stage, TrialStatus,
    WatchStatus,
};
use crate::rpc::validate;
use kvasir_proto::{self as proto, stage::Kind};
use tonic::Status;

/// What a caller wants a policy loaded for.
pub(in crate::rpc) fn stage(wanted: Option<proto::Stage>) -> Result<Stage, Status> {
    use proto::stage::Share as Wanted;
    let Some(wanted) = wanted else { return Ok(Stage::Active) };
    let refuse = |why| Err(validate::refuse("stage", why));
    let kind =
        Kind::try_from(wanted.kind).map_err(|_| validate::refuse("stage.kind", "is no known stage"))?;
    match (kind, wanted.share) {
        (Kind::Active, None) => Ok(Stage::Active),
        (Kind::Shadow, None) => Ok(Stage::Shadow),
        (Kind::Canary, Some(Wanted::PerMille(share))) => Ok(Stage::Canary(Share::PerMille(share))),
        (Kind::Canary, Some(Wanted::Tenant(tenant))) => Ok(Stage::Canary(Share::Tenant(tenant))),
        (Kind::Canary, None) => refuse("a canary takes a share of the requests, or a tenant; none was given"),
        (Kind::Active | Kind::Shadow, Some(_)) => refuse("only a canary takes a share or a tenant"),
    }
}

fn stage_out(stage: Stage) -> proto::Stage {
    use proto::stage::Share as Told;
    let (kind, share) = match stage {
        Stage::Active => (Kind::Active, None),
        Stage::Shadow => (Kind::Shadow, None),
        Stage::Canary(Share::PerMille(share)) => (Kind::Canary, Some(Told::PerMille(share))),
        Stage::Canary(Share::Tenant(tenant)) => (Kind::Canary, Some(Told::Tenant(tenant))),
    };
    proto::Stage { kind: kind.into(), share }
}

pub(super) fn policy(status: SlotStatus) -> proto::Policy {
    proto::Policy {
        slot: status.slot,
        name: status.name,
        version: status.version,
        engine: status.engine.to_owned(),
        digest: status.digest.unwrap_or_default(),
        generation: status.generation,
        settings: settings(status.settings),
        previous: status.previous.unwrap_or_default(),
        memory_bytes: status.memory_bytes,
        memory_bytes_max: status.memory_bytes_max,
        last_trip: status.last_trip.unwrap_or_default(),
        counters: Some(counters(status.counters)),
        totals: Some(counters(status.totals)),
        trial: status.trial.map(trial),
        paused: status.paused,
        watch: status.watch.map(|WatchStatus { seconds_left, window }| proto::Watch {
            seconds_left,
            window: Some(beside(window)),
        }),
        learning: Some(status.learning).filter(|learning| learning.learns).map(learning),
    }
}

fn trial(trial: TrialStatus) -> proto::Trial {
    proto::Trial {
        name: trial.name,
        version: trial.version,
        engine: trial.engine.to_owned(),
        digest: trial.digest.unwrap_or_default(),
        generation: trial.generation,
        settings: settings(trial.settings),
        stage: Some(stage_out(trial.stage)),
        counters: Some(counters(trial.counters)),
        asked: trial.agreement.asked,
        same: trial.agreement.same,
        dropped: trial.dropped,
        window: Some(beside(trial.window)),
        learning: Some(trial.learning).filter(|learning| learning.learns).map(learning),
    }
}

fn learning(status: LearningStatus) -> proto::Learning {
    let LearningStatus { learns: _, outcomes, dropped, faults, published, knowledge_bytes } = status;
    proto::Learning { outcomes, dropped, faults, published, knowledge_bytes }
}

fn beside(Beside { newcomer, compared }: Beside) -> proto::Beside {
    proto::Beside { newcomer: Some(window(newcomer)), compared: compared.map(window) }
}

fn window(values: WindowValues) -> proto::PolicyWindow {
    proto::PolicyWindow {
        seconds: values.seconds,
        calls: values.calls,
        trap_share: values.trap_share,
        deadline_miss_share: values.deadline_miss_share,
        invalid_share: values.invalid_share,
        call_ns_p99: values.call_ns_p99,
        requests: values.requests,
        rejected_share: values.rejected_share,
        blocks: values.blocks,
        hit_rate: values.hit_rate,
        ttft_ms: values.ttft_ms,
        tbt_ms: values.tbt_ms,
        cached_tokens: values.cached_tokens,
    }
}

pub(super) fn guards(config: &GuardConfig) -> proto::Guards {
    proto::Guards {
        window_s: config.window.as_secs_f64(),
        calls_min: config.calls_min,
        faults_share_max: config.faults_share_max,
        call_p99_ns_max: config.call_p99_max.as_nanos() as f64,
        hit_rate_fall_max: config.hit_rate_fall_max,
        rejected_rise_max: config.rejected_rise_max,
        watch_s: config.watch.as_secs_f64(),
    }
}

pub(super) fn history_entry(slot: SlotKind, entry: Entry) -> proto::HistoryEntry {
    proto::HistoryEntry {
        slot: slot.to_string(),
        at_ms: entry.at_ms,
        who: entry.who,
        cause: entry.cause,
        action: entry.action,
        stage: entry.stage,
        policy: Some(named(entry.policy)),
        settings: settings(entry.settings),
        before: entry.before.map(named),
        before_settings: settings(entry.before_settings),
        reason: entry.reason,
    }
}

fn named(policy: Named) -> proto::NamedPolicy {
    let digest = policy.digest.unwrap_or_default();
    proto::NamedPolicy { name: policy.name, version: policy.version, digest }
}

fn settings(settings: Vec<(String, String)>) -> Vec<proto::Setting> {
    settings.into_iter().map(|(name, value)| proto::Setting { name, value }).collect()
}

fn counters(c: CounterValues) -> proto::PolicyCounters {
    proto::PolicyCounters {
        calls: c.calls,
        call_ns_mean: c.ns_mean,
        traps: c.traps,
        deadline_misses: c.deadline_misses,
        invalid_answers: c.invalid_answers,
        fallbacks: c.fallbacks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_come_back_as_they_went_and_half_of_one_is_refused() {
        let shares = [Share::PerMille(1), Share::PerMille(1_000), Share::Tenant(7)].map(Stage::Canary);
        for wanted in [Stage::Active, Stage::Shadow].into_iter().chain(shares) {
            assert_eq!(stage(Some(stage_out(wanted))).unwrap(), wanted);
        }
        assert_eq!(stage(None).unwrap(), Stage::Active);
        let share = Some(proto::stage::Share::PerMille(5));
        for (kind, share, field) in [
            (Kind::Canary as i32, None, "stage: a canary takes"),
            (Kind::Shadow as i32, share, "stage: only a canary"),
            (Kind::Active as i32, share, "stage: only a canary"),
            (77, None, "stage.kind: "),
        ] {
            let refused = stage(Some(proto::Stage { kind, share })).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            assert!(refused.message().starts_with(field), "{refused}");
        }
    }
}
