//! Hands out ranges of a pool: best fit over free extents of whole pages, and small blocks within pages.
//!
//! Metadata exists only for what is *free* (and for pages split into small blocks); an allocated block costs
//! nothing here, because its record in the store already says where it is. Best fit finds a freed block of the
//! same size exactly, whatever that size is. The `offset-allocator` crate was the alternative: constant time,
//! but 32 B per block, and its bins round a request up and a freed range down, so that a freed block of a size
//! between two bins is not found again until a neighbour is freed too.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Unit and alignment of blocks of a page or more.
pub const PAGE: u64 = 4096;
/// Smallest small block; small blocks are powers of two from here to half a page, aligned to their size.
pub const SMALLEST: u64 = 64;
const SMALL_CLASSES: usize = 6; // 64, 128, 256, 512, 1024, 2048

/// One page split into equal small blocks.
#[derive(Debug)]
struct SmallPage {
    class: usize,
    /// Bit set = block taken.
    used: u64,
}

/// The free space of a pool of up to 16 TiB.
#[derive(Debug)]
pub struct Extents {
    free_by_page: BTreeMap<u32, u32>,
    free_by_len: BTreeSet<(u32, u32)>,
    free_pages: u64,
    pages: u32,
    small: HashMap<u32, SmallPage>,
    /// Per class, the split pages with room.
    roomy: [BTreeSet<u32>; SMALL_CLASSES],
}

impl Extents {
    /// A pool of `bytes`, all free; a last partial page is not used. At most 2^32 - 1 pages.
    pub fn new(bytes: u64) -> Self {
        let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
        let mut extents = Self {
            free_by_page: BTreeMap::new(),
            free_by_len: BTreeSet::new(),
            free_pages: 0,
            pages,
            small: HashMap::new(),
            roomy: Default::default(),
        };
        if pages > 0 {
            extents.put_back(0, pages);
        }
        extents
    }

    /// Bytes in free pages. Room in pages split into small blocks is not counted.
    pub fn free_bytes(&self) -> u64 {
        self.free_pages * PAGE
    }

    /// The largest block that would fit now, bytes.
    pub fn largest_free(&self) -> u64 {
        self.free_by_len.last().map_or(0, |&(len, _)| u64::from(len) * PAGE)
    }

    /// Number of separate free extents: 1 or 0 means no fragmentation at all.
    pub fn free_extents(&self) -> usize {
        self.free_by_page.len()
    }

    /// Bytes that a block of `size` actually takes.
    pub fn rounded(size: u64) -> u64 {
        match small_class(size) {
            Some(class) => SMALLEST << class,
            None => size.div_ceil(PAGE) * PAGE,
        }
    }

    /// The offset of a range of `size` bytes (at least 1), or `None` if no free extent is long enough.
    pub fn allocate(&mut self, size: u64) -> Option<u64> {
        match small_class(size) {
            Some(class) => self.allocate_small(class),
            None => self.take(u32::try_from(size.div_ceil(PAGE)).ok()?).map(|page| u64::from(page) * PAGE),
        }
    }

    /// Takes back what `allocate(size)` returned.
    ///
    /// # Panics
    /// If the range is not allocated: two blocks would share memory, so going on is not an option.
    pub fn free(&mut self, offset: u64, size: u64) {
        let page = u32::try_from(offset / PAGE).expect("offset lies in the pool");
        match small_class(size) {
            Some(class) => self.free_small(page, class, offset % PAGE),
            None => self.put_back(page, size.div_ceil(PAGE) as u32),
        }
    }

    /// Roughly how many bytes the bookkeeping takes: trees count as one and a half times their content.
    pub fn memory_bytes(&self) -> usize {
        let trees = 2 * self.free_by_page.len() * size_of::<(u32, u32)>()
            + self.roomy.iter().map(|pages| pages.len() * size_of::<u32>()).sum::<usize>();
        trees * 3 / 2 + self.small.capacity() * (size_of::<(u32, SmallPage)>() + 1)
    }

    fn take(&mut self, pages: u32) -> Option<u32> {
        let (len, page) = *self.free_by_len.range((pages, 0)..).next()?;
        self.free_by_len.remove(&(len, page));
        self.free_by_page.remove(&page);
        if len > pages {
            self.free_by_page.insert(page + pages, len - pages);
            self.free_by_len.insert((len - pages, page + pages));
        }
        self.free_pages -= u64::from(pages);
        Some(page)
    }

    fn put_back(&mut self, mut page: u32, pages: u32) {
        self.free_pages += u64::from(pages);
        let mut end = page + pages;
        assert!(end <= self.pages, "freed pages {page}..{end} lie beyond the pool of {}", self.pages);
        if let Some((&before, &len)) = self.free_by_page.range(..end).next_back() {
            assert!(before + len <= page, "freed pages {page}..{end} are free already");
            if before + len == page {
                self.free_by_page.remove(&before);
                self.free_by_len.remove(&(len, before));
                page = before;
            }
        }
        if let Some(len) = self.free_by_page.remove(&end) {
            self.free_by_len.remove(&(len, end));
            end += len;
        }
        self.free_by_page.insert(page, end - page);
        self.free_by_len.insert((end - page, page));
    }

    fn allocate_small(&mut self, class: usize) -> Option<u64> {
        let page = match self.roomy[class].first() {
            Some(&page) => page,
            None => {
                let page = self.take(1)?;
                self.small.insert(page, SmallPage { class, used: 0 });
                self.roomy[class].insert(page);
                page
            }
        };
        let split = self.small.get_mut(&page).expect("roomy pages are split pages");
        let slot = split.used.trailing_ones();
        split.used |= 1 << slot;
        if split.used == full(class) {
            self.roomy[class].remove(&page);
        }
        Some(u64::from(page) * PAGE + (u64::from(slot) << class) * SMALLEST)
    }

