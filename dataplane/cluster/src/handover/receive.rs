//! The side that takes a hand-over in, and the readers of it while it comes.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::super::copies::Copies;
use super::super::link::Link;
use super::super::message::{Copied, Keep, Reply};
use super::super::stop::Stop;
use super::super::table::Generation;
use super::super::ways::Ways;
use super::notice::decode;
use super::{HAND_OVERS_MAX, NotHeld, TAKEN_MAX, check};
use kvasir_memory::region::Region;
use kvasir_net::transport::Access;
use kvasir_net::transport::node::Notice;
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::clock::Clock;
use kvasir_store::dram::{DramStore, Held, OwnerId, Reservation, Reserve};

/// The most outcomes kept for callers that ask late; the oldest go first.
const OUTCOMES_MAX: usize = 256;

/// Hand-overs that come in, by the numbers that their senders gave them.
pub(crate) struct Receiving {
    store: Arc<DramStore>,
    copies: Arc<Copies>,
    clock: Clock,
    ways: Arc<Ways>,
    stop: Arc<Stop>,
    incoming: Mutex<HashMap<u64, Incoming>>,
    /// A hand-over began, a layer came, a hand-over was settled, or the host stops.
    changed: Condvar,
}

struct Incoming {
    keep: Keep,
    /// Whose blocks they are. Requests are numbered by each tenant.
    tenant: u16,
    from: String,
    /// Owner of the places.
    writer: OwnerId,
    layers: u32,
    segment: String,
    blocks: Vec<Block>,
    /// Whether each layer is here.
    here: Vec<bool>,
    state: State,
    readers: usize,
    begun: Instant,
    /// When its time is over: places stay until then while somebody reads.
    until: Instant,
    /// Once it is settled: until when late readers can still learn how it ended.
    known_until: Instant,
}

struct Block {
    meta: BlockMeta,
    /// The last removal that its sender knows: a later one removes it.
    put_after: Generation,
    place: Place,
}

enum Place {
    Reserved(Reservation),
    /// Visible to all, and kept from being evicted.
    Held(Held),
    GivenBack,
    /// There is no place for it; the others go on without it.
    None(Copied),
}

/// A block that was written here.
struct Written {
    key: BlockKey,
    put_after: Generation,
    place: Reservation,
    checksum: u64,
}

/// A block of a hand-over that is being settled; one that was not written has its outcome already.
type Settling = Result<Written, Copied>;

#[derive(Clone, PartialEq, Eq)]
enum State {
    Open,
    Settling,
    /// One outcome per block.
    Kept(Vec<Copied>),
    Failed(String),
}

/// One block of a hand-over, and where it is or will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivingBlock {
    pub key: BlockKey,
    pub size: u32,
    /// In the pool.
    pub offset: u64,
}

/// How a wait ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    Here,
    /// The given time is over.
    NotYet,
    /// The hand-over broke off, for this reason.
    Failed(String),
}

/// A hand-over that somebody reads. Its places go to nobody else before this is dropped or [`until`](Self::until).
pub struct Arrival {
    receiving: Arc<Receiving>,
    id: u64,
    layers: u32,
    until: Instant,
    /// When the hand-over began: its number may be another one's by the time this is dropped.
    begun: Instant,
    blocks: Vec<ArrivingBlock>,
}

impl Arrival {
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Until when its places stay.
    pub fn until(&self) -> Instant {
        self.until
    }

    pub fn blocks(&self) -> &[ArrivingBlock] {
        &self.blocks
    }

    /// Waits for a layer of all blocks, or (`None`) for the whole, compared and kept.
    pub fn wait(&self, layer: Option<u32>, until: Instant) -> Waited {
        self.receiving.wait(until, |all| {
            let Some(incoming) = all.get(&self.id) else {
                return Some(Waited::Failed("its time is over".to_owned()));
            };
            let here = layer.is_some_and(|layer| incoming.here.get(layer as usize) == Some(&true));
            match &incoming.state {
                State::Failed(reason) => Some(Waited::Failed(reason.clone())),
                State::Kept(_) => Some(Waited::Here),
                State::Open | State::Settling => here.then_some(Waited::Here),
            }
        })
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut all = self.receiving.incoming();
        if let Some(incoming) = all.get_mut(&self.id).filter(|incoming| incoming.begun == self.begun) {
            incoming.readers = incoming.readers.saturating_sub(1);
        }
        self.receiving.tidy(&mut all, Instant::now());
    }
}

