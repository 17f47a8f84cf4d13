//! `kill -9` at random points of a mixed load on the NVMe tier.
//!
//! The test starts itself as a child that puts and removes blocks and says on its standard output what it is about to do
//! and what is done. After some of these lines the parent kills it, opens the same store and compares: what was done
//! is there, bit-exact; what was removed is not; what was under way is either. `KVASIR_CRASH_ROUNDS` sets the kills.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvasir_memory::buffer::Buffer;
use kvasir_nvme::{NvmeConfig, NvmeStore, SyncMode};
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};
use kvasir_store::store::{BlockStore, Get, Put, TierError};

const DIR: &str = "KVASIR_CRASH_DIR";
const SEED: &str = "KVASIR_CRASH_SEED";
const BLOCKS: u64 = 300;

fn config(dir: &Path, seed: u64) -> NvmeConfig {
    NvmeConfig {
        capacity_bytes: 4 << 20,
        segment_bytes: 256 << 10,
        // Every fourth child does without io_uring, every third syncs each group.
        io_uring: !seed.is_multiple_of(4),
        sync: if seed.is_multiple_of(3) { SyncMode::Batch } else { SyncMode::Flush },
        ..NvmeConfig::new(dir)
    }
}

fn key(n: u64) -> BlockKey {
    BlockKey::from_engine_hash("crash", &n.to_le_bytes())
}

fn content(n: u64) -> Vec<u8> {
    let len = 1 + mix(n) % 14_000;
    (0..len).map(|at| (mix(n ^ at >> 3) >> (at % 8 * 8)) as u8).collect()
}

fn mix(n: u64) -> u64 {
    let n = (n ^ n >> 31).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n ^ n >> 29
}

fn put_of(n: u64) -> Put {
    let bytes = content(n);
    let meta = BlockMeta::single(key(n), bytes.len() as u32);
    Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() }
}

/// Not a test by itself: what the children run.
#[test]
fn child() {
    let (Ok(dir), Ok(seed)) = (std::env::var(DIR), std::env::var(SEED)) else { return };
    let mut seed: u64 = seed.parse().unwrap();
    let store = NvmeStore::open(config(Path::new(&dir), seed)).unwrap();
    let mut random = |below: u64| {
        seed = mix(seed);
        seed % below
    };
    // Runs until it is killed; if the parent is gone, writing to it fails and ends this.
    loop {
        // The two batches never name the same block, so each outcome is clear.
        let half = random(2);
        let pick = |random: &mut dyn FnMut(u64) -> u64, half: u64| {
            let mut ns: Vec<u64> = (0..1 + random(12)).map(|_| random(BLOCKS / 2) * 2 + half).collect();
            ns.sort_unstable();
            ns.dedup();
            ns
        };
        let (put, remove) = (pick(&mut random, half), pick(&mut random, 1 - half));
        put.iter().chain(&remove).for_each(|n| println!("begin {n}"));
        let puts = store.put(put.iter().map(|&n| put_of(n)).collect());
        let removes = store.remove(remove.iter().map(|&n| key(n)).collect());
        for (n, done) in put.iter().zip(puts.wait()) {
            match done.outcome {
                Ok(_) => println!("held {n}"),
                Err(TierError::Full { .. }) => println!("gone {n}"),
                Err(error) => panic!("put of block {n}: {error}"),
            }
        }
        for (n, done) in remove.iter().zip(removes.wait()) {
            done.unwrap();
            println!("gone {n}");
        }
        if random(8) == 0 {
            store.flush().wait().unwrap();
        }
    }
}

/// What the parent knows about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Held,
    Gone,
    Either,
}

#[test]
fn a_killed_store_comes_back_with_all_that_was_done() {
    let rounds =
        std::env::var("KVASIR_CRASH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(60);
    let dir = tempfile::tempdir().unwrap();
    let mut known = vec![Known::Gone; BLOCKS as usize];
    let (mut corrupt, mut held) = (0, 0);
    for round in 0..rounds {
        let mut child = spawn(dir.path(), round + 1);
        let acknowledged = mix(round) % (if round % 5 == 0 { 20 } else { 1500 });
        listen(&mut child, acknowledged, &mut known);
        // Whatever it was opened with before: a store is the same for every way to reach it.
        let store = NvmeStore::open(config(dir.path(), round / 7)).unwrap();
        corrupt += store.report().corrupt;
        held = verify(&store, &mut known, round);
        let stats = store.stats();
        assert!(stats.blocks == held && stats.used_bytes <= 4 << 20, "round {round}: {stats:?}");
    }
    println!("{rounds} kills; {held} blocks held at the end; {corrupt} torn records met");
    nothing_is_leaked(dir.path());
}

fn spawn(dir: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Reads what the child reports, kills it after some acknowledgements, and reads what it still had to say.
fn listen(child: &mut Child, acknowledged: u64, known: &mut [Known]) {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let (mut line, mut seen, mut killed) = (String::new(), 0, false);
    loop {
        if seen >= acknowledged && !killed {
            child.kill().unwrap();
            killed = true;
        }
        line.clear();
        // A line without its end was cut off by the kill; then nothing follows.
        if output.read_line(&mut line).unwrap() == 0 || !line.ends_with('\n') {
            break;
        }
        let mut words = line.split_whitespace();
        let what = match words.next() {
            Some("begin") => Known::Either,
            Some("held") => Known::Held,
            Some("gone") => Known::Gone,
            _ => continue,
        };
        let n: usize = words.next().unwrap().parse().unwrap();
        known[n] = what;
        seen += u64::from(what != Known::Either);
    }
    let status = child.wait().unwrap();
    assert!(killed && status.code().is_none(), "the child ended by itself: {status}");
}

/// Compares store and knowledge; returns how many blocks are held.
fn verify(store: &NvmeStore, known: &mut [Known], round: u64) -> u64 {
    let gets = (0..BLOCKS).map(|n| Get { key: key(n), buffer: Buffer::zeroed(14_000) }).collect();
    let mut held = 0;
    for ((n, known), done) in (0u64..).zip(known).zip(store.get(gets).wait()) {
        let found = done.outcome.unwrap();
        if let Some(loaded) = found {
            let expected = content(n);
            assert_eq!(loaded.meta, BlockMeta::single(key(n), expected.len() as u32));
            assert!(
                done.buffer.bytes()[..expected.len()] == expected,
                "round {round}: block {n} has other bytes"
            );
            held += 1;
        }
        let now = if found.is_some() { Known::Held } else { Known::Gone };
        assert!(
            *known == Known::Either || *known == now,
            "round {round}: block {n} was {known:?}, is {now:?}"
        );
        *known = now;
    }
    held
}

/// With every block removed, all but the two open segments become free again.
fn nothing_is_leaked(dir: &Path) {
    let store = NvmeStore::open(config(dir, 1)).unwrap();
    for outcome in store.remove((0..BLOCKS).map(key).collect()).wait() {
        outcome.unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(120);
    while store.stats().used_bytes > 3 * (256 << 10) {
        assert!(Instant::now() < deadline, "space is not given back: {:?}", store.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(store);
    let store = NvmeStore::open(config(dir, 1)).unwrap();
    assert_eq!((store.stats().blocks, store.report().corrupt), (0, 0));
}
