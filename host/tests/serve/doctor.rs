//! `kvasir doctor` on this very machine, and the manual pages.

use crate::process::{Host, KVASIR, quiet_port};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

/// Exit code and findings, as rows of area, level and text.
fn doctor(dir: &Path, http: u16, more: &[&str]) -> (Option<i32>, Vec<[String; 3]>) {
    let mut command = Command::new(KVASIR);
    command.args(["doctor", "--json", "--set", "store.pool_bytes=4MiB"]);
    command.arg("--set").arg(format!("node.data_dir={}", dir.display()));
    command.arg("--set").arg(format!("listen.http=127.0.0.1:{http}"));
    let output = command.args(more).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let broken = report["broken"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(i32::from(broken)), "{report}");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let rows = report["findings"].as_array().unwrap().iter();
    let rows = rows.map(|row| ["area", "level", "found"].map(|key| text(&row[key])));
    (output.status.code(), rows.collect())
}

fn says(rows: &[[String; 3]], level: &str, words: &str) -> bool {
    rows.iter().any(|[_, at, found]| at == level && found.contains(words))
}

#[test]
fn this_machine_is_examined_with_and_without_a_host() {
    let dir = tempfile::tempdir().unwrap();
    let http = quiet_port();
    let (_, before) = doctor(dir.path(), http, &[]);
    assert!(says(&before, "note", "no host runs"), "{before:?}");
    assert!(says(&before, "ok", &format!("127.0.0.1:{http} is free")), "{before:?}");
    for area in [
        "versions",
        "host",
        "limits",
        "memory",
        "ports",
        "data folder",
        "sockets",
        "clock",
        "kernel",
        "rdma",
        "cuda",
    ] {
        assert!(before.iter().any(|[found, ..]| found == area), "nothing about {area}: {before:?}");
    }

    let host = Host::start_with(dir.path(), &[&format!("listen.http=127.0.0.1:{http}")]);
    let (code, during) = doctor(dir.path(), http, &["--clock-of", host.addr("http")]);
    assert_eq!(code, Some(0), "{during:?}");
    for words in
        ["a host runs with these settings (process ", "is this host's", "answers, mode 600", "agrees"]
    {
        assert!(says(&during, "ok", words), "{words}: {during:?}");
    }
    drop(host);

    let taken = TcpListener::bind(("127.0.0.1", http)).unwrap();
    let (code, after) = doctor(dir.path(), http, &[]);
    assert_eq!(code, Some(1), "{after:?}");
    assert!(says(&after, "broken", &format!("taken by process {}", std::process::id())), "{after:?}");
    drop(taken);
    let (code, bad) = doctor(dir.path(), http, &["--set", "listen.htp=x"]);
    assert_eq!((code, bad[0][0].as_str()), (Some(1), "settings"), "{bad:?}");
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("man1");
    let made = Command::new(KVASIR).arg("man").arg("--out").arg(&out).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for page in
        ["kvasir.1", "kvasir-serve.1", "kvasir-doctor.1", "kvasir-policy-load.1", "kvasir-token-new.1"]
    {
        let text = std::fs::read_to_string(out.join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(text.contains(".TH") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
    }
}
