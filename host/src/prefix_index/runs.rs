//! Runs: blocks that follow each other, and which instance holds which stretch of them.

use super::chunks::Chunks;
use super::holders::Holder;
use super::pages::CELLS;
use smallvec::SmallVec;

/// Of an offset in a run, so that a cover fits in 8 bytes.
const OFFSET_BITS: u32 = (u64::BITS - Holder::BITS) / 2;
/// The most blocks in one run; a longer chain continues in another.
pub(super) const MAX_LEN: u32 = (1 << OFFSET_BITS) - 1;

/// `start..end` of a run, held by one instance: holder, start and end in 20, 22 and 22 bits, so that
/// covers compare as numbers and a lookup reads few cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cover(u64);

/// Covers of one run. Eight stand in the run itself; more are on the heap.
pub(super) type Covers = SmallVec<[Cover; 8]>;

impl Cover {
    pub(super) fn new(holder: Holder, start: u32, end: u32) -> Self {
        Self((holder.number() << (2 * OFFSET_BITS)) | (u64::from(start) << OFFSET_BITS) | u64::from(end))
    }

    pub(super) fn holder(self) -> Holder {
        Holder::of_number(self.0 >> (2 * OFFSET_BITS))
    }

    pub(super) fn start(self) -> u32 {
        (self.0 >> OFFSET_BITS) as u32 & MAX_LEN
    }

    pub(super) fn end(self) -> u32 {
        self.0 as u32 & MAX_LEN
    }
}

/// Change made by [`Run::uncover`].
pub(super) struct Gone {
    /// Blocks from the removed one on; more than 1 only if a cover could not be split.
    pub(super) blocks: u32,
    /// Change in the number of covers.
    pub(super) covers: isize,
}

/// Its first and its last hash stand here as well as in the pages, so a chain that has all of it reads no page.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    first: u64,
    last: u64,
    /// All pages but the last are full. Those of up to 32 blocks stand in the run itself.
    pages: SmallVec<[u32; 4]>,
    /// Sorted by holder, then start; those of one holder neither overlap nor touch.
    covers: Covers,
    len: u32,
}

