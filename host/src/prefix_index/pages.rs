//! Hashes in pages of fixed size, and which run each page belongs to.

use super::chunks::Chunks;

/// Hashes in one page: a cache line.
pub(super) const CELLS: usize = 8;

const NONE: u32 = u32::MAX;

/// A cell number is page number × [`CELLS`] + position.
#[derive(Debug)]
pub(super) struct Pages {
    cells: Chunks<Page>,
    /// Run, and position of the page in it.
    owners: Chunks<(u32, u32)>,
    /// Head of the list of free pages, linked through their first cell.
    free: u32,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Page([u64; CELLS]);

impl Default for Pages {
    fn default() -> Self {
        Self { cells: Chunks::default(), owners: Chunks::default(), free: NONE }
    }
}

impl Pages {
    pub(super) fn cell(&self, cell: u32) -> u64 {
        self.cells.get(cell / CELLS as u32).0[cell as usize % CELLS]
    }

    pub(super) fn set(&mut self, cell: u32, hash: u64) {
        self.cells.get_mut(cell / CELLS as u32).0[cell as usize % CELLS] = hash;
    }

    pub(super) fn owner(&self, cell: u32) -> (u32, u32) {
        *self.owners.get(cell / CELLS as u32)
    }

    pub(super) fn set_owner(&mut self, page: u32, run: u32, ordinal: u32) {
        *self.owners.get_mut(page) = (run, ordinal);
    }

    pub(super) fn allocate(&mut self, run: u32, ordinal: u32) -> u32 {
        let page = if self.free == NONE {
            self.owners.push();
            self.cells.push()
        } else {
            let page = self.free;
            self.free = self.cells.get(page).0[0] as u32;
            page
        };
        self.set_owner(page, run, ordinal);
        page
    }

    pub(super) fn release(&mut self, page: u32) {
        self.cells.get_mut(page).0[0] = u64::from(self.free);
        self.set_owner(page, NONE, 0);
        self.free = page;
    }

    pub(super) fn bytes(&self) -> usize {
        self.cells.bytes() + self.owners.bytes()
    }
}
