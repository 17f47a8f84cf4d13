//! From descriptors to what a GPU executes: addresses, and tiles for the kernel.

use kvasir_memory::layout::paged::Descriptor;

/// The most bytes of one tile: what a thread block copies between two looks at the list.
const TILE_BYTES: u64 = 32 << 10;
/// Bytes that one thread moves at once, widest first. The kernels are named after them.
pub(super) const WIDTHS: [u64; 5] = [16, 8, 4, 2, 1];

/// A descriptor with addresses in place of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory) struct Move {
    pub(in crate::memory) engine: u64,
    pub(in crate::memory) block: u64,
    pub(in crate::memory) run_bytes: u64,
    pub(in crate::memory) rows: u64,
    pub(in crate::memory) engine_stride: u64,
    pub(in crate::memory) block_stride: u64,
}

/// An address range that descriptors point into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) len: u64,
}

/// Why descriptors were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outside {
    pub(super) nth: usize,
}

/// Resolves the descriptors to addresses in the engine's regions and the block.
///
/// # Errors
/// The first one that names a region that is not there, or bytes outside of it or of the block.
pub(super) fn moves(engine: &[Span], block: Span, descriptors: &[Descriptor]) -> Result<Vec<Move>, Outside> {
    let look_up = |(nth, d): (usize, &Descriptor)| {
        let region = engine.get(d.region as usize).ok_or(Outside { nth })?;
        let rows = u64::from(d.rows);
        // The stride of a single row is not used, so it may be anything.
        let strides = if rows > 1 { (d.engine_stride, d.block_stride) } else { (0, 0) };
        let inside =
            covers(region, d.engine_offset, strides.0, d) && covers(&block, d.block_offset, strides.1, d);
        inside.then_some(()).ok_or(Outside { nth })?;
        Ok(Move {
            engine: region.address + d.engine_offset,
            block: block.address + d.block_offset,
            run_bytes: d.run_bytes,
            rows,
            engine_stride: strides.0,
            block_stride: strides.1,
        })
    };
    descriptors.iter().enumerate().map(look_up).collect()
}

fn covers(span: &Span, offset: u64, stride: u64, d: &Descriptor) -> bool {
    let last = u64::from(d.rows).checked_sub(1).and_then(|rows| rows.checked_mul(stride));
    let end = last.and_then(|last| offset.checked_add(last)?.checked_add(d.run_bytes));
    end.is_some_and(|end| end <= span.len) && d.run_bytes > 0
}

/// The most bytes that a thread may move at once: a width that divides every address, stride and run.
pub(super) fn width(moves: &[Move]) -> u64 {
    let bits = moves
        .iter()
        .fold(0, |bits, m| bits | m.engine | m.block | m.run_bytes | m.engine_stride | m.block_stride);
    WIDTHS.into_iter().find(|width| bits.is_multiple_of(*width)).unwrap_or(1)
}

/// What one thread block copies: rows of units, in the layout that `gather.cu` declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Tile {
    engine: u64,
    block: u64,
    engine_stride: u64,
    block_stride: u64,
    row_units: u32,
    units: u32,
}

/// Bytes of one, in memory and on the GPU.
pub(super) const TILE_LEN: usize = 40;
const _: () = assert!(size_of::<Tile>() == TILE_LEN);

