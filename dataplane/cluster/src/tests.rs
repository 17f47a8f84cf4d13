//! Whole hosts in this process: pools, tiers, data plane between them over loopback.

mod gate;
mod handover;
mod lies;
mod removal;

use parking_lot::Mutex;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

use super::message::Copied;
use super::table::Duty;
use super::*;
use kvasir_net::transport::tcp::authority::Authority;
use kvasir_store::config::DramConfig;
use kvasir_store::dram::{DramStore, Evict, Lookup, Remove, Reserve, Verify};
use kvasir_store::tiering::{AdmitAll, Tiering, TieringConfig};

const BLOCK: u32 = 64 << 10;
/// Where the contents of other versions begin.
const OTHER: u32 = 1000;

/// Ports of one test: below those that the system gives to a caller that asks for any, so none is taken by chance.
fn ports(count: usize) -> Vec<SocketAddr> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 8_000 + (std::process::id() % 500) as u16 * 12;
    let next = || SocketAddr::from(([127, 0, 0, 1], first + NEXT.fetch_add(1, Ordering::Relaxed) % 400));
    std::iter::repeat_with(next).filter(|addr| TcpListener::bind(addr).is_ok()).take(count).collect()
}

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("cluster", &n.to_le_bytes())
}

fn content(n: u32) -> Vec<u8> {
    let word = |i: u32| (u64::from(i) ^ (u64::from(n) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..BLOCK / 8).flat_map(|i| word(i).to_le_bytes()).collect()
}

pub(super) struct Host {
    pub(super) store: Arc<DramStore>,
    tiering: Arc<Tiering>,
    pub(super) cluster: Arc<Cluster>,
    clock: Clock,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Host {
    fn start(n: usize, ports: &[SocketAddr], change: impl FnOnce(&mut ClusterConfig)) -> Self {
        Self::start_with(n, ports, DramConfig::default(), change)
    }

    fn start_with(
        n: usize,
        ports: &[SocketAddr],
        dram: DramConfig,
        change: impl FnOnce(&mut ClusterConfig),
    ) -> Self {
        let dram = DramConfig { pool_bytes: 32 << 20, blocks_max: 4096, ..dram };
        Self::join(Self::settings(n, ports, change), Arc::new(DramStore::open(dram).unwrap()), Clock::start())
    }

    fn settings(n: usize, ports: &[SocketAddr], change: impl FnOnce(&mut ClusterConfig)) -> ClusterConfig {
        let name = |n: usize| format!("host-{n}");
        let mut config = ClusterConfig::new(&name(n), Secret::new(b"the secret of this cluster"));
        let peer = |(n, addr): (usize, &SocketAddr)| PeerConfig {
            name: name(n),
            address: addr.to_string(),
            rack: format!("rack-{}", n % 2),
        };
        let mut all: Vec<PeerConfig> = ports.iter().enumerate().map(peer).collect();
        config.rack = all.remove(n).rack;
        (config.peers, config.listen) = (all, ports[n]);
        (config.audit_every, config.read_timeout) = (Duration::from_millis(200), Duration::from_secs(60));
        config.repair_after = Duration::ZERO;
        change(&mut config);
        config
    }

    /// A host with the blocks that are in this store.
    fn join(config: ClusterConfig, store: Arc<DramStore>, clock: Clock) -> Self {
        Self::join_above(config, store, clock, Vec::new())
    }

    /// The same, with further tiers between its pool and its peers.
    fn join_above(
        config: ClusterConfig,
        store: Arc<DramStore>,
        clock: Clock,
        mut below: Vec<Arc<dyn BlockStore>>,
    ) -> Self {
        let events = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&events);
        let tell = Box::new(move |event| told.lock().push(event));
        let cluster = Cluster::open(config, Arc::clone(&store), clock, tell).unwrap();
        let traffic = TieringConfig { load_timeout: Duration::from_secs(60), ..TieringConfig::default() };
        below.push(cluster.tier());
        let tiering = Tiering::start(Arc::clone(&store), below, Box::new(AdmitAll), traffic, clock);
        let tiering = Arc::new(tiering.unwrap());
        cluster.run(&tiering).unwrap();
        Self { store, tiering, cluster, clock, events }
    }

    /// Another run of a host that still has its blocks, and reports them as before.
    fn run_again(self) -> Self {
        let (config, store) = (self.cluster.config().clone(), Arc::clone(&self.store));
        let own = self.cluster.shared.table().own().0;
        let clock = self.clock;
        drop(self);
        let again = Self::join(config, store, clock);
        for fact in own {
            again.cluster.shared.table().hear(0, fact);
        }
        again
    }

    fn put(&self, n: u32) {
        let owner = self.store.new_owner();
        self.store.put(owner, &BlockMeta::single(key(n), BLOCK), &content(n), self.clock.now_ms()).unwrap();
    }

    /// The same block, computed with another result.
    fn put_other(&self, n: u32) {
        let (owner, bytes) = (self.store.new_owner(), content(OTHER + n));
        self.store.put(owner, &BlockMeta::single(key(n), BLOCK), &bytes, self.clock.now_ms()).unwrap();
    }

    fn put_copies(&self, numbers: std::ops::Range<u32>, copies: u8) {
        for n in numbers.clone() {
            self.put(n);
        }
        let keys: Vec<_> = numbers.map(key).collect();
        assert!(self.cluster.replicate(&keys, copies).iter().all(|outcome| *outcome == Outcome::Done));
    }

    /// Says that it holds a block, and that no more copies are wanted.
    fn claim(&self, n: u32) {
        let shared = &self.cluster.shared;
        let (primary, generation) = (NodeId::of(&shared.config.name), shared.copies.generations.next());
        shared.table().holds(0, key(n), Holding { size: BLOCK, target: 1, primary, generation });
        shared.copies.changed();
    }

    /// Whether the block comes back, bit-exact.
    fn reads(&self, n: u32) -> bool {
        let owner = self.store.new_owner();
        let found = self.tiering.get(owner, &[key(n)], 0, self.clock.now_ms()).unwrap()[0];
        let Lookup::Hit(lease) = found else { return false };
        assert!(self.store.pool().mapping().bytes(lease.offset, lease.size.into()).unwrap() == content(n));
        self.store.release_owner(owner, self.clock.now_ms());
        true
    }

    fn is_resident(&self, n: u32) -> bool {
        self.store.exists(&[key(n)]).unwrap()[0]
    }

    fn up(&self) -> usize {
        self.cluster.peers().iter().filter(|peer| peer.state == LinkState::Up).count()
    }

    fn saw(&self, wanted: impl Fn(&Event) -> bool) -> bool {
        self.events.lock().iter().any(wanted)
    }

    fn damage(&self, n: u32) {
        let held = self.store.hold(key(n), 0, self.clock.now_ms()).unwrap();
        let mapping = self.store.pool().mapping();
        let at = held.bytes().as_ptr() as u64 - mapping.bytes(0, 1).unwrap().as_ptr() as u64;
        drop(held);
        assert!(mapping.write(at + 50, &[!mapping.bytes(at + 50, 1).unwrap().to_vec()[0]]));
    }
}

/// Two hosts that know each other.
pub(super) fn pair_of_hosts() -> (Host, Host) {
    let (mut hosts, _) = start_all(2);
    let to = hosts.remove(1);
    (hosts.remove(0), to)
}

/// A host whose only peer never comes.
pub(super) fn host_alone() -> Host {
    Host::start(0, &ports(2), |_| {})
}

pub(super) fn host_alone_that_misses_nothing() -> Host {
    Host::start(0, &ports(2), |config| config.repair_after = Duration::from_secs(3600))
}

fn start_all(count: usize) -> (Vec<Host>, Vec<SocketAddr>) {
    let ports = ports(count);
    let hosts: Vec<Host> = (0..count).map(|n| Host::start(n, &ports, |_| {})).collect();
    until("all are up", || hosts.iter().all(|host| host.up() == count - 1));
    (hosts, ports)
}

fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..6000 {
        if condition() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("two minutes passed without: {what}");
}

/// Every table knows exactly `holders` holders of each block, and no host has anything to do.
fn settled(hosts: &[&Host], numbers: std::ops::Range<u32>, holders: usize) -> bool {
    let idle = |host: &&Host| host.cluster.shared.table().next_duties(1).is_empty();
    agreed(hosts, numbers, holders) && hosts.iter().all(idle)
}

/// Every table knows exactly `holders` holders of each block.
fn agreed(hosts: &[&Host], numbers: std::ops::Range<u32>, holders: usize) -> bool {
    let knows = |host: &&Host| {
        let table = host.cluster.shared.table();
        numbers.clone().all(|n| table.holders(key(n)).len() == holders)
    };
    hosts.iter().all(knows)
}

#[test]
fn copies_are_made_and_read_from_where_they_are() {
    let (hosts, _) = start_all(2);
    hosts[0].put_copies(0..20, 2);
    let both = [&hosts[0], &hosts[1]];
    until("copies", || settled(&both, 0..20, 2));
    assert!((0..20).all(|n| hosts[1].is_resident(n)));
    // The other host reports the copies before its answer to the call arrives.
    until("all answered", || hosts[0].cluster.stats().copied == 20);
    let (from, to) = (hosts[0].cluster.stats(), hosts[1].cluster.stats());
    assert_eq!(from.copied_bytes, 20 * u64::from(BLOCK));
    assert_eq!((to.taken, to.own, to.blocks, to.corrupt), (20, 20, 20, 0));

    // What this host has lost since is read from the other one, and is in the pool again.
    hosts[0].store.remove(&[key(3)], hosts[0].clock.now_ms()).unwrap();
    assert!(!hosts[0].is_resident(3) && hosts[0].reads(3) && hosts[0].is_resident(3));
    assert_eq!(hosts[0].cluster.stats().read_hits, 1);
    assert!(!hosts[0].reads(999), "nobody has it");
}

#[test]
fn two_versions_of_a_block_are_two_copies() {
    let (hosts, _) = start_all(2);
    hosts[0].put(1);
    hosts[1].put_other(1);
    for host in &hosts {
        assert_eq!(host.cluster.replicate(&[key(1)], 2), [Outcome::Done]);
    }
    until("both count", || settled(&[&hosts[0], &hosts[1]], 1..2, 2));
    // A reader gets the version of whomever it asks, compared with the checksum of that one.
    hosts[0].store.remove(&[key(1)], hosts[0].clock.now_ms()).unwrap();
    let owner = hosts[0].store.new_owner();
    let found = hosts[0].tiering.get(owner, &[key(1)], 0, hosts[0].clock.now_ms()).unwrap()[0];
    let Lookup::Hit(lease) = found else { panic!("{found:?}") };
    assert_eq!(lease.checksum, kvasir_protocol::block::checksum(&content(OTHER + 1)));
    assert_eq!(hosts[0].cluster.stats().corrupt, 0);
}

/// As when a disk has another version than its pool had.
#[test]
fn what_a_holder_lends_counts_whichever_version_it_had_before() {
    let (hosts, _) = start_all(2);
    hosts[0].put_copies(1..2, 2);
    until("a copy", || settled(&[&hosts[0], &hosts[1]], 1..2, 2));
    let now_ms = || hosts[1].clock.now_ms();
    hosts[1].store.remove(&[key(1)], now_ms()).unwrap();
    hosts[1].put_other(1);
    hosts[0].store.remove(&[key(1)], hosts[0].clock.now_ms()).unwrap();
    let owner = hosts[0].store.new_owner();
    let found = hosts[0].tiering.get(owner, &[key(1)], 0, hosts[0].clock.now_ms()).unwrap()[0];
    let Lookup::Hit(lease) = found else { panic!("{found:?}") };
    assert_eq!(lease.checksum, kvasir_protocol::block::checksum(&content(OTHER + 1)));
}

#[test]
fn a_lost_host_is_made_up_for_and_nothing_is_doubled_when_it_returns() {
    let (mut hosts, ports) = start_all(3);
    hosts[0].put_copies(0..40, 2);
    until("copies", || settled(&hosts.iter().collect::<Vec<_>>(), 0..40, 2));
    // Half of the blocks' primary goes, then comes back empty.
    drop(hosts.remove(0));
    let survivors = [&hosts[0], &hosts[1]];
    until("the target again", || {
        survivors.iter().all(|host| host.up() == 1) && settled(&survivors, 0..40, 2)
    });
    for host in survivors {
        assert!((0..40).all(|n| host.reads(n)));
    }
    hosts.insert(0, Host::start(0, &ports, |_| {}));
    until("all up", || hosts.iter().all(|host| host.up() == 2));
    until("no copy too many", || settled(&hosts.iter().collect::<Vec<_>>(), 0..40, 2));
    assert!((0..40).all(|n| hosts[0].reads(n)), "also by the one that has none of them");
}

#[test]
fn a_host_that_is_away_for_a_while_costs_no_copy() {
    let ports = ports(3);
    // One is cut off from both others, and they from it.
    let gates = [0, 1, 2].map(|n| gate::Gate::to(ports[n]));
    let start = |n: usize, others: &[usize]| {
        Host::start(n, &ports, |config| {
            config.repair_after = Duration::from_secs(3600);
            others.iter().for_each(|&other| gate::through(config, other, &gates[other]));
        })
    };
    let [zero, one, two] = [start(0, &[1]), start(1, &[0, 2]), start(2, &[1])];
    let all = [&zero, &one, &two];
    until("all are up", || all.iter().all(|host| host.up() == 2));
    zero.put_copies(0..20, 2);
    until("copies", || settled(&all, 0..20, 2) && zero.cluster.stats().copied == 20);
    assert!(one.is_resident(0), "it is in the other rack");
    gates.iter().for_each(gate::Gate::close);
    until("its loss is known", || zero.up() == 1 && one.up() == 0 && two.up() == 1);
    // On a machine that stands still the other holder may be gone for a moment, too.
    until("all are read from the other holder", || (0..20).all(|n| two.reads(n)));
    gates.iter().for_each(gate::Gate::open);
    until("all as before", || all.iter().all(|host| host.up() == 2) && settled(&all, 0..20, 2));
    assert_eq!(all.map(|host| host.cluster.stats().copied), [20, 0, 0]);
}

/// The claim of who lends a block may come later than the block: it is known to have it all the same.
#[test]
fn a_copy_that_was_taken_is_not_made_again_at_its_lender() {
    let (hosts, _) = start_all(2);
    let [lender, taker] = [&hosts[0].cluster.shared, &hosts[1].cluster.shared];
    hosts[0].put(1);
    let loan = lender.lend(lender.owner, &[key(1)]).remove(0).unwrap();
    let holding = Holding {
        size: loan.meta.size,
        target: 2,
        primary: NodeId::of("host-0"),
        generation: lender.copies.generations.next(),
    };
    assert_eq!(taker.take_in(&taker.links[0], &[(loan, holding)], 60_000), [Copied::Done]);
    let Duty::Copy { missing: 1, size, not_on } = taker.table().duty(key(1)) else {
        panic!("as far as it was told, it alone has the block")
    };
    taker.order_copies(key(1), 1, size, not_on);
    assert_eq!(hosts[0].cluster.replicate(&[key(1)], 2), [Outcome::Done]);
    until("the claim is heard, and nothing is under way", || {
        settled(&[&hosts[0], &hosts[1]], 1..2, 2) && taker.todo.is_done(key(1))
    });
    assert_eq!(hosts[1].cluster.stats().copied, 0);
}

/// Whatever takes long with the table: whoever listens hears that the host is alive.
#[test]
fn a_heartbeat_does_not_wait_for_the_table() {
    let (hosts, _) = start_all(2);
    let heard = || std::time::Instant::now() - hosts[1].cluster.peers()[0].last_seen.unwrap();
    let busy = hosts[0].cluster.shared.table();
    for _ in 0..8 {
        let before = heard();
        // More than what lies between two looks at the clock.
        until("it is heard again", || heard() > before + Duration::from_millis(50));
    }
    drop(busy);
    assert!(!hosts[1].saw(|event| matches!(event, Event::Down { .. })));
}

/// Whichever way a block goes to another host: it ends there when it ends here.
#[test]
fn a_time_to_live_travels_with_the_block() {
    const TTL: u32 = 3_600_000;
    let (hosts, _) = start_all(2);
    let now = |n: usize| hosts[n].clock.now_ms();
    for n in 0..3 {
        let meta = BlockMeta { ttl_ms: TTL, ..BlockMeta::single(key(n), BLOCK) };
        hosts[0].store.put(hosts[0].store.new_owner(), &meta, &content(n), now(0)).unwrap();
    }
    assert_eq!(hosts[0].cluster.replicate(&[key(0), key(1)], 2), [Outcome::Done; 2]);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..2, 2));
    assert_eq!(hosts[0].cluster.push("host-1", &[key(2)]).unwrap(), [push::Pushed::Done]);
    // What is read from afar, too.
    hosts[1].store.remove(&[key(1)], now(1)).unwrap();
    assert!(hosts[1].reads(1));
    let keys = [0, 1, 2].map(key);
    for stat in hosts[1].store.stat(&keys).unwrap() {
        let ends = stat.unwrap().expires_ms.expect("it has an end");
        assert!(ends <= now(1) + u64::from(TTL));
    }
    hosts[1].store.sweep(now(1) + u64::from(TTL) + 1000);
    assert_eq!(hosts[1].store.exists(&keys).unwrap(), [false; 3]);
}

