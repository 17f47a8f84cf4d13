//! Numbers told apart by octave and four parts of it: an index of any `u64`, for histograms of ages and sizes.

/// The index of a number, below 252.
pub fn index_of(number: u64) -> usize {
    let octave = (number | 1).ilog2();
    let index = if octave < 2 { number } else { u64::from(octave - 1) << 2 | (number >> (octave - 2) & 3) };
    index as usize
}

/// The least number with this index.
pub fn start_of(index: usize) -> u64 {
    let (octave, part) = (index as u64 >> 2, index as u64 & 3);
    if octave == 0 { part } else { (4 + part) << (octave - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_in_order_and_without_gaps() {
        for index in 0..251 {
            assert_eq!(index_of(start_of(index)), index);
            assert_eq!(index_of(start_of(index + 1) - 1), index);
        }
        assert_eq!(index_of(u64::MAX), 251);
    }
}
