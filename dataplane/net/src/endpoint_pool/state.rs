//! What the pool knows about each peer, and what follows from each event. Time is an argument, nothing blocks, and
//! whatever must be closed is returned, so that the caller closes it without the lock.

use std::hash::Hash;

use hashbrown::HashMap;

use super::sieve::Sieve;
use super::{PoolConfig, Refused, Stats};

/// Distinguishes the endpoints that one peer has had.
pub(super) type Generation = u64;

enum Peer {
    /// A caller connects; `probe` if the peer failed before, so that others do not wait for it.
    Connecting {
        probe: bool,
        failures: u32,
    },
    /// Slot of its [`Ready`].
    Ready(u32),
    Quarantined(Quarantine),
}

struct Quarantine {
    until_ms: u64,
    /// Failures since the last transfer that worked.
    failures: u32,
    /// Whether anybody asked for the peer since it failed last.
    wanted: bool,
}

struct Ready<P, E> {
    peer: P,
    endpoint: E,
    generation: Generation,
    /// Guards handed out: transfers in flight.
    users: u32,
    failures: u32,
}

/// What to do for a caller that wants a peer.
pub(super) enum Ask<E> {
    Use(E, Generation),
    /// Connect, and report by [`State::connected`] or [`State::failed`].
    Connect,
    /// Another caller is connecting; ask again when that has ended.
    Wait,
    Refused(Refused),
}

pub(super) struct State<P, E> {
    config: PoolConfig,
    peers: HashMap<P, Peer>,
    ready: Sieve<Ready<P, E>>,
    /// How many guards are still held of each dropped endpoint. It counts as open until the last guard is back.
    draining: HashMap<Generation, u32>,
    connecting: usize,
    generations: Generation,
    pub(super) stats: Stats,
}

impl<P: Clone + Eq + Hash, E: Clone> State<P, E> {
    pub(super) fn new(config: PoolConfig) -> Self {
        Self {
            config,
            peers: HashMap::new(),
            ready: Sieve::new(),
            draining: HashMap::new(),
            connecting: 0,
            generations: 0,
            stats: Stats::default(),
        }
    }

    /// Endpoints that take resources now: connected, being connected, or dropped but still in someone's hands.
    pub(super) fn open(&self) -> usize {
        self.ready.len() + self.connecting + self.draining.len()
    }

    /// What the caller must do for `peer`. Endpoints that make room, or were found broken, go to `closed`.
    pub(super) fn ask(
        &mut self,
        peer: &P,
        now_ms: u64,
        broken: impl Fn(&E) -> bool,
        closed: &mut Vec<E>,
    ) -> Ask<E> {
        let (mut probe, mut failures) = (false, 0);
        match self.peers.get_mut(peer) {
            None => {}
            Some(Peer::Connecting { probe: false, .. }) => {
                self.stats.waits += 1;
                return Ask::Wait;
            }
            Some(Peer::Connecting { probe: true, failures }) => {
                self.stats.refused_quarantined += 1;
                return Ask::Refused(Refused::Quarantined { failures: *failures, retry_in_ms: 0 });
            }
            Some(&mut Peer::Ready(slot)) => {
                let ready = self.ready.get(slot);
                if !broken(&ready.endpoint) {
                    ready.users += 1;
                    let answer = Ask::Use(ready.endpoint.clone(), ready.generation);
                    self.ready.touch(slot);
                    return answer;
                }
                // The other side dropped it, perhaps only for lack of room: connect again at once.
                failures = ready.failures;
                self.stats.dropped_by_peer += 1;
                closed.push(self.drop_ready(slot));
            }
            Some(Peer::Quarantined(quarantine)) => {
                quarantine.wanted = true;
                (probe, failures) = (true, quarantine.failures);
                if now_ms < quarantine.until_ms {
                    self.stats.refused_quarantined += 1;
                    let retry_in_ms = quarantine.until_ms - now_ms;
                    return Ask::Refused(Refused::Quarantined { failures, retry_in_ms });
                }
            }
        }
        if self.open() >= self.config.endpoints_max {
            match self.ready.evict(|ready| ready.users == 0) {
                Some(victim) => {
                    self.peers.remove(&victim.peer);
                    self.stats.evicted += 1;
                    closed.push(victim.endpoint);
                }
                None => {
                    self.stats.refused_full += 1;
                    return Ask::Refused(Refused::Full { endpoints_max: self.config.endpoints_max });
                }
            }
        }
        self.connecting += 1;
        self.stats.connects += 1;
        self.peers.insert(peer.clone(), Peer::Connecting { probe, failures });
        Ask::Connect
    }

    /// The caller that connected is the first user.
    pub(super) fn connected(&mut self, peer: &P, endpoint: E) -> Generation {
        self.connecting -= 1;
        self.generations += 1;
        let failures = match self.peers.get(peer) {
            Some(Peer::Connecting { failures, .. }) => *failures,
            _ => 0,
        };
        let generation = self.generations;
        let slot = self.ready.insert(Ready { peer: peer.clone(), endpoint, generation, users: 1, failures });
        self.peers.insert(peer.clone(), Peer::Ready(slot));
        generation
    }

