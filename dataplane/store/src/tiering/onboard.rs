//! The way up: lookups that DRAM cannot answer.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::ahead::Late;
use super::budget::{Budget, Permit};
use super::cost::LoadCosts;
use super::moves::Moving;
use super::together::Part;
use super::{Level, Reach, Tiering};
use crate::dram::{Held, Lookup, OwnerId, Reserve};
use crate::error::StoreError;
use crate::store::{Get, GetDone, Pending, Tier};
use crate::times::Times;
use kvasir_memory::buffer::Buffer;
use kvasir_memory::shared::Shared;
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};

/// Bytes loaded at once for a local reader: more would only wait for the pool.
const CHUNK_BYTES: u64 = 32 << 20;
/// How often a block that was evicted between its arrival in the pool and its lease is brought there again.
const LEND_TRIES: usize = 3;
/// Pause between two looks at a block that another writer is storing.
const STORING: Duration = Duration::from_millis(1);

/// What happened to a loaded block in the pool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Brought {
    Resident,
    /// Another writer is storing it.
    InProgress,
    No,
}

/// What was loaded from one tier, in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnboardStats {
    pub loaded: u64,
    pub loaded_bytes: u64,
    /// Blocks the tier said it held and then did not have intact.
    pub missing: u64,
    /// Loaded blocks whose bytes did not match their checksum here; dropped from the tier if it is this host's own.
    pub corrupt: u64,
    /// Blocks the tier failed to load.
    pub failed: u64,
    /// Blocks that took longer than a lookup waits.
    pub timed_out: u64,
}

#[derive(Default)]
pub(super) struct OnboardCounts {
    loaded: AtomicU64,
    loaded_bytes: AtomicU64,
    missing: AtomicU64,
    corrupt: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
    pub(super) times: Times,
    pub(super) costs: LoadCosts,
}

impl OnboardCounts {
    pub(super) fn stats(&self) -> OnboardStats {
        OnboardStats {
            loaded: self.loaded.load(Relaxed),
            loaded_bytes: self.loaded_bytes.load(Relaxed),
            missing: self.missing.load(Relaxed),
            corrupt: self.corrupt.load(Relaxed),
            failed: self.failed.load(Relaxed),
            timed_out: self.timed_out.load(Relaxed),
        }
    }
}

#[derive(Default)]
pub(super) struct Totals {
    pub(super) promoted: AtomicU64,
    pub(super) not_promoted: AtomicU64,
    pub(super) refused: AtomicU64,
    /// Loads that nobody waits for any more; their memory counts until the tier gives it back.
    overdue: Mutex<Vec<Overdue>>,
}

type Overdue = (Pending<Vec<GetDone>>, Vec<Permit>);

/// A block loaded from a tier below, verified against its checksum.
#[derive(Debug)]
pub struct Onboarded {
    pub meta: BlockMeta,
    pub checksum: u64,
    buffer: Buffer,
    moving: Moving,
    _permit: Permit,
}

impl Onboarded {
    pub fn bytes(&self) -> &[u8] {
        &self.buffer.bytes()[..self.meta.size as usize]
    }
}

/// How a remote reader gets a block.
pub enum Read {
    /// From the pool.
    Held(Held),
    /// From a tier below, perhaps for several readers; offer it to [`Tiering::promote_on_evidence`] once it is served.
    Onboarded(Arc<Onboarded>),
    Missing,
    /// The block is there, but too much is requested at once: ask for it again.
    Throttled,
}

impl Read {
    pub fn bytes(&self) -> Option<Shared<'_>> {
        match self {
            Self::Held(held) => Some(held.bytes()),
            Self::Onboarded(block) => Some(block.bytes().into()),
            Self::Missing | Self::Throttled => None,
        }
    }

    /// A block that was removed while it came up is missing: a reader that asked after the removal may have waited for a load
    /// that began before it.
    fn unless_removed(self) -> Self {
        match self {
            Self::Onboarded(block) if block.moving.is_removed() => Self::Missing,
            read => read,
        }
    }
}

/// What places that hosts share have beyond what is known of them here, as they said during this lookup. They may have no room
/// to remember it.
#[derive(Default)]
struct Found {
    /// `None` for a block that the tier was asked for and is not known to have.
    sizes: HashMap<(Tier, BlockKey), Option<u32>>,
    /// From before the places were asked until the end of the lookup: a removal in between finds the move.
    _moving: Vec<Moving>,
}

