//! Work on copies: they are made if too few hosts hold a block, dropped if too many do, and fetched
//! again if one was damaged.

use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::counts::add;
use super::link::{Link, ask_at_once};
use super::message::{Copied, Loan, Reply, Request};
use super::orphans::Orphans;
use super::placement::{Candidate, place};
use super::table::{Duty, Gone, Holding, NodeId, Nodes, Table};
use super::{Event, Shared};
use kvasir_net::transport::tcp::Tls;
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_store::store::Tier;
use kvasir_store::tiering::Tiering;

/// How often to look for damage.
const TICK: Duration = Duration::from_millis(200);
/// How many blocks are remembered as having something to do; beyond that all are looked at.
const TODO_MAX: usize = 1 << 16;
/// The most blocks, and bytes, of one call for copies: some 30 ms at 1 GB/s.
const COPY_BLOCKS: usize = 64;
const COPY_BYTES: u64 = 32 << 20;
/// How long an answer to such a call may take, beyond the time that the blocks stay in place.
pub(super) const ANSWER: Duration = Duration::from_secs(2);
/// How long the news of a copy may take after the answer that it was made. Then it is not believed.
const TOLD: Duration = Duration::from_secs(1);
/// How long a holder may take to say what it has.
const HAS: Duration = Duration::from_secs(1);
/// How long a damaged block is looked for at one holder.
const REPAIR: Duration = Duration::from_secs(2);

/// Blocks with something to do, perhaps.
#[derive(Default)]
pub(super) struct Todo {
    list: Mutex<List>,
    changed: Condvar,
    /// Copies that were ordered and are not yet done, by block.
    ordered: Mutex<HashMap<BlockKey, Nodes>>,
    /// Blocks that peers have lent and not told of yet, by the place of the peer.
    untold: Mutex<HashMap<usize, Untold>>,
}

/// Blocks that a peer has lent, so it has them, while its news of that may be on their way over another connection.
#[derive(Default)]
struct Untold {
    since_its_last_news: HashSet<BlockKey>,
    /// Its next news were asked for when these had been lent, and tell of them, or it has none any more: it may have been started again.
    before: HashSet<BlockKey>,
}

impl Untold {
    fn has(&self, key: BlockKey) -> bool {
        self.since_its_last_news.contains(&key) || self.before.contains(&key)
    }
}

#[derive(Default)]
struct List {
    keys: VecDeque<BlockKey>,
    all: bool,
}

impl Todo {
    pub(super) fn look_at(&self, keys: &[BlockKey]) {
        if keys.is_empty() {
            return;
        }
        let mut list = self.list.lock();
        if list.keys.len() + keys.len() > TODO_MAX {
            list.all = true;
        } else {
            list.keys.extend(keys);
        }
        self.changed.notify_all();
    }

    pub(super) fn look_at_all(&self) {
        self.list.lock().all = true;
        self.changed.notify_all();
    }

    pub(super) fn wake(&self) {
        drop(self.list.lock());
        self.changed.notify_all();
    }

    /// What to look at, as soon as there is something, and at the latest after a tick.
    fn next(&self, stopping: impl Fn() -> bool) -> (Vec<BlockKey>, bool) {
        let mut list = self.list.lock();
        let idle = |list: &mut List| list.keys.is_empty() && !list.all && !stopping();
        self.changed.wait_while_for(&mut list, idle, TICK);
        (list.keys.drain(..).collect(), std::mem::take(&mut list.all))
    }

    /// Where a copy is ordered or expected.
    fn ordered(&self, key: BlockKey) -> Nodes {
        let mut nodes = self.ordered.lock().get(&key).copied().unwrap_or_default();
        let untold = self.untold.lock();
        untold.iter().filter(|(_, untold)| untold.has(key)).for_each(|(place, _)| nodes.insert(*place));
        nodes
    }

    /// Whether no copy of a block is ordered or expected.
    #[cfg(test)]
    pub(super) fn is_done(&self, key: BlockKey) -> bool {
        self.ordered(key).is_empty()
    }

    fn order(&self, key: BlockKey, place: usize) {
        self.ordered.lock().entry(key).or_default().insert(place);
    }

    fn done(&self, key: BlockKey, place: usize) {
        done_of(&mut self.ordered.lock(), key, place);
    }

    /// A peer has lent a block to be copied here. Until its news tell of it, the table does not count it and nothing is missing.
    pub(super) fn expect_news(&self, key: BlockKey, place: usize) {
        self.untold.lock().entry(place).or_default().since_its_last_news.insert(key);
    }

