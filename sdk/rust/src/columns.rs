//! Column arithmetic that compiles to SIMD in Wasm (`+simd128`) and natively, without intrinsics:
//! fixed groups of lanes that the compiler turns into vectors, and [`Lanes`] where a formula is too long for it.

/// Four values that are computed at once, one machine register, the same to the last bit in Wasm and natively.
pub use wide::f32x4 as Lanes;
/// Four whole numbers that are computed at once. They wrap around, and in Wasm each operation costs a third of one on
/// [`Lanes`], whose results the host has checked for NaN: compute in numbers as long as possible, then
/// [`Lanes::from_i32x4`].
pub use wide::i32x4 as Numbers;

/// A comparison of [`Numbers`] as a mask for [`Lanes`].
#[inline(always)]
pub fn mask(compared: Numbers) -> Lanes {
    wide::bytemuck::cast(compared)
}

const LANES: usize = 4;
/// Slots per iteration of a loop: in Wasm every iteration pays for a check of the deadline.
const GROUP: usize = 4 * LANES;

/// `out[i] = f([counts[0][i], ...], [values[0][i], ...])` for every slot, and the index of the smallest result as
/// [`argmin`] gives it. `out` gets the length of the shortest column. Counts are assumed to be below 2^31.
///
/// `f` computes four slots at once: comparisons give masks, which select by `mask.select(yes, no)`.
// Without inlining, its closure and the columns would go through memory.
#[inline]
pub fn map_argmin<const I: usize, const K: usize>(
    counts: [&[u32]; I],
    values: [&[f32]; K],
    out: &mut Vec<f32>,
    f: impl Fn([Numbers; I], [Lanes; K]) -> Lanes,
) -> Option<usize> {
    let lengths = counts.iter().map(|column| column.len()).chain(values.iter().map(|column| column.len()));
    let n = lengths.min().unwrap_or(0);
    out.resize(n, f32::INFINITY);
    let (groups, rest) = out.as_chunks_mut::<GROUP>();
    let mut least = Lanes::splat(f32::INFINITY);
    let mut start = 0;
    for group in groups {
        let (counts, values) = (windows(&counts, start), windows(&values, start));
        for (i, result) in group.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let results = f(lanes(&counts, i), lanes(&values, i));
            least = results.simd_lt(least).select(results, least);
            *result = results.to_array();
        }
        start += GROUP;
    }
    let mut least = smallest(least.as_array());
    for result in rest.chunks_mut(LANES) {
        let results = f(heads(&counts, start, n), heads(&values, start, n));
        result.copy_from_slice(&results.as_array()[..result.len()]);
        least = least.min(smallest(result));
        start += LANES;
    }
    (least < f32::INFINITY).then(|| position(out, least)).flatten()
}

/// What a column may hold, and the lanes it is computed in.
trait Element: Copy + 'static {
    type Lanes: Copy;
    const ZEROS: &'static [Self; GROUP];
    fn lanes(values: [Self; LANES]) -> Self::Lanes;
}

impl Element for f32 {
    type Lanes = Lanes;
    const ZEROS: &'static [Self; GROUP] = &[0.0; GROUP];

    #[inline(always)]
    fn lanes(values: [Self; LANES]) -> Lanes {
        Lanes::new(values)
    }
}

impl Element for u32 {
    type Lanes = Numbers;
    const ZEROS: &'static [Self; GROUP] = &[0; GROUP];

    #[inline(always)]
    fn lanes(values: [Self; LANES]) -> Numbers {
        Numbers::new(values.map(u32::cast_signed))
    }
}

/// One group of every column. This and the loops below are not `array::map`, which is not inlined if its closure is
/// long.
#[inline(always)]
fn windows<'a, T: Element, const K: usize>(columns: &[&'a [T]; K], start: usize) -> [&'a [T; GROUP]; K] {
    let mut windows = [T::ZEROS; K];
    for (window, column) in windows.iter_mut().zip(columns) {
        *window = column[start..].first_chunk().expect("every column has as many groups as the results");
    }
    windows
}

