//! Batches in, slices out: each thread that submits or completes work hands out what rails and budgets have room for.
//!
//! Lock order: a peer's state, then a transfer's progress. Transports are called with neither held.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::complete::{Inner, Transfer, TransferError};
use super::entry::{Batch, BatchTooLarge, ENTRIES_MAX, Entry, Piece, op_of, peers_of, push_entry};
use super::peer::Peer;
use super::plan::{CLASSES, Class, Idle, Issued, PlanConfig, Slice, Work};
use super::watch::Deadlines;
use crate::transport::{Completion, Endpoint, Error, OpError, Sink, Transport};
use kvasir_memory::region::Region;
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub plan: PlanConfig,
    /// Bytes of each class in flight at once, over all peers; at least [`PlanConfig::slice_min`]. Default 1 GiB,
    /// 512 MiB and 256 MiB.
    pub budgets: [u64; CLASSES],
    /// How often parts of one entry may be sent again. Default 64.
    pub retries_max: u32,
    /// How long a batch may take unless it says otherwise. Default 30 s.
    pub deadline: Duration,
    /// What a transport cannot take back may go on for this long after the deadline; then its rail is cut, and mended.
    /// Default 100 ms.
    pub grace: Duration,
    /// How often broken rails and ending grants are looked for, besides at once when a rail breaks. Default 100 ms.
    pub mend_interval: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            plan: PlanConfig::default(),
            budgets: [1 << 30, 512 << 20, 256 << 20],
            retries_max: 64,
            deadline: Duration::from_secs(30),
            grace: Duration::from_millis(100),
            mend_interval: Duration::from_millis(100),
        }
    }
}

/// A slice on its way.
type Flying = (Slice<Piece>, Issued);

/// The clock that decisions are made by: the system's, or a simulation's.
pub(super) type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// The engine of one node. Dropping it leaves transfers in flight to their transports.
pub struct Engine(Arc<Shared>);

pub(super) struct Shared {
    pub(super) config: EngineConfig,
    transports: Vec<Arc<dyn Transport>>,
    clock: Clock,
    start: Instant,
    in_flight: [AtomicU64; CLASSES],
    retried: AtomicU64,
    transfers: AtomicU64,
    pub(super) peers: Mutex<Vec<Weak<Peer>>>,
    pub(super) deadlines: Mutex<Deadlines>,
    pub(super) deadlines_changed: Condvar,
    pub(super) mend_wanted: Mutex<bool>,
    pub(super) mend: Condvar,
    pub(super) ended: AtomicBool,
}

impl Engine {
    pub fn new(config: EngineConfig, transports: Vec<Arc<dyn Transport>>) -> std::io::Result<Self> {
        let engine = Self::without_threads(config, transports, Arc::new(Instant::now));
        let (watching, mending) = (engine.0.clone(), engine.0.clone());
        thread::Builder::new().name("kvasir-xfer-watch".into()).spawn(move || watching.watch())?;
        thread::Builder::new().name("kvasir-xfer-mend".into()).spawn(move || mending.mend_all())?;
        Ok(engine)
    }

    /// An engine that acts only when called, by the given clock: without [`tick`](Self::tick) nothing watches deadlines
    /// or mends rails.
    pub(super) fn without_threads(
        config: EngineConfig,
        transports: Vec<Arc<dyn Transport>>,
        clock: Clock,
    ) -> Self {
        Self(Arc::new(Shared {
            config,
            transports,
            start: clock(),
            clock,
            in_flight: Default::default(),
            retried: AtomicU64::new(0),
            transfers: AtomicU64::new(0),
            peers: Mutex::default(),
            deadlines: Mutex::default(),
            deadlines_changed: Condvar::new(),
            mend_wanted: Mutex::default(),
            mend: Condvar::new(),
            ended: AtomicBool::new(false),
        }))
    }

    /// One round of what the watching threads do.
    #[cfg(test)]
    pub(super) fn tick(&self) {
        self.0.end_overdue();
        self.0.mend_peers();
    }