impl Found {
    /// The sizes of the blocks that a tier has.
    fn sizes(&self, level: &Level, keys: &[BlockKey]) -> Vec<Option<u32>> {
        let known = level.store.sizes(keys).into_iter();
        known.zip(keys).map(|(known, &key)| known.or_else(|| self.size(level, key))).collect()
    }

    fn size(&self, level: &Level, key: BlockKey) -> Option<u32> {
        self.sizes.get(&(level.tier, key)).copied().flatten()
    }

    /// Has a tier that hosts share look for blocks, which is done once a lookup.
    fn look_up(&mut self, level: &Level, keys: &[BlockKey], timeout: Duration) {
        self.sizes.extend(keys.iter().map(|&key| ((level.tier, key), None)));
        match level.store.look_up(keys.to_vec()).wait_timeout(timeout) {
            Ok(sizes) => self.sizes.extend(keys.iter().map(|&key| (level.tier, key)).zip(sizes)),
            Err(pending) => pending.cancel(),
        }
    }
}

/// A block that some tier below holds, on its way up.
pub(super) struct Wanted {
    /// Position in the call.
    at: usize,
    pub(super) size: u32,
    moving: Moving,
    permit: Permit,
}

impl Wanted {
    pub(super) fn key(&self) -> BlockKey {
        self.moving.key()
    }
}

