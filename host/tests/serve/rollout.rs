//! From shadow to service and back, as an operator does it: with the commands, on a running host.

use crate::process::{Host, KVASIR, runtime};
use crate::replicas::{metric, until};
use kvasir_client::control::Control;
use kvasir_proto::{self as proto, complete_request::Stage, schedule_response::Decision};
use kvasir_tests::guest;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

/// The guards judge soon, and the breaker does not act before them.
const SET: [&str; 5] = [
    "policy.breaker_faults=1000000",
    "policy.guard.window=30s",
    "policy.guard.calls_min=20",
    "policy.guard.faults_share_max=0.2",
    "policy.guard.watch=1h",
];

/// A pair of instances, and requests for it.
struct Requests {
    runtime: tokio::runtime::Runtime,
    control: Control,
}

impl Requests {
    fn at(host: &Host) -> Self {
        let runtime = runtime();
        let control = runtime.block_on(async {
            let mut control = Control::connect(&host.control(), "").await.unwrap();
            for (name, prefill) in [("p", true), ("d", false)] {
                let instance = proto::RegisterRequest {
                    name: name.into(),
                    prefill,
                    decode: !prefill,
                    capacity_blocks: 1 << 20,
                    ..Default::default()
                };
                let epoch = control.conductor.register(instance).await.unwrap().into_inner().epoch;
                let load = proto::ReportLoadRequest {
                    name: name.into(),
                    epoch,
                    free_blocks: 1 << 20,
                    ..Default::default()
                };
                control.conductor.report_load(load).await.unwrap();
            }
            control
        });
        Self { runtime, control }
    }

    /// Each is placed, whatever the policy answers.
    fn schedule(&mut self, requests: usize) {
        let Self { runtime, control } = self;
        runtime.block_on(async {
            for _ in 0..requests {
                let ask =
                    proto::ScheduleRequest { prompt_tokens: 4096, must_run: true, ..Default::default() };
                let answer = control.conductor.schedule(ask).await.unwrap().into_inner();
                assert!(matches!(answer.decision, Some(Decision::Placement(_))), "{answer:?}");
                let stage = Stage::Finished.into();
                let done =
                    proto::CompleteRequest { request_id: answer.request_id, stage, ..Default::default() };
                control.conductor.complete(done).await.unwrap();
            }
        });
    }
}

