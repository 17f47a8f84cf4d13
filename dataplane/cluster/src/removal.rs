//! Removing a block from every host, while hosts copy it to each other and some are away.
//!
//! The host that removes gives the removal a [`Generation`] and tells all hosts that are up; each drops the block and
//! keeps the removal. From then on no claim, and no copy, of what was put before counts there, so one that is still on
//! its way is refused where it arrives. Hosts that are away hear the removal with all other facts, from the first host
//! that they reach, and so does a host that the one which removed cannot reach.
//!
//! A host that has not heard of a removal may store the block in a place that hosts share, after it was deleted there. So
//! every host that hears of a removal deletes what it knows to be in that place, and no host looks there for a block whose last
//! news is its removal.
//!
//! A removal is kept on disk ([`kept`]) after the block has gone from the tiers: after a crash in between it
//! is heard, and carried out, once more.

mod kept;
mod past;

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(super) use self::kept::Kept;
use self::past::{Moment, Past};
use super::counts::add;
use super::link::{Link, ask_at_once};
use super::message::{Reply, Request};
use super::table::{Generation, KEPT_FOR_US, Nodes, Removal};
use super::{Event, Shared};
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, SystemTime, UNIX_EPOCH};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_store::dram::{BlockStat, Remove};
use kvasir_store::tiering::Tiering;

/// A peer that holds a block, and did not say that it removed it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("peer {peer} did not answer")]
pub(super) struct Unanswered {
    peer: String,
}

/// Of each block whether it was there, and the latest put or removal of these that the removal does not come after.
type Answer = (Vec<bool>, Option<Generation>);

/// How long a peer may take to remove blocks from its tiers.
const ANSWER: Duration = Duration::from_secs(4);

/// Orders puts and removals: a clock that never stands still or goes back, and is ahead of all that was heard.
#[derive(Default)]
pub(super) struct Generations(AtomicU64);

impl Generations {
    pub(super) fn next(&self) -> Generation {
        let now = now_us();
        let next = |last: u64| now.max(last.saturating_add(1));
        let last = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |last| Some(next(last)));
        let (Ok(last) | Err(last)) = last;
        Generation(next(last))
    }

    /// No generation so far is later.
    pub(super) fn now(&self) -> Generation {
        Generation(now_us().max(self.0.load(Ordering::SeqCst)))
    }

    pub(super) fn heard(&self, other: Generation) {
        if !planted::is(Bug::FollowsNoOtherClock) {
            self.0.fetch_max(other.0, Ordering::SeqCst);
        }
    }
}

/// Removals being carried out here, and those kept on disk.
#[derive(Default)]
pub(super) struct Removals {
    /// Held from before the table knows of removals until they are carried out.
    one: Mutex<()>,
    /// The removals on disk, if this host keeps any there.
    kept: OnceLock<Kept>,
    /// The last attempt to keep one failed.
    are_unkept: AtomicBool,
    /// Blocks that a tier here could not remove: it is asked again, and until it could their removals are not kept, so that peers
    /// tell of them again after a restart.
    unfinished: Mutex<HashSet<BlockKey>>,
    /// No generation heard so far is later, or it is of the past; that much is on disk.
    clock_kept: AtomicU64,
    past: Past,
}

/// How far ahead of what was heard the clock is kept, so that it is written once in this time.
const KEPT_AHEAD: Duration = Duration::from_secs(5);
/// Blocks that are asked to be removed again, at most. Beyond that, such a block stays until somebody removes it again.
const UNFINISHED_MAX: usize = 1 << 20;

/// How far clocks of hosts may differ.
const SKEW: Duration = Duration::from_secs(3600);

impl Generation {
    /// Whether a generation that a peer names is plausible. The clock of all hosts follows the most advanced one: a time in the
    /// far future, heard once, would leave no later one for the puts that come after.
    pub(super) fn is_plausible(self) -> bool {
        self.0 <= now_us().saturating_add(SKEW.as_micros() as u64)
    }
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_micros() as u64)
}

