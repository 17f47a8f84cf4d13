//! The engine in a simulated cluster: several hosts, several rails between each two, virtual time, and faults of every
//! kind, all from one seed. One thread does everything, so a seed is one schedule and replays exactly.
//!
//! What runs is the engine itself (planning, submission, completion, retries, deadlines, mending, leases); simulated
//! are the clock, the network ([`net`]) and the users, who check every answer against what they know ([`check`]):
//!
//! * each transfer ends exactly once, at the latest a little after its deadline, and nothing about it changes then;
//! * what it calls valid is what its transports delivered, and holds the bytes of one epoch of the peer;
//! * memory is not touched after it was given back;
//! * budgets and windows hold; when all is over nothing is in flight, queued or kept;
//! * when everything is healed, every peer is reached again over every rail.
//!
//! `KVASIR_SIM_SEEDS=n` runs that many schedules, `KVASIR_SIM_SEED=x` runs one.

mod check;
mod net;
mod pool;

use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use self::check::Expected;
use self::net::{MS, Net, RailState, SimTransport};
use self::pool::PoolUsers;
use super::plan::CLASSES;
use super::{
    Batch, Class, Engine, EngineConfig, Entry, EntryStatus, Peer, PlanConfig, Segment, TransferError,
};
use crate::transport::node::{Node, Secret};
use crate::transport::{Access, Direction, RemoteRange, Transport};
use kvasir_memory::buffer::Buffer;
use kvasir_memory::region::{LocalRange, Region};

/// Leases end in virtual time, several in each schedule.
const LEASE: Duration = Duration::from_secs(3);
/// How often deadlines and rails are looked after.
const TICK: u64 = 10 * MS;
/// Users and faults are at work until this time.
const BUSY: u64 = 3_000 * MS;
/// By then every repaired rail must be known to work: the longest wait between attempts to connect is 5 s.
const HEALED: u64 = BUSY + 8_000 * MS;
const END: u64 = HEALED + 2_000 * MS;
/// Bytes of each host that its users read into and write from.
const LOCAL: u64 = 120 << 10;
/// Bytes of each host that peers read from, and behind them those that peers write to.
const SOURCE: u64 = 32 << 10;
const TARGET: u64 = 64 << 10;

/// SplitMix64 (Steele, Lea and Flood, OOPSLA '14).
#[derive(Clone)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// True with a probability of `chance` in 256.
    fn chance(&mut self, chance: u64) -> bool {
        self.below(256) < chance
    }
}

/// What a host's source memory holds in one epoch: a restart changes every byte.
fn pattern(host: usize, epoch: u64, offset: u64) -> u8 {
    (offset.wrapping_mul(31) ^ (offset >> 8)) as u8
        ^ (host as u8).wrapping_mul(67)
        ^ (epoch as u8).wrapping_mul(151)
}

struct World {
    net: Arc<Net>,
    rng: Rng,
    rails: usize,
    config: EngineConfig,
    hosts: Vec<Host>,
    /// Users' transfers, ended or not.
    expected: Vec<Arc<Expected>>,
}