    /// The news of a peer came; if it said everything, nothing more is expected of it.
    pub(super) fn told(&self, place: usize, everything: bool, keys: impl Iterator<Item = BlockKey> + Clone) {
        if let Some(untold) = self.untold.lock().get_mut(&place) {
            untold.before = std::mem::take(&mut untold.since_its_last_news);
            if everything {
                untold.before.clear();
            }
            for key in keys.clone() {
                untold.before.remove(&key);
            }
        }
        let mut ordered = self.ordered.lock();
        if everything {
            ordered.retain(|_, nodes| {
                nodes.remove(place);
                !nodes.is_empty()
            });
        } else if !ordered.is_empty() {
            keys.for_each(|key| done_of(&mut ordered, key, place));
        }
    }
}

fn done_of(ordered: &mut HashMap<BlockKey, Nodes>, key: BlockKey, place: usize) {
    if let Some(nodes) = ordered.get_mut(&key) {
        nodes.remove(place);
        if nodes.is_empty() {
            ordered.remove(&key);
        }
    }
}

/// Goes over all copies of this host, some at a time, to see whether they are still there.
struct Audit {
    keys: VecDeque<BlockKey>,
    next: Instant,
}

impl Shared {
    /// The thread that looks after targets and damage.
    pub(super) fn upkeep(self: &Arc<Self>) {
        let mut audit = Audit { keys: VecDeque::new(), next: Instant::now() + self.config.audit_every };
        let mut orphans = Orphans::default();
        let mut looked = Instant::now();
        self.note_time();
        while !self.is_stopping() {
            let (mut keys, all) = self.todo.next(|| self.is_stopping());
            let Some(tiering) = self.tiering() else { return };
            if looked.elapsed() >= TICK {
                looked = Instant::now();
                self.note_time();
                self.miss_the_lost();
                let gone = self.audit(&tiering, &mut audit);
                self.look_for_damage(&tiering);
                self.let_go(&tiering, &gone);
                self.take_over(&mut orphans);
                self.finish_removals();
                self.ways.rails.iter().for_each(|rail| rail.transport.tend());
                self.receiving.tend();
                self.renew_certificates();
            }
            if all {
                keys.extend(self.table().next_duties(TODO_MAX));
            }
            let mut surplus = Vec::new();
            for key in keys {
                let duty = self.table().duty(key);
                match duty {
                    Duty::Nothing => {}
                    Duty::Copy { missing, size, not_on } => self.order_copies(key, missing, size, not_on),
                    Duty::Trim => surplus.push(key),
                }
            }
            surplus.chunks(BATCH_MAX).for_each(|keys| self.trim(&tiering, keys));
        }
    }

    /// Reports soon if renewed certificates cannot be used, and not only when a host connects.
    fn renew_certificates(&self) {
        if let Some(Err(error)) = self.config.tls.as_ref().map(Tls::renew) {
            self.tell(Event::CertificateRefused { reason: error.to_string() });
        }
    }

    /// Drops copies here of blocks that have enough copies elsewhere: as many of the holders that come before this host as copies are
    /// wanted have said, just now, that they have the block. The table is not enough, as it may be as old as their last audit.
    fn trim(&self, tiering: &Tiering, keys: &[BlockKey]) {
        let confirmed = self.holders_by_their_word(keys);
        let mut trimmed = Vec::new();
        {
            let mut table = self.table();
            for (&key, confirmed) in keys.iter().zip(confirmed) {
                let wanted = table.holding(key).map_or(usize::MAX, |holding| holding.target.into());
                // A holder that was lost after it said so, while others were asked, does not count.
                let confirmed = confirmed.common(self.up()).len();
                if confirmed >= wanted && table.duty(key) == Duty::Trim {
                    table.gone(0, key, Gone::Lost);
                    trimmed.push(key);
                }
            }
        }
        self.copies.changed();
        add(&self.counts.trimmed, trimmed.len() as u64);
        let now_ms = self.clock.now_ms();
        let _ = match planted::is(Bug::TrimsWhatHostsShare) {
            true => tiering.remove_here(&trimmed, now_ms),
            false => tiering.trim(&trimmed, now_ms),
        };
    }

