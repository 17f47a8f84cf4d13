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

/// The bins that the time between two ages lies in, with the time in each, ms.
pub(crate) fn spans(from_ms: u64, to_ms: u64) -> impl Iterator<Item = (usize, f64)> {
    let to = to_ms as f64;
    let mut at = from_ms as f64;
    (bin_of(from_ms)..BINS).map_while(move |bin| {
        let end = if bin + 1 < BINS { start_ms(bin + 1).min(to) } else { to };
        let time_ms = end - at;
        at = end;
        (time_ms > 0.0).then_some((bin, time_ms))
    })
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
            let time_ms: f64 = spans(from, to).map(|(_, time_ms)| time_ms).sum();
            assert_eq!(time_ms, to.saturating_sub(from) as f64, "{from} to {to}");
            assert!(spans(from, to).all(|(bin, _)| (bin_of(from)..=bin_of(to)).contains(&bin)));
        }
    }
}