fn json(host: &Host, args: &[&str]) -> Value {
    let output = host.run(&[args, &["--json"]].concat(), b"");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn history(host: &Host, slot: &str) -> Vec<Value> {
    json(host, &["policy", "history", slot])["entries"].as_array().unwrap().clone()
}

/// The misbehaving policy of that slot, as a file.
fn bad(dir: &Path, slot: &str) -> String {
    let file = dir.join(format!("{slot}-guest.wasm"));
    std::fs::write(&file, guest(slot)).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn from_shadow_into_service_and_back_by_a_guard_and_the_history_tells_why() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_to_restart(dir.path(), &SET);
    let mut requests = Requests::at(&host);
    let file = bad(dir.path(), "scheduler");
    let load = ["policy", "load", "scheduler", &file, "--setting", "mode=out-of-range"];
    let load = [&load[..], &["--setting", "after=200", "--shadow"]].concat();
    let shown = host.check(&load, b"", 0, "shadow");
    assert!(shown.contains("active") && shown.contains("mooncake"), "{shown}");
    let status = || json(&host, &["policy", "status", "scheduler"])["policy"].clone();
    until("the shadow is asked", || {
        requests.schedule(10);
        let now = status();
        assert_ne!(now["trial"], Value::Null, "{now}");
        now["trial"]["asked"].as_u64().unwrap() >= 30
    });
    let now = status();
    let (name, trial) = (&now["name"], &now["trial"]);
    assert_eq!(
        (name, &trial["name"], &trial["stage"]),
        (&"mooncake".into(), &"bad".into(), &"shadow".into())
    );
    assert_eq!(trial["asked"], trial["same"], "there is one pair to choose: {trial}");
    let text = host.check(&["policy", "status", "scheduler"], b"", 0, "agreement 100.0%");
    assert!(text.contains("tried") && text.contains("hit rate") && text.contains("guard acts"), "{text}");

    host.check(&["policy", "promote", "scheduler"], b"", 0, "scheduler: `bad 0.1.0` serves now");
    // From the guards' next look on.
    until("it is watched", || status()["watch"]["seconds_left"].as_u64().is_some_and(|left| left > 3_000));
    host.check(&["policy", "status", "scheduler"], b"", 0, "watched for another");
    until("a guard puts mooncake back", || {
        requests.schedule(50);
        status()["name"] == "mooncake"
    });
    let rollbacks = |guard| metric(&host, "kvasir_policy_rollbacks_total", guard);
    assert_eq!((rollbacks("guard=\"invalid-answers\""), rollbacks("slot=\"scheduler\"")), (1, 1));
    host.check(&["policy", "list"], b"", 0, "guard `invalid-answers`");
    host.check(&["policy", "logs", "scheduler"], b"", 0, "guard `invalid-answers`");

    let check = |host: &Host| {
        let entries = history(host, "scheduler");
        let told = entries.iter().filter(|entry| entry["action"] != "started");
        let [back, promoted, tried] = &told.collect::<Vec<_>>()[..] else { panic!("{entries:?}") };
        assert_eq!((&back["action"], &back["cause"]), (&"rolled-back".into(), &"guard".into()), "{back}");
        assert_eq!((&back["who"], &back["before"]["name"]), (&"host".into(), &"bad".into()), "{back}");
        let reason = back["reason"].as_str().unwrap();
        assert!(reason.contains("guard `invalid-answers`") && reason.contains("is allowed"), "{reason}");
        assert_eq!((&promoted["action"], &promoted["cause"]), (&"promoted".into(), &"operator".into()));
        assert_eq!((&tried["action"], &tried["stage"]), (&"tried".into(), &"shadow".into()), "{tried}");
        assert_eq!(tried["settings"]["mode"], "out-of-range", "{tried}");
        for entry in [promoted, tried] {
            assert!(entry["who"].as_str().unwrap().starts_with("user "), "{entry}");
        }
    };
    check(&host);
    let host = host.restart(dir.path(), &SET);
    check(&host);
    assert_eq!(history(&host, "scheduler")[0]["action"], "started");
    host.check(&["policy", "history"], b"", 0, "guard `invalid-answers`");
}

#[test]
fn a_canary_decides_its_share_and_goes_on_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_to_restart(dir.path(), &SET);
    let load = ["policy", "load", "scheduler", "round-robin"];
    host.check(&[&load[..], &["--canary", "100%"]].concat(), b"", 0, "canary 100%");
    let mut requests = Requests::at(&host);
    requests.schedule(30);
    let status = |host: &Host| json(host, &["policy", "status", "scheduler"])["policy"].clone();
    let now = status(&host);
    assert!(now["trial"]["calls"].as_u64().unwrap() >= 30 && now["name"] == "mooncake", "{now}");
    host.check(&["policy", "pause", "scheduler"], b"", 0, "paused");
    let host = host.restart(dir.path(), &SET);
    let now = status(&host);
    assert_eq!((&now["trial"]["stage"], &now["paused"]), (&"canary 100%".into(), &true.into()), "{now}");
    Requests::at(&host).schedule(10);
    assert_eq!(status(&host)["trial"]["calls"], 0, "paused");
    host.check(&["policy", "resume", "scheduler"], b"", 0, "goes on");
    assert_eq!(status(&host)["paused"], false);
    host.check(&[&load[..], &["--canary", "tenant=7"]].concat(), b"", 0, "the trial of round-robin ");
    host.check(&["policy", "rollback", "scheduler"], b"", 0, "the trial is over");
    assert_eq!(status(&host)["trial"], Value::Null);
    let actions: Vec<_> = history(&host, "scheduler").iter().map(|entry| entry["action"].clone()).collect();
    let expected = ["trial-ended", "tried", "resumed", "started", "paused", "tried", "started"];
    assert_eq!(actions, expected);
}

