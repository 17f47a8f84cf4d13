//! Random sequences of calls against a slow obvious model.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// The pool as one would explain it: a list of endpoints from oldest to newest, and a hand.
#[derive(Default)]
struct Model {
    cap: usize,
    ready: Vec<Entry>,
    hand: usize,
    quarantine: BTreeMap<u8, Bad>,
    /// Users of endpoints that were dropped, by link.
    draining: BTreeMap<usize, u32>,
    evicted: u64,
}

struct Entry {
    peer: u8,
    link: usize,
    visited: bool,
    users: u32,
    failures: u32,
}

struct Bad {
    until: u64,
    failures: u32,
    wanted: bool,
}

impl Model {
    fn remove(&mut self, at: usize) -> Entry {
        let entry = self.ready.remove(at);
        if self.hand > at {
            self.hand -= 1;
        }
        if self.hand >= self.ready.len() {
            self.hand = 0;
        }
        entry
    }

    fn drop_ready(&mut self, at: usize) -> Entry {
        let entry = self.remove(at);
        if entry.users > 0 {
            self.draining.insert(entry.link, entry.users);
        }
        entry
    }

    fn make_room(&mut self) -> bool {
        for _ in 0..2 * self.ready.len() {
            let at = self.hand;
            if self.ready[at].users == 0 {
                if !self.ready[at].visited {
                    self.remove(at);
                    self.evicted += 1;
                    return true;
                }
                self.ready[at].visited = false;
            }
            self.hand = (at + 1) % self.ready.len();
        }
        false
    }

    fn fail(&mut self, peer: u8, failures: u32, now: u64) {
        let until = now + (50 << (failures - 1).min(30)).min(10_000);
        self.quarantine.insert(peer, Bad { until, failures, wanted: false });
    }

    fn get(&mut self, peer: u8, now: u64, net: &Net, next: usize) -> Result<usize, Error<NoAnswer>> {
        let mut failures = 0;
        if let Some(at) = self.ready.iter().position(|entry| entry.peer == peer) {
            if !net.links.lock()[self.ready[at].link].hung_up.load(SeqCst) {
                self.ready[at].visited = true;
                self.ready[at].users += 1;
                return Ok(self.ready[at].link);
            }
            failures = self.drop_ready(at).failures;
        } else if let Some(bad) = self.quarantine.get_mut(&peer) {
            bad.wanted = true;
            failures = bad.failures;
            if now < bad.until {
                return Err(quarantined(peer, failures, bad.until - now));
            }
        }
        if self.ready.len() + self.draining.len() >= self.cap && !self.make_room() {
            return Err(Error::Full { peer: peer.to_string(), endpoints_max: self.cap });
        }
        if net.unreachable.lock().contains(&peer) {
            self.fail(peer, failures + 1, now);
            return Err(Error::Connect { peer: peer.to_string(), source: NoAnswer });
        }
        self.quarantine.remove(&peer);
        self.ready.push(Entry { peer, link: next, visited: false, users: 1, failures });
        Ok(next)
    }

    fn release(&mut self, link: usize, worked: bool) {
        if let Some(entry) = self.ready.iter_mut().find(|entry| entry.link == link) {
            entry.users -= 1;
            entry.failures = if worked { 0 } else { entry.failures };
        } else if let Some(users) = self.draining.get_mut(&link) {
            *users -= 1;
            self.draining.retain(|_, users| *users > 0);
        }
    }

    fn broke(&mut self, link: usize, now: u64) {
        if let Some(at) = self.ready.iter().position(|entry| entry.link == link) {
            let entry = self.drop_ready(at);
            self.fail(entry.peer, entry.failures + 1, now);
        }
    }

