//! Blocks that lie in many places: gathered from runs of memory and scattered to them, with the checksum in the same pass.
//!
//! An engine keeps one block in as many runs as it has layers, and K apart from V. A [`Plan`] names them once, by their
//! addresses; from then on a block is its number.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::checksum::Checksum;
use crate::host::HostPool;
use crate::shared::{Place, Shared};
use crate::stream::{STEP, copy_past_cache, fetch_ahead, settle};

/// What is copied and summed at once: a part of the first-level cache.
pub(crate) const CHUNK: usize = 8 << 10;
/// Blocks of this size or more are copied out past the cache. An engine loads more of them than the cache holds, and whoever writes through
/// it reads all that is overwritten: 150 us for 1 MiB, and 60 past it.
const PAST_CACHE: usize = 64 << 10;

/// The checksum of parts as if they followed each other.
pub fn checksum_of(parts: &[Shared<'_>]) -> u64 {
    if let [part] = parts {
        return part.checksum();
    }
    let mut sum = Checksum::default();
    parts.iter().for_each(|part| part.add_to(&mut sum));
    sum.finish()
}

/// Fills places one after the other, and sums up what has arrived in them, while it is still in the cache.
pub struct Scatter<'p, 'a> {
    places: &'p mut [Place<'a>],
    sum: Option<Checksum>,
}

impl<'p, 'a> Scatter<'p, 'a> {
    /// Without `summed`, the bytes are copied only.
    pub fn new(places: &'p mut [Place<'a>], summed: bool) -> Self {
        Self { places, sum: summed.then(Checksum::default) }
    }

    /// Bytes for which there is room.
    pub fn left(&self) -> u64 {
        self.places.iter().map(|place| place.left() as u64).sum()
    }

    /// The checksum of what has arrived, if that was asked for.
    pub fn checksum(&self) -> Option<u64> {
        self.sum.as_ref().map(Checksum::finish)
    }

    /// Copies `from` in, as much as there is room for. Returns how many bytes.
    pub fn copy(&mut self, from: Shared<'_>) -> usize {
        if from.len() >= PAST_CACHE { self.copy_past_cache(from) } else { self.copy_into_cache(from) }
    }

    fn copy_past_cache(&mut self, from: Shared<'_>) -> usize {
        let (mut step, mut rest) = ([0; STEP], from);
        while let Some(place) = next(&mut self.places).filter(|_| !rest.is_empty()) {
            fetch_ahead(rest);
            // What is summed up is what was copied, even if somebody changes the block meanwhile.
            let count = rest.first(place.left()).copy_to(&mut step);
            let step = &step[..count];
            // SAFETY: there is room for as many bytes, and nobody else knows of those that are copied.
            unsafe { copy_past_cache(step.into(), place.as_mut_ptr()) };
            place.advance(count);
            if let Some(sum) = &mut self.sum {
                sum.update(step);
            }
            rest = rest.after(count);
        }
        settle();
        from.len() - rest.len()
    }

    fn copy_into_cache(&mut self, from: Shared<'_>) -> usize {
        let mut rest = from;
        while !rest.is_empty() {
            let copy = |place: &mut Place<'_>| {
                place.copy_in(rest);
                Ok(())
            };
            // It does not fail.
            match self.piece(CHUNK, copy) {
                Ok(count) if count > 0 => rest = rest.after(count),
                _ => break,
            }
        }
        from.len() - rest.len()
    }

    /// Has `fill` fill a piece of at most `max` bytes, which lies in one place. Returns how many bytes it wrote; 0 when all
    /// places are full.
    pub fn piece(
        &mut self,
        max: usize,
        fill: impl FnOnce(&mut Place<'_>) -> io::Result<()>,
    ) -> io::Result<usize> {
        let Some(place) = next(&mut self.places) else { return Ok(0) };
        let mut piece = place.first(max);
        let room = piece.left();
        fill(&mut piece)?;
        let count = room.saturating_sub(piece.left());
        if let Some(sum) = &mut self.sum {
            // SAFETY: every place is initialised memory, before it is filled as well: a slice, or what a plan promises.
            unsafe { place.shown(count) }.add_to(sum);
        }
        place.advance(count);
        Ok(count)
    }
}

/// The next place that is not full. Those before it are dropped from the list.
fn next<'l, 'a>(places: &'l mut &mut [Place<'a>]) -> Option<&'l mut Place<'a>> {
    while places.first().is_some_and(|place| place.left() == 0) {
        *places = &mut std::mem::take(places)[1..];
    }
    places.first_mut()
}

