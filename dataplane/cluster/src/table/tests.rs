//! Several tables that talk to each other, compared with a model that knows everything.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const HOSTS: usize = 4;

fn key(n: u8) -> BlockKey {
    BlockKey::from_name(&n.to_string())
}

fn names() -> Vec<NodeId> {
    (0..HOSTS).map(|n| NodeId::of(&format!("host-{n}"))).collect()
}

fn holding(n: u8, target: u8, primary: usize) -> Holding {
    let generation = Generation(1);
    Holding { size: 100 + u32::from(n), target, primary: names()[primary], generation }
}

/// A host, its table, and how far it has heard each other host (`None`: not connected).
struct Host {
    table: Table,
    heard: Vec<Option<u64>>,
}

/// A cluster whose messages are delivered when the test says so, and the number of puts and removals so far.
struct World(Vec<Host>, u64);

impl World {
    fn new(log_max: usize) -> Self {
        let host = |n: usize| {
            let mut nodes = names();
            nodes.rotate_left(n);
            Host { table: Table::new(nodes, 1000, log_max), heard: vec![None; HOSTS] }
        };
        Self((0..HOSTS).map(host).collect(), 0)
    }

    /// The index of `other` in the list of `host`.
    fn place(host: usize, other: usize) -> usize {
        (other + HOSTS - host) % HOSTS
    }

    fn now(&mut self) -> Generation {
        self.1 += 1;
        Generation(self.1)
    }

    /// Whether any host knows that what was put then was removed since.
    fn is_outdated(&self, block: u8, put: Generation) -> bool {
        self.0.iter().any(|host| host.table.is_outdated(key(block), put))
    }

    /// Blocks that some host holds and nobody has removed since they were put.
    fn live(&self, truth: &Truth) -> BTreeSet<u8> {
        let put = |host: usize, block: u8| self.0[host].table.holding(key(block)).unwrap().generation;
        let live = truth.keys().filter(|&&(host, block)| !self.is_outdated(block, put(host, block)));
        live.map(|(_, block)| *block).collect()
    }

    /// `host` hears at most `max` facts of `other`; all that it holds first, if it missed something.
    fn hear(&mut self, truth: &mut Truth, host: usize, other: usize, max: usize) {
        let news = self.0[host].heard[other].and_then(|from| self.0[other].table.log().since(from, max));
        let (facts, next) = match news {
            Some(facts) => {
                let from = self.0[host].heard[other].unwrap_or(0);
                let next = from + facts.len() as u64;
                (facts, next)
            }
            None => {
                self.0[host].table.lose(Self::place(host, other));
                self.0[other].table.all()
            }
        };
        for fact in facts {
            let heard = self.0[host].table.hear(Self::place(host, other), fact);
            if matches!(heard, Heard::Removal(Removal::Drop | Removal::DropEarlier)) {
                truth.retain(|&(holder, block), _| holder != host || key(block) != fact.key());
            }
        }
        self.0[host].heard[other] = Some(next);
    }

    fn part(&mut self, host: usize, other: usize) {
        self.0[host].heard[other] = None;
        self.0[host].table.lose(Self::place(host, other));
    }

