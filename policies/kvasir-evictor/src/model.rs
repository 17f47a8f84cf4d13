//! What is learned: how soon blocks are used again, by how often they were used, by how many blocks their last request
//! brought and how many were known, and by its class.
//!
//! Every cell (use bucket × kind of request) has counts. The buckets together give the hazard of all blocks by age; each bucket
//! is drawn to that times what its use count promises before anything is known; a cell differs from its bucket by one factor,
//! drawn to that of its kind, which is drawn to 1. So a cell with few reuses borrows all but its scale. A class differs from the
//! cells by one more factor.

use crate::ages::{self, BINS, Curve};
use crate::cells::{BUCKETS, CELLS, CLASSES, bucket_of, cell_of, class_of};
use crate::curve::{Counts, best_ratio, unimodal};
use crate::samples::Samples;
use crate::tally::Tally;

/// What hazards are to those of a block used once, as far as is known beforehand. A block used n times was seldom used less
/// often than it will be: the estimate rises with n, faster where blocks differ more.
const PROMISE: [f64; BUCKETS] = [0.02, 1.0, 6.0, 11.0, 18.0, 35.0, 80.0, 120.0, 400.0, 1_600.0];

/// Reuses' worth of the prior in the scale of the hazard of all, of a bucket, of a kind of request, of a cell and of a class; and
/// in their shape.
/// Blocks of a request are used together, so a hundred reuses are a handful of observations.
const SCALE_OF_ALL: f64 = 1_000.0;
const SCALE_OF_BUCKET: f64 = 1_000.0;
const SCALE_OF_KIND: f64 = 300.0;
const SCALE_OF_CELL: f64 = 1_000.0;
const SCALE_OF_CLASS: f64 = 1_000.0;
const SHAPE: f64 = 30.0;
/// Reuses that are remembered: of more, all counts lose weight alike. And how many samples that are, at least.
const REMEMBERED: f64 = 10_000.0;
const REMEMBERED_SAMPLES: f64 = 4_096.0;
/// The most and the least events between fits: the first ones come sooner.
const FIT_EVENTS: u64 = 4_096;
const FIT_EVENTS_MIN: u64 = 128;

#[derive(Clone, Debug)]
pub(crate) struct Model {
    tally: Tally,
    samples: Samples,
    /// By bucket: what a block of an age is worth, at the start of each bin.
    worth: [Curve; BUCKETS],
    /// By class.
    of_class: [f64; CLASSES],
    /// By bin: one divided by its length.
    slopes: Curve,
    edges: [f64; BINS + 1],
    events: u64,
    next_fit: u64,
}

impl Default for Model {
    fn default() -> Self {
        Self::of(Tally::default(), Samples::default())
    }
}

impl Model {
    fn of(tally: Tally, samples: Samples) -> Self {
        let edges = ages::edges();
        let mut model = Self {
            tally,
            samples,
            worth: [[0.0; BINS]; BUCKETS],
            of_class: [1.0; CLASSES],
            slopes: std::array::from_fn(|bin| 1.0 / (edges[bin + 1] - edges[bin])),
            edges,
            events: 0,
            next_fit: FIT_EVENTS_MIN,
        };
        model.fit();
        model
    }

    /// A model that knows what this one learned, of a pool that is empty.
    pub(crate) fn reopened(&self) -> Self {
        Self::of(self.tally.clone(), Samples::new())
    }

    /// A block is used and is in `queue` from now on.
    pub(crate) fn used(&mut self, identity: u64, queue: u16, now_ms: u64) {
        self.samples.used(identity, queue, now_ms, &mut self.tally);
    }

    /// More is known of the last use of a block: it is in `queue` since then.
    pub(crate) fn moved(&mut self, identity: u64, queue: u16) {
        self.samples.moved(identity, queue);
    }

    /// So many events more have passed. Fits once at most, however many: a fit takes as long as some thousand events, and a call of the
    /// policy has a deadline.
    pub(crate) fn fit_if_due(&mut self, events: u64, now_ms: u64, pool_blocks: u32) {
        self.events += events;
        if self.events < self.next_fit {
            return;
        }
        self.next_fit = self.events + (self.events / 4).clamp(FIT_EVENTS_MIN, FIT_EVENTS);
        self.samples.count(now_ms, pool_blocks, &mut self.tally);
        self.forget();
        self.fit();
    }

    /// How much a block of this age is worth its place: reuses per ms.
    pub(crate) fn worth(&self, queue: u16, age_ms: u64) -> f64 {
        let (cell, bin) = (cell_of(queue), ages::bin_of(age_ms));
        let curve = &self.worth[bucket_of(cell)];
        let (here, next) = (curve[bin], curve[(bin + 1).min(BINS - 1)]);
        let share = ((age_ms as f64 - self.edges[bin]) * self.slopes[bin]).min(1.0);
        self.of_class[class_of(queue)] * self.tally.factors[cell] * (here + (next - here) * share)
    }

    fn forget(&mut self) {
        let reused = self.tally.reused();
        let most = REMEMBERED.max(REMEMBERED_SAMPLES * self.samples.weight());
        if reused > most {
            self.tally.scale(most / reused);
        }
    }

