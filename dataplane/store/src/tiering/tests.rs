//! Tiers together: the corner cases one by one, and random calls on two threads against what must hold.

mod ahead;
mod model;
mod shared;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use super::*;
use crate::config::DramConfig;
use crate::conformance::{bytes_of, key};
use crate::dram::{Lookup, Reserve};
use crate::events::EventKind;
use crate::fault::{Call, Fault, FaultStore, Rates};
use crate::memory::MemoryStore;
use crate::store::{Get, GetDone, Pending, TierError};

const PAGE: u32 = 4096;
/// Long enough for any machine; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// A pool, tiers below it, and a first-in-first-out policy.
struct Rig {
    tiering: Tiering,
    owner: OwnerId,
    evictor: Fifo,
}

#[derive(Default)]
struct Fifo {
    queue: VecDeque<u32>,
}

impl Fifo {
    /// Follows what happened and offers the oldest blocks.
    fn turn(&mut self, tiering: &Tiering, want: usize, to: Destination, urgent: bool) -> Offered {
        let mut events = Vec::new();
        tiering.dram().drain_events(&mut events);
        for event in events {
            self.queue.retain(|&slot| slot != event.slot);
            if event.kind != EventKind::Remove {
                self.queue.push_back(event.slot);
            }
        }
        let chosen = self.queue.drain(..want.min(self.queue.len()));
        let victims: Vec<_> = chosen.map(|slot| Demotion { slot, to }).collect();
        tiering.offer(&victims, urgent, 0)
    }
}

fn dram(pages: u64) -> Arc<DramStore> {
    let config = DramConfig {
        pool_bytes: pages * u64::from(PAGE),
        blocks_max: 1024,
        put_wait: Duration::ZERO,
        ..DramConfig::default()
    };
    Arc::new(DramStore::open(config).unwrap())
}

fn memory(tier: Tier) -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(tier, 64 << 20))
}

fn faulty(tier: Tier) -> Arc<FaultStore> {
    Arc::new(FaultStore::new(memory(tier), 0, Rates::default()))
}

impl Rig {
    fn new(pages: u64, below: Vec<Arc<dyn BlockStore>>, config: TieringConfig) -> Self {
        Self::admitting(pages, below, Box::new(AdmitAll), config)
    }

    fn admitting(
        pages: u64,
        below: Vec<Arc<dyn BlockStore>>,
        admit: Box<dyn Admit>,
        config: TieringConfig,
    ) -> Self {
        let tiering = Tiering::start(dram(pages), below, admit, config, Clock::start()).unwrap();
        Self { owner: tiering.dram().new_owner(), tiering, evictor: Fifo::default() }
    }

    fn put(&self, n: u64) -> Reserve {
        let meta = BlockMeta::single(key(n), PAGE);
        self.tiering.dram().put(self.owner, &meta, &bytes_of(n, PAGE), 0).unwrap()
    }

    fn put_all(&self, blocks: std::ops::Range<u64>) {
        blocks.for_each(|n| assert!(matches!(self.put(n), Reserve::Reserved(_)), "block {n}"));
    }

    /// Puts a block, making room for it like a put that waits.
    fn put_urgently(&mut self, n: u64) {
        while matches!(self.put(n), Reserve::Refused(_)) {
            assert!(
                self.evictor.turn(&self.tiering, 8, Destination::HostDecides, true).taken > 0,
                "block {n} finds no victim"
            );
        }
    }

    /// Has the oldest `want` blocks copied down, or refused, and evicts them.
    fn evict(&mut self, want: usize) {
        self.offer(want, Destination::HostDecides);
        self.evict_ready();
    }

    fn offer(&mut self, want: usize, to: Destination) -> Offered {
        let offered = self.evictor.turn(&self.tiering, want, to, false);
        assert!(self.tiering.drain(Instant::now() + PATIENCE));
        offered
    }

    /// Fills the pool with blocks that nobody needs, so that the reserve is used up.
    fn evict_ready(&self) {
        let mut filler = 1 << 32;
        while !matches!(self.put(filler), Reserve::Refused(_)) {
            filler += 1;
        }
        let fillers: Vec<_> = (1 << 32..filler).map(key).collect();
        self.tiering.dram().remove(&fillers, 0).unwrap();
    }

    fn in_dram(&self, n: u64) -> bool {
        self.tiering.dram().exists(&[key(n)]).unwrap()[0]
    }