    /// The holders of each block, of those that come before this host, that say now that they have it. All are asked at the
    /// same time.
    fn holders_by_their_word(&self, keys: &[BlockKey]) -> Vec<Nodes> {
        let before: Vec<Nodes> = {
            let table = self.table();
            keys.iter().map(|&key| table.before(key)).collect()
        };
        let asked =
            |link: &Link| -> Vec<usize> { (0..keys.len()).filter(|&i| before[i].has(link.place)).collect() };
        let has = |link: &Link| -> Vec<usize> {
            let asked = asked(link);
            let request = Request::Has { keys: asked.iter().map(|&i| keys[i]).collect() };
            let Ok(Reply::Has { held }) = link.call(&request, HAS) else { return Vec::new() };
            asked.into_iter().zip(held).filter(|(_, held)| *held).map(|(i, _)| i).collect()
        };
        let up = self.links.iter().map(|link| &**link).filter(|link| link.is_up());
        let links: Vec<&Link> = up.filter(|link| !asked(link).is_empty()).collect();
        let mut confirmed = vec![Nodes::default(); keys.len()];
        for (link, held) in links.iter().zip(ask_at_once(&links, has)) {
            held.into_iter().flatten().for_each(|i| confirmed[i].insert(link.place));
        }
        confirmed
    }

    /// Which blocks a tier of this host has.
    pub(super) fn has_here(&self, keys: &[BlockKey]) -> Vec<bool> {
        let found = self.tiering().and_then(|tiering| tiering.residency_own(keys).ok());
        found.map_or(vec![false; keys.len()], |found| found.iter().map(|found| found.bits() != 0).collect())
    }

    /// Queues copies of a block at the hosts that suit best.
    pub(super) fn order_copies(&self, key: BlockKey, missing: usize, size: u32, not_on: Nodes) {
        // Copies ordered from a host that is down will not come.
        let up = |place: usize| self.link(place).is_some_and(|link| link.is_up());
        let mut ordered = self.todo.ordered(key);
        ordered.iter().filter(|&place| !up(place)).for_each(|place| ordered.remove(place));
        let missing = missing.saturating_sub(ordered.len());
        let taken = not_on.union(ordered);
        let mut racks = vec![self.config.rack.as_str()];
        racks.extend(taken.iter().filter_map(|place| Some(self.link(place)?.config.rack.as_str())));
        let free = self.links.iter().filter(|link| link.is_up() && !taken.has(link.place));
        let candidates: Vec<Candidate<'_>> = free.map(|link| candidate(link, size)).collect();
        for node in place(missing, size, &racks, &candidates) {
            let link = self.links.iter().find(|link| NodeId::of(&link.config.name) == node);
            if let Some(link) = link {
                self.todo.order(key, link.place);
                if !link.push(key, self.config.queue_max) {
                    // The next audit will find it again.
                    self.todo.done(key, link.place);
                }
            }
        }
    }

    /// The thread that has copies made at one peer.
    pub(super) fn copy_all(&self, link: &Link) {
        while !self.is_stopping() {
            let keys = link.pop(COPY_BLOCKS);
            if !keys.is_empty() {
                self.copy(link, &keys);
                keys.iter().for_each(|&key| self.todo.done(key, link.place));
                // Blocks that need another copy after this one.
                self.todo.look_at(&self.still_to_do(link, &keys));
            }
        }
    }

    /// Blocks that must still be copied, and may be at once: this peer is not the one that did not take them.
    fn still_to_do(&self, link: &Link, keys: &[BlockKey]) -> Vec<BlockKey> {
        let table = self.table();
        let took = |key: BlockKey| table.holders(key).has(link.place);
        keys.iter().copied().filter(|&key| took(key) && table.duty(key) != Duty::Nothing).collect()
    }

    /// Lends blocks to a peer and asks it to take copies.
    fn copy(&self, link: &Link, keys: &[BlockKey]) {
        let (mut from, mut bytes) = (0, 0);
        for (at, &key) in keys.iter().enumerate() {
            bytes += self.table().holding(key).map_or(0, |holding| u64::from(holding.size));
            if bytes >= COPY_BYTES || at + 1 == keys.len() {
                self.copy_batch(link, &keys[from..=at]);
                (from, bytes) = (at + 1, 0);
            }
        }
    }

