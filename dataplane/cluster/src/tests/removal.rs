//! Removals, and hosts that were away while others removed or put.

use std::collections::HashSet;
use std::time::Instant;

use super::gate::{Gate, through};
use super::*;
use crate::table::{Generation, Removal};
use kvasir_store::fault::{Call, Fault, FaultStore, Rates};
use kvasir_store::memory::MemoryStore;
use kvasir_store::store::{Capabilities, Get, GetDone, Pending, Put, PutDone, Tier, TierError, TierStats};
use kvasir_store::tiering::{Demotion, Destination};

fn sees(host: &Host, n: usize) -> bool {
    let name = format!("host-{n}");
    host.cluster.peers().iter().any(|peer| peer.name == name && peer.state == LinkState::Up)
}

/// The time of a put is known to 10 ms.
fn wait_past_the_tick(host: &Host) {
    let now_ms = host.clock.now_ms();
    until("the clock says that it is later", || host.clock.now_ms() > now_ms + 20);
}

fn remove(host: &Host, n: u32) {
    let removed = host.tiering.remove(&[key(n)], host.clock.now_ms()).unwrap();
    assert_eq!(removed, [Remove::Removed]);
}

/// Two hosts are away at a removal. The first that returns is told; the second finds only that one.
#[test]
fn a_host_that_was_told_of_a_removal_tells_the_next() {
    let ports = ports(4);
    let hosts = [0, 1, 2, 3].map(|n| Host::start(n, &ports, |_| {}));
    until("all are up", || hosts.iter().all(|host| host.up() == 3));
    hosts[0].put_copies(0..2, 4);
    until("copies", || settled(&hosts.iter().collect::<Vec<_>>(), 0..2, 4));
    let [zero, one, two, three] = hosts;
    two.cluster.stop();
    three.cluster.stop();
    until("their loss is known", || zero.up() == 1 && one.up() == 1);
    remove(&zero, 0);

    let three = three.run_again();
    until("it is up and told", || three.up() == 2 && sees(&zero, 3) && !three.is_resident(0));
    drop((zero, one));
    let two = two.run_again();
    until("these two are up", || sees(&two, 3) && sees(&three, 2));
    until("the other is told", || !two.is_resident(0));
    until("and nobody claims it", || agreed(&[&two, &three], 0..1, 0));
    assert!(!three.is_resident(0) && two.reads(1) && three.reads(1));
}

#[test]
fn a_removal_outlives_a_restart_of_all_that_heard_of_it() {
    let (ports, dir) = (ports(2), tempfile::tempdir().unwrap());
    let start = |n: usize| {
        Host::start(n, &ports, |config| config.removals = Some(dir.path().join(format!("removals-{n}"))))
    };
    let [zero, one] = [start(0), start(1)];
    until("both are up", || zero.up() == 1 && one.up() == 1);
    zero.put_copies(0..2, 2);
    until("copies", || settled(&[&zero, &one], 0..2, 2));
    one.cluster.stop();
    until("its loss is known", || zero.up() == 0);
    remove(&zero, 0);

    let (config, store, clock) = (zero.cluster.config().clone(), Arc::clone(&zero.store), zero.clock);
    drop(zero);
    let (zero, one) = (Host::join(config, store, clock), one.run_again());
    until("both are up again", || zero.up() == 1 && one.up() == 1);
    until("it is told", || !one.is_resident(0));
    until("nobody claims it", || settled(&[&zero, &one], 0..1, 0) && settled(&[&zero, &one], 1..2, 2));
    assert!(!zero.is_resident(0));
}

