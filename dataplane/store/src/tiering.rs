//! Blocks in several tiers: DRAM on top, and below it any number of others, nearest first.
//!
//! **Down.** The eviction policy chooses victims ahead of need; [`Tiering::offer`] takes them from it. A victim that a
//! tier below should have is copied there first, straight from the pool, and becomes evictable when the copy is done
//! ([`offload`]). Eviction never waits for a slow tier: what finds its queue full becomes evictable at once, without
//! a copy, and is counted.
//!
//! **Up.** A lookup that misses DRAM asks the tiers in order and loads what they hold in one batch per tier
//! ([`onboard`]). A local reader reads in place, so its blocks go into the pool; a remote one is served from the loaded
//! bytes, and they go into the pool only on evidence: there is room, or the block was asked for before. A walk along a
//! chain is read ahead of ([`ahead`]).
//!
//! **At the end** blocks that only the pool has go to a tier that outlives the host ([`save`]).
//!
//! **Who holds what.** Each tier knows its own blocks and answers without I/O ([`BlockStore::sizes`]), so there is no
//! second index that could disagree. A block may be in several tiers; its bytes are the same in all of them.

mod admit;
mod ahead;
mod budget;
mod config;
mod cost;
mod moves;
mod offload;
mod onboard;
mod recent;
mod save;
#[cfg(test)]
mod tests;
mod together;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub use admit::{Admission, Admit, AdmitAll, Candidate};
pub use config::{Offload, TieringConfig};
pub use cost::LoadCost;
pub use offload::OffloadStats;
pub use onboard::{OnboardStats, Onboarded, Read};
pub use save::Saved;

use self::ahead::Ahead;
use self::budget::Budget;
use self::moves::Moves;
use self::offload::{Job, Offloader};
use self::onboard::OnboardCounts;
use self::recent::Recent;
use self::together::Together;
use super::departures::Page;
use super::dram::{BlockStat, DramStore, Offered, OwnerId, Remove, Reserve};
use super::store::{BlockStore, Capabilities, Pending, Tier, TierError, TierStats};
use crate::error::StoreError;
use crate::times::TimesTaken;
use kvasir_memory::spares::Spares;
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};
use kvasir_protocol::clock::Clock;

/// A victim, and where the policy wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demotion {
    pub slot: u32,
    pub to: Destination,
}

/// Where a victim goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// By configuration: the nearest tier, if it was used often enough, or nowhere.
    HostDecides,
    /// Nowhere.
    Drop,
    /// There, however seldom it was used. A tier the host does not have counts as `HostDecides`.
    Tier(Tier),
}

/// The tiers that hold a block, DRAM included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    bits: u8,
    /// Bytes; `None` if no tier holds it.
    pub size: Option<u32>,
}

impl Residency {
    fn add(&mut self, tier: Tier, size: u32) {
        self.bits |= 1 << tier as u8;
        self.size.get_or_insert(size);
    }

    /// Bit *n* is set for tier *n* of [`Tier`].
    pub fn bits(self) -> u8 {
        self.bits
    }

    pub fn tiers(self) -> impl Iterator<Item = Tier> {
        Tier::ALL.into_iter().filter(move |&tier| self.bits & 1 << tier as u8 != 0)
    }
}

/// One tier below at one moment.
#[derive(Clone, Debug)]
pub struct LevelStats {
    pub capabilities: Capabilities,
    pub store: TierStats,
    pub offload: OffloadStats,
    pub onboard: OnboardStats,
    /// How long readers waited for batches of loads, those included that they stopped waiting for.
    pub load_times: TimesTaken,
    /// What a batch of loads cost lately, by its bytes.
    pub load_cost: LoadCost,
    /// Its queue has room and copies have not failed just now.
    pub takes_copies: bool,
}

/// All counts of the tiers below, taken at one moment.
#[derive(Clone, Debug, Default)]
pub struct TieringStats {
    /// Nearest first.
    pub levels: Vec<LevelStats>,
    /// Loaded blocks that went into the pool, and loaded blocks that were served without going there.
    pub promoted: u64,
    pub not_promoted: u64,
    /// Blocks read ahead of a walk along a chain, and those of them that went into the pool.
    pub read_ahead: u64,
    pub read_ahead_landed: u64,
    /// Blocks not loaded because too much was being loaded already.
    pub load_refused: u64,
    /// Memory of the blocks being loaded now.
    pub loading_bytes: u64,
}

