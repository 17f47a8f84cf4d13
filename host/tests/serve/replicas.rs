//! Hosts that keep copies for each other, as real processes: one is killed, a disk is damaged, a stranger knocks.

use crate::process::{Host, Transport, content, quiet_port};
use kvasir_dataplane::{BlockKey, BlockMeta};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const BLOCK: u32 = 16 << 10;

pub(crate) fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("replicas", &n.to_le_bytes())
}

/// The settings of some hosts that know each other.
pub(crate) struct Plan {
    pub(crate) dir: tempfile::TempDir,
    ports: Vec<u16>,
}

impl Plan {
    pub(crate) fn new(hosts: usize) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), ports: (0..hosts).map(|_| quiet_port()).collect() }
    }

    pub(crate) fn secret(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        format!("cluster.secret_file={}", path.display())
    }

    fn folder(&self, n: usize) -> std::path::PathBuf {
        self.dir.path().join(format!("host-{n}"))
    }

    fn settings(&self, n: usize) -> Vec<String> {
        let peer = |(n, port): (usize, &u16)| {
            format!(r#"{{name = "host-{n}", address = "127.0.0.1:{port}", rack = "rack-{n}"}}"#)
        };
        let others = self.ports.iter().enumerate().filter(|(other, _)| *other != n).map(peer);
        vec![
            self.secret("secret", "what all hosts of this test know"),
            format!("node.name=host-{n}"),
            format!("cluster.rack=rack-{n}"),
            format!("cluster.listen=127.0.0.1:{}", self.ports[n]),
            format!("cluster.peers=[{}]", others.collect::<Vec<_>>().join(", ")),
            "cluster.audit_every=500ms".to_owned(),
            "cluster.repair_after=0s".to_owned(),
            // A busy machine does not make a read give up.
            "cluster.read_timeout=60s".to_owned(),
            "tiering.load_timeout=120s".to_owned(),
            "store.pool_bytes=16MiB".to_owned(),
        ]
    }

    pub(crate) fn start(&self, n: usize, more: &[String]) -> Host {
        let all: Vec<String> = self.settings(n).into_iter().chain(more.iter().cloned()).collect();
        Host::start_with(&self.folder(n), &all.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(40));
    }
    panic!("two minutes passed without: {what}");
}

/// The sum of the metric's rows that hold `label`.
pub(crate) fn metric(host: &Host, name: &str, label: &str) -> u64 {
    let text = host.page("/metrics");
    let head = format!("{name}{{");
    let rows = text.lines().filter(|row| row.starts_with(&head) && row.contains(label));
    rows.map(|row| row.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).sum()
}

/// Whether these hosts, and no others, hold `copies` copies of `blocks` blocks, and all of them know it.
pub(crate) fn settled(hosts: &[&Host], blocks: u64, copies: u64) -> bool {
    let count = |name: &str| hosts.iter().map(|host| metric(host, name, "")).collect::<Vec<_>>();
    let up = count("kvasir_peer_up").iter().all(|&up| up == hosts.len() as u64 - 1);
    up && count("kvasir_replicated_blocks").iter().all(|&known| known == blocks)
        && count("kvasir_replicas_short").iter().all(|&short| short == 0)
        && count("kvasir_replicas_own").iter().sum::<u64>() == blocks * copies
}

pub(crate) fn put(host: &Host, numbers: impl Iterator<Item = u32>, copies: u8) {
    let client = host.client(Transport::Unix);
    let numbers: Vec<u32> = numbers.collect();
    for &n in &numbers {
        client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
    }
    let keys: Vec<_> = numbers.iter().map(|&n| key(n)).collect();
    client.replicate(&keys, copies).unwrap().into_iter().for_each(|done| done.unwrap());
}

/// Every block comes back through this host, bit-exact.
pub(crate) fn all_there(host: &Host, blocks: u32, transport: Transport) {
    assert_eq!(missing(host, blocks, transport), [0; 0], "over {transport:?}");
}