    /// Whether a local reader gets the block, bit-exact.
    fn lent(&self, n: u64) -> bool {
        let lookup = self.tiering.get(self.owner, &[key(n)], 0, 0).unwrap()[0];
        let Lookup::Hit(lease) = lookup else { return false };
        let pool = self.tiering.dram().pool();
        let same = pool.mapping().bytes(lease.offset, PAGE.into()).unwrap() == bytes_of(n, PAGE);
        self.tiering.dram().release(self.owner, &[lease.id]).unwrap();
        assert!(same, "block {n} came back as other bytes");
        true
    }

    fn read(&self, n: u64) -> Read {
        let mut reads = self.tiering.read(&[key(n)], 0, 0, u64::MAX);
        let read = reads.pop().unwrap();
        match &read {
            Read::Held(held) => assert_eq!(held.bytes(), bytes_of(n, PAGE)),
            Read::Onboarded(block) => assert_eq!(block.bytes(), bytes_of(n, PAGE)),
            Read::Missing | Read::Throttled => {}
        }
        read
    }

    fn offload(&self) -> OffloadStats {
        self.tiering.stats().levels[0].offload
    }

    fn onboard(&self) -> OnboardStats {
        self.tiering.stats().levels[0].onboard
    }
}

fn everything() -> TieringConfig {
    TieringConfig { min_uses: 0, ..TieringConfig::default() }
}

#[test]
fn what_the_pool_cannot_hold_goes_down_and_comes_back() {
    let below = memory(Tier::Nvme);
    let mut rig = Rig::new(64, vec![below.clone()], everything());
    for n in 0..200 {
        while matches!(rig.put(n), Reserve::Refused(_)) {
            rig.offer(16, Destination::HostDecides);
        }
    }
    let stats = rig.offload();
    assert_eq!((stats.stored, stats.stored_bytes), (below.stats().blocks, below.stats().block_bytes));
    assert_eq!((stats.skipped, stats.failed, stats.queued, stats.queued_bytes), (0, 0, 0, 0));
    assert!(rig.tiering.exists(&(0..200).map(key).collect::<Vec<_>>()).unwrap().iter().all(|&there| there));
    assert!(!rig.in_dram(0) && rig.in_dram(199));
    // One batch, more than the pool can lend at once: the first ones come up, the others find no room.
    assert!((0..200).filter(|&n| matches!(rig.read(n), Read::Held(_) | Read::Onboarded(_))).count() == 200);
    rig.offer(32, Destination::HostDecides);
    let loaded = rig.onboard().loaded;
    assert!(rig.lent(0) && rig.in_dram(0), "a local reader's block is in the pool");
    assert_eq!((rig.onboard().loaded, rig.tiering.stats().loading_bytes), (loaded + 1, 0));
    let residency = rig.tiering.residency(&[key(0), key(199), key(999)]).unwrap();
    assert_eq!(residency[0].tiers().collect::<Vec<_>>(), [Tier::Dram, Tier::Nvme]);
    assert_eq!(residency[1].tiers().collect::<Vec<_>>(), [Tier::Dram]);
    assert_eq!((residency[0].size, residency[2]), (Some(PAGE), Residency::default()));
}

#[test]
fn a_second_touch_earns_a_place_below() {
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme)], TieringConfig::default());
    rig.put_all(0..2);
    assert!(rig.lent(1));
    rig.evict(2);
    assert_eq!(rig.tiering.exists(&[0, 1].map(key)).unwrap(), [false, true]);
    assert_eq!((rig.offload().refused, rig.offload().stored), (1, 1));
    rig.put(0);
    rig.evict(1);
    assert!(
        rig.tiering.exists(&[key(0)]).unwrap()[0],
        "refused once, and it came back: that is a second touch"
    );
    rig.lent(1);
    rig.evict(1);
    assert_eq!((rig.offload().stored, rig.offload().held_below), (2, 1), "no second copy of what is below");
    assert!(!rig.in_dram(1));
}

