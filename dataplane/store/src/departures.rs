//! Which blocks have left this host lately, for clients that remember what it holds.
//!
//! A tier says of each block that it lets go ([`Departures::note`]): one push into a bounded ring. The block may be in another
//! tier still, or come back, so a reader asks the tiers at that time
//! ([`Tiering::departed`](super::tiering::Tiering::departed)). A block that goes down a tier is there before it leaves the one
//! above, and each tier notes when its own index no longer has it, so that the last of the notes is never passed over.
//!
//! Every note has a position, and a reader says how far it has read. Positions begin at a random number in each run of a
//! host, so that a position of another run is recognised.

use std::collections::VecDeque;

use kvasir_protocol::block::BlockKey;
use parking_lot::Mutex;

/// Notes that are kept: 1 MiB of keys. A reader that is further behind has lost some.
pub const NOTES_MAX: usize = 1 << 16;

/// The notes of one host.
pub struct Departures(Mutex<Notes>);

struct Notes {
    keys: VecDeque<BlockKey>,
    /// The position behind the last one.
    next: u64,
}

/// Some of the notes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Where to go on.
    pub next: u64,
    /// What was to be read first is gone, or is of another run: nothing that is remembered of the host's blocks holds any more.
    pub lost: bool,
    pub keys: Vec<BlockKey>,
}

impl Default for Departures {
    fn default() -> Self {
        // It begins far from both ends of the range.
        let next = kvasir_os::random::number() >> 1 | 1 << 32;
        Self(Mutex::new(Notes { keys: VecDeque::new(), next }))
    }
}

impl Departures {
    /// Notes that a tier no longer has this block.
    pub fn note(&self, key: BlockKey) {
        let mut notes = self.0.lock();
        if notes.keys.len() == NOTES_MAX {
            notes.keys.pop_front();
        }
        notes.keys.push_back(key);
        notes.next += 1;
    }

    /// The notes from position `since` on, `max` at most. At the end there are none, and `next` is `since`.
    pub fn page(&self, since: u64, max: usize) -> Page {
        let notes = self.0.lock();
        let first = notes.next - notes.keys.len() as u64;
        if !(first..=notes.next).contains(&since) {
            return Page { next: notes.next, lost: true, keys: Vec::new() };
        }
        let keys: Vec<BlockKey> =
            notes.keys.iter().skip((since - first) as usize).take(max).copied().collect();
        Page { next: since + keys.len() as u64, lost: false, keys }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_in_order_until_they_are_lost() {
        let departures = Departures::default();
        let start = departures.page(0, 10);
        assert!(start.lost && start.keys.is_empty(), "a reader that knows no position has read nothing");
        let page = |since: u64, max| {
            let Page { next, lost, keys } = departures.page(start.next + since, max);
            (next.wrapping_sub(start.next), lost, keys.iter().map(|key| key.0).collect::<Vec<_>>())
        };
        assert_eq!(page(0, 10), (0, false, vec![]));
        (0..5).for_each(|n| departures.note(BlockKey(n)));
        assert_eq!(page(0, 3), (3, false, vec![0, 1, 2]));
        assert_eq!(page(3, 3), (5, false, vec![3, 4]));
        assert_eq!(page(5, 3), (5, false, vec![]));
        assert_eq!(page(6, 3), (5, true, vec![]), "it was never told of that position");

        let max = NOTES_MAX as u64;
        (5..max + 3).for_each(|n| departures.note(BlockKey(n.into())));
        assert_eq!(page(3, 1), (4, false, vec![3]), "the oldest that is kept");
        assert_eq!(page(2, 1), (max + 3, true, vec![]));
        assert_ne!(Departures::default().page(0, 1).next, start.next, "another run");
    }
}
