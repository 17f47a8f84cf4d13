//! What was decided on a host that serves can be explained, recorded, and asked again.

use crate::process::{Host, KVASIR, runtime};
use crate::replicas::until;
use kvasir::policy::record::{Record, Records};
use kvasir_client::control::{Control, ControlAddr};
use kvasir_dataplane::BlockKey;
use kvasir_proto::{self as proto, schedule_response::Decision};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Output};

/// Six instances of three kinds, two of which hold a prompt.
async fn register(control: &mut Control) {
    for (name, prefill, decode) in [
        ("p0", true, false),
        ("p1", true, false),
        ("d0", false, true),
        ("d1", false, true),
        ("both0", true, true),
        ("both1", true, true),
    ] {
        let instance = proto::RegisterRequest {
            name: name.into(),
            prefill,
            decode,
            capacity_blocks: 1 << 20,
            ..Default::default()
        };
        let epoch = control.conductor.register(instance).await.unwrap().into_inner().epoch;
        if ["p1", "both0"].contains(&name) {
            let blocks = (1..=8).collect();
            let stored = proto::BlocksStoredRequest {
                name: name.into(),
                epoch,
                sequence: 1,
                blocks,
                ..Default::default()
            };
            control.conductor.blocks_stored(stored).await.unwrap();
        }
    }
}

/// The ids of some decisions: placed, rejected by the scheduler and refused by the admitter.
async fn decide(control: &mut Control) -> Vec<u64> {
    let mut ids = Vec::new();
    for n in 0..60u32 {
        let ask = proto::ScheduleRequest {
            prompt_tokens: 512 * (1 + n % 16),
            output_tokens: 100,
            blocks: (1..=u64::from(n % 16 + 1)).collect(),
            tenant: n % 3,
            session: u64::from(n % 5),
            ttft_slo_ms: if n % 6 == 5 { 0.001 } else { 0.0 },
            explain: n % 10 == 0,
            ..Default::default()
        };
        let answer = control.conductor.schedule(ask).await.unwrap().into_inner();
        let placed = matches!(answer.decision, Some(Decision::Placement(_)));
        assert_eq!(answer.request_id, if placed { answer.decision_id } else { 0 });
        ids.push(answer.decision_id);
    }
    ids
}

