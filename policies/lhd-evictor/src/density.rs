//! What blocks of each class and age can expect: hits divided by the time left until they are used again or evicted.

use kvasir_policy::octaves::{index_of, start_of};

/// Ages told apart; the last one has all from 2^32 on.
const AGES: usize = 128;
/// The part of the past that each fit keeps.
const KEEP: f64 = 0.9;
/// The least events between fits; so many of all classes together stand beside each class's own.
const EVENTS_MIN: u64 = 256;

#[derive(Clone, Default)]
pub(crate) struct Densities {
    classes: Vec<Class>,
    next_fit: u64,
}

/// Of one class, by age.
#[derive(Clone)]
struct Class {
    /// How many blocks were used again, and how many were used again or evicted.
    ended: [[f64; 2]; AGES],
    /// Hits to expect for an event of time.
    density: [f64; AGES],
}

impl Densities {
    /// Before the first fit, the older a block the less it can expect: least recently used.
    pub(crate) fn new(classes: u8) -> Self {
        let density = std::array::from_fn(|age| 1.0 / (start_of(age) as f64 + 1.0));
        let class = Class { ended: [[0.0; 2]; AGES], density };
        Self { classes: vec![class; classes.into()], next_fit: EVENTS_MIN }
    }

    /// A block was used again, or evicted.
    pub(crate) fn ended(&mut self, class: u8, age: u64, hit: bool) {
        let [hits, ends] = &mut self.classes[usize::from(class)].ended[index_of(age).min(AGES - 1)];
        *hits += f64::from(hit);
        *ends += 1.0;
    }

    pub(crate) fn at(&self, class: u8, age: u64) -> f64 {
        self.classes[usize::from(class)].density[index_of(age).min(AGES - 1)]
    }

    /// Fits anew if `every` events went by since the last time.
    pub(crate) fn refit_if_due(&mut self, clock: u64, every: u64) {
        if clock < self.next_fit {
            return;
        }
        self.next_fit = clock + every.max(EVENTS_MIN);
        let sum = |age: usize, i: usize| self.classes.iter().map(|class| class.ended[age][i]).sum::<f64>();
        let all: [[f64; 2]; AGES] = std::array::from_fn(|age| [sum(age, 0), sum(age, 1)]);
        let share = EVENTS_MIN as f64 / all.iter().map(|[_, ends]| ends).sum::<f64>().max(1.0);
        self.classes.iter_mut().for_each(|class| fit(class, &all, share));
    }
}

/// From the oldest age to the youngest: of the blocks that get there, the hits they bring and the time they take.
fn fit(class: &mut Class, all: &[[f64; 2]; AGES], share: f64) {
    let (mut hits, mut later, mut time) = (0.0, 0.0, 0.0);
    for age in (0..AGES).rev() {
        let [used, ended] = [0, 1].map(|i| class.ended[age][i] + share * all[age][i]);
        let width = (start_of(age + 1) - start_of(age)) as f64;
        // Those that end within an age do so in its middle.
        time += width * (later + ended / 2.0);
        hits += used;
        later += ended;
        class.density[age] = if time > 0.0 { hits / time } else { 0.0 };
        class.ended[age] = class.ended[age].map(|count| count * KEEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The definition: hits of those that reach an age, divided by the time that they live on.
        #[test]
        fn densities_are_hits_divided_by_time(ends in prop::collection::vec((0..5_000_u64, any::<bool>()), 1..50)) {
            let mut densities = Densities::new(1);
            ends.iter().for_each(|&(age, hit)| densities.ended(0, age, hit));
            densities.refit_if_due(EVENTS_MIN, 0);
            for index in 0..60 {
                let reach = ends.iter().filter(|&&(age, _)| index_of(age) >= index);
                let hits = reach.clone().filter(|&&(_, hit)| hit).count() as f64;
                let middle = |age| (start_of(index_of(age)) + start_of(index_of(age) + 1)) as f64 / 2.0;
                let time: f64 = reach.map(|&(age, _)| middle(age) - start_of(index) as f64).sum();
                let expected = if time > 0.0 { hits / time } else { 0.0 };
                prop_assert!((densities.at(0, start_of(index)) - expected).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn a_class_that_nothing_is_known_of_is_as_all_others() {
        let mut densities = Densities::new(2);
        densities.ended(0, 8, true);
        densities.refit_if_due(EVENTS_MIN, 0);
        assert!((densities.at(0, 8) - densities.at(1, 8)).abs() < 1e-9 && densities.at(1, 8) > 0.0);
    }
}
