//! Reading ahead of a walk along a chain.

use super::*;
use crate::conformance::put;

impl Rig {
    /// A chain of blocks, all of it below.
    fn chain_below(&mut self, blocks: u64) {
        for n in 0..blocks {
            let parent = n.checked_sub(1).map(key);
            let meta = BlockMeta { parent, depth: n as u32, ..BlockMeta::single(key(n), PAGE) };
            let put = self.tiering.dram().put(self.owner, &meta, &bytes_of(n, PAGE), 0).unwrap();
            assert!(matches!(put, Reserve::Reserved(_)), "block {n}");
        }
        self.evict(blocks as usize);
        assert!((0..blocks).all(|n| !self.in_dram(n)));
    }

    fn ahead(&self) -> (u64, u64) {
        let stats = self.tiering.stats();
        (stats.read_ahead, stats.read_ahead_landed)
    }
}

fn four_ahead() -> TieringConfig {
    TieringConfig { read_ahead_blocks: 4, load_timeout: PATIENCE, ..everything() }
}

#[test]
fn a_walk_finds_the_next_blocks_in_the_pool_and_goes_on_ahead() {
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], four_ahead());
    rig.chain_below(12);
    assert!(matches!(rig.read(0), Read::Onboarded(_)));
    assert_eq!(rig.ahead(), (0, 0), "one block is no walk");
    assert!(matches!(rig.read(1), Read::Onboarded(_)));
    assert_eq!(rig.ahead(), (8, 0), "two steps");
    (2..12).for_each(|n| assert!(matches!(rig.read(n), Read::Held(_)), "block {n}"));
    assert_eq!(rig.ahead(), (10, 10));
    assert_eq!((rig.onboard().loaded, rig.tiering.stats().loading_bytes), (12, 0));
}

#[test]
fn a_local_reader_walks_as_well_and_a_whole_chain_at_once_is_no_walk() {
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], four_ahead());
    rig.chain_below(12);
    let all: Vec<BlockKey> = (0..4).map(key).collect();
    assert!(rig.tiering.get(rig.owner, &all, 0, 0).unwrap().iter().all(|l| matches!(l, Lookup::Hit(_))));
    assert_eq!(rig.ahead(), (0, 0));
    assert!(rig.lent(4));
    assert_eq!(rig.ahead(), (7, 0), "the walk goes on behind what was read at once");
    assert!((5..12).all(|n| rig.lent(n)));
    assert_eq!(rig.ahead(), (7, 7));
}

#[test]
fn a_walk_of_large_steps_is_read_ahead_of_by_two_steps() {
    let config = TieringConfig { read_ahead_blocks: 100, ..four_ahead() };
    let mut rig = Rig::new(256, vec![memory(Tier::Nvme)], config.clone());
    rig.chain_below(60);
    let mut read = |from: u64| {
        let step: Vec<BlockKey> = (from..from + 15).map(key).collect();
        let found = rig.tiering.get(rig.owner, &step, 0, 0).unwrap();
        assert!(found.iter().all(|l| matches!(l, Lookup::Hit(_))), "{from}");
        rig.ahead()
    };
    assert_eq!([0, 15, 30].map(&mut read), [(0, 0), (30, 0), (30, 15)]);
    let config = TieringConfig { read_ahead_blocks: 3, ..config };
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], config);
    rig.chain_below(8);
    (0..2).for_each(|n| drop(rig.read(n)));
    assert_eq!(rig.ahead(), (6, 0), "the setting is the most of a step");
}

#[test]
fn a_walk_is_known_though_blocks_go_down_when_those_before_them_have_left() {
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], four_ahead());
    for n in 0..12_u64 {
        let parent = n.checked_sub(1).map(key);
        let meta = BlockMeta { parent, depth: n as u32, ..BlockMeta::single(key(n), PAGE) };
        let placed = rig.tiering.reserve(rig.owner, &[meta], 0).unwrap().remove(0);
        let Reserve::Reserved(place) = placed else { panic!("block {n}: {placed:?}") };
        assert!(rig.tiering.dram().pool().mapping().write(place.offset, &bytes_of(n, PAGE)));
        rig.tiering.dram().commit(rig.owner, &[(place.id, None)], 0).unwrap().remove(0).unwrap();
        rig.evict(1);
        assert!(!rig.in_dram(n));
    }
    (0..2).for_each(|n| drop(rig.read(n)));
    assert_eq!(rig.ahead(), (8, 0));
}