    fn free_small(&mut self, page: u32, class: usize, within: u64) {
        let split = self.small.get_mut(&page).expect("a small block lies in a split page");
        let bit = 1u64 << (within / (SMALLEST << class));
        assert!(split.class == class && split.used & bit != 0, "small block freed twice in page {page}");
        split.used &= !bit;
        if split.used == 0 {
            self.small.remove(&page);
            self.roomy[class].remove(&page);
            self.put_back(page, 1);
        } else {
            self.roomy[class].insert(page);
        }
    }
}

fn small_class(size: u64) -> Option<usize> {
    (size <= PAGE / 2).then(|| {
        size.max(SMALLEST).next_power_of_two().trailing_zeros() as usize - SMALLEST.trailing_zeros() as usize
    })
}

fn full(class: usize) -> u64 {
    u64::MAX >> (64 - (PAGE / (SMALLEST << class)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_round_to_their_class() {
        for (size, rounded) in
            [(1, 64), (64, 64), (65, 128), (2048, 2048), (2049, 4096), (4096, 4096), (4097, 8192)]
        {
            assert_eq!(Extents::rounded(size), rounded, "{size}");
        }
    }

    #[test]
    fn a_freed_block_of_any_size_is_found_again() {
        let mut extents = Extents::new(17 * 100 * PAGE);
        let all: Vec<u64> = (0..100).map(|_| extents.allocate(17 * PAGE).unwrap()).collect();
        assert_eq!((extents.free_bytes(), extents.allocate(1)), (0, None));
        for offset in all.into_iter().step_by(2) {
            extents.free(offset, 17 * PAGE);
        }
        assert_eq!(extents.free_extents(), 50);
        assert!((0..50).all(|_| extents.allocate(17 * PAGE).is_some()));
        assert_eq!(extents.free_bytes(), 0);
    }

    /// Blocks of 64 KiB to 32 MiB, the sizes that models and block lengths give in practice, all equally often. Returns
    /// the share of the pool in use when a block first does not fit, and the smallest share after that, while blocks
    /// are replaced for many times the pool, the oldest first or at random.
    fn utilisation(seed: u64, oldest_first: bool) -> (f64, f64) {
        const SIZES_KIB: [u64; 12] = [64, 96, 128, 256, 320, 512, 1024, 2048, 2560, 5120, 8192, 32768];
        let (pool, mut random) = (8 << 30, seed);
        let mut below = |bound: usize| {
            // xorshift64*, so that the seed decides everything.
            random ^= random >> 12;
            random ^= random << 25;
            random ^= random >> 27;
            (random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
        };
        let (mut extents, mut live) = (Extents::new(pool), std::collections::VecDeque::new());
        let (mut first, mut worst) = (None, 1.0f64);
        for _ in 0..60_000 {
            let size = SIZES_KIB[below(SIZES_KIB.len())] << 10;
            let offset = loop {
                if let Some(offset) = extents.allocate(size) {
                    break offset;
                }
                let used = 1.0 - extents.free_bytes() as f64 / pool as f64;
                first.get_or_insert(used);
                worst = worst.min(used);
                let at = if oldest_first { 0 } else { below(live.len()) };
                let (offset, size) = live.remove(at).unwrap();
                extents.free(offset, size);
            };
            live.push_back((offset, size));
        }
        (first.unwrap(), worst)
    }

    #[test]
    #[cfg_attr(miri, ignore = "too long for an interpreter")]
    fn a_mix_of_sizes_fills_the_pool() {
        for seed in 1..=5 {
            let (first, oldest) = utilisation(seed, true);
            let (_, random) = utilisation(seed, false);
            println!(
                "seed {seed}: first refusal {first:.3}, at worst oldest first {oldest:.3}, random {random:.3}"
            );
            assert!(first >= 0.95 && oldest >= 0.95, "{first} {oldest}");
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn a_double_free_does_not_go_on() {
        let mut extents = Extents::new(8 * PAGE);
        let offset = extents.allocate(PAGE).unwrap();
        extents.free(offset, PAGE);
        extents.free(offset, PAGE);
    }

    proptest! {
        /// Live ranges never overlap, are aligned, lie in the pool; when all are freed, all of it is one extent.
        #[test]
        fn ranges_are_disjoint(ops in prop::collection::vec((any::<bool>(), 1u64..40_000, any::<prop::sample::Index>()), 1..200)) {
            let bytes = 64 * PAGE;
            let mut extents = Extents::new(bytes);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (put, size, pick) in ops {
                if put {
                    let size = if size % 2 == 0 { size / 16 + 1 } else { size };
                    let Some(offset) = extents.allocate(size) else { continue };
                    let end = offset + Extents::rounded(size);
                    prop_assert!(end <= bytes);
                    prop_assert_eq!(offset % Extents::rounded(size).min(PAGE), 0);
                    prop_assert!(live.iter().all(|&(o, s)| end <= o || o + Extents::rounded(s) <= offset));
                    live.push((offset, size));
                } else if !live.is_empty() {
                    let (offset, size) = live.swap_remove(pick.index(live.len()));
                    extents.free(offset, size);
                }
            }
            for (offset, size) in live {
                extents.free(offset, size);
            }
            prop_assert_eq!((extents.free_bytes(), extents.free_extents(), extents.largest_free()), (bytes, 1, bytes));
        }
    }
}