#[test]
fn the_policy_names_the_tier() {
    let (near, far) = (memory(Tier::Nvme), memory(Tier::Remote));
    let config = TieringConfig { offload: Offload::Policy, ..everything() };
    let mut rig = Rig::new(64, vec![near.clone(), far.clone()], config);
    rig.put_all(0..4);
    let tiers = [Tier::Remote, Tier::Nvme, Tier::Hbm].map(Destination::Tier);
    for to in tiers.into_iter().chain([Destination::HostDecides]) {
        assert_eq!(rig.offer(1, to).taken, 1);
    }
    let held = |store: &MemoryStore| store.exists(&[0, 1, 2, 3].map(key));
    assert_eq!(held(&far), [true, false, false, false]);
    assert_eq!(held(&near), [false, true, false, false]);
}

#[test]
fn the_policys_word_on_a_victim_stands_before_the_number_of_its_uses() {
    let (near, far) = (memory(Tier::Nvme), memory(Tier::Remote));
    let config = TieringConfig { min_uses: 1, ..everything() };
    let mut rig = Rig::new(64, vec![near.clone(), far.clone()], config);
    rig.put_all(0..5);
    rig.lent(3);
    rig.lent(4);
    use Destination::{Drop, HostDecides};
    for to in [Destination::Tier(Tier::Remote), HostDecides, Destination::Tier(Tier::Nvme), HostDecides, Drop]
    {
        assert_eq!(rig.offer(1, to).taken, 1);
    }
    let held = |store: &MemoryStore| store.exists(&[0, 1, 2, 3, 4].map(key));
    assert_eq!(held(&far), [true, false, false, false, false], "named, and never used");
    assert_eq!(
        held(&near),
        [false, false, true, true, false],
        "named; used and left to the host; not: dropped"
    );
}

#[test]
fn a_block_with_a_time_to_live_stays_in_the_pool_or_goes() {
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme)], everything());
    let meta = BlockMeta { ttl_ms: 60_000, ..BlockMeta::single(key(0), PAGE) };
    rig.tiering.dram().put(rig.owner, &meta, &bytes_of(0, PAGE), 0).unwrap();
    rig.evict(1);
    assert_eq!((rig.in_dram(0), rig.offload().offered), (false, 0));
    assert!(!rig.tiering.exists(&[key(0)]).unwrap()[0]);
}

#[test]
fn the_admitter_decides_and_a_short_answer_admits_nothing_more() {
    struct Scripted(std::sync::mpsc::Sender<(Tier, Vec<Candidate>)>);
    impl Admit for Scripted {
        fn admit(&mut self, tier: Tier, candidates: &[Candidate]) -> Vec<Admission> {
            self.0.send((tier, candidates.to_vec())).unwrap();
            vec![Admission::Store, Admission::Colder, Admission::Skip]
        }
    }
    let (near, far) = (memory(Tier::Nvme), memory(Tier::Remote));
    let (sender, asked) = std::sync::mpsc::channel();
    let admit = Box::new(Scripted(sender));
    let mut rig = Rig::admitting(64, vec![near.clone(), far.clone()], admit, everything());
    rig.put_all(0..4);
    rig.evict(4);
    assert_eq!(near.exists(&[0, 1, 2, 3].map(key)), [true, false, false, false]);
    assert_eq!(far.exists(&[0, 1, 2, 3].map(key)), [false, true, false, false]);
    let (tier, candidates) = asked.try_recv().unwrap();
    assert_eq!((tier, candidates.len()), (Tier::Nvme, 4));
    assert_eq!((candidates[0].size, candidates[0].refused_ms_ago), (PAGE, None));
    assert!(asked.try_recv().is_err(), "what is sent on is not asked about again");
    rig.put(3);
    rig.evict(1);
    assert_eq!(asked.try_recv().unwrap().1[0].refused_ms_ago, Some(0));
}

#[test]
fn a_slow_tier_never_holds_a_put_up() {
    let slow = faulty(Tier::Nvme);
    let mut rig = Rig::new(64, vec![slow.clone()], everything());
    slow.hold();
    let quarter = 16 * u64::from(PAGE);
    for n in 0..500 {
        rig.put_urgently(n);
        let stats = rig.offload();
        assert!(stats.queued_bytes <= quarter && stats.queued <= 16, "{stats:?}");
    }
    let stats = rig.offload();
    assert_eq!((stats.stored, stats.queued), (0, 16), "the queue is full and nothing was copied");
    assert!(!rig.tiering.stats().levels[0].takes_copies);
    assert!(stats.skipped > 300, "{stats:?}");
    slow.release();
    assert!(rig.tiering.drain(Instant::now() + PATIENCE));
    assert_eq!((rig.offload().stored, rig.offload().queued_bytes), (16, 0));
    assert!(rig.tiering.stats().levels[0].takes_copies);
}