    /// Transfers whose deadline is still watched.
    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.0.watched()
    }

    /// Makes memory usable over every transport that reaches it. Fails only if none does.
    pub fn register(&self, region: &Region) -> Result<(), Error> {
        let reach = |transport: &&Arc<dyn Transport>| transport.capabilities().reaches(region.location());
        let mut result = Err(Error::Register {
            transport: "the engine",
            region: format!("{region:?}"),
            reason: format!("no transport reaches {}", region.location()),
        });
        for transport in self.0.transports.iter().filter(reach) {
            let registered = transport.register(region);
            if result.is_err() {
                result = registered;
            }
        }
        result
    }

    pub fn unregister(&self, region: &Region) {
        self.0.transports.iter().for_each(|transport| transport.unregister(region));
    }

    /// Connects to a peer: pairs of a transport (by its index in those given to [`new`](Self::new)) and the peer's
    /// address on it. Several addresses on one transport are several rails.
    pub fn connect(&self, addresses: &[(usize, String)]) -> Result<Arc<Peer>, Error> {
        let peer = Peer::connect(self.rails(addresses), &self.0.config.plan, &self.0.clock)?;
        self.0.know(&peer);
        Ok(peer)
    }

    /// Like [`connect`](Self::connect), to the peer of this name and no other. It uses the first address that answers;
    /// the others are connected in the background, so that an address that does not answer holds up nothing.
    pub fn connect_to(&self, name: &str, addresses: &[(usize, String)]) -> Result<Arc<Peer>, Error> {
        let peer = Peer::connect_to(name, self.rails(addresses), &self.0.config.plan, &self.0.clock)?;
        self.0.know(&peer);
        self.0.want_mending();
        Ok(peer)
    }

    fn rails(&self, addresses: &[(usize, String)]) -> Vec<(Arc<dyn Transport>, String)> {
        let rail = |(index, address): &(usize, String)| {
            let transport = self.0.transports.get(*index).cloned();
            transport.map(|transport| (transport, address.clone()))
        };
        addresses.iter().filter_map(rail).collect()
    }

    /// Starts a batch. Entries that cannot be moved fail at once; see [`Transfer::poll_entry`].
    pub fn submit(&self, batch: Batch) -> Result<Transfer, BatchTooLarge> {
        let Batch { class, mut entries, deadline, notice } = batch;
        if entries.len() > ENTRIES_MAX {
            return Err(BatchTooLarge(entries.len()));
        }
        entries.iter_mut().for_each(Entry::coalesce);
        let deadline = self.0.now() + deadline.unwrap_or(self.0.config.deadline);
        let id = self.0.transfers.fetch_add(1, Ordering::Relaxed);
        let inner = Arc::new(Inner::new(id, class, entries, deadline, notice));
        self.0.enqueue(&inner);
        let peers = peers_of(&inner);
        peers.iter().for_each(|peer| self.0.pump(peer));
        if inner.outcome().is_some() {
            self.0.finish(&inner)
        } else {
            self.0.watch_deadline(&inner, deadline)
        }
        Ok(Transfer(inner))
    }

    /// Asks a transfer to end early. Parts that already move may still arrive; it is complete when they have ended.
    pub fn cancel(&self, transfer: &Transfer) {
        self.0.stop(&transfer.0);
    }

    /// Bytes in flight per class.
    pub fn in_flight_bytes(&self) -> [u64; CLASSES] {
        std::array::from_fn(|class| self.0.in_flight[class].load(Ordering::Acquire))
    }

    /// Parts of entries that were sent again, since the start.
    pub fn retried(&self) -> u64 {
        self.0.retried.load(Ordering::Relaxed)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
        // Each lock is taken once, so that no thread is between checking the flag and going to sleep.
        drop(self.0.deadlines.lock());
        self.0.deadlines_changed.notify_all();
        drop(self.0.mend_wanted.lock());
        self.0.mend.notify_all();
    }
}

impl Shared {
    fn know(&self, peer: &Arc<Peer>) {
        let mut peers = self.peers.lock();
        peers.retain(|peer| peer.strong_count() > 0);
        peers.push(Arc::downgrade(peer));
    }

    fn enqueue(&self, inner: &Arc<Inner>) {
        let ranges_max = self.config.plan.ranges_max.max(2) as usize;
        // Entries of one batch, peer by peer, so that a peer's lock is taken once for its run of entries.
        let mut at = 0;
        while let Some(first) = inner.entries.get(at) {
            let peer = first.segment.peer().clone();
            let mut orders = peer.orders();
            let mut state = peer.state();
            while let Some(entry) =
                inner.entries.get(at).filter(|entry| Arc::ptr_eq(entry.segment.peer(), &peer))
            {
                let piece = Piece { transfer: inner.clone(), entry: at as u32 };
                match entry.check() {
                    Ok(()) => push_entry(&mut state.schedule, entry, &piece, ranges_max, orders.of(entry)),
                    Err(error) => inner.refused(at as u32, error),
                }
                at += 1;
            }
        }
    }