/// A removal that is told late: it takes what was put before it, and what was only brought up since.
#[test]
fn an_old_removal_spares_what_was_put_for_one_copy_since() {
    let ports = ports(2);
    let gates = [0, 1].map(|n| Gate::to(ports[n]));
    let start = |n: usize| Host::start(n, &ports, |config| through(config, 1 - n, &gates[1 - n]));
    let [zero, one] = [start(0), start(1)];
    until("both are up", || zero.up() == 1 && one.up() == 1);
    [0, 1, 2].into_iter().for_each(|n| zero.put(n));
    one.put(1);
    gates.iter().for_each(Gate::close);
    until("each is alone", || zero.up() == 0 && one.up() == 0);
    [0, 1, 2].into_iter().for_each(|n| remove(&zero, n));

    wait_past_the_tick(&one);
    one.put(0);
    let brought = (one.store.new_bringing_owner(), BlockMeta::single(key(2), BLOCK));
    one.store.put(brought.0, &brought.1, &content(2), one.clock.now_ms()).unwrap();
    gates.iter().for_each(Gate::open);
    until("it is told", || one.cluster.stats().removals_kept == 3 && !one.is_resident(1));
    until("all is carried out", || !one.is_resident(2));
    assert!(one.reads(0), "put since");
    assert!(!zero.reads(1) && !one.reads(1) && !one.reads(2));
}

/// The clock of a host that is asked to remove says nothing against it, even if the news came first.
#[test]
fn a_removal_that_is_asked_for_takes_what_seems_to_be_put_since() {
    let host = Host::start(0, &ports(2), |_| {});
    let shared = &host.cluster.shared;
    let at = shared.copies.generations.next();
    wait_past_the_tick(&host);
    [1, 2].into_iter().for_each(|n| host.put(n));
    let mut told = vec![(key(1), at, shared.table().remove(key(1), at).unwrap())];
    shared.spare_later_puts(&mut told);
    assert!(shared.carry_out(&told).is_empty() && host.is_resident(1));
    assert_eq!(shared.remove_here(&[key(1), key(2)], at), (vec![true, true], None));
    assert!(!host.is_resident(1) && !host.is_resident(2));
}

/// One of the two clocks is set between a put and a removal that is told late; which of them is all the same.
#[test]
fn when_something_was_put_is_told_by_the_clock_of_then() {
    let ports = ports(2);
    let config = Host::settings(0, &ports, |_| {});
    let store = DramStore::open(DramConfig { pool_bytes: 32 << 20, blocks_max: 4096, ..Default::default() });
    let host = Host::join(config, Arc::new(store.unwrap()), Clock::movable());
    let shared = &host.cluster.shared;
    host.put(1);
    wait_past_the_tick(&host);
    let at = shared.copies.generations.next();
    wait_past_the_tick(&host);
    host.put(2);
    shared.note_time();
    host.clock.move_to(host.clock.now_ms() + 3_600_000).unwrap();
    let mut told = [1, 2].map(|n| (key(n), at, shared.table().remove(key(n), at).unwrap()));
    shared.spare_later_puts(&mut told);
    assert_eq!(told.map(|(.., removal)| removal), [Removal::DropEarlier, Removal::Keep]);
}

/// By the clock a put and its removal may be in either order; a host that claims the block knows.
#[test]
fn what_is_known_of_a_put_counts_more_than_what_the_clock_said() {
    let host = Host::start(0, &ports(2), |_| {});
    let shared = &host.cluster.shared;
    host.claim(1);
    let at = shared.copies.generations.next();
    wait_past_the_tick(&host);
    host.put(1);
    let mut told = [(key(1), at, shared.table().remove(key(1), at).unwrap())];
    shared.spare_later_puts(&mut told);
    assert_eq!(shared.carry_out(&told).len(), 1);
    assert!(!host.is_resident(1));
}

