//! Column arithmetic that compiles to SIMD in Wasm (`+simd128`) and natively, without intrinsics:
//! fixed groups of lanes that the compiler turns into vectors.

const LANES: usize = 8;

/// Index of the smallest value, the first one where several are equal; `None` if every value is
/// +infinity or NaN, or there is none.
pub fn argmin(values: &[f32]) -> Option<usize> {
    let mut lanes = [f32::INFINITY; LANES];
    let mut groups = values.chunks_exact(LANES);
    for group in &mut groups {
        for (lane, &value) in lanes.iter_mut().zip(group) {
            *lane = if value < *lane { value } else { *lane };
        }
    }
    let smaller = |least: f32, &value: &f32| if value < least { value } else { least };
    let least = lanes.iter().chain(groups.remainder()).fold(f32::INFINITY, smaller);
    if least == f32::INFINITY {
        return None;
    }
    position(values, least)
}

/// First index whose value equals `wanted`.
fn position<T: Copy + PartialEq>(values: &[T], wanted: T) -> Option<usize> {
    let mut start = 0;
    for group in values.chunks_exact(LANES) {
        // Ored as lanes and looked at once: an early exit inside the group would keep it scalar.
        let mut found = [0u32; LANES];
        for (lane, &value) in found.iter_mut().zip(group) {
            *lane = u32::from(value == wanted);
        }
        if found.iter().fold(0, |any, lane| any | lane) != 0 {
            break;
        }
        start += LANES;
    }
    values[start..].iter().position(|&v| v == wanted).map(|i| start + i)
}

/// Largest value and the first index that has it; `None` for an empty column.
pub fn max(values: &[u32]) -> Option<(u32, usize)> {
    let mut lanes = [0; LANES];
    let groups = values.chunks_exact(LANES);
    let rest = groups.remainder();
    for group in groups {
        for (lane, &value) in lanes.iter_mut().zip(group) {
            *lane = value.max(*lane);
        }
    }
    let largest = lanes.iter().chain(rest).copied().fold(0, u32::max);
    position(values, largest).map(|index| (largest, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmin_agrees_with_a_plain_scan() {
        let mut state = 7u32;
        for len in 0..70 {
            let column: Vec<f32> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    match state >> 29 {
                        0 => f32::INFINITY,
                        1 => f32::NAN,
                        _ => ((state >> 20) % 16) as f32 - 4.0,
                    }
                })
                .collect();
            let mut plain: Option<usize> = None;
            for (i, &v) in column.iter().enumerate() {
                if v < f32::INFINITY && plain.is_none_or(|p| v < column[p]) {
                    plain = Some(i);
                }
            }
            assert_eq!(argmin(&column), plain, "{column:?}");
        }
    }

    #[test]
    fn max_takes_the_first_of_equals() {
        assert_eq!(max(&[1, 5, 5, 2]), Some((5, 1)));
        assert_eq!(max(&[]), None);
        assert_eq!(max(&[0; 20]), Some((0, 0)));
        for at in 0..40 {
            let mut column = [3; 40];
            column[at] = 7;
            column[39] = 7;
            assert_eq!(max(&column), Some((7, at)));
        }
    }
}
