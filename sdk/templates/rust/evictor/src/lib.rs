//! Evicts the block used longest ago; within one prompt the deepest block first.

use kvasir_policy::evictor::{EventKind, Events, Victim};
use kvasir_policy::list::Lists;
use kvasir_policy::{Description, Evictor};

#[derive(Default)]
pub struct Lru {
    /// Resident blocks, the one used longest ago first; pinned ones are held outside.
    order: Lists,
    parent: Vec<u32>,
}

impl Lru {
    /// To the end; but if the parent stands in the order, in front of it, so that leaves go first.
    fn touch(&mut self, slot: u32) {
        let parent = self.parent[slot as usize];
        if !self.order.insert_before(parent, slot) {
            self.order.push_back(0, slot);
        }
    }
}

impl Evictor for Lru {
    fn describe(&self) -> Description {
        Description::evictor("my-lru", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self { order: Lists::new(slots, 1), parent: vec![0; slots as usize] };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            let slot = event.slot;
            let Some(parent) = self.parent.get_mut(slot as usize) else { continue };
            if event.kind == EventKind::Insert {
                *parent = event.parent_or_uses;
            }
            match event.kind {
                EventKind::Insert | EventKind::Unpin => {
                    self.order.remove(slot);
                    self.touch(slot);
                }
                EventKind::Hit | EventKind::Keep => self.touch(slot),
                EventKind::Remove => self.order.remove(slot),
                EventKind::Pin => self.order.hold(slot),
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        victims.extend((0..want).map_while(|_| self.order.pop_front(0)).map(Victim::new));
    }
}

kvasir_policy::export_evictor!(Lru);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::evictor::Kept;

    const NO_PARENT: u32 = u32::MAX;
    const WORDS: u32 = 10; // one more than documented, as a later host may send

    fn event(lru: &mut Kept<Lru>, kind: u32, slot: u32, parent: u32) {
        lru.on_events(0, &[kind, slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77]);
    }

    fn victims(lru: &mut Kept<Lru>, want: u32) -> Vec<u32> {
        lru.select_victims(0, want).collect()
    }

    #[test]
    fn the_block_used_longest_ago_goes_first_and_leaves_before_parents() {
        let [insert, hit, remove, keep, pin, unpin] = [1, 2, 3, 4, 5, 6];
        let lru = &mut Kept::new(Box::<Lru>::default());
        lru.open(&[4, WORDS, 7]);
        assert_eq!(victims(lru, 1), []);
        event(lru, insert, 0, NO_PARENT); // a prompt of two blocks, 0 and 1, and another, 2
        event(lru, insert, 1, 0);
        event(lru, insert, 2, NO_PARENT);
        event(lru, hit, 0, 1);
        event(lru, hit, 1, 1);
        assert_eq!(victims(lru, 1), [2]);
        event(lru, keep, 2, 0);
        assert_eq!(victims(lru, 1), [1]);
        event(lru, pin, 0, 0);
        event(lru, hit, 0, 1);
        assert_eq!(victims(lru, 2), [2]);
        event(lru, unpin, 0, 0);
        event(lru, 99, 3, 0); // a kind of a later host
        event(lru, insert, 3, NO_PARENT);
        event(lru, remove, 3, 0);
        assert_eq!(victims(lru, 2), [0]);
    }
}
