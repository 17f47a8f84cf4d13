//! Ages of blocks in half octaves: a bin is half again as long as the one before, or a third.

/// Bins of age; the last has no end.
pub(crate) const BINS: usize = 32;
/// Length of the first bin, ms.
const UNIT_MS: u64 = 128;

/// One number for each bin.
pub(crate) type Curve = [f64; BINS];

pub(crate) fn bin_of(age_ms: u64) -> usize {
    let units = age_ms / UNIT_MS + 2;
    let octave = units.ilog2();
    let half = (units >> (octave - 1) & 1) as usize;
    (2 * (octave as usize - 1) + half).min(BINS - 1)
}

/// The least age in a bin, ms; of `BINS`, where the last bin is taken to end.
pub(crate) fn start_ms(bin: usize) -> f64 {
    (((2 + bin as u64 % 2) << (bin / 2)) - 2) as f64 * UNIT_MS as f64
}

/// The starts of all bins, and the end of the last.
pub(crate) fn edges() -> [f64; BINS + 1] {
    std::array::from_fn(start_ms)
}

/// Adds the time between two ages to the bins that it lies in.
pub(crate) fn add_span(curve: &mut Curve, from_ms: u64, to_ms: u64, weight: f64) {
    let to = to_ms as f64;
    let mut at = from_ms as f64;
    for (bin, sum) in curve.iter_mut().enumerate().skip(bin_of(from_ms)) {
        let end = if bin + 1 < BINS { start_ms(bin + 1).min(to) } else { to };
        if end > at {
            *sum += (end - at) * weight;
            at = end;
        }
        if at >= to {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_no_gaps_and_spans_lose_nothing() {
        assert_eq!((bin_of(0), bin_of(127), bin_of(128), bin_of(u64::MAX / 2)), (0, 0, 1, BINS - 1));
        for bin in 1..BINS {
            let start = start_ms(bin) as u64;
            assert_eq!((bin_of(start - 1), bin_of(start)), (bin - 1, bin));
        }
        for (from, to) in [(0, 5), (100, 200_000), (7, 7), (9, 3), (1_000, 1 << 40)] {
            let mut curve = [0.0; BINS];
            add_span(&mut curve, from, to, 2.0);
            assert_eq!(curve.iter().sum::<f64>(), 2.0 * to.saturating_sub(from) as f64, "{from} to {to}");
        }
    }
}