#[test]
fn a_read_goes_on_to_the_next_holder() {
    let (hosts, _) = start_all(3);
    hosts[0].put_copies(0..4, 2);
    until("copies", || settled(&hosts.iter().collect::<Vec<_>>(), 0..4, 2));
    let reader = &hosts[2 - usize::from(hosts[2].is_resident(0))];
    let holder = hosts.iter().find(|host| host.is_resident(0) && !std::ptr::eq(*host, reader)).unwrap();
    // One holder no longer has what it says: the other one is asked in the same call.
    holder.store.remove(&[key(0)], holder.clock.now_ms()).unwrap();
    let also = hosts.iter().filter(|host| host.is_resident(0)).count();
    assert!(also >= 1 && reader.reads(0));
}

#[test]
fn removed_is_removed_everywhere() {
    let (hosts, _) = start_all(2);
    hosts[0].put_copies(0..8, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..8, 2));
    let keys: Vec<_> = (0..4).map(key).collect();
    let removed = hosts[1].tiering.remove(&keys, hosts[1].clock.now_ms()).unwrap();
    assert_eq!(removed, [Remove::Removed; 4]);
    assert!((0..4).all(|n| !hosts[0].is_resident(n) && !hosts[1].is_resident(n)));
    until("forgotten", || settled(&[&hosts[0], &hosts[1]], 0..4, 0));
    assert!((4..8).all(|n| hosts[0].reads(n) && hosts[1].reads(n)));
}

