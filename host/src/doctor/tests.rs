use super::facts::*;
use super::*;
use std::path::PathBuf;

fn config(set: &[&str]) -> Config {
    let set: Vec<String> = set.iter().map(|set| set.to_string()).collect();
    Config::load(None, [], &set).unwrap()
}

/// A machine with nothing wrong, and no host on it.
fn healthy() -> Facts {
    Facts {
        memory: Memory {
            total_bytes: 1 << 40,
            available_bytes: 1 << 39,
            huge_pages_free: 0,
            are_transparent: true,
        },
        data_dir: Folder {
            path: "/data".into(),
            owner_mode: Some((7, 0o700)),
            free_bytes: Some(1 << 40),
            ..Folder::default()
        },
        user: 7,
        clock: Clock { wall_s: 1_800_000_000, source: "tsc".to_owned(), peers: vec![] },
        rdma: Rdma { library: Some(PathBuf::from("/l")), devices: vec!["mlx5_0".to_owned()], may_open: true },
        cuda: Cuda { library: Some(PathBuf::from("/l")), device: true, cards: 1 },
        ..Facts::default()
    }
}

/// The worst finding that holds all of `words`, or else `None`.
fn worst(config: &Config, facts: &Facts, words: &str) -> Option<Level> {
    let findings = examine(config, facts);
    let about = |finding: &&Finding| format!("{finding:?}").contains(words);
    findings.iter().filter(about).map(|finding| finding.level).max()
}

#[test]
fn a_healthy_machine_has_nothing_to_mend() {
    let findings = examine(&config(&[]), &healthy());
    let bad: Vec<_> = findings.iter().filter(|finding| finding.level > Level::Note).collect();
    assert!(bad.is_empty(), "{bad:?}");
    assert!(findings.iter().all(|finding| finding.level != Level::Broken || !finding.advice.is_empty()));
}

/// A name, the settings, what is wrong with the machine, and what must be said about it.
type Case = (&'static [&'static str], fn(&mut Facts), Level, &'static str);

#[test]
fn each_fault_is_found_with_its_weight() {
    let cases: &[Case] = &[
        (&[], |facts| facts.limits.files = Some(256), Level::Warning, "256 open files"),
        (&[], |facts| facts.limits.address_bytes = Some(4 << 30), Level::Warning, "of address space"),
        (
            &["store.lock_memory=true"],
            |facts| facts.limits.locked_bytes = Some(65_536),
            Level::Broken,
            "may be locked",
        ),
        (
            &[],
            |facts| facts.limits.locked_bytes = Some(65_536),
            Level::Warning,
            "larger than the memory that may be locked",
        ),
        (&[], |facts| facts.memory.available_bytes = 1 << 20, Level::Broken, "store.pool_bytes is 1GiB"),
        (&["store.huge_pages=require"], |_| {}, Level::Broken, "vm.nr_hugepages=512"),
        (&[], |facts| facts.memory.are_transparent = false, Level::Warning, "no huge pages"),
        (
            &[],
            |facts| facts.data_dir.owner_mode = Some((8, 0o700)),
            Level::Broken,
            "belongs to user 8, this is user 7",
        ),
        (&[], |facts| facts.data_dir.owner_mode = Some((7, 0o770)), Level::Broken, "has mode 770"),
        (&[], |facts| facts.data_dir.owner_mode = None, Level::Broken, "is not for this user to write"),
        (&[], |facts| facts.data_dir.free_bytes = Some(1 << 20), Level::Broken, "the disk has 1MiB free"),
        (&[], |facts| facts.clock.wall_s = 1_000, Level::Broken, "before this version"),
        (&[], |facts| facts.clock.source = "hpet".into(), Level::Warning, "the clock source is hpet"),
        (&[], |facts| facts.clock.peers = vec![("b:1".into(), Ok(-9))], Level::Warning, "b:1 is 9 s behind"),
        (&[], |facts| facts.clock.peers = vec![("b:1".into(), Ok(1))], Level::Ok, "b:1 agrees"),
        (&[], |facts| facts.kernel.memfd = Some("no".into()), Level::Broken, "no memory to share"),
        (
            &[],
            |facts| facts.kernel.io_uring = Some("EPERM".into()),
            Level::Note,
            "io_uring is refused: EPERM",
        ),
        (&["nvme.dir=/x"], |facts| facts.kernel.io_uring = Some("EPERM".into()), Level::Warning, "EPERM"),
        (&[], |facts| facts.rdma.library = None, Level::Warning, "libibverbs.so.1"),
        (&[], |facts| facts.rdma = Rdma::default(), Level::Note, "libibverbs.so.1"),
        (&[], |facts| facts.rdma.may_open = false, Level::Warning, "may not open"),
        (&[], |facts| facts.cuda.library = None, Level::Warning, "libcuda.so.1"),
        (&[], |facts| facts.cuda = Cuda::default(), Level::Note, "libcuda.so.1"),
    ];
    for (set, break_it, level, words) in cases {
        let config = config(set);
        let mut facts = healthy();
        let before = worst(&config, &facts, words);
        break_it(&mut facts);
        assert_eq!(worst(&config, &facts, words), Some(*level), "{words}: {:#?}", examine(&config, &facts));
        assert!(before.is_none() || words.starts_with("vm."), "{words} is said of a healthy machine too");
    }
}

