//! Bytes from a peer's pool: read through the transfer engine, compared with checksums before anybody sees them.

use std::ops::Range;
use std::sync::Arc;

use super::Shared;
use super::counts::add;
use super::link::Link;
use super::message::{Copied, Loan, Reply, Request};
use super::table::{Heard, Holding, Table};
use kvasir_memory::region::LocalRange;
use kvasir_net::transfer::{Batch, Class, Entry, EntryStatus, Segment, Transfer, TransferError};
use kvasir_net::transport::{Denied, Direction, OpError, RemoteRange};
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_store::dram::{BlockStat, Reservation, Reserve};

/// Pause between two attempts of a transfer that broke off while the peer itself is up.
const AGAIN: Duration = Duration::from_millis(20);

/// A piece of a peer's pool, and where it goes.
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) to: LocalRange,
}

/// What a peer lent.
pub(super) struct Borrowed {
    /// One per key asked for. `None` means that the peer does not have that block.
    pub(super) loans: Vec<Option<Loan>>,
    pub(super) lease_ms: u64,
    /// The peer's run, which must be named when loans are given back.
    pub(super) run: u64,
}

/// A copy that has a place here, but not its bytes yet.
struct Placed<'a> {
    /// Index in the call.
    at: usize,
    loan: &'a Loan,
    holding: Holding,
    place: Reservation,
}

impl Shared {
    /// Reads pieces of a peer's pool. Returns whether each arrived whole. A transfer that breaks off goes on from where it was, while
    /// the peer is up and there is time. Nothing touches the local ranges any more when this returns.
    pub(super) fn read(&self, link: &Link, pieces: &[Piece], class: Class, until: Instant) -> Vec<bool> {
        let mut missing: Vec<Vec<Range<u64>>> =
            pieces.iter().map(|piece| std::iter::once(0..piece.to.len()).collect()).collect();
        loop {
            let open: Vec<usize> = (0..pieces.len()).filter(|&i| !missing[i].is_empty()).collect();
            if open.is_empty() {
                break;
            }
            if let Ok(segment) = link.segment() {
                let retryable = self.read_once(&segment, pieces, &mut missing, &open, class, until);
                if !retryable {
                    break;
                }
            }
            if missing.iter().all(Vec::is_empty) {
                break;
            }
            link.forget_segment();
            if !link.is_up() || self.is_stopping() || Instant::now() + AGAIN >= until {
                break;
            }
            self.pause(AGAIN);
        }
        missing.iter().map(Vec::is_empty).collect()
    }

