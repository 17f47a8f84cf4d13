//! Hand-over of a request's blocks to a peer that is about to need them, by [`HandOver`].
//!
//! ```text
//! here  -> peer   prepare: which blocks, and how large     peer: places in its pool, exported for writing under a
//! here  -> peer   writes, block by block, each announced         name of their own
//! here  -> peer   finish                                   peer: takes the segment back, compares checksums, commits
//! ```
//!
//! The peer takes the segment back before it gives any place to anyone else, even if this host is never heard again.

use std::time::{Duration, Instant};

use super::link::Link;
use super::message::{Copied, Loan, Prepared, Reply, Request};
use super::upkeep::ANSWER;
use super::{Cluster, Shared};
use kvasir_memory::region::Region;
use kvasir_net::transfer::Entry;
use kvasir_net::transfer::handover::{HandOver, LAYERS_MAX, decode};
use kvasir_net::transport::node::{Notice, random_u64};
use kvasir_net::transport::{Access, Direction};
use kvasir_protocol::block::BlockKey;
use kvasir_store::dram::{Reservation, Reserve};

/// The most blocks of one hand-over.
pub const PUSH_MAX: usize = LAYERS_MAX as usize;
/// The most hand-overs that a host takes at once.
const TAKEN_MAX: usize = 64;

/// Why blocks could not be handed over at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    #[error("no peer is called {name}; there are: {known}")]
    NoPeer { name: String, known: String },
    #[error("{count} blocks in one hand-over; the most is {PUSH_MAX}, send several")]
    TooMany { count: usize },
    #[error("peer {peer} did not take the blocks: {reason}; try again")]
    Failed { peer: String, reason: String },
}

/// The outcome of a block that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pushed {
    /// In the peer's pool, compared with its checksum.
    Done,
    /// It was there already.
    Had,
    /// Not stored here.
    Missing,
    NoRoom,
    Failed,
}

/// A hand-over being taken in.
pub(super) struct Taking {
    /// Place of the peer in the table: nobody else ends it.
    from: usize,
    segment: String,
    places: Vec<(Loan, Reservation)>,
    pub(super) until: Instant,
}

impl Cluster {
    /// Writes blocks of this host into a peer's pool, in order, each announced as it is complete. Returns when the peer
    /// has compared all of them with their checksums.
    ///
    /// # Errors
    /// The peer is not known, is down, or does not answer; some blocks may have arrived.
    pub fn push(&self, peer: &str, keys: &[BlockKey]) -> Result<Vec<Pushed>, PushError> {
        let shared = &self.shared;
        let link = shared.links.iter().find(|link| link.config.name == peer);
        let link = link.ok_or_else(|| {
            let known: Vec<&str> = shared.links.iter().map(|link| link.config.name.as_str()).collect();
            PushError::NoPeer { name: peer.to_owned(), known: known.join(", ") }
        })?;
        if keys.len() > PUSH_MAX {
            return Err(PushError::TooMany { count: keys.len() });
        }
        let loans = shared.lend(shared.owner, keys);
        let lent: Vec<Loan> = loans.iter().flatten().copied().collect();
        let outcomes = if lent.is_empty() { Ok(Vec::new()) } else { shared.hand_over(link, &lent) };
        let leases: Vec<u64> = lent.iter().map(|loan| loan.lease).collect();
        let _ = shared.store.release(shared.owner, &leases);
        let mut outcomes =
            outcomes.map_err(|reason| PushError::Failed { peer: peer.to_owned(), reason })?.into_iter();
        let outcome = |loan: &Option<Loan>| match loan.and_then(|_| outcomes.next()) {
            None => Pushed::Missing,
            Some(Copied::Done) => Pushed::Done,
            Some(Copied::Had) => Pushed::Had,
            Some(Copied::NoRoom) => Pushed::NoRoom,
            Some(Copied::Failed | Copied::Enough) => Pushed::Failed,
        };
        Ok(loans.iter().map(outcome).collect())
    }
}

impl Shared {
    fn hand_over(&self, link: &Link, lent: &[Loan]) -> Result<Vec<Copied>, String> {
        let until = Instant::now() + Duration::from_millis(self.lease_ms());
        let request = random_u64();
        let prepare = Request::Prepare { request, blocks: lent.to_vec() };
        let (segment, places) = match link.call(self, &prepare, ANSWER).map_err(|error| error.to_string())? {
            Reply::Prepared { segment, places } if places.len() == lent.len() => (segment, places),
            _ => return Err("it answered something that was not asked".to_owned()),
        };
        let sent = self.write_all(link, request, &segment, lent, &places, until);
        let finish = Request::Finish { request };
        let finished = match link.call(self, &finish, ANSWER).map_err(|error| error.to_string())? {
            Reply::Copied { outcomes } => outcomes,
            _ => return Err("it answered something that was not asked".to_owned()),
        };
        sent?;
        let mut finished = finished.into_iter();
        let outcome = |place: &Prepared| match place {
            Prepared::At => finished.next().unwrap_or(Copied::Failed),
            Prepared::Not(outcome) => *outcome,
        };
        Ok(places.iter().map(outcome).collect())
    }

