//! The rules that this device keeps, through the functions that it exports.

use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};

use crate::api::calls::*;
use crate::outcome::{Out, Text};
use crate::stream;

const LEN: usize = 8192;

fn out<T>(run: impl FnOnce(Out<T>) -> u32, before: T) -> T {
    let mut value = before;
    assert_eq!(run(Out::to(&mut value)), 0);
    value
}

/// Binds a device to this thread.
fn bind(ordinal: i32) {
    assert_eq!(cuInit(0), 0);
    let context = out(|to| cuDevicePrimaryCtxRetain(to, ordinal), std::ptr::null_mut());
    assert_eq!(cuCtxSetCurrent(context), 0);
}

/// A stream that does nothing before the sender is dropped.
fn gated() -> (usize, Sender<()>) {
    let handle = out(|to| cuStreamCreate(to, 1), 0);
    let (gate, opens) = channel();
    stream::get(handle).unwrap().submit(move |_| {
        let _ = opens.recv();
        Ok(())
    });
    (handle, gate)
}

fn download(from: u64) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    assert_eq!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, LEN), 0);
    bytes
}

#[test]
fn work_is_done_in_order_and_late() {
    bind(0);
    let memory = out(|to| cuMemAlloc_v2(to, LEN), 0);
    let pinned = out(|to| cuMemHostAlloc(to, LEN, 0), std::ptr::null_mut());
    let ((first, gate), second) = (gated(), out(|to| cuStreamCreate(to, 1), 0));
    let (copied, seen) = (out(|to| cuEventCreate(to, 2), 0), out(|to| cuEventCreate(to, 2), 0));
    assert_eq!(cuEventQuery(copied), 0, "nothing was recorded");
    assert_eq!(cuMemcpyAsync(memory, pinned as u64, LEN, first), 0);
    assert_eq!(cuEventRecord(copied, first), 0);
    assert_eq!(cuStreamWaitEvent(second, copied, 0), 0);
    assert_eq!(cuEventRecord(seen, second), 0);
    assert_eq!((cuEventQuery(copied), cuEventQuery(seen)), (600, 600));
    let fresh = download(memory);
    assert!(fresh.iter().all(|&byte| byte == fresh[0] && byte != 0), "poison, and nothing copied so far");
    // SAFETY: as long as was allocated. The copy reads what is there when its turn comes.
    unsafe { pinned.cast::<u8>().write_bytes(7, LEN) };
    drop(gate);
    assert_eq!(cuEventSynchronize(seen), 0);
    assert_eq!((cuEventQuery(copied), download(memory)), (0, vec![7; LEN]));
}

#[test]
fn work_on_freed_memory_ends_the_device() {
    bind(1);
    let (memory, other) = (out(|to| cuMemAlloc_v2(to, LEN), 0), out(|to| cuMemAlloc_v2(to, LEN), 0));
    let (stream, gate) = gated();
    assert_eq!(cuMemcpyAsync(other, memory, LEN, stream), 0);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemFree_v2(memory), 1, "freed already");
    assert_eq!(cuMemcpyAsync(other, memory, LEN, stream), 1, "its addresses are refused");
    drop(gate);
    assert_eq!(cuStreamSynchronize(stream), 700);
    assert_eq!((cuMemFree_v2(other), cuCtxSynchronize()), (700, 700));
}

#[test]
fn the_host_cannot_touch_device_memory() {
    bind(0);
    let memory = out(|to| cuMemAlloc_v2(to, LEN), 0);
    let file = crate::memory::create("target", 0).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: the system looks whether the bytes can be read, which is the question.
    let written = unsafe { libc::write(fd, memory as *const c_void, LEN) };
    assert_eq!(written, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
}

#[test]
fn a_call_needs_its_context_and_whole_memory() {
    std::thread::spawn(|| {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuMemAlloc_v2(Out::to(&mut 0), LEN), 201);
    })
    .join()
    .unwrap();
    bind(0);
    let memory = out(|to| cuMemAlloc_v2(to, LEN), 0);
    let (stream, _gate) = gated();
    for (to, from) in [(memory + 1, memory), (memory, memory - 1), (memory, 0)] {
        assert_eq!(cuMemcpyAsync(to, from, LEN, stream), 1, "{to:x} {from:x}");
    }
    assert_eq!(cuMemcpyAsync(memory, memory, LEN, 1), 400, "no such stream");
    assert_eq!(cuMemHostRegister_v2(memory as *mut c_void, LEN, 0), 712);
}

#[test]
fn kernels_take_their_arguments_when_they_are_launched() {
    bind(0);
    let module = out(|to| cuModuleLoadData(to, Text::of(c"// gather.cu and PTX")), 0);
    assert_eq!(cuModuleLoadData(Out::to(&mut 0), Text::of(c"PTX of something else")), 200);
    let function = out(|to| cuModuleGetFunction(to, module, Text::of(c"move_1")), 0);
    assert_eq!(cuModuleGetFunction(Out::to(&mut 0), module, Text::of(c"other")), 500);
    let [from, to, list] = [0; 3].map(|_| out(|to| cuMemAlloc_v2(to, LEN), 0u64));
    // A tile: the two addresses, no strides, one row of as many bytes.
    let tile = [from, to, 0, 0, (LEN as u64) << 32 | LEN as u64];
    for (address, bytes) in
        [(from, vec![9u8; LEN]), (list, tile.iter().flat_map(|n| n.to_ne_bytes()).collect())]
    {
        assert_eq!(cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()), 0);
    }
    // What comes from memory that the device does not know arrives after the call; other streams do not wait for it.
    assert_eq!(cuCtxSynchronize(), 0);
    let (stream, gate) = gated();
    let (mut tiles, mut count, mut gather) = (list, 1u32, 1u32);
    let mut arguments = [(&raw mut tiles).cast(), (&raw mut count).cast(), (&raw mut gather).cast()];
    let none = std::ptr::null_mut();
    assert_eq!(cuLaunchKernel(function, 32, 1, 1, 256, 1, 1, 0, stream, arguments.as_mut_ptr(), none), 0);
    (tiles, count, gather) = (0, 0, 0);
    drop(gate);
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert_eq!((download(to), tiles, count, gather), (vec![9; LEN], 0, 0, 0));
}

#[test]
fn errors_come_as_ordered() {
    bind(0);
    assert_eq!(crate::fault::kvasir_cuda_fail(Text::of(c"cuDeviceGetName"), 1, 2), 0);
    let mut name = [0; 64];
    let mut ask = || cuDeviceGetName(Out::to(&mut name[0]), 64, 0);
    assert_eq!([ask(), ask(), ask()], [0, 2, 0]);
}