fn kvasir(args: &[&str]) -> Output {
    Command::new(KVASIR).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn records(file: &Path) -> Vec<Record> {
    let records: Result<_, _> = Records::new(BufReader::new(File::open(file).unwrap())).collect();
    records.unwrap()
}

#[test]
fn decisions_are_explained_and_a_recording_is_answered_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("decisions.jsonl");
    let recording = format!("explain.file={}", file.display());
    let host = Host::start_with(
        dir.path(),
        &[
            &recording,
            "explain.sample=1",
            "conductor.balance_every=50ms",
            "conductor.instance_ttl=1h",
            // A call that a busy machine hardly runs for a second would be late, and another policy decide.
            "policy.hot_deadline=1s",
        ],
    );
    let mut recorded = BTreeMap::new();
    for scheduler in ["mooncake", "overlap-cost"] {
        let loaded = host.run(&["policy", "load", "scheduler", scheduler], b"");
        assert!(loaded.status.success(), "{}", text(&loaded.stderr));
        let ids = runtime().block_on(async {
            let mut control = Control::connect(&host.control(), "").await.unwrap();
            register(&mut control).await;
            decide(&mut control).await
        });
        recorded.insert(scheduler, ids);
    }

    let ids = &recorded["overlap-cost"];
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "each decision has an id of its own: {ids:?}");
    let explained = host.run(&["explain", &ids[0].to_string()], b"");
    let said = text(&explained.stdout);
    assert!(explained.status.success(), "{}", text(&explained.stderr));
    for part in ["`overlap-cost` chose", "chosen", "both1", "d0", "scores     as they were", "prefix, blocks"]
    {
        assert!(said.contains(part), "`{part}` in {said}");
    }
    let explained = host.run(&["explain", "request", &ids[1].to_string(), "--json"], b"");
    let object: serde_json::Value = serde_json::from_slice(&explained.stdout).unwrap();
    assert_eq!((object["id"].as_u64(), object["scores_from"].as_str()), (Some(ids[1]), Some("asked_again")));
    let rows = object["prefill"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "{rows:?}");
    assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 1, "{rows:?}");
    assert!(rows.iter().all(|row| row["score"].is_number() || row["score"].is_null()), "{rows:?}");
    // A policy that serves no more is not asked, and what it decided is there.
    let old = recorded["mooncake"][1].to_string();
    let explained = host.run(&["explain", &old, "--json"], b"");
    let object: serde_json::Value = serde_json::from_slice(&explained.stdout).unwrap();
    assert_eq!(
        (object["scheduler"]["name"].as_str(), object["scores_from"].as_str()),
        (Some("mooncake"), Some("none"))
    );
    host.check(&["explain", "999999"], b"", 1, "is not kept");
    let line = host.run(&["explain", &ids[7].to_string(), "--record"], b"");
    let record = Record::parse(text(&line.stdout).trim()).unwrap();
    assert_eq!((record.id, record.policy.name.as_str()), (ids[7], "overlap-cost"));

    until("the balancer's ticks are written", || {
        std::fs::read_to_string(&file).unwrap().matches(r#""slot":"balancer""#).count() > 3
    });
    assert_eq!(host.terminate(), Some(0));
    let all = records(&file);
    for (scheduler, ids) in &recorded {
        let of_policy = all.iter().filter(|r| r.slot == "scheduler" && r.policy.name == *scheduler);
        assert_eq!(of_policy.map(|record| record.id).collect::<Vec<_>>(), *ids);
    }
    assert!(all.iter().any(|r| r.slot == "admitter" && r.answer == [0]), "the admitter was asked");
    assert!(all.iter().all(|r| r.fallback.is_none()));

    // Each policy answers its own records bit for bit, as component and natively.
    for policy in ["mooncake", "overlap-cost", "slo", "static"] {
        let own: String = all
            .iter()
            .filter(|record| record.policy.name == policy)
            .map(|record| serde_json::to_string(record).unwrap() + "\n")
            .collect();
        let own_file = dir.path().join(format!("{policy}.jsonl"));
        std::fs::write(&own_file, &own).unwrap();
        let own_file = own_file.to_str().unwrap();
        for native in [&[][..], &["--native"]] {
            let args = [&["policy", "run", policy, "--on", own_file, "--all", "--json"][..], native].concat();
            let run = kvasir(&args);
            assert!(run.status.success(), "{}", text(&run.stderr));
            let tally: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
            let same = tally["same"].as_u64().unwrap();
            assert_eq!(
                (tally["different"].as_u64(), tally["failed"].as_u64()),
                (Some(0), Some(0)),
                "{policy} {tally}"
            );
            assert_eq!(same, own.lines().count() as u64, "{policy} {tally}");
        }
    }
}

/// A host, its decisions, and their records.
fn recorded(folder: &Path) -> (Host, Vec<u64>, String) {
    let host = Host::start_with(folder, &["conductor.instance_ttl=1h"]);
    let ids = runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        register(&mut control).await;
        decide(&mut control).await
    });
    let record = |id: &u64| text(&host.run(&["explain", &id.to_string(), "--record"], b"").stdout);
    let lines = ids.iter().map(record).collect();
    (host, ids, lines)
}

