//! Chance that is the same in every run: bags of block slots to draw from, for evictors that compare a few candidates instead of keeping
//! all in order, and bits out of a request's seed.

/// `at` of a slot in no bag.
const ABSENT: u32 = u32::MAX;

/// Several bags; a slot is in at most one of them. Every operation is O(1), a draw apart. Slots beyond those given to
/// [`Bags::new`] are ignored: a policy must survive any event.
#[derive(Clone, Debug, Default)]
pub struct Bags {
    bags: Vec<Vec<u32>>,
    places: Vec<Place>,
    drawn: Vec<u32>,
    random: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    bag: u32,
    at: u32,
}

impl Bags {
    /// `bags` empty bags over slots below `slots`.
    pub fn new(slots: u32, bags: u32) -> Self {
        Self {
            bags: vec![Vec::new(); bags as usize],
            places: vec![Place { bag: 0, at: ABSENT }; slots as usize],
            drawn: Vec::new(),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Slots in a bag.
    pub fn len(&self, bag: u32) -> usize {
        self.bags.get(bag as usize).map_or(0, Vec::len)
    }

    /// Whether a bag has no slots.
    pub fn is_empty(&self, bag: u32) -> bool {
        self.len(bag) == 0
    }

    /// Puts `slot` into `bag`, wherever it was before.
    pub fn put(&mut self, bag: u32, slot: u32) {
        self.remove(slot);
        if let (Some(members), Some(place)) =
            (self.bags.get_mut(bag as usize), self.places.get_mut(slot as usize))
        {
            *place = Place { bag, at: members.len() as u32 };
            members.push(slot);
        }
    }

    /// Takes `slot` out of its bag.
    pub fn remove(&mut self, slot: u32) {
        let Some(place) = self.places.get_mut(slot as usize).filter(|place| place.at != ABSENT) else {
            return;
        };
        let Place { bag, at } = *place;
        place.at = ABSENT;
        let members = &mut self.bags[bag as usize];
        members.swap_remove(at as usize);
        if let Some(&moved) = members.get(at as usize) {
            self.places[moved as usize].at = at;
        }
    }

    /// All slots of a bag if they are no more than `most`, else `most` drawn one by one; the same slot may come twice. The
    /// same in every run: nothing depends on chance.
    pub fn draw(&mut self, bag: u32, most: usize) -> &[u32] {
        let Some(members) = self.bags.get(bag as usize) else { return &[] };
        if members.len() <= most {
            return members;
        }
        self.drawn.clear();
        for _ in 0..most {
            self.drawn.push(members[below(&mut self.random, members.len())]);
        }
        &self.drawn
    }
}

/// Independent bits out of seeds in sequence (SplitMix64; Steele, Lea, Flood, OOPSLA '14).
pub fn split_mix(seed: u64) -> u64 {
    mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

/// The last step of [`split_mix`]: a hash of 64 bits, in which 0 stays 0.
pub fn mix(z: u64) -> u64 {
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A number below `limit` (xorshift64*; Vigna, 2016).
fn below(state: &mut u64, limit: usize) -> usize {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let random = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
    ((random * limit as u64) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_in_one_bag() {
        let mut bags = Bags::new(5, 2);
        for slot in [0, 1, 2, 3, 5] {
            bags.put(0, slot); // 5 is beyond the slots
        }
        bags.put(1, 1);
        bags.remove(0);
        bags.remove(0);
        bags.remove(9);
        bags.put(7, 4); // no such bag
        assert_eq!((bags.len(0), bags.len(1), bags.len(7), bags.is_empty(1)), (2, 1, 0, false));
        let mut all = bags.draw(0, 2).to_vec();
        all.sort_unstable();
        assert_eq!((&all[..], bags.draw(1, 9)), (&[2, 3][..], &[1][..]));
        assert!(bags.draw(7, 9).is_empty());
        assert!(Bags::default().draw(0, 1).is_empty());
    }

    #[test]
    fn draws_cover_a_bag() {
        let mut bags = Bags::new(10, 1);
        (0..10).for_each(|slot| bags.put(0, slot));
        let mut seen = [0; 10];
        for _ in 0..5_000 {
            bags.draw(0, 2).iter().for_each(|&slot| seen[slot as usize] += 1);
        }
        assert!(seen.iter().all(|&count| (800..1_200).contains(&count)), "{seen:?}");
    }

    /// What Vigna's `splitmix64.c` gives for 0.
    #[test]
    fn seeds_are_mixed_as_published() {
        assert_eq!([split_mix(0), mix(0)], [0xe220_a839_7b1d_cdaf, 0]);
    }
}
