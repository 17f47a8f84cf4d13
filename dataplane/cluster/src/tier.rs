//! The peers as a tier: what this host does not have is read from one that does.
//!
//! It stores nothing by itself. Which blocks it holds is what the table knows; a read asks the nearest holder (same rack,
//! then the least loaded) and goes on to the next within the call. Calls are complete when they return.

use std::collections::BTreeMap;

use super::Shared;
use super::counts::add;
use super::fetch::Piece;
use super::link::Link;
use super::message::Loan;
use super::removal::Unanswered;
use super::staging::READ_MAX;
use super::table::Nodes;
use kvasir_net::transfer::Class;
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, checksum};
use kvasir_store::store::{
    BlockStore, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, Tier, TierError, TierStats,
};

use std::sync::Arc;

const NAME: &str = "peer";
/// How long one holder may take: one that does not answer must leave time for the next. If all were asked in vain, each gets twice as long.
const ONE_HOLDER: Duration = Duration::from_millis(600);
/// Pause before the first holder is asked again.
const AGAIN: Duration = Duration::from_millis(20);

pub(super) struct PeerTier(pub(super) Arc<Shared>);

/// A block that is asked for.
struct Wanted {
    get: Get,
    /// Peers to ask in this round, nearest last, and those that answered that they do not have it intact.
    holders: Vec<usize>,
    without: Nodes,
    loaded: Option<Loaded>,
}

impl Shared {
    /// Peers that hold a block and are up, the nearest last. No peer is asked.
    pub(super) fn holders(&self, key: BlockKey) -> Vec<usize> {
        let order = self.table().in_order(key);
        let mut near: Vec<(bool, u64, usize)> = order
            .into_iter()
            .filter_map(|place| Some((place, self.link(place)?)))
            .filter(|(_, link)| link.is_up())
            .map(|(place, link)| (link.config.rack != self.config.rack, link.status().load, place))
            .collect();
        // The sort is stable: equally near ones stay in the order in which they are responsible.
        near.sort_by_key(|&(far, load, _)| (far, load));
        near.into_iter().rev().map(|(_, _, place)| place).collect()
    }
}

impl PeerTier {
    /// Asks one peer for the blocks of which it is the nearest holder.
    fn ask(&self, place: usize, wanted: &mut [&mut Wanted], until: Instant) {
        let shared = &self.0;
        let Some(link) = shared.link(place).filter(|link| link.is_up()) else { return };
        let keys: Vec<BlockKey> = wanted.iter().map(|wanted| wanted.get.key).collect();
        let patience = until.saturating_duration_since(Instant::now());
        let Some(borrowed) = shared.borrow(link, &keys, patience) else { return };
        let until = until.min(Instant::now() + Duration::from_millis(borrowed.lease_ms));
        let mut lent: Vec<(usize, Loan)> = Vec::new();
        for (i, loan) in borrowed.loans.into_iter().enumerate() {
            let fits = |loan: &Loan| (1..=wanted[i].get.buffer.len()).contains(&(loan.meta.size as usize));
            match loan.filter(fits) {
                Some(loan) => lent.push((i, loan)),
                None => wanted[i].without.insert(place),
            }
        }
        self.load(link, wanted, &lent, until);
        shared.give_back(link, borrowed.run, lent.iter().map(|(_, loan)| loan));
    }

    /// Asks the holders of each block that is still wanted, one after the other, and holders of different blocks at the same
    /// time. Returns whether there was any to ask.
    fn round(&self, wanted: &mut [Wanted], patience: Duration, until: Instant) -> bool {
        for wanted in wanted.iter_mut().filter(|wanted| wanted.loaded.is_none()) {
            let without = wanted.without;
            wanted.holders = self.0.holders(wanted.get.key);
            wanted.holders.retain(|&place| !without.has(place));
        }
        let mut first = true;
        loop {
            let mut next: BTreeMap<usize, Vec<&mut Wanted>> = BTreeMap::new();
            for wanted in wanted.iter_mut().filter(|wanted| wanted.loaded.is_none()) {
                if let Some(place) = wanted.holders.pop() {
                    next.entry(place).or_default().push(wanted);
                }
            }
            let asked: usize = next.values().map(Vec::len).sum();
            if asked == 0 || Instant::now() >= until {
                return !first;
            }
            if !first {
                add(&self.0.counts.failovers, asked as u64);
            }
            first = false;
            self.ask_all(next, until.min(Instant::now() + patience));
        }
    }

    fn ask_all(&self, mut asked: BTreeMap<usize, Vec<&mut Wanted>>, until: Instant) {
        // Most reads have one holder to ask, and need no thread for it.
        let Some((place, mut first)) = asked.pop_first() else { return };
        thread::scope(|scope| {
            for (place, mut wanted) in asked {
                scope.spawn(move || self.ask(place, &mut wanted, until));
            }
            self.ask(place, &mut first, until);
        });
    }