    fn settle(&mut self, truth: &mut Truth) {
        for host in 0..HOSTS {
            for other in (0..HOSTS).filter(|&other| other != host) {
                while self.0[host].heard[other] != Some(self.0[other].table.log().end()) {
                    self.hear(truth, host, other, 3);
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put {
        host: usize,
        block: u8,
        target: u8,
    },
    Gone {
        host: usize,
        block: u8,
        let_go: bool,
    },
    Remove {
        host: usize,
        block: u8,
    },
    Hear {
        host: usize,
        other: usize,
        max: usize,
    },
    Part {
        host: usize,
        other: usize,
    },
    Crash {
        host: usize,
    },
    /// Every host does what it believes to be its duty, at once, without waiting for the others.
    Work,
}

fn step() -> impl Strategy<Value = Step> {
    let (host, block) = (0..HOSTS, 0u8..6);
    prop_oneof![
        // A put for one copy does not ask. With two or more, the holder that is first by its hash never drops its own,
        // whichever primary it believes in; with one, two holders that believe in each other's could both drop theirs.
        3 => (host.clone(), block.clone(), 2u8..5).prop_map(|(host, block, target)| Step::Put { host, block, target }),
        1 => (host.clone(), block.clone()).prop_map(|(host, block)| Step::Remove { host, block }),
        2 => (host.clone(), block, any::<bool>()).prop_map(|(host, block, let_go)| Step::Gone { host, block, let_go }),
        4 => (host.clone(), host.clone(), 0usize..4).prop_map(|(host, other, max)| Step::Hear { host, other, max }),
        1 => (host.clone(), host.clone()).prop_map(|(host, other)| Step::Part { host, other }),
        1 => host.prop_map(|host| Step::Crash { host }),
        2 => Just(Step::Work),
    ]
}

/// What is kept beside the blocks is what a walk over them finds.
fn check_books(table: &Table) {
    for place in 0..HOSTS {
        let spoke =
            |(&key, block): (&BlockKey, &Block)| block.holders.union(block.let_go).has(place).then_some(key);
        let found: BTreeSet<BlockKey> = table.blocks.iter().filter_map(spoke).collect();
        assert_eq!(table.spoken_of[place], found, "of place {place}");
    }
    let own = table.blocks.values().filter(|block| block.holders.has(0)).count();
    let short = table.blocks.values().filter(|block| block.missing() > 0).count();
    assert_eq!(table.counts(), (own, short));
}

/// What each host really holds.
type Truth = BTreeMap<(usize, u8), Holding>;

fn work(world: &mut World, truth: &mut Truth) {
    for host in 0..HOSTS {
        for key in world.0[host].table.next_duties(100) {
            let block = (0..6).find(|&n| super::tests::key(n) == key).unwrap();
            match world.0[host].table.duty(key) {
                Duty::Copy { missing, not_on, .. } => {
                    let free = (1..HOSTS).filter(|&place| !not_on.has(place)).take(missing);
                    for place in free.collect::<Vec<_>>() {
                        let other = (host + place) % HOSTS;
                        let holding = world.0[host].table.holding(key).unwrap();
                        if world.0[other].table.holds(0, key, holding) != Heard::Outdated {
                            truth.insert((other, block), holding);
                            world.0[host].table.holds(place, key, holding);
                        }
                    }
                }
                Duty::Trim => {
                    world.0[host].table.gone(0, key, Gone::Lost);
                    truth.remove(&(host, block));
                }
                Duty::Nothing => {}
            }
        }
    }
}

fn apply(world: &mut World, truth: &mut Truth, step: Step) {
    match step {
        Step::Put { host, block, target } => {
            let known = world.0[host].table.holding(key(block)).map(|known| known.generation);
            let generation = known.unwrap_or_else(|| world.now());
            let holding = Holding { generation, ..holding(block, target, host) };
            world.0[host].table.holds(0, key(block), holding);
            truth.entry((host, block)).or_insert(holding);
        }
        Step::Gone { host, block, let_go } => {
            let why = if let_go { Gone::LetGo } else { Gone::Lost };
            let known = world.0[host].table.gone(0, key(block), why);
            assert_eq!(known, truth.remove(&(host, block)).is_some());
        }
        Step::Remove { host, block } => {
            let at = world.now();
            assert!(world.0[host].table.remove(key(block), at).is_some());
            let own = world.0[host].table.holders(key(block)).has(0);
            assert!(!own, "it was put before");
            truth.remove(&(host, block));
        }
        Step::Hear { host, other, max } if host != other => world.hear(truth, host, other, max),
        Step::Part { host, other } if host != other => world.part(host, other),
        Step::Hear { .. } | Step::Part { .. } => {}
        Step::Crash { host } => {
            let fresh = World::new(8).0.swap_remove(host);
            world.0[host] = fresh;
            truth.retain(|(holder, _), _| *holder != host);
            (0..HOSTS).filter(|&other| other != host).for_each(|other| world.part(other, host));
        }
        Step::Work => work(world, truth),
    }
}

proptest! {
    /// Whatever was said, lost and done at once on views that differ: when everything was heard all tables agree with
    /// the truth, and after some rounds of work every block that is left is held as often as it should be, or more
    /// often only by as many as let theirs go.
    #[test]
    fn tables_agree_and_targets_are_met(steps in prop::collection::vec(step(), 0..60)) {
        let (mut world, mut truth) = (World::new(8), Truth::new());
        for step in steps {
            apply(&mut world, &mut truth, step);
            for host in 0..HOSTS {
                check_books(&world.0[host].table);
                for block in 0..6 {
                    prop_assert_eq!(world.0[host].table.holders(key(block)).has(0), truth.contains_key(&(host, block)));
                }
            }
        }
        let before = world.live(&truth);
        for _ in 0..6 {
            world.settle(&mut truth);
            work(&mut world, &mut truth);
        }
        world.settle(&mut truth);
        let after: BTreeSet<u8> = truth.keys().map(|(_, block)| *block).collect();
        prop_assert_eq!(before, after, "work never loses a block, and none that was removed comes back");
        for host in 0..HOSTS {
            let table = &world.0[host].table;
            for block in 0..6 {
                let found: BTreeSet<usize> = table.holders(key(block)).iter().map(|place| (host + place) % HOSTS).collect();
                let held: BTreeSet<usize> = truth.keys().filter(|(_, b)| *b == block).map(|(holder, _)| *holder).collect();
                prop_assert_eq!(&found, &held, "host {} on block {}", host, block);
                prop_assert_eq!(table.duty(key(block)), Duty::Nothing);
                if let Some(holding) = table.holding(key(block)) {
                    prop_assert!(held.len() <= usize::from(holding.target).max(1), "too many of block {}", block);
                }
            }
        }
    }
}

#[test]
fn a_full_table_refuses() {
    let mut table = Table::new(names(), 1, 8);
    assert_eq!(table.holds(0, key(1), holding(1, 2, 0)), Heard::New);
    assert_eq!(table.holds(0, key(1), holding(1, 2, 0)), Heard::Known);
    assert_eq!(table.holds(1, key(2), holding(2, 2, 1)), Heard::Full);
    assert_eq!((table.refusals(), table.len(), table.log().end()), (1, 1, 1));
    let at = Generation(2);
    assert_eq!((table.remove(key(1), at), table.remove(key(1), at)), (Some(Removal::Drop), None));
    let told = vec![Fact::Removed(key(1), at), Fact::Gone(key(1), Gone::Lost)];
    assert_eq!(table.log().since(1, 9), Some(told));
}

#[test]
fn a_duty_that_cannot_be_done_keeps_no_other_from_its_turn() {
    let mut table = Table::new(names(), 100, 100);
    for n in 0..5 {
        table.holds(0, key(n), holding(n, 2, 0));
    }
    let mut seen = BTreeSet::new();
    for _ in 0..3 {
        let due = table.next_duties(2);
        assert_eq!(due.len(), 2);
        seen.extend(due);
    }
    assert_eq!(seen.len(), 5, "all had their turn after three times two");
    assert_eq!(table.next_duties(9).len(), 5, "each once");
}

#[test]
fn the_log_knows_what_it_no_longer_has() {
    let mut table = Table::new(names(), 100, 2);
    for n in 0..3 {
        table.holds(0, key(n), holding(n, 2, 0));
    }
    let log = table.log();
    assert_eq!((log.since(0, 9), log.end()), (None, 3));
    assert_eq!(log.since(1, 1), Some(vec![Fact::Holds(key(1), holding(1, 2, 0))]));
    assert_eq!((log.since(3, 9), log.since(4, 9)), (Some(Vec::new()), None));
}

#[test]
fn what_was_let_go_is_not_missed_but_what_was_lost_is() {
    let mut table = Table::new(names(), 100, 8);
    for place in [0, 1] {
        table.holds(place, key(1), holding(1, 2, 0));
    }
    assert_eq!(table.duty(key(1)), Duty::Nothing);
    table.gone(1, key(1), Gone::LetGo);
    assert_eq!(table.duty(key(1)), Duty::Nothing);
    table.holds(1, key(1), holding(1, 2, 0));
    table.gone(1, key(1), Gone::Lost);
    assert_eq!(table.duty(key(1)), Duty::Copy { missing: 1, size: 101, not_on: Nodes::one(0) });
    assert_eq!((table.counts(), table.lose(0)), ((1, 1), 1));
    assert!(table.is_empty());
}

#[test]
fn other_bytes_under_the_same_key_are_a_copy() {
    let mut table = Table::new(names(), 100, 8);
    let (theirs, own) = (holding(1, 2, 0), holding(9, 2, 0));
    // Heard before this host has it.
    table.holds(1, key(1), theirs);
    assert_eq!(table.holds(0, key(1), own), Heard::New);
    assert_eq!(table.duty(key(1)), Duty::Nothing, "both count, and nobody offers theirs again");
    assert_eq!(table.own().0, [Fact::Holds(key(1), own)]);
    assert_eq!(table.holds(1, key(1), theirs), Heard::Known);
    let huge = Holding { size: u32::MAX, ..theirs };
    assert_eq!(table.holds(2, key(1), huge), Heard::New);
    assert_eq!(table.holding(key(1)), Some(own), "what others say of its size is not of this one");
}

#[test]
fn a_removal_counts_for_what_was_put_before_it() {
    let mut table = Table::new(names(), 100, 8);
    let put = |at: u64| Holding { generation: Generation(at), ..holding(1, 2, 0) };
    table.holds(1, key(1), put(5));
    assert_eq!(table.hear(2, Fact::Removed(key(1), Generation(7))), Heard::Removal(Removal::DropEarlier));
    assert_eq!(table.hear(3, Fact::Removed(key(1), Generation(7))), Heard::Known, "told on by another");
    assert!(table.is_empty() && table.log().end() == 1);
    for place in [0, 1] {
        assert_eq!(table.holds(place, key(1), put(6)), Heard::Outdated);
    }
    // Put again; then a removal arrives that is later than the one known, but earlier than the put.
    assert_eq!(table.holds(0, key(1), put(9)), Heard::New);
    assert_eq!(table.remove(key(1), Generation(8)), Some(Removal::Keep));
    assert!(table.holders(key(1)).has(0) && table.removals() == (1, 0));
    assert_eq!(table.all().0, [Fact::Removed(key(1), Generation(8)), Fact::Holds(key(1), put(9))]);
    assert_eq!(table.remove(key(1), Generation(10)), Some(Removal::Drop), "the put is known");
}