#[test]
fn a_tier_that_fails_takes_no_copies_and_what_a_load_costs_is_known_after_the_first() {
    let below = faulty(Tier::Nvme);
    let mut rig = Rig::new(8, vec![below.clone()], everything());
    rig.put_all(0..2);
    below.inject(Call::Put, Fault::Io);
    rig.evict(1);
    let level = || rig.tiering.stats().levels.remove(0);
    assert!(!level().takes_copies);
    assert_eq!(level().load_cost, LoadCost::default(), "nothing was loaded");
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme)], everything());
    rig.put_all(0..1);
    rig.evict(1);
    assert!(rig.lent(0));
    let level = rig.tiering.stats().levels.remove(0);
    assert!(level.takes_copies && level.load_cost.fixed_ms > 0.0, "{level:?}");
    assert_eq!(level.load_cost.ms_per_mib, 0.0, "one size tells nothing of a byte's cost");
}

#[test]
fn a_waiting_put_gets_half_of_the_victims_at_once() {
    let slow = faulty(Tier::Nvme);
    slow.hold();
    let mut rig = Rig::new(64, vec![slow.clone()], everything());
    rig.put_all(0..64);
    assert_eq!(rig.evictor.turn(&rig.tiering, 10, Destination::HostDecides, true).taken, 10);
    assert_eq!((rig.tiering.copying(), rig.tiering.dram().metrics().victims_ready), (5, 5));
    slow.release();
}

#[test]
fn a_block_used_while_it_is_copied_stays() {
    let slow = faulty(Tier::Nvme);
    slow.hold();
    let mut rig = Rig::new(8, vec![slow.clone()], everything());
    rig.put_all(0..2);
    rig.evictor.turn(&rig.tiering, 2, Destination::HostDecides, false);
    assert!(rig.lent(1));
    slow.release();
    assert!(rig.tiering.drain(Instant::now() + PATIENCE));
    rig.evict_ready();
    assert_eq!([rig.in_dram(0), rig.in_dram(1)], [false, true]);
    assert!(slow.exists(&[key(1)])[0], "copied all the same");
}

#[test]
fn the_queue_says_how_much_it_still_takes() {
    let slow = faulty(Tier::Nvme);
    let config = TieringConfig { queue_blocks: 3, ..everything() };
    let mut rig = Rig::new(64, vec![slow.clone()], config);
    slow.hold();
    rig.put_all(0..8);
    assert_eq!((rig.tiering.room(PAGE.into()), rig.tiering.room(1 << 20)), (3, 0), "by number, and by bytes");
    rig.evictor.turn(&rig.tiering, 2, Destination::HostDecides, false);
    assert_eq!(rig.tiering.room(PAGE.into()), 1);
    rig.evictor.turn(&rig.tiering, 2, Destination::HostDecides, false);
    assert_eq!((rig.tiering.room(PAGE.into()), rig.offload().skipped), (0, 1));
    slow.release();
}

#[test]
fn a_failed_copy_is_counted_and_its_victim_goes() {
    let below = faulty(Tier::Nvme);
    let mut rig = Rig::new(8, vec![below.clone()], everything());
    rig.put_all(0..2);
    below.inject(Call::Put, Fault::Full);
    rig.evict(2);
    assert_eq!((rig.offload().failed, rig.offload().stored), (1, 1));
    assert_eq!([rig.in_dram(0), rig.in_dram(1)], [false, false]);
    assert_eq!(rig.tiering.exists(&[0, 1].map(key)).unwrap(), [false, true]);
}

#[test]
fn a_remote_reader_is_served_first_and_the_pool_gets_it_on_evidence() {
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme)], everything());
    rig.put(0);
    rig.evict(1);
    (1..9).for_each(|n| assert!(matches!(rig.put(n), Reserve::Reserved(_))));
    for (turn, there) in [false, true].into_iter().enumerate() {
        rig.offer(1, Destination::HostDecides);
        let Read::Onboarded(block) = rig.read(0) else { panic!("turn {turn}") };
        rig.tiering.promote_on_evidence(&block, 0);
        assert_eq!(rig.in_dram(0), there, "turn {turn}");
    }
    let stats = rig.tiering.stats();
    assert_eq!((stats.promoted, stats.not_promoted), (1, 1));
    let Read::Held(_) = rig.read(0) else { panic!("from the pool now") };
    assert!(matches!(rig.read(99), Read::Missing));
}