    /// Writes each block into the place that the peer made for it. Returns when all have arrived or failed.
    fn write_all(
        &self,
        link: &Link,
        request: u64,
        segment: &str,
        lent: &[Loan],
        places: &[Prepared],
        until: Instant,
    ) -> Result<(), String> {
        let placed: Vec<&Loan> = lent
            .iter()
            .zip(places)
            .filter(|(_, place)| **place == Prepared::At)
            .map(|(loan, _)| loan)
            .collect();
        if placed.is_empty() {
            return Ok(());
        }
        let open = link.segment(self).and_then(|pool| pool.peer().open_segment(segment));
        let segment = open.map_err(|error| error.to_string())?;
        let grant = segment.description().ok_or("its places are gone")?;
        let mut handing = HandOver::new(&self.engine, request, placed.len() as u32);
        for (n, loan) in placed.iter().enumerate() {
            let local = self.pool.range(loan.offset, loan.size.into()).into_iter().collect();
            let remote = vec![kvasir_net::transport::RemoteRange {
                region: n as u32,
                ..grant.range(0, loan.size.into())
            }];
            let entry = Entry {
                direction: Direction::Write,
                segment: std::sync::Arc::clone(&segment),
                local,
                remote,
            };
            handing.push(vec![entry]).map_err(|error| error.to_string())?;
        }
        match handing.wait(until) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("not done before the blocks' leases ended".to_owned()),
        }
    }

    /// Makes places for blocks that a peer is about to write.
    pub(super) fn prepare(&self, from: &Link, request: u64, blocks: &[Loan]) -> Reply {
        self.end_overdue();
        if !(1..=PUSH_MAX).contains(&blocks.len()) {
            let reason = format!("a hand-over has 1 to {PUSH_MAX} blocks, not {}", blocks.len());
            return Reply::Refused { reason };
        }
        // The places must outlive the right to write to them.
        let lease = self.store.config().reservation_ttl / 2;
        let segment = format!("kvasir.push.{request:016x}");
        // Taken before anything is reserved. Another one under the same number would displace this one, and with it the
        // knowledge of what is to be revoked.
        if let Err(reason) = self.begin_taking(from, request, &segment, Instant::now() + lease) {
            return Reply::Refused { reason };
        }
        let metas: Vec<_> = blocks.iter().map(Loan::meta).collect();
        let reserved = self.store.reserve(self.owner, &metas, self.clock.now_ms()).unwrap_or_default();
        let mut places = Vec::new();
        let prepared = blocks.iter().zip(reserved).map(|(loan, reserved)| match reserved {
            Reserve::Reserved(place) => {
                places.push((*loan, place));
                Prepared::At
            }
            Reserve::AlreadyStored => Prepared::Not(Copied::Had),
            Reserve::InProgress => Prepared::Not(Copied::Failed),
            Reserve::Refused(_) => Prepared::Not(Copied::NoRoom),
        });
        let prepared: Vec<Prepared> = prepared.collect();
        let region =
            |place: &Reservation| self.pool.range(place.offset, place.size.into()).map(Region::of_range);
        let regions: Vec<Region> = places.iter().filter_map(|(_, place)| region(place)).collect();
        let peer = Some(from.config.name.as_str());
        if !regions.is_empty()
            && let Err(denied) = self.node.exports.export_for(peer, &segment, regions, Access::Write, lease)
        {
            self.give_up(&places);
            self.taking.lock().remove(&request);
            return Reply::Refused { reason: denied.to_string() };
        }
        match self.taking.lock().get_mut(&request) {
            Some(taking) => taking.places = places,
            // Its time was over before it began.
            None => {
                self.take_back(&segment);
                self.give_up(&places);
                return Reply::Refused { reason: "it took too long to make places; try again".to_owned() };
            }
        }
        Reply::Prepared { segment, places: prepared }
    }

    /// Notes a hand-over that has no places yet, or why it is not taken.
    fn begin_taking(&self, from: &Link, request: u64, segment: &str, until: Instant) -> Result<(), String> {
        let mut all = self.taking.lock();
        if all.len() >= TAKEN_MAX {
            return Err(format!("it takes {TAKEN_MAX} hand-overs at once; try again"));
        }
        if all.contains_key(&request) {
            return Err(format!(
                "hand-over {request:016x} is under way already; begin another under a new number"
            ));
        }
        let (from, segment) = (from.place, segment.to_owned());
        all.insert(request, Taking { from, segment, places: Vec::new(), until });
        Ok(())
    }

    /// Takes the places back and keeps the blocks that arrived intact.
    pub(super) fn finish(&self, from: &Link, request: u64) -> Vec<Copied> {
        let taking = {
            let mut all = self.taking.lock();
            let own = all.get(&request).is_some_and(|taking| taking.from == from.place);
            own.then(|| all.remove(&request)).flatten()
        };
        let Some(taking) = taking else { return Vec::new() };
        self.end(request, &taking);
        taking.places.iter().map(|(loan, place)| self.keep(loan, place)).collect()
    }

    fn keep(&self, loan: &Loan, place: &Reservation) -> Copied {
        let bytes = self.store.pool().mapping().bytes(place.offset, place.size.into());
        if bytes.map(|bytes| bytes.checksum()) != Some(loan.checksum) {
            let _ = self.store.abort(self.owner, &[place.id]);
            return Copied::Failed;
        }
        let commit = self.store.commit(self.owner, &[(place.id, Some(loan.checksum))], self.clock.now_ms());
        if commit.is_ok_and(|done| done.iter().all(Result::is_ok)) {
            return Copied::Done;
        }
        // No time does it.
        let _ = self.store.abort(self.owner, &[place.id]);
        Copied::Failed
    }

    /// Notes what a peer says to have written. Of anything but a hand-over of its own that is under way nothing is kept.
    pub(super) fn note_push(&self, notice: &Notice) -> bool {
        let Some((request, ..)) = decode(&notice.message) else { return false };
        let taking = self.taking.lock();
        let from =
            taking.get(&request).and_then(|taking| self.links.iter().find(|link| link.place == taking.from));
        from.is_some_and(|link| link.config.name == notice.peer) && self.arrivals.note(notice)
    }

    /// Takes back the places of hand-overs that their senders did not finish in time.
    pub(super) fn end_overdue(&self) {
        let now = Instant::now();
        let overdue: Vec<(u64, Taking)> =
            self.taking.lock().extract_if(|_, taking| taking.until <= now).collect();
        for (request, taking) in overdue {
            self.end(request, &taking);
            self.give_up(&taking.places);
        }
    }

    /// From here on nobody writes there any more.
    fn end(&self, request: u64, taking: &Taking) {
        self.take_back(&taking.segment);
        self.arrivals.forget(request);
    }

    fn give_up(&self, places: &[(Loan, Reservation)]) {
        let ids: Vec<u64> = places.iter().map(|(_, place)| place.id).collect();
        let _ = self.store.abort(self.owner, &ids);
    }

    /// The thread that takes in what peers announce.
    pub(super) fn hear_notices(&self) {
        /// How long a stopping host may have to wait for it.
        const STEP: Duration = Duration::from_millis(200);
        while !self.is_stopping() {
            if let Some(notice) = self.node.notices.wait(Instant::now() + STEP) {
                let _ = self.note_layer(&notice) || self.note_push(&notice);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::pair_of_hosts;
    use kvasir_protocol::block::BlockMeta;

    fn announced(key: u128) -> Loan {
        let BlockMeta { key, parent, depth, class, tenant, ttl_ms, size } =
            BlockMeta::single(BlockKey(key), 4096);
        Loan { key, parent, depth, class, tenant, ttl_ms, size, checksum: 7, offset: 0, lease: 0 }
    }

    #[test]
    fn a_number_is_taken_once_and_its_places_stay_until_nobody_writes_there() {
        let (_, to) = pair_of_hosts();
        let (shared, link) = (&to.cluster.shared, &to.cluster.shared.links[0]);
        let free = to.store.pressure().free_bytes;
        assert!(matches!(shared.prepare(link, 1, &[announced(1)]), Reply::Prepared { .. }));
        for blocks in [&[announced(2)][..], &[]] {
            assert!(matches!(shared.prepare(link, 1, blocks), Reply::Refused { .. }));
        }
        assert!(matches!(shared.prepare(link, 2, &[]), Reply::Refused { .. }), "nothing to write");
        // However late it is, the place goes to nobody while the peer may write there.
        to.store.sweep(u64::MAX);
        assert_eq!((to.store.metrics().reservations, to.store.pressure().free_bytes), (1, free - 4096));

        // It is ended by its own peer alone.
        let stranger = Link::new(9, link.config.clone(), to.store.new_owner());
        assert!(shared.finish(&stranger, 1).is_empty());
        assert_eq!(shared.finish(link, 1), [Copied::Failed], "nothing was written");
        assert_eq!(to.store.pressure().free_bytes, free);
    }
}