    /// Reads what was lent, as many blocks at a time as fit in one piece of the staging memory.
    fn load(&self, link: &Link, wanted: &mut [&mut Wanted], lent: &[(usize, Loan)], until: Instant) {
        let mut rest = lent;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, loan): &&(usize, Loan)| {
                bytes += u64::from(loan.meta.size);
                bytes <= READ_MAX
            };
            let together = rest.iter().take_while(fits).count();
            let (now, later) = rest.split_at(together.max(1));
            match now {
                [(i, loan)] if together == 0 => self.load_in_parts(link, wanted[*i], loan, until),
                _ => self.load_together(link, wanted, now, until),
            }
            rest = later;
        }
    }

    /// Reads a block that is larger than a piece of the staging memory.
    fn load_in_parts(&self, link: &Link, wanted: &mut Wanted, loan: &Loan, until: Instant) {
        let Ok(target) = wanted.get.target(loan.meta.size) else { return };
        let mut offset = loan.offset;
        for part in target.chunks_mut(READ_MAX as usize) {
            let len = part.len() as u64;
            let memory = self.0.ways.staging.take(len, until);
            let Some(to) = memory.as_ref().and_then(|memory| memory.part(0, len)) else { return };
            let piece = Piece { offset, to };
            if self.0.read(link, std::slice::from_ref(&piece), Class::Prefill, until) != [true] {
                return;
            }
            piece.to.copy_out(part);
            offset += len;
        }
        self.keep_if_intact(link, wanted, loan);
    }

    fn load_together(&self, link: &Link, wanted: &mut [&mut Wanted], lent: &[(usize, Loan)], until: Instant) {
        let shared = &self.0;
        let total: u64 = lent.iter().map(|(_, loan)| u64::from(loan.meta.size)).sum();
        let Some(memory) = shared.ways.staging.take(total, until) else { return };
        let mut at = 0;
        let pieces: Vec<Piece> = lent
            .iter()
            .filter_map(|(_, loan)| {
                let to = memory.part(at, loan.meta.size.into())?;
                at += u64::from(loan.meta.size);
                Some(Piece { offset: loan.offset, to })
            })
            .collect();
        let arrived = shared.read(link, &pieces, Class::Prefill, until);
        for (((i, loan), piece), arrived) in lent.iter().zip(&pieces).zip(arrived) {
            let Ok(target) = wanted[*i].get.target(loan.meta.size) else { continue };
            if arrived {
                piece.to.copy_out(target);
                self.keep_if_intact(link, wanted[*i], loan);
            }
        }
    }

    /// What has been read is the block, if it is what was lent.
    fn keep_if_intact(&self, link: &Link, wanted: &mut Wanted, loan: &Loan) {
        let counts = &self.0.counts;
        let Ok(read) = wanted.get.target(loan.meta.size) else { return };
        if checksum(read) != loan.checksum {
            add(&counts.corrupt, 1);
            wanted.without.insert(link.place);
            return;
        }
        wanted.loaded = Some(Loaded { meta: loan.meta, checksum: loan.checksum });
        add(&counts.read_hits, 1);
        add(&counts.read_bytes, loan.meta.size.into());
        add(&link.read, 1);
    }
}

impl BlockStore for PeerTier {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: Tier::Peer,
            name: NAME,
            durable: false,
            block_bytes_max: u32::MAX.into(),
            capacity_bytes: None,
        }
    }

    /// Refused: copies are made by [`Cluster::replicate`](super::Cluster::replicate), from the pool.
    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        let refuse = |put: Put| {
            let (key, reason) = (put.meta.key, "peers take copies of what is in the pool only".to_owned());
            let error = TierError::Io { tier: NAME, step: "put", key, reason, retryable: false };
            PutDone { buffer: put.buffer, outcome: Err(error) }
        };
        Pending::ready(batch.into_iter().map(refuse).collect())
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        let until = Instant::now() + self.0.config.read_timeout;
        let want = |get: Get| Wanted { get, holders: Vec::new(), without: Nodes::default(), loaded: None };
        let mut wanted: Vec<Wanted> = batch.into_iter().map(want).collect();
        let mut patience = ONE_HOLDER;
        while self.round(&mut wanted, patience, until)
            && wanted.iter().any(|wanted| wanted.loaded.is_none())
            && Instant::now() + AGAIN < until
            && !self.0.is_stopping()
        {
            self.0.pause(AGAIN);
            patience *= 2;
        }
        let misses = wanted.iter().filter(|wanted| wanted.loaded.is_none()).count();
        add(&self.0.counts.read_misses, misses as u64);
        let done = |wanted: Wanted| GetDone { buffer: wanted.get.buffer, outcome: Ok(wanted.loaded) };
        Pending::ready(wanted.into_iter().map(done).collect())
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        let (up, table) = (self.0.up(), self.0.table());
        let elsewhere = |key: BlockKey| !table.holders(key).common(up).is_empty();
        let size = |&key: &BlockKey| table.holding(key).filter(|_| elsewhere(key)).map(|known| known.size);
        keys.iter().map(size).collect()
    }

    fn were_removed(&self, keys: &[BlockKey]) -> Vec<bool> {
        let table = self.0.table();
        keys.iter().map(|&key| table.was_removed(key)).collect()
    }

    /// Removes the copies of all peers that are up. An error if one that holds a copy did not answer.
    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        let outcome = |(&key, removed): (&BlockKey, Result<bool, Unanswered>)| {
            let failed = |error: Unanswered| {
                let reason = error.to_string();
                TierError::Io { tier: NAME, step: "remove", key, reason, retryable: true }
            };
            removed.map_err(failed)
        };
        let removed = keys.iter().zip(self.0.remove_from_peers(&keys)).map(outcome).collect();
        Pending::ready(removed)
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    fn stats(&self) -> TierStats {
        let counts = &self.0.counts;
        let read = |count: &std::sync::atomic::AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed);
        TierStats {
            hits: read(&counts.read_hits),
            misses: read(&counts.read_misses),
            read_bytes: read(&counts.read_bytes),
            written_bytes: read(&counts.copied_bytes),
            corrupt: read(&counts.corrupt),
            ..TierStats::default()
        }
    }
}
