//! A storm: three hosts that keep copies for each other stand still, go on and are killed, while clients put, read and remove.
//!
//! Their pools are smaller than all blocks and copies, so that most are on disks, or on both.
//! Minutes to hours, so only where it is asked for.

use crate::process::{Host, Transport, content, quiet_port};
use crate::replicas::{Plan, metric, settled, until};
use kvasir_client::data::{Client, ClientError, Endpoint, Options};
use kvasir_dataplane::{BlockKey, BlockMeta};
use rustix::process::Signal;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

const HOSTS: usize = 3;
const CLIENTS: u32 = 6;
/// Of each client. All of them, twice, are half as much again as the three pools.
const KEYS: u32 = 96;
const POOL: &str = "store.pool_bytes=4MiB";
const BLOCK: u32 = 16 << 10;
/// Of a disk; each is a file that may be open.
const SEGMENTS: usize = 128;
const BATCH: u32 = 8;
const TIMEOUT: Duration = Duration::from_secs(10);
/// What a call on a busy machine may take beyond its time.
const SLACK: Duration = Duration::from_secs(30);
/// The longest that a host stands still.
const PAUSE_MS: u64 = 4000;

/// How long it lasts: `KVASIR_STORM_SECONDS`, or a minute.
fn span() -> Duration {
    let seconds = std::env::var("KVASIR_STORM_SECONDS");
    Duration::from_secs(seconds.map_or(60, |s| s.parse().expect("KVASIR_STORM_SECONDS is a number")))
}

struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("storm", &n.to_le_bytes())
}

/// What is in each block: made once, as to make them anew each time took this process most of a core.
static BLOCKS: LazyLock<Vec<Vec<u8>>> =
    LazyLock::new(|| (0..CLIENTS * KEYS).map(|n| content(n, BLOCK)).collect());

#[derive(Debug, Default)]
struct Counts {
    put: AtomicU64,
    read: AtomicU64,
    missed: AtomicU64,
    removed: AtomicU64,
    failed: AtomicU64,
}

/// A client of one host, the only one that puts and removes its blocks.
struct Writer<'a> {
    number: u32,
    endpoint: Endpoint,
    token: String,
    /// Which of its blocks the host has answered to be removed, since they were last put.
    removed: Vec<bool>,
    chance: Chance,
    counts: &'a Counts,
}