    /// The pool has probed `probed`: checks whether that was right, and follows it.
    fn tend(&mut self, now: u64, most: usize, net: &Net, probed: &[u8], mut next: usize) {
        let links: Vec<_> = net.links.lock().iter().map(|l| l.hung_up.load(SeqCst)).collect();
        while let Some(at) = self.ready.iter().position(|entry| links.get(entry.link) == Some(&true)) {
            self.drop_ready(at);
        }
        self.quarantine.retain(|_, bad| bad.wanted || now < bad.until + 10_000);
        let due: BTreeMap<u8, u64> = self
            .quarantine
            .iter()
            .filter(|(_, b)| b.wanted && b.until <= now)
            .map(|(p, b)| (*p, b.until))
            .collect();
        let full = |model: &Self| model.ready.len() + model.draining.len() >= model.cap;
        if !full(self) || self.ready.iter().any(|entry| entry.users == 0) {
            assert_eq!(probed.len(), due.len().min(most), "{probed:?} of {due:?}");
        }
        assert!(probed.iter().all(|peer| due.contains_key(peer)), "{probed:?} of {due:?}");
        assert!(probed.is_sorted_by_key(|peer| due[peer]), "{probed:?} of {due:?}");
        for peer in probed {
            if let Ok(link) = self.get(*peer, now, net, next) {
                self.release(link, false);
                next += 1;
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Get(u8),
    /// The n-th guard held, modulo their number.
    Drop(usize),
    Worked(usize),
    Broke(usize),
    HangUp(u8),
    Unreachable(u8),
    Reachable(u8),
    Later(u64),
    Tend,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (peer, guard) = (|| 0u8..6, || 0usize..8);
    let step = prop_oneof![
        10 => peer().prop_map(Step::Get),
        4 => guard().prop_map(Step::Drop),
        4 => guard().prop_map(Step::Worked),
        1 => guard().prop_map(Step::Broke),
        1 => peer().prop_map(Step::HangUp),
        1 => peer().prop_map(Step::Unreachable),
        2 => peer().prop_map(Step::Reachable),
        2 => (0u64..300).prop_map(Step::Later),
        1 => Just(Step::Tend),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #[test]
    fn the_pool_does_what_the_model_does(cap in 1usize..5, steps in steps()) {
        let (net, pool) = pool(cap);
        let mut model = Model { cap, ..Model::default() };
        let (mut held, mut now) = (Vec::new(), 0);
        for step in steps {
            let next = net.links.lock().len();
            net.tried.lock().clear();
            let take = |held: &mut Vec<InUse<_>>, n: usize| {
                (!held.is_empty()).then(|| held.swap_remove(n % held.len()))
            };
            match step {
                Step::Get(peer) => {
                    let expected = model.get(peer, now, &net, next);
                    let found = pool.get(&peer, || now);
                    prop_assert_eq!(found.as_ref().map(|held| held.id).map_err(Clone::clone), expected);
                    held.extend(found);
                }
                Step::Drop(n) => {
                    if let Some(guard) = take(&mut held, n) {
                        model.release(guard.id, false);
                    }
                }
                Step::Worked(n) => {
                    if let Some(guard) = take(&mut held, n) {
                        model.release(guard.id, true);
                        guard.worked();
                    }
                }
                Step::Broke(n) => {
                    if let Some(guard) = take(&mut held, n) {
                        model.broke(guard.id, now);
                        model.release(guard.id, false);
                        guard.broke(now);
                    }
                }
                Step::HangUp(peer) => {
                    for link in net.links.lock().iter().filter(|link| link.peer == peer) {
                        link.hung_up.store(true, SeqCst);
                    }
                }
                Step::Unreachable(peer) => {
                    net.unreachable.lock().insert(peer);
                }
                Step::Reachable(peer) => {
                    net.unreachable.lock().remove(&peer);
                }
                Step::Later(by) => now += by,
                Step::Tend => {
                    pool.tend(|| now, 2);
                    let probed = net.tried.lock().clone();
                    model.tend(now, 2, &net, &probed, next);
                }
            }
            prop_assert_eq!(pool.open(), model.ready.len() + model.draining.len());
            prop_assert_eq!(pool.stats().evicted, model.evicted);
            let links = net.links.lock();
            let open: BTreeSet<_> =
                links.iter().filter(|link| !link.closed.load(SeqCst)).map(|link| link.id).collect();
            prop_assert_eq!(open, model.ready.iter().map(|entry| entry.link).collect::<BTreeSet<_>>());
        }
    }
}