/// The blocks that do not come back through this host; the others are bit-exact.
fn missing(host: &Host, blocks: u32, transport: Transport) -> Vec<u32> {
    let client = host.client(transport);
    let mut missing = Vec::new();
    for first in (0..blocks).step_by(8) {
        let keys: Vec<_> = (first..blocks.min(first + 8)).map(key).collect();
        for (n, block) in (first..).zip(client.get(&keys, 0).unwrap()) {
            let Some(block) = block else {
                missing.push(n);
                continue;
            };
            assert!(block.bytes().unwrap() == content(n, BLOCK), "block {n} over {transport:?}");
        }
    }
    assert_eq!(client.checksum_failures(), 0);
    missing
}

pub(crate) fn nodes(host: &Host) -> serde_json::Value {
    serde_json::from_str(&host.check(&["node", "list", "--json"], b"", 0, "nodes")).unwrap()
}

#[test]
fn a_killed_host_costs_no_block_and_its_copies_are_made_again() {
    const BLOCKS: u32 = 200;
    let plan = Plan::new(3);
    let mut hosts: Vec<Host> = (0..3).map(|n| plan.start(n, &[])).collect();
    let all = |hosts: &[Host]| settled(&hosts.iter().collect::<Vec<_>>(), BLOCKS.into(), 2);
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 2));
    put(&hosts[0], (0..BLOCKS).filter(|n| n % 2 == 0), 2);
    put(&hosts[1], (0..BLOCKS).filter(|n| n % 2 == 1), 2);
    until("copies", || all(&hosts));

    // A copy's whereabouts are known without asking: the two that have it name each other, the third names both.
    let explained = |(n, host): (usize, &Host)| {
        let told = host.run(&["explain", "block", &format!("0x{}", key(7)), "--json"], b"");
        let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
        let peers: Vec<_> = told["peers"].as_array().unwrap().iter().map(|peer| peer.to_string()).collect();
        let text = told["summary"].as_str().unwrap();
        assert!(!peers.contains(&format!("\"host-{n}\"")), "{told}");
        assert_eq!(
            text.contains("It is not in the pool, but at the peers host-"),
            peers.len() == 2,
            "{told}"
        );
        peers.len()
    };
    assert_eq!(hosts.iter().enumerate().map(explained).sum::<usize>(), 4);

    hosts[0].kill();
    let (_, survivors) = hosts.split_at(1);
    for host in survivors {
        // While the loss is still being noticed and made up for.
        all_there(host, BLOCKS, Transport::Unix);
        all_there(host, BLOCKS, Transport::Tcp);
    }
    let survivors: Vec<&Host> = survivors.iter().collect();
    let down = |host: &&Host| nodes(host)["nodes"][1]["state"] == "down";
    until("the loss is known", || survivors.iter().all(down));
    let restored = |host: &&Host| metric(host, "kvasir_replicas_short", "") == 0;
    until("the target again", || survivors.iter().all(restored));
    let own: u64 = survivors.iter().map(|host| metric(host, "kvasir_replicas_own", "")).sum();
    assert_eq!(own, u64::from(BLOCKS) * 2);

    hosts[0] = plan.start(0, &[]);
    until("all as before", || all(&hosts));
    hosts.iter().for_each(|host| all_there(host, BLOCKS, Transport::Tcp));
    let listed = nodes(&hosts[0]);
    assert_eq!((&listed["nodes"][0]["state"], &listed["nodes"][2]["state"]), (&"self".into(), &"up".into()));
    assert_eq!(listed["nodes"][2]["rack"], "rack-2");
    assert!(listed["nodes"][1]["topology"].is_object(), "{listed}");
    hosts[0].check(&["stat"], b"", 0, "host-1");

    let name = format!("0x{}", key(7));
    hosts[2].check(&["rm", &name], b"", 0, "removed");
    hosts.iter().for_each(|host| drop(host.check(&["exists", &name], b"", 1, "missing")));
    for host in hosts {
        assert_eq!(host.terminate(), Some(0));
    }
}