    /// One transfer of what is missing. Returns false if trying again makes no sense.
    fn read_once(
        &self,
        segment: &Arc<Segment>,
        pieces: &[Piece],
        missing: &mut [Vec<Range<u64>>],
        open: &[usize],
        class: Class,
        until: Instant,
    ) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let entries = open.iter().filter_map(|&i| entry(segment, &pieces[i], &missing[i])).collect();
        let batch = Batch { entries, deadline: Some(left), ..Batch::new(class) };
        let Ok(transfer) = self.ways.engine.submit(batch) else { return false };
        wait(&transfer);
        let mut retryable = true;
        for (n, &i) in open.iter().enumerate() {
            let Some(status) = transfer.poll_entry(n) else { return false };
            let before = len(&missing[i]);
            missing[i] = subtract(&missing[i], &status);
            if !missing[i].is_empty() {
                add(&self.counts.resumed_bytes, before - len(&missing[i]));
                retryable &= status.error.as_ref().is_none_or(may_go_on);
            }
        }
        retryable
    }

    /// Asks a peer to lend blocks. `None` means that it did not answer.
    pub(super) fn borrow(&self, link: &Link, keys: &[BlockKey], patience: Duration) -> Option<Borrowed> {
        let (run, release) = link.done.lock().take();
        let request = Request::Lend { keys: keys.to_vec(), release };
        match link.call(&request, patience) {
            Ok(Reply::Lent { loans, lease_ms }) if loans.len() == keys.len() => {
                let asked =
                    |(loan, key): (Option<Loan>, &BlockKey)| loan.filter(|loan| loan.meta.key == *key);
                let loans = loans.into_iter().zip(keys).map(asked).collect();
                Some(Borrowed { loans, lease_ms, run })
            }
            _ => None,
        }
    }

    /// Loans that are no longer needed; the peer is told with the next call.
    pub(super) fn give_back<'a>(&self, link: &Link, run: u64, loans: impl IntoIterator<Item = &'a Loan>) {
        link.done.lock().add(run, loans.into_iter().map(|loan| loan.lease));
    }

    /// Takes copies in: reads each from the peer's pool straight into this one, and makes it visible when its bytes
    /// have the checksum that they should.
    pub(super) fn take_in(&self, link: &Link, items: &[(Loan, Holding)], lease_ms: u64) -> Vec<Copied> {
        let outcomes = self.take_in_now(link, items, lease_ms);
        self.copies.changed();
        outcomes
    }

    fn take_in_now(&self, link: &Link, items: &[(Loan, Holding)], lease_ms: u64) -> Vec<Copied> {
        // The place of a copy must outlive its transfer.
        let places = self.store.config().reservation_ttl / 2;
        let until = Instant::now() + Duration::from_millis(lease_ms).min(places);
        let mut outcomes = vec![Copied::Failed; items.len()];
        let wanted: Vec<usize> = (0..items.len()).filter(|&i| self.is_wanted(&items[i])).collect();
        for i in (0..items.len()).filter(|i| !wanted.contains(i)) {
            outcomes[i] = Copied::Enough;
        }
        let metas: Vec<BlockMeta> = wanted.iter().map(|&i| items[i].0.meta).collect();
        let placed = link.reserve(&self.store, &metas, self.clock.now_ms());
        let mut arriving = Vec::new();
        for (&at, placed) in wanted.iter().zip(placed) {
            let (loan, holding) = &items[at];
            match placed {
                Reserve::Reserved(place) => {
                    if planted::is(Bug::ReportsCopyBeforeItsBytes) {
                        self.hold(&mut self.table(), link, loan.meta.key, *holding, Copied::Done);
                    }
                    arriving.push(Placed { at, loan, holding: *holding, place });
                }
                Reserve::AlreadyStored => outcomes[at] = self.has(link, loan, *holding),
                Reserve::InProgress => {}
                Reserve::Refused(_) => outcomes[at] = Copied::NoRoom,
            }
        }
        let to = |place: &Reservation| self.ways.pool.range(place.offset, place.size.into());
        let pieces: Vec<Piece> = arriving
            .iter()
            .filter_map(|a| Some(Piece { offset: a.loan.offset, to: to(&a.place)? }))
            .collect();
        let arrived = self.read(link, &pieces, Class::Replication, until);
        for (copy, arrived) in arriving.iter().zip(arrived) {
            outcomes[copy.at] = self.settle(link, copy, arrived);
        }
        outcomes
    }

    /// Returns false if the block was removed since it was put, or if enough others hold it as far as is known here: the host that
    /// asks sees less.
    fn is_wanted(&self, (loan, holding): &(Loan, Holding)) -> bool {
        self.heard(holding.generation);
        let table = self.table();
        let holders = table.holders(loan.meta.key);
        let enough = !holders.has(0) && holders.len() >= usize::from(holding.target);
        !enough && !table.is_outdated(loan.meta.key, holding.generation)
    }

    /// Makes a block that is here already a copy, in the version that is here.
    fn has(&self, link: &Link, loan: &Loan, holding: Holding) -> Copied {
        let stat = self.store.stat(&[loan.meta.key]).unwrap_or_default().pop().flatten();
        let counts =
            |stat: &BlockStat| stat.checksum == loan.checksum || !planted::is(Bug::CountsOneVersionAlone);
        match stat.filter(counts) {
            Some(stat) => {
                let holding = Holding { size: stat.size, ..holding };
                self.hold(&mut self.table(), link, loan.meta.key, holding, Copied::Had)
            }
            None => Copied::Failed,
        }
    }

    /// Makes an arrived copy visible, or gives its place back.
    fn settle(&self, link: &Link, copy: &Placed<'_>, arrived: bool) -> Copied {
        let Placed { loan, place, .. } = copy;
        let mapping = self.store.pool().mapping();
        let intact = || {
            mapping.bytes(place.offset, place.size.into()).map(|bytes| bytes.checksum())
                == Some(loan.checksum)
        };
        if !arrived || !intact() {
            add(&self.counts.corrupt, arrived.into());
            let _ = self.store.abort(link.writer, &[place.id]);
            return Copied::Failed;
        }
        // Under the lock, so that a removal either finds the block or keeps it from becoming visible.
        let mut table = self.table();
        let outdated = table.is_outdated(loan.meta.key, copy.holding.generation)
            && !planted::is(Bug::KeepsCopyOfRemoved);
        let commit = || {
            let commit =
                self.store.commit(link.writer, &[(place.id, Some(loan.checksum))], self.clock.now_ms());
            commit.is_ok_and(|done| done.iter().all(Result::is_ok))
        };
        if outdated || !commit() {
            drop(table);
            let _ = self.store.abort(link.writer, &[place.id]);
            return if outdated { Copied::Enough } else { Copied::Failed };
        }
        add(&self.counts.taken, 1);
        add(&self.counts.taken_bytes, loan.meta.size.into());
        self.hold(&mut table, link, loan.meta.key, copy.holding, Copied::Done)
    }

    /// Makes a block that is here a copy; it was lent by the peer of `link`.
    fn hold(
        &self,
        table: &mut Table,
        link: &Link,
        key: BlockKey,
        holding: Holding,
        outcome: Copied,
    ) -> Copied {
        match table.holds(0, key, holding) {
            Heard::New | Heard::Known => {
                if !table.holders(key).has(link.place) {
                    self.todo.expect_news(key, link.place);
                }
                outcome
            }
            // The block is there, so nobody would miss this copy.
            Heard::Full => Copied::NoRoom,
            Heard::Outdated | Heard::Removal(_) => Copied::Enough,
        }
    }
}

