//! Loads and saves of blocks that lie in a GPU's memory.
//!
//! On the host's own machine its pool is registered with the GPU's driver, once for all connections, and blocks go straight
//! between the pool and the GPU. Checksums are taken, and labels written and read, by this side's thread in the pool: for a
//! save after its bytes have arrived there, for a load before they leave, so that what does not match stays where it was. Where
//! the pool cannot be registered, and over TCP, blocks go through page-locked memory of this process.
//!
//! **Order.** A job's thread waits for the engine's stream before it asks the host for anything: that may take any time, and
//! what a host lends or reserves has a limit of its own. From then on the copies are all that is waited for, and they are waited for before a
//! lease is given back, a place is committed or given up, or the job is reported. A lease or place that has run out
//! meanwhile is noticed afterwards, as it is on the host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use kvasir_gpu::memory::{CudaError, Device, DevicePlan, Event, Pinned, Room, SideStream};
use kvasir_memory::host::Mapping;
use kvasir_memory::region::Region;
use kvasir_memory::shared::Shared;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::wire::Placed;

use super::block::{Block, Local};
use super::memory::JobMemory;
use super::options::Counts;
use super::scatter::{Fetched, check_labels};
use super::{Client, ClientError, Label, Put};
use crate::sync::Mutex;

/// Bytes of page-locked memory that a thread has for blocks that cannot go straight; of one block, if that is larger.
const ROOM_BYTES: usize = 8 << 20;
/// How long a thread sleeps between two looks at an engine's stream, at first and at most.
const LOOK: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// Blocks of an engine in a GPU's memory, and when it is done with them.
#[derive(Clone, Debug)]
pub struct DeviceBlocks {
    pub plan: Arc<DevicePlan>,
    /// The point in the engine's work before which it writes to the blocks that are saved, or uses those that will be
    /// filled: [`DevicePlan::mark`].
    pub ready: Arc<Event>,
}

impl From<DeviceBlocks> for JobMemory {
    fn from(blocks: DeviceBlocks) -> Self {
        Self::Device(blocks)
    }
}

impl DeviceBlocks {
    /// See [`JobMemory::wait_until_ready`]. It looks again and again, because a wait of the driver cannot be given up.
    pub(super) fn wait_until_ready(
        &self,
        until: Instant,
        is_closed: impl Fn() -> bool,
    ) -> Result<(), ClientError> {
        let mut pause = LOOK.0;
        while !self.ready.is_complete().map_err(failed)? && !is_closed() {
            if Instant::now() >= until {
                return Err(ClientError::StreamLate { device: self.plan.device().number() });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LOOK.1);
        }
        Ok(())
    }
}

fn failed(source: CudaError) -> ClientError {
    ClientError::Gpu { source }
}

/// A host's pool that a GPU reads and writes itself. It stays mapped until the driver has forgotten it.
struct Pool {
    mapping: Arc<Mapping>,
    _pinned: Pinned,
}

/// The pools that drivers of GPUs know, of all connections to one host.
pub(super) struct Pools {
    known: Mutex<Vec<Known>>,
    counts: Arc<Counts>,
}

struct Known {
    device: u16,
    /// The run of the host that has it. Every connection to that run maps the same pool.
    boot: u64,
    /// `None` means that it was refused, and is not tried again.
    pool: Option<Arc<Pool>>,
}

impl Pools {
    pub(super) fn new(counts: &Arc<Counts>) -> Self {
        Self { known: Mutex::default(), counts: Arc::clone(counts) }
    }

    /// The pool of a client's host. Returns `None` where the GPU does not reach it. The first to ask waits while it is registered, and
    /// the others with it.
    fn of(&self, client: &Client, device: &Arc<Device>) -> Option<Arc<Pool>> {
        let local = client.local.as_ref()?;
        let mut known = self.known.lock();
        let number = device.number();
        if let Some(known) = known.iter().find(|known| known.device == number && known.boot == client.boot) {
            return known.pool.clone();
        }
        // Nobody asks again about a run that is over. Jobs that still use its pool keep it.
        known.retain(|known| known.boot == client.boot);
        let region = Region::of_mapping(Arc::clone(&local.mapping));
        let pool = match Pinned::new(device, &region) {
            Ok(pinned) => Some(Arc::new(Pool { mapping: Arc::clone(&local.mapping), _pinned: pinned })),
            Err(error) => {
                let _ = self.counts.unregistered.set(error.to_string());
                None
            }
        };
        known.push(Known { device: number, boot: client.boot, pool: pool.clone() });
        pool
    }

    /// Has the drivers forget all pools. Jobs no longer run.
    pub(super) fn close(&self) {
        self.known.lock().clear();
    }
}

/// What a thread copies with: a stream for each GPU.
pub(super) struct Hands {
    pools: Arc<Pools>,
    streams: BTreeMap<u16, Hand>,
}

struct Hand {
    stream: SideStream,
    /// Made when it is needed.
    room: Option<Room>,
}

impl Hands {
    pub(super) fn of(pools: &Arc<Pools>) -> Self {
        Self { pools: Arc::clone(pools), streams: BTreeMap::new() }
    }

