//! What blocks of each class and age can expect: hits divided by the time left until they are used again or evicted.

/// Ages are told apart by octave and four parts of it; the last one has all from 2^32 on.
const AGES: usize = 128;
const PARTS: u32 = 2;
/// The part of the past that each fit keeps.
const KEEP: f64 = 0.9;
/// Events of all classes together that stand beside each class's own.
const PSEUDO_EVENTS: f64 = 32.0;

/// How blocks of one class ended, by age, and what follows from it.
#[derive(Clone)]
struct Class {
    hits: [f64; AGES],
    ends: [f64; AGES],
    density: [f64; AGES],
}

const NOTHING: [f64; AGES] = [0.0; AGES];

#[derive(Clone, Default)]
pub(crate) struct Densities {
    classes: Vec<Class>,
    /// Events between fits.
    every: u64,
    next_fit: u64,
}

impl Densities {
    /// Before the first fit, the older a block the less it can expect: least recently used.
    pub(crate) fn new(classes: u8, slots: u32) -> Self {
        let density = std::array::from_fn(|age| 1.0 / (start_of(age) as f64 + 1.0));
        let class = Class { hits: NOTHING, ends: NOTHING, density };
        let every = u64::from(slots / 2).max(256);
        Self { classes: vec![class; classes.into()], every, next_fit: every }
    }

    /// A block was used again.
    pub(crate) fn hit(&mut self, class: u8, age: u64) {
        let class = &mut self.classes[usize::from(class)];
        class.hits[index_of(age)] += 1.0;
        class.ends[index_of(age)] += 1.0;
    }

    pub(crate) fn evicted(&mut self, class: u8, age: u64) {
        self.classes[usize::from(class)].ends[index_of(age)] += 1.0;
    }

    /// Hits for an event of time.
    pub(crate) fn at(&self, class: u8, age: u64) -> f64 {
        self.classes[usize::from(class)].density[index_of(age)]
    }

    pub(crate) fn refit_if_due(&mut self, clock: u64) {
        if clock < self.next_fit {
            return;
        }
        self.next_fit = clock + self.every;
        let sum = |of: fn(&Class) -> &[f64; AGES]| -> [f64; AGES] {
            std::array::from_fn(|age| self.classes.iter().map(|class| of(class)[age]).sum())
        };
        let (hits, ends) = (sum(|class| &class.hits), sum(|class| &class.ends));
        let pseudo = PSEUDO_EVENTS / ends.iter().sum::<f64>().max(1.0);
        for class in &mut self.classes {
            class.fit(&hits, &ends, pseudo);
        }
    }
}

impl Class {
    /// From the oldest age to the youngest: of the blocks that get there, the hits they bring and the time they take.
    fn fit(&mut self, all_hits: &[f64; AGES], all_ends: &[f64; AGES], pseudo: f64) {
        let (mut hits, mut later, mut time) = (0.0, 0.0, 0.0);
        for age in (0..AGES).rev() {
            let ends = self.ends[age] + pseudo * all_ends[age];
            let width = (start_of(age + 1) - start_of(age)) as f64;
            hits += self.hits[age] + pseudo * all_hits[age];
            // Those that end within an age do so in its middle.
            time += width * (later + ends / 2.0);
            later += ends;
            self.density[age] = if time > 0.0 { hits / time } else { 0.0 };
            self.hits[age] *= KEEP;
            self.ends[age] *= KEEP;
        }
    }
}

fn index_of(age: u64) -> usize {
    let octave = (age | 1).ilog2();
    let index = if octave < PARTS {
        age as usize
    } else {
        ((octave - PARTS + 1) << PARTS) as usize + (age >> (octave - PARTS) & 3) as usize
    };
    index.min(AGES - 1)
}

/// The least age with this index.
fn start_of(index: usize) -> u64 {
    let index = index as u64;
    let octave = index >> PARTS;
    if octave == 0 { index } else { (4 + (index & 3)) << (octave - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_in_order_and_without_gaps() {
        for index in 0..AGES - 1 {
            assert_eq!(index_of(start_of(index)), index);
            assert_eq!(index_of(start_of(index + 1) - 1), index);
        }
        assert_eq!(index_of(u64::MAX), AGES - 1);
    }

    #[test]
    fn densities_are_hits_divided_by_time() {
        let mut densities = Densities::new(1, 0);
        // Three of four blocks are used again at once, the fourth is evicted at 8.
        for _ in 0..3 {
            densities.hit(0, 0);
        }
        densities.evicted(0, 8);
        densities.refit_if_due(u64::MAX / 2);
        let time = 3.0 * 0.5 + 9.0; // 8 to 10 are one age
        assert!((densities.at(0, 0) - 3.0 / time).abs() < 1e-9, "{}", densities.at(0, 0));
        assert_eq!(densities.at(0, 1), 0.0, "nobody was used again later");
    }
}