impl Writer<'_> {
    fn connect(&self) -> Result<Client, ClientError> {
        let options = Options { token: self.token.clone(), timeout: TIMEOUT, ..Options::default() };
        Client::connect(&self.endpoint, options)
    }

    fn run(&mut self, over: &AtomicBool) {
        while !over.load(Relaxed) {
            let Ok(client) = self.connect() else {
                sleep(Duration::from_millis(50));
                continue;
            };
            while !over.load(Relaxed) {
                let begun = Instant::now();
                let done = self.turn(&client);
                let took = begun.elapsed();
                assert!(took < TIMEOUT + SLACK, "client {}: a call took {took:?}: {done:?}", self.number);
                let Err(error) = done else { continue };
                self.counts.failed.fetch_add(1, Relaxed);
                assert!(error.retryable(), "client {}: {error}", self.number);
                if matches!(error, ClientError::Lost { .. } | ClientError::Closed { .. }) {
                    break;
                }
            }
        }
    }

    fn own(&self, at: usize) -> u32 {
        self.number * KEYS + at as u32
    }

    fn turn(&mut self, client: &Client) -> Result<(), ClientError> {
        match self.chance.below(8) {
            0..3 => self.put(client),
            3 => self.remove(client),
            _ => self.read(client),
        }
    }

    fn put(&mut self, client: &Client) -> Result<(), ClientError> {
        let first = self.chance.below((KEYS - BATCH).into()) as usize;
        let numbers: Vec<u32> = (first..first + BATCH as usize).map(|at| self.own(at)).collect();
        // Whether or not it is answered, they may be there from now on.
        self.removed[first..first + BATCH as usize].fill(false);
        let block = |n: u32| (BlockMeta::single(key(n), BLOCK), &BLOCKS[n as usize][..]);
        let batch: Vec<_> = numbers.iter().map(|&n| block(n)).collect();
        let put = client.put_batch(&batch)?;
        self.counts.put.fetch_add(put.iter().flatten().count() as u64, Relaxed);
        let keys: Vec<BlockKey> = numbers.iter().map(|&n| key(n)).collect();
        // While others are down there are not enough hosts for two copies.
        client.replicate(&keys, 2).map(drop)
    }

    fn remove(&mut self, client: &Client) -> Result<(), ClientError> {
        let at = self.chance.below(KEYS.into()) as usize;
        client.remove(&[key(self.own(at))])?;
        self.removed[at] = true;
        self.counts.removed.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Anybody's blocks: bit-exact or missing.
    fn read(&mut self, client: &Client) -> Result<(), ClientError> {
        let first = self.chance.below((CLIENTS * KEYS - BATCH).into()) as u32;
        let keys: Vec<BlockKey> = (first..first + BATCH).map(key).collect();
        for (n, block) in (first..).zip(client.get(&keys, 0)?) {
            let Some(block) = block else {
                self.counts.missed.fetch_add(1, Relaxed);
                continue;
            };
            assert!(block.bytes()? == BLOCKS[n as usize], "client {}: wrong bytes of block {n}", self.number);
            let is_removed = n / KEYS == self.number && self.removed[(n % KEYS) as usize];
            assert!(!is_removed, "client {}: block {n} is back after it was removed", self.number);
            self.counts.read.fetch_add(1, Relaxed);
        }
        assert_eq!(client.checksum_failures(), 0);
        Ok(())
    }
}

/// What a process has open and runs.
#[derive(Debug)]
struct Size {
    descriptors: usize,
    threads: usize,
    resident_kib: u64,
}

fn size(host: &Host) -> Size {
    let entries = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", host.pid())).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident_kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
    Size { descriptors: entries("fd"), threads: entries("task"), resident_kib }
}

/// Hosts on ports that stay theirs. The first is never killed.
struct Hosts {
    plan: Plan,
    settings: Vec<Vec<String>>,
    running: Vec<Host>,
}

impl Hosts {
    fn start() -> Self {
        let plan = Plan::new(HOSTS);
        let settings = |n: usize| {
            vec![
                POOL.into(),
                format!("listen.data=127.0.0.1:{}", quiet_port()),
                format!("nvme.dir={}", plan.dir.path().join(format!("disk-{n}")).display()),
                "nvme.segment_bytes=1MiB".into(),
                format!("nvme.capacity_bytes={SEGMENTS}MiB"),
                "tiering.min_uses=0".into(),
            ]
        };
        let settings: Vec<_> = (0..HOSTS).map(settings).collect();
        let running = settings.iter().enumerate().map(|(n, set)| plan.start(n, set)).collect();
        Self { plan, settings, running }
    }

    fn writer<'a>(&self, number: u32, counts: &'a Counts) -> Writer<'a> {
        let host = &self.running[number as usize % HOSTS];
        let over_tcp = number as usize >= HOSTS;
        let transport = if over_tcp { Transport::Tcp } else { Transport::Unix };
        let (endpoint, token) = (host.endpoint(transport), host.token());
        let removed = vec![false; KEYS as usize];
        Writer { number, endpoint, token, removed, chance: Chance(number.into()), counts }
    }

    /// Returns how many pauses and kills there were.
    fn blow(&mut self, span: Duration) -> (u32, u32) {
        let (begun, mut chance) = (Instant::now(), Chance(7));
        let (mut pauses, mut kills) = (0, 0);
        while begun.elapsed() < span {
            let n = chance.below(HOSTS as u64) as usize;
            if n > 0 && chance.below(3) == 0 {
                self.running[n].kill();
                sleep(Duration::from_millis(chance.below(1000)));
                self.running[n] = self.plan.start(n, &self.settings[n]);
                kills += 1;
            } else {
                self.running[n].signal(Signal::STOP);
                sleep(Duration::from_millis(chance.below(PAUSE_MS)));
                self.running[n].signal(Signal::CONT);
                pauses += 1;
            }
            sleep(Duration::from_millis(chance.below(1500)));
        }
        (pauses, kills)
    }
}