/// A host that is cut off keeps its blocks; when it is back there are more copies than were requested.
#[test]
fn a_host_that_freezes_and_thaws_leaves_no_copy_too_many() {
    use rustix::process::Signal;
    const BLOCKS: u32 = 60;
    let plan = Plan::new(3);
    let hosts: Vec<Host> = (0..3).map(|n| plan.start(n, &[])).collect();
    let all: Vec<&Host> = hosts.iter().collect();
    until("peers", || all.iter().all(|host| metric(host, "kvasir_peer_up", "") == 2));
    put(&hosts[0], 0..BLOCKS, 2);
    until("copies", || settled(&all, BLOCKS.into(), 2));

    hosts[0].signal(Signal::STOP);
    let survivors = &all[1..];
    for (host, other) in survivors.iter().zip(["host-2", "host-1"]) {
        until("the copies of the other survivor", || {
            let missing = missing(host, BLOCKS, Transport::Unix);
            // Hosts that starve take each other for dead; nothing else excuses it.
            let apart = metric(host, "kvasir_peer_lost_total", other) > 0;
            assert!(missing.is_empty() || apart, "blocks {missing:?} are not there");
            missing.is_empty()
        });
    }
    let down = |host: &&Host| nodes(host)["nodes"][1]["state"] == "down";
    until("its silence is noticed", || survivors.iter().all(down));
    until("the target again", || {
        let own: u64 = survivors.iter().map(|host| metric(host, "kvasir_replicas_own", "")).sum();
        own == u64::from(BLOCKS) * 2
    });

    hosts[0].signal(Signal::CONT);
    until("no copy too many", || settled(&all, BLOCKS.into(), 2));
    assert!(
        all.iter().map(|host| metric(host, "kvasir_replicas_dropped_total", "too_many")).sum::<u64>() > 0
    );
    all.iter().for_each(|host| all_there(host, BLOCKS, Transport::Tcp));
}

/// Changes a byte in every page of every file of a disk tier.
fn damage(folder: &Path) {
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("segment-") {
            continue;
        }
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.iter_mut().skip(2000).step_by(4096).for_each(|byte| *byte ^= 0x5a);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        file.sync_all().unwrap();
    }
}

#[test]
fn a_copy_that_the_disk_damaged_is_fetched_again() {
    const BLOCKS: u32 = 384;
    let plan = Plan::new(2);
    let disk = plan.dir.path().join("blocks");
    // Half of the blocks fit the pool; the others are only on the disk.
    let small = [
        "store.pool_bytes=3MiB".to_owned(),
        format!("nvme.dir={}", disk.display()),
        "nvme.segment_bytes=1MiB".to_owned(),
        "nvme.capacity_bytes=64MiB".to_owned(),
        "tiering.min_uses=0".to_owned(),
        "store.put_wait=60s".to_owned(),
    ];
    let hosts = [plan.start(0, &small), plan.start(1, &[])];
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    for first in (0..BLOCKS).step_by(8) {
        put(&hosts[0], first..first + 8, 2);
    }
    let both = |name: &str| hosts.each_ref().map(|host| metric(host, name, ""));
    until("copies", || both("kvasir_replicas_own")[1] == u64::from(BLOCKS));
    until("nothing is on its way to the disk", || both("kvasir_offload_queued_blocks")[0] == 0);
    assert!(metric(&hosts[0], "kvasir_tier_blocks", "nvme") > 0);

    damage(&disk);
    // Each pass drives others out of the pool, so sooner or later a block that is only on the disk is requested.
    until("a damaged block is read", || {
        all_there(&hosts[0], BLOCKS, Transport::Unix);
        metric(&hosts[0], "kvasir_tier_corrupt_total", "nvme") > 0
    });
    assert!(metric(&hosts[0], "kvasir_peer_reads_total", "hit") > 0, "and the other host");
    assert_eq!(both("kvasir_peer_corrupt_total"), [0, 0]);
}