#[test]
fn a_recording_is_asked_of_another_policy_and_of_one_that_fails() {
    let dir = tempfile::tempdir().unwrap();
    let (_host, ids, lines) = recorded(dir.path());
    let file = dir.path().join("some.jsonl");
    std::fs::write(&file, lines).unwrap();
    let file = file.to_str().unwrap();

    let run = kvasir(&["policy", "run", "random", "--on", file, "--id", &ids[3].to_string()]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let said = text(&run.stdout);
    for part in ["by mooncake", "score then", "slot 3", "prefix, blocks"] {
        assert!(said.contains(part), "`{part}` in {said}");
    }
    let run = kvasir(&["policy", "run", "round-robin", "--on", file, "--all"]);
    assert!(run.status.success() && text(&run.stdout).contains("different"), "{}", text(&run.stdout));

    let guest = dir.path().join("guest.wasm");
    std::fs::write(&guest, kvasir_tests::guest("scheduler")).unwrap();
    let guest = guest.to_str().unwrap();
    for all in [&["--all"][..], &[]] {
        let trap = ["policy", "run", guest, "--on", file, "--setting", "mode=trap"];
        let run = kvasir(&[&trap[..], all].concat());
        let said = text(&run.stdout) + &text(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{said}");
        assert!(said.contains("trapped"), "{said}");
    }
    for (args, expected) in [
        (&["random", "--on", "/nowhere"][..], "cannot open the recording /nowhere"),
        (&["randon", "--on", file], "did you mean `random`?"),
        (&["lru", "--on", file], "holds no record of the slot evictor"),
        (&["random", "--on", file, "--id", "12345"], "no record of the slot scheduler with id 12345"),
        (&["random", "--on", guest], "line 1 of the recording"),
    ] {
        let run = kvasir(&[&["policy", "run"], args].concat());
        let said = text(&run.stderr);
        assert!(run.status.code() == Some(2) && said.contains(expected), "{said}");
    }
}

#[test]
fn a_recording_is_replayed_through_two_policies() {
    let dir = tempfile::tempdir().unwrap();
    let (host, ids, lines) = recorded(dir.path());
    let [file, page, chain, guest] =
        ["some.jsonl", "page.html", "two.toml", "bad.wasm"].map(|name| dir.path().join(name));
    let last = lines.lines().last().unwrap().replacen(r#""slot":"scheduler""#, r#""slot":"evictor""#, 1);
    std::fs::write(&file, &lines).unwrap();
    std::fs::write(&chain, "[[scorer]]\nsource = \"netkv\"\n[picker]\nsource = \"pick\"\n").unwrap();
    std::fs::write(&guest, kvasir_tests::guest("scheduler")).unwrap();
    let [file, page, chain, guest] = [&file, &page, &chain, &guest].map(|path| path.to_str().unwrap());
    let replay = |policy: &str, more: &[&str], code: i32, part: &str| {
        host.check(&[&["policy", "replay", policy, "--trace", file], more].concat(), b"", code, part)
    };

    // The policy that serves decided all of it; the other one did not, and what differs is told.
    let json =
        replay("random", &["--against", "current", "--json", "--report", page], 0, r#""mode":"decisions""#);
    let told: serde_json::Value = serde_json::from_str(&json).unwrap();
    let decisions = ids.len();
    assert_eq!(
        (&told["decisions"], &told["baseline"]["as_recorded"]),
        (&decisions.into(), &decisions.into())
    );
    let agree = told["agree"].as_u64().unwrap();
    assert_eq!(told["candidate"]["as_recorded"].as_u64(), Some(agree), "{told}");
    let differing = told["differing"].as_array().unwrap();
    assert!(agree < decisions as u64 && differing.len() == 5, "{told}");
    assert!(differing.iter().all(|d| d["recorded"] == d["baseline"] && d["recorded"] != d["candidate"]));
    assert!(differing[0]["baseline"].as_str().unwrap().starts_with("prefill slot"), "{told}");
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("Decisions that differ") && html.ends_with("</html>\n"), "{html}");
    let same = format!("Both answer {decisions} of {decisions} decisions alike");
    replay("mooncake", &[], 0, &same);
    replay("mooncake", &["--limit", "7"], 0, "Both answer 7 of 7 decisions alike");
    replay(chain, &["--against", "mooncake"], 0, "the first that differ");
    replay(guest, &["--setting", "mode=trap"], 1, "decision 1: `schedule` trapped");
    replay("mooncake", &["--prefill", "2"], 2, "is a recording of decisions, which has instances");
    replay("lru", &[], 2, "holds no decision of the evictor");

    // What takes traces says which file this is, and what reads it.
    for verb in [
        &["replay", "--capacity-blocks", "8"][..],
        &["trace", "stats"],
        &["replay", "--capacity-blocks", "8", "--format", "bailian"],
    ] {
        let trace = [verb, &["--trace", file]].concat();
        let trace = if verb[0] == "trace" { vec!["trace", "stats", file] } else { trace };
        host.check(
            &trace,
            b"",
            2,
            "`kvasir policy replay` and `kvasir policy run` read recordings of decisions",
        );
    }
    std::fs::write(file, last).unwrap();
    host.check(&["policy", "replay", "lru", "--trace", file], b"", 2, "line 1 of the recording");
}

#[test]
fn an_evicted_block_tells_who_chose_it_to_its_own_tenant_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("decisions.jsonl");
    let recording = format!("explain.file={}", file.display());
    let host = Host::start_with(
        dir.path(),
        &[
            "store.pool_bytes=8MiB",
            "store.block_slots=1024",
            "listen.grpc=127.0.0.1:0",
            &recording,
            "explain.sample=1",
        ],
    );
    for n in 0..80 {
        let put = host.run(&["put", &format!("block-{n}")], &vec![n as u8; 256 << 10]);
        assert!(put.status.success(), "{}", text(&put.stderr));
    }
    let told = host.run(&["explain", "block", "block-79"], b"");
    assert!(
        told.status.success() && text(&told.stdout).contains("It is in the pool"),
        "{}",
        text(&told.stdout)
    );
    let told = host.run(&["explain", "block", "block-0", "--json"], b"");
    assert_eq!(told.status.code(), Some(1));
    let object: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(object["cause"], "evicted", "{object}");
    let choice = &object["evictions"][0];
    assert!(
        choice["rank"].as_u64() >= Some(1) && choice["of"].as_u64() >= choice["rank"].as_u64(),
        "{object}"
    );
    let told = host.run(&["explain", "block", "never-put"], b"");
    assert!(text(&told.stdout).contains("never in this pool"), "{}", text(&told.stdout));
    // The same name is another block for another tenant.
    let token = host.token_for(&["--role", "observer", "--tenant", "7"]);
    let other = runtime().block_on(async {
        let grpc = ControlAddr::Tcp(host.addr("grpc").to_owned());
        let mut control = Control::connect(&grpc, &token).await.unwrap();
        let key = BlockKey::from_name("block-0").0.to_be_bytes().into();
        control.explain.block(proto::ExplainBlockRequest { key }).await.unwrap().into_inner()
    });
    assert_eq!((other.block, other.evictions, other.cause.as_str()), (None, Vec::new(), "never_stored"));
    assert_eq!(host.terminate(), Some(0));
    let chosen = records(&file).into_iter().filter(|record| record.slot == "evictor");
    let policies: Vec<String> = chosen.map(|record| record.policy.name).collect();
    assert!(!policies.is_empty());
    let run = kvasir(&["policy", "run", &policies[0], "--on", file.to_str().unwrap(), "--all", "--json"]);
    let tally: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(
        (tally["same"].as_u64(), tally["different"].as_u64()),
        (Some(policies.len() as u64), Some(0)),
        "{tally}"
    );
}

/// The id and the policy of each decision about some sessions.
async fn decide_for_sessions(control: &mut Control) -> Vec<(u64, String)> {
    let mut decided = Vec::new();
    for session in 1..=40 {
        let ask = proto::ScheduleRequest { prompt_tokens: 4096, session, ..Default::default() };
        let answer = control.conductor.schedule(ask).await.unwrap().into_inner();
        assert!(matches!(answer.decision, Some(Decision::Placement(_))), "{answer:?}");
        decided.push((answer.decision_id, answer.policy));
    }
    decided
}

#[test]
fn a_decision_on_trial_is_explained_by_the_policy_that_made_it() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["conductor.instance_ttl=1h"]);
    let runtime = runtime();
    let mut control = runtime.block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        register(&mut control).await;
        control
    });
    let explained = |id: u64| -> serde_json::Value {
        let output = host.run(&["explain", &id.to_string(), "--json"], b"");
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let load = |args: &[&str]| {
        host.check(&[&["policy", "load", "scheduler"][..], args].concat(), b"", 0, args[0]);
    };

    load(&["overlap-cost", "--canary", "50%"]);
    let decided = runtime.block_on(decide_for_sessions(&mut control));
    let of = |name: &str| -> Vec<u64> {
        decided.iter().filter(|(_, policy)| policy == name).map(|(id, _)| *id).collect()
    };
    let (canary, active) = (of("overlap-cost"), of("mooncake"));
    assert!(!canary.is_empty() && !active.is_empty() && canary.len() + active.len() == decided.len());
    for (id, policy) in &decided {
        let object = explained(*id);
        assert_eq!(object["scheduler"]["name"], policy.as_str(), "{object}");
        assert_eq!(object["scores_from"], "asked_again", "both serve: {object}");
        let rows = object["prefill"].as_array().unwrap();
        assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 1, "{object}");
    }
    let first = canary[0].to_string();
    host.check(&["explain", &first], b"", 0, "`overlap-cost` chose");
    let line = host.run(&["explain", &first, "--record"], b"").stdout;
    let file = dir.path().join("canary.jsonl");
    std::fs::write(&file, &line).unwrap();
    let run = kvasir(&["policy", "run", "overlap-cost", "--on", file.to_str().unwrap(), "--all", "--json"]);
    assert!(text(&run.stdout).contains(r#""same":1"#), "{}", text(&run.stdout));

    // Of a trial that is over it is still told what it decided, though nobody can be asked again.
    host.check(&["policy", "rollback", "scheduler"], b"", 0, "the trial is over");
    let object = explained(canary[0]);
    assert_eq!(
        (&object["scheduler"]["name"], &object["scores_from"]),
        (&"overlap-cost".into(), &"none".into())
    );

    load(&["random", "--shadow"]);
    let decided = runtime.block_on(decide_for_sessions(&mut control));
    until("the shadow has heard of them", || {
        host.policy("scheduler")["trial"]["asked"].as_u64().is_some_and(|asked| asked > 0)
    });
    for (id, policy) in decided {
        let object = explained(id);
        assert_eq!(
            (policy.as_str(), &object["scheduler"]["name"]),
            ("mooncake", &"mooncake".into()),
            "{object}"
        );
        assert_eq!(object["scores_from"], "asked_again", "of what decided: {object}");
    }
}

#[test]
fn a_chain_tells_what_each_of_its_parts_said() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["conductor.instance_ttl=1h"]);
    let file = dir.path().join("three.toml");
    let parts = "[[filter]]\nsource = \"netkv\"\n[[scorer]]\nsource = \"overlap-cost\"\nweight = 2.5\n[picker]\nsource = \"pick\"\n";
    std::fs::write(&file, parts).unwrap();
    let file = file.to_str().unwrap();
    host.check(&["policy", "load", "scheduler", file], b"", 0, "three");
    let ids = runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        register(&mut control).await;
        decide(&mut control).await
    });
    let id = ids[1].to_string();
    let output = host.run(&["explain", &id, "--json"], b"");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // `overlap-cost` says nothing of the instances that decode.
    for (table, scored) in [("prefill", true), ("decode", false)] {
        for row in object[table].as_array().unwrap() {
            let (values, part) = (&row["values"], "overlap-cost, weight 2.5");
            assert!(row["score"].is_number() && values["netkv, filter"].is_number(), "{object}");
            assert_eq!(values.get(part).is_some_and(serde_json::Value::is_number), scored, "{object}");
        }
    }
    host.check(&["explain", &id], b"", 0, "overlap-cost, weight 2.5");
    let newest = format!("decision {},", ids.iter().max().unwrap());
    host.check(&["explain"], b"", 0, &newest);
    let record = dir.path().join("one.jsonl");
    std::fs::write(&record, host.run(&["explain", &id, "--record"], b"").stdout).unwrap();
    let run = kvasir(&["policy", "run", file, "--on", record.to_str().unwrap()]);
    assert!(text(&run.stdout).contains("netkv, filter"), "{}", text(&run.stdout));
}