/// A part of every block: of block `n`, the `len` bytes at `addr + n × stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub addr: usize,
    pub len: usize,
    pub stride: usize,
}

/// Why a plan was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("a plan of {runs} runs for {blocks} blocks names no memory; it needs one of each at least")]
    Empty { runs: usize, blocks: usize },
    #[error("run {run} begins at address 0 or has no bytes")]
    Nothing { run: usize },
    #[error("run {run}: blocks of {len} B that are {stride} B apart overlap")]
    Overlap { run: usize, len: usize, stride: usize },
    #[error("run {run}: {blocks} blocks, {stride} B apart from {addr:#x} on, end beyond the memory there is")]
    Outside { run: usize, addr: usize, stride: usize, blocks: usize },
    #[error("the runs of a block are {bytes} B in total; a block has at most {max} B", max = u32::MAX)]
    TooLarge { bytes: u64 },
}

impl PlanError {
    /// The same of another run.
    fn of_run(self, at: usize) -> Self {
        match self {
            Self::Nothing { .. } => Self::Nothing { run: at },
            Self::Outside { addr, stride, blocks, .. } => Self::Outside { run: at, addr, stride, blocks },
            Self::Overlap { len, stride, .. } => Self::Overlap { run: at, len, stride },
            other @ (Self::Empty { .. } | Self::TooLarge { .. }) => other,
        }
    }
}

/// Bytes of each of `blocks` blocks that lie in these runs, of whichever memory.
///
/// # Errors
/// [`PlanError`]: what makes no sense, whatever lies there.
pub fn block_bytes(runs: &[Run], blocks: usize) -> Result<u32, PlanError> {
    if runs.is_empty() || blocks == 0 {
        return Err(PlanError::Empty { runs: runs.len(), blocks });
    }
    for (run, &Run { addr, len, stride }) in runs.iter().enumerate() {
        if addr == 0 || len == 0 {
            return Err(PlanError::Nothing { run });
        }
        if blocks > 1 && stride < len {
            return Err(PlanError::Overlap { run, len, stride });
        }
        let last = stride.checked_mul(blocks - 1).and_then(|offset| offset.checked_add(addr));
        // No object ends in the upper half of what an address can say.
        let end = last.and_then(|last| last.checked_add(len)).filter(|&end| end <= isize::MAX as usize);
        end.ok_or(PlanError::Outside { run, addr, stride, blocks })?;
    }
    let bytes = runs.iter().map(|run| run.len as u64).fold(0, u64::saturating_add);
    u32::try_from(bytes).map_err(|_| PlanError::TooLarge { bytes })
}

/// Where blocks lie: all in the same runs, as an engine keeps them, or each in a piece of its own.
///
/// A block is the bytes of its runs, one behind the other, in the order of the runs.
pub struct Plan {
    runs: Box<[Run]>,
    blocks: usize,
    /// Bytes of every block. `None` means that block `n` is run `n`.
    block_bytes: Option<u32>,
    /// What the runs lie in, where that is this crate's.
    _pool: Option<Arc<HostPool>>,
}

impl Plan {
    /// Checks the bounds of `blocks` blocks, once.
    ///
    /// # Safety
    /// Until the plan is dropped, every run of every block is initialised memory of this process that may be read and
    /// written, and in which nobody else keeps a reference. While a call names a block, nobody else writes to it, and where
    /// the call fills it nobody else reads it; two calls at the same time do not name the same block, unless both only
    /// read it.
    ///
    /// # Errors
    /// [`PlanError`]: what makes no sense, whatever lies there.
    pub unsafe fn new(runs: &[Run], blocks: usize) -> Result<Self, PlanError> {
        let block_bytes = block_bytes(runs, blocks)?;
        Ok(Self { runs: runs.into(), blocks, block_bytes: Some(block_bytes), _pool: None })
    }