impl Incoming {
    /// What the sender is told: which blocks it must write, in the order of the segment's regions.
    fn opened(&self) -> Reply {
        let wanted = |block: &Block| matches!(block.place, Place::Reserved(_));
        Reply::Opened { segment: self.segment.clone(), wanted: self.blocks.iter().map(wanted).collect() }
    }

    fn is_settled(&self) -> bool {
        matches!(self.state, State::Kept(_) | State::Failed(_))
    }

    fn settle(&mut self, state: State, known_for: Duration) {
        self.state = state;
        self.known_until = Instant::now() + known_for;
    }
}

impl Block {
    fn arriving(&self) -> Option<ArrivingBlock> {
        let BlockMeta { key, size, .. } = self.meta;
        let offset = match &self.place {
            Place::Reserved(place) => place.offset,
            Place::Held(held) => held.offset(),
            Place::GivenBack | Place::None(_) => return None,
        };
        Some(ArrivingBlock { key, size, offset })
    }
}

impl Receiving {
    pub(crate) fn new(
        store: &Arc<DramStore>,
        copies: &Arc<Copies>,
        clock: Clock,
        ways: &Arc<Ways>,
        stop: &Arc<Stop>,
    ) -> Self {
        let (store, copies) = (Arc::clone(store), Arc::clone(copies));
        let (ways, stop) = (Arc::clone(ways), Arc::clone(stop));
        Self { store, copies, clock, ways, stop, incoming: Mutex::default(), changed: Condvar::new() }
    }

    /// Makes places for blocks that a peer is about to write layer by layer.
    pub(crate) fn open(
        &self,
        from: &Link,
        id: u64,
        keep: Keep,
        layers: u32,
        blocks: Vec<(BlockMeta, Generation)>,
    ) -> Reply {
        let refused = |reason: String| Reply::Refused { reason };
        let (metas, put_after): (Vec<BlockMeta>, Vec<Generation>) = blocks.into_iter().unzip();
        if let Err(error) = check(&metas, layers) {
            return refused(error.to_string());
        }
        let tenant = metas[0].tenant;
        if keep != Keep::Each && metas.iter().any(|meta| (meta.tenant, meta.key.tenant()) != (tenant, tenant))
        {
            return refused("the blocks of a request are one tenant's".to_owned());
        }
        {
            let mut all = self.incoming();
            match all.get(&id) {
                Some(incoming) if incoming.from == from.config.name => return incoming.opened(),
                Some(_) => return refused(taken(id)),
                None => {}
            }
            self.tidy(&mut all, Instant::now());
            let busy = |incoming: &&Incoming| {
                (incoming.keep, incoming.tenant) == (keep, tenant) && incoming.state == State::Open
            };
            if let Keep::All { request } = keep
                && let Some(other) = all.values().find(busy)
            {
                return refused(format!("request {request} is being handed over by {} already", other.from));
            }
            // The outcomes of others are kept for a while, and do not count here.
            let open = || all.values().filter(|incoming| !incoming.is_settled());
            if open().filter(|incoming| incoming.from == from.config.name).count() >= HAND_OVERS_MAX {
                return refused(format!(
                    "it takes {HAND_OVERS_MAX} hand-overs at once from one host; try again"
                ));
            }
            if open().count() >= TAKEN_MAX {
                return refused(format!("it takes {TAKEN_MAX} hand-overs at once; try again"));
            }
        }
        let blocks = match self.make_places(from, &metas, &put_after, keep) {
            Ok(blocks) => blocks,
            Err(reason) => return refused(reason),
        };
        let now = Instant::now();
        let until = now + self.time();
        // Named by peer as well: of two that begin under one number at once, none revokes what the other was given.
        let segment = format!("kvasir.handover.{}.{id:016x}", from.place);
        let mut incoming = Incoming {
            keep,
            tenant,
            from: from.config.name.clone(),
            writer: from.writer,
            layers,
            segment: segment.clone(),
            here: vec![false; layers as usize],
            state: State::Open,
            readers: 0,
            begun: now,
            until,
            known_until: until,
            blocks,
        };
        if let Err(reason) = self.export_places(&mut incoming) {
            self.give_places_back(from.writer, &mut incoming.blocks);
            return refused(reason);
        }
        let opened = incoming.opened();
        {
            let mut all = self.incoming();
            match all.entry(id) {
                Entry::Vacant(free) => drop(free.insert(incoming)),
                // Another connection was faster.
                Entry::Occupied(_) => {
                    drop(all);
                    self.ways.take_back(&segment);
                    self.give_places_back(from.writer, &mut incoming.blocks);
                    return refused(taken(id));
                }
            }
        }
        self.changed.notify_all();
        opened
    }