struct Level {
    store: Arc<dyn BlockStore>,
    tier: Tier,
    offloader: Offloader,
    /// Blocks this tier was offered and did not store.
    refused: Mutex<Recent>,
    onboard: OnboardCounts,
}

/// How far a call goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Reach {
    /// Only what belongs to this host alone. One host's copy that is no longer wanted says nothing about an object that many
    /// hosts share.
    Own,
    /// Also what hosts share, but not what peers hold: a call that a peer asked for stays on this host, or two hosts could
    /// ask each other for ever.
    Here,
    All,
}

impl Reach {
    fn includes(self, tier: Tier) -> bool {
        match self {
            Self::Own => tier != Tier::Peer && !tier.is_shared(),
            Self::Here => tier != Tier::Peer,
            Self::All => true,
        }
    }
}

/// The blocks of a call that one tier is asked to remove, by their places in the call, and what comes of it.
type PartlyRemoved = (Vec<usize>, Pending<Vec<Result<bool, TierError>>>);

impl Level {
    /// Begins to remove blocks. Only the host that removes them everywhere asks a shared place also for those that it does not
    /// know to be there: one host that asks is enough.
    fn remove(&self, keys: &[BlockKey], reach: Reach) -> PartlyRemoved {
        let places: Vec<usize> = if self.tier.is_shared() && reach != Reach::All {
            let known = self.store.exists(keys);
            (0..keys.len()).filter(|&i| known[i]).collect()
        } else {
            (0..keys.len()).collect()
        };
        let asked = places.iter().map(|&i| keys[i]).collect();
        (places, self.store.remove(asked))
    }
}

/// DRAM and the tiers below it. Share it by `Arc`; [`close`](Self::close) it at the end.
pub struct Tiering {
    dram: Arc<DramStore>,
    levels: Vec<Level>,
    config: TieringConfig,
    admit: Mutex<Box<dyn Admit>>,
    moves: Arc<Moves>,
    /// Blocks asked for lately that DRAM did not hold.
    touched: Mutex<Recent>,
    loading: Arc<Budget>,
    /// The share of it for blocks that are sent away as they are: a reader that takes its time holds them.
    sending: Arc<Budget>,
    /// Memory of earlier loads.
    spares: Arc<Spares>,
    loads: onboard::Totals,
    together: Arc<Together>,
    ahead: Ahead,
    /// Writes promoted blocks.
    owner: OwnerId,
}

