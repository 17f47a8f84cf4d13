//! Transfers of mixed sizes and classes between two processes, of which one is killed and restarted again and again.
//!
//! No byte is ever wrong, every transfer ends, and the survivor's memory and descriptors stay what they were. Short by
//! default; `KVASIR_SOAK_SECONDS=3600` soaks for an hour and kills once a minute. `KVASIR_SOAK_PAUSE_MS` (default 0) is
//! slept between rounds, to leave the machine to others.

#[path = "soak/peer.rs"]
mod peer;
#[path = "soak/usage.rs"]
mod usage;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_memory::buffer::Buffer;
use kvasir_memory::region::Region;
use kvasir_net::transfer::{
    Batch, Class, Engine, EngineConfig, Entry, EntryStatus, Peer, Segment, Transfer, TransferError,
};
use kvasir_net::transport::node::{Node, Secret};
use kvasir_net::transport::tcp::{Tcp, TcpConfig};
use kvasir_net::transport::{Direction, RemoteRange, Transport};
use peer::{PeerProcess, READABLE, WRITABLE, content};
use usage::Usage;

/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(120);
const DEADLINE: Duration = Duration::from_secs(3);
/// Transfers at once.
const DEPTH: usize = 8;
/// The most bytes of one transfer.
const SHARE: u64 = WRITABLE / DEPTH as u64;

/// Not a test by itself: what the peer's process runs.
#[test]
fn serve() {
    peer::serve_if_asked();
}

#[test]
fn nothing_is_corrupted_and_nothing_leaks() {
    let time = Duration::from_secs(number("KVASIR_SOAK_SECONDS").unwrap_or(10));
    let pause = Duration::from_millis(number("KVASIR_SOAK_PAUSE_MS").unwrap_or(0));
    let life = Duration::from_secs(if time.as_secs() >= 600 { 60 } else { 2 });
    let mut soak = Soak::new();
    let (start, mut usage) = (Instant::now(), Vec::new());
    let mut kills = 0;
    while start.elapsed() < time {
        let born = Instant::now();
        while born.elapsed() < life {
            soak.round();
            std::thread::sleep(pause);
        }
        // Between two lives everything is at rest, so that the counts can be compared.
        usage.push(Usage::now());
        kills += 1;
        soak.kill_amid_a_round();
    }
    soak.round();
    eprintln!("{kills} kills in {:?}, {}", start.elapsed(), soak.summary());
    usage::check_flat(&usage);
    assert!(soak.complete > 0 && soak.failed > 0, "{}", soak.summary());
}

struct Soak {
    peer_process: PeerProcess,
    engine: Engine,
    peer: Arc<Peer>,
    segment: Arc<Segment>,
    ours: Region,
    random: u64,
    complete: u64,
    failed: u64,
    timed_out: u64,
    bytes: u64,
}

/// One transfer of a round.
struct Moving {
    direction: Direction,
    /// Where its entries are, in our memory and in the part of the peer's that they are about.
    ranges: Vec<(u64, u64, u64)>,
    seed: u64,
    transfer: Transfer,
}

impl Soak {
    fn new() -> Self {
        let peer_process = PeerProcess::start();
        let node = Arc::new(Node::new("survivor", Secret::new(b"soak"), 1));
        let rail = |_| Arc::new(Tcp::new(node.clone(), TcpConfig::default()).unwrap()) as Arc<dyn Transport>;
        let engine = Engine::new(EngineConfig::default(), (0..2).map(rail).collect()).unwrap();
        let addresses: Vec<_> = peer_process.addresses.iter().cloned().enumerate().collect();
        let peer = engine.connect(&addresses).unwrap();
        let segment = peer.open_segment("kv").unwrap();
        let ours = Region::of_buffer(Buffer::zeroed((READABLE + WRITABLE) as usize));
        let (random, complete, failed, timed_out, bytes) = (1, 0, 0, 0, 0);
        Self { peer_process, engine, peer, segment, ours, random, complete, failed, timed_out, bytes }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end.max(1)
    }

    /// Transfers in both directions, all at once; then all of it is compared.
    fn round(&mut self) {
        self.open();
        let moving: Vec<Moving> = (0..DEPTH as u64).map(|place| self.start(place)).collect();
        moving.iter().for_each(|moving| self.finish(moving));
    }

    /// Like a round, except that the peer stands still in the middle of it, and dies. What begins in between never ends well,
    /// however fast either side is.
    fn kill_amid_a_round(&mut self) {
        self.open();
        let (middle, end) = (DEPTH as u64 / 2, DEPTH as u64);
        let mut moving: Vec<Moving> = (0..middle).map(|place| self.start(place)).collect();
        self.peer_process.stop();
        moving.extend((middle..end).map(|place| self.start(place)));
        self.peer_process.kill();
        moving.iter().for_each(|moving| self.finish(moving));
        self.peer_process.restart();
    }

