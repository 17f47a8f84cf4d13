//! Hashes in pages of fixed size, and which run each page belongs to.

/// Hashes in one page: a cache line.
pub(super) const CELLS: usize = 8;

const NONE: u32 = u32::MAX;

/// A cell number is page number × [`CELLS`] + position.
#[derive(Debug)]
pub(super) struct Pages {
    cells: Vec<[u64; CELLS]>,
    /// Run, and position of the page in it.
    owners: Vec<(u32, u32)>,
    /// Head of the list of free pages, linked through their first cell.
    free: u32,
}

impl Default for Pages {
    fn default() -> Self {
        Self { cells: Vec::new(), owners: Vec::new(), free: NONE }
    }
}

impl Pages {
    pub(super) fn cell(&self, cell: u32) -> u64 {
        self.cells[cell as usize / CELLS][cell as usize % CELLS]
    }

    pub(super) fn set(&mut self, cell: u32, hash: u64) {
        self.cells[cell as usize / CELLS][cell as usize % CELLS] = hash;
    }

    pub(super) fn owner(&self, cell: u32) -> (u32, u32) {
        self.owners[cell as usize / CELLS]
    }

    pub(super) fn set_owner(&mut self, page: u32, run: u32, ordinal: u32) {
        self.owners[page as usize] = (run, ordinal);
    }

    pub(super) fn allocate(&mut self, run: u32, ordinal: u32) -> u32 {
        if self.free != NONE {
            let page = self.free;
            self.free = self.cells[page as usize][0] as u32;
            self.set_owner(page, run, ordinal);
            return page;
        }
        // It grows by an eighth at a time: the pages are most of the index, and doubling would waste half.
        if self.cells.len() == self.cells.capacity() {
            let more = self.cells.len() / 8 + 64;
            self.cells.reserve_exact(more);
            self.owners.reserve_exact(more);
        }
        self.cells.push([0; CELLS]);
        self.owners.push((run, ordinal));
        self.cells.len() as u32 - 1
    }

    pub(super) fn release(&mut self, page: u32) {
        self.cells[page as usize][0] = u64::from(self.free);
        self.owners[page as usize] = (NONE, 0);
        self.free = page;
    }

    pub(super) fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<[u64; CELLS]>() + self.owners.capacity() * size_of::<(u32, u32)>()
    }
}