impl Tile {
    /// The bytes that the kernel reads.
    pub(super) fn encode(&self) -> [u8; TILE_LEN] {
        let Self { engine, block, engine_stride, block_stride, row_units, units } = *self;
        let mut bytes = [0; TILE_LEN];
        for (field, word) in bytes.chunks_exact_mut(8).zip([engine, block, engine_stride, block_stride]) {
            field.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[32..36].copy_from_slice(&row_units.to_ne_bytes());
        bytes[36..].copy_from_slice(&units.to_ne_bytes());
        bytes
    }
}

/// Cuts moves into tiles of whole rows, or into parts of one row if the row is longer than a tile.
pub(super) fn tiles(moves: &[Move], width: u64) -> Vec<Tile> {
    moves.iter().flat_map(|m| tiles_of(m, width)).collect()
}

fn tiles_of(m: &Move, width: u64) -> impl Iterator<Item = Tile> {
    let rows_at_once = (TILE_BYTES / m.run_bytes).max(1);
    let bytes_at_once = m.run_bytes.min(TILE_BYTES);
    let (m, width) = (*m, width);
    (0..m.rows).step_by(rows_at_once as usize).flat_map(move |row| {
        let rows = rows_at_once.min(m.rows - row);
        (0..m.run_bytes).step_by(bytes_at_once as usize).map(move |at| {
            let row_units = (bytes_at_once.min(m.run_bytes - at) / width) as u32;
            Tile {
                engine: m.engine + row * m.engine_stride + at,
                block: m.block + row * m.block_stride + at,
                engine_stride: m.engine_stride,
                block_stride: m.block_stride,
                row_units,
                units: row_units * rows as u32,
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What `gather.cu` does with one tile: pairs of addresses on both sides, a unit each.
    fn units_of(tile: &Tile) -> impl Iterator<Item = (u64, u64)> {
        let tile = *tile;
        (0..tile.units).map(move |unit| {
            let (row, column) = (u64::from(unit / tile.row_units), u64::from(unit % tile.row_units));
            (tile.engine + row * tile.engine_stride + column, tile.block + row * tile.block_stride + column)
        })
    }

    /// The same, with columns of `width` bytes, byte by byte.
    fn bytes_of(tile: &Tile, width: u64) -> Vec<(u64, u64)> {
        let in_bytes =
            Tile { row_units: tile.row_units * width as u32, units: tile.units * width as u32, ..*tile };
        units_of(&in_bytes).collect()
    }

    fn descriptor(offsets: (u64, u64), run_bytes: u64, rows: u32, strides: (u64, u64)) -> Descriptor {
        Descriptor {
            layer: 0,
            region: 0,
            engine_offset: offsets.0,
            block_offset: offsets.1,
            run_bytes,
            rows,
            engine_stride: strides.0,
            block_stride: strides.1,
        }
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let (engine, block) = (Span { address: 1000, len: 100 }, Span { address: 5000, len: 50 });
        for (offsets, run_bytes, rows, strides, ok) in [
            ((0, 0), 50, 1, (0, 0), true),
            ((50, 0), 50, 1, (u64::MAX, u64::MAX), true),
            ((51, 0), 50, 1, (0, 0), false),
            ((0, 1), 50, 1, (0, 0), false),
            ((0, 0), 10, 5, (22, 10), true),
            ((0, 0), 10, 5, (23, 10), false),
            ((0, 0), 10, 5, (22, 11), false),
            ((0, 0), 10, 3, (u64::MAX, 10), false),
            ((u64::MAX, 0), 1, 1, (0, 0), false),
            ((0, 0), 0, 1, (0, 0), false),
            ((0, 0), 1, 0, (0, 0), false),
        ] {
            let d = descriptor(offsets, run_bytes, rows, strides);
            assert_eq!(moves(&[engine], block, &[d]).is_ok(), ok, "{d:?}");
        }
        let elsewhere = Descriptor { region: 1, ..descriptor((0, 0), 1, 1, (0, 0)) };
        let fine = descriptor((0, 0), 1, 1, (0, 0));
        assert_eq!(moves(&[engine], block, &[fine, elsewhere]), Err(Outside { nth: 1 }));
    }

    #[test]
    fn the_width_divides_everything() {
        let base =
            Move { engine: 64, block: 128, run_bytes: 256, rows: 2, engine_stride: 512, block_stride: 256 };
        for (m, expected) in [
            (base, 16),
            (Move { engine: 72, ..base }, 8),
            (Move { block: 132, ..base }, 4),
            (Move { run_bytes: 18, ..base }, 2),
            (Move { engine_stride: 513, ..base }, 1),
        ] {
            assert_eq!(width(&[base, m]), expected, "{m:?}");
        }
        assert_eq!(width(&[]), 16);
    }

    #[test]
    fn long_rows_are_cut_and_short_ones_go_together() {
        let m = Move {
            engine: 0,
            block: 0,
            run_bytes: 3 * TILE_BYTES / 2,
            rows: 2,
            engine_stride: 1 << 20,
            block_stride: 1 << 20,
        };
        let units: Vec<u32> = tiles(&[m], 16).iter().map(|tile| tile.units * 16).collect();
        assert_eq!(
            units,
            [TILE_BYTES as u32, TILE_BYTES as u32 / 2, TILE_BYTES as u32, TILE_BYTES as u32 / 2]
        );
        let m = Move { run_bytes: 256, rows: 200, ..m };
        let rows: Vec<u32> = tiles(&[m], 16).iter().map(|tile| tile.units / tile.row_units).collect();
        assert_eq!(rows, [128, 72]);
    }

    #[test]
    fn tiles_are_encoded_as_they_lie_in_memory() {
        let tile = Tile { engine: 1, block: 2, engine_stride: 3, block_stride: 4, row_units: 5, units: 6 };
        let words = tile.encode();
        assert_eq!((words[0], words[8], words[16], words[24], words[32], words[36]), (1, 2, 3, 4, 5, 6));
        let offsets = [
            std::mem::offset_of!(Tile, block),
            std::mem::offset_of!(Tile, engine_stride),
            std::mem::offset_of!(Tile, block_stride),
            std::mem::offset_of!(Tile, row_units),
            std::mem::offset_of!(Tile, units),
        ];
        assert_eq!(offsets, [8, 16, 24, 32, 36]);
    }

    proptest! {
        /// The kernel's arithmetic moves exactly the bytes that the descriptors name, each once.
        #[test]
        fn tiles_move_what_the_descriptors_say(
            list in prop::collection::vec((0u64..64, 1u64..400, 1u32..300, 0u64..64, 0u64..64), 1..6),
            grain in prop::sample::select(WIDTHS.to_vec()),
        ) {
            let mut descriptors = Vec::new();
            let (mut engine_at, mut block_at) = (0, 0);
            for (gap, run, rows, engine_gap, block_gap) in list {
                let run_bytes = run * grain;
                let strides = (run_bytes + engine_gap * grain, run_bytes + block_gap * grain);
                descriptors.push(descriptor((engine_at + gap * grain, block_at), run_bytes, rows, strides));
                engine_at += gap * grain + strides.0 * u64::from(rows);
                block_at += strides.1 * u64::from(rows);
            }
            let (engine, block) = (Span { address: 1 << 20, len: engine_at }, Span { address: 1 << 40, len: block_at });
            let moves = moves(&[engine], block, &descriptors).unwrap();
            let width = width(&moves);
            prop_assert!(width >= grain);
            let mut expected = Vec::new();
            for d in &descriptors {
                for row in 0..u64::from(d.rows) {
                    let (e, b) = (d.engine_offset + row * d.engine_stride, d.block_offset + row * d.block_stride);
                    expected.extend((0..d.run_bytes).map(|i| (engine.address + e + i, block.address + b + i)));
                }
            }
            let tiles = tiles(&moves, width);
            for tile in &tiles {
                let bytes = u64::from(tile.units) * width;
                prop_assert!(bytes <= TILE_BYTES && tile.units.is_multiple_of(tile.row_units));
                for address in [tile.engine, tile.block, tile.engine_stride, tile.block_stride] {
                    prop_assert!(address.is_multiple_of(width), "a misaligned unit faults on the GPU");
                }
            }
            let mut found: Vec<_> = tiles.iter().flat_map(|tile| bytes_of(tile, width)).collect();
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert!(found == expected);
        }
    }
}
