use super::*;
use proptest::prelude::*;

fn curve() -> impl Strategy<Value = Curve> {
    prop::array::uniform32(prop_oneof![Just(0.001), 0.001..5.0_f64])
}

/// Squared error of the best nondecreasing fit, by the max-min formula.
fn error_of_rising(values: &[f64], weights: &[f64]) -> f64 {
    let mean = |from: usize, to: usize| {
        let (sum, weight) =
            (from..=to).fold((0.0, 0.0), |(sum, all), i| (sum + values[i] * weights[i], all + weights[i]));
        sum / weight
    };
    let fit = |at: usize| {
        let least = |from: usize| (at..values.len()).map(|to| mean(from, to)).fold(f64::MAX, f64::min);
        (0..=at).map(least).fold(f64::MIN, f64::max)
    };
    (0..values.len()).map(|at| weights[at] * (values[at] - fit(at)).powi(2)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn the_unimodal_fit_is_the_closest(values in curve(), weights in curve()) {
        let fitted = unimodal(&values, &weights);
        let mode = (0..BINS).max_by(|&a, &b| fitted[a].total_cmp(&fitted[b])).unwrap();
        prop_assert!(fitted[..=mode].is_sorted() && fitted[mode..].iter().rev().is_sorted(), "{fitted:?}");
        let reversed = |curve: &Curve| curve.iter().rev().copied().collect::<Vec<_>>();
        let (back, back_weights) = (reversed(&values), reversed(&weights));
        let with_mode = |mode: usize| {
            error_of_rising(&values[..mode], &weights[..mode])
                + error_of_rising(&back[..BINS - mode], &back_weights[..BINS - mode])
        };
        let best = (0..=BINS).map(with_mode).fold(f64::MAX, f64::min);
        let error: f64 = (0..BINS).map(|bin| weights[bin] * (values[bin] - fitted[bin]).powi(2)).sum();
        prop_assert!((error - best).abs() < 1e-6, "{error} instead of {best}");
    }

    #[test]
    fn no_other_time_has_a_better_ratio(values in curve(), weights in curve()) {
        let hazards = unimodal(&values, &weights).map(|hazard| hazard * 1e-5);
        let found = best_ratio(&hazards);
        let edges = ages::edges();
        for (from, found) in found.into_iter().enumerate() {
            let (mut left, mut time, mut best) = (1.0_f64, 0.0, 0.0_f64);
            for bin in from..BINS {
                let gone = left * (1.0 - (-hazards[bin] * (edges[bin + 1] - edges[bin])).exp());
                (left, time) = (left - gone, time + gone / hazards[bin]);
                best = best.max((1.0 - left) / time);
            }
            prop_assert!((found / best - 1.0).abs() < 1e-3, "{found} instead of {best} at {from}");
        }
    }
}

#[test]
fn without_counts_the_prior_stands_and_with_many_it_does_not_matter() {
    let prior = std::array::from_fn(|bin| 1e-4 / (bin + 1) as f64);
    assert_eq!(Counts::default().hazards(&prior, 10.0, 10.0), prior);
    let counts = Counts { reuses: [2e6; BINS], exposure_ms: [1e9; BINS] };
    for hazard in counts.hazards(&[1e-4; BINS], 10.0, 10.0) {
        assert!((hazard / 2e-3 - 1.0).abs() < 1e-4, "{hazard}");
    }
}