/// The other one is asked at the same time, not with what is left.
#[test]
fn a_holder_that_hangs_costs_only_its_own_blocks() {
    let ports = ports(3);
    let gate = gate::Gate::to(ports[1]);
    let reader = Host::start(0, &ports, |config| {
        gate::through(config, 1, &gate);
        // As much as one holder may take.
        config.read_timeout = Duration::from_millis(600);
    });
    let holders = [1, 2].map(|n| Host::start(n, &ports, |_| {}));
    until("all are up", || reader.up() == 2 && holders.iter().all(|host| host.up() == 2));
    gate.stall();
    for (n, holder) in (0..).zip(&holders) {
        holder.put(n);
        holder.claim(n);
    }
    until("both are known", || agreed(&[&reader], 0..2, 1));
    let owner = reader.store.new_owner();
    until("the one that can be read is", || {
        let found = reader.tiering.get(owner, &[key(0), key(1)], 0, reader.clock.now_ms()).unwrap();
        assert_eq!(found[0], Lookup::Miss);
        found[1] != Lookup::Miss
    });
}

/// Each answers only when all are being asked.
#[test]
fn peers_are_asked_at_the_same_time() {
    let host = Host::start(0, &ports(3), |_| {});
    let links: Vec<&Link> = host.cluster.shared.links.iter().map(|link| &**link).collect();
    let asked = AtomicUsize::new(0);
    let answers = link::ask_at_once(&links, |link| {
        asked.fetch_add(1, Ordering::SeqCst);
        until("all are asked", || asked.load(Ordering::SeqCst) == links.len());
        link.place
    });
    assert_eq!(answers, [Some(1), Some(2)]);
}

