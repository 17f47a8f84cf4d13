//! The side that hands blocks over.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::link::Link;
use super::super::message::{Copied, Keep, Reply, Request};
use super::super::table::Generation;
use super::super::upkeep::ANSWER;
use super::super::{Cluster, Shared};
use super::notice::encode;
use super::receive::Arrival;
use super::{HAND_OVERS_MAX, HandOverError, check};
use kvasir_net::transfer::{Batch, Class, Entry, Segment, Transfer, TransferError};
use kvasir_net::transport::node::random_u64;
use kvasir_net::transport::{Direction, RemoteRange};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BlockMeta;
use kvasir_protocol::wire::Outcome;
use kvasir_store::dram::{Held, OwnerId, Reservation, Reserve};

/// Pause between two attempts to send a layer that failed on its way.
const AGAIN: Duration = Duration::from_millis(20);
/// A peer that is not up for this long while layers fail is given up.
const AWAY_MAX: Duration = Duration::from_secs(2);

/// A hand-over that goes out. Dropping it ends it: nothing is kept on either host.
pub struct HandingOver {
    shared: Arc<Shared>,
    link: Arc<Link>,
    owner: OwnerId,
    id: u64,
    sources: Vec<Source>,
    /// Where the peer wants it written; `None` if the peer has everything.
    segment: Option<Arc<Segment>>,
    layers: Vec<Layer>,
    begun: Instant,
    /// Since when the peer has been down, if it was not up when layers failed.
    down_since: Option<Instant>,
    /// The peer may have made places.
    is_asked: bool,
    /// Its caller was told the places, and may be writing there.
    is_lent: bool,
    /// It was finished: there is nothing to give back.
    is_over: bool,
}

/// How far a layer has got.
enum Layer {
    Missing,
    /// The peer has all of it.
    Unneeded,
    Sent(Transfer),
}

/// One block to hand over.
struct Source {
    meta: BlockMeta,
    put_after: Generation,
    place: Place,
    /// The region of the peer's segment that it goes to.
    region: Option<u32>,
}

enum Place {
    ToFill(Reservation),
    /// Stored here already.
    Held(Held),
}

/// Where a block must be filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourcePlace {
    /// In the pool.
    pub offset: u64,
    /// False if the block is stored here already: there is nothing to fill, and its bytes must not be changed.
    pub to_fill: bool,
}

impl Cluster {
    /// Begins to hand blocks over to a peer, layer by layer. Places are reserved here, for `owner`, and there.
    ///
    /// # Errors
    /// Nothing has begun, and nothing stays reserved.
    pub fn hand_over(
        &self,
        owner: OwnerId,
        request: u64,
        peer: &str,
        blocks: &[BlockMeta],
        layers: u32,
    ) -> Result<HandingOver, HandOverError> {
        check(blocks, layers)?;
        let shared = &self.shared;
        let link = shared.link_to(peer)?;
        if !link.is_up() {
            return Err(HandOverError::PeerDown { peer: peer.to_owned() });
        }
        let mut handing = HandingOver::new(shared, link, owner, layers)?;
        handing.reserve(blocks)?;
        handing.open(Keep::All { request })?;
        handing.is_lent = true;
        Ok(handing)
    }

    /// Waits for the blocks of a tenant's request to begin to arrive here. Returns `None` if `until` came first.
    ///
    /// # Errors
    /// It broke off, for this reason.
    pub fn arrival(&self, tenant: u16, request: u64, until: Instant) -> Result<Option<Arrival>, String> {
        self.shared.receiving.arrival(tenant, request, until)
    }
}

impl HandingOver {
    /// A hand-over that, from here on, gives back what it holds when it is dropped.
    fn new(
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        owner: OwnerId,
        layers: u32,
    ) -> Result<Self, HandOverError> {
        let sending = &shared.sending;
        if sending.fetch_add(1, Ordering::SeqCst) >= HAND_OVERS_MAX {
            sending.fetch_sub(1, Ordering::SeqCst);
            return Err(HandOverError::TooMany);
        }
        Ok(Self {
            shared: Arc::clone(shared),
            link: Arc::clone(link),
            owner,
            id: random_u64(),
            sources: Vec::new(),
            segment: None,
            layers: (0..layers).map(|_| Layer::Missing).collect(),
            begun: Instant::now(),
            down_since: None,
            is_asked: false,
            is_lent: false,
            is_over: false,
        })
    }

