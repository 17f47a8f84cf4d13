//! Two engines, one of which computes a block and hands it over to the other's host, layer by layer, where it is read as it comes.
//!
//! Engines map their host's pool, so they are on its machine, but processes of their own: each stands still and is gone without it.
//! What the host's connection would do for them, they do as threads of the host.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_cluster::handover::{Arrival, HandOverError, HandingOver, Waited};
use kvasir_cluster::push::Pushed;
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, Chance};
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};
use kvasir_protocol::wire::Outcome;
use kvasir_store::dram::OwnerId;

use crate::client::COPIES;
use crate::host::{Host, RESERVATION};
use crate::model::{By, Model, Run, TENANTS, content, is_right, key, size, tenant};
use crate::plan::HandOverPlan;
use crate::violated;

/// All sizes of blocks are a multiple of it.
const LAYERS: u32 = 4;
/// Most layers take less.
const LAYER_MS: u64 = 200;
/// One of so many takes so long that its place may be taken back meanwhile.
const STANDS_STILL: u64 = 16;
/// One of so many engines gives up before it is done.
const GIVES_UP: u64 = 10;
/// How long a reader waits for the blocks to begin to come.
const PATIENCE: Duration = Duration::from_secs(3);
const STEP: Duration = Duration::from_millis(50);
/// Blocks of one push.
const PUSHED: usize = 8;

/// A process of a host, as what runs beside it sees it.
pub(crate) struct At {
    pub(crate) host: Arc<Host>,
    pub(crate) run: Run,
    pub(crate) model: Arc<Mutex<Model>>,
}

impl At {
    /// Does something as a thread of that process. `None`: it has ended.
    pub(crate) fn ask<T>(&self, call: impl FnOnce(&Host) -> T) -> Option<T> {
        let has_ended = self.model().ended.contains(&self.run);
        (!has_ended).then(|| world::on_host(self.run.host, || call(&self.host)))
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At most so many of the blocks that are promised.
    pub(crate) fn some_known(&self, count: usize, chance: &mut Chance) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.model().known().collect();
        while blocks.len() > count {
            blocks.swap_remove(chance.below(blocks.len() as u64) as usize);
        }
        blocks
    }

    pub(crate) fn did(&self, what: &'static str) {
        self.model().counts.fault(what);
    }
}

/// Computes a block at a host, and hands it over to another one.
pub(crate) struct Producer {
    pub(crate) at: At,
    pub(crate) plan: HandOverPlan,
    pub(crate) chance: Chance,
}

impl Producer {
    pub(crate) fn work(mut self) {
        let Some((n, again)) = self.block() else { return };
        let finished = self.hand_over(n, if again { By::Another } else { By::First });
        if again {
            let mut model = self.at.model();
            let clocks_differ = model.clocks_differ;
            let promise = model.promise(n);
            promise.putting -= 1;
            promise.out_of_order |= clocks_differ;
        } else if finished {
            let asked = self.at.ask(|host| host.cluster.replicate(&[key(n)], COPIES));
            if asked.is_some_and(|all| all == [Outcome::Done]) {
                self.at.model().acknowledge(n, self.at.run);
            }
        }
    }

    /// The block, which nobody else puts; every third time one that has been put, as engines do that compute the same.
    fn block(&mut self) -> Option<(u32, bool)> {
        let again = self.chance.below(3) == 0;
        let mut model = self.at.model();
        let known: Vec<u32> = if again { model.known().collect() } else { vec![self.plan.block] };
        let n = *known.get(self.chance.below(known.len().max(1) as u64) as usize)?;
        let promise = model.promise(n);
        promise.put_too.insert(self.plan.to);
        if again {
            promise.put_too.insert(self.plan.from);
            promise.putting += 1;
        }
        Some((n, again))
    }

    /// Whether both hosts have it.
    fn hand_over(&mut self, n: u32, by: By) -> bool {
        let bytes = content(n, by);
        let meta = BlockMeta { tenant: tenant(n), ..BlockMeta::single(key(n), bytes.len() as u32) };
        let (owner, to) = (self.at.host.store.new_client(), Host::name(self.plan.to));
        let begun =
            self.at.ask(|host| host.cluster.hand_over(owner, self.plan.block.into(), &to, &[meta], LAYERS));
        let handing = match begun {
            Some(Ok(handing)) => handing,
            Some(Err(error)) => {
                world::note(&format!("does not begin to hand block {n} over: {error}"));
                return false;
            }
            None => return false,
        };
        self.at.did("hand-overs");
        // What is its host's goes with that, and is dropped by nobody else.
        let mut handing = ManuallyDrop::new(handing);
        let is_done = self.compute(n, &bytes, &mut handing);
        world::note(&format!("hands block {n} over: {}", if is_done { "done" } else { "broken off" }));
        self.at.ask(|host| end(host, owner, handing));
        if is_done {
            self.at.did("hand-overs finished");
        }
        is_done
    }