#[test]
fn what_found_no_room_in_the_table_is_heard_again_when_there_is_some() {
    let ports = ports(2);
    let zero = Host::start(0, &ports, |_| {});
    let one = Host::start(1, &ports, |config| config.blocks_max = 4);
    until("both are up", || zero.up() == 1 && one.up() == 1);
    zero.put_copies(0..4, 2);
    until("copies", || agreed(&[&zero, &one], 0..4, 2));
    zero.put_copies(4..6, 2);
    until("it has no room", || one.cluster.stats().table_full >= 2);
    let keys: Vec<_> = (0..4).map(key).collect();
    zero.tiering.remove(&keys, zero.clock.now_ms()).unwrap();
    until("both know of both", || agreed(&[&zero, &one], 4..6, 2));
}

#[test]
fn a_reader_waits_for_a_copy_that_is_just_arriving() {
    let (hosts, _) = start_all(2);
    hosts[0].put_copies(0..1, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..1, 2));
    let (host, owner, now) = (&hosts[0], hosts[0].store.new_owner(), hosts[0].clock.now_ms());
    host.store.remove(&[key(0)], now).unwrap();
    let placed = host.store.reserve(owner, &[BlockMeta::single(key(0), BLOCK)], now).unwrap().remove(0);
    let Reserve::Reserved(place) = placed else { panic!("{placed:?}") };
    thread::scope(|scope| {
        let reader = scope.spawn(|| host.reads(0));
        until("it is loaded from the peer", || host.cluster.stats().read_hits > 0);
        host.store.fill(owner, place.id, 0, content(0)[..].into()).unwrap();
        let sum = kvasir_protocol::block::checksum(&content(0));
        host.store.commit(owner, &[(place.id, Some(sum))], now).unwrap().remove(0).unwrap();
        assert!(reader.join().unwrap());
    });
}

