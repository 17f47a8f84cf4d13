//! Removing a block from every host, while hosts are busy copying it to each other.
//!
//! A host that has dropped its copy says so, and the first holder left would order a new one, perhaps on a host that
//! was asked already. Hence two rounds: in the first every host drops the block and takes no copy of it any more; when
//! all have, the second lifts that. A host that is not told of the second round lifts it by itself after a while. A
//! answers the first round when nothing that it sent before is on its way any more.
//!
//! A host that is away is told of it when it is back ([`owed`]).

mod owed;

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(super) use self::owed::Owed;
use super::channel::{Channel, ChannelError};
use super::counts::add;
use super::link::Link;
use super::message::{Reply, Request, Round};
use super::table::{NodeId, Nodes};
use super::{Shared, lock};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_store::dram::Remove;

/// How long a peer may take to remove blocks from its tiers.
const ANSWER: Duration = Duration::from_secs(4);
/// How much of that time it waits for copies that it is sending.
const SENT: Duration = Duration::from_secs(2);
/// Longer than a removal takes on all hosts, even if each is as slow as it may be.
const LIFTED_AFTER: Duration = Duration::from_secs(30);
/// The most blocks being removed at once. Beyond it a copy that is on its way may survive a removal.
const REMOVING_MAX: usize = 1 << 16;

/// Blocks being removed: no copy of them is taken in.
#[derive(Default)]
pub(super) struct Removing(HashMap<BlockKey, Mark>);

struct Mark {
    /// Removals at work on it.
    removals: u32,
    until: Instant,
}

impl Removing {
    fn begin(&mut self, keys: &[BlockKey], now: Instant) {
        if self.0.len() + keys.len() > REMOVING_MAX {
            self.0.retain(|_, mark| mark.until > now);
        }
        if self.0.len() + keys.len() > REMOVING_MAX {
            return;
        }
        for key in keys {
            let mark = self.0.entry(*key).or_insert(Mark { removals: 0, until: now });
            // A removal that nobody lifted in time is over.
            mark.removals = if mark.until > now { mark.removals + 1 } else { 1 };
            mark.until = now + LIFTED_AFTER;
        }
    }

    fn end(&mut self, keys: &[BlockKey]) {
        for key in keys {
            let Some(mark) = self.0.get_mut(key) else { continue };
            mark.removals = mark.removals.saturating_sub(1);
            if mark.removals == 0 {
                self.0.remove(key);
            }
        }
    }

    pub(super) fn has(&self, key: BlockKey, now: Instant) -> bool {
        self.0.get(&key).is_some_and(|mark| mark.until > now)
    }
}

/// Blocks whose copies are being sent to peers.
#[derive(Default)]
pub(super) struct Sending {
    blocks: Mutex<HashMap<BlockKey, u32>>,
    done: Condvar,
}

/// Copies on their way; over when dropped.
pub(super) struct Sent<'a> {
    sending: &'a Sending,
    keys: &'a [BlockKey],
}

impl Sending {
    pub(super) fn begin<'a>(&'a self, keys: &'a [BlockKey]) -> Sent<'a> {
        let mut blocks = lock(&self.blocks);
        keys.iter().for_each(|&key| *blocks.entry(key).or_default() += 1);
        Sent { sending: self, keys }
    }

    /// Waits until none of these is being sent, or `patience` is over.
    fn wait(&self, keys: &[BlockKey], patience: Duration) {
        let busy = |blocks: &mut HashMap<BlockKey, u32>| keys.iter().any(|key| blocks.contains_key(key));
        let waited = self.done.wait_timeout_while(lock(&self.blocks), patience, busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        let mut blocks = lock(&self.sending.blocks);
        for key in self.keys {
            let Some(count) = blocks.get_mut(key) else { continue };
            *count -= 1;
            if *count == 0 {
                blocks.remove(key);
            }
        }
        self.sending.done.notify_all();
    }
}

impl Shared {
    /// Removes blocks from all peers that are up, and from what is known here; the caller removes them from the tiers
    /// here. Per block: whether a peer had it, or the peer that holds it and did not answer.
    pub(super) fn remove_from_peers(&self, keys: &[BlockKey]) -> Vec<Result<bool, String>> {
        let held: Vec<Nodes> = {
            let table = self.table();
            keys.iter().map(|&key| table.holders(key)).collect()
        };
        lock(&self.removing).begin(keys, Instant::now());
        self.forget(keys);
        self.sending.wait(keys, SENT);
        let mut removed = vec![Ok(false); keys.len()];
        // All of them, not only those known to hold a copy: one may be on its way there.
        let (up, away): (Vec<_>, Vec<_>) = self.links.iter().partition(|link| link.is_up());
        let mut untold = away.iter().fold(Nodes::default(), |all, link| all.and(Nodes::one(link.place)));
        for link in &up {
            match self.remove_at(link, keys, Round::Drop) {
                Some(there) => {
                    let had = removed.iter_mut().zip(there).filter(|(_, there)| *there);
                    had.filter(|(removed, _)| removed.is_ok()).for_each(|(removed, _)| *removed = Ok(true));
                }
                None => {
                    untold.insert(link.place);
                    let holds = (0..keys.len()).filter(|&i| held[i].has(link.place));
                    holds.for_each(|i| removed[i] = Err(link.config.name.clone()));
                }
            }
        }
        lock(&self.owed).owe(keys, untold);
        let untold = self.names(untold);
        for link in &up {
            self.remove_at(link, keys, Round::End { untold: untold.clone() });
        }
        lock(&self.removing).end(keys);
        removed
    }

