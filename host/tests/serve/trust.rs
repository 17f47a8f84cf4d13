//! A host that takes policies of people it knows: every way in, by a key, without one, and after the key is gone.

use crate::process::{Host, KVASIR};
use crate::replicas::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with a pair of keys, a trust file, and components.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Self(tempfile::tempdir().unwrap());
        bench.run(&["trust", "keygen", &bench.file("mine")], 0, "private");
        bench.run(&["trust", "keygen", &bench.file("other")], 0, "private");
        bench.trust("mine");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn trust(&self, key: &str) {
        let (public, trust) = (self.file(&format!("{key}.pub")), self.file("trust.toml"));
        self.run(&["trust", "add", key, "--key", &public, "--trust", &trust], 0, key);
    }

    /// A built-in evictor, as if somebody had brought it.
    fn component(&self, name: &str) -> String {
        let builtin = kvasir_default_policies::EVICTORS.iter().find(|policy| policy.name == name).unwrap();
        let file = format!("{name}.wasm");
        fs::write(self.path(&file), builtin.component).unwrap();
        self.file(&file)
    }

    fn sign(&self, component: &str, key: &str) {
        self.run(&["sign", component, "--key", &self.file(&format!("{key}.key"))], 0, component);
    }

    /// A verb that needs no host.
    fn run(&self, args: &[&str], code: i32, part: &str) -> String {
        let output = Command::new(KVASIR).arg("policy").args(args).output().unwrap();
        let text = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        assert!(text.contains(part), "{args:?}: `{text}` lacks `{part}`");
        text
    }

    fn set(&self) -> String {
        format!("policy.trust.file={}", self.file("trust.toml"))
    }
}

fn name(host: &Host) -> String {
    host.policy("evictor")["name"].as_str().unwrap().to_owned()
}

#[test]
fn loads_need_the_signature_of_a_trusted_key() {
    let (bench, data) = (Bench::new(), tempfile::tempdir().unwrap());
    let host = Host::start_with(data.path(), &[&bench.set()]);
    let lru = bench.component("lru");
    let load = ["policy", "load", "evictor", &lru];
    host.check(&load, b"", 2, "it is not signed; sign it with a trusted key");
    bench.sign(&lru, "other");
    host.check(&load, b"", 2, "none of its signatures is by a key trusted for evictor");
    bench.sign(&lru, "mine");
    host.check(&load, b"", 0, "lru");
    // The signature of one component beside another.
    let fifo = bench.component("fifo");
    fs::copy(bench.path("lru.wasm.sig"), bench.path("fifo.wasm.sig")).unwrap();
    host.check(&["policy", "load", "evictor", &fifo], b"", 2, "`mine` signed another component");
    fs::write(bench.path("fifo.wasm.sig"), "{").unwrap();
    host.check(&["policy", "load", "evictor", &fifo], b"", 2, "does not read as signatures");
    assert_eq!(name(&host), "lru", "what was refused changed nothing");
    // A trust file in the middle of being written trusts nobody, and built-in policies need nobody's trust.
    let good = fs::read(bench.path("trust.toml")).unwrap();
    fs::write(bench.path("trust.toml"), &good[..good.len() - 40]).unwrap();
    host.check(&load, b"", 2, "only built-in policies are loaded");
    host.check(&["policy", "load", "evictor", "sieve"], b"", 0, "sieve");
    host.check(&["policy", "rollback", "evictor"], b"", 2, "only built-in policies are loaded");
    fs::write(bench.path("trust.toml"), &good).unwrap();
    host.check(&["policy", "rollback", "evictor"], b"", 0, "lru");
    // A key that may sign for schedulers alone.
    let trust = bench.file("narrow.toml");
    let narrow =
        ["trust", "add", "mine", "--key", &bench.file("mine.pub"), "--slot", "scheduler", "--trust", &trust];
    bench.run(&narrow, 0, "scheduler");
    fs::rename(&trust, bench.path("trust.toml")).unwrap();
    host.check(&load, b"", 2, "trusted for evictor");
}

