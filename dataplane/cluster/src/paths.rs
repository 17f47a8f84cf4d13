//! The ways to a peer: pairs of a rail here and one there, and the order in which they are used.
//!
//! A kind that this host prefers goes before others. Within a kind, pairs whose NICs are preferred for the memory on
//! both sides go first, then those with one end, then with both ends elsewhere. Of equally good pairs as many are used
//! at once as bring another NIC in; the rest are for when those fail. Where the NIC of a rail is not known, it counts as
//! preferred.

use super::message::Welcome;
use super::rails::{Kind, Rail};
use kvasir_memory::region::Location;
use kvasir_net::topology::matrix::Matrix;
use kvasir_net::transfer::{Order, RailMetrics};

/// The most pairs of one kind to one peer; each takes a connection.
const PAIRS_MAX: usize = 16;

/// A rail here and the address of one there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    /// Its index among this host's rails.
    pub(super) rail: usize,
    pub(super) kind: Kind,
    pub(super) address: String,
    pub(super) local_nic: String,
    pub(super) remote_nic: String,
    /// The rank of its kind among those that this host has; 0 is the best.
    preference: usize,
    /// How many places the rails are apart on their hosts: clusters wire NICs of one position to the same switch.
    apart: usize,
}

/// The most rails of a peer that are considered.
const RAILS_MAX: usize = 64;

/// What a rail to a peer is good for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RailState {
    /// It carries what moves.
    InUse,
    /// It works, and would carry something if those in use failed.
    Standby,
    /// It cannot be connected; it is tried again.
    Down,
    /// Nothing has moved lately, so it is not connected.
    Idle,
}

impl RailState {
    pub const fn name(self) -> &'static str {
        match self {
            Self::InUse => "in use",
            Self::Standby => "standby",
            Self::Down => "down",
            Self::Idle => "idle",
        }
    }
}

/// A rail to a peer at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailView {
    pub kind: Kind,
    /// NICs on both sides; empty where they are not known.
    pub local_nic: String,
    pub remote_nic: String,
    pub address: String,
    pub state: RailState,
    /// Moved over it in either direction because this host asked for it, since the host started.
    pub bytes: u64,
    pub failures: u64,
}

/// Pairs to a peer that said this of itself; the best kind first, pairs on one position first.
pub(super) fn pairs(own: &[Rail], nics: &[String], machine: &str, welcome: &Welcome) -> Vec<Pair> {
    let mut kinds: Vec<Kind> = Vec::new();
    own.iter().for_each(|rail| {
        if !kinds.contains(&rail.kind) {
            kinds.push(rail.kind)
        }
    });
    let here: Vec<(Kind, String)> =
        own.iter().zip(nics).map(|(rail, nic)| (rail.kind, nic.clone())).collect();
    of_kinds(&kinds, &here, machine, welcome)
}

fn of_kinds(kinds: &[Kind], here: &[(Kind, String)], machine: &str, welcome: &Welcome) -> Vec<Pair> {
    // Shared memory reaches no further than the machine. On it, nothing beats it.
    let same = !machine.is_empty() && machine == welcome.machine;
    let mut all = Vec::new();
    for (preference, &kind) in kinds.iter().enumerate() {
        if kind == Kind::Shm && !same {
            continue;
        }
        let theirs: Vec<usize> =
            (0..welcome.rails.len().min(RAILS_MAX)).filter(|&n| welcome.rails[n].0 == kind.name()).collect();
        let ours: Vec<usize> = (0..here.len()).filter(|&n| here[n].0 == kind).collect();
        let most = ours.len().max(theirs.len());
        let mut pairs = Vec::new();
        for (i, &rail) in ours.iter().enumerate() {
            for (j, &there) in theirs.iter().enumerate() {
                pairs.push(Pair {
                    rail,
                    kind,
                    address: welcome.rails[there].1.clone(),
                    local_nic: here[rail].1.clone(),
                    remote_nic: welcome.nics.get(there).cloned().unwrap_or_default(),
                    preference: if kind == Kind::Shm { 0 } else { preference + 1 },
                    apart: (j + most - i) % most,
                });
            }
        }
        pairs.sort_by_key(|pair: &Pair| (pair.apart, pair.rail));
        pairs.truncate(PAIRS_MAX);
        all.extend(pairs);
    }
    all.sort_by_key(|pair| pair.preference);
    all
}