    fn names(&self, nodes: Nodes) -> Vec<NodeId> {
        let links = self.links.iter().filter(|link| nodes.has(link.place));
        links.map(|link| NodeId::of(&link.config.name)).collect()
    }

    /// Tells a host which blocks were removed while it was away.
    pub(super) fn tell_owed(&self, link: &Link, channel: &mut Channel) -> Result<(), ChannelError> {
        let owed = lock(&self.owed).to(link.place);
        for keys in owed.chunks(BATCH_MAX) {
            for round in [Round::Drop, Round::End { untold: Vec::new() }] {
                let request = Request::Remove { keys: keys.to_vec(), round };
                match channel.call(&request, Instant::now() + ANSWER)? {
                    Reply::Removed { .. } => {}
                    _ => return Err(channel.wrong_reply()),
                }
            }
            lock(&self.owed).told(keys, link.place);
            add(&self.counts.told_late, keys.len() as u64);
        }
        Ok(())
    }

    /// Removes blocks that travelled to a peer while they were removed everywhere else.
    pub(super) fn remove_late(&self, link: &Link, keys: &[BlockKey]) {
        self.remove_at(link, keys, Round::Drop);
        self.remove_at(link, keys, Round::End { untold: Vec::new() });
    }

    fn remove_at(&self, link: &Link, keys: &[BlockKey], round: Round) -> Option<Vec<bool>> {
        match link.call(self, &Request::Remove { keys: keys.to_vec(), round }, ANSWER) {
            Ok(Reply::Removed { removed }) if removed.len() == keys.len() => Some(removed),
            _ => None,
        }
    }

    /// A peer says that blocks must be removed everywhere, or that they now are. Returns whether each was here.
    pub(super) fn remove_here(&self, keys: &[BlockKey], round: &Round) -> Vec<bool> {
        if let Round::End { untold } = round {
            let away = self.links.iter().filter(|link| untold.contains(&NodeId::of(&link.config.name)));
            let away = away.fold(Nodes::default(), |all, link| all.and(Nodes::one(link.place)));
            lock(&self.owed).owe(keys, away);
            lock(&self.removing).end(keys);
            return vec![false; keys.len()];
        }
        lock(&self.removing).begin(keys, Instant::now());
        self.forget(keys);
        self.sending.wait(keys, SENT);
        let Some(tiering) = self.tiering() else { return vec![false; keys.len()] };
        let removed = tiering.remove_here(keys, self.clock.now_ms()).unwrap_or_default();
        let mut removed: Vec<bool> = removed.into_iter().map(|remove| remove == Remove::Removed).collect();
        removed.resize(keys.len(), false);
        add(&self.counts.removed, removed.iter().filter(|removed| **removed).count() as u64);
        removed
    }

    /// Blocks are removed: they must not be held anywhere, and what is on its way in must not stay.
    pub(super) fn forget(&self, keys: &[BlockKey]) {
        {
            let mut arriving = lock(&self.arriving);
            for key in keys {
                arriving.entry(*key).and_modify(|block| block.removed = true);
            }
        }
        let mut table = self.table();
        for &key in keys {
            table.forget(key);
        }
        drop(table);
        self.news.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_being_removed_until_the_last_removal_ends_or_its_time_is_over() {
        let (mut removing, now) = (Removing::default(), Instant::now());
        let (one, two) = (BlockKey(1), BlockKey(2));
        removing.begin(&[one], now);
        removing.begin(&[one, two], now);
        removing.end(&[one]);
        assert!(removing.has(one, now) && removing.has(two, now));
        removing.end(&[one, two, BlockKey(3)]);
        assert!(!removing.has(one, now) && !removing.has(two, now));

        removing.begin(&[one], now);
        let later = now + LIFTED_AFTER;
        assert!(!removing.has(one, later));
        removing.begin(&[one], later);
        removing.end(&[one]);
        assert!(!removing.has(one, later), "the one that was never lifted does not count");
    }

    #[test]
    fn what_is_being_sent_is_waited_for() {
        let (sending, long) = (Sending::default(), Duration::from_secs(60));
        let keys = [BlockKey(1), BlockKey(2)];
        let (first, second) = (sending.begin(&keys), sending.begin(&keys[..1]));
        drop(first);
        sending.wait(&keys[1..], long);
        sending.wait(&keys, Duration::ZERO);
        assert_eq!(lock(&sending.blocks).len(), 1);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(second));
            sending.wait(&keys, long);
        });
        assert!(lock(&sending.blocks).is_empty());
    }

    #[test]
    fn it_is_bounded() {
        let (mut removing, now) = (Removing::default(), Instant::now());
        let keys: Vec<_> = (0..REMOVING_MAX as u128).map(BlockKey).collect();
        removing.begin(&keys, now);
        removing.begin(&[BlockKey(u128::MAX)], now);
        assert!(!removing.has(BlockKey(u128::MAX), now));
        removing.begin(&[BlockKey(u128::MAX)], now + LIFTED_AFTER);
        assert!(removing.has(BlockKey(u128::MAX), now + LIFTED_AFTER) && removing.0.len() == 1);
    }
}