#[test]
fn readers_of_one_block_load_it_once() {
    let slow = faulty(Tier::Nvme);
    let config = TieringConfig { load_timeout: PATIENCE, ..everything() };
    let mut rig = Rig::new(8, vec![slow.clone()], config);
    rig.put_all(0..3);
    rig.evict(3);
    slow.hold();
    let rig = &rig;
    let asking = |n: u64| {
        let under_way = rig.tiering.together.under_way.lock();
        // The table and the leading caller hold one each.
        under_way.get(&(key(n), Reach::All)).map_or(0, |awaited| Arc::strong_count(awaited) - 1)
    };
    let wait_for = |n, count| {
        while asking(n) < count {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let reader = |n: u64| scope.spawn(move || matches!(rig.read(n), Read::Onboarded(_)));
        let mut readers = vec![reader(0)];
        wait_for(0, 1);
        readers.extend([reader(0), scope.spawn(move || rig.lent(0))]);
        wait_for(0, 3);
        // One batch with a block of its own, one that is on its way, and one that is named twice.
        readers.push(scope.spawn(move || {
            let reads = rig.tiering.read(&[0, 1, 1].map(key), 0, 0, u64::MAX);
            reads.iter().all(|read| matches!(read, Read::Onboarded(_)))
        }));
        wait_for(1, 2);
        slow.release();
        assert!(readers.into_iter().all(|reader| reader.join().unwrap()));
    });
    assert_eq!((rig.onboard().loaded, rig.tiering.stats().loading_bytes), (2, 0));
    assert!(rig.tiering.together.under_way.lock().is_empty());
}

#[test]
fn a_payload_limit_throttles_and_is_not_a_miss() {
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme)], everything());
    rig.put_all(0..4);
    rig.evict(2);
    let reads = rig.tiering.read(&[0, 1, 2, 3, 9].map(key), 0, 0, 3 * u64::from(PAGE));
    let kind = |read: &Read| match read {
        Read::Held(_) => 'h',
        Read::Onboarded(_) => 'o',
        Read::Missing => 'm',
        Read::Throttled => 't',
    };
    assert_eq!(reads.iter().map(kind).collect::<String>(), "othhm");
}

#[test]
fn loads_are_bounded_in_time_and_memory() {
    let slow = faulty(Tier::Nvme);
    let config = TieringConfig { load_bytes: u64::from(PAGE), load_timeout: Duration::ZERO, ..everything() };
    let mut rig = Rig::new(8, vec![slow.clone()], config);
    rig.put_all(0..3);
    rig.evict(3);
    slow.hold();
    assert!(matches!(rig.read(0), Read::Missing));
    assert_eq!((rig.onboard().timed_out, rig.tiering.stats().loading_bytes), (1, PAGE.into()));
    assert!(matches!(rig.read(1), Read::Throttled), "the late load still has its memory");
    let lookup = rig.tiering.get(rig.owner, &[key(1)], 0, 0).unwrap();
    assert_eq!((lookup, rig.tiering.stats().load_refused), (vec![Lookup::Throttled], 2));
    slow.release();
    let mut tries = 0;
    while rig.tiering.stats().loading_bytes > 0 {
        rig.read(99);
        tries += 1;
        std::thread::yield_now();
    }
    assert!(tries > 0);
}

#[test]
fn a_slow_reader_leaves_half_of_the_memory_to_lookups() {
    let config = TieringConfig { load_bytes: 4 * u64::from(PAGE), ..everything() };
    let mut rig = Rig::new(16, vec![memory(Tier::Nvme)], config);
    rig.put_all(0..4);
    rig.evict(4);
    let slow = [rig.read(0), rig.read(1)];
    assert!(slow.iter().all(|read| matches!(read, Read::Onboarded(_))));
    assert!(matches!(rig.read(2), Read::Throttled), "it has its share");
    assert!(rig.lent(2) && rig.lent(3), "lookups have theirs");
    drop(slow);
    assert!(matches!(rig.read(0), Read::Onboarded(_)));
}