    fn of_device(&mut self, device: &Arc<Device>) -> Result<&mut Hand, ClientError> {
        use std::collections::btree_map::Entry;
        match self.streams.entry(device.number()) {
            Entry::Occupied(hand) => Ok(hand.into_mut()),
            Entry::Vacant(none) => {
                let stream = SideStream::new(device).map_err(failed)?;
                Ok(none.insert(Hand { stream, room: None }))
            }
        }
    }

    /// [`Client::load_labelled`] into a GPU's memory.
    pub(super) fn load(
        &mut self,
        client: &Client,
        plan: &DevicePlan,
        blocks: &[(BlockKey, usize)],
        labels: &[Label],
        class: u16,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        check_labels(labels, blocks.len())?;
        check_blocks(plan, blocks.iter().map(|(_, block)| *block))?;
        let pool = self.pools.of(client, plan.device());
        let hand = self.of_device(plan.device())?;
        match (&client.local, pool) {
            (Some(local), Some(pool)) => {
                client.load_straight(local, &pool, &mut hand.stream, plan, (blocks, labels), class)
            }
            _ => hand.load_by_way_of_room(client, plan, blocks, labels, class),
        }
    }

    /// [`Client::save_labelled`] out of a GPU's memory.
    pub(super) fn save(
        &mut self,
        client: &Client,
        plan: &DevicePlan,
        blocks: &[(BlockMeta, usize)],
        labels: &[Label],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        check_labels(labels, blocks.len())?;
        check_blocks(plan, blocks.iter().map(|(_, block)| *block))?;
        let pool = self.pools.of(client, plan.device());
        let hand = self.of_device(plan.device())?;
        match (&client.local, pool) {
            (Some(local), Some(pool)) => {
                client.save_straight(local, &pool, &mut hand.stream, plan, (blocks, labels))
            }
            _ => hand.save_by_way_of_room(client, plan, blocks, labels),
        }
    }
}

fn check_blocks(plan: &DevicePlan, mut numbers: impl Iterator<Item = usize>) -> Result<(), ClientError> {
    let blocks = plan.blocks();
    let outside = numbers.find(|&block| block >= blocks);
    outside.map_or(Ok(()), |block| Err(ClientError::NoBlock { block, blocks }))
}

impl Client {
    fn load_straight(
        &self,
        local: &Arc<Local>,
        pool: &Pool,
        stream: &mut SideStream,
        plan: &DevicePlan,
        (blocks, labels): (&[(BlockKey, usize)], &[Label]),
        class: u16,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        let keys: Vec<BlockKey> = blocks.iter().map(|(key, _)| *key).collect();
        let (lent, sums) = self.get_lent(local, &keys, class)?;
        let mut fetched: Vec<Fetched> = keys.iter().map(|_| Fetched::Missing).collect();
        let mut arrived = vec![Label::BLANK; labels.len()];
        // While one block is copied the next is compared.
        let good = (0..blocks.len()).filter_map(|at| {
            let (block, number) = (lent[at].as_ref()?, blocks[at].1);
            let label = labels.get(at).zip(arrived.get_mut(at));
            let (state, payload) = self.compare_lent(pool, block, sums[at], plan.block_bytes(number)?, label);
            fetched[at] = state;
            Some((number, payload?))
        });
        let copied = stream.scatter(plan, good);
        // What is asked from here on is asked after the last byte was read.
        fence(Ordering::Acquire);
        for (block, fetched) in lent.iter().zip(&mut fetched) {
            if let (Some(Err(error)), Fetched::Here(_)) = (block.as_ref().map(Block::bytes), &*fetched) {
                *fetched = Fetched::TooLate(error);
            }
        }
        // Only now, because it was the GPU that read them.
        drop(lent);
        self.report_damaged(&keys, &fetched);
        let loaded = self.loaded(blocks, |block| plan.block_bytes(block), (labels, &arrived), fetched);
        copied.map_err(failed).map(|()| loaded)
    }

