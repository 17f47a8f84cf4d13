//! The very source files of the data plane, on loom's locks and atomics instead of the standard library's. Each model
//! runs once for every way in which its threads can take turns with at most three interruptions; it fails if one of
//! them waits for ever.

#[path = "../../dataplane/store/src/tiering/budget.rs"]
#[allow(unused_imports)] // its own unit tests have no harness here
mod budget;
#[path = "../../dataplane/nvme/src/inbox.rs"]
mod inbox;
#[path = "../../dataplane/store/src/index.rs"]
#[expect(clippy::reversed_empty_ranges, reason = "`TRIES`, below, is 0")]
#[expect(dead_code, reason = "no model asks how much memory it takes")]
mod index;

/// What those files use from `std`; in the data plane `crate::sync` is `std` itself.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

    /// A second attempt is like the first.
    pub(crate) const TRIES: usize = 0;

    pub(crate) fn zeroed(len: usize) -> Box<[atomic::AtomicU64]> {
        (0..len).map(|_| atomic::AtomicU64::new(0)).collect()
    }

    pub(crate) fn zeroed_halves(len: usize) -> Box<[atomic::AtomicU32]> {
        (0..len).map(|_| atomic::AtomicU32::new(0)).collect()
    }
}

use budget::Budget;
use inbox::Inbox;
use index::Index;
use kvasir_protocol::block::BlockKey;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::collections::VecDeque;

fn main() {
    let models: [(&str, fn()); 5] = [
        ("an engine that goes to sleep misses no command", no_command_is_missed),
        ("an engine that is awake is not woken", an_awake_engine_is_left_alone),
        ("a budget is never exceeded and all of it comes back", a_budget_holds),
        ("a share holds beside what takes from the whole", a_share_holds),
        ("a block that takes another's slot is not taken for it", a_slot_changes_hands),
    ];
    for (name, model) in models {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
        println!("model {name} ... ok");
    }
}

/// Like an eventfd: set by the thread that wakes, taken by the thread that waits.
#[derive(Default)]
struct Bell {
    rung: Mutex<u32>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() += 1;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while *rung == 0 {
            rung = self.changed.wait(rung).unwrap();
        }
        *rung = 0;
    }
}

fn no_command_is_missed() {
    let shared = Arc::new((Inbox::default(), Bell::default()));
    let senders: Vec<_> = (0..2)
        .map(|n| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.0.send(n, || shared.1.ring()))
        })
        .collect();
    let mut taken = VecDeque::new();
    while taken.len() < 2 {
        shared.0.take(&mut taken);
        if taken.len() < 2 && shared.0.may_sleep() {
            shared.1.wait();
        }
    }
    senders.into_iter().for_each(|sender| sender.join().unwrap());
    taken.make_contiguous().sort_unstable();
    assert_eq!(taken, [0, 1]);
}

fn an_awake_engine_is_left_alone() {
    let inbox: Arc<Inbox<u32>> = Arc::default();
    let sender = {
        let inbox = Arc::clone(&inbox);
        thread::spawn(move || inbox.send(7, || panic!("it does not sleep")))
    };
    let mut taken = VecDeque::new();
    while taken.is_empty() {
        inbox.take(&mut taken);
        thread::yield_now();
    }
    sender.join().unwrap();
}

fn a_budget_holds() {
    let budget = Budget::new(3);
    let takers: Vec<_> = (0..2)
        .map(|_| {
            let budget = std::sync::Arc::clone(&budget);
            thread::spawn(move || {
                let permit = budget.take(2);
                assert!(budget.used() <= 3);
                drop(permit);
            })
        })
        .collect();
    if let Some(permit) = budget.take(1) {
        assert!(budget.used() <= 3);
        drop(permit);
    }
    takers.into_iter().for_each(|taker| taker.join().unwrap());
    assert_eq!(budget.used(), 0);
}

fn a_share_holds() {
    let whole = Budget::new(3);
    let share = whole.share(2);
    let takers: Vec<_> = [(&share, 2), (&whole, 2)]
        .map(|(budget, bytes)| (std::sync::Arc::clone(budget), bytes))
        .into_iter()
        .map(|(budget, bytes)| thread::spawn(move || drop(budget.take(bytes))))
        .collect();
    if let Some(permit) = share.take(1) {
        assert!(share.used() <= 2 && whole.used() <= 3);
        drop(permit);
    }
    takers.into_iter().for_each(|taker| taker.join().unwrap());
    assert_eq!((share.used(), whole.used()), (0, 0));
}

/// A block that goes, and one of the same hash that takes its slot and its place and is not shown.
fn a_slot_changes_hands() {
    let index = std::sync::Arc::new(Index::new(1));
    const HASH: u64 = 5;
    let [gone, comes] = [BlockKey(1), BlockKey(2 << 64 | 2)];
    index.insert(HASH, gone, 0);
    index.show(HASH, 0);
    let reader = {
        let index = std::sync::Arc::clone(&index);
        thread::spawn(move || {
            if let Ok(found) = index.shown(HASH, comes) {
                assert_eq!(found, None, "it is not shown yet");
            }
        })
    };
    index.remove(HASH, 0);
    index.insert(HASH, comes, 0);
    reader.join().unwrap();
}
