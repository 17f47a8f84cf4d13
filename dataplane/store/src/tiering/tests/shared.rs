//! A place that other hosts use, too.

use std::sync::Barrier;

use super::*;
use crate::conformance;
use crate::store::{Put, PutDone};

/// A place of which this host remembers nothing: it has no room for that.
struct Place {
    objects: MemoryStore,
    /// Blocks that were removed, as a tier that hears from other hosts would say.
    removed: Mutex<Vec<BlockKey>>,
    /// Passed twice by each question: when it is asked, and before it is answered.
    held: Option<Barrier>,
}

impl Place {
    fn with(blocks: std::ops::Range<u64>, held: Option<Barrier>) -> Arc<Self> {
        let objects = MemoryStore::new(Tier::Remote, 1 << 20);
        blocks.for_each(|n| assert!(conformance::put(&objects, n, PAGE).is_ok()));
        Arc::new(Self { objects, removed: Mutex::default(), held })
    }
}

impl BlockStore for Place {
    fn capabilities(&self) -> Capabilities {
        self.objects.capabilities()
    }
    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        self.objects.put(batch)
    }
    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.objects.get(batch)
    }
    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        vec![None; keys.len()]
    }
    fn look_up(&self, keys: Vec<BlockKey>) -> Pending<Vec<Option<u32>>> {
        if let Some(held) = &self.held {
            held.wait();
            held.wait();
        }
        Pending::ready(self.objects.sizes(&keys))
    }
    fn were_removed(&self, keys: &[BlockKey]) -> Vec<bool> {
        let removed = self.removed.lock();
        keys.iter().map(|key| removed.contains(key)).collect()
    }
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        self.objects.remove(keys)
    }
    fn flush(&self) -> Pending<Result<(), TierError>> {
        self.objects.flush()
    }
    fn stats(&self) -> TierStats {
        self.objects.stats()
    }
}

#[test]
fn what_is_found_there_is_read_although_there_is_no_room_to_remember_it() {
    let rig = Rig::new(8, vec![Place::with(0..2, None)], everything());
    assert!(rig.lent(0) && rig.in_dram(0));
    assert!(matches!(rig.read(1), Read::Onboarded(_)));
    assert!(!rig.lent(2), "nobody has it");
}

#[test]
fn what_was_removed_is_not_looked_for_there() {
    let place = Place::with(0..2, None);
    place.removed.lock().push(key(0));
    let rig = Rig::new(8, vec![place], everything());
    assert!(!rig.lent(0) && matches!(rig.read(0), Read::Missing));
    assert!(rig.lent(1));
}

/// Peers are believed to have the block, and do not bring it in time.
#[test]
fn what_peers_do_not_bring_is_looked_for_there() {
    let peers = faulty(Tier::Peer);
    conformance::put(&*peers, 0, PAGE).unwrap();
    conformance::put(&*peers, 1, PAGE).unwrap();
    let place = Place::with(0..1, None);
    let config = TieringConfig { load_timeout: Duration::from_millis(20), ..everything() };
    let rig = Rig::new(8, vec![place.clone(), peers.clone()], config);
    peers.hold();
    assert!(matches!(rig.read(0), Read::Onboarded(_)));
    assert!(rig.lent(0) && rig.in_dram(0));
    assert!(!rig.lent(1), "only the peers have it");
    place.removed.lock().push(key(0));
    rig.tiering.dram().remove(&[key(0)], 0).unwrap();
    assert!(!rig.lent(0), "a removed block");
    peers.release();
}

/// The object stays, because this host does not know of it when it hears of the removal.
#[test]
fn what_is_removed_while_it_is_looked_for_is_not_read() {
    let place = Place::with(0..1, Some(Barrier::new(2)));
    let rig = Rig::new(8, vec![place.clone()], everything());
    let (rig, held) = (&rig, place.held.as_ref().unwrap());
    let readers: [fn(&Rig) -> bool; 2] = [|rig| rig.lent(0), |rig| !matches!(rig.read(0), Read::Missing)];
    for reads in readers {
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || reads(rig));
            held.wait();
            rig.tiering.remove_here(&[key(0)], 0).unwrap();
            held.wait();
            assert!(!reader.join().unwrap());
        });
        assert!(place.objects.exists(&[key(0)])[0] && !rig.in_dram(0));
    }
}

/// What hosts share and this host knows of, such as what it stored there before it heard of the removal.
#[test]
fn a_host_that_hears_of_a_removal_deletes_what_it_knows_of_there() {
    let shared = memory(Tier::Remote);
    let mut rig = Rig::new(8, vec![memory(Tier::Nvme), shared.clone()], everything());
    rig.put_all(0..2);
    rig.offer(2, Destination::Tier(Tier::Remote));
    assert_eq!(shared.exists(&[0, 1].map(key)), [true; 2]);
    rig.tiering.trim(&[key(0)], 0).unwrap();
    assert_eq!(shared.exists(&[0, 1].map(key)), [true; 2], "a copy too many");
    let removed = rig.tiering.remove_here(&[9, 1].map(key), 0).unwrap();
    assert_eq!(removed, [Remove::Missing, Remove::Removed]);
    assert_eq!(shared.exists(&[0, 1].map(key)), [true, false]);
}