    /// Places for all blocks, or for those that can have one, or why there are none.
    fn make_places(
        &self,
        from: &Link,
        metas: &[BlockMeta],
        put_after: &[Generation],
        keep: Keep,
    ) -> Result<Vec<Block>, String> {
        let placed = from.reserve(&self.store, metas, self.clock.now_ms());
        let (mut blocks, mut failed) = (Vec::new(), None);
        for ((&meta, &put_after), reserved) in metas.iter().zip(put_after).zip(placed) {
            let key = meta.key;
            let place = match reserved {
                Reserve::Reserved(place) => Ok(Place::Reserved(place)),
                Reserve::AlreadyStored if keep == Keep::Each => Ok(Place::None(Copied::Had)),
                Reserve::InProgress if keep == Keep::Each => Ok(Place::None(Copied::Failed)),
                Reserve::Refused(_) if keep == Keep::Each => Ok(Place::None(Copied::NoRoom)),
                Reserve::AlreadyStored => {
                    self.hold_stored(&meta).map(Place::Held).map_err(|error| error.to_string())
                }
                Reserve::InProgress => Err(format!("another writer is storing block {key} there")),
                Reserve::Refused(error) => Err(error.to_string()),
            };
            match place {
                Ok(place) => blocks.push(Block { meta, put_after, place }),
                Err(reason) => failed = Some(reason),
            }
        }
        let Some(reason) = failed else { return Ok(blocks) };
        self.give_places_back(from.writer, &mut blocks);
        Err(reason)
    }

    /// A block that is stored here already, kept in place.
    pub(crate) fn hold_stored(&self, meta: &BlockMeta) -> Result<Held, NotHeld> {
        let held = self.store.hold(meta.key, meta.class, self.clock.now_ms());
        match held {
            Some(held) if held.size == meta.size => Ok(held),
            Some(held) => Err(NotHeld::OtherSize { key: meta.key, size: held.size }),
            None => Err(NotHeld::Evicted { key: meta.key }),
        }
    }

    /// Lets the peer write to the places of blocks that are not here. If there are none, all layers are here.
    fn export_places(&self, incoming: &mut Incoming) -> Result<(), String> {
        let region = |block: &Block| match &block.place {
            Place::Reserved(place) => {
                self.ways.pool.range(place.offset, place.size.into()).map(Region::of_range)
            }
            _ => None,
        };
        let regions: Vec<Region> = incoming.blocks.iter().filter_map(region).collect();
        if regions.is_empty() {
            incoming.here.fill(true);
            return Ok(());
        }
        let lease = self.time();
        let exported = self.ways.node.exports.export_for(
            Some(&incoming.from),
            &incoming.segment,
            regions,
            Access::Write,
            lease,
        );
        exported.map_err(|denied| denied.to_string())
    }

    /// How long a hand-over may take: its places outlive the right to write to them.
    pub(super) fn time(&self) -> Duration {
        self.store.config().reservation_ttl / 2
    }

    /// The thread that hears what peers announce.
    pub(crate) fn hear_notices(&self) {
        /// How long a stopping host may have to wait for it.
        const STEP: Duration = Duration::from_millis(200);
        while !self.stop.is_set() {
            if let Some(notice) = self.ways.node.notices.wait(Instant::now() + STEP) {
                self.note_layer(&notice);
            }
        }
    }

