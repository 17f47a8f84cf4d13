//! The commands of somebody who writes a policy. The compilers' part is played by scripts; `tests/new-user.sh` has the real ones.

use crate::process::KVASIR;
use kvasir_tests::guest;
use std::path::Path;
use std::process::Command;

/// Standard output of a command that ends with that code and says `part`, if it fails on standard error.
fn check(dir: &Path, args: &[&str], code: i32, part: &str) -> String {
    let mut command = Command::new(KVASIR);
    // Tools that are there whatever machine this is.
    command.current_dir(dir).args(args).env("CC", "true").env("WASM_LD", "true");
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(output.status.code(), Some(code), "{args:?}: {out}{err}");
    let text = if code == 0 { &out } else { &format!("{out}{err}") };
    assert!(text.contains(part), "{args:?}: {part} in {out}{err}");
    out
}

#[test]
fn a_wrong_step_says_the_next_right_one() {
    let dir = tempfile::tempdir().unwrap();
    let check =
        |args: &[&str], code, part: &str| check(dir.path(), &[&["policy"], args].concat(), code, part);
    let new = ["new", "--lang", "c", "--slot", "evictor"];
    check(
        &["new", "--lang", "cobol", "--slot", "evictor", "a"],
        2,
        "languages: assemblyscript, c, go, javascript",
    );
    check(&["new", "--lang", "c", "--slot", "victor", "a"], 2, "unknown slot `victor`");
    check(&["new", "--lang", "c", "a"], 2, "--slot");
    check(&[&new[..], &["My_Policy"]].concat(), 2, "it must consist of a-z 0-9 -");
    check(&["build"], 2, "`kvasir policy new` makes a project");
    check(&[&new[..], &["lru", "--dir", "with a space"]].concat(), 0, "cd 'with a space'");
    check(&[&new[..], &["lru", "--dir", "with a space"]].concat(), 1, "--dir");
    check(&["check", "with a space"], 2, "`kvasir policy build` makes it");
    check(&["check", "none.wasm"], 2, "cannot read policy file none.wasm");
    let python =
        check(&["new", "--lang", "python", "--slot", "balancer", "even", "--json"], 0, r#""dir":"even""#);
    let made: serde_json::Value = serde_json::from_str(&python).unwrap();
    assert_eq!((&made["name"], &made["language"]), (&"even".into(), &"python".into()));

    let mut without = Command::new(KVASIR);
    without
        .current_dir(&dir)
        .args(["policy", "build", "with a space"])
        .env("PATH", "/nonexistent")
        .env_remove("CC");
    let output = without.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("c needs `clang`") && said.contains("apt-get install clang lld"), "{said}");
}

#[test]
fn a_policy_is_made_built_and_tried() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("my policy");
    let new = ["policy", "new", "--lang", "c", "--slot", "scheduler", "careless", "--dir", "my policy"];
    check(dir.path(), &new, 0, "made my policy: a scheduler in c");
    let compiler = |script: &str| std::fs::write(at.join("sdk/c/compile.sh"), script).unwrap();

    compiler("echo './policy.c:7:3: error: expected `;`' >&2; exit 1");
    let file = at.join("careless.wasm");
    check(&at, &["policy", "build"], 1, "./policy.c:7:3: error: expected `;`");
    check(&at, &["policy", "build"], 1, "what its tools said stands above");
    std::fs::write(at.join("made.wasm"), kvasir_tests::import_not_granted()).unwrap();
    compiler("echo some words; cp made.wasm \"$2\"");
    check(&at, &["policy", "build"], 1, "wasi:sockets/tcp@0.2.10: something uses the network");
    assert!(!file.exists());

    std::fs::write(at.join("made.wasm"), guest("careless")).unwrap();
    let built = check(&at, &["policy", "build", "--json"], 0, r#""name":"careless""#);
    let built: serde_json::Value = serde_json::from_str(&built).unwrap();
    assert_eq!(built["bytes"].as_u64(), Some(file.metadata().unwrap().len()));
    check(&at, &["policy", "check"], 0, "passed; next: kvasir policy load scheduler ./careless.wasm");
    // Its answers are kept, and expected from then on; not of a policy that fails, nor where nobody says where.
    let written = check(&at, &["policy", "check", "--write-vectors"], 0, "decisions recorded");
    assert!(written.contains("vectors/seed-1.jsonl"), "{written}");
    check(&at, &["policy", "check"], 0, "answers as recorded");
    let recorded = std::fs::read(at.join("vectors/seed-1.jsonl")).unwrap();
    let fails = ["policy", "check", "--write-vectors", "--setting", "mode=forgets"];
    check(&at, &fails, 1, "not written: a check failed");
    check(&at, &["policy", "check", "--write-vectors"], 0, "decisions recorded");
    assert_eq!(
        std::fs::read(at.join("vectors/seed-1.jsonl")).unwrap(),
        recorded,
        "the same policy, the same file"
    );
    check(&at, &["policy", "check", "./careless.wasm", "--write-vectors"], 2, "--write-vectors=FILE");
    check(&at, &["policy", "check", "./careless.wasm", "--write-vectors=w.jsonl"], 0, "decisions recorded");
    assert_eq!(std::fs::read(at.join("w.jsonl")).unwrap(), recorded);
    std::fs::remove_dir_all(at.join("vectors")).unwrap();
    let tried =
        check(dir.path(), &["policy", "check", "my policy", "--json", "--seed", "3"], 0, r#""passed":true"#);
    serde_json::from_str::<serde_json::Value>(&tried).unwrap();
    check(dir.path(), &["policy", "check", "my policy", "--setting", "mode=forgets"], 1, "1 check failed");
    let manifest = at.join("kvasir-policy.toml");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("0.1.0", "0.2.0") + "[settings]\nmode = \"chokes\"\n").unwrap();
    let failed = check(dir.path(), &["policy", "check", "my policy"], 1, "2 checks failed");
    assert!(
        failed.contains("`import-state` of 0 B trapped")
            && failed.contains("careless 0.2.0, as in the manifest")
    );

    // A recording of its own answers is one that it must give again; another's is only asked.
    std::fs::create_dir(at.join("vectors")).unwrap();
    let record = |name: &str| {
        serde_json::json!({
            "record": 1, "slot": "scheduler", "id": 1, "at_ms": 0, "policy": { "name": name, "version": "0.1.0", "settings": [["mode", "none"]] },
            "pushed": [["open", [0, 0, 16, 17, 19, 18, 1, 5]]],
            "asked": { "name": "schedule", "scalars": [0], "lists": [vec![0; 19]] },
            "answer": [9, 9, 0, 0, 0, 0, 0, 0], "ns": 1,
        })
    };
    std::fs::write(at.join("vectors/other.jsonl"), format!("{}\n", record("other"))).unwrap();
    let on = ["policy", "check", "my policy", "--setting", "mode=none"];
    check(dir.path(), &on, 1, "1 asked, 0 answers as recorded");
    std::fs::write(at.join("vectors/own.jsonl"), format!("{}\n", record("careless"))).unwrap();
    check(dir.path(), &on, 1, "where [9, 9, 0, 0, 0, 0, 0, 0] is recorded");
}