#[test]
#[ignore = "a storm takes minutes; KVASIR_STORM_SECONDS says how many seconds"]
fn hosts_that_stand_still_and_die_serve_right_bytes_and_recover() {
    let counts = Counts::default();
    let mut hosts = Hosts::start();
    let mut writers: Vec<Writer<'_>> = (0..CLIENTS).map(|n| hosts.writer(n, &counts)).collect();
    let all: Vec<&Host> = hosts.running.iter().collect();
    until("all hosts hear each other", || settled(&all, 0, 2));
    let before = size(&hosts.running[0]);

    let over = AtomicBool::new(false);
    let (pauses, kills) = scope(|scope| {
        for writer in &mut writers {
            let over = &over;
            scope.spawn(move || writer.run(over));
        }
        let blown = hosts.blow(span());
        over.store(true, Relaxed);
        blown
    });
    println!("{pauses} pauses, {kills} kills; blocks, and calls that failed: {counts:?}");
    let moved = [("kvasir_offload_total", "stored"), ("kvasir_tier_lookups_total", "hit")];
    let moved = moved.map(|(name, outcome)| {
        metric(&hosts.running[0], name, &format!("tier=\"nvme\",outcome=\"{outcome}\""))
    });
    println!("blocks down from the pool of the host that was never killed, and up: {moved:?}");
    assert!(moved.iter().all(|&blocks| blocks > 0), "{moved:?}");

    // All that was removed is gone everywhere, once all have heard of it.
    let removed = |writer: &Writer<'_>| {
        let at = (0..KEYS as usize).filter(|&at| writer.removed[at]);
        at.map(|at| key(writer.own(at))).collect::<Vec<_>>()
    };
    let removed: Vec<BlockKey> = writers.iter().flat_map(removed).collect();
    for host in &hosts.running {
        until("what was removed is gone", || {
            let client = host.client(Transport::Unix);
            removed.chunks(64).all(|keys| client.get(keys, 0).unwrap().iter().all(Option::is_none))
        });
    }
    // And everything can be put again, is copied and read from anywhere.
    let keys: Vec<u32> = (0..CLIENTS * KEYS).collect();
    let client = hosts.running[0].client(Transport::Unix);
    for &n in &keys {
        client.put(&BlockMeta::single(key(n), BLOCK), &BLOCKS[n as usize]).unwrap();
        client.replicate(&[key(n)], 2).unwrap().remove(0).unwrap();
    }
    let all: Vec<&Host> = hosts.running.iter().collect();
    until("all blocks have two copies", || settled(&all, keys.len() as u64, 2));
    for host in &all {
        let client = host.client(Transport::Tcp);
        for &n in &keys {
            let block = client.get(&[key(n)], 0).unwrap().remove(0).unwrap_or_else(|| panic!("block {n}"));
            assert!(block.bytes().unwrap() == BLOCKS[n as usize], "block {n}");
        }
    }
    let after = size(&hosts.running[0]);
    println!("the host that was never killed: {before:?}, after the storm {after:?}");
    assert!(after.descriptors < before.descriptors + SEGMENTS + 64, "{after:?}");
    assert!(after.threads < before.threads + 32, "{after:?}");
    assert!(after.resident_kib < before.resident_kib + (256 << 10), "{after:?}");
    for host in hosts.running {
        assert_eq!(host.terminate(), Some(0));
    }
}