/// Whichever host removes, and however far the copies are: none stays, and none comes back.
#[test]
fn a_removal_wins_over_copies_on_their_way() {
    const ROUNDS: u32 = 12;
    let (hosts, _) = start_all(3);
    let all: Vec<&Host> = hosts.iter().collect();
    let resident =
        |numbers: std::ops::Range<u32>| all.iter().any(|host| numbers.clone().any(|n| host.is_resident(n)));
    for round in 0..ROUNDS {
        let numbers = round * 4..round * 4 + 4;
        hosts[0].put_copies(numbers.clone(), 3);
        if round % 2 == 1 {
            until("copies", || settled(&all, numbers.clone(), 3));
        }
        let remover = &hosts[round as usize % 3];
        let keys: Vec<_> = numbers.clone().map(key).collect();
        remover.tiering.remove(&keys, remover.clock.now_ms()).unwrap();
        assert!(!resident(numbers.clone()), "round {round}: at once");
        until("nobody claims them", || settled(&all, numbers.clone(), 0));
    }
    assert!(!resident(0..ROUNDS * 4));
}

/// A host that was away comes back, and reports copies of what was removed meanwhile.
#[test]
fn a_removal_reaches_who_was_away() {
    let ports = ports(3);
    let hosts = [0, 1, 2].map(|n| Host::start(n, &ports, |_| {}));
    until("all are up", || hosts.iter().all(|host| host.up() == 2));
    hosts[0].put_copies(0..8, 3);
    let all: Vec<&Host> = hosts.iter().collect();
    until("copies", || settled(&all, 0..8, 3));

    let [zero, one, two] = hosts;
    two.cluster.stop();
    until("its loss is known", || zero.up() == 1 && one.up() == 1);
    let keys: Vec<_> = (0..4).map(key).collect();
    zero.tiering.remove(&keys, zero.clock.now_ms()).unwrap();
    assert_eq!([&zero, &one].map(|host| host.cluster.stats().removals_kept), [4, 4]);
    zero.put_copies(3..4, 2);
    until("it is stored again", || agreed(&[&zero, &one], 3..4, 2));

    // The remover itself is gone when it returns.
    drop(zero);
    let two = two.run_again();
    until("both are up", || one.up() == 1 && two.up() == 1);
    until("it was told", || two.cluster.stats().removals_told_late >= 3);
    assert!((0..3).all(|n| !one.is_resident(n) && !two.is_resident(n)));
    until("copies of the rest", || agreed(&[&one, &two], 3..8, 2));
    assert!((3..8).all(|n| two.reads(n) && one.reads(n)));
    assert_eq!(one.cluster.stats().removals_forgotten, 0);
}