#[test]
fn damage_below_is_a_miss_unless_another_tier_has_the_block() {
    let (near, far) = (faulty(Tier::Nvme), memory(Tier::Remote));
    let mut rig = Rig::new(8, vec![near.clone(), far.clone()], everything());
    rig.put_all(0..2);
    rig.offer(2, Destination::HostDecides);
    crate::conformance::put(&*far, 1, PAGE).unwrap();
    rig.evict_ready();
    near.inject(Call::Get, Fault::Damaged);
    assert!(!rig.lent(0));
    near.inject(Call::Get, Fault::Io);
    assert!(rig.lent(1));
    let stats = rig.tiering.stats();
    assert_eq!((stats.levels[0].onboard.missing, stats.levels[0].onboard.failed), (1, 1));
    assert_eq!((stats.levels[0].store.corrupt, stats.levels[1].onboard.loaded), (1, 1));
    assert_eq!(rig.tiering.exists(&[0, 1].map(key)).unwrap(), [false, true]);
}

#[test]
fn a_tier_that_delivers_other_bytes_is_not_believed() {
    /// Flips a bit of what it loads.
    struct Liar(MemoryStore);
    impl BlockStore for Liar {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }
        fn put(&self, batch: Vec<crate::store::Put>) -> Pending<Vec<crate::store::PutDone>> {
            self.0.put(batch)
        }
        fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
            let mut done = self.0.get(batch).wait();
            done.iter_mut().for_each(|done| done.buffer.bytes_mut()[7] ^= 1);
            Pending::ready(done)
        }
        fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
            self.0.sizes(keys)
        }
        fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
            self.0.remove(keys)
        }
        fn flush(&self) -> Pending<Result<(), TierError>> {
            self.0.flush()
        }
        fn stats(&self) -> TierStats {
            self.0.stats()
        }
    }
    // What other hosts rely on stays: perhaps only this host reads it wrongly.
    for (tier, stays) in [(Tier::Nvme, false), (Tier::Remote, true), (Tier::Peer, true)] {
        let liar = Arc::new(Liar(MemoryStore::new(tier, 1 << 20)));
        let rig = Rig::new(8, vec![liar.clone()], everything());
        crate::conformance::put(&*liar, 0, PAGE).unwrap();
        assert!(!rig.lent(0) && !rig.in_dram(0));
        assert!(matches!(rig.read(0), Read::Missing));
        assert_eq!(rig.onboard().corrupt, 1 + u64::from(stays));
        assert_eq!(liar.exists(&[key(0)]), [stays], "{}", tier.name());
    }
}

#[test]
fn a_removal_reaches_every_tier_and_what_is_on_its_way() {
    let slow = faulty(Tier::Nvme);
    let config = TieringConfig { load_timeout: Duration::ZERO, ..everything() };
    let mut rig = Rig::new(8, vec![slow.clone(), memory(Tier::Remote)], config);
    rig.put_all(0..3);
    crate::conformance::put(&*rig.tiering.levels[1].store, 2, PAGE).unwrap();
    slow.hold();
    rig.evictor.turn(&rig.tiering, 1, Destination::HostDecides, false);
    let removed = rig.tiering.remove(&[0, 2, 9].map(key), 0).unwrap();
    assert_eq!(removed, [Remove::Unfinished; 3], "the slow tier has not answered");
    slow.release();
    assert!(rig.tiering.drain(Instant::now() + PATIENCE));
    assert_eq!(rig.tiering.exists(&[0, 1, 2].map(key)).unwrap(), [false, true, false]);
    slow.flush().wait().unwrap();
    assert_eq!(slow.stats().blocks, 0);
}

/// A tier may not be able to give it back.
#[test]
fn what_is_removed_while_it_waits_for_its_way_down_does_not_go() {
    let (below, keys) = (faulty(Tier::Nvme), [key(0)]);
    let mut rig = Rig::new(8, vec![below.clone()], everything());
    rig.put_all(0..2);
    below.inject(Call::Remove, Fault::Io);
    let moves = Arc::clone(&rig.tiering.moves);
    let removing = moves.remove(&keys);
    assert_eq!(rig.offer(2, Destination::HostDecides).taken, 2);
    assert_eq!(removing.wait(Instant::now()), [true], "nothing is left below");
    assert_eq!(below.exists(&[0, 1].map(key)), [false, true]);
    assert_eq!((rig.offload().stored, rig.offload().queued, rig.offload().queued_bytes), (1, 0, 0));
}