/// Its disk still has the blocks, and nobody could tell it meanwhile.
#[test]
fn a_removal_reaches_a_host_that_was_killed() {
    const BLOCKS: u32 = 384;
    let plan = Plan::new(2);
    let small = [
        "store.pool_bytes=3MiB".to_owned(),
        format!("nvme.dir={}", plan.dir.path().join("blocks").display()),
        "nvme.segment_bytes=1MiB".to_owned(),
        "nvme.capacity_bytes=64MiB".to_owned(),
        "tiering.min_uses=0".to_owned(),
        "store.put_wait=60s".to_owned(),
    ];
    let mut hosts = [plan.start(0, &[]), plan.start(1, &small)];
    let up = |hosts: &[Host; 2]| hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1);
    until("peers", || up(&hosts));
    for first in (0..BLOCKS).step_by(8) {
        put(&hosts[0], first..first + 8, 2);
        // No faster than the disk, or some would be evicted without a copy.
        until("copies", || {
            metric(&hosts[1], "kvasir_replicas_own", "") == u64::from(first + 8)
                && metric(&hosts[1], "kvasir_offload_queued_blocks", "") == 0
        });
    }
    until("nothing is on its way to the disk", || {
        metric(&hosts[1], "kvasir_offload_queued_blocks", "") == 0
            && metric(&hosts[1], "kvasir_tier_blocks", "nvme") > 0
    });
    hosts[1].kill();
    until("its loss is known", || metric(&hosts[0], "kvasir_peer_up", "") == 0);
    let evens: Vec<BlockKey> = (0..BLOCKS).step_by(2).map(key).collect();
    let removed = hosts[0].client(Transport::Unix).remove(&evens).unwrap();
    assert!(removed.into_iter().all(|removed| removed));
    assert_eq!(metric(&hosts[0], "kvasir_removals_kept", ""), evens.len() as u64);

    hosts[1] = plan.start(1, &small);
    until("peers again", || up(&hosts));
    assert!(metric(&hosts[1], "kvasir_removals_late_total", "told") > 0);
    assert!(metric(&hosts[1], "kvasir_replicas_dropped_total", "removed") > 0, "its disk had some");
    assert!(metric(&hosts[1], "kvasir_tier_blocks", "nvme") > 0, "and has those that were not removed");
    for host in &hosts {
        let found = host.client(Transport::Unix).exists(&evens).unwrap();
        assert_eq!(found.iter().filter(|found| **found).count(), 0);
        let odd = (1..BLOCKS).step_by(2).map(key).collect::<Vec<_>>();
        assert!(host.client(Transport::Unix).exists(&odd).unwrap().into_iter().all(|found| found));
    }
}

#[test]
fn copies_are_made_again_from_what_a_disk_kept_when_all_holders_were_killed() {
    const BLOCKS: u32 = 384;
    let plan = Plan::new(2);
    let small = [
        "store.pool_bytes=3MiB".to_owned(),
        format!("nvme.dir={}", plan.dir.path().join("blocks").display()),
        "nvme.segment_bytes=1MiB".to_owned(),
        "nvme.capacity_bytes=64MiB".to_owned(),
        "tiering.min_uses=0".to_owned(),
        "store.put_wait=60s".to_owned(),
    ];
    let hosts = [plan.start(0, &small), plan.start(1, &[])];
    let up = |hosts: &[Host; 2]| hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1);
    until("peers", || up(&hosts));
    for first in (0..BLOCKS).step_by(8) {
        put(&hosts[0], first..first + 8, 2);
    }
    until("copies", || metric(&hosts[1], "kvasir_replicas_own", "") == u64::from(BLOCKS));
    until("half of them on the disk, and known there", || {
        metric(&hosts[0], "kvasir_offload_queued_blocks", "") == 0
            && metric(&hosts[0], "kvasir_tier_blocks", "nvme") > 0
            && metric(&hosts[0], "kvasir_targets_unkept", "") == 0
    });
    // Both at once; the other one had its blocks only in memory.
    drop(hosts);
    let hosts = [plan.start(0, &small), plan.start(1, &[])];
    let restored = metric(&hosts[0], "kvasir_targets_restored_total", "");
    assert!(restored > 0 && restored <= BLOCKS.into(), "{restored}");
    until("two of each again", || up(&hosts) && settled(&[&hosts[0], &hosts[1]], restored, 2));
    assert!(metric(&hosts[1], "kvasir_copy_bytes_total", "in") >= restored * u64::from(BLOCK));
}