    /// A plan of runs in `pool`, each at its offset there instead of an address. It keeps the pool mapped, and calls that name
    /// the same block at the same time see each other's bytes, no worse.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`PlanError::Outside`] also where a run does not lie in the pool.
    pub fn in_pool(pool: &Arc<HostPool>, runs: &[Run], blocks: usize) -> Result<Self, PlanError> {
        let at = |(run, &Run { addr, len, stride }): (usize, &Run)| {
            let outside = PlanError::Outside { run, addr, stride, blocks };
            let before =
                stride.checked_mul(blocks.saturating_sub(1)).and_then(|bytes| bytes.checked_add(len));
            let all = before.and_then(|bytes| pool.mapping().bytes(addr as u64, bytes as u64));
            all.map(|all| Run { addr: all.as_ptr().expose_provenance(), len, stride }).ok_or(outside)
        };
        let runs = runs.iter().enumerate().map(at).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: every run lies in the pool, which the plan keeps; nobody makes references to a pool's bytes.
        let plan = unsafe { Self::new(&runs, blocks) }?;
        Ok(Self { _pool: Some(Arc::clone(pool)), ..plan })
    }

    /// A plan of blocks that lie anywhere, each in one piece: the address and length of each. There may be none.
    ///
    /// # Safety
    /// As [`new`](Self::new) has it of every run of every block.
    ///
    /// # Errors
    /// [`PlanError`]: what makes no sense, whatever lies there.
    pub unsafe fn of_pieces(pieces: &[(usize, usize)]) -> Result<Self, PlanError> {
        let piece = |(at, &(addr, len)): (usize, &(usize, usize))| {
            let run = [Run { addr, len, stride: len }];
            // SAFETY: nothing of it is used.
            let checked = unsafe { Self::new(&run, 1) };
            checked.map(|_| run[0]).map_err(|error| error.of_run(at))
        };
        let runs = pieces.iter().enumerate().map(piece).collect::<Result<_, _>>()?;
        Ok(Self { runs, blocks: pieces.len(), block_bytes: None, _pool: None })
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of a block. Returns `None` if there is no such block.
    pub fn block_bytes(&self, block: usize) -> Option<u32> {
        let (runs, _) = self.runs_of(block)?;
        // It was checked that they are not too many.
        self.block_bytes.or_else(|| runs.first().map(|run| run.len as u32))
    }

    /// How many runs a block has.
    pub fn runs(&self) -> usize {
        if self.block_bytes.is_some() { self.runs.len() } else { 1 }
    }

    /// Bytes of a block's layer, where the runs are `layers` groups, one behind the other, of equally many runs and bytes.
    /// Returns `None` where they are not.
    pub fn layer_bytes(&self, layers: usize) -> Option<u32> {
        let each = self.block_bytes.and(self.runs.len().checked_div(layers))?;
        if each == 0 || each * layers != self.runs.len() {
            return None;
        }
        let bytes = |layer: &[Run]| layer.iter().map(|run| run.len).sum::<usize>();
        let first = bytes(&self.runs[..each]);
        // A block was checked to be no larger than that.
        self.runs.chunks(each).all(|layer| bytes(layer) == first).then_some(first as u32)
    }

    /// A block's runs, for reading. Returns `None` if there is no such block.
    pub fn parts(&self, block: usize) -> Option<impl Iterator<Item = Shared<'_>>> {
        // SAFETY: the maker of the plan promised that these bytes can be read while it exists.
        Some(self.at(block)?.map(|(base, len)| unsafe { Shared::new(base, len) }))
    }