/// One that is asked by a host whose clock is behind, and which has not heard of a put or removal that is later.
#[test]
fn a_host_that_keeps_what_it_should_remove_says_what_is_later() {
    let host = Host::start(0, &ports(2), |_| {});
    let shared = &host.cluster.shared;
    let behind = shared.copies.generations.next();
    let removed = shared.copies.generations.next();
    assert_eq!(shared.remove_here(&[key(2)], removed), (vec![false], None));
    [1, 2].into_iter().for_each(|n| host.put(n));
    host.claim(1);
    let put = shared.table().put_after(key(1));
    assert_eq!(shared.remove_here(&[key(1), key(2)], behind), (vec![false; 2], Some(put)));
    assert_eq!(shared.remove_here(&[key(2)], behind), (vec![false], Some(removed)));
    assert!(host.is_resident(1) && host.is_resident(2));
    let after = shared.copies.generations.next();
    assert_eq!(shared.remove_here(&[key(1), key(2)], after), (vec![true; 2], None));
}

/// The converse: what is stored again stays, whoever still speaks of the removal.
#[test]
fn an_old_removal_does_not_drop_what_was_put_again() {
    let ports = ports(3);
    let (to_two, to_one) = (Gate::to(ports[2]), Gate::to(ports[1]));
    let zero = Host::start(0, &ports, |_| {});
    let one = Host::start(1, &ports, |config| through(config, 2, &to_two));
    let two = Host::start(2, &ports, |config| through(config, 1, &to_one));
    until("all are up", || [&zero, &one, &two].iter().all(|host| host.up() == 2));
    zero.put_copies(0..2, 3);
    until("copies", || settled(&[&zero, &one, &two], 0..2, 3));
    [&to_two, &to_one].iter().for_each(|gate| gate.close());
    two.cluster.stop();
    until("its loss is known", || zero.up() == 1 && one.up() == 1);
    for n in 0..2 {
        remove(&zero, n);
    }

    // It returns, and only the remover reaches it. Then one is put for one copy there, the other for two.
    let two = two.run_again();
    until("it is told", || sees(&two, 0) && sees(&zero, 2) && !two.is_resident(0) && !two.is_resident(1));
    two.put(0);
    two.put_copies(1..2, 2);
    until("the copy", || zero.is_resident(1));
    [&to_two, &to_one].iter().for_each(|gate| gate.open());
    until("all see each other", || sees(&one, 2) && sees(&two, 1));
    until("all agree", || settled(&[&zero, &one, &two], 1..2, 2));
    assert!(two.is_resident(0), "for one copy");
    assert!(two.is_resident(1) && zero.is_resident(1), "for two");
    assert!(two.reads(0) && two.reads(1) && one.reads(1));
}

/// While a peer is slow to answer, the others are asked.
#[test]
fn a_removal_is_asked_of_all_peers_at_the_same_time() {
    let (hosts, _) = start_all(3);
    let all: Vec<&Host> = hosts.iter().collect();
    let answering = |host: &Host| host.cluster.shared.serving.load(Ordering::SeqCst) > 0;
    let removed_at_once = |n: u32| {
        hosts[0].put_copies(n..n + 1, 3);
        until("copies", || settled(&all, n..n + 1, 3) && !all.iter().any(|host| answering(host)));
        // Nobody removes anything there until both are asked.
        let held = [1, 2].map(|n| hosts[n].cluster.shared.one_removal());
        thread::scope(|scope| {
            let removing = || hosts[0].tiering.remove(&[key(n)], hosts[0].clock.now_ms()).unwrap();
            let removing = scope.spawn(removing);
            until("both are asked", || answering(&hosts[1]) && answering(&hosts[2]));
            drop(held);
            removing.join().unwrap() == [Remove::Removed]
        })
    };
    // On a machine that is very slow the time for an answer may pass all the same.
    assert!((0..4).any(removed_at_once), "a peer was asked only when another had not answered");
}

/// A place that hosts share, as one of them sees it.
struct Bucket {
    objects: Arc<MemoryStore>,
    known: Mutex<HashSet<BlockKey>>,
}

impl Bucket {
    /// With what a listing finds there.
    fn open(objects: &Arc<MemoryStore>, listed: &[BlockKey]) -> Arc<dyn BlockStore> {
        let known = Mutex::new(listed.iter().copied().collect());
        Arc::new(Self { objects: Arc::clone(objects), known })
    }