#[test]
fn a_wrong_step_says_the_next_right_one() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let check = |args: &[&str], code: i32, part: &str| {
        host.check(&[&["policy"], args].concat(), b"", code, part);
    };
    check(&["promote", "scheduler"], 1, "load one with --shadow or --canary first");
    check(&["rollback", "evictor"], 1, "no previous policy");
    check(&["promte", "scheduler"], 2, "promote");
    check(&["status", "schedular"], 2, "did you mean `scheduler`?");
    check(&["load", "evictor", "lru", "--canary", "5%"], 2, "--shadow");
    check(&["load", "scheduler", "random", "--canary", "5"], 2, "`5%`");
    check(&["load", "scheduler", "random", "--canary", "0.01%"], 2, "one digit");
    check(&["load", "scheduler", "random", "--shadow", "--active"], 2, "cannot be used with");
    check(&["load", "scheduler", "randm", "--shadow"], 2, "did you mean `random`?");
    check(&["set", "scheduler"], 2, "NAME=VALUE");
    check(&["set", "scheduler", "--unset", "slack"], 1, "no setting `slack` that could be unset");
    check(&["set", "scheduler", "slack"], 2, "is not NAME=VALUE");
    check(&["logs", "evictor", "--since", "yesterday"], 2, "10m");
    check(&["history", "--limit", "0"], 2, "0");
    assert_eq!(host.policy("evictor")["generation"], 1);
    assert_eq!(json(&host, &["policy", "history", "evictor"])["entries"].as_array().unwrap().len(), 1);
}

