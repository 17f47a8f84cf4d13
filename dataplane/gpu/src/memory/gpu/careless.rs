//! What holds when a caller lets go too early, or the driver refuses in the middle. Errors are ordered from the software
//! device (`tests/cuda`), which also does its work late and punishes every use of freed memory; a real driver takes no
//! orders, and there the tests that need one say so and end.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use cudarc::driver::sys::{self, CUresult};

use super::*;
use crate::memory::paged::Underway;
use kvasir_memory::layout::paged::Descriptor;

/// Lets a function of the driver fail once, after some calls that succeed; `"work"` is the work of a stream, after which
/// the GPU refuses everything. Returns whether that is possible here. Call it with a device open.
pub(crate) fn order(function: &str, after: u32, error: CUresult) -> bool {
    type Fail = unsafe extern "C" fn(*const c_char, u32, u32) -> u32;
    // SAFETY: a device is open, so the library is there; the type is that of `tests/cuda`.
    let Ok(fail) = (unsafe { sys::culib().get::<Fail>(b"kvasir_cuda_fail") }) else {
        println!("skipped: this driver fails on its own terms");
        return false;
    };
    let function = CString::new(function).unwrap();
    // SAFETY: a text that ends with a zero, read before the call returns.
    assert_eq!(unsafe { fail(function.as_ptr(), after, error as u32) }, 0);
    true
}

const BYTES: u64 = 4 << 20;
/// Runs of this length, every second one of the engine's memory.
const RUN: u64 = 16 << 10;

/// Moves of many runs between an engine's region and a block, and what the block holds afterwards.
struct Moves {
    engine: [Region; 1],
    block: Region,
    descriptors: Vec<Descriptor>,
    expected: Vec<u8>,
}

impl Moves {
    fn new(device: &Arc<Device>, seed: u64) -> Self {
        let bytes = pattern(BYTES, seed);
        let descriptor = |n| Descriptor {
            layer: 0,
            region: 0,
            engine_offset: 2 * n * RUN,
            block_offset: n * RUN,
            run_bytes: RUN,
            rows: 1,
            engine_stride: 0,
            block_stride: 0,
        };
        let descriptors: Vec<_> = (0..BYTES / RUN / 2).map(descriptor).collect();
        let expected = bytes.chunks(RUN as usize).step_by(2).flatten().copied().collect();
        let block = filled(device, &vec![0; BYTES as usize / 2]);
        Self { engine: [filled(device, &bytes)], block, descriptors, expected }
    }

    fn begin(&self, mover: &mut PageMover, path: Path, stream: &Stream) -> Result<Underway, CudaError> {
        let block = self.block.whole().unwrap();
        let pages = Pages { engine: &self.engine, block: &block, descriptors: &self.descriptors };
        mover.begin_by(path, stream, pages, Way::Gather)
    }

