//! A policy that learns, in a host that serves: what it learned reaches decisions, and outlives its learner, the host and
//! its own replacement.

use crate::process::{Host, runtime};
use crate::replicas::{metric, until};
use kvasir_client::control::{Control, PolicySource, PolicyStage};
use kvasir_proto::{self as proto, schedule_response::Decision};
use kvasir_tests::guest;

/// Loads the learning scheduler over whatever serves.
async fn load(control: &mut Control, mode: &str, after: &str) {
    load_as(control, PolicyStage::Active, mode, after).await;
}

async fn load_as(control: &mut Control, stage: PolicyStage, mode: &str, after: &str) {
    let bytes = guest("learning").to_vec();
    let settings = [("mode", mode), ("after", after)].map(|(n, v)| (n.to_owned(), v.to_owned()));
    let source = PolicySource::Component { name: "learning".into(), bytes };
    control.load_policy_as("scheduler", source, &settings, stage).await.unwrap();
}

async fn register(control: &mut Control) {
    for (name, prefill) in [("p", true), ("d", false)] {
        let instance = proto::RegisterRequest {
            name: name.into(),
            prefill,
            decode: !prefill,
            capacity_blocks: 1 << 20,
            ..Default::default()
        };
        control.conductor.register(instance).await.unwrap();
    }
}

/// Schedules so many requests by the component, and finishes them.
async fn serve(control: &mut Control, requests: usize) {
    serve_by(control, "counting", requests).await;
}

async fn serve_by(control: &mut Control, policy: &str, requests: usize) {
    register(control).await; // so that they are not silent
    for _ in 0..requests {
        let ask = proto::ScheduleRequest { prompt_tokens: 4096, must_run: true, ..Default::default() };
        let answer = control.conductor.schedule(ask).await.unwrap().into_inner();
        assert!(matches!(answer.decision, Some(Decision::Placement(_))), "{answer:?}");
        assert_eq!((answer.policy.as_str(), answer.fallback.as_str()), (policy, ""));
        let stage = proto::complete_request::Stage::Finished.into();
        let done = proto::CompleteRequest { request_id: answer.request_id, stage, ..Default::default() };
        control.conductor.complete(done).await.unwrap();
    }
}

/// Waits until what decides knows of so many finished requests.
fn until_known(host: &Host, requests: u64) {
    let line = format!("knows of {requests} finished requests");
    until(&line, || says(host, &line));
}

/// What decides says when what it knows was learned in an earlier run of the host.
const EARLIER_RUN: &str = "what is known is of an earlier run";

fn says(host: &Host, line: &str) -> bool {
    let logs = host.run(&["policy", "logs", "scheduler"], b"");
    String::from_utf8_lossy(&logs.stdout).contains(line)
}

