//! Hash to where its block stands, 8 bytes an entry: a tag of 32 bits of the mixed hash, and 32 bits for the owner of the table.
//!
//! Lines of eight entries, one cache line each. An entry stands in its home line, or behind it if all lines from there on are
//! full. The upper bits of the tag choose a shard, the home line in it follows from the others; shards grow one by one, so
//! growing takes little at a time and most of the table keeps its load. A match of the tag is confirmed by the caller.

#[cfg(test)]
mod tests;

/// Entries of a line.
const WIDTH: usize = 8;

const SHARD_BITS: u32 = 8;

/// Lines of a shard from which on shards differ in size.
const BEGIN: usize = 8;

/// Blocks whose lines are fetched at once: more than that many cache misses do not overlap.
pub(super) const WARM: usize = 32;

/// Tags, then values. Tag 0: no entry.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Line {
    tags: [u32; WIDTH],
    values: [u32; WIDTH],
}

#[derive(Debug)]
pub(super) struct Table {
    shards: Vec<Shard>,
    len: usize,
}

#[derive(Clone, Debug, Default)]
struct Shard {
    lines: Vec<Line>,
    len: usize,
}

/// Where an entry is or would go, while the table is not changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    tag: u32,
    line: u32,
    position: u32,
}

/// Answer of [`Table::probe`].
pub(super) enum Probe {
    Found(u32, Spot),
    Vacant(Spot),
}

impl Default for Table {
    fn default() -> Self {
        Self { shards: vec![Shard::default(); 1 << SHARD_BITS], len: 0 }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        let lines: usize = self.shards.iter().map(|shard| shard.lines.capacity()).sum();
        lines * size_of::<Line>() + self.shards.capacity() * size_of::<Shard>()
    }

    /// `confirm` says whether the block behind a value really has the hash.
    pub(super) fn probe(&self, hash: u64, confirm: impl Fn(u32) -> bool) -> Probe {
        let tag = tag(hash);
        self.shard(tag).probe(tag, confirm)
    }

    /// Gives a hash that has no entry a value. Returns whether it had none; `confirm` as in [`Self::probe`].
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, value: u32, confirm: impl Fn(u32) -> bool) -> bool {
        let tag = tag(hash);
        let number = number(tag);
        let shard = &mut self.shards[number];
        if shard.is_full() {
            shard.grow(number);
        }
        let Probe::Vacant(spot) = shard.probe(tag, confirm) else { return false };
        shard.put(spot, value);
        shard.len += 1;
        self.len += 1;
        true
    }

    /// Reads the lines of hashes that come next, at most [`WARM`]. The reads are independent, so their cache misses
    /// overlap; they are most of the time of a store into a large table.
    pub(super) fn warm(&self, hashes: &[u64]) {
        let read = |&hash: &u64| {
            let tag = tag(hash);
            let shard = self.shard(tag);
            shard.lines.get(shard.home(tag)).map_or(0, |line| line.tags[0])
        };
        std::hint::black_box(hashes.iter().take(WARM).map(read).fold(0, |all, tag| all ^ tag));
    }

    /// Removes the entry of a hash that has this value. An absent entry has no effect.
    pub(super) fn remove(&mut self, hash: u64, value: u32) {
        let tag = tag(hash);
        let shard = &mut self.shards[number(tag)];
        if let Probe::Found(_, spot) = shard.probe(tag, |found| found == value) {
            shard.take(spot);
            self.len -= 1;
        }
    }

    fn shard(&self, tag: u32) -> &Shard {
        &self.shards[number(tag)]
    }
}

impl Shard {
    #[inline]
    fn probe(&self, tag: u32, confirm: impl Fn(u32) -> bool) -> Probe {
        let mut at = self.home(tag);
        loop {
            let Some(line) = self.lines.get(at) else {
                if self.lines.is_empty() {
                    return Probe::Vacant(Spot { tag, line: 0, position: 0 });
                }
                at = 0;
                continue;
            };
            let mut same = line.positions(tag);
            while same != 0 {
                let position = same.trailing_zeros();
                let value = line.values[position as usize % WIDTH];
                if confirm(value) {
                    return Probe::Found(value, Spot { tag, line: at as u32, position });
                }
                same &= same - 1;
            }
            let vacant = line.positions(0);
            if vacant != 0 {
                return Probe::Vacant(Spot { tag, line: at as u32, position: vacant.trailing_zeros() });
            }
            at += 1;
        }
    }