struct Host {
    engine: Engine,
    local: Region,
    /// From this offset on, no transfer has used bytes of `local` yet.
    fresh: u64,
    /// The memory that it exported in each epoch, from 1, and the offset from which no peer has used it.
    epochs: Vec<(Region, u64)>,
    peers: Vec<Option<Arc<Peer>>>,
    segments: Vec<Option<(Arc<Segment>, u64)>>,
    pool: PoolUsers,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let net = Net::new(Rng(rng.next()));
        let (count, rails) = (rng.within(2..5) as usize, rng.within(1..4) as usize);
        let config = EngineConfig {
            plan: PlanConfig {
                slice_min: 1 << rng.within(10..13),
                slice_max: 16 << 10,
                window_min: 1 << rng.within(12..16),
                rate_guess: rng.within(1_000_000..20_000_000),
                small_max: 300,
                merged_max: 1 << 10,
                ranges_max: rng.within(4..40) as u32,
                ..PlanConfig::default()
            },
            budgets: std::array::from_fn(|_| rng.within((2 << 10)..(64 << 10))),
            retries_max: rng.within(2..20) as u32,
            ..EngineConfig::default()
        };
        for client in 0..count {
            for server in (0..count).filter(|&server| server != client) {
                (0..rails).for_each(|n| net.add_rail(client, server, n, RailState::new(&mut rng)));
            }
        }
        let hosts = (0..count).map(|us| Host::new(us, count, rails, &net, &config)).collect();
        let mut world = Self { net, rng, rails, config, hosts, expected: Vec::new() };
        (0..count).for_each(|host| world.start(host));
        for us in 0..count {
            (0..count).filter(|&peer| peer != us).for_each(|peer| world.connect(us, peer));
        }
        world
    }

    /// Starts a host's serving side in its next epoch.
    fn start(&mut self, host: usize) {
        let epoch = self.hosts[host].epochs.len() as u64 + 1;
        let memory = Region::of_buffer(Buffer::zeroed((SOURCE + TARGET) as usize));
        let bytes: Vec<u8> = (0..SOURCE).map(|offset| pattern(host, epoch, offset)).collect();
        memory.range(0, SOURCE).expect("in range").copy_in(&bytes);
        let node = Arc::new(Node::new(&format!("host{host}"), Secret::new(b"simulated"), epoch));
        let lease = Duration::from_secs(3600);
        let export = {
            let (node, memory) = (node.clone(), memory.clone());
            move || {
                node.exports.export("kv", vec![memory], Access::ReadWrite, lease).expect("it fits");
            }
        };
        // A host is reachable before it has exported what it will.
        let delay = if epoch == 1 { 0 } else { self.rng.below(300 * MS) };
        if delay == 0 {
            export()
        } else {
            self.net.at(self.net.now() + delay, export)
        }
        self.net.set_node(host, Some(node));
        self.hosts[host].epochs.push((memory, SOURCE));
    }

    fn connect(&mut self, us: usize, peer: usize) {
        let addresses: Vec<_> = (0..self.rails).map(|n| (n, peer.to_string())).collect();
        if self.hosts[us].peers[peer].is_none() {
            self.hosts[us].peers[peer] = self.hosts[us].engine.connect(&addresses).ok();
        }
        self.open(us, peer);
    }

    fn open(&mut self, us: usize, peer: usize) {
        let epoch = self.hosts[peer].epochs.len() as u64;
        let host = &mut self.hosts[us];
        let Some(known) = &host.peers[peer] else { return };
        if let Ok(segment) = known.open_segment("kv") {
            host.segments[peer] = Some((segment, epoch));
        }
    }

    /// A user submits something, if there is memory left for it.
    fn submit(&mut self, us: usize, peer: usize, whole: bool) -> Option<Arc<Expected>> {
        let (segment, epoch) = self.hosts[us].segments[peer].clone()?;
        let mut batch = Batch::new(
            [Class::DecodeCritical, Class::Prefill, Class::Replication][self.rng.below(3) as usize],
        );
        batch.deadline = Some(match whole {
            true => Duration::from_secs(1),
            false => Duration::from_nanos(self.rng.within(MS..1500 * MS)),
        });
        let count = 1 + if self.rng.chance(60) { self.rng.below(12) } else { self.rng.below(3) };
        for _ in 0..count {
            let most = if self.rng.chance(128) { 400 } else { 10_000 };
            let len = 1 + self.rng.below(most);
            let Some(entry) = self.entry(us, (peer, epoch), &segment, len) else { break };
            batch.entries.push(entry);
        }
        if batch.entries.is_empty() {
            return None;
        }
        batch.notice = self.rng.chance(60).then(|| b"done".to_vec());
        let expected = Expected::submit(self, us, (peer, epoch), batch);
        self.expected.push(expected.clone());
        Some(expected)
    }

    fn entry(&mut self, us: usize, peer: (usize, u64), segment: &Arc<Segment>, len: u64) -> Option<Entry> {
        let direction = if self.rng.chance(128) { Direction::Read } else { Direction::Write };
        let local = self.hosts[us].take(len)?;
        let offset = match direction {
            Direction::Read => self.rng.below(SOURCE - len),
            Direction::Write => self.hosts[peer.0].take_target(peer.1, len)?,
        };
        let bytes: Vec<u8> = (0..len).map(|n| (n * 7 + offset * 13) as u8 ^ (us as u8) ^ 0xa5).collect();
        local.copy_in(&bytes);
        let local = self
            .pieces(len)
            .into_iter()
            .map(|piece| local.part(piece.start, piece.end - piece.start).expect("in range"))
            .collect();
        let remote = self.pieces(len).into_iter();
        let remote = remote
            .map(|piece| RemoteRange {
                region: 0,
                offset: offset + piece.start,
                len: piece.end - piece.start,
            })
            .collect();
        Some(Entry { direction, segment: segment.clone(), local, remote })
    }

    /// Cuts a length at random places.
    fn pieces(&mut self, len: u64) -> Vec<Range<u64>> {
        let mut cuts: Vec<u64> =
            (0..self.rng.below(4)).map(|_| self.rng.below(len)).chain([0, len]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|ends| ends[0]..ends[1]).collect()
    }

    /// Something goes wrong, or right again.
    fn fault(&mut self) {
        let (host, number) = (self.rng.below(self.hosts.len() as u64) as usize, self.rng.below(3) as usize);
        let kind = self.rng.below(10);
        let mut rng = Rng(self.rng.next());
        match kind {
            0 | 1 if self.net.node(host).is_some() => self.net.set_node(host, None),
            0..=2 => {
                if self.net.node(host).is_none() {
                    self.start(host);
                }
            }
            // Killed and started at once: some rails find out later than others.
            3 => self.start(host),
            _ => self.net.change_rails(|&(client, server, n), rail| {
                if n != number || (client != host && server != host) || !rng.chance(160) {
                    return;
                }
                match kind {
                    4 => rail.up = [rng.chance(128), rng.chance(128)],
                    5 | 6 => rail.heal(),
                    7 => rail.fails = rng.below(120),
                    8 => rail.lost = rng.below(60),
                    _ => rail.rate = rng.within(100_000..200_000_000),
                }
            }),
        }
    }

    fn heal(&mut self) {
        self.net.change_rails(|_, rail| {
            rail.heal();
            rail.rate = rail.rate.max(2_000_000);
        });
        for host in 0..self.hosts.len() {
            if self.net.node(host).is_none() {
                self.start(host);
            }
        }
    }

    fn tick_until(&mut self, end: u64) {
        while self.net.now() < end {
            // Once nothing new happens, an occasional look is enough.
            let tick = if self.net.now() < BUSY + 1_500 * MS { TICK } else { 10 * TICK };
            self.net.run_until((self.net.now() + tick).min(end));
            for us in 0..self.hosts.len() {
                self.hosts[us].engine.tick();
                self.hosts[us].pool.tick();
                self.check_bounds(us);
            }
        }
    }

    /// One step of users and faults.
    fn step(&mut self) {
        let pause = self.rng.below(40 * MS);
        self.tick_until(self.net.now() + pause);
        let count = self.hosts.len() as u64;
        let us = self.rng.below(count) as usize;
        let peer = ((us as u64 + 1 + self.rng.below(count - 1)) % count) as usize;
        match self.rng.below(32) {
            0..=21 => {
                // Not every user knows that the peer has restarted.
                if self.rng.chance(128) {
                    self.open(us, peer);
                }
                self.submit(us, peer, false);
            }
            22..=24 => self.connect(us, peer),
            25 | 26 => {
                let time = self.rng.below(500 * MS);
                self.hosts[us].pool.take(peer, time);
            }
            27 | 28 => {
                let transfers = self.expected.len() as u64;
                if let Some(expected) = self.expected.get(self.rng.below(transfers) as usize) {
                    expected.cancel(self);
                }
            }
            _ => self.fault(),
        }
    }

    /// Runs a whole schedule and returns how the users' entries ended.
    fn run(mut self) -> Vec<EntryStatus> {
        while self.net.now() < BUSY {
            self.step();
        }
        self.heal();
        self.tick_until(HEALED);
        let expected = std::mem::take(&mut self.expected);
        let ends = expected.into_iter().flat_map(|expected| expected.check_end(&self)).collect();
        self.check_healed();
        self.check_nothing_left();
        ends
    }

    /// Every peer is reached again, over every rail.
    fn check_healed(&mut self) {
        let count = self.hosts.len();
        for (us, peer) in (0..count).flat_map(|us| (0..count).map(move |peer| (us, peer))) {
            if us == peer {
                continue;
            }
            self.hosts[us].pool.check_reaches(peer);
            self.connect(us, peer);
            let known = self.hosts[us].peers[peer].as_ref().expect("it was connected when all was well");
            let rails = known.rails();
            assert!(
                rails.iter().all(|rail| rail.usable),
                "host {us} does not use all rails to {peer}: {rails:?}"
            );
            let fresh = self.hosts[us].fresh;
            self.hosts[us].fresh = fresh.min(LOCAL / 2);
            if let Some(expected) = self.submit(us, peer, true) {
                self.tick_until(self.net.now() + 1_000 * MS);
                expected.check_success(self);
            }
        }
        self.tick_until(self.net.now() + END - HEALED);
    }
}