    /// Takes in what a peer announces. Returns false unless it is about a hand-over of that peer that is under way.
    pub(crate) fn note_layer(&self, notice: &Notice) -> bool {
        let Some((id, layer, layers)) = decode(&notice.message) else { return false };
        let mut all = self.incoming();
        let expected = |incoming: &&mut Incoming| incoming.from == notice.peer && incoming.layers == layers;
        let Some(incoming) = all.get_mut(&id).filter(expected) else { return false };
        incoming.here[layer as usize] = true;
        self.changed.notify_all();
        true
    }

    /// The peer has written all layers: compares, and keeps what [`Keep`] says. One outcome per block.
    pub(crate) fn settle(&self, from: &Link, id: u64, sums: &[u64]) -> Reply {
        let (segment, keep, blocks) = match self.begin_to_settle(from, id, sums) {
            Ok(begun) => begun,
            Err(answer) => return *answer,
        };
        self.ways.take_back(&segment);
        let mut outcomes = self.compare(&blocks);
        let damaged = outcomes.contains(&Copied::Failed);
        let whole = !damaged && !outcomes.contains(&Copied::Enough);
        let held = match keep {
            Keep::All { .. } if !whole => Vec::new(),
            Keep::All { .. } | Keep::Each => self.commit(from.writer, &blocks, &mut outcomes),
        };
        let mut all = self.incoming();
        let Some(incoming) = all.get_mut(&id) else {
            return Reply::Refused { reason: "it no longer knows this hand-over".to_owned() };
        };
        for (block, held) in incoming.blocks.iter_mut().zip(held) {
            if let Some(held) = held {
                block.place = Place::Held(held);
            }
        }
        let (state, reply) = end_of(keep, damaged, outcomes);
        incoming.settle(state, self.store.config().lease_ttl);
        self.tidy(&mut all, Instant::now());
        self.changed.notify_all();
        reply
    }