    fn put(&mut self, Spot { tag, line, position }: Spot, value: u32) {
        let line = &mut self.lines[line as usize];
        line.tags[position as usize] = tag;
        line.values[position as usize] = value;
    }

    /// Takes an entry out, and moves one that stands behind a full line into its place.
    fn take(&mut self, spot: Spot) {
        self.len -= 1;
        let mut hole = (spot.line as usize, spot.position as usize);
        self.lines[hole.0].tags[hole.1] = 0;
        if self.lines[hole.0].free() > 1 {
            return; // it was not full: nothing passed it
        }
        let mut at = self.next(hole.0);
        while at != hole.0 {
            if let Some(position) = self.strayed(at, hole.0) {
                let line = &mut self.lines[at];
                let (tag, value) = (std::mem::take(&mut line.tags[position]), line.values[position]);
                let was_full = line.free() == 1;
                self.put(Spot { tag, line: hole.0 as u32, position: hole.1 as u32 }, value);
                if !was_full {
                    return;
                }
                hole = (at, position);
            } else if self.lines[at].free() > 0 {
                return;
            }
            at = self.next(at);
        }
    }

    /// An entry of line `at` whose way from home passes `hole` or begins there.
    fn strayed(&self, at: usize, hole: usize) -> Option<usize> {
        let size = self.lines.len();
        let distance = |from: usize| (at + size - from) % size;
        let line = &self.lines[at];
        (0..WIDTH).find(|&i| line.tags[i] != 0 && distance(self.home(line.tags[i])) >= distance(hole))
    }

    /// Whether more than seven eighths would be in use with one more.
    fn is_full(&self) -> bool {
        self.len >= self.lines.len() * (WIDTH - 1)
    }

    /// Doubles. Shards begin with sizes of their own, so that some are about to grow at any time and others just have:
    /// together they always have about the same load.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, number: usize) {
        let size = match self.lines.len() * 2 {
            0 => 1,
            BEGIN => BEGIN + number % BEGIN,
            size => size,
        };
        let old = std::mem::replace(&mut self.lines, vec![Line::default(); size]);
        let mut late = Vec::new();
        for (from, line) in old.iter().enumerate() {
            // A line becomes two. What came to it from another one, and what finds its line full, waits for the others.
            let mut fill = [0; 2];
            for (tag, value) in line.entries() {
                let home = self.home(tag);
                match fill.get_mut(home.wrapping_sub(2 * from)) {
                    Some(at) if *at < WIDTH && size == 2 * old.len() => {
                        self.put(Spot { tag, line: home as u32, position: *at as u32 }, value);
                        *at += 1;
                    }
                    _ => late.push((tag, value)),
                }
            }
        }
        for (tag, value) in late {
            self.put(self.vacancy(tag), value);
        }
    }

    fn vacancy(&self, tag: u32) -> Spot {
        let mut line = self.home(tag);
        loop {
            let vacant = self.lines[line].positions(0);
            if vacant != 0 {
                return Spot { tag, line: line as u32, position: vacant.trailing_zeros() };
            }
            line = self.next(line);
        }
    }

    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag << SHARD_BITS) * self.lines.len() as u64) >> 32) as usize
    }

    fn next(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() { 0 } else { line + 1 }
    }
}

impl Line {
    /// A bit for each position with this tag.
    fn positions(&self, tag: u32) -> u32 {
        let mut bits = [0; WIDTH];
        for (i, bit) in bits.iter_mut().enumerate() {
            *bit = if self.tags[i] == tag { 1 << i } else { 0 };
        }
        let [a, b, c, d, e, f, g, h] = bits;
        let half = [a | e, b | f, c | g, d | h];
        half[0] | half[1] | half[2] | half[3]
    }

    fn entries(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut used = !self.positions(0) & ((1 << WIDTH) - 1);
        std::iter::from_fn(move || {
            let i = used.trailing_zeros() as usize;
            let entry = (*self.tags.get(i)?, self.values[i]);
            used &= used - 1;
            Some(entry)
        })
    }

    fn free(&self) -> u32 {
        self.positions(0).count_ones()
    }
}

fn number(tag: u32) -> usize {
    (tag >> (u32::BITS - SHARD_BITS)) as usize
}

/// Upper half of a multiplicative hash, because engines may number their blocks in sequence; never 0.
fn tag(hash: u64) -> u32 {
    (((hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32).max(1)
}
