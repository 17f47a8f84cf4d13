//! Inputs that cannot be used: one line that says what is wrong, a code that is not 0, and nothing left behind.

use crate::process::{Host, KVASIR, serve};
use kvasir_tests::guest;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Exit code 2, nothing on standard output, and one line that holds `part` on standard error.
fn check_refusal(output: &Output, part: &str, what: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {text}");
    assert!(text.contains(part), "{what}: `{text}` lacks `{part}`");
    assert!(output.stdout.is_empty(), "{what}");
    assert_eq!(text.trim_end().lines().count(), 1, "{what}: {text}");
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

const GOOD_LINE: &str = r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}"#;

#[test]
fn a_replay_of_bad_inputs_says_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file = |name: &str, content: &[u8]| {
        std::fs::write(path(name), content).unwrap();
        path(name)
    };
    let good = file("good.jsonl", format!("{GOOD_LINE}\n").as_bytes());
    let bad = file("bad.jsonl", format!("{GOOD_LINE}\n{{\"timestamp\":\n").as_bytes());
    let fields = file("fields.jsonl", format!("{GOOD_LINE}\n{{}}\n").as_bytes());
    let empty = file("empty.jsonl", b"");
    let half = file("half.jsonl.gz", b"\x1f\x8b\x08\0\0\0");
    let binary = file("binary.jsonl", &[0xff; 100]);
    let small_blocks = GOOD_LINE.replace("512", "2048").replace("[1]", "[1,2,3,4,5,6,7,8]");
    let small_blocks = file("small.jsonl", format!("{GOOD_LINE}\n{small_blocks}\n").as_bytes());
    let later = GOOD_LINE.replace(":0,", ":7.25,");
    let unsorted = file("unsorted.jsonl", format!("{later}\n{GOOD_LINE}\n").as_bytes());
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(format!("{GOOD_LINE}\n").repeat(10_000).as_bytes()).unwrap();
    let mut gzip = gzip.finish().unwrap();
    let cut = file("cut.jsonl.gz", &gzip[..gzip.len() / 2]);
    let checksum = gzip.len() - 8;
    gzip[checksum] ^= 1;
    let damaged = file("damaged.jsonl.gz", &gzip);
    let torn = file("torn.wasm", b"\0asm\x0d\0\x01\0\x01");
    let (missing, no_policy) = (path("missing.jsonl"), path("missing.wasm"));
    let before = entries(dir.path());
    let rows: [(&[&str], &str); 21] = [
        (&["--trace", &bad, "--capacity-blocks", "8"], "bad.jsonl:2: "),
        (&["--trace", &fields, "--capacity-blocks", "8"], "fields.jsonl:2: "),
        (&["--trace", &binary, "--capacity-blocks", "8"], "binary.jsonl:1: "),
        (&["--trace", &half, "--capacity-blocks", "8"], "half.jsonl.gz"),
        (&["--trace", &empty, "--capacity-blocks", "8"], "holds no requests"),
        (&["--trace", &missing, "--capacity-blocks", "8"], "missing.jsonl"),
        (&["--trace", &small_blocks, "--capacity-blocks", "8"], "pass --block-size-tokens"),
        (
            &["--trace", &good, "--capacity-blocks", "8", "--block-size-tokens", "64"],
            "pass --block-size-tokens",
        ),
        (&["--trace", &unsorted, "--capacity-blocks", "8"], "unsorted.jsonl:2: timestamp 0 follows 7.25"),
        (
            &["--trace", &cut, "--capacity-blocks", "8", "--evictor", "lru,optimum", "--csv"],
            "is the file cut short?",
        ),
        (&["--trace", &damaged, "--capacity-blocks", "8,9"], "damaged.jsonl.gz after line 10000"),
        (&["--trace", &good, "--capacity-blocks", "8", "--warm-up", "1"], "leaves none of 1 to count"),
        (&["--trace", &good, "--capacity-blocks", "8", "--evictor", "lru,lur"], "did you mean `lru`"),
        (&["--trace", &good, "--capacity-blocks", "8,0"], "capacity"),
        (&["--trace", &good, "--mode", "cluster", "--evictor", "optimum"], "for mode cache"),
        (&["--trace", &good, "--capacity-blocks", "0"], "capacity"),
        (&["--trace", &good], "give --capacity-blocks"),
        (&["--trace", &good, "--capacity-blocks", "8", "--evictor", "lur"], "did you mean `lru`"),
        (&["--trace", &good, "--capacity-blocks", "8", "--evictor", &no_policy], "missing.wasm"),
        (&["--trace", &good, "--capacity-blocks", "8", "--evictor", &torn], "does not compile"),
        (&["--trace", &good, "--mode", "store", "--host", "unix:/no/such.sock"], "no Kvasir host at"),
    ];
    for (args, part) in rows {
        let output = Command::new(KVASIR).arg("replay").args(args).output().unwrap();
        check_refusal(&output, part, &format!("{args:?}"));
    }
    let output = path("out.jsonl");
    let none =
        Command::new(KVASIR).args(["trace", "generate", "--requests", "0", "--output", &output]).output();
    assert_eq!(none.unwrap().status.code(), Some(2));
    assert_eq!(entries(dir.path()), before, "something was left behind");
}