#[test]
fn copies_are_still_wanted_after_all_holders_were_restarted() {
    let (ports, dir) = (ports(2), tempfile::tempdir().unwrap());
    let start = |n: usize| {
        Host::start(n, &ports, |config| config.targets = Some(dir.path().join(format!("targets-{n}"))))
    };
    let hosts = [start(0), start(1)];
    until("both are up", || hosts.iter().all(|host| host.up() == 1));
    hosts[0].put_copies(0..6, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..6, 2));
    until("they are kept", || hosts.iter().all(|host| host.cluster.stats().targets_unkept == 0));

    // What outlives them is the stores, as a disk would; not all of it comes back.
    let parts = hosts.map(|host| (host.cluster.config().clone(), Arc::clone(&host.store), host.clock));
    let now = parts[0].2.now_ms();
    parts[0].1.remove(&[key(4)], now).unwrap();
    parts[1].1.remove(&[key(4), key(5)], now).unwrap();
    let hosts = parts.map(|(config, store, clock)| Host::join(config, store, clock));
    assert_eq!(hosts.each_ref().map(|host| host.cluster.stats().targets_restored), [5, 4]);
    let both = [&hosts[0], &hosts[1]];
    until("copies again", || settled(&both, 0..4, 2) && settled(&both, 5..6, 2));
    assert!(hosts[1].is_resident(5) && settled(&both, 4..5, 0));
    until("nothing is kept of what is gone", || {
        hosts.iter().all(|host| host.cluster.stats().targets_unkept == 0)
    });
    let parts = hosts.map(|host| (host.cluster.config().clone(), Arc::clone(&host.store), host.clock));
    let hosts = parts.map(|(config, store, clock)| Host::join(config, store, clock));
    assert_eq!(hosts.each_ref().map(|host| host.cluster.stats().targets_restored), [5, 5]);
}

#[test]
fn a_damaged_copy_is_fetched_again() {
    let (hosts, _) = start_all(2);
    hosts[0].put_copies(0..3, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..3, 2));
    hosts[1].damage(1);
    assert_eq!(hosts[1].store.verify(&[key(1)], hosts[1].clock.now_ms()).unwrap(), [Verify::Dropped]);
    let repaired = Event::Repaired { key: key(1), peer: "host-0".into() };
    until("the repair", || hosts[1].saw(|event| *event == repaired));
    assert!(hosts[1].is_resident(1) && hosts[1].reads(1));
    let stats = hosts[1].cluster.stats();
    assert_eq!((stats.repaired, stats.not_repaired, stats.own), (1, 0, 3));
}

#[test]
fn what_the_evictor_let_go_is_not_copied_again() {
    let (hosts, _) = start_all(2);
    hosts[0].put_copies(0..3, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..3, 2));
    // It may still be lent for a moment.
    let evict = || hosts[1].store.evict_keys(&[key(0)], hosts[1].clock.now_ms()).unwrap();
    until("it goes", || evict() == [Evict::Evicted]);
    until("it says so", || settled(&[&hosts[0], &hosts[1]], 0..1, 1));
    assert_eq!((hosts[1].cluster.stats().let_go, hosts[0].cluster.stats().copied), (1, 3));
    assert!(hosts[1].reads(0), "from the other host");
}

#[test]
fn blocks_are_handed_over_in_order() {
    let (hosts, _) = start_all(2);
    (0..6).for_each(|n| hosts[0].put(n));
    hosts[1].put(2);
    let keys: Vec<_> = [0, 1, 2, 99, 5].map(key).to_vec();
    let pushed = hosts[0].cluster.push("host-1", &keys).unwrap();
    use push::Pushed::{Done, Failed, Had, Missing};
    assert_eq!(pushed, [Done, Done, Had, Missing, Done]);
    assert_eq!([0, 1, 2, 3, 5].map(|n| hosts[1].is_resident(n)), [true, true, true, false, true]);
    assert!([0, 1, 2, 5].iter().all(|&n| hosts[1].reads(n)));
    assert_eq!(hosts[1].cluster.stats().own, 0, "handed over, not a copy that is looked after");
    // One that was damaged is found out, and the others are kept.
    hosts[0].put(6);
    hosts[0].put(7);
    hosts[0].damage(6);
    let free = hosts[1].store.pressure().free_bytes;
    assert_eq!(hosts[0].cluster.push("host-1", &[key(6), key(7)]).unwrap(), [Failed, Done]);
    assert!(!hosts[1].is_resident(6) && hosts[1].reads(7));
    assert_eq!(hosts[1].store.pressure().free_bytes, free - u64::from(BLOCK));
    let error = hosts[0].cluster.push("host-7", &keys).unwrap_err().to_string();
    assert!(error.contains("host-7") && error.contains("there are: host-1"), "{error}");
}

