//! `kvasir dev --demo`: the README's first command, small and fast.

use std::process::Command;

#[test]
fn the_demo_moves_real_bytes_and_loses_no_decision() {
    let demo = Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["dev", "--demo", "--json", "--requests", "240", "--speed", "16", "--pool", "8MiB"])
        .output()
        .expect("the binary starts");
    assert!(demo.status.success(), "{}", String::from_utf8_lossy(&demo.stderr));
    let outcome: serde_json::Value = serde_json::from_slice(&demo.stdout).expect("one JSON object");
    let number = |name: &str| outcome[name].as_f64().unwrap_or_else(|| panic!("{name} in {outcome}"));
    assert_eq!(number("decisions"), 240.0);
    assert_eq!(number("decisions_lost") + number("checksum_failures") + number("wrong_bytes"), 0.0);
    assert!(number("hit_rate_percent") > 5.0 && number("evictions") > 0.0, "{outcome}");
    assert!(number("bytes_moved") > 8e6, "{outcome}");
    assert_eq!(number("swaps"), 8.0, "a scheduler and three evictors, loaded and rolled back");
    let policies: Vec<_> = (0..3).map(|i| outcome["phases"][i]["policies"].as_str().unwrap_or("")).collect();
    assert_eq!(policies, ["mooncake + workload-aware", "round-robin + lru", "mooncake + workload-aware"]);
}

#[test]
fn a_plan_that_cannot_run_says_why() {
    for (args, expected) in [
        (["--speed", "0"], "--speed 0 is outside"),
        (["--hosts", "99"], "--hosts 99 is outside"),
        (["--block", "1GiB"], "--block must be"),
        (["--trace", "no-such-trace"], "no-such-trace"),
        (["--swap-evictor", "lrx"], "lrx"),
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["dev", "--demo", "--requests", "8", "--rate", "1000"])
            .args(args)
            .output()
            .expect("the binary starts");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains(expected), "{args:?}: {said}");
    }
}
