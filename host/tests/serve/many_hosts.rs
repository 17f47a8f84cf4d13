//! One policy for three hosts: they follow the first, over its socket and over TCP.

use crate::process::Host;
use crate::replicas::until;
use kvasir::config::Config;
use kvasir::daemon::Daemon;
use serde_json::Value;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

const SLOT: &str = "evictor";

/// Nothing is watched, so the next one is told at once.
const UNWATCHED: &str = "policy.guard.watch=0s";

fn serves(host: &Host) -> String {
    host.policy(SLOT)["name"].as_str().unwrap().to_owned()
}

fn rollout(host: &Host) -> Value {
    let output = host.run(&["policy", "rollout", "status", "--json"], b"");
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["rollouts"][0].clone()
}

/// `a` keeps the rollouts; `b` asks over its socket, `c` over TCP with a token, and trusts nobody's components.
fn three(dir: &Path) -> [Host; 3] {
    let named = |name: &str| format!("node.name={name}");
    let folders = ["a", "b", "c"].map(|name| dir.join(name));
    folders.iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    let a = Host::start_with(&folders[0], &[&named("a"), UNWATCHED, "listen.grpc=127.0.0.1:0"]);
    let follow = format!("policy.follow=unix:{}", a.addr("control"));
    let b = Host::start_with(&folders[1], &[&named("b"), UNWATCHED, &follow]);
    let token = dir.join("token");
    std::fs::write(&token, a.token_for(&["--role", "policy"])).unwrap();
    let trusted = dir.join("none-is-trusted.toml"); // is not there, so nobody is
    let c = [
        format!("policy.follow={}", a.addr("grpc")),
        format!("policy.follow_token={}", token.display()),
        format!("policy.trust.file={}", trusted.display()),
    ];
    let c = Host::start_with(&folders[2], &[&named("c"), UNWATCHED, &c[0], &c[1], &c[2]]);
    [a, b, c]
}

#[test]
fn all_get_a_policy_and_all_go_back_when_one_refuses_it() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = three(dir.path());
    let [a, b, c] = &hosts;
    let names = || [a, b, c].map(serves);
    a.check(&["policy", "rollout", "status"], b"", 0, "no rollout; start one");
    a.check(&["policy", "rollout", "stop", SLOT], b"", 1, "no rollout in evictor");
    a.check(&["policy", "rollout", "start", SLOT, "seive"], b"", 2, "did you mean `sieve`");

    a.check(&["policy", "rollout", "start", SLOT, "sieve", "--pause", "0s"], b"", 0, "sieve, rolling");
    until("all serve sieve", || rollout(a)["phase"] == "done" && rollout(a)["hosts"][2]["step"] == "settled");
    assert_eq!(names(), ["sieve"; 3]);
    b.check(&["policy", "history", SLOT], b"", 0, "by rollout");

    // A component, which `c` does not trust.
    let file = dir.path().join("lru.wasm");
    let lru = kvasir_default_policies::EVICTORS.iter().find(|d| d.name == "lru").unwrap();
    std::fs::write(&file, lru.component).unwrap();
    let file = file.to_str().unwrap();
    a.check(&["policy", "rollout", "start", SLOT, file, "--pause", "0s"], b"", 0, "lru, rolling");
    until("it is stopped and all went back", || {
        let rollout = rollout(a);
        rollout["phase"] == "stopped"
            && [0, 1]
                .iter()
                .all(|&n| ["back", "waiting"].contains(&rollout["hosts"][n]["step"].as_str().unwrap()))
    });
    let stopped = rollout(a);
    assert!(stopped["reason"].as_str().unwrap().starts_with("c: policy `lru` is not trusted"), "{stopped}");
    assert_eq!(names(), ["sieve"; 3]);
    a.check(&["policy", "rollout", "resume", SLOT], b"", 1, "was stopped");
}

/// It takes connections and never answers.
#[test]
fn a_leader_that_hangs_holds_no_host_back_that_stops() {
    let dir = tempfile::tempdir().unwrap();
    let leader = TcpListener::bind("127.0.0.1:0").unwrap();
    let set = [
        format!("node.data_dir={}", dir.path().display()),
        format!("policy.follow={}", leader.local_addr().unwrap()),
        "listen.http=127.0.0.1:0".into(),
        "store.pool_bytes=8MiB".into(),
    ];
    let running = Daemon::start(Config::load(None, [], &set).unwrap()).unwrap();
    let host = Arc::downgrade(running.host());
    let _asked = leader.accept().unwrap();
    running.shutdown();
    assert!(host.upgrade().is_none(), "the thread that follows holds the host");
}