#[test]
fn what_is_removed_on_its_way_up_does_not_arrive() {
    let slow = faulty(Tier::Nvme);
    let mut rig = Rig::new(64, vec![slow.clone()], four_ahead());
    rig.chain_below(8);
    rig.read(0);
    assert!(matches!(rig.read(1), Read::Onboarded(_)));
    rig.tiering.remove(&[key(3)], 0).unwrap();
    assert!(matches!(rig.read(2), Read::Held(_)));
    assert!(!rig.in_dram(3) && matches!(rig.read(3), Read::Missing));
    assert!(rig.in_dram(4));
}

#[test]
fn what_nobody_asked_for_gives_way_and_without_room_waits_beside_the_pool() {
    // Half of the memory is for callers that wait; the rest for one walk, and the block whose load begins it.
    let config = TieringConfig { load_bytes: 10 * u64::from(PAGE), ..four_ahead() };
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], config);
    rig.chain_below(20);
    rig.put_all(100..160);
    (0..2).for_each(|n| drop(rig.read(n)));
    assert_eq!((rig.ahead(), rig.tiering.stats().loading_bytes), ((4, 0), 4 * u64::from(PAGE)));
    (10..12).for_each(|n| drop(rig.read(n)));
    assert_eq!(rig.ahead(), (8, 0), "the second walk took the memory of the first");
    assert!(!rig.in_dram(2));
    assert!(matches!(rig.read(12), Read::Held(_)));
    assert!(!rig.in_dram(13), "no room, and not asked for");
    let loaded = rig.onboard().loaded;
    assert!(matches!(rig.read(13), Read::Held(_)) && rig.in_dram(13));
    assert_eq!(rig.onboard().loaded, loaded, "it is not read again");
}

#[test]
fn what_is_removed_and_put_again_while_its_old_bytes_wait_stays() {
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], four_ahead());
    rig.chain_below(20);
    rig.put_all(100..160);
    (0..3).for_each(|n| drop(rig.read(n)));
    assert!(!rig.in_dram(4));
    rig.tiering.remove(&[key(4)], 0).unwrap();
    assert!(matches!(rig.read(4), Read::Missing) && !rig.in_dram(4));
    (7..9).for_each(|n| drop(rig.read(n)));
    rig.tiering.remove(&[key(10)], 0).unwrap();
    rig.tiering.remove(&[key(100)], 0).unwrap();
    assert!(matches!(rig.put(10), Reserve::Reserved(_)));
    assert!(matches!(rig.read(10), Read::Held(_)) && rig.in_dram(10));
}

#[test]
fn what_could_never_fit_takes_nothing_from_another_walk() {
    let config = TieringConfig { load_bytes: 6 * u64::from(PAGE), ..four_ahead() };
    let mut rig = Rig::new(64, vec![memory(Tier::Nvme)], config);
    rig.chain_below(16);
    rig.put_all(100..160);
    (12..14).for_each(|n| drop(rig.read(n)));
    assert_eq!(rig.ahead(), (2, 0));
    (0..2).for_each(|n| drop(rig.read(n)));
    assert_eq!((rig.ahead(), rig.tiering.stats().loading_bytes), ((2, 0), 2 * u64::from(PAGE)));
    assert!(matches!(rig.read(14), Read::Held(_)));
}

#[test]
fn a_tier_that_is_late_with_what_was_read_ahead_is_not_asked_again() {
    let (slow, remote) = (faulty(Tier::Nvme), memory(Tier::Remote));
    // The blocks that are waited for come at once; those read ahead never do.
    let config = TieringConfig { load_timeout: Duration::from_secs(3), ..four_ahead() };
    let mut rig = Rig::new(64, vec![slow.clone(), remote.clone()], config);
    rig.chain_below(8);
    assert!(put(&*remote, 2, PAGE).is_ok());
    rig.read(0);
    slow.hold();
    slow.let_go(1);
    assert!(matches!(rig.read(1), Read::Onboarded(_)));
    assert_eq!(rig.ahead().0, 6);
    assert!(matches!(rig.read(2), Read::Onboarded(_)), "from the tier behind");
    assert_eq!(rig.onboard().timed_out, 4, "one step of what was read ahead, and nothing after it");
    slow.release();
}
