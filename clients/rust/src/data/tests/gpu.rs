//! Blocks in the memory of a GPU: `cargo xtask test --gpu`. Where there is none the tests run on the software device
//! (`tests/cuda`), whose streams work late and whose freed memory ends it; a real driver takes no orders to fail, and there the
//! tests that need one say so and end.
#![expect(unsafe_code, reason = "what an engine does")]

mod early;
mod failures;

use kvasir_gpu::memory::paged::{PageMover, Pages, Path, Underway, Way};
use kvasir_gpu::memory::{DevicePool, Stream};
use kvasir_memory::layout::paged::Descriptor;
use kvasir_memory::region::Region;

use super::jobs::wait;
use super::*;

/// Of each layer.
const RUN: usize = 4096;
const LAYERS: usize = 3;
const SIZE: u32 = (LAYERS * RUN) as u32;

/// A GPU, memory of it that stands for an engine's cache, and the stream in which the engine computes.
struct Gpu {
    // First, so that it waits for its work before the memory goes.
    late: Vec<Underway>,
    compute: Stream,
    /// Made when the engine computes: that takes a while.
    mover: Option<PageMover>,
    cache: Region,
    blocks: usize,
    device: Arc<Device>,
}

impl Gpu {
    /// Each layer keeps all blocks one behind the other.
    fn new(blocks: usize) -> Self {
        let device = Device::open(0).unwrap();
        let cache = region(&device, LAYERS * blocks * RUN);
        let compute = Stream::new(&device).unwrap();
        Self { late: Vec::new(), compute, mover: None, cache, blocks, device }
    }

    /// While it exists, the cache stays.
    fn plan(&self) -> Arc<DevicePlan> {
        let base = self.cache.base().as_ptr().expose_provenance();
        let layer = |n| Run { addr: base + n * self.blocks * RUN, len: RUN, stride: RUN };
        let runs: Vec<Run> = (0..LAYERS).map(layer).collect();
        // SAFETY: the runs lie in the cache, which the tests keep until the jobs are gone; no test names a block in two jobs at
        // once, or gives the GPU work on it after the job.
        Arc::new(unsafe { DevicePlan::new(&self.device, &runs, self.blocks) }.unwrap())
    }

    /// All blocks, when what the engine has begun is done.
    fn ready(&self, plan: &Arc<DevicePlan>) -> DeviceBlocks {
        // SAFETY: the stream is alive.
        let ready = unsafe { plan.mark(self.compute.handle()) }.unwrap();
        DeviceBlocks { plan: Arc::clone(plan), ready: Arc::new(ready) }
    }

    fn set(&self, block: usize, bytes: &[u8]) {
        for (layer, run) in bytes.chunks(RUN).enumerate() {
            let at = (layer * self.blocks + block) * RUN;
            assert_eq!(self.cache.range(at as u64, RUN as u64).unwrap().copy_in(run), RUN);
        }
    }

    fn get(&self, block: usize) -> Vec<u8> {
        let mut bytes = vec![0; LAYERS * RUN];
        for (layer, run) in bytes.chunks_mut(RUN).enumerate() {
            let at = (layer * self.blocks + block) * RUN;
            assert_eq!(self.cache.range(at as u64, RUN as u64).unwrap().copy_out(run), RUN);
        }
        bytes
    }

    /// The engine begins to compute: it writes to all of its cache many times, and in the end what `blocks` holds. That takes
    /// some tens of milliseconds.
    fn compute(&mut self, blocks: &[Vec<u8>]) {
        let len = (LAYERS * self.blocks * RUN) as u64;
        let [stale, fresh] = [0, 1].map(|_| region(&self.device, len as usize));
        stale.whole().unwrap().copy_in(&vec![0xbd; len as usize]);
        for (n, bytes) in blocks.iter().enumerate() {
            for (layer, run) in bytes.chunks(RUN).enumerate() {
                let at = (layer * self.blocks + n) * RUN;
                fresh.range(at as u64, RUN as u64).unwrap().copy_in(run);
            }
        }
        let cache = self.cache.clone();
        let times = if failures::software().is_some() {
            400
        } else {
            // To fill that memory waits for the GPU, so this comes after it. More copies would wait for room in its queue.
            self.compute_elsewhere();
            1
        };
        for from in std::iter::repeat_n(&stale, times).chain([&fresh]) {
            self.copy(from, &cache, len);
        }
    }

    /// What keeps a GPU busy for as long: it moves some terabytes in a second.
    fn compute_elsewhere(&mut self) {
        const LEN: u64 = 1 << 30;
        let [from, to] = [0, 1].map(|_| region(&self.device, LEN as usize));
        (0..50).for_each(|_| self.copy(&from, &to, LEN));
    }

