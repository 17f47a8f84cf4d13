//! Every input that was kept, through its target: what was ever found stays mended.

use kvasir_fuzz::{TARGETS, Target};
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

/// Of all corpora together: they are cloned with the repository.
const BYTES_MAX: usize = 1 << 20;

fn inputs(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let entries = folder.read_dir().unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

fn replay(name: &str) {
    let target = kvasir_fuzz::target(name).expect("a target");
    let inputs = inputs(target);
    assert!(!inputs.is_empty(), "`{name}` has no corpus");
    let run = target.run;
    let fails = |(_, bytes): &&(PathBuf, Vec<u8>)| catch_unwind(|| run(bytes)).is_err();
    let failed: Vec<_> = inputs.iter().filter(fails).map(|(path, _)| path).collect();
    assert!(failed.is_empty(), "`{name}` fails on {failed:#?}; each panic is above");
}

#[test]
fn corpora_are_small() {
    let all =
        || TARGETS.iter().flat_map(|target| inputs(target).into_iter().map(move |input| (target, input)));
    for (target, (path, bytes)) in all() {
        assert!(bytes.len() <= target.bytes_max, "{} is longer than its target tries", path.display());
    }
    let bytes: usize = all().map(|(_, (_, bytes))| bytes.len()).sum();
    assert!(bytes <= BYTES_MAX, "{bytes} bytes; minimise them (CONTRIBUTING.md)");
}

#[test]
fn answers() {
    replay("answers");
}

#[test]
fn bundle() {
    replay("bundle");
}

#[test]
fn cluster() {
    replay("cluster");
}

#[test]
fn component() {
    replay("component");
}

#[test]
fn config() {
    replay("config");
}

#[test]
fn grpc() {
    replay("grpc");
}

#[test]
fn hello() {
    replay("hello");
}

#[test]
fn manifests() {
    replay("manifests");
}

#[test]
fn nvme() {
    replay("nvme");
}

#[test]
fn record() {
    replay("record");
}

#[test]
fn remote() {
    replay("remote");
}

#[test]
fn settings() {
    replay("settings");
}

#[test]
fn state() {
    replay("state");
}

#[test]
fn trace() {
    replay("trace");
}

#[test]
fn trust() {
    replay("trust");
}

#[test]
fn wire() {
    replay("wire");
}
