//! Against a real registry server, Debian's `docker-registry` on loopback.

use crate::process::{Host, KVASIR, quiet_port};
use crate::replicas::until;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The server; dropping it kills it.
struct Registry {
    child: Child,
    port: u16,
}

impl Registry {
    fn start(dir: &Path) -> Self {
        let port = quiet_port();
        let config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            dir.join("registry").display()
        );
        let file = dir.join("config.yml");
        fs::write(&file, config).unwrap();
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("docker-registry is there");
        until("the registry comes up", || {
            assert!(child.try_wait().unwrap().is_none(), "the registry ended");
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self { child, port }
    }

    fn at(&self, rest: &str) -> String {
        format!("127.0.0.1:{}/{rest}", self.port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(dir: &Path, args: &[&str], code: i32, part: &str) -> String {
    let mut command = Command::new(KVASIR);
    // Nobody's logins.
    let output =
        command.arg("policy").args(args).env("DOCKER_CONFIG", dir).current_dir(dir).output().unwrap();
    let text = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    assert!(text.contains(part), "{args:?}: `{text}` lacks `{part}`");
    text
}

#[test]
#[ignore = "needs docker-registry"]
fn docker_registry_keeps_policies_and_signatures() {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::start(dir.path());
    let run = |args: &[&str], code, part: &str| run(dir.path(), args, code, part);
    for name in ["lru", "fifo"] {
        let builtin = kvasir_default_policies::EVICTORS.iter().find(|policy| policy.name == name).unwrap();
        fs::write(dir.path().join(format!("{name}.wasm")), builtin.component).unwrap();
    }
    let (to, oci) = (registry.at("acme/evict:1"), format!("oci://{}", registry.at("acme/evict:1")));
    run(&["trust", "keygen", "mine"], 0, "");
    run(&["trust", "keygen", "theirs"], 0, "");
    run(&["pull", &to], 2, "does not have manifest acme/evict:1");
    // Signed before it is pushed: the signature goes along, and is of the manifest that the registry has.
    run(&["sign", "lru.wasm", "--key", "mine.key"], 0, "");
    let pushed = run(&["push", "lru.wasm", &to, "--json"], 0, "");
    let pushed: serde_json::Value = serde_json::from_str(&pushed).unwrap();
    run(&["verify", &oci, "--key", "mine.pub"], 0, "verified   for evictor");
    run(&["verify", &oci, "--key", "theirs.pub"], 1, "not so");
    // Signed where it is: the other signature stays.
    run(&["sign", &oci, "--key", "theirs.key"], 0, "signatures 2");
    run(&["verify", &oci, "--key", "mine.pub"], 0, "signatures 2");
    run(&["verify", &oci, "--key", "theirs.pub"], 0, "verified");
    // As cosign would look for it.
    let manifest = pushed["manifest"].as_str().unwrap();
    run(
        &["pull", &registry.at(&format!("acme/evict:sha256-{manifest}.sig"))],
        2,
        "not of a WebAssembly component",
    );
    run(&["pull", &to, "-o", "again.wasm"], 0, "signatures 2");
    assert_eq!(
        fs::read(dir.path().join("again.wasm")).unwrap(),
        fs::read(dir.path().join("lru.wasm")).unwrap()
    );
    run(&["verify", "again.wasm", "--key", "theirs.pub"], 0, "verified");
    let inspected = run(&["inspect", &oci], 0, "evictor lru");
    assert_eq!(inspected.matches("signed ").count(), 2, "{inspected}");
    run(&["check", &oci], 2, "`kvasir policy pull` makes a file");
    run(&["pull", &to], 2, "is here already");
    // The tag moves; the digest does not.
    run(&["push", "fifo.wasm", &to], 0, "signatures 0");
    run(&["pull", &to, "-o", "moved.wasm"], 0, "fifo");
    assert!(!dir.path().join("moved.wasm.sig").exists());
    let by_digest = registry.at(&format!("acme/evict@sha256:{manifest}"));
    run(&["pull", &by_digest, "-o", "kept.wasm"], 0, "lru");
    let wrong = registry.at(&format!("acme/evict@sha256:{}", "0".repeat(64)));
    run(&["pull", &wrong], 2, "does not have manifest");
    run(&["push", "lru.wasm", &by_digest], 2, "push to a tag");
    // Into a bundle, and into a host.
    run(&["save", &format!("oci://{by_digest}"), "-o", "all.tar"], 0, "2 signatures");
    run(&["trust", "add", "theirs", "--key", "theirs.pub", "--trust", "trust.toml"], 0, "theirs");
    let (data, trust) = (dir.path().join("data"), dir.path().join("trust.toml"));
    let host = Host::start_with(&data, &[&format!("policy.trust.file={}", trust.display())]);
    host.check(&["policy", "load", "evictor", &oci], b"", 2, "it is not signed");
    host.check(&["policy", "load", "evictor", &format!("oci://{by_digest}")], b"", 0, "lru");
    // What the server has on its disk is changed under it.
    let component = pushed["digest"].as_str().unwrap();
    let blob = format!("registry/docker/registry/v2/blobs/sha256/{}/{component}/data", &component[..2]);
    let path = dir.path().join(blob);
    let mut bytes = fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    fs::write(&path, bytes).unwrap();
    run(&["pull", &by_digest, "-o", "bent.wasm"], 2, "the component was changed");
    assert!(!dir.path().join("bent.wasm").exists());
}
