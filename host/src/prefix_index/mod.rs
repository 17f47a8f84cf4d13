//! Which instance holds how much of a prompt: exact longest match over chained block hashes.
//!
//! Block hashes are opaque 64-bit ids, chained: equal hash means equal whole prefix. Every instance
//! (dense slot) holds a set of blocks; its match for a prompt is the number of leading blocks of
//! the prompt in that set. A lost block in the middle ends the match there; when it returns, the match is whole again.
//!
//! Layout. Blocks that follow each other in a chain stand side by side in a *run*, cut into pages of
//! [`pages::CELLS`] hashes; a run grows at its tail and is cut only when no instance holds a page
//! of it. A branch needs no node: it is a run whose first hash is looked up when the walk leaves another.
//! Within a run the deepest common block is found by binary search, because a block that is equal
//! implies that all before it are. Who holds what is kept per run as covers: (slot, from, to).
//!
//! Two tables map hashes, which are kept whole and compared whole. `heads` leads to a run by its first block, and a
//! lookup needs no other; `table` leads to the cell of any block, for parents and removals.
//! Costs and what else was considered: docs/design/0016-prefix-index.md.
//!
//! An instance that is gone loses its blocks at once, in that its covers count no more; they are taken out piece by piece
//! ([`PrefixIndex::sweep`]), so that nobody waits while millions of blocks go.
//!
//! There is no clock, no I/O and no lock here. Entries and covers have hard caps; what does not fit is
//! refused and counted, which costs misses, never wrong answers.
#![deny(clippy::disallowed_methods)]

mod chunks;
mod holders;
mod pages;
mod runs;
mod table;
#[cfg(test)]
mod tests;
mod tiered;

pub use tiered::{Near, Tier, TieredIndex};

use holders::Holders;
use pages::{CELLS, Pages};
use runs::{Cover, MAX_LEN, Run, Runs};
use table::{Probe, Table, WARM};

/// What [`PrefixIndex::sweep`] is asked for where decisions wait for it: some 5 to 10 µs.
pub const SWEEP: usize = 64;

/// Dense number of an instance.
pub type Slot = u16;

/// Hard caps of one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Distinct blocks. At most 2^29, so that cells have numbers of 32 bits even if every block has a page of its own.
    pub entries: usize,
    /// Stretches of a run held by one instance. Blocks shared by n instances need n.
    pub covers: usize,
}

impl Default for Limits {
    /// 16 Mi blocks, under 0.5 GiB if none is shared.
    fn default() -> Self {
        Self { entries: 16 << 20, covers: 16 << 20 }
    }
}

/// What became of the blocks of one [`PrefixIndex::store`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// New to the index.
    pub new: usize,
    /// Known from another instance, new for this one.
    pub shared: usize,
    /// Already known as held by this instance.
    pub repeated: usize,
    /// Left out because a cap is reached.
    pub refused: usize,
}

/// Sizes and outcomes since the index was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Distinct blocks, including those that no instance holds but that share a page with one that is held, or were not
    /// swept yet.
    pub entries: usize,
    pub runs: usize,
    pub covers: usize,
    /// Heap bytes allocated.
    pub bytes: usize,
    /// Blocks refused by [`Limits`], in total.
    pub refused: u64,
    /// Blocks forgotten because a hole in a cover needed one cover more than [`Limits`] allows.
    pub forgotten: u64,
}

impl Stats {
    /// The statistics of two indices together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            entries: self.entries + other.entries,
            runs: self.runs + other.runs,
            covers: self.covers + other.covers,
            bytes: self.bytes + other.bytes,
            refused: self.refused + other.refused,
            forgotten: self.forgotten + other.forgotten,
        }
    }
}

/// See the module documentation.
#[derive(Debug)]
pub struct PrefixIndex {
    limits: Limits,
    /// Cell of each block.
    table: Table,
    /// Run by its first block: a lookup needs no others, and few are likely to be in the processor's caches.
    heads: Table,
    pages: Pages,
    runs: Runs,
    holders: Holders,
    /// Runs below this may have covers of holders that are gone.
    unswept: u32,
    /// An instance was dropped during the sweep, which begins again when it has come to its end.
    sweeps_again: bool,
    /// A block was stored behind another one than before: some instance misnames blocks or their order.
    crossed: bool,
    covers: usize,
    refused: u64,
    forgotten: u64,
}

/// Where a block stands: run and offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    run: u32,
    offset: u32,
}

impl Place {
    /// Whether it begins a run, or stands behind `before` in it.
    fn follows(self, before: Option<Place>) -> bool {
        self.offset == 0 || before == Some(Place { offset: self.offset - 1, ..self })
    }
}