    /// The segment to take back, what to keep, and the blocks. `Err`: the answer is known already.
    fn begin_to_settle(
        &self,
        from: &Link,
        id: u64,
        sums: &[u64],
    ) -> Result<(String, Keep, Vec<Settling>), Box<Reply>> {
        let refused = |reason: &str| Err(Box::new(Reply::Refused { reason: reason.to_owned() }));
        let mut all = self.incoming();
        // The same call came again while the first one is still at work.
        let until = Instant::now() + self.time();
        while all.get(&id).is_some_and(|incoming| incoming.state == State::Settling) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.is_set() {
                return refused("it is still comparing; ask again");
            }
            self.changed.wait_for(&mut all, left);
        }
        let own = |incoming: &&mut Incoming| incoming.from == from.config.name;
        let Some(incoming) = all.get_mut(&id).filter(own) else {
            return refused("it no longer knows this hand-over");
        };
        match &incoming.state {
            State::Failed(reason) => return refused(reason),
            State::Kept(outcomes) => return Err(Box::new(Reply::Copied { outcomes: outcomes.clone() })),
            State::Open | State::Settling => {}
        }
        if sums.len() != incoming.blocks.len() {
            return refused("it needs one checksum per block");
        }
        incoming.state = State::Settling;
        let settling = |(block, &checksum): (&Block, &u64)| match &block.place {
            &Place::Reserved(place) => {
                Ok(Written { key: block.meta.key, put_after: block.put_after, place, checksum })
            }
            // Perhaps in another version: two computations of one block need not agree to the bit.
            Place::Held(_) | Place::GivenBack => Err(Copied::Had),
            Place::None(outcome) => Err(*outcome),
        };
        let blocks = incoming.blocks.iter().zip(sums).map(settling).collect();
        Ok((incoming.segment.clone(), incoming.keep, blocks))
    }

    /// Whether each block has arrived intact, and was not removed meanwhile.
    fn compare(&self, blocks: &[Settling]) -> Vec<Copied> {
        let mapping = self.store.pool().mapping();
        let outcome = |block: &Settling| match block {
            Ok(Written { key, put_after, place, checksum }) => {
                let bytes = mapping.bytes(place.offset, place.size.into());
                let intact = bytes.is_some_and(|bytes| bytes.checksum() == *checksum);
                let removed = self.copies.table().is_outdated(*key, *put_after);
                match (intact, removed) {
                    (false, _) => Copied::Failed,
                    (true, true) => Copied::Enough,
                    (true, false) => Copied::Done,
                }
            }
            Err(outcome) => *outcome,
        };
        blocks.iter().map(outcome).collect()
    }

    /// Makes blocks visible that are intact, and holds them. One that cannot be has failed, or was removed at this very
    /// moment; the others stay, as good as any.
    fn commit(&self, writer: OwnerId, blocks: &[Settling], outcomes: &mut [Copied]) -> Vec<Option<Held>> {
        let commit = |(block, outcome): (&Settling, &mut Copied)| {
            let block = block.as_ref().ok().filter(|_| *outcome == Copied::Done)?;
            let Written { key, put_after, place, checksum } = block;
            // Under the lock, so that a removal either finds the block or keeps it from becoming visible.
            let table = self.copies.table();
            if table.is_outdated(*key, *put_after) {
                *outcome = Copied::Enough;
                return None;
            }
            let held = self.store.commit_held(writer, place.id, *checksum, self.clock.now_ms());
            held.inspect_err(|_| *outcome = Copied::Failed).ok()
        };
        blocks.iter().zip(outcomes).map(commit).collect()
    }

    /// Ends a hand-over before it is settled, because of the peer or what happened to it.
    pub(crate) fn end(&self, reason: &str, mut which: impl FnMut(u64, &str) -> bool) {
        let open: Vec<(u64, String)> = {
            let all = self.incoming();
            let open = all.iter().filter(|(_, incoming)| incoming.state == State::Open);
            let wanted = open.filter(|(id, incoming)| which(**id, &incoming.from));
            wanted.map(|(id, incoming)| (*id, incoming.segment.clone())).collect()
        };
        // The places may go only once nobody writes there any more.
        if !planted::is(Bug::LetsPeersWriteOn) {
            open.iter().for_each(|(_, segment)| self.ways.take_back(segment));
        }
        let mut all = self.incoming();
        for (id, _) in open {
            if let Some(incoming) = all.get_mut(&id).filter(|incoming| incoming.state == State::Open) {
                incoming.settle(State::Failed(reason.to_owned()), self.store.config().lease_ttl);
            }
        }
        self.tidy(&mut all, Instant::now());
        self.changed.notify_all();
    }

    /// Ends hand-overs whose time is over, and forgets those that nobody needs to hear of any more.
    pub(crate) fn tend(&self) {
        let now = Instant::now();
        let overdue: Vec<u64> = {
            let mut all = self.incoming();
            self.tidy(&mut all, now);
            let late = |incoming: &Incoming| incoming.state == State::Open && incoming.until <= now;
            all.iter().filter(|(_, incoming)| late(incoming)).map(|(id, _)| *id).collect()
        };
        if !overdue.is_empty() {
            self.end("it was not finished in its time", |id, _| overdue.contains(&id));
        }
    }

    fn tidy(&self, all: &mut HashMap<u64, Incoming>, now: Instant) {
        all.retain(|_, incoming| {
            let free = incoming.readers == 0 || incoming.until <= now;
            if !incoming.is_settled() || !free {
                return true;
            }
            // From here on, blocks that were kept are like any other.
            self.give_places_back(incoming.writer, &mut incoming.blocks);
            incoming.known_until > now
        });
        if all.len() > TAKEN_MAX + OUTCOMES_MAX {
            forget_oldest(all);
        }
    }

    fn give_places_back(&self, writer: OwnerId, blocks: &mut [Block]) {
        for block in blocks {
            if let Place::Reserved(place) = std::mem::replace(&mut block.place, Place::GivenBack) {
                let _ = self.store.abort(writer, &[place.id]);
            }
        }
    }

    /// The hand-over of a tenant's request, as soon as it has begun: its newest, if there were several. Returns `None` if `until`
    /// came first.
    pub(crate) fn arrival(
        self: &Arc<Self>,
        tenant: u16,
        request: u64,
        until: Instant,
    ) -> Result<Option<Arrival>, String> {
        enum Found {
            Arrival(Arrival),
            Failed(String),
        }
        let found = self.wait_for(until, |all| {
            let wanted = (Keep::All { request }, tenant);
            let of_request =
                all.iter_mut().filter(|(_, incoming)| (incoming.keep, incoming.tenant) == wanted);
            let (id, incoming) = of_request.max_by_key(|(_, incoming)| incoming.begun)?;
            if let State::Failed(reason) = &incoming.state {
                return Some(Found::Failed(reason.clone()));
            }
            for block in incoming.blocks.iter_mut().filter(|block| matches!(block.place, Place::GivenBack)) {
                match self.hold_stored(&block.meta) {
                    Ok(held) => block.place = Place::Held(held),
                    Err(error) => return Some(Found::Failed(error.to_string())),
                }
            }
            incoming.readers += 1;
            let blocks = incoming.blocks.iter().filter_map(Block::arriving).collect();
            let Incoming { layers, until, begun, .. } = *incoming;
            Some(Found::Arrival(Arrival {
                receiving: Arc::clone(self),
                id: *id,
                layers,
                until,
                begun,
                blocks,
            }))
        });
        match found {
            Some(Found::Arrival(arrival)) => Ok(Some(arrival)),
            Some(Found::Failed(reason)) => Err(reason),
            None => Ok(None),
        }
    }

    fn wait(
        &self,
        until: Instant,
        mut look: impl FnMut(&HashMap<u64, Incoming>) -> Option<Waited>,
    ) -> Waited {
        self.wait_for(until, |all| look(all)).unwrap_or(Waited::NotYet)
    }

    /// What `look` finds, as soon as it does. Returns `None` when `until` comes first or the host stops.
    fn wait_for<R>(
        &self,
        until: Instant,
        mut look: impl FnMut(&mut HashMap<u64, Incoming>) -> Option<R>,
    ) -> Option<R> {
        let mut all = self.incoming();
        loop {
            if let Some(found) = look(&mut all) {
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.is_set() {
                return None;
            }
            self.changed.wait_for(&mut all, left);
        }
    }

    /// Called when the host stops: wakes everybody who waits.
    pub(crate) fn wake(&self) {
        drop(self.incoming());
        self.changed.notify_all();
    }

    fn incoming(&self) -> MutexGuard<'_, HashMap<u64, Incoming>> {
        self.incoming.lock()
    }
}