impl Shared {
    /// Removes blocks from all peers that are up, and from what is known here; the caller removes them from the tiers
    /// here. Returns for each block whether a peer had it, or the peer that holds it and did not answer.
    pub(super) fn remove_from_peers(&self, keys: &[BlockKey]) -> Vec<Result<bool, Unanswered>> {
        let mut held = vec![Nodes::default(); keys.len()];
        // All of them, not only those known to hold a copy: one may be on its way there.
        let up: Vec<&Link> = self.links.iter().map(|link| &**link).filter(|link| link.is_up()).collect();
        let (mut removed, later) = self.remove_now(keys, &up, &mut held);
        if let Some(later) = later.filter(|later| later.is_plausible()) {
            // A put was not heard of here yet, and this host's clock is behind.
            self.heard(later);
            let (again, _) = self.remove_now(keys, &up, &mut held);
            for (removed, again) in removed.iter_mut().zip(again) {
                let before = removed == &Ok(true);
                *removed = again.map(|there| there || before);
            }
        }
        removed
    }

    /// Has the peers that are `up` remove blocks as of now; `held` gathers who is known to have each. Returns what
    /// [`remove_from_peers`](Self::remove_from_peers) does, and the latest time that a peer named: it has blocks put then, and not before.
    fn remove_now(
        &self,
        keys: &[BlockKey],
        up: &[&Link],
        held: &mut [Nodes],
    ) -> (Vec<Result<bool, Unanswered>>, Option<Generation>) {
        let at = self.copies.generations.next();
        {
            let mut table = self.table();
            for (&key, held) in keys.iter().zip(&mut *held) {
                *held = held.union(table.holders(key));
                table.remove(key, at);
            }
        }
        self.copies.changed();
        let answers = self.remove_at_all(up, keys, at);
        let (mut removed, mut latest) = (vec![Ok(false); keys.len()], None);
        for (link, answer) in up.iter().zip(answers) {
            let Some((there, later)) = answer else {
                let silent = || Unanswered { peer: link.config.name.clone() };
                let lost = removed.iter_mut().zip(&*held).filter(|(_, held)| held.has(link.place));
                lost.for_each(|(removed, _)| *removed = Err(silent()));
                continue;
            };
            for (removed, there) in removed.iter_mut().zip(there) {
                if there && removed.is_ok() {
                    *removed = Ok(true);
                }
            }
            if later.is_some() {
                held.iter_mut().for_each(|held| held.insert(link.place));
                latest = latest.max(later);
            }
        }
        let noted: Vec<_> = keys.iter().map(|&key| (key, at)).collect();
        self.keep_removals(&noted);
        (removed, latest)
    }

    /// Asks peers at the same time. Returns what each answers, and `None` for one that does not answer.
    fn remove_at_all(&self, links: &[&Link], keys: &[BlockKey], at: Generation) -> Vec<Option<Answer>> {
        let ask = |link: &Link| match link.call(&Request::Remove { keys: keys.to_vec(), at }, ANSWER) {
            Ok(Reply::Removed { removed, later }) if removed.len() == keys.len() => Some((removed, later)),
            _ => None,
        };
        ask_at_once(links, ask).into_iter().map(Option::flatten).collect()
    }

    /// Called when a peer removes blocks everywhere, at this moment. Says what is later than that peer knew.
    pub(super) fn remove_here(&self, keys: &[BlockKey], at: Generation) -> Answer {
        self.heard(at);
        let _alone = self.one_removal();
        let (mut new, mut spared, mut later) = (Vec::new(), Vec::new(), None);
        {
            let mut table = self.table();
            for &key in keys {
                match table.remove(key, at) {
                    Some(removal) => new.push((key, at, removal)),
                    // Told as news before the call came: then what seemed to be put since was spared.
                    None if table.is_removed(key, at) => spared.push(key),
                    None => {}
                }
                later = later.max(table.later_than(key, at));
            }
        }
        let mut dropped = self.carry_out(&new);
        dropped.extend(self.drop_here(&spared));
        (keys.iter().map(|key| dropped.contains(key)).collect(), later)
    }