    fn copy_batch(&self, link: &Link, keys: &[BlockKey]) {
        if !link.is_up() {
            return;
        }
        let loans = self.lend(self.owner, keys);
        let holding = |loan: Loan| Some((loan, self.table().holding(loan.meta.key)?));
        let items: Vec<(Loan, Holding)> = loans.iter().flatten().filter_map(|&loan| holding(loan)).collect();
        let taken = if items.is_empty() { Vec::new() } else { self.offer(link, &items) };
        let leases: Vec<u64> = loans.iter().flatten().map(|loan| loan.lease).collect();
        let _ = self.store.release(self.owner, &leases);
        self.wait_until_told(link, &taken);
    }

    /// Asks a peer to take copies. Returns those that it says it has.
    fn offer(&self, link: &Link, items: &[(Loan, Holding)]) -> Vec<BlockKey> {
        let lease_ms = self.lease_ms();
        let patience = Duration::from_millis(lease_ms) + ANSWER;
        let request = Request::Copy { items: items.to_vec(), lease_ms };
        let answer = self.counts.copy_times.measure(|| link.call(&request, patience));
        let outcomes = match answer {
            Ok(Reply::Copied { outcomes }) if outcomes.len() == items.len() => outcomes,
            _ => vec![Copied::Failed; items.len()],
        };
        self.note_outcomes(link, items, &outcomes)
    }

    fn note_outcomes(&self, link: &Link, items: &[(Loan, Holding)], outcomes: &[Copied]) -> Vec<BlockKey> {
        let mut taken = Vec::new();
        for ((loan, _), &outcome) in items.iter().zip(outcomes) {
            let counts = &self.counts;
            match outcome {
                Copied::Done | Copied::Had => {
                    add(&counts.copied, 1);
                    add(&link.copied, 1);
                    if outcome == Copied::Had {
                        add(&counts.had, 1)
                    } else {
                        add(&counts.copied_bytes, loan.meta.size.into())
                    }
                    taken.push(loan.meta.key);
                }
                Copied::NoRoom => add(&counts.no_room, 1),
                Copied::Enough => {}
                Copied::Failed => add(&counts.copy_failed, 1),
            }
        }
        taken
    }

    /// Waits until a peer's own news say that it holds what it has just taken, which is soon. Nothing else counts: its
    /// answer comes over another connection, perhaps after the news that it has let the block go again.
    fn wait_until_told(&self, link: &Link, keys: &[BlockKey]) {
        let untold = |table: &Table, key: BlockKey| {
            table.holding(key).is_some() && !table.holders(key).has(link.place)
        };
        self.copies.wait_until(TOLD, |table| !keys.iter().any(|&key| untold(table, key)));
    }

    /// One step of the audit: copies of this host that none of its tiers has any more.
    fn audit(&self, tiering: &Tiering, audit: &mut Audit) -> Vec<BlockKey> {
        if audit.keys.is_empty() && Instant::now() >= audit.next {
            audit.next = Instant::now() + self.config.audit_every;
            let facts = self.table().own().0;
            audit.keys = facts.into_iter().map(super::table::Fact::key).collect();
            self.todo.look_at_all();
            self.expire_removals();
        }
        let count = audit.keys.len().min(BATCH_MAX);
        let keys: Vec<BlockKey> = audit.keys.drain(..count).collect();
        self.not_here(tiering, &keys)
    }

    fn not_here(&self, tiering: &Tiering, keys: &[BlockKey]) -> Vec<BlockKey> {
        let Ok(found) = tiering.residency_here(keys) else { return Vec::new() };
        let in_pool_alone = 1 << Tier::Dram as u8;
        let seen = if planted::is(Bug::LetsGoOfWhatIsOnDisk) { in_pool_alone } else { u8::MAX };
        keys.iter().zip(found).filter(|(_, found)| found.bits() & seen == 0).map(|(&key, _)| key).collect()
    }

    /// Gives up copies that the evictor dropped. Nobody makes them again for that reason.
    fn let_go(&self, tiering: &Tiering, keys: &[BlockKey]) {
        // Checked once more, because damage may have been mended meanwhile.
        for key in self.not_here(tiering, keys) {
            if self.table().gone(0, key, Gone::LetGo) {
                add(&self.counts.let_go, 1);
                self.copies.changed();
            }
        }
    }

    /// Fetches blocks again that were found damaged here. Until then this host goes on saying that it holds them.
    fn look_for_damage(&self, tiering: &Tiering) {
        let damaged = tiering.take_damaged();
        if damaged.is_empty() {
            return;
        }
        for chunk in damaged.chunks(BATCH_MAX) {
            for key in self.not_here(tiering, chunk) {
                if self.table().holders(key).has(0) {
                    self.repair(key);
                }
            }
        }
    }

