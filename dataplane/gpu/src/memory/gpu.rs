//! What only a GPU can test: `cargo xtask test --gpu`.
#![allow(unsafe_code)]

pub(crate) mod careless;
mod speed;

use std::process::Command;
use std::sync::Arc;

use proptest::test_runner::{Config, TestRunner};

use super::ipc::{EventHandle, MEMORY_HANDLE_LEN, MemoryHandle};
use super::paged::{LayerStreams, PageMover, Pages, Path, Way, by_hand};
use super::*;
use kvasir_memory::host::HostPool;
use kvasir_memory::layout::cases::cases;
use kvasir_memory::layout::paged::{Order, PagedLayout, Regions, descriptors};
use kvasir_memory::layout::{Attention, Dtype, KvShape};
use kvasir_memory::region::Region;
use kvasir_memory::runs::Run;

fn host(device: &Arc<Device>, bytes: u64) -> Pinned {
    let pool = HostPool::new(bytes, true).unwrap();
    Pinned::new(device, &Region::of_pool(Arc::new(pool))).unwrap()
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|i| ((i ^ seed << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    assert_eq!(region.whole().unwrap().copy_out(&mut bytes) as u64, region.len());
    bytes
}

fn filled(device: &Arc<Device>, bytes: &[u8]) -> Region {
    let region = DevicePool::open(device, bytes.len() as u64).unwrap().region();
    assert_eq!(region.whole().unwrap().copy_in(bytes), bytes.len());
    region
}

fn region_count(kv: &KvShape, engine: &PagedLayout) -> u64 {
    match engine.regions {
        Regions::One => 1,
        Regions::PerLayer => kv.layers.into(),
        Regions::PerPlane => u64::from(kv.layers) * u64::from(kv.planes()),
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn pages_move_as_on_the_host_by_every_path() {
    let device = Device::open(0).unwrap();
    let mover = PageMover::new(&device).unwrap();
    for missing in mover.missing() {
        println!("not tried: {missing}");
    }
    let paths = mover.paths();
    pages_move_as_on_the_host(&device, mover, &paths, 48);
}

#[test]
#[ignore = "needs a CUDA device"]
fn pages_move_as_on_the_host_by_the_older_batch() {
    let device = Device::open(0).unwrap();
    let mut mover = PageMover::new(&device).unwrap();
    mover.take_older_batch();
    match mover.paths().contains(&Path::Batch) {
        true => pages_move_as_on_the_host(&device, mover, &[Path::Batch], 16),
        false => println!("not tried: {:?}", mover.missing()),
    }
}

fn pages_move_as_on_the_host(device: &Arc<Device>, mover: PageMover, paths: &[Path], count: u32) {
    let (stream, mover) = (Stream::new(device).unwrap(), std::cell::RefCell::new(mover));
    let config = Config { cases: count, failure_persistence: None, ..Config::default() };
    let moved = TestRunner::new(config).run(&cases(), |(kv, layout, order, pages, tokens)| {
        let list = descriptors(&kv, &layout, order, &pages, tokens).unwrap();
        let mut mover = mover.borrow_mut();
        for (seed, (&path, way)) in
            paths.iter().flat_map(|p| [(p, Way::Gather), (p, Way::Scatter)]).enumerate()
        {
            let block_bytes = kv.bytes_per_block(tokens).unwrap();
            let mut expected: Vec<_> = (0..region_count(&kv, &layout))
                .map(|n| pattern(layout.region_bytes, n + 1 + 100 * seed as u64))
                .collect();
            let mut expected_block = pattern(block_bytes, 99 + seed as u64);
            let engine: Vec<Region> = expected.iter().map(|bytes| filled(device, bytes)).collect();
            let block = filled(device, &expected_block);
            by_hand(&mut expected, &mut expected_block, &list, way);

            let block_range = block.range(0, block_bytes).unwrap();
            let pages = Pages { engine: &engine, block: &block_range, descriptors: &list };
            mover.begin_by(path, &stream, pages, way).unwrap().wait().unwrap();
            assert!(bytes_of(&block)[..block_bytes as usize] == expected_block, "block, {path} {way:?}");
            for (region, expected) in engine.iter().zip(&expected) {
                assert!(bytes_of(region)[..expected.len()] == *expected, "engine, {path} {way:?}");
            }
        }
        Ok(())
    });
    moved.unwrap();
}

/// LLaMA-3-8B's cache: 32 layers, 8 heads of 128, two bytes; 16 tokens are 2 MiB.
fn llama() -> (KvShape, PagedLayout) {
    let kv = KvShape::plain(32, Attention::Heads { kv_heads: 8, head_dim: 128 }, Dtype::Bf16);
    let layout = PagedLayout::planes_then_pages(&kv, 64, 16).unwrap();
    (kv, layout)
}

#[test]
#[ignore = "needs a CUDA device"]
fn blocks_leave_and_return_layer_by_layer() {
    let device = Device::open(0).unwrap();
    let (kv, layout) = llama();
    let list = descriptors(&kv, &layout, Order::HeadsTokens, &[9, 3], 32).unwrap();
    let block_bytes = kv.bytes_per_block(32).unwrap();
    let mut expected: Vec<_> =
        (0..region_count(&kv, &layout)).map(|n| pattern(layout.region_bytes, n)).collect();
    // What the engine is about to compute, and what lies in its pages before.
    let computed: Vec<Region> = expected.iter().map(|bytes| filled(&device, bytes)).collect();
    let stale = pattern(layout.region_bytes, 77);
    let engine: Vec<Region> = computed.iter().map(|_| filled(&device, &stale)).collect();
    let mut expected_block = vec![0; block_bytes as usize];
    by_hand(&mut expected, &mut expected_block, &list, Way::Gather);

    let mut mover = PageMover::new(&device).unwrap();
    let (compute, pages, bus) =
        (Stream::new(&device).unwrap(), Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let streams = LayerStreams { pages: &pages, bus: &bus };
    let staged = DevicePool::open(&device, block_bytes).unwrap().region().range(0, block_bytes).unwrap();
    let out = host(&device, block_bytes);
    let out_range = out.region().range(0, block_bytes).unwrap();
    let moving = Pages { engine: &engine, block: &staged, descriptors: &list };
    let layer_regions = engine.len() / kv.layers as usize;
    let ready = engine.chunks(layer_regions).zip(computed.chunks(layer_regions)).map(|(engine, computed)| {
        for (to, from) in engine.iter().zip(computed) {
            let (to, from) = (to.base().as_ptr() as u64, from.base().as_ptr() as u64);
            // SAFETY: both regions are that long and live to the end of the test.
            unsafe { compute.copy(to, from, layout.region_bytes as usize) }.unwrap();
        }
        compute.mark().unwrap()
    });
    let ready: Vec<Event> = ready.collect();
    let layers = mover.offload_layers(streams, moving, &out_range, &ready).unwrap();
    assert_eq!(layers.len(), kv.layers as usize);
    let layer_bytes = block_bytes as usize / layers.len();
    for (n, layer) in layers.into_iter().enumerate() {
        layer.wait().unwrap();
        let mut found = vec![0; layer_bytes];
        let (at, len) = ((n * layer_bytes) as u64, layer_bytes as u64);
        out_range.part(at, len).unwrap().copy_out(&mut found);
        assert!(found == expected_block[n * layer_bytes..][..layer_bytes], "layer {n}");
    }

    // Back over different pages. What the GPU has of the block is overwritten, so the bytes come from the host.
    staged.copy_in(&pattern(block_bytes, 78));
    let back = descriptors(&kv, &layout, Order::HeadsTokens, &[40, 41], 32).unwrap();
    by_hand(&mut expected, &mut expected_block, &back, Way::Scatter);
    let moving = Pages { descriptors: &back, ..moving };
    // The bus has other things to do first, so layers that did not wait for it would be early.
    let spare = filled(&device, &stale);
    for _ in 0..16 {
        let (to, from) = (spare.base().as_ptr() as u64, computed[0].base().as_ptr() as u64);
        // SAFETY: both regions are that long and live to the end of the test.
        unsafe { bus.copy(to, from, layout.region_bytes as usize) }.unwrap();
    }
    for layer in mover.onboard_layers(streams, &out_range, moving).unwrap() {
        compute.after(layer.event()).unwrap();
        layer.wait().unwrap();
    }
    for (region, expected) in engine.iter().zip(&expected) {
        assert!(bytes_of(region)[..expected.len()] == *expected);
    }
}

const CHILD: &str = "KVASIR_GPU_IPC";
const IPC_BYTES: u64 = 3 << 20;

/// Blocks of an engine, from and to memory that the driver knows and memory that it does not.
#[test]
#[ignore = "needs a CUDA device"]
fn an_engines_blocks_move_by_every_way() {
    const BLOCKS: usize = 5;
    let device = Device::open(0).unwrap();
    for lens in
        [&[4096, 4096, 4096][..], &[48 << 10, 64 << 10], &[5, 4096, 40 << 10], &[1 << 20, 16, 9 << 20]]
    {
        let block_bytes: usize = lens.iter().sum();
        let content = pattern((BLOCKS * block_bytes) as u64, 6);
        let cache = filled(&device, &content);
        let mut addr = cache.base().as_ptr() as usize;
        let mut run = |&len: &usize| {
            let run = Run { addr, len, stride: len };
            addr += BLOCKS * len;
            run
        };
        let runs: Vec<Run> = lens.iter().map(&mut run).collect();
        // SAFETY: the cache is this test's alone.
        let plan = unsafe { DevicePlan::new(&device, &runs, BLOCKS) }.unwrap();
        for (kernel, batch, pinned) in
            [(true, true, true), (true, true, false), (false, true, true), (false, false, true)]
        {
            let memory = Arc::new(HostPool::new((BLOCKS * block_bytes) as u64, true).unwrap());
            let _pinned =
                pinned.then(|| Pinned::new(&device, &Region::of_pool(Arc::clone(&memory))).unwrap());
            let (mapping, each) = (memory.mapping(), block_bytes as u64);
            let mut side = SideStream::with_only(&device, kernel, batch);
            let places = (0..BLOCKS).map(|n| (n, mapping.place(n as u64 * each, each).unwrap()));
            side.gather(&plan, places).unwrap();
            for n in 0..BLOCKS {
                let mut begin = 0;
                let parts = lens.iter().flat_map(|len| {
                    let part = &content[begin + n * len..][..*len];
                    begin += BLOCKS * len;
                    part
                });
                let mut found = vec![0; block_bytes];
                mapping.bytes(n as u64 * each, each).unwrap().copy_to(&mut found);
                assert!(found.iter().eq(parts), "block {n} of {lens:?}: {kernel} {batch} {pinned}");
            }
            cache.whole().unwrap().copy_in(&vec![0; content.len()]);
            let blocks = (0..BLOCKS).map(|n| (n, mapping.bytes(n as u64 * each, each).unwrap()));
            side.scatter(&plan, blocks).unwrap();
            // The pool is a little longer.
            assert!(bytes_of(&cache).starts_with(&content), "{lens:?}: {kernel} {batch} {pinned}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn two_processes_share_memory_and_events() {
    let device = Device::open(0).unwrap();
    let pool = DevicePool::open(&device, 2 * IPC_BYTES).unwrap();
    // Not at the front: the handle must carry where in the allocation it begins.
    let (_front, shared) = (pool.allocate(IPC_BYTES).unwrap(), pool.allocate(IPC_BYTES).unwrap());
    assert!(shared.offset() > 0);
    let (stream, event) = (Stream::new(&device).unwrap(), Event::shared(&device).unwrap());
    let mut lane = Lane::new(&device).unwrap();
    lane.upload(&[Upload { from: pattern(IPC_BYTES, 1)[..].into(), to: &shared }]).unwrap();
    stream.record(&event).unwrap();
    let handle = super::ipc::handle_of(&device, shared.address()).unwrap();
    let event = EventHandle::of(&device, &event).unwrap();
    let text: String = handle.encode().iter().chain(&event.0).map(|byte| format!("{byte:02x}")).collect();
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &crate::test_named(module_path!(), "the_other_process"),
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD, text)
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    let mut found = vec![0; IPC_BYTES as usize];
    lane.download(&mut [Download { from: &shared, to: &mut found }]).unwrap();
    assert!(found == pattern(IPC_BYTES, 2), "what the other process wrote");
}

/// The other half of the test above. Does nothing when it is run by itself.
#[test]
#[ignore = "needs a CUDA device"]
fn the_other_process() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let bytes: Vec<u8> =
        (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..][..2], 16).unwrap()).collect();
    let (memory, event) = bytes.split_first_chunk::<MEMORY_HANDLE_LEN>().unwrap();
    let device = Device::open(0).unwrap();
    let event = EventHandle(event.try_into().unwrap()).open(&device).unwrap();
    event.wait().unwrap();
    let handle = MemoryHandle::decode(memory);
    assert!(
        super::ipc::open(&handle, &device, IPC_BYTES + (64 << 20)).is_err(),
        "longer than the allocation"
    );
    let region = super::ipc::open(&handle, &device, IPC_BYTES).unwrap();
    assert!(bytes_of(&region) == pattern(IPC_BYTES, 1), "what the first process wrote");
    region.whole().unwrap().copy_in(&pattern(IPC_BYTES, 2));
}