    fn learn(&self, keys: impl IntoIterator<Item = BlockKey>) {
        self.known.lock().extend(keys);
    }
}

impl BlockStore for Bucket {
    fn capabilities(&self) -> Capabilities {
        self.objects.capabilities()
    }
    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        self.learn(batch.iter().map(|put| put.meta.key));
        self.objects.put(batch)
    }
    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.objects.get(batch)
    }
    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        let known = self.known.lock();
        let sizes = self.objects.sizes(keys).into_iter();
        sizes.zip(keys).map(|(size, key)| size.filter(|_| known.contains(key))).collect()
    }
    fn look_up(&self, keys: Vec<BlockKey>) -> Pending<Vec<Option<u32>>> {
        self.learn(keys.iter().copied());
        Pending::ready(self.objects.sizes(&keys))
    }
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        self.forget(&keys);
        self.objects.remove(keys)
    }
    fn forget(&self, keys: &[BlockKey]) {
        self.known.lock().retain(|key| !keys.contains(key));
    }
    fn flush(&self) -> Pending<Result<(), TierError>> {
        self.objects.flush()
    }
    fn stats(&self) -> TierStats {
        self.objects.stats()
    }
}

fn bucket_of_all() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(Tier::Remote, 1 << 20))
}

fn on_tier(config: ClusterConfig, tier: Arc<dyn BlockStore>) -> Host {
    let dram = DramConfig { pool_bytes: 4 << 20, blocks_max: 64, ..DramConfig::default() };
    Host::join_above(config, Arc::new(DramStore::open(dram).unwrap()), Clock::start(), vec![tier])
}

/// Has the block of this host's pool go to the bucket, as its evictor would.
fn offload(host: &Host, n: u32) {
    offload_to(Tier::Remote, host, n);
}

fn offload_to(tier: Tier, host: &Host, n: u32) {
    let slot = host.store.stat(&[key(n)]).unwrap()[0].unwrap().slot;
    let victim = Demotion { slot, to: Destination::Tier(tier) };
    // A policy chooses when it has heard of the block.
    host.store.drain_events(&mut Vec::new());
    assert_eq!(host.tiering.offer(&[victim], false, host.clock.now_ms()).taken, 1);
    assert!(host.tiering.drain(Instant::now() + Duration::from_secs(60)));
}

/// The remover deletes it in the bucket, and only then another host stores it there, which has not heard of the removal.
#[test]
fn what_a_host_that_was_away_offloaded_is_removed() {
    let (ports, objects) = (ports(2), bucket_of_all());
    let gates = [0, 1].map(|n| Gate::to(ports[n]));
    let [zero, one] = [0, 1].map(|n| {
        let config = Host::settings(n, &ports, |config| through(config, 1 - n, &gates[1 - n]));
        on_tier(config, Bucket::open(&objects, &[]))
    });
    let stored = |n: u32| objects.exists(&[key(n)])[0];
    until("both are up", || zero.up() == 1 && one.up() == 1);
    [0, 1].into_iter().for_each(|n| one.put(n));
    zero.put(0);
    gates.iter().for_each(Gate::close);
    until("each is alone", || zero.up() == 0 && one.up() == 0);
    offload(&zero, 0);
    remove(&zero, 0);
    assert!(!stored(0));
    [0, 1].into_iter().for_each(|n| offload(&one, n));
    assert!(stored(0) && zero.reads(1));
    assert!(!zero.reads(0), "removed is removed");

    gates.iter().for_each(Gate::open);
    until("it is told, and the object goes", || !stored(0));
    until("all is carried out", || !one.is_resident(0));
    assert!(!zero.reads(0) && !one.reads(0) && one.reads(1));

    // What is put again is there, for the host that put it: the other one has heard of no put since.
    zero.put(0);
    offload(&zero, 0);
    zero.store.remove(&[key(0)], zero.clock.now_ms()).unwrap();
    assert!(stored(0) && zero.reads(0) && !one.reads(0));
}

