//! The HBM tier: blocks in a GPU's memory.
//!
//! One allocation of the GPU holds the blocks; which are there is known on the host. Two threads, one per direction,
//! work batches off with a stream each, so that both directions of the bus are in use at once. Bytes in memory that the
//! driver knows ([`Pinned`], such as a registered DRAM pool) go straight; others pass
//! through page-locked buffers. A full tier refuses, and what leaves it is decided above; or its oldest blocks make room
//! ([`OnFull`]).

mod put;
mod worker;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};

use self::put::Putter;
use self::worker::{Job, Worker};
use crate::memory::{CudaError, Device, DevicePool, DeviceRange, Lane, Pinned};
use kvasir_memory::host::HostPool;
use kvasir_memory::region::Region;
use kvasir_protocol::block::BlockKey;
use kvasir_store::config::OnFull;
use kvasir_store::counters::Counters;
use kvasir_store::departures::Departures;
use kvasir_store::resident::Resident;
use kvasir_store::store::{
    BlockStore, Capabilities, Get, GetDone, Pending, Put, PutDone, Tier, TierError, TierStats,
};
use kvasir_store::units;
use serde::{Deserialize, Serialize};

const NAME: &str = "hbm";
/// Batches that wait for each direction; more are refused with [`TierError::Busy`].
const BATCHES_MAX: usize = 1024;

/// Settings of a host's tier in the memory of a GPU: for what leaves the DRAM pool, nearer than a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HbmConfig {
    /// Bytes of the GPU's memory that hold blocks, taken at the start. `0B`: a host has no such tier.
    #[serde(with = "units::size")]
    pub capacity_bytes: u64,
    /// Which GPU: the N of `cuda:N`. They count in order of PCI address among those that `CUDA_VISIBLE_DEVICES` leaves visible.
    pub device: u16,
}

/// Why the tier could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("no thread for the HBM tier: {0}; raise the limit on threads")]
    Thread(#[from] io::Error),
}

/// A tier in a GPU's memory. Dropping it completes what is under way.
pub struct HbmStore {
    shared: Arc<Shared>,
    puts: Queue<Put, PutDone>,
    gets: Queue<Get, GetDone>,
    /// Registered until nothing is under way any more.
    _pinned: Option<Pinned>,
}

struct Shared {
    pool: Arc<DevicePool>,
    resident: Resident<DeviceRange>,
    counters: Counters,
}

impl Shared {
    fn block_bytes_max(&self) -> u64 {
        self.pool.bytes().min(u32::MAX.into())
    }
}

impl HbmStore {
    /// An empty tier of `capacity_bytes` on `device`, taken at once. It refuses what does not fit.
    ///
    /// # Errors
    /// The GPU has less memory free, or the system gives no thread.
    pub fn open(device: &Arc<Device>, capacity_bytes: u64) -> Result<Self, OpenError> {
        Self::with(device, capacity_bytes, OnFull::Refuse, None)
    }

    /// The tier below `dram`, empty, all of its memory taken at once. The pool is registered with the driver, so that blocks
    /// are copied straight from it. The oldest blocks make room.
    ///
    /// # Errors
    /// There is no such GPU, it has less memory free, the pool cannot be locked in memory, or the system gives no thread.
    pub fn below(dram: &Arc<HostPool>, config: &HbmConfig) -> Result<Self, OpenError> {
        let device = Device::open(config.device)?;
        let pinned = Pinned::new(&device, &Region::of_pool(Arc::clone(dram)))?;
        Self::with(&device, config.capacity_bytes, OnFull::Evict, Some(pinned))
    }

    fn with(
        device: &Arc<Device>,
        capacity_bytes: u64,
        on_full: OnFull,
        pinned: Option<Pinned>,
    ) -> Result<Self, OpenError> {
        let pool = DevicePool::open(device, capacity_bytes)?;
        let shared = Arc::new(Shared { pool, resident: Resident::default(), counters: Counters::default() });
        let worker = || Ok::<_, CudaError>(Worker { shared: shared.clone(), lane: Lane::new(device)? });
        let (putter, getter) = (Putter::new(worker()?, on_full), worker()?);
        Ok(Self {
            puts: Queue::new("kvasir-hbm-put", move |jobs| putter.run(jobs))?,
            gets: Queue::new("kvasir-hbm-get", move |jobs| getter.get_all(jobs))?,
            shared,
            _pinned: pinned,
        })
    }

    /// The memory that the blocks are in.
    pub fn pool(&self) -> &Arc<DevicePool> {
        &self.shared.pool
    }
}