    fn repair(&self, key: BlockKey) {
        let (order, holding) = {
            let table = self.table();
            (table.in_order(key), table.holding(key))
        };
        let peers = order.into_iter().filter_map(|place| self.link(place)).filter(|link| link.is_up());
        for link in peers {
            let Some(borrowed) = self.borrow(link, &[key], REPAIR) else { continue };
            let Some((loan, holding)) = borrowed.loans[0].zip(holding) else { continue };
            let taken = self.take_in(link, &[(loan, holding)], borrowed.lease_ms);
            self.give_back(link, borrowed.run, [&loan]);
            if matches!(taken[..], [Copied::Done | Copied::Had]) {
                add(&self.counts.repaired, 1);
                return self.tell(Event::Repaired { key, peer: link.config.name.clone() });
            }
        }
        add(&self.counts.not_repaired, 1);
        self.table().gone(0, key, Gone::Lost);
        self.copies.changed();
        self.tell(Event::NotRepaired { key });
    }
}

pub(super) fn candidate(link: &Link, size: u32) -> Candidate<'_> {
    let status = link.status();
    // Queued copies will take space that the peer did not know of when it told its status.
    let queued = link.queued() as u64;
    Candidate {
        node: NodeId::of(&link.config.name),
        rack: &link.config.rack,
        free_bytes: status.free_bytes.saturating_sub(queued * u64::from(size)),
        pool_bytes: status.pool_bytes,
        load: status.load.saturating_add(queued),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Generation;
    use crate::tests::pair_of_hosts;
    use kvasir_protocol::block::BlockMeta;

    /// Their audits have not found it out yet.
    #[test]
    fn a_copy_is_not_dropped_for_others_that_are_gone() {
        let (host, peer) = pair_of_hosts();
        let (shared, tiering) = (&host.cluster.shared, host.cluster.shared.tiering().unwrap());
        let (key, before) = (BlockKey(1), NodeId::of("host-1"));
        let meta = BlockMeta::single(key, 8);
        let put = |host: &crate::tests::Host| {
            host.store.put(host.store.new_owner(), &meta, b"a block.", 0).unwrap()
        };
        put(&host);
        let holding = Holding { size: 8, target: 1, primary: before, generation: Generation(1) };
        for place in [0, 1] {
            shared.table().holds(place, key, holding);
        }
        assert_eq!(shared.table().duty(key), Duty::Trim);
        shared.trim(&tiering, &[key]);
        assert!(host.store.exists(&[key]).unwrap()[0], "the other one does not have it");
        put(&peer);
        shared.trim(&tiering, &[key]);
        assert!(!host.store.exists(&[key]).unwrap()[0], "now it does");
    }

    #[test]
    fn what_a_peer_lent_is_expected_until_it_must_have_told_of_it() {
        let (todo, key, told) = (Todo::default(), BlockKey(1), || std::iter::empty());
        todo.expect_news(key, 3);
        // Perhaps asked for before it was lent.
        todo.told(3, false, told());
        todo.told(2, true, told());
        assert_eq!(todo.ordered(key), Nodes::one(3));
        todo.told(3, false, told());
        assert!(todo.is_done(key), "of the process that lent it nobody hears any more");

        todo.expect_news(key, 3);
        todo.told(3, false, std::iter::once(key));
        assert!(todo.is_done(key));
        todo.expect_news(key, 3);
        todo.told(3, true, told());
        assert!(todo.is_done(key));
    }

    #[test]
    fn a_copy_counts_when_its_holder_says_so_and_not_by_an_answer() {
        let (host, _peer) = pair_of_hosts();
        let (shared, key) = (&host.cluster.shared, BlockKey(1));
        let holding = Holding { size: 1, target: 2, primary: NodeId(0), generation: Generation(1) };
        shared.table().holds(0, key, holding);
        let loan = Loan { meta: BlockMeta::single(key, 1), checksum: 1, offset: 0, lease: 0 };
        // An answer that was long on its way: the peer holds no such block.
        let taken = shared.note_outcomes(&shared.links[0], &[(loan, holding)], &[Copied::Done]);
        assert_eq!(taken, [key]);
        assert!(!shared.table().holders(key).has(1), "its news do not say so");
        assert!(matches!(shared.table().duty(key), Duty::Copy { missing: 1, .. }));
    }
}