#[test]
fn a_put_that_asks_for_copies_goes_where_there_is_room() {
    let plan = Plan::new(2);
    let hosts = [plan.start(0, &["store.pool_bytes=2MiB".to_owned()]), plan.start(1, &[])];
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    let client = hosts[0].client(Transport::Unix);
    let place = |copies| client.place(BLOCK.into(), copies).unwrap();
    assert_eq!((place(2).node.as_str(), place(2).endpoint), ("host-0", None));
    let file = plan.dir.path().join("block");
    std::fs::write(&file, content(1, BLOCK)).unwrap();
    // The other host takes the same token.
    let token = hosts[0].token_for(&["--role", "engine"]);
    std::fs::copy(plan.folder(0).join("tokens.json"), plan.folder(1).join("tokens.json")).unwrap();
    let put = |name, part| {
        let put = hosts[0].run_with(&["put", "--copies", "2", name, file.to_str().unwrap()], b"", &token);
        let text = String::from_utf8([put.stdout, put.stderr].concat()).unwrap();
        assert!(put.status.success() && text.contains(part), "{text}");
        text
    };
    assert!(!put("a", "stored 16384 B").contains(" on "));

    // Until less than an eighth of its pool is free; the other host has most of its own free.
    let mut next = 0;
    until("the host is nearly full", || {
        client.put(&BlockMeta::single(key(next), BLOCK), &content(next, BLOCK)).unwrap();
        next += 1;
        place(2).endpoint.is_some()
    });
    assert!(next > 90, "not before: {next}");
    assert_eq!(place(2).node, "host-1");
    assert_eq!(place(2).endpoint, Some(hosts[1].endpoint(Transport::Tcp)));
    assert_eq!(place(1).endpoint, None, "one that asks for no copies stays");
    put("b", "on host-1, which has more room");
    let name = [BlockKey::from_name("b")];
    let tiers =
        |host: &Host| host.client(Transport::Unix).stat(&name).unwrap()[0].map_or(0, |stat| stat.tiers);
    let dram = 1 << kvasir_dataplane::tier::store::Tier::Dram as u8;
    assert!(tiers(&hosts[1]) & dram != 0, "at once");
    until("its copy", || tiers(&hosts[0]) & dram != 0);
}

#[test]
fn a_host_with_another_secret_is_refused_by_name_and_reason() {
    let plan = Plan::new(2);
    let stranger = plan.secret("other", "what no host of this test knows");
    let hosts = [plan.start(0, &[]), plan.start(1, &[stranger])];
    until("refused", || hosts.iter().all(|host| nodes(host)["nodes"][1]["state"] == "refused"));
    let text = hosts[0].check(&["node", "list"], b"", 0, "refused");
    assert!(text.contains("cluster.secret_file") && text.contains("host-1"), "{text}");
    assert!(metric(&hosts[0], "kvasir_cluster_strangers_total", "") > 0);
    // It serves anyway, and says what it cannot promise.
    let file = plan.dir.path().join("block");
    std::fs::write(&file, content(1, BLOCK)).unwrap();
    let file = file.to_str().unwrap();
    hosts[0].check(&["put", "--copies", "2", "a", file], b"", 0, "2 hosts will hold it");
    hosts[0].check(&["put", "--copies", "3", "b", file], b"", 2, "fewer hosts than copies");
    hosts[0].check(&["exists", "a", "b"], b"", 0, "resident");
}