impl BlockStore for HbmStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: Tier::Hbm,
            name: NAME,
            durable: false,
            block_bytes_max: self.shared.block_bytes_max(),
            capacity_bytes: Some(self.shared.pool.bytes()),
        }
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        self.puts.submit(batch, |put, error| PutDone { buffer: put.buffer, outcome: Err(error) })
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        self.gets.submit(batch, |get, error| GetDone { buffer: get.buffer, outcome: Err(error) })
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        keys.iter().map(|&key| Some(self.shared.resident.find(key)?.loaded.meta.size)).collect()
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        // A get under way holds the block, so its memory is free only after that.
        Pending::ready(keys.into_iter().map(|key| Ok(self.shared.resident.remove(key).is_some())).collect())
    }

    fn note_departures(&self, departures: &Arc<Departures>) {
        self.shared.resident.note_departures(departures);
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    fn stats(&self) -> TierStats {
        let Shared { pool, resident, counters } = &*self.shared;
        let (blocks, block_bytes) = (resident.blocks(), resident.block_bytes());
        let used_bytes = pool.bytes() - pool.free_bytes();
        TierStats { blocks, block_bytes, used_bytes, ..counters.totals() }
    }
}

/// The batches of one direction, and the thread that works them off.
struct Queue<T, D> {
    /// `None` while the queue ends.
    sender: Option<SyncSender<Job<T, D>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static, D: Send + 'static> Queue<T, D> {
    fn new(name: &str, run: impl FnOnce(Receiver<Job<T, D>>) + Send + 'static) -> io::Result<Self> {
        let (sender, jobs) = sync_channel(BATCHES_MAX);
        let thread = thread::Builder::new().name(name.into()).spawn(move || run(jobs))?;
        Ok(Self { sender: Some(sender), thread: Some(thread) })
    }

    fn submit(&self, batch: Vec<T>, refuse: impl Fn(T, TierError) -> D) -> Pending<Vec<D>> {
        let (completion, pending) = Pending::new();
        let job = Job { batch, completion };
        let (job, error) = match self.sender.as_ref().map(|sender| sender.try_send(job)) {
            Some(Ok(())) => return pending,
            Some(Err(TrySendError::Full(job))) => (job, TierError::Busy { tier: NAME, limit: BATCHES_MAX }),
            Some(Err(TrySendError::Disconnected(job))) => (job, TierError::Closed { tier: NAME }),
            // This happens only while the queue is dropped, when nobody can call it.
            None => unreachable!("a queue has its sender until it is dropped"),
        };
        let Job { batch, completion } = job;
        completion.done(batch.into_iter().map(|item| refuse(item, error.clone())).collect());
        pending
    }
}