#[test]
fn a_choice_that_an_evictor_failed_to_make_is_recorded_too() {
    let dir = tempfile::tempdir().unwrap();
    let (file, guest) = (dir.path().join("decisions.jsonl"), dir.path().join("bad.wasm"));
    std::fs::write(&guest, kvasir_tests::guest("evictor")).unwrap();
    let (file, guest) = (file.to_str().unwrap(), guest.to_str().unwrap());
    let recording = format!("explain.file={file}");
    let set = ["store.pool_bytes=8MiB", "store.block_slots=1024", &recording, "explain.sample=1"];
    let host = Host::start_with(dir.path(), &set);
    for mode in ["trap", "too-few"] {
        let mode = format!("mode={mode}");
        host.check(&["policy", "load", "evictor", guest, "--setting", &mode], b"", 0, "bad");
        for n in 0..80 {
            host.check(&["put", &format!("{mode}-{n}")], &vec![n as u8; 256 << 10], 0, "");
        }
    }
    assert_eq!(host.terminate(), Some(0));
    let failed = |part: &str| {
        let found = records(Path::new(file)).into_iter().find(|record| {
            record.policy.name == "bad" && record.fallback.as_ref().is_some_and(|why| why.contains(part))
        });
        found.unwrap_or_else(|| panic!("no record tells of `{part}`"))
    };
    for (mode, part) in [("mode=trap", "trapped"), ("mode=too-few", "wanted")] {
        let record = failed(part);
        assert!(record.answer.is_empty() && record.asked.scalars[1] > 0, "{record:?}");
        let id = record.id.to_string();
        // Asked again, with the settings of the record, it fails again, or is said to have failed.
        let run = kvasir(&["policy", "run", guest, "--on", file, "--id", &id]);
        let said = [run.stdout, run.stderr].concat();
        let said = text(&said);
        assert!(
            said.contains(&format!("with the settings of the record: {mode}")) && said.contains(part),
            "{said}"
        );
    }
}