    /// Remembers which time it is, by which what is put now is later or earlier than removals that are told late.
    pub(super) fn note_time(&self) {
        self.removals.past.note(Moment {
            ms: self.clock.now_ms(),
            wall_us: now_us(),
            generation: self.copies.generations.now(),
        });
    }

    /// Has removals that are told late keep what was put here since. Of blocks with copies the table has said it; of the
    /// others the clock told it, as long as they are in the pool.
    pub(super) fn spare_later_puts(&self, told: &mut [(BlockKey, Generation, Removal)]) {
        self.note_time();
        let put_at = |stat: &BlockStat| self.removals.past.at(stat.inserted_ms);
        for told in told.chunks_mut(BATCH_MAX) {
            let keys: Vec<BlockKey> = told.iter().map(|(key, ..)| *key).collect();
            let stats = self.store.stat(&keys).unwrap_or_default();
            for ((_, at, removal), stat) in told.iter_mut().zip(stats) {
                // A block that was brought up was put earlier than that, and nobody knows when.
                let put_since = |stat: BlockStat| !stat.was_brought && put_at(&stat) > *at;
                if *removal == Removal::DropEarlier && stat.is_some_and(put_since) {
                    *removal = Removal::Keep;
                }
            }
        }
    }

    /// Removals are carried out one after the other: a removal that is known already has been carried out, too.
    pub(super) fn one_removal(&self) -> MutexGuard<'_, ()> {
        self.removals.one.lock()
    }

    /// What [`Table::put_after`](super::table::Table::put_after) says for each block. Ask before the blocks are looked up: then
    /// blocks that a removal known by now removed are no longer found.
    pub(super) fn put_after(&self, keys: impl Iterator<Item = BlockKey>) -> Vec<Generation> {
        let _none_under_way = self.one_removal();
        let table = self.table();
        keys.map(|key| table.put_after(key)).collect()
    }

    /// Carries out removals that are new here, and keeps them. Returns the blocks that were here.
    pub(super) fn carry_out(&self, new: &[(BlockKey, Generation, Removal)]) -> HashSet<BlockKey> {
        if new.is_empty() {
            return HashSet::new();
        }
        self.copies.changed();
        let drop = new.iter().filter(|(_, _, removal)| *removal != Removal::Keep);
        let dropped = self.drop_here(&drop.map(|(key, ..)| *key).collect::<Vec<_>>());
        self.keep_finished(new);
        dropped
    }

    /// Takes blocks from the tiers of this host, shared ones included. Returns those that were here.
    pub(super) fn drop_here(&self, keys: &[BlockKey]) -> HashSet<BlockKey> {
        let mut dropped = HashSet::new();
        let Some(tiering) = self.tiering() else { return dropped };
        for keys in keys.chunks(BATCH_MAX) {
            let removed = tiering.remove_here(keys, self.clock.now_ms()).unwrap_or_default();
            let which = |is: Remove| keys.iter().zip(&removed).filter(move |(_, removed)| **removed == is);
            dropped.extend(which(Remove::Removed).map(|(key, _)| *key));
            if !planted::is(Bug::ForgetsUnfinishedRemovals) {
                let mut unfinished = self.removals.unfinished.lock();
                let room = UNFINISHED_MAX.saturating_sub(unfinished.len());
                unfinished.extend(which(Remove::Unfinished).map(|(key, _)| *key).take(room));
            }
        }
        add(&self.counts.removed, dropped.len() as u64);
        dropped
    }

    /// Asks tiers again that could not remove blocks. What was put since is spared.
    pub(super) fn finish_removals(&self) {
        let keys: Vec<BlockKey> = {
            let mut unfinished = self.removals.unfinished.lock();
            let some: Vec<_> = unfinished.iter().copied().take(BATCH_MAX).collect();
            for key in &some {
                unfinished.remove(key);
            }
            some
        };
        if keys.is_empty() {
            return;
        }
        let _alone = self.one_removal();
        let mut again: Vec<_> = {
            let table = self.table();
            keys.into_iter()
                .filter_map(|key| Some((key, table.removed_at(key)?, Removal::DropEarlier)))
                .collect()
        };
        self.spare_later_puts(&mut again);
        let drop = again.iter().filter(|(_, _, removal)| *removal != Removal::Keep);
        self.drop_here(&drop.map(|(key, ..)| *key).collect::<Vec<_>>());
        self.keep_finished(&again);
    }

    /// Keeps those of these removals that are carried out.
    fn keep_finished(&self, removals: &[(BlockKey, Generation, Removal)]) {
        let kept: Vec<_> = {
            let unfinished = self.removals.unfinished.lock();
            let finished = removals.iter().filter(|(key, ..)| !unfinished.contains(key));
            finished.map(|&(key, at, _)| (key, at)).collect()
        };
        if !kept.is_empty() {
            self.keep_removals(&kept);
        }
    }

    /// Takes in the time of another host. Where its clock is ahead of this machine's, this is remembered beyond a restart: what is
    /// removed before anybody was heard again is later than what had been put before.
    pub(super) fn heard(&self, at: Generation) {
        self.copies.generations.heard(at);
        if at.0 <= self.removals.clock_kept.load(Ordering::Relaxed) || at.0 <= now_us() {
            return;
        }
        if let Some(kept) = self.removals.kept.get() {
            let until = Generation(at.0.saturating_add(KEPT_AHEAD.as_micros() as u64));
            self.removals.clock_kept.fetch_max(until.0, Ordering::Relaxed);
            self.kept_or_told(kept.keep_clock(until));
        }
    }

    /// Reads what was removed before this host was started, and keeps it from now on.
    pub(super) fn restore_removals(&self, kept: Kept) {
        let mut table = self.table();
        for (key, at) in kept.all().filter(|_| !planted::is(Bug::ForgetsRemovalsAtRestart)) {
            self.copies.generations.heard(at);
            table.recall(key, at);
        }
        drop(table);
        if let Some(clock) = kept.clock().filter(|clock| clock.is_plausible()) {
            self.copies.generations.heard(clock);
            self.removals.clock_kept.fetch_max(clock.0, Ordering::Relaxed);
        }
        let _ = self.removals.kept.set(kept);
        self.expire_removals();
    }

    /// At the start: a place that hosts share may list blocks that were removed, stored there by a host that has not heard of
    /// it. From here on they are not there, as if this host had heard of the removal now.
    pub(super) fn forget_what_was_removed(&self, tiering: &Tiering) {
        let removed = self.table().removed();
        tiering.forget_shared(&removed);
    }

    /// Keeps removals on disk, if this host does that.
    fn keep_removals(&self, removals: &[(BlockKey, Generation)]) {
        if let Some(kept) = self.removals.kept.get() {
            self.kept_or_told(kept.add(removals));
        }
    }

    /// Forgets removals that are too old, here and on disk.
    pub(super) fn expire_removals(&self) {
        let horizon = Generation(now_us().saturating_sub(KEPT_FOR_US));
        let dropped = self.table().expire_removals(horizon);
        if let Some(kept) = self.removals.kept.get().filter(|_| !dropped.is_empty()) {
            self.kept_or_told(kept.forget(&dropped));
        }
    }

    fn kept_or_told(&self, kept: sled::Result<()>) {
        let failed = kept.as_ref().is_err();
        let before = self.removals.are_unkept.swap(failed, Ordering::Relaxed);
        if let (Err(error), false) = (kept, before) {
            self.tell(Event::RemovalsNotKept { reason: error.to_string() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_later_has_the_larger_generation() {
        let generations = Generations::default();
        let first = generations.next();
        assert!(generations.next() > first);
        let ahead = Generation(u64::MAX / 2);
        generations.heard(ahead);
        assert!(generations.next() > ahead, "of a host whose clock is ahead, too");
        generations.heard(first);
        assert!(generations.next() > ahead);
    }
}