impl Tiering {
    /// Leases on `keys`; what is only below is brought up into the pool first.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn get(
        &self,
        owner: OwnerId,
        keys: &[BlockKey],
        class: u16,
        now_ms: u64,
    ) -> Result<Vec<Lookup>, StoreError> {
        self.get_in(owner, keys, class, Reach::All, now_ms)
    }

    /// As [`get`](Self::get), from the tiers of this host alone, for a request of no class.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn get_here(
        &self,
        owner: OwnerId,
        keys: &[BlockKey],
        now_ms: u64,
    ) -> Result<Vec<Lookup>, StoreError> {
        self.get_in(owner, keys, 0, Reach::Here, now_ms)
    }

    fn get_in(
        &self,
        owner: OwnerId,
        keys: &[BlockKey],
        class: u16,
        reach: Reach,
        now_ms: u64,
    ) -> Result<Vec<Lookup>, StoreError> {
        let late = self.land(keys, now_ms);
        let mut lookups = self.dram.get(owner, keys, class, now_ms)?;
        if self.levels.is_empty() {
            return Ok(lookups);
        }
        let missing: Vec<usize> = (0..keys.len()).filter(|&i| lookups[i] == Lookup::Miss).collect();
        let asked: Vec<BlockKey> = missing.iter().map(|&i| keys[i]).collect();
        let mut found = self.ask_shared(&asked, reach);
        for chunk in self.chunks(&asked, reach, &found) {
            let (keys, places) = (&asked[chunk.clone()], &missing[chunk]);
            let loads = self.load(keys, reach, &self.loading, u64::MAX, &late, &mut found);
            self.walk_on(keys, &loads, now_ms);
            for (load, &place) in loads.into_iter().zip(places) {
                match load {
                    Read::Onboarded(block) => lookups[place] = self.lend(owner, &block, class, now_ms)?,
                    Read::Throttled => lookups[place] = Lookup::Throttled,
                    Read::Held(_) | Read::Missing => {}
                }
            }
        }
        Ok(lookups)
    }

    /// The blocks of `keys` for sending them away, at most `bytes_max` bytes of them in total.
    pub fn read(&self, keys: &[BlockKey], class: u16, now_ms: u64, bytes_max: u64) -> Vec<Read> {
        let late = self.land(keys, now_ms);
        let mut left = bytes_max;
        let mut reads = Vec::with_capacity(keys.len());
        for &key in keys {
            reads.push(match self.dram.hold(key, class, now_ms) {
                Some(held) if u64::from(held.size) > left => Read::Throttled,
                Some(held) => {
                    left -= u64::from(held.size);
                    Read::Held(held)
                }
                None => Read::Missing,
            });
        }
        if self.levels.is_empty() {
            return reads;
        }
        let missing: Vec<usize> = (0..keys.len()).filter(|&i| matches!(reads[i], Read::Missing)).collect();
        let asked: Vec<BlockKey> = missing.iter().map(|&i| keys[i]).collect();
        let mut found = self.ask_shared(&asked, Reach::All);
        let loads = self.load(&asked, Reach::All, &self.sending, left, &late, &mut found);
        self.walk_on(&asked, &loads, now_ms);
        for (i, load) in missing.into_iter().zip(loads) {
            reads[i] = load.unless_removed();
        }
        reads
    }

    /// Puts a served block into the pool if it was asked for before, or there is room for it above the watermark.
    pub fn promote_on_evidence(&self, block: &Onboarded, now_ms: u64) {
        let key = block.meta.key;
        let again = {
            let mut touched = self.touched.lock();
            let again = touched.seen_ms_ago(key, now_ms).is_some();
            touched.note(key, now_ms);
            again
        };
        if again || self.has_room(block.meta.size) {
            self.promote(block, now_ms);
        } else {
            self.loads.not_promoted.fetch_add(1, Relaxed);
        }
    }

    /// Whether that many bytes fit in the pool above the watermark.
    pub(super) fn has_room(&self, bytes: u32) -> bool {
        let pressure = self.dram.pressure();
        pressure.free_bytes >= pressure.high_bytes + u64::from(bytes)
    }

    /// Brings a loaded block into the pool and leases it before it brings anything else: a policy may find a new, unused block
    /// the most expendable of all.
    fn lend(&self, owner: OwnerId, block: &Onboarded, class: u16, now_ms: u64) -> Result<Lookup, StoreError> {
        let until = Instant::now() + self.config.load_timeout;
        let mut tries = 0;
        while tries < LEND_TRIES {
            match self.bring(block, now_ms) {
                Brought::Resident => match self.dram.get(owner, &[block.meta.key], class, now_ms)?[0] {
                    Lookup::Miss => tries += 1,
                    found => return Ok(found),
                },
                // A copy of it is arriving from a peer right now, or its writer has not finished.
                Brought::InProgress if Instant::now() < until => thread::sleep(STORING),
                Brought::InProgress | Brought::No => break,
            }
        }
        Ok(Lookup::Miss)
    }

    /// Copies a loaded block into the pool. Returns whether it is resident now.
    pub(super) fn promote(&self, block: &Onboarded, now_ms: u64) -> bool {
        self.bring(block, now_ms) == Brought::Resident
    }

    fn bring(&self, block: &Onboarded, now_ms: u64) -> Brought {
        if block.moving.is_removed() {
            return Brought::No;
        }
        // They were compared with their checksum when they came, and lie in memory that no other process has.
        let put = self.dram.put_checked(self.owner, &block.meta, block.bytes(), block.checksum, now_ms);
        let (brought, is_ours) = match put {
            Ok(Reserve::Reserved(_)) => (Brought::Resident, true),
            Ok(Reserve::AlreadyStored) => (Brought::Resident, false),
            Ok(Reserve::InProgress) => return Brought::InProgress,
            Ok(Reserve::Refused(_)) | Err(_) => (Brought::No, false),
        };
        let resident = brought == Brought::Resident;
        if resident && block.moving.is_removed() {
            // A removal may have looked into the pool before the block was there. What another put there since may stay.
            if is_ours {
                let _ = self.dram.remove(&[block.meta.key], now_ms);
            }
            return Brought::No;
        }
        let count = if resident { &self.loads.promoted } else { &self.loads.not_promoted };
        count.fetch_add(1, Relaxed);
        brought
    }

    /// Cuts a batch into pieces of about [`CHUNK_BYTES`].
    fn chunks(&self, keys: &[BlockKey], reach: Reach, found: &Found) -> Vec<Range<usize>> {
        let (mut chunks, mut start, mut bytes) = (Vec::new(), 0, 0);
        for (i, size) in self.sizes_below(keys, reach, found).into_iter().enumerate() {
            let size = u64::from(size.unwrap_or(0));
            if bytes + size > CHUNK_BYTES && i > start {
                chunks.push(start..i);
                (start, bytes) = (i, 0);
            }
            bytes += size;
        }
        // A batch that nobody below knows needs no load at all.
        if bytes > 0 {
            chunks.push(start..keys.len());
        }
        chunks
    }

    /// The size of each block that any tier below holds.
    fn sizes_below(&self, keys: &[BlockKey], reach: Reach, found: &Found) -> Vec<Option<u32>> {
        let mut sizes = vec![None; keys.len()];
        for level in self.reach(reach) {
            let new = found.sizes(level, keys);
            new.into_iter().zip(&mut sizes).for_each(|(new, size)| *size = size.or(new));
        }
        sizes
    }

    /// The tiers that are asked for blocks of which this host knows nothing: another host may have stored them there.
    /// A peer's question stays on this host, which knows no better than the peer.
    fn shared(&self, reach: Reach) -> impl Iterator<Item = &Level> {
        self.levels.iter().filter(move |level| reach == Reach::All && level.tier.is_shared())
    }

    /// Has the tiers that hosts share look for blocks that no tier here knows of.
    fn ask_shared(&self, keys: &[BlockKey], reach: Reach) -> Found {
        if self.shared(reach).next().is_none() {
            return Found::default();
        }
        let sizes = self.sizes_below(keys, reach, &Found::default());
        let unknown = keys.iter().zip(sizes).filter(|(_, size)| size.is_none()).map(|(&key, _)| key);
        let mut unknown: Vec<BlockKey> = unknown.collect();
        // Before removals are asked for: one that is not known by then finds the move.
        let moving = unknown.iter().map(|&key| self.moves.begin(key)).collect();
        let mut found = Found { _moving: moving, ..Found::default() };
        self.leave_out_removed(&mut unknown);
        if unknown.is_empty() {
            return found;
        }
        for level in self.shared(reach) {
            found.look_up(level, &unknown, self.config.load_timeout);
        }
        found
    }

    /// Has a tier that hosts share look for blocks that others were believed to have and did not deliver. Returns the sizes of
    /// those that it has; not of those that it was known to have, and was asked for before.
    fn ask_shared_after_all(&self, level: &Level, keys: &[BlockKey], found: &mut Found) -> Vec<Option<u32>> {
        let before = found.sizes(level, keys);
        let is_new = |key: &BlockKey| !found.sizes.contains_key(&(level.tier, *key));
        let new = before.iter().zip(keys).filter(|(before, key)| before.is_none() && is_new(key));
        let mut new: Vec<BlockKey> = new.map(|(_, &key)| key).collect();
        self.leave_out_removed(&mut new);
        if !new.is_empty() {
            found.look_up(level, &new, self.config.load_timeout);
        }
        let now = keys.iter().map(|&key| found.size(level, key));
        now.zip(before).map(|(now, before)| now.filter(|_| before.is_none())).collect()
    }

    /// Leaves out blocks that were removed and not put since. Another host may store such a block in a shared place before it
    /// hears of the removal.
    fn leave_out_removed(&self, keys: &mut Vec<BlockKey>) {
        for level in &self.levels {
            let mut removed = level.store.were_removed(keys).into_iter();
            keys.retain(|_| removed.next() == Some(false));
        }
    }

    /// Loads what the tiers below hold of `keys`, at most `bytes_max` and what is left of `budget`, one batch per tier,
    /// nearest first; a block that one tier does not deliver is asked of the next, and what none delivers of those that hosts
    /// share. What another caller is loading is waited for.
    fn load(
        &self,
        keys: &[BlockKey],
        reach: Reach,
        budget: &Arc<Budget>,
        bytes_max: u64,
        late: &Late,
        found: &mut Found,
    ) -> Vec<Read> {
        self.collect_overdue();
        let mut reads: Vec<Read> = keys.iter().map(|_| Read::Missing).collect();
        let mut parts = self.together.join(keys, reach);
        let mut left = bytes_max;
        let known = self.reach(reach).map(|level| (level, false));
        for (level, after_all) in known.chain(self.shared(reach).map(|level| (level, true))) {
            let open = (0..keys.len()).filter(|&i| parts[i].is_lead() && !late.is(level, keys[i]));
            let sizes = |keys: &[BlockKey]| match after_all {
                true => self.ask_shared_after_all(level, keys, found),
                false => found.sizes(level, keys),
            };
            let wanted = self.want(sizes, keys, &open.collect::<Vec<_>>(), budget, &mut left, &mut reads);
            if !wanted.is_empty() {
                self.load_from(level, wanted, &mut reads);
            }
            parts.iter_mut().zip(&reads).for_each(|(part, read)| part.tell_if_found(read));
        }
        // Everything is told before anything is waited for: two callers may wait for each other's blocks.
        parts.iter_mut().filter(|part| part.is_lead()).for_each(|part| *part = Part::Done);
        for (part, read) in parts.iter().zip(&mut reads) {
            let Part::Follow(awaited) = part else { continue };
            *read = awaited.wait();
            let size = read.bytes().map_or(0, |bytes| bytes.len() as u64);
            if size > left {
                *read = Read::Throttled;
            } else {
                left -= size;
            }
        }
        reads
    }

    /// Registers a move for each open key that a tier holds, which `sizes` tells, and takes its memory from the bounds.
    pub(super) fn want(
        &self,
        sizes: impl FnOnce(&[BlockKey]) -> Vec<Option<u32>>,
        keys: &[BlockKey],
        open: &[usize],
        budget: &Arc<Budget>,
        left: &mut u64,
        reads: &mut [Read],
    ) -> Vec<Wanted> {
        // Before the tier is asked: a removal from here on finds the block in the tier or the move.
        let moving: Vec<Moving> = open.iter().map(|&i| self.moves.begin(keys[i])).collect();
        let asked: Vec<BlockKey> = open.iter().map(|&i| keys[i]).collect();
        let mut wanted = Vec::new();
        for ((&at, moving), size) in open.iter().zip(moving).zip(sizes(&asked)) {
            let Some(size) = size else { continue };
            let permit = if u64::from(size) <= *left { budget.take(size.into()) } else { None };
            if let Some(permit) = permit {
                *left -= u64::from(size);
                wanted.push(Wanted { at, size, moving, permit });
            } else {
                self.loads.refused.fetch_add(1, Relaxed);
                reads[at] = Read::Throttled;
            }
        }
        wanted
    }

    /// Asks a tier for a block.
    pub(super) fn get_of(&self, wanted: &Wanted) -> Get {
        Get { key: wanted.key(), buffer: self.spares.buffer(wanted.size as usize) }
    }

    fn load_from(&self, level: &Level, wanted: Vec<Wanted>, reads: &mut [Read]) {
        let began = Instant::now();
        let pending = level.store.get(wanted.iter().map(|wanted| self.get_of(wanted)).collect());
        let loaded = pending.wait_timeout(self.config.load_timeout);
        let took = began.elapsed();
        level.onboard.times.record(took);
        match loaded {
            Ok(done) => {
                let mut bytes = 0;
                for (done, wanted) in done.into_iter().zip(wanted) {
                    let at = wanted.at;
                    if let Some(block) = check(level, done, wanted) {
                        bytes += u64::from(block.meta.size);
                        reads[at] = Read::Onboarded(Arc::new(block));
                    }
                }
                // A load that failed at once does not tell how long a load takes.
                if bytes > 0 {
                    level.onboard.costs.record(bytes, took);
                }
            }
            Err(pending) => self.let_go(level, pending, wanted),
        }
    }

    /// Stops waiting for a load.
    pub(super) fn let_go(&self, level: &Level, pending: Pending<Vec<GetDone>>, wanted: Vec<Wanted>) {
        pending.cancel();
        level.onboard.timed_out.fetch_add(wanted.len() as u64, Relaxed);
        let permits = wanted.into_iter().map(|wanted| wanted.permit).collect();
        self.loads.overdue.lock().push((pending, permits));
    }

    /// Gives back the memory of late loads that have ended since.
    fn collect_overdue(&self) {
        let mut overdue = self.loads.overdue.lock();
        if overdue.is_empty() {
            return;
        }
        let open = |(pending, permits): Overdue| {
            pending.wait_timeout(Duration::ZERO).err().map(|pending| (pending, permits))
        };
        *overdue = std::mem::take(&mut *overdue).into_iter().filter_map(open).collect();
    }
}