    /// Opens the segment of the peer's present life, as soon as that can be reached over every rail.
    fn open(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let usable = self.peer.rails().iter().all(|rail| rail.usable);
            if let Some(segment) = self.peer.open_segment("kv").ok().filter(|_| usable)
                && segment.description().is_some_and(|grant| grant.epoch == self.peer_process.epoch)
            {
                self.segment = segment;
                return;
            }
            assert!(Instant::now() < deadline, "the peer is never reached again: {:?}", self.peer.rails());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn start(&mut self, place: u64) -> Moving {
        let direction = if self.below(2) == 0 { Direction::Read } else { Direction::Write };
        let (seed, base) = (self.below(1 << 30), place * SHARE);
        let (mut ranges, mut at) = (Vec::new(), 0);
        let most = [600, 20_000, SHARE][self.below(3) as usize];
        while at < SHARE && ranges.len() < 40 {
            let len = (1 + self.below(most)).min(SHARE - at);
            let theirs = match direction {
                Direction::Read => self.below(READABLE - len),
                Direction::Write => READABLE + base + at,
            };
            ranges.push((base + at, theirs, len));
            at += len;
        }
        if direction == Direction::Write {
            let bytes = content(seed, 0, SHARE);
            self.ours.range(base, SHARE).unwrap().copy_in(&bytes);
        }
        let entries = ranges.iter().map(|&range| self.entry(direction, range)).collect();
        let class = [Class::DecodeCritical, Class::Prefill, Class::Replication][self.below(3) as usize];
        let batch = Batch { entries, deadline: Some(DEADLINE), ..Batch::new(class) };
        Moving { direction, ranges, seed, transfer: self.engine.submit(batch).unwrap() }
    }

    fn entry(&self, direction: Direction, (ours, theirs, len): (u64, u64, u64)) -> Entry {
        let local = vec![self.ours.range(ours, len).unwrap()];
        let remote = vec![RemoteRange { region: 0, offset: theirs, len }];
        Entry { direction, segment: self.segment.clone(), local, remote }
    }

    /// Waits for its end, and compares what it calls valid with what must be there.
    fn finish(&mut self, moving: &Moving) {
        let status = moving.transfer.wait(Instant::now() + PATIENCE);
        assert!(status.is_complete(), "it never ended: {status:?}");
        self.bytes += status.valid_bytes;
        for (n, &(ours, theirs, len)) in moving.ranges.iter().enumerate() {
            let end = moving.transfer.poll_entry(n).unwrap();
            assert_eq!(end.error.is_none(), end.valid.first() == Some(&(0..len)), "{end:?}");
            match &end.error {
                None => self.complete += 1,
                Some(TransferError::TimedOut) => self.timed_out += 1,
                Some(_) => self.failed += 1,
            }
            match moving.direction {
                Direction::Read => self.compare(&end, ours, |at, len| {
                    content(self.segment.description().unwrap().epoch, theirs + at, len)
                }),
                Direction::Write => self.read_back(&end, theirs, |at, len| {
                    content(moving.seed, theirs - READABLE - ours / SHARE * SHARE + at, len)
                }),
            }
        }
    }

    fn compare(&self, end: &EntryStatus, ours: u64, expected: impl Fn(u64, u64) -> Vec<u8>) {
        for range in &end.valid {
            let len = range.end - range.start;
            let mut bytes = vec![0; len as usize];
            self.ours.range(ours + range.start, len).unwrap().copy_out(&mut bytes);
            assert!(bytes == expected(range.start, len), "other bytes in {range:?} of {end:?}");
        }
    }

    /// What was written is at the peer, if it lives to be asked.
    fn read_back(&self, end: &EntryStatus, theirs: u64, expected: impl Fn(u64, u64) -> Vec<u8>) {
        for range in &end.valid {
            let len = range.end - range.start;
            let entry = self.entry(Direction::Read, (WRITABLE, theirs + range.start, len));
            let batch =
                Batch { entries: vec![entry], deadline: Some(DEADLINE), ..Batch::new(Class::Prefill) };
            let transfer = self.engine.submit(batch).unwrap();
            let status = transfer.wait(Instant::now() + PATIENCE);
            assert!(status.is_complete(), "it never ended: {status:?}");
            let read = transfer.poll_entry(0).unwrap();
            self.compare(&read, WRITABLE, |at, len| expected(range.start + at, len));
        }
    }

    fn summary(&self) -> String {
        let Self { complete, failed, timed_out, bytes, .. } = self;
        format!("{complete} entries complete, {failed} failed, {timed_out} timed out, {bytes} B valid")
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}
