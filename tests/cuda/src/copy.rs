//! Copies between any memories.

use crate::chance::Chance;
use crate::memory::{Place, look_up};
use crate::outcome::Outcome;

/// Rows of equal length.
pub(crate) struct Copy {
    pub(crate) to: Side,
    pub(crate) from: Source,
    pub(crate) width: usize,
    pub(crate) rows: usize,
}

pub(crate) struct Side {
    pub(crate) place: Place,
    pub(crate) pitch: usize,
}

pub(crate) enum Source {
    Memory(Side),
    /// Bytes that were taken when the copy was submitted, as the driver does with memory of the host that it does not
    /// know.
    Staged(Vec<u8>),
}

/// Bytes from the first of the first row to the last of the last one.
fn extent(width: usize, rows: usize, pitch: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1) * pitch + width }
}

impl Side {
    pub(crate) fn of(address: u64, pitch: usize, width: usize, rows: usize) -> Outcome<Self> {
        Ok(Self { place: look_up(address, extent(width, rows, pitch))?, pitch })
    }
}

impl Copy {
    pub(crate) fn plain(to: u64, from: u64, len: usize) -> Outcome<Self> {
        Self::of_rows((to, len), (from, len), len, 1)
    }

    pub(crate) fn of_rows(to: (u64, usize), from: (u64, usize), width: usize, rows: usize) -> Outcome<Self> {
        let to = Side::of(to.0, to.1, width, rows)?;
        let from = Source::Memory(Side::of(from.0, from.1, width, rows)?);
        Ok(Self { to, from, width, rows })
    }

    /// Whether the call that submits it has to wait for it: what goes to memory of the host that the device does not know,
    /// and what stays on the host.
    pub(crate) fn is_waited_for(&self) -> bool {
        let on_host = match &self.from {
            Source::Memory(side) => side.place.is_on_host(),
            Source::Staged(_) => true,
        };
        self.to.place.is_pageable() || (on_host && self.to.place.is_on_host())
    }

    /// Takes the bytes of a source that the device does not know: the caller may change them after the call.
    pub(crate) fn stage(self) -> Outcome<Self> {
        let Source::Memory(side) = &self.from else { return Ok(self) };
        if !side.place.is_pageable() || self.rows != 1 {
            return Ok(self);
        }
        let held = side.place.hold()?;
        // SAFETY: the caller says that so many bytes are there until the call returns.
        let staged = unsafe { std::slice::from_raw_parts(held.bytes, self.width) }.to_vec();
        drop(held);
        Ok(Self { from: Source::Staged(staged), ..self })
    }

    /// Whether the source is memory that the caller may change as soon as the call returns.
    pub(crate) fn has_pageable_source(&self) -> bool {
        matches!(&self.from, Source::Memory(side) if side.place.is_pageable())
    }

    /// Moves the bytes: the second half first, and now and then late.
    pub(crate) fn run(&self, chance: &mut Chance) -> Outcome<()> {
        let to = self.to.place.hold()?;
        let (from, from_pitch, _held) = match &self.from {
            Source::Memory(side) => {
                let held = side.place.hold()?;
                (held.bytes.cast_const(), side.pitch, Some(held))
            }
            Source::Staged(bytes) => (bytes.as_ptr(), self.width, None),
        };
        let half = self.rows / 2;
        let copy_rows = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
            for row in rows {
                // SAFETY: inside of both extents, which were looked up when the copy was submitted and are held. They may
                // overlap only if the caller says so twice.
                unsafe {
                    let from = from.add(row * from_pitch + columns.start);
                    let to = to.bytes.add(row * self.to.pitch + columns.start);
                    std::ptr::copy(from, to, columns.len());
                }
            }
        };
        let pause = self.width * self.rows > 1 << 16 && chance.below(4) == 0;
        if self.rows == 1 {
            copy_rows(0..1, self.width / 2..self.width);
        } else {
            copy_rows(half..self.rows, 0..self.width);
        }
        if pause {
            chance.delay();
        }
        if self.rows == 1 {
            copy_rows(0..1, 0..self.width / 2);
        } else {
            copy_rows(0..half, 0..self.width);
        }
        Ok(())
    }
}