#[test]
fn what_was_learned_survives_the_learner_the_host_and_a_swap() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["conductor.balance_every=50ms"];
    let host = Host::start_with(dir.path(), &set);
    let faults = |host: &Host| metric(host, "kvasir_policy_learner_faults_total", r#"slot="scheduler""#);
    runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        load(&mut control, "none", "0").await;
        until_known(&host, 0);
        serve(&mut control, 5).await;
        until_known(&host, 5);
    });
    assert_eq!(metric(&host, "kvasir_policy_outcomes_total", r#"slot="scheduler""#), 5);
    assert_eq!(faults(&host), 0);

    assert!(!says(&host, EARLIER_RUN));
    assert_eq!(host.terminate(), Some(0));

    let host = Host::start_with(dir.path(), &set);
    runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        until_known(&host, 5);
        serve(&mut control, 1).await;
        until_known(&host, 6);
        assert!(says(&host, EARLIER_RUN), "its identities mean other instances now");
        // A swap for itself: one whose learner traps at the fourth outcome.
        load(&mut control, "trap", "3").await;
        serve(&mut control, 1).await;
        until_known(&host, 7);
        serve(&mut control, 9).await;
        until("the learner traps", || faults(&host) > 0);
        serve(&mut control, 1).await; // what decides goes on
    });
    let policy = host.policy("scheduler");
    assert_eq!((policy["name"].as_str(), policy["traps"].as_u64()), (Some("counting"), Some(0)), "{policy}");
    until("a learner follows", || metric(&host, "kvasir_policy_published_total", r#"slot="scheduler""#) > 3);
    assert_eq!(host.terminate(), Some(0));
}

/// What it learned beside the active policy it decides by once it is promoted; its learner's failures are the trial's own.
#[test]
fn what_learned_on_trial_knows_it_when_it_is_promoted() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["conductor.balance_every=50ms"]);
    let on_trial = |name: &str| host.policy("scheduler")["trial"]["learning"][name].as_u64();
    let runtime = runtime();
    let mut control = runtime.block_on(Control::connect(&host.control(), "")).unwrap();
    runtime.block_on(load_as(&mut control, PolicyStage::Shadow, "trap", "2"));
    until("its learner traps, and the next", || {
        runtime.block_on(serve_by(&mut control, "mooncake", 1));
        on_trial("faults") > Some(1)
    });
    let policy = host.policy("scheduler");
    assert_eq!((policy["name"].as_str(), policy["traps"].as_u64()), (Some("mooncake"), Some(0)), "{policy}");

    runtime.block_on(load_as(&mut control, PolicyStage::Shadow, "none", "0"));
    let begun = || (on_trial("faults"), on_trial("published")) == (Some(0), Some(1));
    until("the learner of this trial is there", begun);
    runtime.block_on(serve_by(&mut control, "mooncake", 3));
    until("it heard of them", || on_trial("outcomes") == Some(3));
    assert_eq!(metric(&host, "kvasir_policy_learner_faults_total", r#"slot="scheduler""#), 0);
    host.check(&["policy", "promote", "scheduler"], b"", 0, "counting");
    runtime.block_on(serve(&mut control, 1));
    until_known(&host, 4);
    assert!(host.policy("scheduler")["learning"]["outcomes"].as_u64() > Some(0));
    host.check(&["policy", "status", "scheduler"], b"", 0, "  learner   ");
    drop(control);
    assert_eq!(host.terminate(), Some(0));
}

/// The admitter is not told that a prefill takes longer than its instance registered, but learns it.
#[test]
fn an_admitter_refuses_what_it_learned_will_be_late() {
    const SLO_MS: f64 = 50.0;
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["conductor.balance_every=50ms"]);
    let ask = |ttft_slo_ms| proto::ScheduleRequest { prompt_tokens: 16, ttft_slo_ms, ..Default::default() };
    let runtime = runtime();
    let mut control = runtime.block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        let bytes = guest("learning-admitter").to_vec();
        let source = PolicySource::Component { name: "learning-admitter".into(), bytes };
        control.load_policy("admitter", source, &[]).await.unwrap();
        control
    });
    // What ends before there is a learner is not heard of, so they go on being late.
    until("the admitter refuses", || {
        runtime.block_on(async {
            register(&mut control).await; // so that they are not silent
            let answer = control.conductor.schedule(ask(SLO_MS)).await.unwrap().into_inner();
            match answer.decision {
                Some(Decision::Rejection(rejection)) => rejection.retry_after_ms > 0,
                _ => {
                    end_late(&mut control, answer.request_id, 4 * SLO_MS as u64).await;
                    false
                }
            }
        })
    });
    runtime.block_on(async {
        let admitted = control.conductor.schedule(ask(1e6)).await.unwrap().into_inner();
        assert!(matches!(admitted.decision, Some(Decision::Placement(_))), "{admitted:?}");
    });
    let policy = host.policy("admitter");
    assert_eq!((policy["name"].as_str(), policy["traps"].as_u64()), (Some("late"), Some(0)), "{policy}");
    assert_eq!(metric(&host, "kvasir_policy_learner_faults_total", r#"slot="admitter""#), 0);
}

/// The first token comes so late, and is the last one.
async fn end_late(control: &mut Control, request_id: u64, late_ms: u64) {
    use proto::complete_request::Stage;
    std::thread::sleep(std::time::Duration::from_millis(late_ms));
    for stage in [Stage::Prefill, Stage::Finished] {
        let done = proto::CompleteRequest { request_id, stage: stage.into(), ..Default::default() };
        control.conductor.complete(done).await.unwrap();
    }
}
