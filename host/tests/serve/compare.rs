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

    // The evictor that serves, with its settings; then one that this binary does not have.
    host.check(&["policy", "load", "evictor", "lru"], b"", 0, "lru");
    let json =
        replay("fifo", &["--against", "current", "--json", "--report", page], 0, r#""baseline":"lru""#);
    let compared: serde_json::Value = serde_json::from_str(&json).unwrap();
    let first = &compared["capacities"][0];
    assert_eq!((&compared["candidate"], &first["baseline"]["above_lru"]), (&"fifo".into(), &0.0.into()));
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("<polyline") && html.ends_with("</html>\n"));
    host.check(&["policy", "load", "evictor", bad], b"", 0, "");
    replay("fifo", &["--against", "current"], 2, "which is not built in; give its file: --against FILE");

    // Schedulers go through a simulated cluster; the same again is the same to the byte.
    let cluster = ["--prefill", "2", "--decode", "1", "--json", "--against", "current"];
    let once = replay("random", &cluster, 0, r#""scheduler":"mooncake""#);
    assert_eq!(replay("random", &cluster, 0, r#""differ":"#), once);
    replay("random", &["--limit", "50"], 0, "of 50 decisions differ");

    // What goes wrong on the way, and what was asked for wrongly.
    let trap = ["--setting", "mode=trap", "--setting", "after=9", "--capacity-blocks", "50"];
    replay(bad, &trap, 1, "failed, so that not all figures beside it are its own");
    for (policy, more, part) in [
        ("lur", &[][..], "did you mean `lru`?"),
        ("lru", &["--against", "mooncake"], "`mooncake` is for the slot scheduler, not evictor"),
        ("lru", &["--prefill", "3"], "evictors are compared in a cache"),
        ("random", &["--capacity-blocks", "3"], "--capacity-blocks is for evictors"),
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