impl Level {
    /// Drops a block that arrived here with other bytes than it should have. Where other hosts rely on the tier only this
    /// host's knowledge of it goes: the fault may lie between the tier and here, and the others compare for themselves.
    fn drop_corrupt(&self, key: BlockKey) {
        if Reach::Own.includes(self.tier) {
            // Nobody waits: the block is a miss here either way.
            drop(self.store.remove(vec![key]));
        } else {
            self.store.forget(&[key]);
        }
    }
}

/// Counts what a tier delivered. Returns the block if it is the requested one and intact.
pub(super) fn check(level: &Level, done: GetDone, wanted: Wanted) -> Option<Onboarded> {
    let Wanted { moving, permit, .. } = wanted;
    let counts = &level.onboard;
    let loaded = match done.outcome {
        Ok(Some(loaded)) => loaded,
        Ok(None) => {
            counts.missing.fetch_add(1, Relaxed);
            return None;
        }
        Err(_) => {
            counts.failed.fetch_add(1, Relaxed);
            return None;
        }
    };
    let bytes = done.buffer.bytes().get(..loaded.meta.size as usize);
    let intact = bytes.is_some_and(|bytes| checksum(bytes) == loaded.checksum);
    if !intact || loaded.meta.key != moving.key() {
        counts.corrupt.fetch_add(1, Relaxed);
        level.drop_corrupt(moving.key());
        return None;
    }
    counts.loaded.fetch_add(1, Relaxed);
    counts.loaded_bytes.fetch_add(loaded.meta.size.into(), Relaxed);
    let (meta, checksum) = (loaded.meta, loaded.checksum);
    Some(Onboarded { meta, checksum, buffer: done.buffer, moving, _permit: permit })
}
