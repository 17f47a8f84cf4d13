//! What goes without a copy when the tier below is slower than the puts, and for how long a put waits for it.

use super::*;

impl Rig {
    /// Stores a chain from its tail to its root, so that the oldest blocks are the deepest.
    fn put_chain(&self, blocks: std::ops::Range<u64>) {
        let root = blocks.start;
        for n in blocks.rev() {
            let parent = (n > root).then(|| key(n - 1));
            let meta = BlockMeta { parent, depth: (n - root) as u32, ..BlockMeta::single(key(n), PAGE) };
            let put = self.tiering.dram().put(self.owner, &meta, &bytes_of(n, PAGE), 0).unwrap();
            assert!(matches!(put, Reserve::Reserved(_)), "block {n}");
        }
    }

    fn below(&self, blocks: std::ops::Range<u64>) -> Vec<u64> {
        let there = |n: &u64| self.tiering.levels[0].store.exists(&[key(*n)])[0];
        blocks.filter(there).collect()
    }
}

#[test]
fn of_more_than_the_queue_takes_the_roots_and_what_was_used_are_copied() {
    let config = TieringConfig { queue_blocks: 8, ..everything() };
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], config);
    rig.put_chain(0..6);
    rig.put_chain(20..26);
    assert!(rig.lent(25), "a tail that was used");
    assert_eq!(rig.offer(12, Destination::HostDecides).taken, 12);
    assert_eq!(rig.offload().skipped, 4);
    assert_eq!(rig.below(20..26), [20, 21, 22, 23, 25]);
    assert_eq!(rig.below(0..6), [0, 1, 2], "as much of the other chain, from its root on");
}

#[test]
fn what_waits_gives_way_to_what_is_worth_more() {
    let slow = faulty(Tier::Nvme);
    let mut rig = Rig::new(512, vec![slow.clone()], everything());
    slow.hold();
    rig.put_chain(0..8);
    rig.evictor.turn(&rig.tiering, 8, Destination::HostDecides, false);
    let bytes_max = 512 * u64::from(PAGE) / 4;
    rig.put_chain(1000..1200);
    rig.evictor.turn(&rig.tiering, 200, Destination::HostDecides, false);
    let full = rig.offload();
    assert!(full.queued_bytes <= bytes_max && full.skipped > 0, "{full:?}");
    assert!(rig.tiering.dram().metrics().victims_ready as u64 >= full.skipped, "they are ready at once");
    slow.release();
    assert!(rig.tiering.drain(Instant::now() + PATIENCE));
    let copied = rig.below(1000..1200);
    let prefix: Vec<u64> = (1000..1000 + copied.len() as u64).collect();
    assert_eq!(copied, prefix, "a chain without a hole");
}

#[test]
fn a_waiting_put_takes_the_copies_of_what_is_worth_least() {
    let slow = faulty(Tier::Nvme);
    slow.hold();
    let mut rig = Rig::new(64, vec![slow.clone()], everything());
    rig.put_chain(0..10);
    rig.evictor.turn(&rig.tiering, 10, Destination::HostDecides, true);
    slow.release();
    assert!(rig.tiering.drain(Instant::now() + PATIENCE));
    assert_eq!(rig.below(0..10), [0, 1, 2, 3, 4]);
}

#[test]
fn a_put_waits_for_copies_that_end_and_not_for_a_tier_that_hangs() {
    let slow = faulty(Tier::Nvme);
    let dram = DramConfig {
        pool_bytes: 64 * u64::from(PAGE),
        blocks_max: 1024,
        put_wait: PATIENCE,
        ..DramConfig::default()
    };
    let dram = Arc::new(DramStore::open(dram).unwrap());
    let config = TieringConfig { backpressure: Duration::from_millis(20), ..everything() };
    let below: Vec<Arc<dyn BlockStore>> = vec![slow.clone()];
    let tiering = Tiering::start(dram, below, Box::new(AdmitAll), config, Clock::start()).unwrap();
    let (owner, mut evictor) = (tiering.dram().new_owner(), Fifo::default());
    let put = |n: u64| {
        let meta = BlockMeta::single(key(n), PAGE);
        matches!(tiering.dram().put(owner, &meta, &bytes_of(n, PAGE), 0).unwrap(), Reserve::Reserved(_))
    };
    let skipped = || tiering.stats().levels[0].offload.skipped;
    assert!((0..64).all(put));
    assert!(!tiering.lets_go(&tiering.dram().pressure()), "nobody waits");
    std::thread::scope(|scope| {
        for (n, hangs) in [(100, false), (101, true)] {
            slow.hold();
            evictor.turn(&tiering, 1, Destination::HostDecides, false);
            let putter = scope.spawn(move || put(n));
            while tiering.dram().pressure().waiting_puts == 0 {
                std::thread::yield_now();
            }
            if hangs {
                while !tiering.lets_go(&tiering.dram().pressure()) {
                    std::thread::yield_now(); // the test runner's time limit ends this if it is never let go
                }
                evictor.turn(&tiering, 2, Destination::HostDecides, true);
            }
            if !hangs {
                slow.release();
            }
            assert!(putter.join().unwrap());
            assert_eq!(skipped(), u64::from(hangs), "a copy for each, until the tier hangs");
        }
    });
    slow.release();
}