    fn compute(&mut self, n: u32, bytes: &[u8], handing: &mut HandingOver) -> bool {
        let place = handing.places()[0];
        let layer_bytes = bytes.len() / LAYERS as usize;
        let first = self.chance.below(LAYERS.into()) as u32;
        for layer in (0..LAYERS).map(|layer| (first + layer) % LAYERS) {
            if self.chance.below(GIVES_UP * u64::from(LAYERS)) == 0 {
                return false;
            }
            thread::sleep(self.time());
            let at = layer as usize * layer_bytes;
            if place.to_fill {
                let mapping = self.at.host.store.pool().mapping();
                mapping.write(place.offset + at as u64, &bytes[at..][..layer_bytes]);
            }
            if !self.step(n, handing, |handing| handing.layer_done(layer)) {
                return false;
            }
        }
        self.step(n, handing, |handing| handing.finish(&[checksum(bytes)]))
    }

    fn step(
        &self,
        n: u32,
        handing: &mut HandingOver,
        step: impl FnOnce(&mut HandingOver) -> Result<(), HandOverError>,
    ) -> bool {
        let done = self.at.ask(|_| step(handing));
        if let Some(Err(error)) = &done {
            world::note(&format!("the hand-over of block {n} breaks off: {error}"));
        }
        matches!(done, Some(Ok(())))
    }

    /// How long it computes: a layer, or until after its place is taken back.
    fn time(&mut self) -> Duration {
        if self.chance.below(STANDS_STILL) == 0 {
            return RESERVATION / 2
                + Duration::from_millis(self.chance.below(RESERVATION.as_millis() as u64));
        }
        Duration::from_millis(self.chance.below(LAYER_MS))
    }
}

/// The engine writes no more: its host gives back what is left of the hand-over.
fn end(host: &Host, owner: OwnerId, handing: ManuallyDrop<HandingOver>) {
    let reservations = handing.reservations();
    drop(ManuallyDrop::into_inner(handing));
    let _ = host.store.abort(owner, &reservations);
    host.store.release_owner(owner, host.clock.now_ms());
}

/// Reads the block that is handed over, at the host that it comes to.
pub(crate) struct Reader {
    pub(crate) at: At,
    pub(crate) plan: HandOverPlan,
    pub(crate) chance: Chance,
}

impl Reader {
    pub(crate) fn work(mut self) {
        let Some(arrival) = self.arrival() else { return };
        // Of the host, as the producer's is.
        let arrival = ManuallyDrop::new(arrival);
        self.read(&arrival);
        self.at.ask(|_| drop(ManuallyDrop::into_inner(arrival)));
    }

    /// The hand-over, whosever block it is.
    fn arrival(&self) -> Option<Arrival> {
        let (request, until) = (self.plan.block.into(), Instant::now() + PATIENCE);
        let mut tenants = TENANTS.into_iter().cycle();
        while Instant::now() < until {
            let (tenant, step) = (tenants.next()?, Instant::now() + STEP);
            match self.at.ask(|host| host.cluster.arrival(tenant, request, step))? {
                Ok(Some(arrival)) => return Some(arrival),
                Ok(None) => {}
                Err(error) => {
                    world::note(&format!("nothing arrives: {error}"));
                    return None;
                }
            }
        }
        None
    }

    fn read(&mut self, arrival: &Arrival) {
        for layer in 0..LAYERS {
            if self.at.ask(|_| arrival.wait(Some(layer), arrival.until())) != Some(Waited::Here) {
                return;
            }
            self.compare(arrival, layer);
            thread::sleep(Duration::from_millis(self.chance.below(LAYER_MS)));
        }
        if self.at.ask(|_| arrival.wait(None, arrival.until())) == Some(Waited::Here) {
            (0..LAYERS).for_each(|layer| self.compare(arrival, layer));
        }
    }

    /// What has come is right, until its place may go to others.
    fn compare(&self, arrival: &Arrival, layer: u32) {
        let mapping = self.at.host.store.pool().mapping();
        for block in arrival.blocks() {
            let n = self.number(block.key);
            let len = size(n) / LAYERS as usize;
            let at = layer as usize * len;
            let bytes = mapping.bytes(block.offset + at as u64, len as u64);
            let is_right = bytes.is_some_and(|bytes| is_right(n, at..at + len, bytes));
            if !is_right && Instant::now() < arrival.until() {
                violated(&format!("layer {layer} of block {n} is read with wrong bytes as it comes"));
            }
        }
        self.at.did("layers read as they come");
    }

    fn number(&self, of: BlockKey) -> u32 {
        let number = self.at.model().number(of);
        number.unwrap_or_else(|| violated("a block is handed over that nobody has put"))
    }
}

/// Pushes some of the blocks that were acknowledged from a host to another, as a thread of the first.
pub(crate) fn push(at: &At, to: usize, mut chance: Chance) {
    let blocks = at.some_known(PUSHED, &mut chance);
    for &n in &blocks {
        at.model().promise(n).put_too.insert(to);
    }
    let keys: Vec<_> = blocks.iter().map(|&n| key(n)).collect();
    match at.host.cluster.push(&Host::name(to), &keys) {
        Ok(all) => {
            world::note(&format!("pushes blocks {blocks:?} to host-{to}: {all:?}"));
            all.iter().filter(|&&pushed| pushed == Pushed::Done).for_each(|_| at.did("blocks pushed"));
        }
        Err(error) => world::note(&format!("pushes no blocks: {error}")),
    }
}
