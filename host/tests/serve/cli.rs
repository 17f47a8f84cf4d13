use crate::process::{Host, KVASIR, runtime, serve};
use kvasir_client::control::Control;
use kvasir_proto as proto;
use kvasir_tests::{guest, import_not_granted};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

#[test]
fn a_trace_goes_through_a_host_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("chat.jsonl.gz");
    let trace = trace.to_str().unwrap();
    let host = Host::start(dir.path());
    host.check(&["trace", "generate", "--requests", "300", "--output", trace], b"", 0, "300 requests");
    let [unix, tcp] = ["unix:", "tcp:"].map(|kind| {
        let key = if kind == "unix:" { "socket" } else { "data" };
        kind.to_owned() + host.addr(key)
    });
    let token = host.token();
    let replay = |target: &str, more: &[&str]| {
        let args = ["replay", "--mode", "store", "--json", "--trace", trace, "--host", target];
        let output = host.run_with(&[&args, more].concat(), b"", &token);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    // 512 blocks at most: the default policy evicts most of the trace.
    for (target, block_bytes) in [(&unix, "8KiB"), (&tcp, "8200")] {
        let report = replay(target, &["--block-bytes", block_bytes]);
        let number = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key} in {report}"));
        assert_eq!((number("requests"), &report["mode"]), (300, &"store".into()));
        assert!(number("prefix_hits") > 0 && number("blocks_put") > 512, "{report}");
        assert!(number("bytes_read") >= number("prefix_hits") * 8192);
        assert_eq!(number("bytes_verified"), number("bytes_read"));
        assert_eq!((number("wrong_bytes"), number("checksum_failures")), (0, 0));
    }
    assert_eq!(replay(&unix, &["--limit", "3"])["requests"], 3);
    let path = unix.clone();
    assert_eq!(host.terminate(), Some(0));
    let gone = Command::new(KVASIR)
        .args(["replay", "--mode", "store", "--trace", trace, "--host", &path])
        .output()
        .unwrap();
    assert_eq!(gone.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&gone.stderr).contains("no Kvasir host at unix:"));
}

#[test]
fn a_host_sees_the_gaps_of_a_trace_although_nothing_waits() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("two-hours.jsonl");
    let line = |ms: u64| {
        format!(r#"{{"timestamp":{ms},"input_length":1024,"output_length":1,"hash_ids":[1,{}]}}"#, ms + 2)
            + "\n"
    };
    std::fs::write(&trace, [5_000, 3_605_000, 7_205_000].map(line).concat()).unwrap();
    let began = Instant::now();
    let host = Host::start_by(&dir.path().join("moved"), &["--movable-clock"]);
    let fixed = Host::start(&dir.path().join("fixed"));
    let replay = |host: &Host, status, part: &str| {
        let data = format!("unix:{}", host.addr("socket"));
        let (trace, control) = (trace.to_str().unwrap(), host.control().to_string());
        let args = ["replay", "--mode", "store", "--trace", trace, "--host", &data, "--trace-time"];
        host.check(&[&args[..], &["--grpc", &control]].concat(), b"", status, part);
    };
    replay(&host, 0, "3");
    let uptime_ms = runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        let far = proto::MoveClockRequest { to_ms: u64::MAX };
        let refused = control.node.move_clock(far).await.unwrap_err();
        assert!(refused.message().contains("to_ms"), "{refused}");
        control.node.info(proto::InfoRequest {}).await.unwrap().into_inner().uptime_ms
    });
    let most = 7_200_000 + began.elapsed().as_millis() as u64;
    assert!((7_200_000..=most).contains(&uptime_ms), "{uptime_ms} of {most}");
    replay(&fixed, 2, "this clock cannot be moved; `kvasir serve --movable-clock`");
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "s").unwrap();
    let mut of_a_cluster = serve(&dir.path().join("cluster"));
    let secret = format!("cluster.secret_file={}", secret.display());
    let output = of_a_cluster.args(["--movable-clock", "--set", &secret]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--movable-clock is not for a host of a cluster"), "{said}");
}

