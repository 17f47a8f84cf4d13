//! Policies that misbehave, and files that are no policies, in a host that serves real traffic.

use crate::process::{Host, Transport, content, runtime};
use crate::replicas::until;
use kvasir_client::control::{Control, ControlAddr, PolicySource};
use kvasir_client::data::{ClientError, Put};
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_proto::{self as proto, schedule_response::Decision};
use kvasir_tests::{bytes_of_100_mb, guest, import_not_granted, wrong_version};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u32 = 16 << 10;
/// How long a scenario waits for the breaker before it gives up: not an assertion, only an end.
const PATIENCE: Duration = Duration::from_secs(300);

const SET: [&str; 4] = [
    "policy.breaker_faults=6",
    "policy.breaker_window=10m",
    "policy.cold_deadline=500ms",
    "conductor.balance_every=50ms",
];

/// What the traffic did while it ran.
#[derive(Default)]
struct Traffic {
    stop: AtomicBool,
    decisions: AtomicU64,
    fallbacks: AtomicU64,
    blocks_put: AtomicU64,
    blocks_read: AtomicU64,
}

impl Traffic {
    /// Registers a pair of instances and one that drains, then schedules and completes without pause.
    fn schedule(&self, control: &ControlAddr) {
        runtime().block_on(async {
            let mut conductor = Control::connect(control, "").await.unwrap().conductor;
            for (name, prefill) in [("drains", true), ("p", true), ("d", false)] {
                let instance = proto::RegisterRequest {
                    name: name.into(),
                    prefill,
                    decode: !prefill,
                    capacity_blocks: 1 << 20,
                    ..Default::default()
                };
                let epoch = conductor.register(instance).await.unwrap().into_inner().epoch;
                let draining = name == "drains";
                let load = proto::ReportLoadRequest {
                    name: name.into(),
                    epoch,
                    free_blocks: 1 << 20,
                    draining,
                    ..Default::default()
                };
                conductor.report_load(load).await.unwrap();
            }
            let ask = proto::ScheduleRequest { prompt_tokens: 4096, must_run: true, ..Default::default() };
            while !self.stop.load(Ordering::Relaxed) {
                let answer = conductor.schedule(ask.clone()).await.unwrap().into_inner();
                let Some(Decision::Placement(placed)) = &answer.decision else { panic!("{answer:?}") };
                assert_eq!((placed.prefill.as_str(), placed.decode.as_str()), ("p", "d"));
                let stage = proto::complete_request::Stage::Finished.into();
                let done =
                    proto::CompleteRequest { request_id: answer.request_id, stage, ..Default::default() };
                conductor.complete(done).await.unwrap();
                self.fallbacks.fetch_add(u64::from(!answer.fallback.is_empty()), Ordering::Relaxed);
                self.decisions.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// Writes four times what the pool holds, over and over, and reads back what is still there.
    fn store(&self, host: &Host, transport: Transport) {
        let client = host.client(transport);
        let side = transport as u32;
        let key = |n: u32| BlockKey::from_engine_hash("load", &n.to_le_bytes());
        for turn in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let n = (turn % 1024) * 2 + side;
            match client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)) {
                Ok(Put::Stored | Put::AlreadyStored) => drop(self.blocks_put.fetch_add(1, Ordering::Relaxed)),
                other => panic!("block {n} over {transport:?}: {other:?}"),
            }
            // One just written, one of the other client, one that may be gone.
            let read = [n, n ^ 1, n.saturating_sub(200)];
            let found = client.get(&read.map(key), 0).unwrap();
            for (n, block) in read.into_iter().zip(found) {
                let Some(block) = block else { continue };
                match block.bytes() {
                    Ok(bytes) => assert!(bytes == content(n, BLOCK), "block {n}"),
                    Err(ClientError::LeaseExpired { .. }) => continue,
                    Err(error) => panic!("block {n}: {error}"),
                }
                self.blocks_read.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

async fn policy(control: &mut Control, slot: &str) -> proto::Policy {
    let list = control.policy.list(proto::ListPoliciesRequest {}).await.unwrap().into_inner().policies;
    list.into_iter().find(|p| p.slot == slot).unwrap()
}

/// Loads the bad guest of that slot and watches until the breaker has acted.
async fn harm(control: &mut Control, slot: &str, mode: &str, traffic: &Traffic) {
    let before = policy(control, slot).await;
    let (decided, fell_back) =
        (traffic.decisions.load(Ordering::Relaxed), traffic.fallbacks.load(Ordering::Relaxed));
    let source = PolicySource::Component { name: "bad".into(), bytes: guest(slot).to_vec() };
    let settings = [("mode", mode), ("after", "3")].map(|(n, v)| (n.to_owned(), v.to_owned()));
    let loaded = control.load_policy(slot, source, &settings).await.unwrap();
    assert_eq!((loaded.name.as_str(), loaded.engine.as_str()), ("bad", "wasm"), "{slot} `{mode}`");
    let start = Instant::now();
    let after = loop {
        let now = policy(control, slot).await;
        if now.generation != loaded.generation {
            break now;
        }
        assert!(start.elapsed() < PATIENCE, "{slot} `{mode}` is not taken out of service: {now:?}");
    };
    assert_eq!((&after.name, &after.digest), (&before.name, &before.digest), "{slot} `{mode}`");
    assert!(after.last_trip.contains("`bad` taken out of service"), "{slot} `{mode}`: {}", after.last_trip);
    let fallbacks = |p: &proto::Policy| p.totals.unwrap_or_default().fallbacks;
    assert!(fallbacks(&after) > fallbacks(&before), "{slot} `{mode}`: the fallback counter stands still");
    if slot == "scheduler" {
        assert!(traffic.fallbacks.load(Ordering::Relaxed) > fell_back);
        assert!(traffic.decisions.load(Ordering::Relaxed) > decided);
    }
}

#[test]
fn a_bad_policy_under_load_fails_no_request_and_goes_out_of_service() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &SET);
    let traffic = Traffic::default();
    std::thread::scope(|scope| {
        let threads = [
            scope.spawn(|| traffic.schedule(&host.control())),
            scope.spawn(|| traffic.store(&host, Transport::Unix)),
            scope.spawn(|| traffic.store(&host, Transport::Tcp)),
        ];
        let harm = scope.spawn(|| {
            let _stop = StopOnDrop(&traffic.stop);
            runtime().block_on(async {
                let mut control = Control::connect(&host.control(), "").await.unwrap();
                for mode in ["loop", "trap", "grow", "out-of-range", "unavailable", "false-transfer"] {
                    harm(&mut control, "scheduler", mode, &traffic).await;
                }
                for mode in ["loop", "trap", "grow", "free", "out-of-range", "repeat", "too-few", "too-many"]
                {
                    harm(&mut control, "evictor", mode, &traffic).await;
                }
                for mode in ["nan", "infinite", "flood", "trap", "loop"] {
                    harm(&mut control, "balancer", mode, &traffic).await;
                }
            });
        });
        harm.join().unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    for counter in [&traffic.decisions, &traffic.blocks_put, &traffic.blocks_read] {
        assert!(counter.load(Ordering::Relaxed) > 0);
    }
    host.check(&["policy", "list"], b"", 0, "evictor: the host stepped in: `bad` taken out of service");
    until("the trips are in the daemon's own log", || {
        // Once for each slot and mode: six, eight and five.
        host.log().matches("`bad` taken out of service: ").count() >= 19
    });
    host.check(&["stat", "--json"], b"", 0, r#""checksum_failures":0"#);
    assert_eq!(host.terminate(), Some(0));
}

/// The traffic ends even if the scenario fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_is_no_policy_is_refused_over_the_wire_and_the_running_policy_stays() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let good = guest("scheduler");
    let rows: [(&str, Vec<u8>, &str); 8] = [
        ("scheduler", b"#!/bin/sh\n".to_vec(), "not a WebAssembly component"),
        ("scheduler", b"\0asm\x01\0\0\0".to_vec(), "core module"),
        ("scheduler", guest("evictor").to_vec(), "kvasir:policy/scheduling@0.1.0"),
        ("evictor", good.to_vec(), "kvasir:policy/eviction@0.1.0"),
        ("scheduler", wrong_version(), "@0.9.0"),
        ("scheduler", good[..good.len() / 2].to_vec(), "does not compile"),
        ("scheduler", bytes_of_100_mb(), "the host accepts at most 33554432 B"),
        ("scheduler", import_not_granted(), "wasi:sockets/tcp@0.2.10"),
    ];
    runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        let list = proto::ListPoliciesRequest {};
        let serving = |list: proto::ListPoliciesResponse| {
            list.policies.into_iter().map(|p| (p.name, p.digest, p.generation)).collect::<Vec<_>>()
        };
        let before = serving(control.policy.list(list).await.unwrap().into_inner());
        for (slot, bytes, cause) in rows {
            let source = PolicySource::Component { name: "file".into(), bytes: bytes.clone() };
            let error = control.load_policy(slot, source, &[]).await.expect_err(cause).to_string();
            assert!(error.contains(cause), "`{cause}` is not in: {error}");
            let file = dir.path().join("file.wasm");
            std::fs::write(&file, &bytes).unwrap();
            host.check(&["policy", "load", slot, file.to_str().unwrap()], b"", 2, cause);
        }
        assert_eq!(serving(control.policy.list(list).await.unwrap().into_inner()), before);
    });
}

#[test]
fn a_file_in_the_watched_folder_goes_into_service_and_a_bad_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("policies");
    let host = Host::start_with(dir.path(), &[&format!("policy.dir={}", folder.display())]);
    let drop_in = |bytes: &[u8]| {
        let part = folder.join("evictor.part");
        std::fs::write(&part, bytes).unwrap();
        std::fs::rename(part, folder.join("evictor.wasm")).unwrap();
    };
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    drop_in(guest("evictor"));
    until("the file is not loaded", &|| host.policy("evictor")["name"] == "bad");
    let generation = host.policy("evictor")["generation"].clone();
    drop_in(b"half a policy");
    let logged = |part: &str| {
        let output = host.run(&["policy", "logs", "evictor"], b"");
        String::from_utf8_lossy(&output.stdout).contains(part)
    };
    until("the refusal is not in the log", &|| logged("not a WebAssembly component"));
    assert_eq!(host.policy("evictor")["generation"], generation);
    host.check(&["policy", "rollback", "evictor"], b"", 0, "workload-aware");
    drop_in(kvasir_default_policies::EVICTORS.iter().find(|p| p.name == "sieve").unwrap().component);
    until("the next file is not loaded", &|| host.policy("evictor")["name"] == "sieve");
}