    /// A block's runs, for filling. Returns `None` if there is no such block.
    pub fn places(&self, block: usize) -> Option<impl Iterator<Item = Place<'_>>> {
        // SAFETY: the maker of the plan promised that these bytes can be written while it exists, that nobody keeps references
        // to them, and that two calls at the same time do not fill the same block.
        Some(self.at(block)?.map(|(base, len)| unsafe { Place::new(base, len) }))
    }

    fn at(&self, block: usize) -> Option<impl Iterator<Item = (NonNull<u8>, usize)>> {
        let (runs, nth) = self.runs_of(block)?;
        Some(runs.iter().filter_map(move |run| {
            let base = std::ptr::with_exposed_provenance_mut(run.addr + nth * run.stride);
            // It is never null: the address was checked not to be 0, and sums not to overflow.
            Some((NonNull::new(base)?, run.len))
        }))
    }

    /// The runs in which a block lies, and how many blocks lie before it in each.
    fn runs_of(&self, block: usize) -> Option<(&[Run], usize)> {
        match self.block_bytes {
            _ if block >= self.blocks => None,
            Some(_) => Some((&self.runs, block)),
            None => Some((self.runs.get(block..=block)?, 0)),
        }
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("runs", &self.runs)
            .field("blocks", &self.blocks)
            .field("block_bytes", &self.block_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checksum::checksum;
    use crate::host::HostPool;

    /// Cuts `bytes` at places that `cuts` names; parts may be empty.
    fn cut<'a>(mut bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
        let mut parts = Vec::new();
        for cut in cuts {
            let (part, rest) = bytes.split_at(cut.index(bytes.len() + 1));
            parts.push(part);
            bytes = rest;
        }
        parts.push(bytes);
        parts
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// As one copy of the whole does, and nothing beside it is touched.
        #[test]
        #[cfg_attr(miri, ignore = "calls that Miri does not know")]
        fn gathering_and_scattering_are_a_copy(
            len in 0_usize..150_000, offset in 0_u64..5_000, seed: u8, summed: bool,
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
            others in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
        ) {
            let bytes: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(7) ^ seed).collect();
            let pool = HostPool::new(160 << 10, false).unwrap();
            let parts: Vec<Shared<'_>> = cut(&bytes, &cuts).into_iter().map(Shared::from).collect();
            let told = std::cell::Cell::new(0);
            let sum = pool.mapping().gather(offset, &parts, || told.set(told.get() + 1));
            prop_assert_eq!((sum, told.get()), (Some(checksum(&bytes)), 1));
            prop_assert_eq!(checksum_of(&parts), checksum(&bytes));
            let lies = pool.mapping().bytes(0, 160 << 10).unwrap().to_vec();
            let (before, rest) = lies.split_at(offset as usize);
            prop_assert!(rest[..len] == bytes);
            prop_assert!(before.iter().chain(&rest[len..]).all(|&byte| byte == 0));

            let stored = pool.mapping().bytes(offset, len as u64).unwrap();
            let mut target = vec![0xee; len + 5];
            let (inside, behind) = target.split_at_mut(len);
            let lens: Vec<usize> = cut(&bytes, &others).iter().map(|part| part.len()).collect();
            let mut left = inside;
            let mut places = Vec::new();
            for len in lens {
                let (part, rest) = left.split_at_mut(len);
                places.push(Place::from(part));
                left = rest;
            }
            let mut scatter = Scatter::new(&mut places, summed);
            prop_assert_eq!(scatter.left(), len as u64);
            prop_assert_eq!((scatter.copy(stored), scatter.left()), (len, 0));
            prop_assert_eq!(scatter.checksum(), summed.then(|| checksum(&bytes)));
            prop_assert_eq!(scatter.copy(Shared::from(&b"more"[..])), 0, "it is full");
            prop_assert!(behind.iter().all(|&byte| byte == 0xee));
            prop_assert!(target[..len] == bytes);
        }
    }

    #[test]
    fn a_plan_of_strided_runs_names_each_block() {
        // Three blocks of two layers; each layer keeps its blocks 10 bytes apart.
        let mut memory: Vec<u8> = (0..60).collect();
        let base = memory.as_mut_ptr().expose_provenance();
        let runs = [0, 30].map(|layer| Run { addr: base + layer, len: 4, stride: 10 });
        // SAFETY: the runs lie in `memory`, which lives longer and is not touched by its name while the plan is used.
        let plan = unsafe { Plan::new(&runs, 3) }.unwrap();
        assert_eq!((plan.block_bytes(2), plan.blocks(), plan.runs()), (Some(8), 3, 2));
        assert_eq!(plan.block_bytes(3), None);
        let parts: Vec<u8> = plan.parts(2).unwrap().flat_map(|part| part.to_vec()).collect();
        assert_eq!(parts, [20, 21, 22, 23, 50, 51, 52, 53]);
        let mut places: Vec<Place<'_>> = plan.places(1).unwrap().collect();
        assert_eq!(Scatter::new(&mut places, true).copy(Shared::from(&[9; 8][..])), 8);
        assert!(plan.parts(3).is_none() && plan.places(3).is_none());
        assert_eq!(
            [0, 1, 2, 3, usize::MAX].map(|layers| plan.layer_bytes(layers)),
            [None, Some(8), Some(4), None, None]
        );
        drop(plan);
        // SAFETY: nothing of it is used.
        let uneven = unsafe { Plan::new(&[runs[0], Run { len: 3, ..runs[1] }], 3) }.unwrap();
        assert_eq!([1, 2].map(|layers| uneven.layer_bytes(layers)), [Some(7), None]);
        let mut expected: Vec<u8> = (0..60).collect();
        expected[10..14].fill(9);
        expected[40..44].fill(9);
        assert_eq!(memory, expected);
    }

    #[test]
    fn a_plan_of_pieces_has_a_block_for_each() {
        let mut memory = vec![0_u8; 30];
        let base = memory.as_mut_ptr().expose_provenance();
        // SAFETY: the pieces lie in `memory`, which lives longer and is not touched by its name while the plan is used.
        let plan = unsafe { Plan::of_pieces(&[(base + 20, 10), (base, 3)]) }.unwrap();
        assert_eq!((plan.blocks(), plan.runs()), (2, 1));
        assert_eq!([0, 1, 2].map(|n| plan.block_bytes(n)), [Some(10), Some(3), None]);
        assert_eq!(plan.layer_bytes(1), None, "its blocks differ");
        let mut places: Vec<Place<'_>> = plan.places(1).unwrap().collect();
        assert_eq!(Scatter::new(&mut places, true).copy(Shared::from(&[7; 8][..])), 3);
        assert_eq!(plan.parts(0).unwrap().map(|part| part.len()).sum::<usize>(), 10);
        assert!(plan.parts(2).is_none() && plan.places(usize::MAX).is_none());
        drop(plan);
        assert!(memory[..3] == [7; 3] && memory[3..].iter().all(|&byte| byte == 0));
        // SAFETY: nothing of them is used.
        let refused = |pieces: &[_]| unsafe { Plan::of_pieces(pieces) }.unwrap_err().to_string();
        assert!(refused(&[(base, 3), (base, 0)]).contains("run 1 begins at address 0 or has no bytes"));
        assert!(refused(&[(base, 3), (usize::MAX - 4, 9)]).contains("run 1: 1 blocks"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "calls that Miri does not know")]
    fn a_plan_in_a_pool_names_what_lies_there_and_no_more() {
        let pool = Arc::new(HostPool::new(8192, false).unwrap());
        let runs = [Run { addr: 4, len: 8, stride: 100 }, Run { addr: 4096, len: 96, stride: 4000 }];
        let plan = Plan::in_pool(&pool, &runs, 2).unwrap();
        assert!(pool.mapping().write(104, &[1; 8]) && pool.mapping().write(8096, &[2; 96]));
        let block: Vec<u8> = plan.parts(1).unwrap().flat_map(|part| part.to_vec()).collect();
        assert_eq!(block, [[1; 8].as_slice(), &[2; 96]].concat());
        drop(pool);
        assert_eq!(plan.parts(0).unwrap().map(|part| part.len()).sum::<usize>(), 104);

        let pool = Arc::new(HostPool::new(8192, false).unwrap());
        for beyond in [
            Run { len: 97, ..runs[1] },
            Run { addr: usize::MAX, ..runs[0] },
            Run { stride: usize::MAX, ..runs[0] },
        ] {
            let error = Plan::in_pool(&pool, &[runs[0], beyond], 2).unwrap_err();
            assert!(error.to_string().contains("run 1: 2 blocks"), "{error}");
        }
        assert!(Plan::in_pool(&pool, &[], 2).is_err() && Plan::in_pool(&pool, &runs, 0).is_err());
    }

    #[test]
    fn plans_that_make_no_sense_are_refused() {
        let run = Run { addr: 4096, len: 8, stride: 8 };
        let check = |runs: &[Run], blocks, expected: &str| {
            // SAFETY: nothing of it is used.
            let plan = unsafe { Plan::new(runs, blocks) };
            let text =
                plan.map_or_else(|error| error.to_string(), |plan| format!("{:?} B", plan.block_bytes(0)));
            assert!(text.contains(expected), "{text}");
        };
        check(&[run, run], 4, "Some(16) B");
        check(&[Run { stride: 0, ..run }], 1, "Some(8) B");
        check(&[], 4, "0 runs for 4 blocks");
        check(&[run], 0, "1 runs for 0 blocks");
        check(&[run, Run { addr: 0, ..run }], 1, "run 1 begins at address 0");
        check(&[Run { len: 0, ..run }], 1, "has no bytes");
        check(&[Run { stride: 7, ..run }], 2, "overlap");
        check(&[run], usize::MAX, "beyond the memory there is");
        check(&[Run { addr: usize::MAX - 4, ..run }], 1, "beyond the memory there is");
        check(&[Run { len: u32::MAX as usize, ..run }, run], 1, "4294967303 B in total");
    }
}