#[test]
fn a_trace_of_small_blocks_goes_through_several_caches() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jsonl");
    let line = |n: u64| {
        let ids = [1, 2, 3 + n % 5, 100 + n];
        format!(
            "{{\"timestamp\":{n}.5,\"input_length\":60,\"output_length\":1,\"hash_ids\":{ids:?},\"tenant\":{}}}\n",
            n % 2
        )
    };
    std::fs::write(&path, (0..500).map(line).collect::<String>()).unwrap();
    let replay = |more: &str| {
        let line =
            format!("replay --block-size-tokens 16 --capacity-blocks 8,16 --trace {} {more}", path.display());
        let output = Command::new(KVASIR).args(line.split_whitespace()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let json: serde_json::Value =
        serde_json::from_str(&replay("--evictor lru,arc,optimum --json --by tenant --warm-up 100")).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let of_tenants = ["0", "1"].map(|tenant| number(&row["by_tenant"][tenant]["prefix_hits"]));
        assert_eq!(number(&row["prefix_hits"]), of_tenants.iter().sum::<u64>());
        assert_eq!((number(&row["requests"]), number(&row["warm_up"]["requests"])), (400, 100));
    }
    // 2 tenants share no blocks: 16 slots hold all 14 blocks that come again.
    assert_eq!(rows[5]["prefix_hits"], 3 * 400);
    let hits = |engine: &str| {
        let csv = replay(&format!("--evictor lru,workload-aware --csv --engine {engine}"));
        csv.lines().map(|line| line.split(',').nth(7).unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(hits("wasm"), hits("native"));
    assert_eq!(hits("native").len(), 5);
    assert!(replay("--evictor optimum").contains("gap closed %"));
}

#[test]
fn blocks_go_in_and_out_and_codes_tell_how_it_went() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    host.check(&["put", "a"], b"some bytes", 0, "stored 10 B as 0x");
    host.check(&["put", "a"], b"some bytes", 0, "stored already");
    assert_eq!(host.run(&["get", "a"], b"").stdout, b"some bytes");
    let tcp = format!("tcp:{}", host.addr("data"));
    assert_eq!(host.run_with(&["get", "a", "--host", &tcp], b"", &host.token()).stdout, b"some bytes");
    host.check(&["get", "a", "--host", &tcp], b"", 2, "a token is needed over TCP");
    let file = dir.path().join("out");
    host.check(&["get", "a", file.to_str().unwrap()], b"", 0, "");
    assert_eq!(std::fs::read(file).unwrap(), b"some bytes");
    host.check(&["exists", "a"], b"", 0, "a resident");
    host.check(&["exists", "a", "b", "--json"], b"", 1, r#"{"a":"resident","b":"missing"}"#);
    host.check(&["stat", "a", "--json"], b"", 0, r#""size_bytes":10"#);
    host.check(&["stat", "a"], b"", 0, r#""tiers":["dram"]"#);
    host.check(&["stat", "b"], b"", 1, "b missing");
    host.check(&["pin", "a", "b", "--for", "90s"], b"", 1, "a pinned");
    host.check(&["evict", "a"], b"", 2, "a ");
    host.check(&["exists", "a"], b"", 0, "a resident");
    host.check(&["unpin", "a"], b"", 0, "a unpinned");
    host.check(&["unpin", "a"], b"", 1, "a not pinned");
    host.check(&["pin", "a", "--soft", "8"], b"", 0, "a pinned");
    host.check(&["pin", "a"], b"", 2, "<--for <SPAN>|--soft <WEIGHT>>");
    host.check(&["pin", "a", "--for", "soon"], b"", 2, "soon");
    host.check(&["evict", "a"], b"", 0, "a evicted");
    host.check(&["evict", "a"], b"", 1, "a missing");
    host.check(&["put", "a"], b"some bytes", 0, "stored 10 B as 0x");
    host.check(&["stat", "--json"], b"", 0, r#""blocks":1"#);
    host.check(&["ls"], b"", 0, "10 B");
    host.check(&["rm", "a"], b"", 0, "a removed");
    host.check(&["rm", "a"], b"", 1, "a missing");
    host.check(&["get", "a"], b"", 1, "is not there");
    host.check(&["put", "a"], b"", 2, "nothing to store");
    host.check(&["put", "a", "/no/such/file"], b"", 2, "cannot open /no/such/file");
    host.check(&["put", "0x12"], b"x", 2, "32 hexadecimal digits");
    host.check(&["exists"], b"", 2, "required");
    host.check(&["get", "a", "--host", "nonsense"], b"", 2, "is not an endpoint");
    host.check(&["get", "a", "--host", "unix:/no/such.sock"], b"", 2, "no Kvasir host at unix:/no/such.sock");
    host.check(&["policy", "list", "--grpc", "127.0.0.1:1"], b"", 2, "cannot reach the host at 127.0.0.1:1");
    host.check(&["policy", "list", "--json"], b"", 0, r#""engine":"wasm""#);
    host.check(&["policy", "load", "evictor", "lur"], b"", 2, "no built-in evictor is called `lur`");
    host.check(&["policy", "load", "evict", "lru"], b"", 2, "unknown slot `evict`");
    host.check(&["policy", "load", "evictor", "./none.wasm"], b"", 2, "cannot read policy file ./none.wasm");
    let socket = host.addr("socket").to_owned();
    assert_eq!(host.terminate(), Some(0));
    assert!(!Path::new(&socket).exists());
}

#[test]
fn policies_survive_kill_and_port_and_socket_are_free_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_to_restart(dir.path(), &[]);
    host.check(&["policy", "load", "evictor", "fifo"], b"", 0, "fifo");
    host.check(&["put", "a"], b"x", 0, "stored");
    let host = host.restart(dir.path(), &[]);
    host.check(&["policy", "list"], b"", 0, "fifo");
    host.check(&["exists", "a"], b"", 1, "missing");
    host.check(&["policy", "rollback", "evictor"], b"", 0, "workload-aware");
    let second = serve(dir.path()).output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&second.stderr).contains("is in use by another kvasir"));
}

#[test]
fn a_host_that_cannot_start_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let grpc = format!("listen.grpc={}", taken.local_addr().unwrap());
    let rows = [
        (grpc.as_str(), "the port is in use"),
        ("store.pool_bytes=0B", "`store.pool_bytes` = 0B must be at least 1"),
        ("store.pool_bytes=15TiB", "larger than the"),
        ("node.data_dir=/proc/kvasir", "data folder /proc/kvasir cannot be used"),
        ("policy.evictor.source=lur", "did you mean `lru`?"),
        ("policy.evictor.source=./no.wasm", "./no.wasm"),
        ("store.pool_byte=1MiB", "did you mean `pool_bytes`?"),
        ("listen.grpc=0.0.0.0:0", "is not loopback"),
    ];
    for (set, part) in rows {
        let output = serve(&dir.path().join("data")).args(["--set", set]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{set}: {text}");
        assert!(text.contains(part), "{set}: `{text}` lacks `{part}`");
        assert!(output.stdout.is_empty(), "{set}");
    }
}

#[test]
fn eight_gib_of_address_space_are_enough_for_all_policies() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_within(dir.path(), 8 << 20);
    let listed = host.run(&["policy", "list", "--json"], b"");
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let engines: Vec<_> = listed["policies"].as_array().unwrap().iter().map(|p| &p["engine"]).collect();
    assert_eq!(engines, ["wasm"; 4]);
}

#[test]
fn a_component_is_looked_at_without_a_host() {
    let dir = tempfile::tempdir().unwrap();
    let inspect = |bytes: &[u8], code: i32, json: bool, expected: &[&str]| {
        let file = dir.path().join("some.wasm");
        std::fs::write(&file, bytes).unwrap();
        let args = ["policy", "inspect", file.to_str().unwrap(), "--json"];
        let output = Command::new(KVASIR).args(&args[..if json { 4 } else { 3 }]).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert_eq!(output.status.code(), Some(code), "{printed}");
        assert!(expected.iter().all(|text| printed.contains(text)), "{expected:?}: {printed}");
        printed
    };
    for (bytes, slot, setting) in [
        (guest("evictor"), "evictor", "mode"),
        (guest("scheduler"), "scheduler", "mode"),
        (kvasir_default_policies::BALANCERS[0].component, "balancer", "kvcache-balancing-threshold"),
    ] {
        let printed = inspect(bytes, 0, true, &["kvasir:policy/control@0.1.0"]);
        let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
        assert_eq!((&found["slot"], &found["bytes"]), (&slot.into(), &bytes.len().into()), "{found}");
        assert_eq!(found["settings"][0]["name"], setting, "{found}");
        assert_eq!((&found["contract"], &found["learns"]), (&"kvasir:policy@0.1.0".into(), &false.into()));
        assert_eq!(found["signatures"], serde_json::json!([]));
        // Those that are asked at every request or eviction.
        let is_hot = ["scheduler", "evictor"].contains(&slot);
        assert_eq!(found["unwrapped"], is_hot, "{found}");
        let wit = ["describe: func() -> description;", "export-state: func() -> list<u8>;"];
        let entered = if is_hot { "entered  by its core module" } else { "entered  as a component" };
        inspect(bytes, 0, false, &[&[slot, entered, "size     ", "signed   no", setting][..], &wit].concat());
    }
    inspect(guest("learning"), 0, false, &["learns   yes", "publish: func() -> "]);
    inspect(b"", 2, false, &["is not a WebAssembly component: the file is empty"]);
    inspect(b"\0asm\x0d\0\x01\0", 2, false, &["serves no slot: it exports nothing", "wit/policy-0.1"]);
    inspect(&import_not_granted(), 2, false, &["which is not granted"]);
    inspect(guest("describe-traps"), 2, true, &["failed in `describe`: trapped"]);

    let chain = dir.path().join("two.toml");
    std::fs::write(&chain, "[[scorer]]\nsource = \"netkv\"\n").unwrap();
    for verb in ["inspect", "check"] {
        let output = Command::new(KVASIR).args(["policy", verb]).arg(&chain).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains("chains are taken by `kvasir policy run`, `bench`, `replay` and `load`"),
            "{said}"
        );
    }
}