    /// Begins a copy in the engine's stream.
    fn copy(&mut self, from: &Region, to: &Region, len: u64) {
        let all = Descriptor {
            layer: 0,
            region: 0,
            engine_offset: 0,
            block_offset: 0,
            run_bytes: len,
            rows: 1,
            engine_stride: 0,
            block_stride: 0,
        };
        let mover = self.mover.get_or_insert_with(|| PageMover::new(&self.device).unwrap());
        let block = to.range(0, len).unwrap();
        let pages = Pages { engine: std::slice::from_ref(from), block: &block, descriptors: &[all] };
        self.late.push(mover.begin_by(Path::Copies2d, &self.compute, pages, Way::Gather).unwrap());
    }
}

fn region(device: &Arc<Device>, bytes: usize) -> Region {
    DevicePool::open(device, bytes as u64).unwrap().region()
}

fn ours() -> Namespace {
    Namespace::new([7; 32])
}

fn named(n: u64) -> (BlockMeta, Label) {
    let hash = n.to_le_bytes();
    (BlockMeta::single(ours().key(&hash), SIZE + Label::BYTES), ours().label(&hash, SIZE))
}

/// Blocks `first` and following of memory, under the names `names`.
fn saves(names: std::ops::Range<u64>, first: usize) -> (Vec<(BlockMeta, usize)>, Vec<Label>) {
    let block = |(at, n)| {
        let (meta, label) = named(n);
        ((meta, first + at), label)
    };
    names.enumerate().map(block).unzip()
}

fn loads(names: std::ops::Range<u64>, first: usize) -> (Vec<(BlockKey, usize)>, Vec<Label>) {
    let (blocks, labels) = saves(names, first);
    (blocks.into_iter().map(|(meta, block)| (meta.key, block)).collect(), labels)
}

fn started(endpoint: &Endpoint, options: &Options) -> Jobs {
    // One thread each, so that a test knows which of them meets what.
    let load_time = Duration::from_secs(60);
    let patient = JobOptions { load_threads: 1, save_threads: 1, load_time, ..JobOptions::default() };
    Jobs::start(endpoint, options, patient).unwrap()
}

fn save(jobs: &Jobs, memory: impl Into<JobMemory>, names: std::ops::Range<u64>, first: usize) -> Done {
    let (blocks, labels) = saves(names, first);
    jobs.save_labelled(1, memory, blocks, labels).unwrap();
    wait(jobs, 1).remove(0)
}

fn load(jobs: &Jobs, memory: impl Into<JobMemory>, names: std::ops::Range<u64>, first: usize) -> Done {
    let (blocks, labels) = loads(names, first);
    jobs.load_labelled(2, memory, blocks, labels).unwrap();
    wait(jobs, 1).remove(0)
}

fn is_all(done: &Done, blocks: usize) {
    assert!(done.ok && done.error.is_none(), "{done:?}");
    assert_eq!((done.blocks.len(), done.bytes), (blocks, blocks as u64 * u64::from(SIZE)));
}