#[test]
fn a_removal_waits_for_what_a_tier_is_taking_and_says_what_stays_there() {
    for stays in [false, true] {
        let slow = Arc::new(RemovesAtOnce::default());
        let config = TieringConfig { load_timeout: PATIENCE, ..everything() };
        let mut rig = Rig::new(8, vec![slow.clone()], config);
        rig.put(0);
        slow.puts.hold();
        rig.evictor.turn(&rig.tiering, 1, Destination::HostDecides, false);
        until("the tier is taking it", || slow.puts.waiting() == 1);
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| rig.tiering.remove(&[key(0)], 0).unwrap());
            until("the tier is asked", || slow.asked.load(Relaxed) == 1);
            slow.fails.store(stays, Relaxed);
            slow.puts.release();
            let expected = if stays { Remove::Unfinished } else { Remove::Removed };
            assert_eq!(removing.join().unwrap(), [expected]);
        });
        assert_eq!(slow.exists(&[key(0)]), [stays]);
        assert!(rig.tiering.drain(Instant::now() + PATIENCE));
        slow.fails.store(false, Relaxed);
        let again = if stays { Remove::Removed } else { Remove::Missing };
        assert_eq!(rig.tiering.remove(&[key(0)], 0).unwrap(), [again]);
        assert_eq!(slow.exists(&[key(0)]), [false]);
    }
}

/// A tier in which a removal overtakes puts.
struct RemovesAtOnce {
    memory: Arc<MemoryStore>,
    puts: FaultStore,
    /// How often it was asked to remove, and whether it cannot.
    asked: AtomicU64,
    fails: AtomicBool,
}

impl Default for RemovesAtOnce {
    fn default() -> Self {
        let memory = memory(Tier::Nvme);
        let puts = FaultStore::new(memory.clone(), 0, Rates::default());
        Self { memory, puts, asked: AtomicU64::new(0), fails: AtomicBool::new(false) }
    }
}

impl BlockStore for RemovesAtOnce {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }
    fn put(&self, batch: Vec<crate::store::Put>) -> Pending<Vec<crate::store::PutDone>> {
        self.puts.put(batch)
    }
    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.memory.get(batch)
    }
    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        self.memory.sizes(keys)
    }
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        let gone = if self.fails.load(Relaxed) {
            Pending::ready(keys.iter().map(|_| Err(TierError::Cancelled)).collect())
        } else {
            self.memory.remove(keys)
        };
        self.asked.fetch_add(1, Relaxed);
        gone
    }
    fn flush(&self) -> Pending<Result<(), TierError>> {
        self.memory.flush()
    }
    fn stats(&self) -> TierStats {
        self.memory.stats()
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::yield_now();
    }
}

/// The last hosts to have a block may be elsewhere, and this one is reading it from them.
#[test]
fn what_is_on_its_way_up_is_read_while_this_hosts_copies_are_dropped() {
    let peers = faulty(Tier::Peer);
    let config = TieringConfig { load_timeout: PATIENCE, ..everything() };
    let rig = Rig::new(8, vec![peers.clone()], config);
    crate::conformance::put(&*peers, 0, PAGE).unwrap();
    peers.hold();
    let (rig, key) = (&rig, key(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || rig.lent(0));
        while rig.tiering.together.under_way.lock().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(rig.tiering.trim(&[key], 0).unwrap(), [Remove::Missing]);
        peers.release();
        assert!(reader.join().unwrap(), "a peer has it");
    });
}

/// Whoever asks after the removal waits for the same load.
#[test]
fn what_is_removed_on_its_way_up_is_not_read() {
    let slow = faulty(Tier::Nvme);
    let config = TieringConfig { load_timeout: PATIENCE, ..everything() };
    let mut rig = Rig::new(8, vec![slow.clone()], config);
    rig.put(0);
    rig.evict(1);
    slow.hold();
    let (rig, key) = (&rig, key(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || matches!(rig.read(0), Read::Missing));
        while rig.tiering.together.under_way.lock().is_empty() {
            std::thread::yield_now();
        }
        scope.spawn(move || rig.tiering.remove(&[key], 0).unwrap());
        while !rig.tiering.moves.begin(key).is_removed() {
            std::thread::yield_now();
        }
        slow.release();
        assert!(reader.join().unwrap());
    });
}