    /// Hands over blocks that are stored here, each kept or lost by itself. One outcome per block.
    pub(crate) fn push(
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        blocks: Vec<(BlockMeta, Generation, Held)>,
    ) -> Result<Vec<Copied>, HandOverError> {
        let checksums: Vec<u64> = blocks.iter().map(|(.., held)| held.checksum).collect();
        let mut handing = Self::new(shared, link, shared.owner, 1)?;
        let source =
            |(meta, put_after, held)| Source { meta, put_after, place: Place::Held(held), region: None };
        handing.sources = blocks.into_iter().map(source).collect();
        handing.open(Keep::Each)?;
        handing.layer_done(0)?;
        handing.wait_arrived()?;
        let outcomes = handing.settle(&checksums)?;
        handing.is_over = true;
        Ok(outcomes)
    }

    /// Where each block must be filled in.
    pub fn places(&self) -> Vec<SourcePlace> {
        let place = |source: &Source| match &source.place {
            Place::ToFill(place) => SourcePlace { offset: place.offset, to_fill: true },
            Place::Held(held) => SourcePlace { offset: held.offset(), to_fill: false },
        };
        self.sources.iter().map(place).collect()
    }

    /// When its time is over.
    pub fn until(&self) -> Instant {
        self.begun + self.shared.receiving.time()
    }

