//! Batches in, slices out: whoever submits or completes hands out what rails and budgets have room for.
//!
//! Lock order: a peer's state, then a transfer's progress. Transports are called with neither held.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::complete::{Inner, Transfer, TransferError};
use super::entry::{Batch, BatchTooLarge, ENTRIES_MAX, Entry, Piece, op_of, peers_of, push_entry};
use super::peer::Peer;
use super::plan::{CLASSES, Class, Idle, Issued, PlanConfig, Slice, Work};
use super::watch::Deadlines;
use crate::memory::region::Region;
use crate::transport::{Completion, Error, Op, OpError, Sink, Transport};

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
            mend_interval: Duration::from_millis(100),
        }
    }
}

/// A slice on its way.
type Flying = (Slice<Piece>, Issued);

/// The engine of one node. Dropping it leaves transfers in flight to their transports.
pub struct Engine(Arc<Shared>);

pub(super) struct Shared {
    pub(super) config: EngineConfig,
    transports: Vec<Arc<dyn Transport>>,
    start: Instant,
    in_flight: [AtomicU64; CLASSES],
    retried: AtomicU64,
    pub(super) peers: Mutex<Vec<Weak<Peer>>>,
    pub(super) deadlines: Mutex<Deadlines>,
    pub(super) deadlines_changed: Condvar,
    pub(super) mend_wanted: Mutex<bool>,
    pub(super) mend: Condvar,
    pub(super) ended: AtomicBool,
}

impl Engine {
    pub fn new(config: EngineConfig, transports: Vec<Arc<dyn Transport>>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            config,
            transports,
            start: Instant::now(),
            in_flight: Default::default(),
            retried: AtomicU64::new(0),
            peers: Mutex::default(),
            deadlines: Mutex::default(),
            deadlines_changed: Condvar::new(),
            mend_wanted: Mutex::default(),
            mend: Condvar::new(),
            ended: AtomicBool::new(false),
        });
        let (watching, mending) = (shared.clone(), shared.clone());
        thread::Builder::new().name("kvasir-xfer-watch".into()).spawn(move || watching.watch())?;
        thread::Builder::new().name("kvasir-xfer-mend".into()).spawn(move || mending.mend_all())?;
        Ok(Self(shared))
    }

    /// Makes memory usable over every transport that reaches it. An error only if none does.
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
        let rail = |(index, address): &(usize, String)| {
            let transport = self.0.transports.get(*index).cloned();
            transport.map(|transport| (transport, address.clone()))
        };
        let peer = Peer::connect(addresses.iter().filter_map(rail).collect(), &self.0.config.plan)?;
        let mut peers = lock(&self.0.peers);
        peers.retain(|peer| peer.strong_count() > 0);
        peers.push(Arc::downgrade(&peer));
        Ok(peer)
    }

    /// Starts a batch. Entries that cannot be moved fail at once; see [`Transfer::poll_entry`].
    pub fn submit(&self, batch: Batch) -> Result<Transfer, BatchTooLarge> {
        let Batch { class, mut entries, deadline, notice } = batch;
        if entries.len() > ENTRIES_MAX {
            return Err(BatchTooLarge(entries.len()));
        }
        entries.iter_mut().for_each(Entry::coalesce);
        let deadline = Instant::now() + deadline.unwrap_or(self.0.config.deadline);
        let inner = Arc::new(Inner::new(class, entries, deadline, notice));
        self.0.enqueue(&inner);
        let peers = peers_of(&inner);
        peers.iter().for_each(|peer| self.0.pump(peer));
        if inner.outcome().is_some() {
            self.0.finish(&inner)
        } else {
            self.0.watch_deadline(&inner)
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
        // Taken so that neither thread is between its look at the flag and its sleep.
        drop(lock(&self.0.deadlines));
        self.0.deadlines_changed.notify_all();
        drop(lock(&self.0.mend_wanted));
        self.0.mend.notify_all();
    }
}