/// What no tier has, the most used first, and as much as there is room for without giving up what the tier has.
#[test]
fn what_only_the_pool_has_is_saved_before_the_end() {
    let below = Arc::new(MemoryStore::new(Tier::Nvme, 4 * u64::from(PAGE)));
    let rig = Rig::new(8, vec![Arc::new(Lasting(below.clone()))], TieringConfig::default());
    crate::conformance::put(&*below, 0, PAGE).unwrap();
    rig.put_all(0..6);
    let ends = BlockMeta { ttl_ms: 1000, ..BlockMeta::single(key(9), PAGE) };
    rig.tiering.dram().put(rig.owner, &ends, &bytes_of(9, PAGE), 0).unwrap();
    for n in [3, 3, 5, 9, 9] {
        assert!(rig.lent(n));
    }
    let until = Instant::now() + PATIENCE;
    let saved = rig.tiering.save(until, 0);
    assert_eq!((saved.blocks, saved.bytes, saved.left), (3, 3 * u64::from(PAGE), 2));
    let there = below.exists(&[0, 3, 5, 9].map(key));
    assert_eq!(there, [true, true, true, false], "the used ones, not the one that ends by itself");
    assert_eq!(below.exists(&[1, 2, 4].map(key)).iter().filter(|there| **there).count(), 1);
    assert_eq!(rig.tiering.save(until, 0), Saved { left: 2, ..Saved::default() }, "once");
    assert_eq!(rig.tiering.save(Instant::now(), 0).blocks, 0, "no time");
    assert!((0..6).all(|n| rig.in_dram(n)));
}

/// Memory that claims to outlive its process.
struct Lasting(Arc<MemoryStore>);

impl BlockStore for Lasting {
    fn capabilities(&self) -> Capabilities {
        Capabilities { durable: true, ..self.0.capabilities() }
    }
    fn put(&self, batch: Vec<crate::store::Put>) -> Pending<Vec<crate::store::PutDone>> {
        self.0.put(batch)
    }
    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.0.get(batch)
    }
    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        self.0.sizes(keys)
    }
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        self.0.remove(keys)
    }
    fn flush(&self) -> Pending<Result<(), TierError>> {
        self.0.flush()
    }
    fn stats(&self) -> TierStats {
        self.0.stats()
    }
}

#[test]
fn closing_finishes_the_queue_in_bounded_time() {
    let (slow, fast) = (faulty(Tier::Nvme), faulty(Tier::Remote));
    for patience in [Duration::ZERO, PATIENCE] {
        let mut rig = Rig::new(8, vec![slow.clone(), fast.clone()], everything());
        rig.put(0);
        slow.hold();
        rig.evictor.turn(&rig.tiering, 1, Destination::HostDecides, false);
        if patience > Duration::ZERO {
            slow.release();
            assert_eq!(rig.tiering.close(patience), [""; 0]);
            assert!(slow.exists(&[key(0)])[0]);
        } else {
            assert_eq!(rig.tiering.close(patience)[0], "memory");
        }
        rig.put(1);
        assert_eq!(
            rig.evictor.turn(&rig.tiering, 1, Destination::HostDecides, false).taken,
            1,
            "dropped without a copy"
        );
        assert_eq!(rig.offload().skipped, 1);
    }
}

/// Each block that left the pool is in the tier below, and has not left the host before it left that one too.
#[test]
fn a_block_has_left_when_no_tier_of_the_host_has_it() {
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme), memory(Tier::Remote)], everything());
    let start = rig.tiering.departed(0, 0, 1).unwrap();
    assert!(start.lost);
    let left = |rig: &Rig| {
        let mut keys = rig.tiering.departed(0, start.next, 1000).unwrap().keys;
        keys.sort();
        keys.dedup();
        keys.retain(|key| (0..8).any(|n| *key == self::key(n)));
        keys
    };
    rig.put_all(0..4);
    // One by one: of several, those for which the queue of copies has no room go without.
    (0..4).for_each(|_| rig.evict(1));
    assert!((0..4).all(|n| !rig.in_dram(n)));
    assert_eq!(left(&rig), [], "the tier below has them");
    rig.tiering.remove(&[key(1)], 0).unwrap();
    assert_eq!(left(&rig), [key(1)]);
    // What hosts share is not this host's.
    rig.tiering.trim(&[key(2)], 0).unwrap();
    let mut expected = [key(1), key(2)];
    expected.sort();
    assert_eq!(left(&rig), expected);
    assert!(rig.tiering.departed(1, start.next, 1000).unwrap().keys.is_empty(), "another tenant's");
}