#[test]
fn the_watched_folder_takes_what_is_signed() {
    let (bench, data, folder) = (Bench::new(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dir = format!("policy.dir={}", folder.path().display());
    let host = Host::start_with(data.path(), &[&bench.set(), &dir]);
    let lru = bench.component("lru");
    fs::copy(&lru, folder.path().join("evictor.wasm")).unwrap();
    let logs = || String::from_utf8(host.run(&["policy", "logs", "evictor"], b"").stdout).unwrap();
    until("a refusal in the log", || logs().contains("is not signed"));
    assert_ne!(name(&host), "lru");
    // The signature comes later, and the same component is looked at again.
    bench.sign(&lru, "mine");
    fs::copy(bench.path("lru.wasm.sig"), folder.path().join("evictor.wasm.sig")).unwrap();
    until("lru in service", || name(&host) == "lru");
}

#[test]
fn a_restart_asks_whether_the_key_is_still_trusted() {
    let (bench, data) = (Bench::new(), tempfile::tempdir().unwrap());
    let set = bench.set();
    let lru = bench.component("lru");
    bench.sign(&lru, "mine");
    let host = Host::start_to_restart(data.path(), &[&set]);
    host.check(&["policy", "load", "evictor", &lru], b"", 0, "lru");
    let host = host.restart(data.path(), &[&set]);
    assert_eq!(name(&host), "lru", "signatures are kept with what they came with");
    fs::remove_file(bench.path("trust.toml")).unwrap();
    bench.trust("other");
    let host = host.restart(data.path(), &[&set]);
    let row = host.policy("evictor");
    assert_ne!(row["name"], "lru");
    let why = row["last_trip"].as_str().unwrap();
    assert!(why.contains("not restored") && why.contains("not trusted as evictor"), "{why}");
}

#[test]
fn an_inspection_tells_who_signed_and_whether_a_host_goes_by_it() {
    let bench = Bench::new();
    let (lru, trust) = (bench.component("lru"), bench.file("trust.toml"));
    let inspect = |part: &str| bench.run(&["inspect", &lru, "--trust", &trust], 0, part);
    inspect("signed   no");
    bench.sign(&lru, "other");
    inspect("none of its signatures is by a key trusted for evictor");
    bench.sign(&lru, "mine");
    inspect("signed   by `mine` (key ");
    bench.run(&["inspect", &lru], 0, "unchecked: no trust file is known");
    let told = bench.run(&["inspect", &lru, "--trust", &trust, "--json"], 0, "signatures");
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let signed = told["signatures"].as_array().unwrap();
    let valid: Vec<_> = signed.iter().filter(|signature| signature["valid"] == true).collect();
    assert_eq!((signed.len(), valid.len()), (2, 1), "{told}");
    let [signature] = valid[..] else { panic!("{told}") };
    assert_eq!((&signature["key"], &signature["slot"]), (&"mine".into(), &"evictor".into()), "{told}");
    assert!(signature["key_id"].as_str().is_some_and(|id| id.len() > 16), "{told}");
    // The signatures of one component beside another.
    let fifo = bench.component("fifo");
    fs::copy(bench.path("lru.wasm.sig"), bench.path("fifo.wasm.sig")).unwrap();
    bench.run(&["inspect", &fifo, "--trust", &trust], 0, "`mine` signed another component");
}

#[test]
fn bundles_bring_signatures_along() {
    let (bench, data) = (Bench::new(), tempfile::tempdir().unwrap());
    let host = Host::start_with(data.path(), &[&bench.set()]);
    let (lru, fifo, bundle) = (bench.component("lru"), bench.component("fifo"), bench.file("all.tar"));
    bench.run(&["save", &lru, "-o", &bundle], 0, "0 signatures");
    host.check(&["policy", "load-bundle", &bundle], b"", 2, "it is not signed");
    bench.sign(&lru, "mine");
    bench.run(&["save", &lru, &fifo, "-o", &bundle], 0, "1 signatures");
    host.check(&["policy", "load-bundle", &bundle], b"", 2, "choose one with --only NAME");
    host.check(&["policy", "load-bundle", &bundle, "--only", "sieve"], b"", 2, "in it are lru, fifo");
    host.check(&["policy", "load-bundle", &bundle, "--only", "lru"], b"", 0, "lru");
    let folder = bench.file("unpacked");
    bench.run(&["load-bundle", &bundle, "--to", &folder], 0, "fifo.wasm");
    let (key, there) = (bench.file("mine.pub"), Path::new(&folder).join("lru.wasm").display().to_string());
    bench.run(&["verify", &there, "--key", &key], 0, "verified   for evictor");
    let bytes = fs::read(&bundle).unwrap();
    fs::write(&bundle, &bytes[..bytes.len() / 2]).unwrap();
    host.check(&["policy", "load-bundle", &bundle], b"", 2, "is no bundle");
}

#[test]
fn verify_and_check_answer_by_exit_code() {
    let bench = Bench::new();
    let (lru, key, trust) = (bench.component("lru"), bench.file("mine.pub"), bench.file("trust.toml"));
    bench.run(&["verify", &lru, "--key", &key], 1, "not so     it is not signed");
    bench.run(&["trust", "check", &lru, "--trust", &trust], 1, "not trusted as evictor");
    bench.sign(&lru, "mine");
    bench.run(&["verify", &lru, "--key", &key], 0, "verified   for evictor");
    bench.run(&["verify", &lru, "--trust", &trust], 0, "by mine");
    bench.run(&["trust", "check", &lru, "--trust", &trust], 0, "by `mine`");
    bench.run(&["verify", &lru, "--key", &key, "--slot", "scheduler"], 1, "signed it as evictor");
    bench.run(&["verify", &lru, "--key", &bench.file("other.pub")], 1, "none of its signatures");
    let text = bench.run(&["verify", &lru, "--key", &key, "--json"], 0, "verified");
    let row: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&row["verified"], &row["slot"]), (&true.into(), &"evictor".into()));
    // What cannot be answered is an error.
    bench.run(&["verify", &lru, "--key", &bench.file("mine.key")], 2, "private key");
    bench.run(&["verify", &lru, "--key", &lru], 2, "");
    bench.run(&["verify", "ghcr.io/acme/lru:1", "--key", &key], 2, "is written oci://ghcr.io/acme/lru:1");
    bench.run(&["trust", "keygen", &bench.file("mine")], 2, "choose another name");
    bench.run(
        &["trust", "add", "mine", "--key", &key, "--trust", &trust],
        2,
        "has a key called `mine` already",
    );
    bench.run(&["sign", &lru, "--key", &key], 2, "it is a public key; give the private one");
    let list = bench.run(&["trust", "list", "--trust", &trust, "--json"], 0, "mine");
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["keys"][0]["slots"].as_array().unwrap().len(), 4);
}
