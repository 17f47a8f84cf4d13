//! Hash to cell, 8 bytes an entry: 32 bits of the mixed hash and the cell number.
//!
//! Open addressing with linear probing. The home of an entry is a monotone function of its 32 bits,
//! so the table can have any size and grows in one pass from front to back, without reading the
//! hashes in the cells. A match of 32 bits is confirmed by the caller against the cell.

const EMPTY: u64 = u64::MAX;

/// Blocks whose table lines are fetched at once before an insertion.
const WARM: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<u64>,
    len: usize,
}

/// Answer of [`Table::probe`].
pub(super) enum Probe {
    Found(u32),
    /// Where the entry would go, while the table is not changed.
    Vacant(usize),
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<u64>()
    }

    /// `confirm` says whether a cell really has the hash.
    pub(super) fn probe(&self, hash: u64, confirm: impl Fn(u32) -> bool) -> Probe {
        let tag = tag(hash);
        let mut i = self.home(tag);
        loop {
            match self.entries.get(i) {
                Some(&EMPTY) => return Probe::Vacant(i),
                Some(&entry) if (entry >> 32) as u32 == tag && confirm(entry as u32) => {
                    return Probe::Found(entry as u32);
                }
                Some(_) => i += 1,
                None if self.entries.is_empty() => return Probe::Vacant(0),
                None => i = 0,
            }
        }
    }

    /// Makes room for `more` entries with at most four fifths of the table in use.
    pub(super) fn reserve(&mut self, more: usize) {
        let needed = (self.len + more) * 5 / 4 + 1;
        if needed <= self.entries.len() {
            return;
        }
        let size = needed.max(self.entries.len() / 5 * 7).max(16);
        let old = std::mem::replace(&mut self.entries, vec![EMPTY; size]);
        for entry in old.into_iter().filter(|&entry| entry != EMPTY) {
            let mut i = self.home((entry >> 32) as u32);
            while self.entries[i] != EMPTY {
                i = self.next(i);
            }
            self.entries[i] = entry;
        }
    }

    /// Reads the lines that the next insertions need. The reads are independent, so their cache
    /// misses overlap; they are most of the time of an insertion into a large table.
    pub(super) fn warm(&self, hashes: &[u64]) {
        let read = |&hash: &u64| self.entries.get(self.home(tag(hash))).copied().unwrap_or(0);
        std::hint::black_box(hashes.iter().take(WARM).map(read).fold(0, |all, entry| all ^ entry));
    }

    /// `vacancy` comes from a probe since which the table has not changed, and room is reserved.
    pub(super) fn insert(&mut self, vacancy: usize, hash: u64, cell: u32) {
        self.entries[vacancy] = (u64::from(tag(hash)) << 32) | u64::from(cell);
        self.len += 1;
    }

    /// Removes the entry of a cell and moves later ones of its cluster up. An absent entry has no effect.
    pub(super) fn remove(&mut self, hash: u64, cell: u32) {
        let wanted = (u64::from(tag(hash)) << 32) | u64::from(cell);
        let mut hole = self.home(tag(hash));
        while self.entries[hole] != wanted {
            if self.entries[hole] == EMPTY {
                return;
            }
            hole = self.next(hole);
        }
        self.len -= 1;
        let mut i = hole;
        loop {
            i = self.next(i);
            let entry = self.entries[i];
            if entry == EMPTY {
                break;
            }
            let size = self.entries.len();
            let distance = |from: usize| if i >= from { i - from } else { i + size - from };
            if distance(self.home((entry >> 32) as u32)) >= distance(hole) {
                self.entries[hole] = entry;
                hole = i;
            }
        }
        self.entries[hole] = EMPTY;
    }

    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.entries.len() as u64) >> 32) as usize
    }

    fn next(&self, i: usize) -> usize {
        if i + 1 == self.entries.len() { 0 } else { i + 1 }
    }
}

/// Upper half of a multiplicative hash, because engines may number their blocks in sequence.
fn tag(hash: u64) -> u32 {
    ((hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}