fn entry(segment: &Arc<Segment>, piece: &Piece, missing: &[Range<u64>]) -> Option<Entry> {
    let local: Option<Vec<LocalRange>> =
        missing.iter().map(|range| piece.to.part(range.start, range.end - range.start)).collect();
    let remote = |range: &Range<u64>| RemoteRange {
        region: 0,
        offset: piece.offset.saturating_add(range.start),
        len: range.end - range.start,
    };
    let remote = missing.iter().map(remote).collect();
    Some(Entry { direction: Direction::Read, segment: Arc::clone(segment), local: local?, remote })
}

/// Waits to the very end: until then the engine may still write to memory that is ours.
fn wait(transfer: &Transfer) {
    while !transfer.wait(Instant::now() + Duration::from_secs(1)).is_complete() {}
}

/// Whether what broke off may go on over a new connection, with a new grant.
fn may_go_on(error: &TransferError) -> bool {
    match error {
        TransferError::PeerDown { .. } => true,
        TransferError::TimedOut | TransferError::Cancelled => false,
        TransferError::Op { error, .. } => {
            let grant = matches!(
                error,
                OpError::Denied(Denied::UnknownKey | Denied::StaleEpoch | Denied::LeaseEnded)
            );
            grant || error.retryable() || error.endpoint_at_fault()
        }
    }
}

fn len(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// What is still missing. `status` counts in bytes of the entry, which is `missing` end to end.
fn subtract(missing: &[Range<u64>], status: &EntryStatus) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut base = 0;
    for range in missing {
        let end = base + (range.end - range.start);
        let mut at = base;
        for valid in status.valid.iter().filter(|valid| valid.start < end && valid.end > base) {
            let (from, to) = (valid.start.max(base), valid.end.min(end));
            if at < from {
                left.push(range.start + (at - base)..range.start + (from - base));
            }
            at = to;
        }
        if at < end {
            left.push(range.start + (at - base)..range.end);
        }
        base = end;
    }
    left
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Byte by byte: what was missing and did not arrive now is missing still.
        #[test]
        fn what_arrived_is_not_asked_for_again(missing in prop::collection::vec(any::<bool>(), 1..60), valid in prop::collection::vec(any::<bool>(), 60)) {
            let ranges = |bits: &[bool]| -> Vec<Range<u64>> {
                let mut ranges: Vec<Range<u64>> = Vec::new();
                for (at, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
                    let at = at as u64;
                    match ranges.last_mut() {
                        Some(last) if last.end == at => last.end += 1,
                        _ => ranges.push(at..at + 1),
                    }
                }
                ranges
            };
            let count = missing.iter().filter(|bit| **bit).count();
            let status = EntryStatus { valid: ranges(&valid[..count]), ..EntryStatus::default() };
            let mut number = 0;
            let expected: Vec<bool> = missing.iter().map(|&bit| {
                number += usize::from(bit);
                bit && !valid[number - 1]
            }).collect();
            let mut bits = vec![false; missing.len()];
            for range in subtract(&ranges(&missing), &status) {
                range.for_each(|at| bits[at as usize] = true);
            }
            prop_assert_eq!(bits, expected);
        }
    }
}