impl Shared {
    fn enqueue(&self, inner: &Arc<Inner>) {
        let ranges_max = self.config.plan.ranges_max.max(2) as usize;
        // Entries of one batch, peer by peer, so that a peer's lock is taken once for its run of entries.
        let mut at = 0;
        while let Some(first) = inner.entries.get(at) {
            let peer = first.segment.peer().clone();
            let mut state = peer.state();
            while let Some(entry) =
                inner.entries.get(at).filter(|entry| Arc::ptr_eq(entry.segment.peer(), &peer))
            {
                let piece = Piece { transfer: inner.clone(), entry: at as u32 };
                match entry.check() {
                    Ok(()) => push_entry(&mut state.schedule, entry, &piece, ranges_max, inner.class),
                    Err(error) => inner.refused(at as u32, error),
                }
                at += 1;
            }
        }
    }

    /// Hands out what has room, however many ask for it at once: one does it for all.
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

    /// Plans all that has room: slices per rail, and what cannot go because no rail works.
    fn plan(&self, peer: &Peer) -> (Vec<Vec<Flying>>, Vec<Work<Piece>>) {
        let mut state = peer.state();
        let state = &mut *state;
        let mut shares: Vec<Vec<_>> = state.rails.iter().map(|_| Vec::new()).collect();
        loop {
            match state.schedule.next(&state.rails, &self.config.plan, self.room()) {
                Ok(slice) => {
                    let issued = state.rails[slice.rail].issue(slice.len, self.now_ns());
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
        let ops: Vec<Option<Op>> =
            share.iter().enumerate().map(|(n, (slice, _))| op_of(n as u64, slice, rail)).collect();
        let slices = share.into_iter().map(Some).collect();
        let issue =
            Arc::new(Issue { shared: self.clone(), peer: peer.clone(), rail, slices: Mutex::new(slices) });
        let down = || OpError::PeerDown { peer: peer.name().to_owned(), reason: "the rail is broken".into() };
        let Some(endpoint) = endpoint else {
            return (0..ops.len()).for_each(|n| issue.complete(Completion::failed(n as u64, 0, down())));
        };
        for n in (0..ops.len()).filter(|&n| ops[n].is_none()) {
            issue.complete(Completion::failed(n as u64, 0, down()));
        }
        endpoint.submit(ops.into_iter().flatten().collect(), &(issue as Arc<dyn Sink>));
    }

    /// Sorts out what a slice's end means for its pieces.
    fn completed(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        rail: usize,
        slice: Slice<Piece>,
        completion: Completion,
    ) {
        let mut valid = completion.valid_bytes;
        let error = completion.result.err();
        if matches!(error, Some(OpError::PeerDown { .. })) {
            peer.broke(rail);
            self.want_mending();
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
        if !again || Instant::now() >= transfer.deadline {
            let rail = peer.links[rail].describe();
            let error = TransferError::Op { error: error.clone(), rail, attempts: attempts - 1 };
            return transfer.gave_up(entry, work.len, error);
        }
        self.retried.fetch_add(1, Ordering::Relaxed);
        let avoid = work.avoid
            | if error.endpoint_at_fault() { 1u64.checked_shl(rail as u32).unwrap_or(0) } else { 0 };
        peer.state().schedule.push_front(class, Work { avoid, ..work });
    }

    /// If nothing of it is pending any more: tells the peers, then everyone who waits. Once.
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

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Slices that went to an endpoint in one call: an operation's id is its index here.
struct Issue {
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    rail: usize,
    slices: Mutex<Vec<Option<Flying>>>,
}

impl Sink for Issue {
    fn complete(&self, completion: Completion) {
        let taken = lock(&self.slices).get_mut(completion.id as usize).and_then(Option::take);
        let Some((slice, issued)) = taken else { return };
        let (now, class, len) = (self.shared.now_ns(), slice.class, slice.len);
        self.peer.state().rails[self.rail].complete(issued, len, completion.valid_bytes, now);
        let before = self.shared.in_flight[class as usize].fetch_sub(len, Ordering::AcqRel);
        self.shared.completed(&self.peer, self.rail, slice, completion);
        self.shared.pump(&self.peer);
        let budget = self.shared.config.budgets[class as usize];
        if before.saturating_add(len) >= budget {
            // Other peers may have waited for this budget.
            let peers: Vec<_> = lock(&self.shared.peers).iter().filter_map(Weak::upgrade).collect();
            peers.iter().for_each(|peer| self.shared.pump(peer));
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
