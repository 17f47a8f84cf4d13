//! In which order locks are taken, and how long some are waited for.
//!
//! If one thread takes B while it holds A, and another, at whatever time, A while it holds B, both may wait for each other for ever. That
//! they do so takes a moment that few runs have; that both orders exist shows as soon as each was taken once. So a run ends at
//! the first circle of such orders, however many locks are in it.
//!
//! Locks that are made at the same place of the code are one kind. Of one kind a thread may hold several, in an order that this does
//! not look at. A lock that is only tried is not waited for.
//!
//! A turn takes no time, so whoever is waited for has slept, or asked a disk or a peer for something, while it had the lock. Of most locks that is as it
//! should be. Those of what hosts say to each other stand between a host and its heartbeats: a run ends when one of them is waited for for long.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

use crate::schedule;
use crate::time::Duration;
use crate::world;

/// Where the locks are made that nobody keeps for long.
const OF_HEARTBEATS: [&str; 2] = ["cluster/src/copies.rs", "cluster/src/table.rs"];
/// A host that has said nothing for 850 ms counts as lost.
const LONG: Duration = Duration::from_millis(500);

/// A place of the code: where a lock is made, which is its kind, or where it is taken.
pub(crate) type Place = &'static Location<'static>;

/// A lock that the calling thread has.
struct Held {
    lock: usize,
    kind: Place,
    taken: Place,
}

/// Where one kind was taken, and where another while that was held.
#[derive(Clone, Copy)]
struct Step {
    first: Place,
    then: Place,
}

/// Under each kind those that were taken.
type Orders = BTreeMap<Place, BTreeMap<Place, Step>>;

/// What each thread of the world has.
static HELD: Mutex<Vec<Vec<Held>>> = Mutex::new(Vec::new());
static ORDERS: Mutex<Orders> = Mutex::new(Orders::new());

/// The calling thread is about to wait for a lock.
pub(crate) fn wants(kind: Place, at: Place) {
    let circle = held(|held| {
        let under = held.iter().filter(|held| held.kind != kind);
        let mut circles = under.filter_map(|held| note(held, kind, at));
        circles.next()
    });
    if let Some(circle) = circle.flatten() {
        schedule::world().end(&circle);
    }
}

/// The calling thread has a lock.
pub(crate) fn has(lock: usize, kind: Place, taken: Place) {
    held(|held| held.push(Held { lock, kind, taken }));
}

/// The calling thread has let go of a lock.
pub(crate) fn lets_go(lock: usize) {
    held(|held| {
        if let Some(at) = held.iter().rposition(|held| held.lock == lock) {
            held.remove(at);
        }
    });
}

/// When a thread began to wait for a lock, and how long its machine had stood still by then.
pub(crate) struct Wait {
    begun: Duration,
    still: Duration,
}

impl Wait {
    pub(crate) fn begin() -> Self {
        Self { begun: now(), still: world::stood_still() }
    }
}

/// To look at it takes no time.
fn now() -> Duration {
    Duration::from_nanos(schedule::now())
}

/// The calling thread had to wait for a lock that it has now.
pub(crate) fn waited(kind: Place, at: Place, wait: Wait) {
    let waited = (now() - wait.begun).saturating_sub(world::stood_still() - wait.still);
    if waited > LONG && OF_HEARTBEATS.iter().any(|file| kind.file().ends_with(file)) {
        let [kind, at] = [kind, at].map(said_of);
        schedule::world().end(&format!("for the lock made at {kind} a thread waits {waited:?}, at {at}"));
    }
}

/// What the calling thread has; nothing is known of one outside of the world.
fn held<T>(look: impl FnOnce(&mut Vec<Held>) -> T) -> Option<T> {
    let me = schedule::me()?;
    let mut all = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if all.len() <= me {
        all.resize_with(me + 1, Vec::new);
    }
    Some(look(&mut all[me]))
}

/// Notes that `kind` is taken under what is held. Returns what is said of the circle that this closes.
fn note(held: &Held, kind: Place, at: Place) -> Option<String> {
    let mut orders = ORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    let step = Step { first: held.taken, then: at };
    let under = orders.entry(held.kind).or_default();
    if under.contains_key(kind) {
        return None;
    }
    under.insert(kind, step);
    let back = way(&orders, kind, held.kind)?;
    let mut said = String::from("locks are taken in a circle");
    for (from, to) in [held.kind, kind].iter().chain(&back).zip([kind].iter().chain(&back)) {
        let Step { first, then } = orders[from][to];
        let [from, to, first, then] = [from, to, first, then].map(said_of);
        let _ = write!(said, "; the one made at {from}, then the one made at {to}: at {first}, then {then}");
    }
    Some(said)
}

/// A file that is compiled in another folder than its own is named by its own.
fn said_of(place: Place) -> String {
    let file = place.file().rsplit("../").next().unwrap_or_default();
    format!("{file}:{}", place.line())
}

/// The kinds after `from` up to `to`, each taken under the one before it.
fn way(orders: &Orders, from: Place, to: Place) -> Option<Vec<Place>> {
    let mut before: BTreeMap<Place, Place> = BTreeMap::new();
    let mut next = vec![from];
    while let Some(kind) = next.pop() {
        if kind == to {
            let steps = std::iter::successors(Some(to), |kind| before.get(kind).copied());
            let mut way: Vec<Place> = steps.take_while(|kind| *kind != from).collect();
            way.reverse();
            return Some(way);
        }
        for &under in orders.get(kind).into_iter().flat_map(BTreeMap::keys) {
            if under != from && !before.contains_key(under) {
                before.insert(under, kind);
                next.push(under);
            }
        }
    }
    None
}