    /// What a block that was lent is, and its payload in `pool` if that is what it should be. `label`: the one it should have,
    /// and where the one goes that it has.
    fn compare_lent<'p>(
        &self,
        pool: &'p Pool,
        block: &Block,
        sum: u64,
        payload_bytes: u32,
        label: Option<(&Label, &mut Label)>,
    ) -> (Fetched, Option<Shared<'p>>) {
        if let Err(error) = block.bytes() {
            return (Fetched::TooLate(error), None);
        }
        let label_bytes = if label.is_some() { Label::BYTES } else { 0 };
        if block.size() != payload_bytes.saturating_add(label_bytes) {
            return (Fetched::TooLarge(block.size()), None);
        }
        let Some(bytes) = block.offset().and_then(|at| pool.mapping.bytes(at, block.size().into())) else {
            return (Fetched::Missing, None);
        };
        if self.options.verify && bytes.checksum() != sum {
            return (Fetched::Damaged, None);
        }
        let fits = label.is_none_or(|(expected, arrived)| {
            bytes.after(payload_bytes as usize).copy_to(arrived.as_mut_bytes());
            expected.fault(arrived).is_none()
        });
        (Fetched::Here(block.size()), fits.then(|| bytes.first(payload_bytes as usize)))
    }

    fn save_straight(
        &self,
        local: &Local,
        pool: &Pool,
        stream: &mut SideStream,
        plan: &DevicePlan,
        (blocks, labels): (&[(BlockMeta, usize)], &[Label]),
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        let metas: Vec<BlockMeta> = blocks.iter().map(|(meta, _)| *meta).collect();
        self.check_batch(metas.len())?;
        let label_bytes = if labels.is_empty() { 0 } else { u64::from(Label::BYTES) };
        let payload = |at: usize| plan.block_bytes(blocks[at].1).map_or(0, u64::from);
        for (at, meta) in metas.iter().enumerate() {
            let len = payload(at) + label_bytes;
            if len != u64::from(meta.size) {
                return Err(ClientError::Size { len: len as usize, size: meta.size });
            }
        }
        // The host counts from later, so ours ends first.
        let until = Instant::now() + local.filling;
        let placed = self.reserve(&metas)?;
        let mut places = Vec::with_capacity(placed.len());
        for (at, placed) in placed.iter().enumerate() {
            if let Placed::At { offset, .. } = *placed {
                // All of it lies there, so its parts do.
                pool.mapping.bytes(offset, metas[at].size.into()).ok_or_else(|| self.misplaced())?;
                let place = pool.mapping.place(offset, payload(at)).ok_or_else(|| self.misplaced())?;
                places.push((blocks[at].1, place));
            }
        }
        // After that the places may soon be others'.
        let in_time = || Instant::now() < until && !local.is_dead();
        let gathered = if in_time() { stream.gather(plan, places).map(|()| true) } else { Ok(false) };
        let sums = placed.iter().enumerate().map(|(at, placed)| {
            let Placed::At { offset, .. } = *placed else { return None };
            if !matches!(gathered, Ok(true)) || !in_time() {
                return None;
            }
            let label = labels.get(at).map_or(&[][..], Label::as_bytes);
            pool.mapping.write(offset + payload(at), label);
            let sum = pool.mapping.bytes(offset, metas[at].size.into())?.checksum();
            in_time().then_some(sum)
        });
        let sums: Vec<Option<u64>> = sums.collect();
        let outcomes = self.commit(&placed, &sums);
        gathered.map_err(failed)?;
        Ok(metas.iter().zip(outcomes?).map(|(meta, outcome)| Put::of(meta, outcome)).collect())
    }
}

impl Hand {
    /// The stream, and page-locked room for some blocks of the plan.
    fn room(&mut self, plan: &DevicePlan) -> Result<(&mut SideStream, &Room), ClientError> {
        let block_bytes = plan.block_bytes(0).unwrap_or(0);
        let Self { stream, room } = self;
        // Another size belongs to another model, and is rare.
        let kept = room.take().filter(|room| room.plan().block_bytes(0) == Some(block_bytes));
        let kept = match kept {
            Some(kept) => kept,
            None => {
                let blocks = (ROOM_BYTES / (block_bytes as usize).max(1)).max(1);
                Room::new(plan.device(), block_bytes, blocks).map_err(failed)?
            }
        };
        Ok((stream, room.insert(kept)))
    }

    fn load_by_way_of_room(
        &mut self,
        client: &Client,
        plan: &DevicePlan,
        blocks: &[(BlockKey, usize)],
        labels: &[Label],
        class: u16,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        let (stream, room) = self.room(plan)?;
        let mut all = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(room.plan().blocks()) {
            let labels = labels.get(all.len()..all.len() + part.len()).unwrap_or_default();
            let there: Vec<_> = part.iter().enumerate().map(|(at, (key, _))| (*key, at)).collect();
            let loaded = client.load_labelled(room.plan(), &there, labels, class)?;
            let good = part.iter().zip(&loaded).enumerate().filter(|(_, (_, here))| matches!(here, Ok(true)));
            let good = good.filter_map(|(at, (&(_, block), _))| Some((block, room.bytes(at)?)));
            stream.scatter(plan, good).map_err(failed)?;
            all.extend(loaded);
        }
        Ok(all)
    }

    fn save_by_way_of_room(
        &mut self,
        client: &Client,
        plan: &DevicePlan,
        blocks: &[(BlockMeta, usize)],
        labels: &[Label],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        let (stream, room) = self.room(plan)?;
        let mut all = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(room.plan().blocks()) {
            let labels = labels.get(all.len()..all.len() + part.len()).unwrap_or_default();
            let places =
                part.iter().enumerate().filter_map(|(at, &(_, block))| Some((block, room.place(at)?)));
            stream.gather(plan, places).map_err(failed)?;
            let there: Vec<_> = part.iter().enumerate().map(|(at, (meta, _))| (*meta, at)).collect();
            all.extend(client.save_labelled(room.plan(), &there, labels)?);
        }
        Ok(all)
    }
}