/// What becomes of a hand-over with these outcomes, and what its sender is told. `damaged` says that a block was not intact.
fn end_of(keep: Keep, damaged: bool, outcomes: Vec<Copied>) -> (State, Reply) {
    match keep {
        Keep::All { .. } if damaged => {
            let reason = "a block did not arrive with the checksum that its writer gave".to_owned();
            (State::Failed(reason), Reply::Copied { outcomes })
        }
        Keep::All { .. } if outcomes.contains(&Copied::Enough) => {
            let reason = "a block was removed while it was handed over".to_owned();
            (State::Failed(reason), Reply::Copied { outcomes })
        }
        Keep::All { .. } if outcomes.contains(&Copied::Failed) => {
            let reason = "a block's place was taken back before it could be kept".to_owned();
            (State::Failed(reason.clone()), Reply::Refused { reason })
        }
        Keep::All { .. } | Keep::Each => (State::Kept(outcomes.clone()), Reply::Copied { outcomes }),
    }
}

fn taken(id: u64) -> String {
    format!("hand-over {id:016x} is under way already; begin another under a new number")
}

/// Keeps the newest outcomes of those that nobody reads.
fn forget_oldest(all: &mut HashMap<u64, Incoming>) {
    let ended = all.iter().filter(|(_, incoming)| incoming.is_settled() && incoming.readers == 0);
    let mut ended: Vec<(Instant, u64)> = ended.map(|(&id, incoming)| (incoming.known_until, id)).collect();
    ended.sort_unstable();
    let surplus = ended.len().saturating_sub(OUTCOMES_MAX);
    ended[..surplus].iter().for_each(|(_, id)| drop(all.remove(id)));
}