#[test]
fn rdma_that_the_settings_ask_for_must_be_there() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let file = format!("cluster.secret_file={}", secret.path().display());
    let peers = r#"cluster.peers=[{name="b", address="127.0.0.1:1", rack="b"}]"#;
    let config = config(&[&file, "cluster.transports=[\"rdma\"]", peers]);
    let facts = Facts { rdma: Rdma::default(), ..healthy() };
    assert_eq!(worst(&config, &facts, "libibverbs.so.1"), Some(Level::Broken));
}

#[test]
fn ports_and_sockets_are_named_with_their_holders() {
    let addr = "127.0.0.1:7421".parse().unwrap();
    let facts = |state| Facts { ports: vec![Port { key: "listen.http", addr, state }], ..healthy() };
    let config = config(&[]);
    let taken = facts(PortState::Taken(Some((12, "nginx".into()))));
    assert_eq!(worst(&config, &taken, "taken by process 12 (nginx)"), Some(Level::Broken));
    assert_eq!(worst(&config, &facts(PortState::Taken(None)), "another user"), Some(Level::Broken));
    assert_eq!(worst(&config, &facts(PortState::Free), "7421 is free"), Some(Level::Ok));
    let other = Facts { host: Some(RunningHost::default()), ..facts(PortState::Free) };
    assert_eq!(worst(&config, &other, "other settings"), Some(Level::Warning));
    let socket =
        |state| Facts { sockets: vec![Socket { key: "node.socket", path: "/s".into(), state }], ..healthy() };
    assert_eq!(worst(&config, &socket(SocketState::NotASocket), "is not a socket"), Some(Level::Broken));
    assert_eq!(worst(&config, &socket(SocketState::LeftOver), "will be replaced"), Some(Level::Note));
    assert_eq!(
        worst(&config, &socket(SocketState::Closed("no".into())), "closed to user 7"),
        Some(Level::Broken)
    );
}

#[test]
fn a_running_host_is_asked_how_it_is() {
    let host = RunningHost {
        pid: Some(42),
        version: "0.0.1".into(),
        not_ready: vec![("store".into(), "the eviction thread has ended".into())],
        peers_down: vec![("b".into(), "down no answer".into())],
    };
    // Its pool is taken from what would be available, so that is no fault.
    let mut facts = Facts { host: Some(host), ..healthy() };
    facts.memory.available_bytes = 1 << 20;
    let config = config(&[]);
    assert_eq!(worst(&config, &facts, "process 42"), Some(Level::Ok));
    assert_eq!(worst(&config, &facts, "store is not ready"), Some(Level::Broken));
    assert_eq!(worst(&config, &facts, "host b is not up"), Some(Level::Warning));
    assert_eq!(worst(&config, &facts, "the running host is version 0.0.1"), Some(Level::Warning));
    assert_eq!(worst(&config, &facts, "store.pool_bytes"), None);
}