    fn are_made(&self) -> bool {
        bytes_of(&self.block)[..self.expected.len()] == self.expected
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn moves_that_are_dropped_are_waited_for() {
    let device = Device::open(0).unwrap();
    let (mut mover, stream) = (PageMover::new(&device).unwrap(), Stream::new(&device).unwrap());
    for (seed, path) in mover.paths().into_iter().enumerate() {
        let moves = Moves::new(&device, seed as u64);
        drop(moves.begin(&mut mover, path, &stream).unwrap());
        assert!(moves.are_made(), "{path}");
        // Memory is freed with the moves that used it, and not before.
        let (freed, moves) = (Moves::new(&device, 9), Moves::new(&device, 10));
        let underway = freed.begin(&mut mover, path, &stream).unwrap();
        drop(freed);
        drop(underway);
        moves.begin(&mut mover, path, &stream).unwrap().wait().unwrap();
        assert!(moves.are_made(), "{path}, after others");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_mover_may_go_before_its_moves() {
    let device = Device::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    for path in PageMover::new(&device).unwrap().paths() {
        let (moves, mut mover) = (Moves::new(&device, 3), PageMover::new(&device).unwrap());
        let underway = moves.begin(&mut mover, path, &stream).unwrap();
        drop(mover);
        underway.wait().unwrap();
        assert!(moves.are_made(), "{path}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn pinned_memory_may_go_before_its_copies() {
    let device = Device::open(0).unwrap();
    let (from, stream) = (filled(&device, &pattern(BYTES, 1)), Stream::new(&device).unwrap());
    for _ in 0..8 {
        let memory = Region::of_pool(Arc::new(HostPool::new(BYTES, true).unwrap()));
        let pinned = Pinned::new(&device, &memory).unwrap();
        // SAFETY: both are that long, and dropping `pinned` waits for the copy.
        unsafe {
            stream.copy(memory.base().as_ptr() as u64, from.base().as_ptr() as u64, BYTES as usize).unwrap();
        }
        drop(pinned);
        assert!(bytes_of(&memory) == pattern(BYTES, 1));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_stream_is_drained_without_an_event_too() {
    let device = Device::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let (from, to) = (filled(&device, &pattern(BYTES, 1)), filled(&device, &pattern(BYTES, 2)));
    for refused in ["cuEventCreate", "cuEventRecord"] {
        if !order(refused, 0, CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
            return;
        }
        // SAFETY: both are that long and live to the end of the test.
        unsafe {
            stream.copy(to.base().as_ptr() as u64, from.base().as_ptr() as u64, BYTES as usize).unwrap();
        }
        stream.drain().unwrap();
        assert!(bytes_of(&to) == pattern(BYTES, 1), "{refused}");
    }
}

/// The caller gets an error and nothing to wait with, so nothing may be under way.
#[test]
#[ignore = "needs a CUDA device"]
fn moves_without_an_event_are_complete_when_the_error_comes() {
    let device = Device::open(0).unwrap();
    let (mut mover, stream) = (PageMover::new(&device).unwrap(), Stream::new(&device).unwrap());
    for (path, refused) in
        [(Path::Copies2d, "cuEventRecord"), (Path::Batch, "cuEventCreate"), (Path::Kernel, "cuEventCreate")]
    {
        if !mover.paths().contains(&path) {
            continue;
        }
        let moves = Moves::new(&device, 5);
        if !order(refused, 0, CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
            return;
        }
        let error = moves.begin(&mut mover, path, &stream).map(drop).expect_err("there is no event");
        assert!(error.to_string().contains("event"), "{error}");
        drop(moves);
        // Work on freed memory would have ended the device.
        let moves = Moves::new(&device, 6);
        moves.begin(&mut mover, path, &stream).unwrap().wait().unwrap();
        assert!(moves.are_made(), "{path}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_way_that_does_not_work_is_left_out() {
    for (refused, lost) in [
        ("cuModuleLoadData", Path::Kernel),
        ("cuModuleGetFunction", Path::Kernel),
        ("cuLaunchKernel", Path::Kernel),
        ("cuMemcpyBatchAsync_v2", Path::Batch),
    ] {
        if !PageMover::new(&Device::open(0).unwrap()).unwrap().paths().contains(&lost) {
            continue;
        }
        // Another, since a device loads its kernels once.
        let device = Device::open(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        if !order(refused, 0, CUresult::CUDA_ERROR_NOT_SUPPORTED) {
            return;
        }
        let mover = RefCell::new(PageMover::new(&device).unwrap());
        let paths = mover.borrow().paths();
        assert!(!paths.contains(&lost) && paths.len() == 2, "{refused}: {paths:?}");
        assert!(mover.borrow().missing()[0].to_string().contains("NOT_SUPPORTED"), "{refused}");
        let moves = Moves::new(&device, 4);
        for path in paths {
            moves.begin(&mut mover.borrow_mut(), path, &stream).unwrap().wait().unwrap();
        }
        assert!(moves.are_made(), "{refused}");
    }
}

const BROKEN: &str = "KVASIR_GPU_BROKEN";

/// In a process of its own, because the device is lost to it.
#[test]
#[ignore = "needs a CUDA device"]
fn a_device_that_fails_says_so_from_then_on() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = crate::test_named(module_path!(), "the_process_whose_device_fails");
    child.args(["--exact", &name, "--ignored", "--nocapture"]).env(BROKEN, "yes");
    let status = child.status().unwrap();
    assert!(status.success(), "{status}");
}

/// The other half of the test above. Does nothing when it is run by itself.
#[test]
#[ignore = "needs a CUDA device"]
fn the_process_whose_device_fails() {
    if std::env::var(BROKEN).is_err() {
        return;
    }
    let device = Device::open(0).unwrap();
    let pool = DevicePool::open(&device, BYTES).unwrap();
    let (range, mut lane) = (pool.allocate(BYTES).unwrap(), Lane::new(&device).unwrap());
    let (mut mover, stream) = (PageMover::new(&device).unwrap(), Stream::new(&device).unwrap());
    let moves = Moves::new(&device, 1);
    if !order("work", 1, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) {
        return;
    }
    let bytes = pattern(BYTES, 1);
    let mut found = vec![0; BYTES as usize];
    let said = |result: Result<(), CudaError>| {
        let error = result.expect_err("the device has failed").to_string();
        assert!(error.contains("ILLEGAL_ADDRESS"), "{error}");
    };
    said(lane.upload(&[Upload { from: bytes[..].into(), to: &range }]));
    said(lane.download(&mut [Download { from: &range, to: &mut found }]));
    said(moves.begin(&mut mover, Path::Copies2d, &stream).and_then(|underway| underway.wait()));
    said(DevicePool::open(&device, BYTES).map(drop));
    said(device.memory().map(drop));
}