    pub(super) fn failed(&mut self, peer: &P, now_ms: u64) {
        self.connecting -= 1;
        self.stats.connect_failures += 1;
        let failures = match self.peers.get(peer) {
            Some(Peer::Connecting { failures, .. }) => *failures,
            _ => 0,
        };
        self.quarantine(peer, failures + 1, now_ms);
    }

    /// A guard came back. `worked`: its transfer reached the peer and returned.
    pub(super) fn release(&mut self, peer: &P, generation: Generation, worked: bool) {
        if let Some(slot) = self.current(peer, generation) {
            let ready = self.ready.get(slot);
            ready.users -= 1;
            if worked {
                ready.failures = 0;
            }
        } else if let Some(users) = self.draining.get_mut(&generation) {
            *users -= 1;
            if *users == 0 {
                self.draining.remove(&generation);
            }
        }
    }

    /// A transfer found the endpoint broken; its guard is still to be released. Returns the endpoint to close, unless
    /// another guard said so before or the peer has a newer endpoint.
    pub(super) fn broke(&mut self, peer: &P, generation: Generation, now_ms: u64) -> Option<E> {
        let slot = self.current(peer, generation)?;
        let failures = self.ready.get(slot).failures + 1;
        let endpoint = self.drop_ready(slot);
        self.stats.broken += 1;
        self.quarantine(peer, failures, now_ms);
        Some(endpoint)
    }

    /// Takes out endpoints that the other side dropped, and forgets quarantined peers that nobody asks for. Returns
    /// what to close, and up to `probes_max` peers whose quarantine is over and that somebody wants.
    pub(super) fn tend(
        &mut self,
        now_ms: u64,
        probes_max: usize,
        broken: impl Fn(&E) -> bool,
    ) -> (Vec<E>, Vec<P>) {
        let gone: Vec<u32> =
            self.ready.iter().filter(|(_, ready)| broken(&ready.endpoint)).map(|(slot, _)| slot).collect();
        self.stats.dropped_by_peer += gone.len() as u64;
        let closed = gone.into_iter().map(|slot| self.drop_ready(slot)).collect();

        let forget_after_ms = self.config.backoff_max.as_millis() as u64;
        self.peers.retain(|_, peer| match peer {
            Peer::Quarantined(q) => q.wanted || now_ms < q.until_ms.saturating_add(forget_after_ms),
            _ => true,
        });
        let due = |peer: &Peer| match peer {
            Peer::Quarantined(q) if q.wanted && q.until_ms <= now_ms => Some(q.until_ms),
            _ => None,
        };
        let mut probes: Vec<(u64, &P)> =
            self.peers.iter().filter_map(|(peer, state)| Some((due(state)?, peer))).collect();
        probes.sort_by_key(|(until_ms, _)| *until_ms); // the one that has waited longest comes first
        (closed, probes.into_iter().take(probes_max).map(|(_, peer)| peer.clone()).collect())
    }

    /// All endpoints, for the end of the pool.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = &E> {
        self.ready.iter().map(|(_, ready)| &ready.endpoint)
    }

    fn current(&mut self, peer: &P, generation: Generation) -> Option<u32> {
        match self.peers.get(peer) {
            Some(&Peer::Ready(slot)) if self.ready.get(slot).generation == generation => Some(slot),
            _ => None,
        }
    }

    fn drop_ready(&mut self, slot: u32) -> E {
        let ready = self.ready.remove(slot);
        self.peers.remove(&ready.peer);
        if ready.users > 0 {
            self.draining.insert(ready.generation, ready.users);
        }
        ready.endpoint
    }

    fn quarantine(&mut self, peer: &P, failures: u32, now_ms: u64) {
        let quarantined = |peer: &Peer| matches!(peer, Peer::Quarantined(_));
        if self.peers.values().filter(|peer| quarantined(peer)).count() >= self.config.quarantine_max {
            self.forget_one();
        }
        let until_ms = now_ms.saturating_add(self.config.backoff_ms(failures));
        self.peers.insert(peer.clone(), Peer::Quarantined(Quarantine { until_ms, failures, wanted: false }));
    }

    /// Forgets the peer whose quarantine ends first: its next user learns at once whether it is back.
    fn forget_one(&mut self) {
        let ends = |peer: &Peer| match peer {
            Peer::Quarantined(quarantine) => Some(quarantine.until_ms),
            _ => None,
        };
        let first = self.peers.iter().filter_map(|(peer, state)| Some((ends(state)?, peer)));
        if let Some(peer) = first.min_by_key(|(until_ms, _)| *until_ms).map(|(_, peer)| peer.clone()) {
            self.peers.remove(&peer);
        }
    }
}