#[test]
fn settings_change_without_the_file_and_as_a_trial() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_to_restart(dir.path(), &[]);
    let file = bad(dir.path(), "scheduler");
    let load = ["policy", "load", "scheduler", &file, "--setting", "after=5"];
    host.check(&load, b"", 0, "bad");
    std::fs::remove_file(&file).unwrap();
    let digest = host.policy("scheduler")["digest"].clone();
    let settings = |host: &Host| host.policy("scheduler")["settings"].to_string();
    host.check(&["policy", "set", "scheduler", "after=7", "mode=none"], b"", 0, "bad");
    assert_eq!(settings(&host), r#"{"after":"7","mode":"none"}"#);
    host.check(&["policy", "set", "scheduler", "--unset", "mode"], b"", 0, "bad");
    assert_eq!(settings(&host), r#"{"after":"7"}"#);
    // A swap for nothing would be its own predecessor.
    let generation = host.policy("scheduler")["generation"].clone();
    host.check(&["policy", "set", "scheduler", "after=7"], b"", 0, "bad");
    assert_eq!(host.policy("scheduler")["generation"], generation);
    host.check(&["policy", "set", "scheduler", "mode=nonsense"], b"", 2, "`mode`");
    host.check(&["policy", "set", "scheduler", "moed=none"], b"", 2, "did you mean `mode`?");
    assert_eq!((settings(&host), &host.policy("scheduler")["digest"]), (r#"{"after":"7"}"#.into(), &digest));
    host.check(&["policy", "set", "scheduler", "after=9", "--shadow"], b"", 0, "shadow");
    let trial = host.policy("scheduler")["trial"].clone();
    assert_eq!((&trial["digest"], &trial["settings"]["after"]), (&digest, &"9".into()));
    host.check(&["policy", "promote", "scheduler"], b"", 0, "bad");
    let host = host.restart(dir.path(), &[]);
    assert_eq!(settings(&host), r#"{"after":"9"}"#);
    let changed: Vec<_> = history(&host, "scheduler").iter().map(|e| e["settings"].to_string()).collect();
    let expected = [
        r#"{"after":"9"}"#,
        r#"{"after":"9"}"#,
        r#"{"after":"9"}"#,
        r#"{"after":"7"}"#,
        r#"{"after":"7","mode":"none"}"#,
        r#"{"after":"5"}"#,
        "{}",
    ];
    assert_eq!(changed, expected);
    let told = |n: usize| {
        let entry = &history(&host, "scheduler")[n];
        (entry["action"].clone(), entry["before"]["settings"].to_string())
    };
    assert_eq!(told(3), ("set".into(), r#"{"after":"7","mode":"none"}"#.into()));
    assert_eq!(told(4), ("set".into(), r#"{"after":"5"}"#.into()));
    let audit = std::fs::read_to_string(dir.path().join("audit.log")).unwrap();
    for what in ["Configure", "Promote"] {
        let line = audit.lines().find(|line| line.contains(&format!("PolicyAdmin/{what}\"")));
        assert!(line.is_some_and(|line| line.contains("scheduler: ")), "{what}: {audit}");
    }
}

/// `kvasir policy logs -f`, and the lines it prints.
struct Follower {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Follower {
    fn of(host: &Host, args: &[&str]) -> Self {
        let mut command = Command::new(KVASIR);
        command.args(["policy", "logs", "scheduler", "--follow"]).args(args);
        command.env("KVASIR_GRPC", format!("unix:{}", host.addr("control")));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (line, lines) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|l| line.send(l)));
        Self { child, lines }
    }

    fn next(&self) -> String {
        // The test runner's time limit ends this if there is none.
        self.lines.recv().expect("a line")
    }

    /// Exit code and standard error, once nothing more is printed.
    fn end(self) -> (Option<i32>, String) {
        assert_eq!(self.lines.iter().collect::<Vec<_>>(), [""; 0]);
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[test]
fn logs_are_followed_without_a_line_lost_or_told_twice() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let file = bad(dir.path(), "balancer");
    // Each load has the guest say which harm it will do, in each of its instances.
    let load = |slot: &str, mode: &str| {
        let mode = format!("mode={mode}");
        host.check(&["policy", "load", slot, &file, "--setting", &mode], b"", 0, "bad");
    };
    let lines = |args: &[&str]| {
        let page = json(&host, &[&["policy", "logs", "balancer"], args].concat());
        page["lines"].as_array().unwrap().clone()
    };
    load("balancer", "none");
    let all = lines(&[]);
    assert!(!all.is_empty() && all.iter().all(|line| line["text"] == "will do: none"), "{all:?}");
    assert_eq!(lines(&["--level", "warn"]), [Value::Null; 0]);
    assert_eq!(lines(&["--since", "1h"]), all);
    assert_eq!(lines(&["--since", "2100-01-01T00:00:00Z"]), [Value::Null; 0]);

    let file = bad(dir.path(), "scheduler");
    let load = |mode: &str| {
        let mode = format!("mode={mode}");
        host.check(&["policy", "load", "scheduler", &file, "--setting", &mode], b"", 0, "bad");
    };
    load("none");
    let (first, second) = (Follower::of(&host, &["--json"]), Follower::of(&host, &["--level", "info"]));
    let mut numbers = Vec::new();
    for mode in ["none", "out-of-range", "unavailable"] {
        if mode != "none" {
            load(mode);
        }
        loop {
            let line: Value = serde_json::from_str(&first.next()).unwrap();
            numbers.push(line["number"].as_u64().unwrap());
            if line["text"] == format!("will do: {mode}") {
                break;
            }
        }
    }
    assert!(second.next().ends_with("info  will do: none"));
    let stop = rustix::process::Pid::from_child(&first.child);
    rustix::process::kill_process(stop, rustix::process::Signal::INT).unwrap();
    let rest: Vec<_> = first.lines.iter().collect();
    numbers.extend(
        rest.iter().map(|line| serde_json::from_str::<Value>(line).unwrap()["number"].as_u64().unwrap()),
    );
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    assert_eq!(first.end(), (Some(0), String::new()));
    assert_eq!(host.terminate(), Some(0));
    while second.lines.recv().is_ok() {}
    assert_eq!(second.end(), (Some(1), "kvasir: the host is gone\n".into()));
}