#[test]
fn strangers_and_impostors_are_refused() {
    let ports = ports(3);
    let host = Host::start(0, &ports, |_| {});
    let other_secret =
        Host::start(1, &ports, |config| config.secret = Secret::new(b"another secret entirely"));
    let other_cluster = Host::start(2, &ports, |config| config.cluster = "other".to_owned());
    let refused = |peer: &'static str, word: &'static str| {
        host.saw(move |event| matches!(event, Event::Refused { peer: p, reason } if p == peer && reason.contains(word)))
    };
    until("both are refused", || refused("host-1", "secret") && refused("host-2", "cluster"));
    until("also the other way", || other_secret.saw(|e| matches!(e, Event::Refused { .. })));
    assert_eq!((host.up(), other_secret.up(), other_cluster.up()), (0, 0, 0));
    // Noise on the port: ended, counted, and harmless.
    let mut noise = TcpStream::connect(host.cluster.addr()).unwrap();
    std::io::Write::write_all(&mut noise, &[0x55; 4096]).unwrap();
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut noise, &mut rest);
    assert!(host.cluster.stats().strangers > 0);
    host.put(1);
    assert_eq!(host.cluster.replicate(&[key(1)], 4), [Outcome::TooFewHosts]);
    assert_eq!(host.cluster.replicate(&[key(1), key(2)], 2), [Outcome::Done, Outcome::Missing]);
    assert_eq!(host.cluster.stats().short, 1, "until a peer comes");
}

#[test]
fn hosts_with_certificates_keep_copies_for_each_other() {
    let (ports, authority) = (ports(2), Authority::new());
    let host = |n: usize| {
        let tls = authority.tls(&format!("host-{n}"));
        Host::start(n, &ports, |config| config.tls = Some(tls))
    };
    let mut hosts = vec![host(0), host(1)];
    until("both are up", || hosts.iter().all(|host| host.up() == 1));
    hosts[0].put_copies(0..20, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..20, 2));
    hosts[0].store.remove(&[key(3)], hosts[0].clock.now_ms()).unwrap();
    assert!(hosts[0].reads(3) && hosts[1].reads(3));
    assert_eq!(hosts[0].cluster.push("host-1", &[key(3)]).unwrap(), [push::Pushed::Had]);
    // A host that goes is noticed as soon as without TLS.
    drop(hosts.remove(1));
    until("it is down", || {
        hosts[0].saw(|event| matches!(event, Event::Down { peer, .. } if peer == "host-1"))
    });
}

#[test]
fn hosts_that_differ_about_tls_are_refused_with_the_reason() {
    let (ports, ours, theirs) = (ports(4), Authority::new(), Authority::new());
    let host = |n: usize, tls: Option<Tls>| Host::start(n, &ports, |config| config.tls = tls);
    let encrypted = host(0, Some(ours.tls("host-0")));
    let plain = host(1, None);
    let _stranger = host(2, Some(theirs.tls("host-2")));
    let _impostor = host(3, Some(ours.tls("host-1")));
    let refused = |host: &Host, peer: &str, word: &str| {
        host.saw(
            |event| matches!(event, Event::Refused { peer: p, reason } if p == peer && reason.contains(word)),
        )
    };
    until("one without", || refused(&encrypted, "host-1", "that one has no TLS"));
    until("also the other way", || refused(&plain, "host-0", "that one has TLS"));
    until("another authority", || refused(&encrypted, "host-2", "invalid peer certificate"));
    until("another name", || refused(&encrypted, "host-3", "shows a certificate for others"));
    assert_eq!((encrypted.up(), plain.up()), (0, 0));
    assert!(encrypted.cluster.stats().strangers > 0);
}

/// How host `n` of two reads the other one's pool.
fn rails(hosts: &[Host], n: usize) -> Vec<RailView> {
    hosts[n].cluster.peers().remove(0).rails
}

#[test]
fn two_rails_share_what_moves_and_one_goes_on_alone() {
    let ports = ports(2);
    let two = |config: &mut ClusterConfig| {
        config.transports = Some(vec![Kind::Tcp]);
        config.transfer = vec![SocketAddr::from(([127, 0, 0, 1], 0)), SocketAddr::from(([127, 0, 0, 2], 0))];
    };
    let hosts: Vec<Host> = (0..2).map(|n| Host::start(n, &ports, two)).collect();
    until("both are up", || hosts.iter().all(|host| host.up() == 1));
    let found = rails(&hosts, 1);
    assert_eq!(found.len(), 4, "each address here to each there: {found:?}");
    assert!(found.iter().all(|rail| rail.state == RailState::Idle && rail.kind == Kind::Tcp));
    let both = [&hosts[0], &hosts[1]];
    let put = std::cell::Cell::new(0);
    let more = || {
        let first = put.replace(put.get() + 16);
        hosts[0].put_copies(first..first + 16, 2);
        until("copies", || settled(&both, first..first + 16, 2));
        rails(&hosts, 1)
    };
    // They are connected in the background.
    until("both rails carry something", || {
        let found = more();
        found[0].bytes > 0 && found[1].bytes > 0
    });
    let found = rails(&hosts, 1);
    assert_eq!((found[2].bytes, found[3].bytes), (0, 0), "across the rails only when one fails: {found:?}");

    let before = (found[0].bytes, found[1].bytes);
    hosts[0].cluster.shared.ways.rails[0].stop();
    until("one is down and the other carries on", || {
        let found = more();
        found[0].state == RailState::Down && found[1].state == RailState::InUse && found[1].bytes > before.1
    });
    assert!((0..put.get()).all(|n| hosts[1].reads(n)));
    assert_eq!(hosts[1].cluster.stats().corrupt, 0);
}