impl PrefixIndex {
    pub fn new(limits: Limits) -> Self {
        let entries = limits.entries.min(1 << 29);
        Self {
            limits: Limits { entries, ..limits },
            table: Table::default(),
            heads: Table::default(),
            pages: Pages::default(),
            runs: Runs::default(),
            holders: Holders::default(),
            unswept: 0,
            sweeps_again: false,
            crossed: false,
            covers: 0,
            refused: 0,
            forgotten: 0,
        }
    }

    /// Leading blocks of `chain` held by each instance: `out[slot]`, overwritten. Slots at or beyond
    /// `out.len()` are left out. Returns the longest match.
    pub fn lookup(&self, chain: &[u64], out: &mut [u32]) -> u32 {
        out.fill(0);
        let mut longest = 0;
        let mut at = 0;
        while at < chain.len() {
            let Some(place) = self.enter(chain[at], at) else { break };
            let run = self.runs.get(place.run);
            let common = self.common(run, place.offset, &chain[at..]);
            let reached = if self.unswept == 0 {
                run.extend_matches(place.offset, common, at as u32, out, |_| false)
            } else {
                run.extend_matches(place.offset, common, at as u32, out, |holder| {
                    self.holders.is_gone(holder)
                })
            };
            longest = longest.max(reached);
            at += common as usize;
            if (reached as usize) < at {
                break; // nobody holds all of it so far
            }
        }
        longest
    }

    /// Whether `slot` holds this block.
    pub fn holds(&self, slot: Slot, hash: u64) -> bool {
        let holder = self.holders.of(slot);
        self.find(hash).is_some_and(|place| self.runs.get(place.run).holds(holder, place.offset))
    }

    /// `slot` now holds `hashes`, which follow each other. `parent` is the block before the first, or
    /// `None` at the start of a prompt. An unknown parent is not an error: the match ends before it.
    pub fn store(&mut self, slot: Slot, parent: Option<u64>, hashes: &[u64]) -> Stored {
        let mut stored = Stored::default();
        self.make_room(hashes.len());
        self.table.warm(parent.as_slice());
        self.table.warm(hashes);
        let mut before = parent.and_then(|hash| self.find(hash));
        let mut rest = hashes;
        while !rest.is_empty() {
            let (place, len, new) = match self.find(rest[0]) {
                Some(place) => {
                    self.crossed |= !place.follows(before);
                    let run = self.runs.get(place.run);
                    (place, self.common(run, place.offset, rest), false)
                }
                None => match self.append(before, rest) {
                    Some((place, len)) => (place, len, true),
                    None => break,
                },
            };
            let Some(held) = self.cover(slot, place, len) else {
                if new {
                    self.reclaim(place.run, place.offset + len - 1);
                }
                break;
            };
            let len = len as usize;
            if new {
                stored.new += len;
            } else {
                stored.repeated += held as usize;
                stored.shared += len - held as usize;
            }
            before = Some(Place { offset: place.offset + len as u32 - 1, ..place });
            rest = &rest[len..];
        }
        stored.refused = rest.len();
        self.refused += rest.len() as u64;
        stored
    }

    /// `slot` no longer holds `hashes`, in any order. Returns how many of them it held.
    pub fn remove(&mut self, slot: Slot, hashes: &[u64]) -> usize {
        let mut removed = 0;
        self.make_room(0);
        for some in hashes.chunks(WARM) {
            self.warm(some);
            removed += some.iter().filter(|&&hash| self.remove_one(slot, hash)).count();
        }
        removed
    }

    /// `slot` holds nothing any more, and may be another instance from now on. What it held takes up its room until
    /// [`Self::sweep`] has been there.
    pub fn drop_instance(&mut self, slot: Slot) {
        if !self.holders.next(slot) {
            self.sweep(usize::MAX);
            assert!(self.holders.next(slot), "all others that had the slot are forgotten");
        }
        if self.unswept == 0 {
            self.unswept = self.runs.slots();
        } else {
            self.sweeps_again = true;
        }
    }

    /// Takes out what dropped instances held: looks at runs and takes blocks out of them, about `most` of both together.
    /// Returns whether some may be left.
    pub fn sweep(&mut self, most: usize) -> bool {
        let mut done = 0;
        while self.unswept > 0 && done < most {
            self.unswept -= 1;
            done += 1 + self.sweep_run(self.unswept);
            if self.unswept == 0 && std::mem::take(&mut self.sweeps_again) {
                self.unswept = self.runs.slots();
            }
        }
        if self.unswept == 0 {
            self.holders.forget_gone();
        }
        self.unswept > 0
    }