    /// Hands out what there is room for. When several threads ask at once, one does it for all.
    pub(super) fn pump(self: &Arc<Self>, peer: &Arc<Peer>) {
        if peer.pumps.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        loop {
            let asked = peer.pumps.load(Ordering::Acquire);
            self.dispatch(peer);
            if peer.pumps.fetch_sub(asked, Ordering::AcqRel) == asked {
                return;
            }
        }
    }

    fn dispatch(self: &Arc<Self>, peer: &Arc<Peer>) {
        let (shares, stranded) = self.plan(peer);
        for work in stranded {
            let Piece { transfer, entry } = work.token;
            transfer.gave_up(entry, work.len, TransferError::PeerDown { peer: peer.name().to_owned() });
            self.finish(&transfer);
        }
        for (rail, share) in shares.into_iter().enumerate().filter(|(_, share)| !share.is_empty()) {
            self.issue(peer, rail, share);
        }
    }

    /// Plans all there is room for: slices per rail, and what cannot go because no rail works.
    fn plan(&self, peer: &Peer) -> (Vec<Vec<Flying>>, Vec<Work<Piece>>) {
        let mut state = peer.state();
        let state = &mut *state;
        let mut shares: Vec<Vec<_>> = state.rails.iter().map(|_| Vec::new()).collect();
        loop {
            let now = self.now_ns();
            match state.schedule.next(&state.rails, &self.config.plan, self.room(), now) {
                Ok(slice) => {
                    let issued = state.rails[slice.rail].issue(slice.class, slice.len, now);
                    self.in_flight[slice.class as usize].fetch_add(slice.len, Ordering::AcqRel);
                    shares[slice.rail].push((slice, issued));
                }
                Err(Idle::NoRail) => return (shares, state.schedule.extract(|_| true)),
                Err(Idle::Empty | Idle::Full) => return (shares, Vec::new()),
            }
        }
    }

    fn room(&self) -> [u64; CLASSES] {
        std::array::from_fn(|class| {
            let budget = self.config.budgets[class].max(self.config.plan.slice_min);
            budget.saturating_sub(self.in_flight[class].load(Ordering::Acquire))
        })
    }

    fn issue(self: &Arc<Self>, peer: &Arc<Peer>, rail: usize, share: Vec<Flying>) {
        let endpoint = peer.links[rail].endpoint();
        let mut ops = Vec::with_capacity(share.len());
        let mut refused = Vec::new();
        for (n, (slice, _)) in share.iter().enumerate() {
            let reason = || "the rail is broken".to_owned();
            let down = || OpError::PeerDown { peer: peer.name().to_owned(), reason: reason() };
            match endpoint.as_ref().ok_or_else(down).and_then(|_| op_of(n as u64, slice, rail)) {
                Ok(op) => ops.push(op),
                Err(error) => refused.push(Completion::failed(n as u64, 0, error)),
            }
            if let Some(endpoint) = &endpoint {
                slice.pieces[0].token.transfer.departed(endpoint);
            }
        }
        let slices = Mutex::new(share.into_iter().map(Some).collect());
        let (shared, peer) = (self.clone(), peer.clone());
        let issue = Arc::new(Issue { shared, peer, rail, endpoint: endpoint.clone(), slices });
        refused.into_iter().for_each(|completion| issue.complete(completion));
        if let Some(endpoint) = endpoint.filter(|_| !ops.is_empty()) {
            endpoint.submit(ops, &(issue as Arc<dyn Sink>));
        }
    }

    /// Sorts out what a slice's end means for its pieces.
    fn completed(self: &Arc<Self>, issue: &Issue, slice: Slice<Piece>, completion: Completion) {
        let (peer, rail) = (&issue.peer, issue.rail);
        let mut valid = completion.valid_bytes;
        let error = completion.result.err();
        match &error {
            None => peer.links[rail].worked(),
            Some(OpError::PeerDown { .. }) => {
                peer.broke(rail, issue.endpoint.as_ref(), self.now());
                self.want_mending();
            }
            Some(_) => {}
        }
        for piece in slice.pieces {
            let here = valid.min(piece.len);
            valid -= here;
            let Piece { transfer, entry } = &piece.token;
            transfer.arrived(*entry, piece.offset..piece.offset + here);
            if let Some(error) = error.as_ref().filter(|_| here < piece.len) {
                let rest = Work { offset: piece.offset + here, len: piece.len - here, ..piece.clone() };
                self.again_or_never(peer, rail, slice.class, rest, error);
            }
            self.finish(transfer);
        }
    }