#[test]
fn hosts_on_one_machine_share_memory_and_fall_back_on_tcp() {
    let (ports, dir) = (ports(2), tempfile::tempdir().unwrap());
    let socket = |n: usize| dir.path().join(format!("{n}.sock"));
    let host = |n: usize| {
        Host::start(n, &ports, |config| {
            config.transports = Some(vec![Kind::Tcp, Kind::Shm]);
            config.socket = Some(socket(n));
        })
    };
    let hosts = [host(0), host(1)];
    until("both are up", || hosts.iter().all(|host| host.up() == 1));
    let both = [&hosts[0], &hosts[1]];
    hosts[0].put_copies(0..20, 2);
    until("copies", || settled(&both, 0..20, 2));
    let found = rails(&hosts, 1);
    assert_eq!(found.iter().map(|rail| rail.kind).collect::<Vec<_>>(), [Kind::Shm, Kind::Tcp]);
    assert_eq!((found[0].bytes, found[1].bytes), (20 * u64::from(BLOCK), 0), "{found:?}");
    assert_eq!(found[0].state, RailState::InUse);

    // Places for a hand-over are pieces of the pool, which only TCP reaches.
    hosts[0].put(100);
    let before = rails(&hosts, 0)[1].bytes;
    assert_eq!(hosts[0].cluster.push("host-1", &[key(100)]).unwrap(), [push::Pushed::Done]);
    let found = rails(&hosts, 0);
    assert_eq!((found[1].bytes - before, found[0].failures), (BLOCK.into(), 0), "{found:?}");

    hosts[0].cluster.shared.ways.rails[1].stop();
    hosts[0].put_copies(20..40, 2);
    until("more copies", || settled(&both, 20..40, 2));
    assert!((0..40).all(|n| hosts[1].reads(n)));
    assert!(rails(&hosts, 1)[1].bytes >= 20 * u64::from(BLOCK), "{:?}", rails(&hosts, 1));
}

#[test]
fn what_is_named_and_not_there_is_said() {
    let open = |kinds: &[Kind]| {
        let mut config = ClusterConfig::new("alone", Secret::new(b"the secret of this cluster"));
        config.transports = Some(kinds.to_vec());
        let dram = DramConfig { pool_bytes: 1 << 20, blocks_max: 16, ..DramConfig::default() };
        let store = Arc::new(DramStore::open(dram).unwrap());
        Cluster::open(config, store, Clock::start(), Box::new(|_| {})).map(drop)
    };
    let refused = |kinds: &[Kind], expected: &str| {
        let error = open(kinds).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    open(&[Kind::Tcp]).unwrap();
    refused(&[Kind::Shm, Kind::Tcp], "cluster.transports names shm");
    refused(&[], "cluster.transfer lists no address");
    if let Some(reason) = unavailable(Kind::Rdma) {
        refused(&[Kind::Rdma, Kind::Tcp], &reason);
    }
}

#[test]
fn peers_hear_of_nics_that_come_and_go() {
    use kvasir_net::topology::fixture;
    // The addresses of this test are on a NIC, as far as the hosts can see.
    const NIC: &str = "devices/pci0000:00/0000:00:03.0/net/lo";
    let (ports, sysfs) = (ports(2), fixture::build(&format!("{NIC} operstate=up speed=100000")));
    let host = |n: usize| {
        Host::start(n, &ports, |config| {
            config.topology = Some(Topology::probe(sysfs.path(), Default::default()).unwrap());
            config.topology_every = Duration::from_millis(20);
            config.transports = Some(vec![Kind::Tcp]);
        })
    };
    let hosts = [host(0), host(1)];
    let told = |n: usize| hosts[n].cluster.peers().remove(0).matrix;
    until("both are up", || hosts.iter().all(|host| host.up() == 1));
    let before = (told(0), rails(&hosts, 0)[0].clone());
    assert!(!before.1.local_nic.is_empty() && before.1.local_nic == before.1.remote_nic, "{before:?}");
    assert_eq!(before.0, hosts[1].cluster.matrix());

    fixture::add(sysfs.path(), &format!("{NIC} operstate=down"));
    fixture::add(sysfs.path(), "devices/pci0000:00/0000:00:09.0/net/eth9 operstate=up speed=100000");
    until("both know", || (0..2).all(|n| told(n) != before.0 && told(n).contains("eth9")));
    assert!(hosts[0].saw(|event| matches!(event, Event::Topology { what } if what.contains("eth9"))));
    hosts[0].put_copies(0..4, 2);
    until("copies", || settled(&[&hosts[0], &hosts[1]], 0..4, 2));
    assert_eq!(hosts[0].up(), 1, "nobody was lost for it");
}
