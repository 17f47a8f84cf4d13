//! Policies beside each other: `kvasir policy bench` and `replay`, also against what serves a host.

use crate::process::{Host, KVASIR};
use kvasir_tests::guest;
use std::process::Command;

#[test]
fn a_policy_is_replayed_against_what_serves() {
    let dir = tempfile::tempdir().unwrap();
    let [trace, page, bad] = ["t.jsonl.gz", "page.html", "bad.wasm"].map(|name| dir.path().join(name));
    let [trace, page, bad] = [&trace, &page, &bad].map(|path| path.to_str().unwrap());
    std::fs::write(bad, guest("evictor")).unwrap();
    let host = Host::start(dir.path());
    host.check(&["trace", "generate", "--requests", "400", "--output", trace], b"", 0, "400 requests");
    let replay = |policy: &str, more: &[&str], code: i32, part: &str| {
        let args = ["policy", "replay", policy, "--trace", trace];
        host.check(&[&args, more].concat(), b"", code, part)
    };

    // The evictor that serves, with its settings; then one that this binary does not have, whose code the host gives.
    host.check(&["policy", "load", "evictor", "lru"], b"", 0, "lru");
    let json =
        replay("fifo", &["--against", "current", "--json", "--report", page], 0, r#""baseline":"lru""#);
    let compared: serde_json::Value = serde_json::from_str(&json).unwrap();
    let first = &compared["capacities"][0];
    assert_eq!((&compared["candidate"], &first["baseline"]["above_lru"]), (&"fifo".into(), &0.0.into()));
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("<polyline") && html.ends_with("</html>\n"));
    let capacity = ["--capacity-blocks", "50", "--json"];
    let of_file = replay("fifo", &[&["--against", bad], &capacity[..]].concat(), 0, r#""baseline""#);
    host.check(&["policy", "load", "evictor", bad, "--setting", "mode=none"], b"", 0, "");
    let current = [&["--against", "current"], &capacity[..]].concat();
    let of_host = replay("fifo", &current, 0, r#""baseline":"bad""#);
    let figures = |json: &str| serde_json::from_str::<serde_json::Value>(json).unwrap()["capacities"].clone();
    assert_eq!(figures(&of_host), figures(&of_file));

    // Schedulers go through a simulated cluster; the same again is the same to the byte.
    let cluster = ["--prefill", "2", "--decode", "1", "--json", "--against", "current"];
    let once = replay("random", &cluster, 0, r#""scheduler":"mooncake""#);
    assert_eq!(replay("random", &cluster, 0, r#""differ":"#), once);
    replay("random", &["--limit", "50"], 0, "of 50 decisions differ");

    // So do evictors, if they are to; they decide how long a first token takes.
    let pools = ["--prefill", "2", "--decode", "1", "--pool-blocks", "150", "--json", "--against", "lru"];
    let said = replay("fifo", &pools, 0, r#""evictor":"fifo""#);
    let told: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&told["slot"], &told["baseline"]["evictor"]), (&"evictor".into(), &"lru".into()));
    assert_ne!(told["candidate"]["hit_rate_percent"], told["baseline"]["hit_rate_percent"]);

    // What goes wrong on the way, and what was asked for wrongly.
    let trap = ["--setting", "mode=trap", "--setting", "after=9", "--capacity-blocks", "50"];
    replay(bad, &trap, 1, "failed, so that not all figures beside it are its own");
    for (policy, more, part) in [
        ("lur", &[][..], "did you mean `lru`?"),
        ("lru", &["--against", "mooncake"], "`mooncake` is for the slot scheduler, not evictor"),
        ("lru", &["--prefill", "3", "--capacity-blocks", "3"], "--capacity-blocks is for evictors in caches"),
        ("random", &["--capacity-blocks", "3"], "--capacity-blocks is for evictors in caches"),
        ("random", &["--both", "0"], "0 prefill, 0 decode"),
        ("lru", &["--against", "current", "--against-setting", "a=1"], "leave out --against-setting"),
    ] {
        replay(policy, more, 2, part);
    }
    drop(host);
    let alone = Command::new(KVASIR)
        .args(["policy", "replay", "lru", "--trace", trace, "--against", "current"])
        .args(["--grpc", &format!("unix:{}", dir.path().join("none.sock").display())])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&alone.stderr);
    assert_eq!(alone.status.code(), Some(2), "{said}");
    assert!(said.contains("--against current needs the running host"), "{said}");
}

#[test]
fn what_serves_is_had_again_with_its_settings() {
    let (dir, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [component, chain, trace] = ["mine.wasm", "both.toml", "t.jsonl"].map(|name| dir.path().join(name));
    let [component, chain, trace] = [&component, &chain, &trace].map(|path| path.to_str().unwrap());
    let [pulled, again] = ["pulled.wasm", "both.toml"].map(|name| there.path().join(name));
    let [pulled, again] = [&pulled, &again].map(|path| path.to_str().unwrap());
    std::fs::write(component, guest("scheduler")).unwrap();
    let parts = "[[scorer]]\nsource = \"netkv\"\nweight = 0.5\nsettings = { decode-steps = \"2\" }\n\
                 [picker]\nsource = \"mine.wasm\"\nsettings = { mode = \"none\" }\n";
    std::fs::write(chain, parts).unwrap();
    let host = Host::start(dir.path());
    host.check(&["policy", "pull", "scheduler", "-o", pulled], b"", 1, "own `mooncake` serves scheduler");
    host.check(&["policy", "load", "scheduler", component, "--setting", "mode=none"], b"", 0, "");
    host.check(&["policy", "pull", "scheduler", "-o", pulled], b"", 0, "--setting  mode=none");
    assert_eq!(std::fs::read(pulled).unwrap(), guest("scheduler"));

    // A chain comes with its parts, and is the same chain to a host; and to a replay, on this side.
    host.check(&["policy", "load", "scheduler", chain], b"", 0, "both");
    let digest = host.policy("scheduler")["digest"].clone();
    host.check(&["policy", "pull", "scheduler", "-o", pulled], b"", 2, "ends in .toml");
    host.check(&["policy", "pull", "scheduler", "-o", again, "--json"], b"", 0, "mine.wasm");
    host.check(&["trace", "generate", "--requests", "60", "--output", trace], b"", 0, "60 requests");
    let replay = ["policy", "replay", again, "--trace", trace, "--prefill", "2", "--decode", "1"];
    let said = host.check(&[&replay[..], &["--against", "current"]].concat(), b"", 0, "both");
    assert!(said.contains("0 of 60 decisions differ"), "{said}");
    host.check(&["policy", "load", "scheduler", "random"], b"", 0, "random");
    host.check(&["policy", "load", "scheduler", again], b"", 0, "both");
    assert_eq!(host.policy("scheduler")["digest"], digest, "{}", std::fs::read_to_string(again).unwrap());
    std::fs::write(there.path().join("mine.wasm"), b"mine").unwrap();
    host.check(&["policy", "pull", "scheduler", "-o", again], b"", 2, "mine.wasm is another component");
}

#[test]
fn a_budget_that_is_exceeded_is_exit_code_1() {
    let bench = |more: &[&str]| {
        let output = Command::new(KVASIR).args(["policy", "bench", "--smoke"]).args(more).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, _) = bench(&["static", "--json", "--budget", "10s"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["slot"]), (Some(0), &"balancer".into()));
    assert_eq!(report["over_budget"], serde_json::json!([]));
    let (code, out, err) = bench(&["static", "--budget", "p99=1ns"]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("over the budget: tick/8: p99") && out.contains("an instance"), "{out} {err}");
    assert_eq!(bench(&["none"]).0, Some(2));
    assert_eq!(bench(&["static", "--budget", "soon"]).0, Some(2));
}
