//! The evictors beside those of libcachesim, which counts every block for itself.

use kvasir_tests::public_trace;
use std::path::{Path, PathBuf};
use std::process::Command;

const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");

fn run(program: impl AsRef<Path>, args: &[&str]) {
    let program = program.as_ref();
    let out = Command::new(program).args(args).output().expect("it starts");
    let told = [out.stdout, out.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(out.status.success(), "{} {args:?}:\n{}", program.display(), told.concat());
    print!("{}", told[0]);
}

#[test]
#[ignore = "installs libcachesim, 10 MB, from the Python package index: CONTRIBUTING.md has the command"]
fn evictors_agree_with_libcachesim() {
    let folder = tempfile::tempdir().unwrap();
    let [environment, chat, api] =
        ["python", "chat.jsonl", "api.jsonl"].map(|name| folder.path().join(name).display().to_string());
    run("python3", &["-m", "venv", &environment]);
    let python = Path::new(&environment).join("bin/python");
    run(&python, &["-m", "pip", "install", "--quiet", "libcachesim==0.3.5"]);
    let mut traces = vec![];
    for (workload, path) in [("chat", chat), ("api", api)] {
        let plan = ["--requests", "10000", "--rate", "5", "--seed", "9", "--output", &path];
        run(KVASIR, &[&["trace", "generate", "--workload", workload], &plan[..]].concat());
        traces.push(PathBuf::from(path));
    }
    traces
        .extend(["conversation.jsonl.gz", "synthetic.jsonl.gz"].iter().filter_map(|name| public_trace(name)));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/beside_libcachesim.py");
    traces.iter().for_each(|trace| run(&python, &[script, KVASIR, &trace.display().to_string()]));
}
