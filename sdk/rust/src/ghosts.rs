//! Blocks that left lately, by identity, for evictors that learn from their return.

use crate::list::Lists;

/// Places in which one identity may stand. With a table twice as large as its contents, about one entry in a
/// hundred is lost before its time.
const WAYS: usize = 8;
/// The least places of a table, so that small ones lose nothing either.
const PLACES_MIN: usize = 1_024;
/// `list_of` of an empty place.
const EMPTY: u8 = u8::MAX;

/// Several lists of identities, each in the order in which they were put there.
///
/// Every operation is O(1), allocates nothing after [`Ghosts::new`], and costs the same whatever identities a client
/// makes up: one that finds its places taken displaces another.
#[derive(Clone, Debug, Default)]
pub struct Ghosts {
    identities: Vec<u64>,
    list_of: Vec<u8>,
    order: Lists,
    lens: Vec<u32>,
}

impl Ghosts {
    /// `lists` empty lists, below 255, with room for about `entries` in all of them; 29 to 58 bytes an entry.
    pub fn new(entries: u32, lists: u8) -> Self {
        let places = (2 * entries as usize).next_power_of_two().max(PLACES_MIN);
        Self {
            identities: vec![0; places],
            list_of: vec![EMPTY; places],
            order: Lists::new(places as u32, lists.into()),
            lens: vec![0; lists.into()],
        }
    }

    pub fn len(&self, list: u8) -> u32 {
        self.lens.get(usize::from(list)).copied().unwrap_or(0)
    }

    /// Whether all lists are empty.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Makes `identity` the newest of `list`, wherever it was before.
    pub fn insert(&mut self, list: u8, identity: u64) {
        self.take(identity);
        let places = self.places(identity);
        let free = places.clone().find(|&place| self.list_of[place] == EMPTY);
        let Some(place) = free.or_else(|| places.clone().next()) else { return };
        self.clear(place);
        let Some(len) = self.lens.get_mut(usize::from(list)) else { return };
        *len += 1;
        (self.identities[place], self.list_of[place]) = (identity, list);
        self.order.push_back(list.into(), place as u32);
    }

    /// Forgets `identity`. Returns the list in which it stood.
    pub fn take(&mut self, identity: u64) -> Option<u8> {
        let held = |place: &usize| self.identities[*place] == identity && self.list_of[*place] != EMPTY;
        let place = self.places(identity).find(held)?;
        let list = self.list_of[place];
        self.clear(place);
        Some(list)
    }

    /// Forgets the oldest of `list`, if there is one.
    pub fn forget_oldest(&mut self, list: u8) {
        if let Some(place) = self.order.front(list.into()) {
            self.clear(place as usize);
        }
    }

    /// Where `identity` may stand; none in a table that was not made by [`Ghosts::new`].
    fn places(&self, identity: u64) -> std::ops::Range<usize> {
        // Multiplicative hashing: the upper bits of the product are the best ones.
        let hash = (identity.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        let first = hash % (self.identities.len() / WAYS).max(1) * WAYS;
        first..(first + WAYS).min(self.identities.len())
    }

    fn clear(&mut self, place: usize) {
        let list = std::mem::replace(&mut self.list_of[place], EMPTY);
        if let Some(len) = self.lens.get_mut(usize::from(list)) {
            *len -= 1;
        }
        self.order.remove(place as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten_first_and_what_returned_is_gone() {
        let mut ghosts = Ghosts::new(10, 2);
        for identity in 0..5 {
            ghosts.insert(0, identity);
        }
        ghosts.insert(0, 0); // the newest now
        ghosts.insert(1, 3); // in the other list now
        assert_eq!((ghosts.len(0), ghosts.len(1), ghosts.len(9)), (4, 1, 0));
        ghosts.forget_oldest(0);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|identity| ghosts.take(identity)),
            [Some(0), None, Some(0), Some(1), Some(0)]
        );
        assert!(ghosts.is_empty());
        ghosts.forget_oldest(0);
        ghosts.insert(7, 1); // no such list
        assert_eq!((ghosts.take(1), ghosts.len(0)), (None, 0));
        let mut none = Ghosts::default();
        none.insert(0, 1);
        assert_eq!(none.take(1), None);
    }

    #[test]
    fn identities_that_collide_displace_each_other_and_nothing_else() {
        let mut ghosts = Ghosts::new(512, 1);
        let first = ghosts.places(0);
        let colliding: Vec<u64> = (0..1 << 16).filter(|&id| ghosts.places(id) == first).collect();
        ghosts.insert(0, 1 << 40);
        for &identity in &colliding {
            ghosts.insert(0, identity);
        }
        assert!(colliding.len() > 100 && ghosts.len(0) as usize <= WAYS + 1);
        assert_eq!(ghosts.take(*colliding.last().unwrap()), Some(0));
    }

    #[test]
    fn hashes_stand_in_a_full_table_nearly_all() {
        let mut ghosts = Ghosts::new(1 << 14, 1);
        let hash = |n: u64| n.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ n << 17;
        for n in 0..1 << 14 {
            ghosts.insert(0, hash(n));
        }
        assert!(ghosts.len(0) > (1 << 14) * 98 / 100, "{}", ghosts.len(0));
    }
}