impl Tiering {
    /// Starts the threads that copy down. `below` is ordered, nearest first.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        dram: Arc<DramStore>,
        below: Vec<Arc<dyn BlockStore>>,
        admit: Box<dyn Admit>,
        config: TieringConfig,
        clock: Clock,
    ) -> io::Result<Self> {
        let bounds = (config.queue_blocks as usize, config.queue_bytes.min(dram.pool().bytes() / 4));
        let recent = config.recent_blocks as usize;
        let level = |store: Arc<dyn BlockStore>| {
            Ok(Level {
                tier: store.capabilities().tier,
                offloader: Offloader::start(Arc::clone(&dram), Arc::clone(&store), clock, bounds)?,
                refused: Mutex::new(Recent::new(recent)),
                onboard: OnboardCounts::default(),
                store,
            })
        };
        let loading = Budget::new(config.load_bytes);
        let own = |store: &&Arc<dyn BlockStore>| Reach::Own.includes(store.capabilities().tier);
        below.iter().filter(own).for_each(|store| store.note_departures(dram.departures()));
        Ok(Self {
            levels: below.into_iter().map(level).collect::<io::Result<_>>()?,
            touched: Mutex::new(Recent::new(recent)),
            sending: loading.share(config.load_bytes / 2),
            loading,
            spares: Spares::new((config.load_bytes / 4) as usize),
            loads: onboard::Totals::default(),
            ahead: Ahead::new(recent),
            together: Arc::default(),
            moves: Arc::default(),
            admit: Mutex::new(admit),
            owner: dram.new_bringing_owner(),
            dram,
            config,
        })
    }

    /// DRAM alone.
    pub fn dram_only(dram: Arc<DramStore>, clock: Clock) -> Self {
        let config = TieringConfig { recent_blocks: 1, ..TieringConfig::default() };
        Self::start(dram, Vec::new(), Box::new(AdmitAll), config, clock)
            .expect("without a tier below no thread is started")
    }

    pub fn dram(&self) -> &Arc<DramStore> {
        &self.dram
    }

    /// Places in the pool for blocks that `owner` will fill and commit.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn reserve(
        &self,
        owner: OwnerId,
        blocks: &[BlockMeta],
        now_ms: u64,
    ) -> Result<Vec<Reserve>, StoreError> {
        let places = self.dram.reserve(owner, blocks, now_ms)?;
        if !self.levels.is_empty() {
            self.ahead.learn(blocks);
        }
        Ok(places)
    }

    /// Takes victims that the eviction policy chose, most expendable first. They become evictable: at once, or when
    /// they are copied. With `urgent` (a put waits for any space) at least half of them do so at once.
    pub fn offer(&self, victims: &[Demotion], urgent: bool, now_ms: u64) -> Offered {
        let slots: Vec<u32> = victims.iter().map(|victim| victim.slot).collect();
        if self.levels.is_empty() {
            return self.dram.offer_victims(&slots, now_ms);
        }
        let mut chosen = Vec::with_capacity(slots.len());
        let mut offered = self.dram.choose_victims(&slots, now_ms, &mut chosen);
        let (mut targets, named) = self.targets(victims, &chosen);
        self.admit(&chosen, &mut targets, &named, now_ms);
        if urgent {
            self.let_half_go(&mut targets);
        }
        let mut ready = Vec::new();
        for (stat, target) in chosen.iter().zip(targets) {
            match target {
                Some(level) if self.copy_down(stat, level) => offered.taken += 1,
                _ => ready.push(stat.slot),
            }
        }
        let taken = self.dram.make_ready(&ready, now_ms);
        offered.taken += taken;
        offered.kept += ready.len() - taken;
        offered
    }

    /// Victims being copied now: they will be evictable soon.
    pub fn copying(&self) -> usize {
        self.levels.iter().map(|level| level.offloader.queued()).sum()
    }

    /// How long a put may wait for copies, so that it has as long again for other victims.
    pub fn backpressure(&self) -> Duration {
        self.config.backpressure.min(self.dram.config().put_wait / 2)
    }

    /// Whether victims are being copied to the nearest tier, or would be if they were offered.
    pub fn copies(&self) -> bool {
        let nearest = self.level_for_victims(0).map(|level| &self.levels[level].offloader);
        nearest.is_some_and(|offloader| offloader.queued() > 0 || offloader.takes_copies())
    }

    /// How many more victims of `bytes` each the nearest tier's queue takes now; any further one would go without a copy.
    pub fn room(&self, bytes: u64) -> usize {
        let nearest = self.level_for_victims(0);
        nearest.map_or(usize::MAX, |level| self.levels[level].offloader.room(bytes))
    }

    /// Where each chosen victim should go, and whether the policy named that tier. A block with a time to live of its own
    /// goes nowhere: nobody would end it there.
    fn targets(&self, victims: &[Demotion], chosen: &[BlockStat]) -> (Vec<Option<usize>>, Vec<bool>) {
        let wanted: HashMap<u32, Destination> =
            victims.iter().map(|victim| (victim.slot, victim.to)).collect();
        let level_of =
            |tier: Tier| self.levels.iter().position(|level| level.tier == tier && tier.takes_victims());
        let nearest = self.level_for_victims(0).filter(|_| self.config.offload == Offload::All);
        let target = |stat: &BlockStat| {
            let (target, named) = match wanted.get(&stat.slot) {
                Some(Destination::Drop) => (None, false),
                Some(&Destination::Tier(tier)) if level_of(tier).is_some() => (level_of(tier), true),
                Some(Destination::Tier(_) | Destination::HostDecides) | None => (nearest, false),
            };
            // Tiers below keep no clock: a block with a time to live of its own would outlive it there.
            (target.filter(|_| stat.expires_ms.is_none()), named)
        };
        chosen.iter().map(target).unzip()
    }

    /// The nearest tier from `first` on that takes victims.
    fn level_for_victims(&self, first: usize) -> Option<usize> {
        (first..self.levels.len()).find(|&at| self.levels[at].tier.takes_victims())
    }

    /// Takes the target from victims that need no copy or that admission refuses, tier by tier.
    fn admit(&self, chosen: &[BlockStat], targets: &mut [Option<usize>], named: &[bool], now_ms: u64) {
        // The tier above sent it on: it is not asked about again.
        let mut sent_on = vec![false; chosen.len()];
        for (at, level) in self.levels.iter().enumerate() {
            let meant: Vec<usize> = (0..chosen.len()).filter(|&i| targets[i] == Some(at)).collect();
            let keys: Vec<BlockKey> = meant.iter().map(|&i| chosen[i].key).collect();
            let counts = level.offloader.counts();
            counts.offered.fetch_add(keys.len() as u64, Relaxed);
            let mut asked = Vec::new();
            for (&i, held) in meant.iter().zip(level.store.exists(&keys)) {
                if held {
                    targets[i] = None;
                    counts.held_below.fetch_add(1, Relaxed);
                } else if !sent_on[i] {
                    asked.push(i);
                }
            }
            for (i, answer) in self.ask(level, chosen, &asked, named, now_ms) {
                match answer {
                    Admission::Store => {}
                    Admission::Colder if self.level_for_victims(at + 1).is_some() => {
                        (targets[i], sent_on[i]) = (self.level_for_victims(at + 1), true);
                    }
                    Admission::Colder | Admission::Skip => {
                        targets[i] = None;
                        counts.refused.fetch_add(1, Relaxed);
                    }
                }
            }
        }
    }

    /// One answer for each of `asked`: by the number of uses first, unless the policy named the tier, then by the admitter.
    fn ask(
        &self,
        level: &Level,
        chosen: &[BlockStat],
        asked: &[usize],
        named: &[bool],
        now_ms: u64,
    ) -> Vec<(usize, Admission)> {
        let mut refused = level.refused.lock();
        let candidate = |&i: &usize| {
            let stat = &chosen[i];
            let refused_ms_ago = refused.seen_ms_ago(stat.key, now_ms);
            let (class, uses, depth, size) = (stat.class, stat.uses, stat.depth, stat.size);
            (i, Candidate { class, uses, depth, size, refused_ms_ago, tenant: stat.key.tenant() })
        };
        let enough =
            |c: &Candidate| c.uses.saturating_add(c.refused_ms_ago.is_some().into()) >= self.config.min_uses;
        let (touched, once): (Vec<_>, Vec<_>) =
            asked.iter().map(candidate).partition(|(i, c)| named[*i] || enough(c));
        let candidates: Vec<Candidate> = touched.iter().map(|(_, candidate)| *candidate).collect();
        let mut answers = Vec::new();
        if !candidates.is_empty() {
            answers = self.admit.lock().admit(level.tier, &candidates);
            answers.resize(candidates.len(), Admission::Skip);
        }
        let answers: Vec<(usize, Admission)> = touched
            .iter()
            .map(|(i, _)| *i)
            .zip(answers)
            .chain(once.into_iter().map(|(i, _)| (i, Admission::Skip)))
            .collect();
        for &(i, answer) in &answers {
            match answer {
                Admission::Store => refused.forget(chosen[i].key),
                Admission::Skip | Admission::Colder => refused.note(chosen[i].key, now_ms),
            }
        }
        answers
    }

    /// Takes targets away, most expendable first, until at least half have none.
    fn let_half_go(&self, targets: &mut [Option<usize>]) {
        let none = targets.iter().filter(|target| target.is_none()).count();
        let more = targets.len().div_ceil(2).saturating_sub(none);
        for target in targets.iter_mut().filter(|target| target.is_some()).take(more) {
            if let Some(level) = target.take() {
                self.levels[level].offloader.counts().skipped.fetch_add(1, Relaxed);
            }
        }
    }

    /// Whether the victim will be evictable later, without us. False means that it should be at once.
    fn copy_down(&self, stat: &BlockStat, level: usize) -> bool {
        let offloader = &self.levels[level].offloader;
        // This comes before the hold: a caller that removes the block from here on finds either it or the move.
        let moving = self.moves.begin(stat.key);
        let Some(held) = self.dram.hold_chosen(stat.slot, stat.key) else { return false };
        let BlockStat { key, parent, depth, class, tenant, size, .. } = *stat;
        let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms: 0, size };
        self.ahead.learn([&meta]);
        let pushed = offloader.push(Job { held, meta, moving });
        if !pushed {
            offloader.counts().skipped.fetch_add(1, Relaxed);
        }
        pushed
    }

    /// Which tiers hold each block, as far as they know without I/O.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn residency(&self, keys: &[BlockKey]) -> Result<Vec<Residency>, StoreError> {
        self.residency_in(keys, Reach::All)
    }

    /// As [`residency`](Self::residency), of the tiers of this host alone.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn residency_here(&self, keys: &[BlockKey]) -> Result<Vec<Residency>, StoreError> {
        self.residency_in(keys, Reach::Here)
    }

    /// As [`residency`](Self::residency), of what belongs to this host alone.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn residency_own(&self, keys: &[BlockKey]) -> Result<Vec<Residency>, StoreError> {
        self.residency_in(keys, Reach::Own)
    }

    fn residency_in(&self, keys: &[BlockKey], reach: Reach) -> Result<Vec<Residency>, StoreError> {
        let mut found = vec![Residency::default(); keys.len()];
        for (stat, found) in self.dram.stat(keys)?.iter().zip(&mut found) {
            stat.iter().for_each(|stat| found.add(Tier::Dram, stat.size));
        }
        for level in self.reach(reach) {
            for (size, found) in level.store.sizes(keys).into_iter().zip(&mut found) {
                size.into_iter().for_each(|size| found.add(level.tier, size));
            }
        }
        Ok(found)
    }

    /// Which blocks any tier holds.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, StoreError> {
        let mut found = self.dram.exists(keys)?;
        for level in &self.levels {
            let missing: Vec<usize> = (0..keys.len()).filter(|&i| !found[i]).collect();
            if missing.is_empty() {
                break;
            }
            let asked: Vec<BlockKey> = missing.iter().map(|&i| keys[i]).collect();
            missing.iter().zip(level.store.exists(&asked)).for_each(|(&i, held)| found[i] = held);
        }
        Ok(found)
    }

    /// Removes blocks from every tier, and waits until they are gone (at most as long as for a load, per tier); so it does for
    /// what a tier below is taking at that moment. One that is on its way up goes when it arrives. A block that a tier could not
    /// remove is [`Remove::Unfinished`]: try again.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn remove(&self, keys: &[BlockKey], now_ms: u64) -> Result<Vec<Remove>, StoreError> {
        self.remove_in(keys, Reach::All, now_ms)
    }

    /// A peer removes blocks everywhere: as [`remove`](Self::remove), from the tiers of this host. From a place that hosts
    /// share it deletes what it knows to be there: a host that hears of the removal late may have stored the block there after
    /// the peer deleted it.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn remove_here(&self, keys: &[BlockKey], now_ms: u64) -> Result<Vec<Remove>, StoreError> {
        if planted::is(Bug::LeavesRemovedOnDisk) {
            return self.dram.remove(keys, now_ms);
        }
        let removed = self.remove_in(keys, Reach::Here, now_ms)?;
        // Also what could not be deleted now.
        self.forget_shared(keys);
        Ok(removed)
    }

    /// Forgets that places which hosts share have these blocks. The objects stay.
    pub fn forget_shared(&self, keys: &[BlockKey]) {
        self.levels.iter().for_each(|level| level.store.forget(keys));
    }

    /// Drops this host's own copies, which are not wanted any more. The blocks stay wherever else they are, and a reader may still
    /// read what is on its way up to it.
    ///
    /// # Errors
    /// The batch is too large.
    pub fn trim(&self, keys: &[BlockKey], now_ms: u64) -> Result<Vec<Remove>, StoreError> {
        self.drop_from(keys, Reach::Own, now_ms)
    }

    fn remove_in(&self, keys: &[BlockKey], reach: Reach, now_ms: u64) -> Result<Vec<Remove>, StoreError> {
        if self.levels.is_empty() {
            // Nothing is ever on its way.
            return self.dram.remove(keys, now_ms);
        }
        let (removing, until) = (self.moves.remove(keys), Instant::now() + self.config.load_timeout);
        let mut removed = self.drop_from(keys, reach, now_ms)?;
        let left = removed.iter_mut().zip(removing.wait(until)).filter(|(_, none_left)| !none_left);
        left.for_each(|(removed, _)| *removed = Remove::Unfinished);
        Ok(removed)
    }

    fn drop_from(&self, keys: &[BlockKey], reach: Reach, now_ms: u64) -> Result<Vec<Remove>, StoreError> {
        if self.levels.is_empty() {
            return self.dram.remove(keys, now_ms);
        }
        let mut removed = self.dram.remove(keys, now_ms)?;
        // What hosts share goes last: a peer that has not heard of the removal could store it there once more.
        let (shared, own): (Vec<&Level>, Vec<&Level>) =
            self.reach(reach).partition(|level| level.tier.is_shared());
        let levels = own.into_iter().chain(shared);
        let pending: Vec<_> = levels.map(|level| level.remove(keys, reach)).collect();
        let mut failed = vec![false; keys.len()];
        for (places, pending) in pending {
            let outcomes = pending.wait_timeout(self.config.load_timeout);
            for (at, i) in places.into_iter().enumerate() {
                match outcomes.as_ref().map(|outcomes| &outcomes[at]) {
                    Ok(Ok(true)) => removed[i] = Remove::Removed,
                    Ok(Ok(false)) => {}
                    Ok(Err(_)) | Err(_) => failed[i] = true,
                }
            }
        }
        let failed = removed.iter_mut().zip(failed).filter(|(_, failed)| *failed);
        failed.for_each(|(removed, _)| *removed = Remove::Unfinished);
        // A lookup may have brought a block up between the two steps.
        self.dram.remove(keys, now_ms)?;
        Ok(removed)
    }

    /// Blocks of `tenant` that have left this host: each was in a tier of its own, and is in none now. From a position of
    /// [`Departures`](super::departures::Departures) on; of at most `max` notes, those about others' blocks included.
    ///
    /// # Errors
    /// The store's own fault: a batch is never too large.
    pub fn departed(&self, tenant: u16, since: u64, max: usize) -> Result<Page, StoreError> {
        let mut page = self.dram.departures().page(since, max.min(BATCH_MAX));
        page.keys.retain(|key| key.tenant() == tenant);
        let mut here = self.residency_own(&page.keys)?.into_iter();
        page.keys.retain(|_| here.next().is_some_and(|at| at.size.is_none()));
        Ok(page)
    }

    /// Blocks that a tier of this host found damaged and dropped since the last call. Bounded: the oldest are forgotten.
    pub fn take_damaged(&self) -> Vec<BlockKey> {
        let below = self.reach(Reach::Here).flat_map(|level| level.store.take_damaged());
        self.dram.take_damaged().into_iter().chain(below).collect()
    }

    /// The tiers below that a call may use.
    fn reach(&self, reach: Reach) -> impl Iterator<Item = &Level> {
        self.levels.iter().filter(move |level| reach.includes(level.tier))
    }

    pub fn stats(&self) -> TieringStats {
        let level = |level: &Level| {
            let store = level.store.stats();
            LevelStats {
                capabilities: level.store.capabilities(),
                takes_copies: level.offloader.takes_copies() && !store.broken,
                store,
                offload: level.offloader.stats(),
                onboard: level.onboard.stats(),
                load_times: level.onboard.times.taken(),
                load_cost: level.onboard.costs.cost(),
            }
        };
        TieringStats {
            levels: self.levels.iter().map(level).collect(),
            promoted: self.loads.promoted.load(Relaxed),
            not_promoted: self.loads.not_promoted.load(Relaxed),
            read_ahead: self.ahead.read.load(Relaxed),
            read_ahead_landed: self.ahead.landed.load(Relaxed),
            load_refused: self.loads.refused.load(Relaxed),
            loading_bytes: self.loading.used(),
        }
    }

    /// Waits until nothing is being copied. Returns false if `until` passes first.
    pub fn drain(&self, until: Instant) -> bool {
        self.levels.iter().all(|level| level.offloader.drain(until))
    }

    /// Finishes what is queued, makes it durable, and ends the threads; all within `patience`. Names the tiers that
    /// are not done in time: they may lack the last blocks.
    pub fn close(&self, patience: Duration) -> Vec<&'static str> {
        let until = Instant::now() + patience;
        let mut late = Vec::new();
        for level in &self.levels {
            let copied = level.offloader.close(until);
            let left = until.saturating_duration_since(Instant::now());
            let flushed = level.store.flush().wait_timeout(left).is_ok_and(|flushed| flushed.is_ok());
            if !(copied && flushed) {
                late.push(level.store.capabilities().name);
            }
        }
        late
    }
}