/// The lanes `i` of one group of every column.
#[inline(always)]
fn lanes<T: Element, const K: usize>(windows: &[&[T; GROUP]; K], i: usize) -> [T::Lanes; K] {
    let mut lanes = [T::lanes([T::ZEROS[0]; LANES]); K];
    for (lanes, window) in lanes.iter_mut().zip(windows) {
        *lanes = T::lanes(window.as_chunks().0[i]);
    }
    lanes
}

/// The lanes from `start` on of every column, zeros from `end` on.
#[inline(always)]
fn heads<T: Element, const K: usize>(columns: &[&[T]; K], start: usize, end: usize) -> [T::Lanes; K] {
    let mut lanes = [T::lanes([T::ZEROS[0]; LANES]); K];
    for (lanes, column) in lanes.iter_mut().zip(columns) {
        let column = &column[start..end];
        *lanes = T::lanes(column.first_chunk().copied().unwrap_or_else(|| padded(column)));
    }
    lanes
}

fn padded<T: Element>(column: &[T]) -> [T; LANES] {
    let mut values = [T::ZEROS[0]; LANES];
    values.iter_mut().zip(column).for_each(|(padded, &value)| *padded = value);
    values
}

/// Index of the smallest value, or of the first one if several are equal. Returns `None` if every value is
/// +infinity or NaN, or if there are no values.
pub fn argmin(values: &[f32]) -> Option<usize> {
    let mut lanes = [f32::INFINITY; GROUP];
    let mut groups = values.chunks_exact(GROUP);
    for group in &mut groups {
        for (lane, &value) in lanes.iter_mut().zip(group) {
            *lane = if value < *lane { value } else { *lane };
        }
    }
    let least = smallest(&lanes).min(smallest(groups.remainder()));
    (least < f32::INFINITY).then(|| position(values, least)).flatten()
}

/// The smallest value, or +infinity if there is none; NaN is skipped.
fn smallest(values: &[f32]) -> f32 {
    values.iter().fold(f32::INFINITY, |least, &value| if value < least { value } else { least })
}

/// First index whose value equals `wanted`.
fn position<T: Copy + PartialEq>(values: &[T], wanted: T) -> Option<usize> {
    let mut start = 0;
    for group in values.chunks_exact(GROUP) {
        // Combined with "or" and checked once: an early exit inside the group would keep it scalar.
        let mut found = [0u32; GROUP];
        for (lane, &value) in found.iter_mut().zip(group) {
            *lane = u32::from(value == wanted);
        }
        if found.iter().fold(0, |any, lane| any | lane) != 0 {
            break;
        }
        start += GROUP;
    }
    values[start..].iter().position(|&v| v == wanted).map(|i| start + i)
}

/// Largest value and the first index that has it; `None` for an empty column.
pub fn max(values: &[u32]) -> Option<(u32, usize)> {
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut largest = wide::u32x4::ZERO;
    for group in groups {
        for &values in group.as_chunks().0 {
            largest = largest.max(wide::u32x4::new(values));
        }
    }
    let largest = largest.as_array().iter().chain(rest).copied().fold(0, u32::max);
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
            let counts: Vec<u32> = (0..len).collect();
            let wave: Vec<f32> = (0..len).map(|i| ((i * 7) % 13) as f32).collect();
            let mut out = vec![9.0; 3];
            let least = map_argmin([&counts], [&wave], &mut out, |[counts], [wave]| {
                let up = Lanes::from_i32x4(counts);
                wave.simd_gt(Lanes::splat(0.5)).select(wave + up, Lanes::splat(f32::INFINITY))
            });
            let plain: Vec<f32> = wave
                .iter()
                .zip(0..)
                .map(|(&w, i)| if w > 0.5 { w + i as f32 } else { f32::INFINITY })
                .collect();
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
