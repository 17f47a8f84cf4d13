//! What the ways to move bytes bring on this GPU, printed. A slow machine is no reason to fail.

use std::time::{Duration, Instant};

use super::*;
use kvasir_memory::runs::Run;

const SPEED_BYTES: u64 = 256 << 20;
const SPEED_BLOCK: u64 = 2 << 20;
/// Fewer, since single copies of short runs are slow.
const ENGINE_BYTES: u64 = 64 << 20;

/// Prints the best of five runs and its share of the peak, and returns it in GB/s. A slow machine is no reason to
/// fail.
fn best(name: &str, bytes: u64, peak: Option<f64>, mut run: impl FnMut()) -> f64 {
    let tries = (0..5).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed()
    });
    let took = tries.min().unwrap_or(Duration::MAX);
    let found = bytes as f64 / took.as_secs_f64() / 1e9;
    let share = peak.map(|peak| format!(", {:.2} of the plain copy", found / peak)).unwrap_or_default();
    println!("{name:<32} {found:>8.2} GB/s{share}");
    found
}

#[test]
#[ignore = "needs a CUDA device"]
fn speed_beside_plain_copies() {
    let device = Device::open(0).unwrap();
    let pool = DevicePool::open(&device, SPEED_BYTES).unwrap();
    let blocks: Vec<DeviceRange> =
        (0..SPEED_BYTES / SPEED_BLOCK).map(|_| pool.allocate(SPEED_BLOCK).unwrap()).collect();
    let memory = Arc::new(HostPool::new(SPEED_BYTES, true).unwrap());
    let pinned = Pinned::new(&device, &Region::of_pool(memory.clone())).unwrap();
    let (there, here) = (pool.region().base().as_ptr() as u64, pinned.region().base().as_ptr() as u64);
    let stream = Stream::new(&device).unwrap();
    let plain = |to, from| {
        // SAFETY: both hold that many bytes, and nobody else uses them before `drain` returns.
        unsafe { stream.copy(to, from, SPEED_BYTES as usize) }.unwrap();
        stream.drain().unwrap();
    };
    let up_peak = best("plain copy to the device", SPEED_BYTES, None, || plain(there, here));
    let down_peak = best("plain copy from the device", SPEED_BYTES, None, || plain(here, there));

    let mut lane = Lane::new(&device).unwrap();
    let mut up = |bytes: &[u8]| {
        let list = bytes.chunks(SPEED_BLOCK as usize).zip(&blocks);
        lane.upload(&list.map(|(from, to)| Upload { from: from.into(), to }).collect::<Vec<_>>()).unwrap();
    };
    let pinned = memory.mapping().bytes(0, SPEED_BYTES).unwrap();
    // SAFETY: the pool is this test's alone, and nothing writes to it while this is read.
    let pinned = unsafe { std::slice::from_raw_parts(pinned.as_ptr(), pinned.len()) };
    best("blocks of 2 MiB up, pinned", SPEED_BYTES, Some(up_peak), || up(pinned));
    let mut heap = pattern(SPEED_BYTES, 5);
    best("blocks of 2 MiB up, pageable", SPEED_BYTES, Some(up_peak), || up(&heap));
    heap.fill(0);
    best("blocks of 2 MiB down, pageable", SPEED_BYTES, Some(down_peak), || {
        let list = heap.chunks_mut(SPEED_BLOCK as usize).zip(&blocks);
        lane.download(&mut list.map(|(to, from)| Download { from, to }).collect::<Vec<_>>()).unwrap();
    });
    assert!(heap == pattern(SPEED_BYTES, 5), "the bytes that went up came down");
}

#[test]
#[ignore = "needs a CUDA device"]
fn speed_of_the_ways_to_move_pages() {
    let mover = PageMover::new(&Device::open(0).unwrap()).unwrap();
    for m in mover.measured() {
        let rate = PageMover::SAMPLE_BYTES as f64 / m.took.as_secs_f64() / 1e9;
        println!("runs of {:>6} B by {:<10} {rate:>8.2} GB/s", m.run_bytes, m.path);
    }
    mover.missing().into_iter().for_each(|missing| println!("not measured: {missing}"));
    assert_eq!(mover.measured().len() % mover.paths().len(), 0);
}

/// An engine's blocks to and from a pool that the driver knows, as the client moves them and in other ways.
#[test]
#[ignore = "needs a CUDA device"]
fn speed_of_an_engines_blocks() {
    let device = Device::open(0).unwrap();
    let cache = DevicePool::open(&device, ENGINE_BYTES).unwrap().region();
    let memory = Arc::new(HostPool::new(ENGINE_BYTES, true).unwrap());
    let pinned = Pinned::new(&device, &Region::of_pool(Arc::clone(&memory))).unwrap();
    let stream = Stream::new(&device).unwrap();
    let there = cache.base().as_ptr() as u64;
    let here = pinned.region().base().as_ptr() as u64;
    // SAFETY: both hold that many bytes, and nobody else uses them before `drain` returns.
    let peak = best("plain copy from the device", ENGINE_BYTES, None, || unsafe {
        stream.copy(here, there, ENGINE_BYTES as usize).unwrap();
        stream.drain().unwrap();
    });
    let (count, mapping) = ((ENGINE_BYTES / SPEED_BLOCK) as usize, memory.mapping());
    for run in [4 << 10, 16 << 10, 64 << 10_u64] {
        let layer = run * count as u64;
        let of_layer =
            |n| Run { addr: (there + n * layer) as usize, len: run as usize, stride: run as usize };
        let runs: Vec<Run> = (0..SPEED_BLOCK / run).map(of_layer).collect();
        // SAFETY: the cache is this test's alone.
        let plan = unsafe { DevicePlan::new(&device, &runs, count) }.unwrap();
        let place = |n: usize| (n, mapping.place(n as u64 * SPEED_BLOCK, SPEED_BLOCK).unwrap());
        let bytes = |n: usize| (n, mapping.bytes(n as u64 * SPEED_BLOCK, SPEED_BLOCK).unwrap());
        for (name, mut side) in [
            ("as it is", SideStream::new(&device).unwrap()),
            ("batch", SideStream::with_only(&device, false, true)),
            ("copies", SideStream::with_only(&device, false, false)),
        ] {
            let name = format!("runs of {run:>5} B, {name}");
            best(&format!("{name}, saved"), ENGINE_BYTES, Some(peak), || {
                side.gather(&plan, (0..count).map(place)).unwrap()
            });
            best(&format!("{name}, loaded"), ENGINE_BYTES, Some(peak), || {
                side.scatter(&plan, (0..count).map(bytes)).unwrap();
            });
        }
    }
}