impl<T, D> Drop for Queue<T, D> {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported where it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod gpu {
    use super::*;
    use crate::memory::gpu::careless::order;
    use cudarc::driver::sys::CUresult;
    use kvasir_memory::buffer::{Buffer, Source};
    use kvasir_protocol::block::{BlockMeta, checksum};
    use kvasir_store::config::DramConfig;
    use kvasir_store::conformance::{self, bytes_of, key};
    use kvasir_store::dram::{DramStore, OwnerId};
    use kvasir_store::store::Stored;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn conforms() {
        let device = Device::open(0).unwrap();
        for on_full in [OnFull::Refuse, OnFull::Evict] {
            conformance::check(|| Arc::new(HbmStore::with(&device, 32 << 20, on_full, None).unwrap()));
        }
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn the_oldest_blocks_make_room_if_asked_to() {
        const SIZE: u32 = 1 << 20;
        let device = Device::open(0).unwrap();
        let store = HbmStore::with(&device, 4 << 20, OnFull::Evict, None).unwrap();
        for n in 0..4 {
            assert_eq!(conformance::put(&store, n, SIZE), Ok(Stored::Stored));
        }
        // Removed and stored again: it is young now.
        assert_eq!(conformance::remove(&store, 0), Ok(true));
        assert_eq!(conformance::put(&store, 0, SIZE), Ok(Stored::Stored));
        assert_eq!(conformance::put(&store, 4, 2 * SIZE), Ok(Stored::Stored));
        assert_eq!([0, 1, 2, 3].map(|n| conformance::holds(&store, n, SIZE)), [true, false, false, true]);
        assert!(conformance::holds(&store, 4, 2 * SIZE));
        let refused = conformance::put(&store, 5, 5 * SIZE);
        assert!(matches!(refused, Err(TierError::TooLarge { .. })), "{refused:?}");
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn a_block_that_was_stored_again_does_not_go_in_place_of_its_predecessor() {
        const SIZE: u32 = 1 << 20;
        let store = HbmStore::with(&Device::open(0).unwrap(), 4 << 20, OnFull::Evict, None).unwrap();
        for n in 0..3 {
            assert_eq!(conformance::put(&store, n, SIZE), Ok(Stored::Stored));
        }
        let reading = store.shared.resident.find(key(0)).unwrap();
        assert_eq!(conformance::remove(&store, 0), Ok(true));
        assert_eq!(conformance::put(&store, 0, SIZE), Ok(Stored::Stored));
        assert_eq!(conformance::put(&store, 3, SIZE), Ok(Stored::Stored));
        assert_eq!([0, 1, 2, 3].map(|n| conformance::holds(&store, n, SIZE)), [true, false, true, true]);
        assert_eq!(store.stats().evicted, 1);
        drop(reading);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn nothing_goes_for_a_block_that_does_not_fit_in_its_place() {
        const SIZE: u32 = 1 << 20;
        let store = HbmStore::with(&Device::open(0).unwrap(), 4 << 20, OnFull::Evict, None).unwrap();
        for n in 0..4 {
            assert_eq!(conformance::put(&store, n, SIZE), Ok(Stored::Stored));
        }
        let reading = [1, 2, 3].map(|n| store.shared.resident.find(key(n)).unwrap());
        let refused = conformance::put(&store, 4, 2 * SIZE);
        assert!(matches!(refused, Err(TierError::Full { .. })), "{refused:?}");
        assert_eq!([0, 1, 2, 3].map(|n| conformance::holds(&store, n, SIZE)), [true; 4]);
        drop(reading);
        assert_eq!(conformance::put(&store, 4, 2 * SIZE), Ok(Stored::Stored));
        // The blocks that were being read had their turn first.
        assert_eq!([0, 1, 2, 3].map(|n| conformance::holds(&store, n, SIZE)), [true, false, false, true]);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn damage_on_the_gpu_is_a_miss() {
        let store = HbmStore::open(&Device::open(0).unwrap(), 16 << 20).unwrap();
        assert_eq!(conformance::put(&store, 1, 100_000), Ok(Stored::Stored));
        let block = store.shared.resident.find(key(1)).unwrap();
        let region = store.pool().region();
        region.range(block.bytes.offset() + 70_000, 1).unwrap().copy_in(&[!bytes_of(1, 100_000)[70_000]]);
        assert!(!conformance::holds(&store, 1, 100_000));
        assert_eq!((store.stats().corrupt, store.stats().blocks), (1, 0));
    }

    /// A refused copy and a refused event, on the way in and on the way out.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn what_the_driver_refuses_is_an_error_of_the_blocks_concerned() {
        let store = HbmStore::open(&Device::open(0).unwrap(), 16 << 20).unwrap();
        let size = 5 << 20;
        for (n, refused) in [(1, "cuMemcpyAsync"), (2, "cuEventRecord")] {
            for after in 0..2 {
                if !order(refused, after, CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
                    return;
                }
                let error = conformance::put(&store, n, size).expect_err("the copy was refused");
                assert!(matches!(error, TierError::Io { step: "write", .. }), "{error}");
                assert_eq!((store.stats().blocks, store.stats().used_bytes), (0, 0), "{refused}");
            }
            assert_eq!(conformance::put(&store, n, size), Ok(Stored::Stored));
            for after in 0..2 {
                assert!(order(refused, after, CUresult::CUDA_ERROR_OUT_OF_MEMORY));
                let found = conformance::get_all(&store, &[n], size as usize).remove(0);
                assert!(matches!(found, Err(TierError::Io { step: "read", .. })), "{refused}");
            }
            assert!(conformance::holds(&store, n, size), "a failed read costs no block");
            assert_eq!(conformance::remove(&store, n), Ok(true));
        }
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn blocks_come_straight_from_a_registered_pool() {
        let device = Device::open(0).unwrap();
        let config = DramConfig { pool_bytes: 8 << 20, blocks_max: 16, ..DramConfig::default() };
        let dram = Arc::new(DramStore::open(config).unwrap());
        let (size, bytes) = (3 << 20, bytes_of(1, 3 << 20));
        dram.put(OwnerId(0), &BlockMeta::single(key(1), size), &bytes, 0).unwrap();
        let buffer: Source = dram.hold(key(1), 0, 0).unwrap().into();
        let settings = HbmConfig { capacity_bytes: 16 << 20, device: 0 };
        let store = HbmStore::below(dram.pool(), &settings).unwrap();
        assert!(device.is_pinned(buffer.shared().as_ptr(), buffer.len()));
        let put = Put { meta: BlockMeta::single(key(1), size), checksum: checksum(&bytes), buffer };
        assert_eq!(store.put(vec![put]).wait().remove(0).outcome, Ok(Stored::Stored));
        let get = Get { key: key(1), buffer: Buffer::zeroed(size as usize) };
        assert!(store.get(vec![get]).wait().remove(0).buffer.bytes() == bytes);
    }
}