impl Host {
    fn new(us: usize, count: usize, rails: usize, net: &Arc<Net>, config: &EngineConfig) -> Self {
        let local = Region::of_buffer(Buffer::zeroed(LOCAL as usize));
        net.add_host(local.clone());
        let transports: Vec<_> = (0..rails)
            .map(|number| Arc::new(SimTransport { net: net.clone(), us, number }) as Arc<dyn Transport>)
            .collect();
        let pool = PoolUsers::new(net, transports[0].clone(), (count - 1).min(2));
        let clock = net.clone();
        let engine = Engine::without_threads(config.clone(), transports, Arc::new(move || clock.instant()));
        let peers = vec![None; count];
        Self { engine, local, fresh: 0, epochs: Vec::new(), segments: vec![None; count], pool, peers }
    }

    fn take(&mut self, len: u64) -> Option<LocalRange> {
        let range = self.local.range(self.fresh, len)?;
        self.fresh += len;
        Some(range)
    }

    fn take_target(&mut self, epoch: u64, len: u64) -> Option<u64> {
        let (memory, fresh) = &mut self.epochs[epoch as usize - 1];
        let offset = *fresh;
        memory.range(offset, len)?;
        *fresh += len;
        Some(offset)
    }
}

/// How the users' transfers ended, over all schedules.
#[derive(Debug, Default)]
struct Tally {
    complete: u64,
    timed_out: u64,
    peer_down: u64,
    cancelled: u64,
    other: u64,
    /// Failed, with some bytes valid.
    partly: u64,
}