#[test]
fn a_host_that_cannot_start_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap();
    let plain_file = dir.path().join("file");
    std::fs::write(&plain_file, b"x").unwrap();
    let rows = [
        (format!("listen.grpc={port}"), "the port is in use"),
        (format!("listen.http={port}"), "the port is in use"),
        (format!("listen.data={port}"), "in use"),
        ("store.pool_bytes=0B".into(), "`store.pool_bytes` = 0B must be at least 1"),
        ("store.pool_bytes=15TiB".into(), "larger than the"),
        ("policy.scheduler.source=moncake".into(), "did you mean `mooncake`?"),
        (format!("node.data_dir={}", plain_file.display()), "cannot be used"),
        (format!("node.data_dir={}/below", plain_file.display()), "cannot be used"),
    ];
    let data = dir.path().join("data");
    for (set, part) in rows {
        let output = serve(&data).args(["--set", &set]).output().unwrap();
        check_refusal(&output, part, &set);
        assert!(!data.join("kvasir.sock").exists(), "{set}: the socket stays");
    }
    assert_eq!(std::fs::read(&plain_file).unwrap(), b"x");
    // Whatever the refused ones wrote, a good start takes the same folder.
    let host = Host::start(&data);
    host.check(&["put", "a"], b"x", 0, "stored");
    assert_eq!(host.terminate(), Some(0));
}

/// A small file system of its own; unmounted on drop.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// `None` if this user may not mount.
    fn new(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let option = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &option, "tmpfs"]).arg(dir.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(dir)),
            _ => {
                println!("skipped: mounting a tmpfs needs root");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all room that is left. Returns the file that holds it.
    fn fill(&self) -> PathBuf {
        use std::io::Write;
        let path = self.path().join("filler");
        let mut file = std::fs::File::create(&path).unwrap();
        while file.write(&[0; 4096]).is_ok_and(|written| written > 0) {}
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

#[test]
fn a_disk_too_small_for_the_state_is_refused() {
    let Some(disk) = SmallDisk::new("4m") else { return };
    let data = disk.path().join("data");
    check_refusal(&serve(&data).output().unwrap(), "B free, a host needs", "a disk of 4 MiB");
    assert_eq!(entries(&data), [data.join("lock")]);
}

#[test]
fn a_disk_that_fills_up_refuses_a_load_and_keeps_the_policy() {
    let Some(disk) = SmallDisk::new("32m") else { return };
    let socket = tempfile::tempdir().unwrap();
    let socket = format!("node.socket={}", socket.path().join("s").display());
    let data = disk.path().join("data");
    let set = [socket.as_str()];
    let host = Host::start_to_restart(&data, &set);
    host.check(&["policy", "load", "evictor", "fifo"], b"", 0, "fifo");
    let module = tempfile::NamedTempFile::with_suffix(".wasm").unwrap();
    std::fs::write(&module, guest("evictor")).unwrap();
    let module = module.path().to_str().unwrap();

    let filler = disk.fill();
    host.check(&["put", "a"], b"some bytes", 0, "stored");
    host.check(&["policy", "load", "evictor", module], b"", 2, "the policy in service is unchanged");
    assert_eq!(host.policy("evictor")["name"], "fifo");
    assert_eq!(host.run(&["get", "a"], b"").stdout, b"some bytes");
    std::fs::remove_file(filler).unwrap();
    let host = host.restart(&data, &set);
    assert_eq!(host.policy("evictor")["name"], "fifo", "what was stored before the disk was full");
    host.check(&["policy", "load", "evictor", module], b"", 0, "bad");
    assert_eq!(host.terminate(), Some(0));
}

#[test]
fn without_a_home_the_data_folder_must_be_named() {
    let output = Command::new(KVASIR).arg("serve").env_clear().output().unwrap();
    check_refusal(&output, "node.data_dir", "no HOME, no XDG_STATE_HOME, no XDG_RUNTIME_DIR");
}