    fn fit(&mut self) {
        let mut buckets = [Counts::default(); BUCKETS];
        self.tally.counts.iter().enumerate().for_each(|(cell, counts)| buckets[bucket_of(cell)].add(counts));
        let hazards = hazards_of(&buckets);
        for (bucket, hazards) in hazards.iter().enumerate() {
            let weights = std::array::from_fn(|bin| buckets[bucket].exposure_ms[bin] + SHAPE / hazards[bin]);
            self.worth[bucket] = best_ratio(&unimodal(hazards, &weights));
        }
        let Tally { counts, factors, .. } = &mut self.tally;
        for (kind, factors) in counts.chunks(BUCKETS).zip(factors.chunks_mut(BUCKETS)) {
            fit_factors(kind, &hazards, factors);
        }
        self.tally.hazards = hazards;
        self.of_class = self.tally.class_factors(SCALE_OF_CLASS);
    }

    /// What was seen of the classes, then the counts of the cells that have any: number, reuses, exposure.
    pub(crate) fn export(&self) -> Vec<u8> {
        let mut state = vec![STATE_VERSION];
        for seen in &self.tally.seen {
            [seen.reused, seen.expected].iter().for_each(|field| state.extend(field.to_le_bytes()));
        }
        for (cell, mut counts) in (0_u16..).zip(self.tally.counts.iter().copied()) {
            if counts != Counts::default() {
                state.extend(cell.to_le_bytes());
                counts.fields().for_each(|field| state.extend(field.to_le_bytes()));
            }
        }
        state
    }

    pub(crate) fn import(&mut self, state: &[u8]) -> Result<(), String> {
        let classes = state
            .strip_prefix(&[STATE_VERSION])
            .and_then(|state| state.split_at_checked(CLASSES * SEEN_BYTES));
        let Some((classes, cells)) = classes.filter(|(_, cells)| cells.len() % CELL_BYTES == 0) else {
            return Err(format!("{} bytes are not a state of version {STATE_VERSION}", state.len()));
        };
        let mut tally = Tally::default();
        for (seen, bytes) in tally.seen.iter_mut().zip(classes.as_chunks::<SEEN_BYTES>().0) {
            read_counts([&mut seen.reused, &mut seen.expected].into_iter(), bytes)?;
        }
        for bytes in cells.chunks_exact(CELL_BYTES) {
            let cell = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
            let Some(counts) = tally.counts.get_mut(cell) else {
                return Err(format!("the state names cell {cell} of {CELLS}"));
            };
            read_counts(counts.fields(), &bytes[2..])?;
        }
        *self = Self::of(tally, Samples::default());
        Ok(())
    }
}

const STATE_VERSION: u8 = 2;
const SEEN_BYTES: usize = 2 * 8;
const CELL_BYTES: usize = 2 + 2 * BINS * 8;

fn read_counts<'a>(fields: impl Iterator<Item = &'a mut f64>, bytes: &[u8]) -> Result<(), String> {
    for (field, bytes) in fields.zip(bytes.as_chunks::<8>().0) {
        *field = f64::from_le_bytes(*bytes);
        if !(0.0..=1e18).contains(field) {
            return Err(format!("the state holds a count of {field}"));
        }
    }
    Ok(())
}

/// The hazards of the buckets, each drawn to those of all.
fn hazards_of(buckets: &[Counts; BUCKETS]) -> [Curve; BUCKETS] {
    let mut all = Counts::default();
    buckets.iter().for_each(|counts| all.add(counts));
    // Before anything is known the hazard falls as one divided by the age.
    let edges = ages::edges();
    let prior = std::array::from_fn(|bin| 0.05 / (edges[bin] + 30e3));
    let all = all.hazards(&prior, SCALE_OF_ALL, SHAPE);
    // What is promised is of blocks used once; the mean block has more.
    let plain: f64 = buckets.iter().map(|counts| counts.expected(&all)).sum();
    let promised: f64 = buckets.iter().zip(PROMISE).map(|(counts, more)| counts.expected(&all) * more).sum();
    let once = if promised > 0.0 { plain / promised } else { 1.0 };
    std::array::from_fn(|bucket| {
        let prior = all.map(|hazard| hazard * PROMISE[bucket] * once);
        buckets[bucket].hazards(&prior, SCALE_OF_BUCKET, SHAPE)
    })
}

/// What the hazards of one kind's cells are to those of their buckets.
fn fit_factors(kind: &[Counts], hazards: &[Curve; BUCKETS], factors: &mut [f64]) {
    let expected = |bucket: usize| kind[bucket].expected(&hazards[bucket]);
    let reused: f64 = kind.iter().map(Counts::reused).sum();
    let of_kind = (reused + SCALE_OF_KIND) / ((0..BUCKETS).map(expected).sum::<f64>() + SCALE_OF_KIND);
    for (bucket, factor) in factors.iter_mut().enumerate() {
        let expected = expected(bucket) * of_kind;
        *factor = of_kind * (kind[bucket].reused() + SCALE_OF_CELL) / (expected + SCALE_OF_CELL);
    }
}

#[cfg(test)]
mod tests;