/// The order in which the pairs carry what moves between memory at `from` here and at `to` there.
pub(super) fn order(pairs: &[Pair], own: &Matrix, theirs: &Matrix, from: Location, to: Location) -> Order {
    Order::of_ranks(&ranks(pairs, own, theirs, from, to))
}

/// Kind, cost of the NICs, and whether it only repeats NICs of better pairs.
type Rank = (usize, u8, bool);

fn ranks(pairs: &[Pair], own: &Matrix, theirs: &Matrix, from: Location, to: Location) -> Vec<Rank> {
    /// The cost of a NIC that the matrix does not want for this memory: it comes after all others.
    const UNWANTED: u8 = 3;
    let cost = |matrix: &Matrix, location, nic: &str| {
        if nic.is_empty() { 0 } else { matrix.nic_cost(location, nic).unwrap_or(UNWANTED) }
    };
    let cost = |pair: &Pair| cost(own, from, &pair.local_nic) + cost(theirs, to, &pair.remote_nic);
    let mut by_cost: Vec<usize> = (0..pairs.len()).collect();
    by_cost.sort_by_key(|&n| (pairs[n].preference, cost(&pairs[n]), pairs[n].apart, pairs[n].rail));
    let mut ranks = vec![(0, 0, false); pairs.len()];
    let mut taken: Vec<&Pair> = Vec::new();
    for n in by_cost {
        let pair = &pairs[n];
        let known =
            |same: &dyn Fn(&Pair) -> bool| taken.iter().any(|other| other.kind == pair.kind && same(other));
        let repeats =
            known(&|other| other.rail == pair.rail) && known(&|other| other.address == pair.address);
        ranks[n] = (pair.preference, cost(pair), repeats);
        taken.push(pair);
    }
    ranks
}

/// The rails to a peer, with what they have moved.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) pairs: Vec<Pair>,
    /// Bytes of each pair, over connections that are gone.
    moved: Vec<(u64, u64)>,
}

impl Tally {
    /// Sets how the peer is reached from now on. Returns whether anything is different.
    pub(super) fn set(&mut self, pairs: Vec<Pair>) -> bool {
        if pairs == self.pairs {
            return false;
        }
        let before = |pair: &Pair| {
            self.pairs.iter().position(|other| (other.rail, &other.address) == (pair.rail, &pair.address))
        };
        self.moved = pairs.iter().map(|pair| before(pair).map_or((0, 0), |n| self.moved[n])).collect();
        self.pairs = pairs;
        true
    }

    /// Notes that connections end; `metrics` are those of each pair.
    pub(super) fn add(&mut self, metrics: &[RailMetrics]) {
        for (moved, rail) in self.moved.iter_mut().zip(metrics) {
            moved.0 += rail.delivered_bytes;
            moved.1 += rail.failures;
        }
    }

    /// The rails as they are now; `metrics` are those of the pairs if they are connected, `order` that in which they are used.
    pub(super) fn view(&self, metrics: Option<&[RailMetrics]>, order: Order) -> Vec<RailView> {
        let metric = |n: usize| metrics.and_then(|metrics| metrics.get(n));
        let usable = |n: usize| metric(n).is_some_and(|rail| rail.usable);
        let first = order.first(self.pairs.len(), usable);
        let state = |n: usize| match metric(n) {
            None => RailState::Idle,
            Some(_) if first(n) => RailState::InUse,
            Some(rail) if rail.usable => RailState::Standby,
            Some(_) => RailState::Down,
        };
        let view = |(n, pair): (usize, &Pair)| RailView {
            kind: pair.kind,
            local_nic: pair.local_nic.clone(),
            remote_nic: pair.remote_nic.clone(),
            address: pair.address.clone(),
            state: state(n),
            bytes: self.moved[n].0 + metric(n).map_or(0, |rail| rail.delivered_bytes),
            failures: self.moved[n].1 + metric(n).map_or(0, |rail| rail.failures),
        };
        self.pairs.iter().enumerate().map(view).collect()
    }
}

#[cfg(test)]
mod tests;