    /// Distinct blocks.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn stats(&self) -> Stats {
        Stats {
            entries: self.len(),
            runs: self.runs.live(),
            covers: self.covers,
            bytes: self.table.bytes() + self.heads.bytes() + self.pages.bytes() + self.runs.bytes(),
            refused: self.refused,
            forgotten: self.forgotten,
        }
    }

    /// Where a walk that has come to block `at` of its chain goes on. The block before it ends here, and a block inside of a
    /// run stands behind the one before it: so this one begins a run, unless the walk begins here.
    fn enter(&self, hash: u64, at: usize) -> Option<Place> {
        match self.heads.probe(hash, |run| self.runs.get(run).first() == hash) {
            Probe::Found(run, _) => Some(Place { run, offset: 0 }),
            Probe::Vacant(_) if at == 0 || self.crossed => self.find(hash),
            Probe::Vacant(_) => None,
        }
    }

    fn find(&self, hash: u64) -> Option<Place> {
        match self.table.probe(hash, |cell| self.pages.cell(cell) == hash) {
            Probe::Found(cell, _) => Some(self.place(cell)),
            Probe::Vacant(_) => None,
        }
    }

    /// Reads what finding the hashes needs, so that their cache misses overlap.
    fn warm(&self, hashes: &[u64]) {
        if hashes.len() > 1 {
            self.table.warm(hashes);
            let found = hashes.iter().filter_map(|&hash| self.find(hash));
            std::hint::black_box(found.fold(0, |all, place| all ^ place.run));
        }
    }

    fn place(&self, cell: u32) -> Place {
        let (run, ordinal) = self.pages.owner(cell);
        Place { run, offset: ordinal * CELLS as u32 + cell % CELLS as u32 }
    }

    /// How many blocks of `chain` are in `run` from `offset` on; the first is known to be equal.
    fn common(&self, run: &Run, offset: u32, chain: &[u64]) -> u32 {
        let equal = |i: u32| self.pages.cell(run.cell(offset + i)) == chain[i as usize];
        let left = run.len() - offset;
        let most = left.min(u32::try_from(chain.len()).unwrap_or(u32::MAX));
        let all = if most == left { run.last() == chain[most as usize - 1] } else { equal(most - 1) };
        if all {
            return most;
        }
        let (mut same, mut different) = (0, most - 1);
        while different - same > 1 {
            let middle = same + (different - same) / 2;
            if equal(middle) {
                same = middle;
            } else {
                different = middle;
            }
        }
        different
    }

    /// Puts the leading new blocks of `hashes`, of which the first is, at the tail of the run of `before`, or in a run of
    /// their own if another block follows there. Returns `None` at the cap.
    fn append(&mut self, before: Option<Place>, hashes: &[u64]) -> Option<(Place, u32)> {
        let room = self.limits.entries - self.table.len();
        let hashes = &hashes[..hashes.len().min(room)];
        if hashes.is_empty() {
            return None;
        }
        let run = match before {
            Some(place) if self.runs.get(place.run).can_grow_behind(place.offset) => place.run,
            _ => self.runs.create(),
        };
        let first = self.runs.get(run).len();
        let hashes = &hashes[..hashes.len().min((MAX_LEN - first) as usize)];
        let mut len = 0;
        for some in hashes.chunks(WARM) {
            self.table.warm(some);
            let new = self.put(run, first + len, some);
            len += new;
            if (new as usize) < some.len() {
                break;
            }
        }
        self.runs.change(run, |run| run.grow(len));
        self.set_ends(run);
        if first == 0 {
            self.set_head(run);
        }
        Some((Place { run, offset: first }, len))
    }

    /// Puts the leading new ones of `hashes` behind a run's end, which is at `offset`. Returns how many.
    fn put(&mut self, run: u32, offset: u32, hashes: &[u64]) -> u32 {
        let (pages, table) = (&mut self.pages, &mut self.table);
        self.runs.change(run, |own| {
            let mut page = own.pages().last().copied().unwrap_or_default();
            for (new, &hash) in (0..).zip(hashes) {
                let (ordinal, position) = ((offset + new) / CELLS as u32, (offset + new) % CELLS as u32);
                if position == 0 {
                    page = pages.allocate(run, ordinal);
                }
                let cell = page * CELLS as u32 + position;
                pages.set(cell, hash);
                if !table.insert(hash, cell, |other| pages.cell(other) == hash) {
                    if position == 0 {
                        pages.release(page);
                    }
                    return new;
                }
                if position == 0 {
                    own.push_page(page);
                }
            }
            hashes.len() as u32
        })
    }

    /// From now on a run is found by its first block.
    fn set_head(&mut self, run: u32) {
        let first = self.runs.get(run).first();
        self.heads.insert(first, run, |other| other == run);
    }

    /// Marks `len` blocks as held. Returns how many of them were already, or `None` at the cap.
    fn cover(&mut self, slot: Slot, place: Place, len: u32) -> Option<u32> {
        let cover = Cover::new(self.holders.of(slot), place.offset, place.offset + len);
        let room = self.covers < self.limits.covers;
        let (held, change) = self.runs.change(place.run, |run| run.cover(cover, room))?;
        self.covers = self.covers.strict_add_signed(change);
        Some(held)
    }

    fn remove_one(&mut self, slot: Slot, hash: u64) -> bool {
        let Some(place) = self.find(hash) else { return false };
        let room = self.covers < self.limits.covers;
        let holder = self.holders.of(slot);
        let gone = self.runs.change(place.run, |run| run.uncover(holder, place.offset, room));
        let Some(gone) = gone else { return false };
        self.covers = self.covers.strict_add_signed(gone.covers);
        self.forgotten += u64::from(gone.blocks - 1);
        if gone.blocks == 1 {
            self.reclaim(place.run, place.offset);
        } else {
            self.reclaim_range(place.run, place.offset, place.offset + gone.blocks);
        }
        true
    }

    /// Sweeps until there is room for `blocks` more and a cover, or nothing is left to sweep.
    fn make_room(&mut self, blocks: usize) {
        let is_full =
            |index: &Self| index.limits.entries - index.len() < blocks || index.covers == index.limits.covers;
        while self.unswept > 0 && is_full(self) {
            self.sweep(blocks.max(CELLS));
        }
    }

    /// Takes the covers of holders that are gone out of a run. Returns how many blocks that was about.
    fn sweep_run(&mut self, run: u32) -> usize {
        let holders = &self.holders;
        let gone = self.runs.change(run, |run| run.take_gone(|holder| holders.is_gone(holder)));
        self.covers -= gone.len();
        let start = gone.iter().map(|cover| cover.start()).min().unwrap_or(0);
        let end = gone.iter().map(|cover| cover.end()).max().unwrap_or(0);
        self.reclaim_range(run, start, end);
        (end - start) as usize
    }

    /// Frees the blocks of `start..end` that no instance holds any more, from the tail so that offsets stay valid.
    fn reclaim_range(&mut self, run: u32, start: u32, end: u32) {
        let mut page = end.div_ceil(CELLS as u32);
        while page * CELLS as u32 > start && page > 0 {
            page -= 1;
            let last = (page + 1) * CELLS as u32 - 1;
            self.reclaim(run, last.min(end - 1));
        }
    }

    /// Frees the tail that no instance holds any more, or the page of `offset`.
    fn reclaim(&mut self, run: u32, offset: u32) {
        let len = self.runs.get(run).len();
        if offset >= len {
            return;
        }
        let live = if offset + 1 == len { self.runs.get(run).live_len() } else { len };
        if live < len {
            self.truncate(run, live);
        } else if !self.runs.get(run).is_held(offset / CELLS as u32) {
            self.cut(run, offset / CELLS as u32);
        }
    }

    /// Shortens a run to `len` blocks.
    fn truncate(&mut self, run: u32, len: u32) {
        while self.runs.get(run).len() > len {
            let (cell, page) = self.runs.change(run, Run::pop);
            self.table.remove(self.pages.cell(cell), cell);
            if let Some(page) = page {
                self.pages.release(page);
            }
        }
        if len == 0 {
            self.heads.remove(self.runs.get(run).first(), run);
            self.runs.release(run);
        } else {
            self.set_ends(run);
        }
    }

    /// Takes a page that no instance holds out of a run; what follows it becomes a run of its own.
    fn cut(&mut self, run: u32, page: u32) {
        let behind = self.runs.change(run, |run| run.split((page + 1) * CELLS as u32));
        if !behind.is_empty() {
            let created = self.runs.adopt(behind);
            for (ordinal, &page) in self.runs.get(created).pages().iter().enumerate() {
                self.pages.set_owner(page, created, ordinal as u32);
            }
            self.set_ends(created);
            self.set_head(created);
            if self.unswept > 0 {
                // The sweep may have come past its number already.
                self.sweep_run(created);
            }
        }
        let live = self.runs.get(run).live_len();
        self.truncate(run, live);
    }

    /// Called after the first or the last block of a run has changed.
    fn set_ends(&mut self, run: u32) {
        self.runs.change(run, |run| {
            let at = |offset| self.pages.cell(run.cell(offset));
            let (first, last) = (at(0), at(run.len() - 1));
            run.set_ends(first, last);
        });
    }
}