/// On the host and on the GPU a block is the same bytes, whichever of them stored it, in place and over TCP.
#[test]
#[ignore = "needs a CUDA device"]
fn blocks_of_a_gpu_and_of_the_host_are_the_same() {
    let host = Host::small();
    for (nth, endpoint) in [host.unix(), host.tcp()].iter().enumerate() {
        let options = options();
        let (gpu, base) = (Gpu::new(16), 100 * nth as u64);
        let plan = gpu.plan();
        (0..8).for_each(|n| gpu.set(n, &bytes_of(base + n as u64, SIZE)));
        let mut memory = vec![0; 16 * SIZE as usize];
        let pieces: Vec<_> = memory
            .chunks_mut(SIZE as usize)
            .map(|piece| (piece.as_mut_ptr().expose_provenance(), piece.len()))
            .collect();
        // SAFETY: the pieces lie in `memory`, which lives longer; nothing else touches it while jobs use it.
        let on_host = Arc::new(unsafe { Plan::of_pieces(&pieces) }.unwrap());
        let jobs = started(endpoint, &options);
        is_all(&save(&jobs, gpu.ready(&plan), base..base + 8, 0), 8);
        is_all(&load(&jobs, &on_host, base..base + 8, 3), 8);
        is_all(&save(&jobs, &on_host, base + 50..base + 54, 7), 4);
        is_all(&load(&jobs, gpu.ready(&plan), base + 50..base + 54, 9), 4);
        drop((jobs, on_host));
        let block = |n: usize| &memory[n * SIZE as usize..][..SIZE as usize];
        for n in 0..8 {
            assert!(block(3 + n) == bytes_of(base + n as u64, SIZE), "block {n} on the host");
        }
        for n in 0..4 {
            assert!(gpu.get(9 + n) == block(7 + n), "block {n} on the GPU");
        }
        assert!(options.counts.unregistered.get().is_none(), "{:?}", options.counts.unregistered);
    }
    host.until(|host| host.store.metrics().leases == 0);
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_is_not_the_block_that_was_asked_for_stays_off_the_gpu() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        let (gpu, client) = (Gpu::new(4), Client::connect(&endpoint, options()).unwrap());
        let plan = gpu.plan();
        let put = |n: u64, size: u32, label: Option<Label>| {
            let mut bytes = bytes_of(n, size);
            bytes.extend(label.iter().flat_map(Label::as_bytes));
            let meta = BlockMeta { size: bytes.len() as u32, ..named(n).0 };
            assert_eq!(client.put(&meta, &bytes).unwrap(), Put::Stored);
        };
        put(1, SIZE, Some(named(2).1));
        put(2, SIZE - 1, Some(named(2).1));
        put(3, SIZE, Some(named(3).1));
        (0..4).for_each(|n| gpu.set(n, &bytes_of(9, SIZE)));
        let options = options();
        let jobs = started(&endpoint, &options);
        let done = load(&jobs, gpu.ready(&plan), 1..5, 0);
        assert_eq!((done.ok, &done.blocks[..]), (false, &[false, false, true, false][..]), "{done:?}");
        assert!(
            matches!(done.error, Some(ClientError::OtherLabel { fault: LabelFault::Hash, .. })),
            "{done:?}"
        );
        assert_eq!(options.counts.label_failures.load(Ordering::Relaxed), 1);
        assert!(
            [0, 1, 3].iter().all(|&n| gpu.get(n) == bytes_of(9, SIZE)) && gpu.get(2) == bytes_of(3, SIZE)
        );
        client.remove(&[1, 2, 3].map(|n| named(n).0.key)).unwrap();
    }
    host.until(|host| host.store.metrics().leases == 0);
}

/// A block that was damaged in the pool.
#[test]
#[ignore = "needs a CUDA device"]
fn a_damaged_block_is_a_miss() {
    let host = Host::small();
    let (gpu, options) = (Gpu::new(2), options());
    let (plan, jobs) = (gpu.plan(), started(&host.unix(), &options));
    gpu.set(0, &bytes_of(1, SIZE));
    is_all(&save(&jobs, gpu.ready(&plan), 1..2, 0), 1);
    let client = Client::connect(&host.unix(), options.clone()).unwrap();
    let lent = client.get(&[named(1).0.key], 0).unwrap().remove(0).unwrap();
    // As a process of the same machine does that writes where it has no business.
    let place = lent.bytes().unwrap().as_ptr().cast_mut();
    // SAFETY: mapped for writing while the client lives, and nobody keeps references to it.
    unsafe { place.add(5000).write(place.add(5000).read() ^ 1) };
    drop(lent);
    gpu.set(1, &bytes_of(9, SIZE));
    let done = load(&jobs, gpu.ready(&plan), 1..2, 1);
    assert!(!done.ok && done.error.is_none(), "{done:?}");
    assert_eq!(options.counts.checksum_failures.load(Ordering::Relaxed), 1);
    assert!(gpu.get(1) == bytes_of(9, SIZE), "it was compared before it was copied");
}

#[test]
#[ignore = "needs a CUDA device"]
fn plans_of_what_is_not_the_gpus_are_refused() {
    let gpu = Gpu::new(4);
    let base = gpu.cache.base().as_ptr().expose_provenance();
    let memory = vec![0_u8; RUN];
    let check = |device: &Arc<Device>, addr, blocks, expected: &str| {
        let run = Run { addr, len: RUN, stride: RUN };
        // SAFETY: nothing of it is used.
        let plan = unsafe { DevicePlan::new(device, &[run], blocks) };
        let text = plan.map_or_else(|error| error.to_string(), |plan| format!("{} blocks", plan.blocks()));
        assert!(text.contains(expected), "{text}");
    };
    check(&gpu.device, base, 12, "12 blocks");
    check(&gpu.device, base, 1 << 24, "does not begin and end in memory");
    check(&gpu.device, memory.as_ptr().expose_provenance(), 1, "does not begin and end in memory");
    check(&gpu.device, base, 0, "names no memory");
    if let Ok(other) = Device::open(1) {
        check(&other, base, 1, "cuda:1 cannot copy an engine's blocks");
    }
    assert!(Arc::ptr_eq(&Device::of_ordinal(gpu.device.ordinal()).unwrap(), &gpu.device));
    assert!(Device::of_ordinal(99).is_err());
}