impl Run {
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn set_ends(&mut self, first: u64, last: u64) {
        (self.first, self.last) = (first, last);
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn pages(&self) -> &[u32] {
        &self.pages
    }

    pub(super) fn cell(&self, offset: u32) -> u32 {
        self.pages[offset as usize / CELLS] * CELLS as u32 + offset % CELLS as u32
    }

    pub(super) fn push_page(&mut self, page: u32) {
        self.pages.push(page);
    }

    /// Adds blocks, whose pages must exist.
    pub(super) fn grow(&mut self, blocks: u32) {
        self.len += blocks;
    }

    /// Removes the last block: its cell, and its page if that is empty now.
    pub(super) fn pop(&mut self) -> (u32, Option<u32>) {
        let cell = self.cell(self.len - 1);
        self.len -= 1;
        let page = if self.len.is_multiple_of(CELLS as u32) { self.pages.pop() } else { None };
        (cell, page)
    }

    /// Whether a block that follows `offset` may go into this run.
    pub(super) fn can_grow_behind(&self, offset: u32) -> bool {
        offset + 1 == self.len && self.len < MAX_LEN
    }

    /// Instances with `matched[slot] == at` that hold `offset` now match as far as they hold this
    /// run, at most `common` blocks. Returns the longest match among them, 0 for none.
    pub(super) fn extend_matches(
        &self,
        offset: u32,
        common: u32,
        at: u32,
        matched: &mut [u32],
        is_gone: impl Fn(Holder) -> bool,
    ) -> u32 {
        let mut longest = 0;
        for cover in &self.covers {
            if let Some(matched) = matched.get_mut(usize::from(cover.holder().slot())) {
                // At most one cover of a slot that is not gone contains the offset.
                let contains = (cover.start() <= offset) & (cover.end() > offset);
                let held = contains & (*matched == at) & !is_gone(cover.holder());
                let reached = at + cover.end().wrapping_sub(offset).min(common);
                *matched = if held { reached } else { *matched };
                longest = longest.max(if held { reached } else { 0 });
            }
        }
        longest
    }

    pub(super) fn holds(&self, holder: Holder, offset: u32) -> bool {
        let i = self.first_ending_after(holder, offset);
        self.covers.get(i).is_some_and(|c| c.holder() == holder && c.start() <= offset)
    }

    /// Adds a cover. Returns how many of its blocks were held before, and the change in the number of
    /// covers. Returns `None` if that needs one more and there is no `room`.
    pub(super) fn cover(&mut self, new: Cover, room: bool) -> Option<(u32, isize)> {
        let first = self.covers.partition_point(|c| (c.holder(), c.end()) < (new.holder(), new.start()));
        let touching = |c: &&Cover| c.holder() == new.holder() && c.start() <= new.end();
        let count = self.covers[first..].iter().take_while(touching).count();
        if count == 0 {
            if !room {
                return None;
            }
            self.covers.insert(first, new);
            return Some((0, 1));
        }
        let touched = &self.covers[first..first + count];
        let overlap = |c: &Cover| c.end().min(new.end()).saturating_sub(c.start().max(new.start()));
        let held = touched.iter().map(overlap).sum();
        let start = new.start().min(touched[0].start());
        let end = new.end().max(touched[count - 1].end());
        self.covers[first] = Cover::new(new.holder(), start, end);
        self.covers.drain(first + 1..first + count);
        Some((held, 1 - count as isize))
    }

    /// Takes one block from a holder. Returns `None` if it does not hold it. A block in the middle of a cover
    /// splits it; without `room` for that, the part behind is given up too.
    pub(super) fn uncover(&mut self, holder: Holder, offset: u32, room: bool) -> Option<Gone> {
        let i = self.first_ending_after(holder, offset);
        let cover = self.covers.get_mut(i).filter(|c| c.holder() == holder && c.start() <= offset)?;
        let (start, end) = (cover.start(), cover.end());
        let mut gone = Gone { blocks: 1, covers: 0 };
        if start + 1 == end {
            self.covers.remove(i);
            gone.covers = -1;
        } else if offset == start {
            *cover = Cover::new(holder, start + 1, end);
        } else if offset + 1 == end || !room {
            *cover = Cover::new(holder, start, offset);
            gone.blocks = end - offset;
        } else {
            *cover = Cover::new(holder, start, offset);
            self.covers.insert(i + 1, Cover::new(holder, offset + 1, end));
            gone.covers = 1;
        }
        Some(gone)
    }

    /// Removes and returns the covers of holders that are gone.
    pub(super) fn take_gone(&mut self, is_gone: impl Fn(Holder) -> bool) -> Covers {
        let gone: Covers = self.covers.iter().filter(|c| is_gone(c.holder())).copied().collect();
        if !gone.is_empty() {
            self.covers.retain(|c| !is_gone(c.holder()));
        }
        gone
    }

    /// End of the last block that any instance holds.
    pub(super) fn live_len(&self) -> u32 {
        self.covers.iter().map(|c| c.end()).max().unwrap_or(0)
    }

    /// Whether any instance holds a block of this page.
    pub(super) fn is_held(&self, page: u32) -> bool {
        let (start, end) = (page * CELLS as u32, (page + 1) * CELLS as u32);
        self.covers.iter().any(|c| c.start() < end && c.end() > start)
    }

    /// Splits off everything from `offset`, a page boundary, on; no cover crosses it.
    pub(super) fn split(&mut self, offset: u32) -> Run {
        if offset >= self.len {
            return Run::default();
        }
        let pages = self.pages.drain(offset as usize / CELLS..).collect();
        let behind = self.covers.iter().filter(|c| c.start() >= offset);
        let covers = behind.map(|c| Cover::new(c.holder(), c.start() - offset, c.end() - offset)).collect();
        self.covers.retain(|c| c.start() < offset);
        let len = std::mem::replace(&mut self.len, offset) - offset;
        Run { pages, len, covers, ..Run::default() }
    }

    fn first_ending_after(&self, holder: Holder, offset: u32) -> usize {
        self.covers.partition_point(|c| (c.holder(), c.end()) <= (holder, offset))
    }

    /// On the heap, beside the run.
    fn bytes(&self) -> usize {
        let pages = if self.pages.spilled() { self.pages.capacity() * size_of::<u32>() } else { 0 };
        let covers = if self.covers.spilled() { self.covers.capacity() * size_of::<Cover>() } else { 0 };
        pages + covers
    }
}

/// Runs by number.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: Chunks<Run>,
    free: Vec<u32>,
    /// Bytes of all runs on the heap, beside them.
    heap: usize,
}

impl Runs {
    pub(super) fn get(&self, run: u32) -> &Run {
        self.runs.get(run)
    }

    pub(super) fn change<R>(&mut self, run: u32, change: impl FnOnce(&mut Run) -> R) -> R {
        let run = self.runs.get_mut(run);
        let before = run.bytes();
        let result = change(run);
        self.heap = self.heap - before + run.bytes();
        result
    }

    /// Numbers in use are below this.
    pub(super) fn slots(&self) -> u32 {
        self.runs.len() as u32
    }

    pub(super) fn live(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    pub(super) fn create(&mut self) -> u32 {
        self.adopt(Run::default())
    }

    pub(super) fn adopt(&mut self, run: Run) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| self.runs.push());
        self.change(number, |new| *new = run);
        number
    }

    pub(super) fn release(&mut self, run: u32) {
        self.change(run, |old| *old = Run::default());
        self.free.push(run);
    }

    pub(super) fn bytes(&self) -> usize {
        self.runs.bytes() + self.free.capacity() * size_of::<u32>() + self.heap
    }

    /// As [`Self::bytes`] has it, but counted.
    #[cfg(test)]
    pub(super) fn counted_bytes(&self) -> usize {
        let heap: usize = (0..self.slots()).map(|run| self.get(run).bytes()).sum();
        self.bytes() - self.heap + heap
    }
}
