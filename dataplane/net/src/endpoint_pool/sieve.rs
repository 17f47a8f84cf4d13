//! SIEVE (Zhang et al., NSDI '24): a queue in order of insertion, one bit per entry, and a hand that walks from the
//! oldest to the newest, spares what was used since it last came by, and evicts the first that was not.
//!
//! Crates that implement it evict on their own when full; here some entries must not be evicted at the moment, and
//! entries leave for other reasons too.

const NIL: u32 = u32::MAX;

struct Node<T> {
    /// `None` in free slots.
    value: Option<T>,
    visited: bool,
    newer: u32,
    older: u32,
}

/// Values in SIEVE order. Slots name them and are reused.
pub(super) struct Sieve<T> {
    nodes: Vec<Node<T>>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    /// The next candidate; [`NIL`] = the oldest.
    hand: u32,
}

impl<T> Sieve<T> {
    pub(super) fn new() -> Self {
        Self { nodes: Vec::new(), free: Vec::new(), newest: NIL, oldest: NIL, hand: NIL }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Adds a value as the newest, not yet used.
    pub(super) fn insert(&mut self, value: T) -> u32 {
        let node = Node { value: Some(value), visited: false, newer: NIL, older: self.newest };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        self.set_newer(self.newest, slot);
        self.newest = slot;
        slot
    }

    /// The value in a slot.
    ///
    /// # Panics
    /// If the slot is free: the caller's table and this queue would disagree.
    pub(super) fn get(&mut self, slot: u32) -> &mut T {
        self.nodes[slot as usize].value.as_mut().expect("slot holds a value")
    }

    /// Marks a value as used.
    pub(super) fn touch(&mut self, slot: u32) {
        self.nodes[slot as usize].visited = true;
    }

    /// Removes a value.
    ///
    /// # Panics
    /// As [`get`](Self::get).
    pub(super) fn remove(&mut self, slot: u32) -> T {
        let node = &mut self.nodes[slot as usize];
        let value = node.value.take().expect("slot holds a value");
        let (newer, older) = (node.newer, node.older);
        self.set_newer(older, newer);
        match newer {
            NIL => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        if self.hand == slot {
            self.hand = newer;
        }
        self.free.push(slot);
        value
    }

    /// Removes the value that SIEVE evicts among those that `may` go, or returns `None` if none may. The others keep
    /// their bit.
    pub(super) fn evict(&mut self, may: impl Fn(&T) -> bool) -> Option<T> {
        // One lap clears the bits of all that may go, so the second finds one.
        for _ in 0..2 * self.len() {
            let slot = if self.hand == NIL { self.oldest } else { self.hand };
            let node = &mut self.nodes[slot as usize];
            if node.value.as_ref().is_some_and(&may) {
                if !node.visited {
                    self.hand = slot;
                    return Some(self.remove(slot));
                }
                node.visited = false;
            }
            self.hand = self.nodes[slot as usize].newer;
        }
        None
    }

    /// The slot and value of each entry, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0u32..).zip(&self.nodes).filter_map(|(slot, node)| Some((slot, node.value.as_ref()?)))
    }

    fn set_newer(&mut self, slot: u32, newer: u32) {
        match slot {
            NIL => self.oldest = newer,
            slot => self.nodes[slot as usize].newer = newer,
        }
    }
}
