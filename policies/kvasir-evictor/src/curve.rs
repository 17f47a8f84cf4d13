//! What is made of counts: how likely reuse is at each age (the hazard), smoothed so that it has one maximum, and the best that
//! keeping a block can bring.

use crate::ages::{self, BINS, Curve};
use kvasir_policy::math;

/// How many bins to either side lend their counts to one.
const REACH: usize = 3;

/// Reuses by age, and the time that blocks spent at that age, reused or not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) reuses: Curve,
    pub(crate) exposure_ms: Curve,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.fields().zip(other.reuses.iter().chain(&other.exposure_ms)).for_each(|(sum, n)| *sum += n);
    }

    pub(crate) fn scale(&mut self, factor: f64) {
        self.fields().for_each(|field| *field *= factor);
    }

    pub(crate) fn reused(&self) -> f64 {
        self.reuses.iter().sum()
    }

    /// Reuses that there would have been at these hazards.
    pub(crate) fn expected(&self, hazards: &Curve) -> f64 {
        self.exposure_ms.iter().zip(hazards).map(|(time, hazard)| time * hazard).sum()
    }

    /// Hazards per ms: the prior's, times what all ages say of its scale (drawn to 1 as by `scale_reuses`), times what each
    /// age and its neighbours say of that (drawn to 1 as by `shape_reuses`).
    pub(crate) fn hazards(&self, prior: &Curve, scale_reuses: f64, shape_reuses: f64) -> Curve {
        let scale = (self.reused() + scale_reuses) / (self.expected(prior) + scale_reuses);
        let scaled = prior.map(|hazard| hazard * scale);
        let expected: Curve = std::array::from_fn(|bin| self.exposure_ms[bin] * scaled[bin]);
        std::array::from_fn(|bin| {
            let seen = shape_reuses + around(&self.reuses, bin);
            scaled[bin] * seen / (shape_reuses + around(&expected, bin))
        })
    }

    pub(crate) fn fields(&mut self) -> impl Iterator<Item = &mut f64> {
        self.reuses.iter_mut().chain(&mut self.exposure_ms)
    }
}

/// What a bin has, and its neighbours the less the farther they are.
fn around(curve: &Curve, bin: usize) -> f64 {
    let near = curve.iter().enumerate().take(bin + REACH + 1).skip(bin.saturating_sub(REACH));
    near.map(|(at, count)| count * (1.0 - at.abs_diff(bin) as f64 / (REACH + 1) as f64)).sum()
}

/// A run of bins that share a value.
#[derive(Clone, Copy)]
struct Run {
    mean: f64,
    weight: f64,
    /// Weighted sum of squares.
    squares: f64,
    bins: usize,
}

/// The nondecreasing values closest to those given, by pooling adjacent violators; and for each prefix the squared error of
/// the best fit to it.
fn rising(points: impl Iterator<Item = (f64, f64)>) -> (Vec<Run>, Vec<f64>) {
    let (mut runs, mut errors, mut so_far) = (Vec::<Run>::new(), Vec::new(), vec![0.0]);
    for (value, weight) in points {
        let mut run = Run { mean: value, weight, squares: weight * value * value, bins: 1 };
        while let Some(last) = runs.pop_if(|last| last.mean > run.mean) {
            so_far.pop();
            let weight = last.weight + run.weight;
            let mean = (last.mean * last.weight + run.mean * run.weight) / weight;
            run = Run { mean, weight, squares: last.squares + run.squares, bins: last.bins + run.bins };
        }
        let error = (run.squares - run.weight * run.mean * run.mean).max(0.0);
        let error = so_far.last().copied().unwrap_or(0.0) + error;
        so_far.push(error);
        errors.push(error);
        runs.push(run);
    }
    (runs, errors)
}

/// The closest values that rise to one mode and fall from there.
pub(crate) fn unimodal(values: &Curve, weights: &Curve) -> Curve {
    let points = || values.iter().copied().zip(weights.iter().copied());
    let ((_, up), (_, down)) = (rising(points()), rising(points().rev()));
    let error = |mode: usize| {
        let before = mode.checked_sub(1).map_or(0.0, |last| up[last]);
        let behind = (BINS - mode).checked_sub(1).map_or(0.0, |last| down[last]);
        before + behind
    };
    let mode = (1..=BINS).fold(0, |best, mode| if error(mode) < error(best) { mode } else { best });
    let (before, _) = rising(points().take(mode));
    let (behind, _) = rising(points().rev().take(BINS - mode));
    let mut fitted = [0.0; BINS];
    let flat = |runs: Vec<Run>| runs.into_iter().flat_map(|run| std::iter::repeat_n(run.mean, run.bins));
    fitted.iter_mut().zip(flat(before)).for_each(|(to, from)| *to = from);
    fitted.iter_mut().rev().zip(flat(behind)).for_each(|(to, from)| *to = from);
    fitted
}

/// By age at the start of each bin: the chance of reuse before some later age, divided by the time that a block is expected
/// to stay until then or until its reuse, for the later age that is best.
pub(crate) fn best_ratio(hazards: &Curve) -> Curve {
    let edges = ages::edges();
    // Of a block that enters the bin: the chance that it is reused there, and the time that it spends there.
    let bins: [(f64, f64); BINS] = std::array::from_fn(|bin| {
        let length = edges[bin + 1] - edges[bin];
        let leaves = -math::expm1(-hazards[bin] * length);
        (leaves, if leaves > 1e-9 { leaves / hazards[bin] } else { length })
    });
    std::array::from_fn(|from| {
        let (mut left, mut time_ms, mut best) = (1.0, 0.0, 0.0_f64);
        for bin in from..BINS {
            let (leaves, length) = bins[bin];
            time_ms += left * length;
            left -= left * leaves;
            best = best.max((1.0 - left) / time_ms);
            // Behind the mode hazards only fall: waiting longer cannot be better. The margin is for rounding.
            if hazards[bin] < best * 0.999_999 || left < 1e-6 {
                break;
            }
        }
        best
    })
}

#[cfg(test)]
mod tests;
