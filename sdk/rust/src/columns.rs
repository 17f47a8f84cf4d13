//! Column arithmetic that compiles to SIMD in Wasm (`+simd128`) and natively, without intrinsics:
//! fixed groups of lanes that the compiler turns into vectors, and [`Lanes`] where a formula is too long for it.

/// Eight values that are computed at once, the same to the last bit in Wasm and natively.
pub use wide::f32x8 as Lanes;

const LANES: usize = 8;
/// Slots taken in one turn of a loop: every turn in Wasm pays a check of the deadline.
const GROUP: usize = 2 * LANES;

/// `out[i] = f([inputs[0][i], inputs[1][i], ...])` for every slot, and the index of the smallest result as [`argmin`]
/// gives it. `out` gets the length of the shortest column.
///
/// `f` computes [`Lanes`], eight slots at once: comparisons give masks, which select by `mask.select(yes, no)`.
pub fn map_argmin<const K: usize>(
    inputs: [&[f32]; K],
    out: &mut Vec<f32>,
    f: impl Fn([Lanes; K]) -> Lanes,
) -> Option<usize> {
    let n = inputs.iter().map(|column| column.len()).min().unwrap_or(0);
    out.resize(n, f32::INFINITY);
    let inputs = inputs.map(|column| &column[..n]);
    let groups = inputs.map(|column| column.as_chunks::<GROUP>().0);
    let (results, rest) = out.as_chunks_mut::<GROUP>();
    let mut least = Lanes::splat(f32::INFINITY);
    for (g, result) in results.iter_mut().enumerate() {
        for (half, result) in result.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let values = f(groups.map(|column| Lanes::new(column[g].as_chunks::<LANES>().0[half])));
            least = values.simd_lt(least).select(values, least);
            *result = values.to_array();
        }
    }
    let mut least = smallest(least.as_array());
    let start = n - rest.len();
    for (part, result) in rest.chunks_mut(LANES).enumerate() {
        let values = f(inputs.map(|column| head(&column[start + part * LANES..])));
        result.copy_from_slice(&values.as_array()[..result.len()]);
        least = least.min(smallest(result));
    }
    (least < f32::INFINITY).then(|| position(out, least)).flatten()
}

/// The first values of a column, zeros after its end.
fn head(column: &[f32]) -> Lanes {
    let mut lanes = [0.0; LANES];
    lanes.iter_mut().zip(column).for_each(|(lane, &value)| *lane = value);
    Lanes::new(lanes)
}

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
    let least = smallest(&lanes).min(smallest(groups.remainder()));
    (least < f32::INFINITY).then(|| position(values, least)).flatten()
}

/// +infinity if there is none; NaN is passed over.
fn smallest(values: &[f32]) -> f32 {
    values.iter().fold(f32::INFINITY, |least, &value| if value < least { value } else { least })
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
    fn a_mapped_column_holds_every_slot_and_its_least_is_found() {
        for len in 0..70 {
            let up: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let wave: Vec<f32> = (0..len).map(|i| ((i * 7) % 13) as f32).collect();
            let mut out = vec![9.0; 3];
            let least = map_argmin([&up, &wave], &mut out, |[up, wave]| {
                wave.simd_gt(Lanes::splat(0.5)).select(wave + up * 0.0, Lanes::splat(f32::INFINITY))
            });
            let plain: Vec<f32> = wave.iter().map(|&w| if w > 0.5 { w } else { f32::INFINITY }).collect();
            assert_eq!((least, &out), (argmin(&plain), &plain), "{len}");
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
