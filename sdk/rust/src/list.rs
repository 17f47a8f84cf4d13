//! Linked lists over block slots, for evictors that keep blocks in order.
//!
//! Links live in one array indexed by slot, so every operation is O(1) and allocates nothing after
//! [`Lists::new`]. Slots beyond the array are ignored: a policy must survive any event.

use crate::evictor::{Event, EventKind, NO_SLOT};

/// `next` of a slot in no list.
const UNLINKED: u32 = u32::MAX;
/// `next` of a slot that may not be linked until it is released.
const HELD: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

const FREE: Link = Link { prev: UNLINKED, next: UNLINKED };

/// Several doubly linked lists; a slot is in at most one of them.
///
/// The front is the end that evictors take victims from. The sentinel of list `l` is link
/// `slots + l`, so no operation has a special case for an empty list.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    links: Vec<Link>,
    slots: u32,
    len: u32,
}

impl Lists {
    /// `lists` empty lists over slots below `slots`.
    pub fn new(slots: u32, lists: u32) -> Self {
        let mut links = vec![FREE; slots as usize];
        links.extend((slots..slots + lists).map(|sentinel| Link { prev: sentinel, next: sentinel }));
        Self { links, slots, len: 0 }
    }

    /// Number of slots in all lists together.
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `slot` is in a list.
    pub fn contains(&self, slot: u32) -> bool {
        slot < self.slots && self.links[slot as usize].next < HELD
    }

    /// Makes `slot` the last of `list`, wherever it was before. A held slot stays out.
    pub fn push_back(&mut self, list: u32, slot: u32) {
        self.link_before(self.slots + list, slot);
    }

    /// Makes `slot` the first of `list`, wherever it was before. A held slot stays out.
    pub fn push_front(&mut self, list: u32, slot: u32) {
        let first = self.links[(self.slots + list) as usize].next;
        if first != slot {
            self.link_before(first, slot);
        }
    }

    /// Moves `slot` directly in front of `at`. Returns false if `at` is in no list.
    pub fn insert_before(&mut self, at: u32, slot: u32) -> bool {
        if !self.contains(at) {
            return false;
        }
        if at != slot {
            self.link_before(at, slot);
        }
        true
    }

    pub fn front(&self, list: u32) -> Option<u32> {
        self.slot(self.links.get((self.slots + list) as usize)?.next)
    }

    /// The slot behind `slot` in its list.
    pub fn next(&self, slot: u32) -> Option<u32> {
        if self.contains(slot) { self.slot(self.links[slot as usize].next) } else { None }
    }

    pub fn pop_front(&mut self, list: u32) -> Option<u32> {
        let slot = self.front(list)?;
        self.unlink(slot);
        Some(slot)
    }

    /// Takes `slot` out of its list, and ends a hold.
    pub fn remove(&mut self, slot: u32) {
        self.unlink(slot);
        if slot < self.slots {
            self.links[slot as usize] = FREE;
        }
    }

    /// Takes `slot` out of its list and keeps it out until `remove`: a pinned block.
    pub fn hold(&mut self, slot: u32) {
        self.unlink(slot);
        if slot < self.slots {
            self.links[slot as usize].next = HELD;
        }
    }

    fn slot(&self, link: u32) -> Option<u32> {
        (link < self.slots).then_some(link)
    }

    fn link_before(&mut self, at: u32, slot: u32) {
        if slot >= self.slots || self.links[slot as usize].next == HELD {
            return;
        }
        self.unlink(slot);
        let prev = self.links[at as usize].prev;
        self.links[slot as usize] = Link { prev, next: at };
        self.links[prev as usize].next = slot;
        self.links[at as usize].prev = slot;
        self.len += 1;
    }

    fn unlink(&mut self, slot: u32) {
        if self.contains(slot) {
            let Link { prev, next } = self.links[slot as usize];
            self.links[prev as usize].next = next;
            self.links[next as usize].prev = prev;
            self.links[slot as usize] = FREE;
            self.len -= 1;
        }
    }
}

/// Follows one request through its blocks, so that a list can keep deeper blocks in front of
/// shallower ones although their events come shallowest first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Walk {
    /// Slot, depth, time and class of the block touched last.
    last: Option<(u32, u32, u64, u16)>,
}