#[test]
fn a_tier_that_could_not_remove_a_block_is_asked_again() {
    let ports = ports(2);
    let disk: Arc<dyn BlockStore> = Arc::new(MemoryStore::new(Tier::Nvme, 1 << 20));
    let failing = Arc::new(FaultStore::new(Arc::clone(&disk), 1, Rates::default()));
    let zero = Host::start(0, &ports, |_| {});
    let one = on_tier(Host::settings(1, &ports, |_| {}), Arc::clone(&failing) as Arc<dyn BlockStore>);
    until("both are up", || zero.up() == 1 && one.up() == 1);
    for n in 0..2 {
        one.put(n);
        offload_to(Tier::Nvme, &one, n);
    }
    (0..2).for_each(|_| failing.inject(Call::Remove, Fault::Io));
    zero.tiering.remove(&[key(0)], zero.clock.now_ms()).unwrap();
    until("it goes all the same", || !disk.exists(&[key(0)])[0]);
    assert!(!one.reads(0) && one.reads(1));
}

/// It is not kept as carried out, so the host is told again.
#[test]
fn a_removal_that_a_tier_could_not_do_is_told_again_after_a_restart() {
    let (ports, dir) = (ports(2), tempfile::tempdir().unwrap());
    let disk: Arc<dyn BlockStore> = Arc::new(MemoryStore::new(Tier::Nvme, 1 << 20));
    let failing = Arc::new(FaultStore::new(Arc::clone(&disk), 1, Rates::default()));
    let keeping = || Host::settings(1, &ports, |config| config.removals = Some(dir.path().join("removals")));
    let zero = Host::start(0, &ports, |_| {});
    let one = on_tier(keeping(), Arc::clone(&failing) as Arc<dyn BlockStore>);
    until("both are up", || zero.up() == 1 && one.up() == 1);
    one.put(0);
    offload_to(Tier::Nvme, &one, 0);
    (0..10_000).for_each(|_| failing.inject(Call::Remove, Fault::Io));
    zero.tiering.remove(&[key(0)], zero.clock.now_ms()).unwrap();
    assert!(disk.exists(&[key(0)])[0]);
    drop(one);
    let one = on_tier(keeping(), Arc::clone(&disk));
    until("it goes all the same", || !disk.exists(&[key(0)])[0]);
    assert!(!one.reads(0));
}

#[test]
fn a_clock_that_was_heard_is_followed_after_a_restart() {
    let (ports, dir) = (ports(1), tempfile::tempdir().unwrap());
    let start = || Host::start(0, &ports, |config| config.removals = Some(dir.path().join("removals")));
    let next = |host: &Host| host.cluster.shared.copies.generations.next();
    let host = start();
    let ahead = Generation(next(&host).0 + 1_800_000_000);
    host.cluster.shared.heard(ahead);
    drop(host);
    assert!(next(&start()) > ahead, "of a host whose clock is half an hour ahead");
}

/// It finds the object in the listing at its start.
#[test]
fn what_was_removed_is_not_found_in_the_bucket_after_a_restart() {
    let (ports, objects, dir) = (ports(2), bucket_of_all(), tempfile::tempdir().unwrap());
    let start = |listed: &[BlockKey]| {
        let keeping = |config: &mut ClusterConfig| config.removals = Some(dir.path().join("removals"));
        on_tier(Host::settings(0, &ports, keeping), Bucket::open(&objects, listed))
    };
    let host = start(&[]);
    host.put(0);
    remove(&host, 0);
    drop(host);
    let away = Host::settings(1, &ports, |config| config.peers.clear());
    let away = on_tier(away, Bucket::open(&objects, &[]));
    for n in 0..2 {
        away.put(n);
        offload(&away, n);
    }
    drop(away);
    let host = start(&[0, 1].map(key));
    assert!(!host.reads(0) && host.reads(1));
}