    fn reserve(&mut self, blocks: &[BlockMeta]) -> Result<(), HandOverError> {
        let (store, now) = (Arc::clone(&self.shared.store), self.shared.clock.now_ms());
        let put_after = self.shared.put_after(blocks.iter().map(|meta| meta.key));
        let reserved = store.reserve(self.owner, blocks, now).unwrap_or_default();
        let mut failed = None;
        for ((&meta, put_after), reserved) in blocks.iter().zip(put_after).zip(reserved) {
            let key = meta.key;
            let refused = |outcome: Outcome| {
                let (reason, retryable) = (outcome.text().to_owned(), outcome.retryable());
                HandOverError::NoPlace { key, reason, retryable }
            };
            let place = match reserved {
                Reserve::Reserved(place) => Ok(Place::ToFill(place)),
                Reserve::AlreadyStored => {
                    let held = self.shared.receiving.hold_stored(&meta);
                    held.map(Place::Held).map_err(HandOverError::NotHeld)
                }
                Reserve::InProgress => Err(refused(Outcome::InProgress)),
                Reserve::Refused(error) => Err(refused(Outcome::from(&error))),
            };
            match place {
                Ok(place) => self.sources.push(Source { meta, put_after, place, region: None }),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Has the peer make places, and gets the right to write to them.
    fn open(&mut self, keep: Keep) -> Result<(), HandOverError> {
        let peer = self.link.config.name.clone();
        let not_taken = |reason: String| HandOverError::NotTaken { peer: peer.clone(), reason };
        let blocks = self.sources.iter().map(|source| source.meta).collect();
        let layers = self.layers.len() as u32;
        let put_after = self.sources.iter().map(|source| source.put_after).collect();
        let now = self.shared.copies.generations.now();
        let open = Request::Open { id: self.id, keep, layers, blocks, put_after, now };
        self.is_asked = true;
        let reply = self.link.call(&open, ANSWER).map_err(|error| not_taken(error.to_string()))?;
        let Reply::Opened { segment, wanted } = reply else {
            return Err(not_taken("it answered something that was not asked".to_owned()));
        };
        if wanted.len() != self.sources.len() {
            return Err(not_taken("it answered for another number of blocks".to_owned()));
        }
        let mut region = 0;
        for (source, wanted) in self.sources.iter_mut().zip(wanted) {
            source.region = wanted.then_some(region);
            region += u32::from(wanted);
        }
        if region > 0 {
            let segment = self.link.segment().and_then(|pool| pool.peer().open_segment(&segment));
            self.segment = Some(segment.map_err(|error| not_taken(error.to_string()))?);
        }
        Ok(())
    }

    /// Says that a layer is filled in, in all blocks. It goes to the peer now, and must not be changed any more.
    ///
    /// # Errors
    /// It does not exist, or was handed over before; the hand-over broke off or its time is over, and it must be dropped.
    pub fn layer_done(&mut self, layer: u32) -> Result<(), HandOverError> {
        let layers = self.layers.len() as u32;
        match self.layers.get(layer as usize) {
            None => return Err(HandOverError::NoLayer { layer, layers }),
            Some(Layer::Unneeded | Layer::Sent(_)) => return Err(HandOverError::LayerTwice { layer }),
            Some(Layer::Missing) => {}
        }
        self.check_time()?;
        self.mend()?;
        self.layers[layer as usize] = match self.segment.clone() {
            None => Layer::Unneeded,
            Some(segment) => Layer::Sent(self.send(layer, &segment)?),
        };
        Ok(())
    }

    fn send(&self, layer: u32, segment: &Arc<Segment>) -> Result<Transfer, HandOverError> {
        let layers = self.layers.len() as u32;
        let entry = |source: &Source| {
            let len = u64::from(source.meta.size / layers);
            let (region, offset) = (source.region?, len * u64::from(layer));
            let local = self.shared.ways.pool.range(source.place.offset() + offset, len)?;
            let remote = vec![RemoteRange { region, offset, len }];
            let (direction, segment) = (Direction::Write, Arc::clone(segment));
            Some(Entry { direction, segment, local: vec![local], remote })
        };
        let batch = Batch {
            entries: self.sources.iter().filter_map(entry).collect(),
            deadline: Some(self.until().saturating_duration_since(Instant::now())),
            notice: Some(encode(self.id, layer, layers)),
            ..Batch::new(Class::DecodeCritical)
        };
        let sent = self.shared.ways.engine.submit(batch);
        sent.map_err(|error| HandOverError::Broken { reason: error.to_string() })
    }

    fn check_time(&self) -> Result<(), HandOverError> {
        let time = self.shared.receiving.time();
        let late = self.begun.elapsed() >= time;
        if late { Err(HandOverError::Late { ms: time.as_millis() as u64 }) } else { Ok(()) }
    }

    /// Sends layers again that failed on their way. Returns false if there were any; an error if sending again is pointless.
    fn mend(&mut self) -> Result<bool, HandOverError> {
        let up = self.link.is_up();
        if up {
            self.down_since = None;
        }
        let failed: Vec<(usize, TransferError)> =
            self.layers.iter().enumerate().filter_map(|(n, layer)| Some((n, layer.error()?))).collect();
        for (n, error) in &failed {
            let away =
                if up { Duration::ZERO } else { self.down_since.get_or_insert_with(Instant::now).elapsed() };
            if !may_come_again(error) || away > AWAY_MAX {
                return Err(HandOverError::Broken { reason: error.to_string() });
            }
            if let Some(segment) = self.segment.clone().filter(|_| up) {
                self.layers[*n] = Layer::Sent(self.send(*n as u32, &segment)?);
            }
        }
        Ok(failed.is_empty())
    }

    /// Says that all layers are handed over. The peer compares its blocks with the checksums (one each, in order) and keeps them,
    /// then this host does.
    ///
    /// # Errors
    /// A layer is missing, or the number of checksums is wrong: nothing has changed. Else ([`HandOverError::is_end`])
    /// nothing was kept here, and nothing there, unless only the peer's answer was lost.
    pub fn finish(&mut self, checksums: &[u64]) -> Result<(), HandOverError> {
        let missing = self.layers.iter().position(|layer| matches!(layer, Layer::Missing));
        if let Some(layer) = missing {
            return Err(HandOverError::LayerMissing { layer: layer as u32 });
        }
        if checksums.len() != self.sources.len() {
            let (given, blocks) = (checksums.len(), self.sources.len());
            return Err(HandOverError::Checksums { given, blocks });
        }
        self.wait_arrived()?;
        // Blocks that were stored here already went in the stored version, even if the caller recomputed them.
        let sum = |(source, &sum): (&Source, &u64)| match &source.place {
            Place::Held(held) => held.checksum,
            Place::ToFill(_) => sum,
        };
        let checksums: Vec<u64> = self.sources.iter().zip(checksums).map(sum).collect();
        let outcomes = self.settle(&checksums)?;
        let failed = |(_, outcome): &(&Source, Copied)| !matches!(outcome, Copied::Done | Copied::Had);
        if let Some((source, outcome)) = self.sources.iter().zip(outcomes).find(failed) {
            let reason = match outcome {
                Copied::Enough => "was removed meanwhile",
                _ => "did not arrive with the checksum given",
            };
            return Err(HandOverError::NotKept { key: source.meta.key, reason: reason.to_owned() });
        }
        self.commit(&checksums)
    }

    /// Waits until the peer has every layer that was handed over.
    fn wait_arrived(&mut self) -> Result<(), HandOverError> {
        loop {
            self.check_time()?;
            self.wait_sent();
            if self.mend()? {
                return Ok(());
            }
            self.shared.pause(AGAIN);
        }
    }

    /// Has the peer compare and keep. One outcome per block.
    fn settle(&self, checksums: &[u64]) -> Result<Vec<Copied>, HandOverError> {
        let settle = Request::Settle { id: self.id, checksums: checksums.to_vec() };
        // It reads all blocks once: at least 100 MB/s.
        let bytes: u64 = self.sources.iter().map(|source| u64::from(source.meta.size)).sum();
        let patience = ANSWER + Duration::from_micros(bytes / 100);
        match self.link.call(&settle, patience) {
            Ok(Reply::Copied { outcomes }) if outcomes.len() == self.sources.len() => Ok(outcomes),
            Ok(_) => {
                let reason = "the peer answered something that was not asked".to_owned();
                Err(HandOverError::Broken { reason })
            }
            Err(error) => Err(HandOverError::Broken { reason: error.to_string() }),
        }
    }

    /// Keeps the blocks here too.
    fn commit(&mut self, checksums: &[u64]) -> Result<(), HandOverError> {
        self.is_over = true;
        let filled = |(source, &sum): (&Source, &u64)| match &source.place {
            Place::ToFill(place) => Some((place.id, Some(sum))),
            Place::Held(_) => None,
        };
        let items: Vec<_> = self.sources.iter().zip(checksums).filter_map(filled).collect();
        let (store, now) = (&self.shared.store, self.shared.clock.now_ms());
        let results = store.commit(self.owner, &items, now).unwrap_or_default();
        match results.into_iter().find_map(Result::err) {
            None => Ok(()),
            Some(error) => {
                let reason = format!("the peer has kept the blocks, this host has not: {error}");
                self.give_places_back();
                Err(HandOverError::Broken { reason })
            }
        }
    }

    /// Waits to the very end: until then the engine may still read memory that will be given back.
    fn wait_sent(&self) {
        for layer in &self.layers {
            let Layer::Sent(transfer) = layer else { continue };
            while !transfer.wait(Instant::now() + Duration::from_secs(1)).is_complete() {}
        }
    }

    /// The reservations of its places here. The caller that fills them aborts them when it is done with a hand-over that broke off.
    pub fn reservations(&self) -> Vec<u64> {
        let reserved = |source: &Source| match &source.place {
            Place::ToFill(place) => Some(place.id),
            Place::Held(_) => None,
        };
        self.sources.iter().filter_map(reserved).collect()
    }

    fn give_places_back(&self) {
        let (store, ids) = (&self.shared.store, self.reservations());
        if self.is_lent {
            // Their writer may be at it right now, and does not know that it is over.
            store.revoke(self.owner, &ids);
        } else {
            let _ = store.abort(self.owner, &ids);
        }
    }
}

impl Drop for HandingOver {
    fn drop(&mut self) {
        if !self.is_over {
            for layer in &self.layers {
                if let Layer::Sent(transfer) = layer {
                    self.shared.ways.engine.cancel(transfer);
                }
            }
            self.wait_sent();
            if self.is_asked {
                let reason = "the sender gave it up".to_owned();
                // A peer that is not told gives its places back when its time is over.
                let _ = self.link.call(&Request::GiveUp { id: self.id, reason }, ANSWER);
            }
            self.give_places_back();
        }
        self.shared.sending.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Layer {
    /// Why it did not arrive.
    fn error(&self) -> Option<TransferError> {
        let Self::Sent(transfer) = self else { return None };
        let status = transfer.poll();
        let error = || (0..status.entries).find_map(|entry| transfer.poll_entry(entry)?.error);
        if status.is_complete() && status.failed > 0 { error() } else { None }
    }
}

impl Place {
    fn offset(&self) -> u64 {
        match self {
            Self::ToFill(place) => place.offset,
            Self::Held(held) => held.offset(),
        }
    }
}

/// Whether a write that failed in this way may succeed over the same grants, once the rail is mended.
fn may_come_again(error: &TransferError) -> bool {
    match error {
        TransferError::PeerDown { .. } => true,
        TransferError::TimedOut | TransferError::Cancelled => false,
        TransferError::Op { error, .. } => error.retryable() || error.endpoint_at_fault(),
    }
}