impl Walk {
    /// The block directly in front of which `event`'s block must be: its parent if the event
    /// names it, else the block of the same request touched just before.
    pub fn shallower(&mut self, event: &Event) -> Option<u32> {
        let last = self.last.replace((event.slot, event.depth, event.time_ms, event.class));
        if event.kind == EventKind::Insert {
            return (event.parent_or_uses != NO_SLOT).then_some(event.parent_or_uses);
        }
        last.filter(|&(_, depth, time_ms, class)| {
            depth < event.depth && time_ms == event.time_ms && class == event.class
        })
        .map(|(slot, ..)| slot)
    }
}

/// Which blocks have resident children, for evictors that must check before they take a block.
#[derive(Clone, Debug, Default)]
pub struct Family {
    members: Vec<Member>,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    parent: u32,
    /// `born` of the parent when this block came: its slot may hold another block by now.
    parent_born: u32,
    born: u32,
    children: u32,
    present: bool,
}

impl Family {
    pub fn new(slots: u32) -> Self {
        let member = Member { parent: NO_SLOT, parent_born: 0, born: 0, children: 0, present: false };
        Self { members: vec![member; slots as usize] }
    }

    /// A new block in `slot`.
    pub fn insert(&mut self, slot: u32, parent: u32) {
        self.leave(slot);
        let parent_born = self.members.get(parent as usize).map_or(0, |p| p.born);
        let Some(member) = self.members.get_mut(slot as usize) else { return };
        member.born = member.born.wrapping_add(1);
        (member.parent, member.parent_born, member.children) = (parent, parent_born, 0);
        self.stay(slot);
    }

    /// The block leaves. It may come back with `stay` until another `insert` names its slot.
    /// Returns its parent if that has no other children.
    pub fn leave(&mut self, slot: u32) -> Option<u32> {
        let parent = self.set_present(slot, false)?;
        (!self.has_children(parent)).then_some(parent)
    }

    /// The block that left is back. Returns its parent, which has children now, unless it was there all along.
    pub fn stay(&mut self, slot: u32) -> Option<u32> {
        self.set_present(slot, true)
    }

    pub fn has_children(&self, slot: u32) -> bool {
        self.members.get(slot as usize).is_some_and(|m| m.children > 0)
    }

    /// Returns the parent if its count changed.
    fn set_present(&mut self, slot: u32, present: bool) -> Option<u32> {
        let member = self.members.get_mut(slot as usize).filter(|m| m.present != present)?;
        member.present = present;
        let (slot, born) = (member.parent, member.parent_born);
        let parent = self.members.get_mut(slot as usize).filter(|p| p.born == born)?;
        parent.children = if present { parent.children + 1 } else { parent.children.saturating_sub(1) };
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lists: &Lists, list: u32) -> Vec<u32> {
        std::iter::successors(lists.front(list), |&slot| lists.next(slot)).collect()
    }

    #[test]
    fn order_follows_every_operation() {
        let mut lists = Lists::new(6, 2);
        for slot in 0..4 {
            lists.push_back(0, slot);
        }
        lists.push_back(0, 1); // moves
        lists.push_front(1, 3); // changes list
        assert!(lists.insert_before(2, 5));
        assert!(!lists.insert_before(4, 0), "4 stands nowhere");
        assert!(lists.insert_before(5, 5));
        assert_eq!((order(&lists, 0), order(&lists, 1)), (vec![0, 5, 2, 1], vec![3]));
        assert_eq!((lists.pop_front(0), lists.len()), (Some(0), 4));
        lists.push_back(0, 6); // beyond the slots: ignored
        lists.push_front(0, 5);
        lists.push_front(0, 2);
        assert_eq!(order(&lists, 0), [2, 5, 1]);
    }

    #[test]
    fn held_slots_stay_out() {
        let mut lists = Lists::new(2, 1);
        lists.push_back(0, 0);
        lists.hold(0);
        lists.push_back(0, 0);
        assert_eq!((lists.front(0), lists.contains(0), lists.len()), (None, false, 0));
        lists.remove(0);
        lists.push_back(0, 0);
        assert_eq!(lists.front(0), Some(0));
        assert_eq!(Lists::default().front(0), None);
    }

    #[test]
    fn family_forgets_children_of_an_earlier_block() {
        let mut family = Family::new(3);
        family.insert(0, NO_SLOT);
        family.insert(1, 0);
        assert!(family.has_children(0));
        family.leave(0); // removed although it has a child
        family.insert(0, NO_SLOT); // another block
        assert!(!family.has_children(0));
        family.insert(2, 0);
        family.leave(1); // child of the earlier block
        assert!(family.has_children(0));
        assert_eq!(family.leave(2), Some(0));
        assert!(!family.has_children(0));
        assert_eq!((family.stay(2), family.stay(2)), (Some(0), None));
        assert!(family.has_children(0));
    }
}