fn run(seed: u64, tally: &mut Tally) {
    let result = std::panic::catch_unwind(|| World::new(seed).run());
    match result {
        Ok(ends) => ends.iter().for_each(|end| tally.add(end)),
        Err(panic) => {
            eprintln!("the schedule of seed {seed} failed; KVASIR_SIM_SEED={seed} replays it");
            std::panic::resume_unwind(panic);
        }
    }
}

impl Tally {
    fn add(&mut self, end: &EntryStatus) {
        self.partly += u64::from(end.error.is_some() && !end.valid.is_empty());
        *match &end.error {
            None => &mut self.complete,
            Some(TransferError::TimedOut) => &mut self.timed_out,
            Some(TransferError::PeerDown { .. }) => &mut self.peer_down,
            Some(TransferError::Cancelled) => &mut self.cancelled,
            Some(TransferError::Op { .. }) => &mut self.other,
        } += 1;
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn schedules_from_seeds() {
    let mut tally = Tally::default();
    if let Some(seed) = number("KVASIR_SIM_SEED") {
        return run(seed, &mut tally);
    }
    let seeds = number("KVASIR_SIM_SEEDS").unwrap_or(2_000);
    (0..seeds).for_each(|seed| run(seed, &mut tally));
    eprintln!("{seeds} schedules: {tally:?}");
    // Otherwise the schedules show nothing.
    let Tally { complete, timed_out, peer_down, cancelled, other, partly } = tally;
    assert!(complete > timed_out && [timed_out, peer_down, cancelled, other, partly].iter().all(|&n| n > 0));
}