    fn again_or_never(&self, peer: &Peer, rail: usize, class: Class, work: Work<Piece>, error: &OpError) {
        let Piece { transfer, entry } = work.token.clone();
        if *error == OpError::Cancelled || transfer.cancel.is_set() {
            return transfer.gave_up(entry, work.len, transfer.why_cancelled());
        }
        let attempts = transfer.count_attempt(entry);
        let again = (error.retryable() || error.endpoint_at_fault()) && attempts <= self.config.retries_max;
        if !again || self.now() >= transfer.deadline {
            let rail = peer.links[rail].describe();
            let error = TransferError::Op { error: error.clone(), rail, attempts: attempts - 1 };
            return transfer.gave_up(entry, work.len, error);
        }
        self.retried.fetch_add(1, Ordering::Relaxed);
        let avoid = work.avoid
            | if error.endpoint_at_fault() { 1u64.checked_shl(rail as u32).unwrap_or(0) } else { 0 };
        peer.state().schedule.push_front(class, Work { avoid, ..work });
    }

    /// Once nothing of the transfer is pending, tells the peers and then everyone who waits, exactly once.
    fn finish(&self, inner: &Arc<Inner>) {
        let Some(all_valid) = inner.outcome() else { return };
        if !inner.claim_announcement() {
            return;
        }
        if let Some(notice) = inner.notice.as_ref().filter(|_| all_valid) {
            for peer in peers_of(inner) {
                // Over the first rail that takes it; a peer that cannot be told notices by its own deadline.
                peer.links
                    .iter()
                    .filter_map(|link| link.endpoint())
                    .any(|endpoint| endpoint.notify(notice).is_ok());
            }
        }
        inner.announce();
    }

    /// Takes back what waits, and asks the transports to end what moves.
    pub(super) fn stop(self: &Arc<Self>, inner: &Arc<Inner>) {
        inner.cancel.set();
        for peer in peers_of(inner) {
            let waiting = peer.state().schedule.extract(|work| Arc::ptr_eq(&work.token.transfer, inner));
            for work in waiting {
                inner.gave_up(work.token.entry, work.len, inner.why_cancelled());
            }
            peer.links
                .iter()
                .filter_map(|link| link.endpoint())
                .for_each(|endpoint| endpoint.cancel(&inner.cancel));
            self.pump(&peer);
        }
        self.finish(inner);
    }

    pub(super) fn now(&self) -> Instant {
        (self.clock)()
    }

    fn now_ns(&self) -> u64 {
        u64::try_from((self.now() - self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Slices that went to an endpoint in one call: an operation's id is its index here.
struct Issue {
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    rail: usize,
    /// The rail's endpoint when they went; the rail may have another one by now.
    endpoint: Option<Arc<dyn Endpoint>>,
    slices: Mutex<Vec<Option<Flying>>>,
}

impl Sink for Issue {
    fn complete(&self, completion: Completion) {
        let taken = self.slices.lock().get_mut(completion.id as usize).and_then(Option::take);
        let Some((slice, issued)) = taken else { return };
        let (now, class, len) = (self.shared.now_ns(), slice.class, slice.len);
        self.peer.state().rails[self.rail].complete(issued, len, completion.valid_bytes, now);
        let before = self.shared.in_flight[class as usize].fetch_sub(len, Ordering::AcqRel);
        if let Some(endpoint) = &self.endpoint {
            slice.pieces[0].token.transfer.landed(endpoint);
        }
        self.shared.completed(self, slice, completion);
        self.shared.pump(&self.peer);
        let budget = self.shared.config.budgets[class as usize];
        if before.saturating_add(len) >= budget {
            // Other peers may have waited for this budget.
            let peers: Vec<_> = self.shared.peers.lock().iter().filter_map(Weak::upgrade).collect();
            peers.iter().for_each(|peer| self.shared.pump(peer));
        }
    }
}