#[test]
fn blocks_are_handed_over_by_name() {
    let plan = Plan::new(2);
    let hosts = [plan.start(0, &[]), plan.start(1, &[])];
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    let client = hosts[0].client(Transport::Unix);
    for n in 0..8 {
        client.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
    }
    let names: Vec<String> = (0..8).map(|n| format!("0x{}", key(n))).collect();
    let push = |more: &[&'static str]| -> Vec<String> {
        let fixed = ["push", "--to", "host-1"].into_iter().map(str::to_owned);
        fixed.chain(more.iter().map(|&name| name.to_owned())).chain(names.iter().cloned()).collect()
    };
    let run = |args: &[String], code, part| {
        hosts[0].check(&args.iter().map(String::as_str).collect::<Vec<_>>(), b"", code, part)
    };
    run(&push(&[]), 0, "pushed");
    run(&push(&["--json"]), 0, "there already");
    run(&push(&["nowhere"]), 1, "nowhere missing");
    all_there(&hosts[1], 8, Transport::Unix);
    hosts[0].check(&["push", "--to", "host-9", "a"], b"", 2, "no peer is called host-9");
}

/// The rails of a host to its only peer: transport, state, bytes.
fn rails(host: &Host) -> Vec<(String, String, u64)> {
    let found = nodes(host);
    let rails = found["nodes"][1]["rails"].as_array().unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    rails
        .iter()
        .map(|rail| (text(&rail["transport"]), text(&rail["state"]), rail["bytes"].as_u64().unwrap()))
        .collect()
}

#[test]
fn hosts_on_one_machine_share_memory_unless_told_otherwise() {
    const BLOCKS: u32 = 100;
    let plan = Plan::new(2);
    let hosts = [plan.start(0, &[]), plan.start(1, &[])];
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    let mut blocks = 0;
    // A peer that a busy machine keeps from answering is down for a moment: its connections end until the next copy, and what
    // was on its way goes again. So of some batch: no byte more than it has, and all of them through memory.
    until("a batch that went through shared memory", || {
        let before = metric(&hosts[1], "kvasir_peer_transfer_bytes_total", "shm");
        put(&hosts[0], blocks..blocks + BLOCKS, 2);
        blocks += BLOCKS;
        until("copies", || settled(&[&hosts[0], &hosts[1]], blocks.into(), 2));
        rails(&hosts[1])[0] == ("shm".to_owned(), "in use".to_owned(), before + u64::from(BLOCKS * BLOCK))
            && hosts[1].check(&["node", "list"], b"", 0, "shm").contains("shm in use")
    });
    let found = rails(&hosts[1]);
    assert!(found.iter().any(|(kind, _, bytes)| kind == "tcp" && *bytes == 0), "{found:?}");
    assert_eq!(metric(&hosts[1], "kvasir_peer_transfer_bytes_total", "shm"), found[0].2);
}

#[test]
fn two_addresses_are_two_rails() {
    let plan = Plan::new(2);
    let two = [
        r#"cluster.transfer=["127.0.0.1:0", "127.0.0.2:0"]"#.to_owned(),
        r#"cluster.transports=["tcp"]"#.to_owned(),
    ];
    let hosts = [plan.start(0, &two), plan.start(1, &two)];
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    let mut blocks = 0;
    until("both carry something", || {
        put(&hosts[0], blocks..blocks + 50, 2);
        blocks += 50;
        until("copies", || settled(&[&hosts[0], &hosts[1]], blocks.into(), 2));
        let found = rails(&hosts[1]);
        found.len() == 4 && found[0].2 > 0 && found[1].2 > 0
    });
    all_there(&hosts[1], blocks, Transport::Unix);
}
