//! Memory and events of other processes.

use std::ffi::c_uint;
use std::sync::atomic::Ordering;

use crate::device;
use crate::event;
use crate::ipc::{Handle, RawHandle};
use crate::memory::{self, Kind};
use crate::outcome::{CudaError, Out, call};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcGetMemHandle(handle: Out<RawHandle>, address: u64) -> u32 {
    call("cuIpcGetMemHandle", || {
        device::current()?;
        let range = memory::begins(address, &[Kind::Device]).ok_or(CudaError::INVALID_VALUE)?;
        let fd = range.fd.as_ref().ok_or(CudaError::INVALID_VALUE)?;
        handle.set(Handle::of(fd, range.len as u64, range.id).encode())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: RawHandle, flags: c_uint) -> u32 {
    const LAZY_PEER_ACCESS: c_uint = 1;
    call("cuIpcOpenMemHandle_v2", || {
        let device = device::current()?;
        if flags != LAZY_PEER_ACCESS {
            return Err(CudaError::INVALID_VALUE);
        }
        let handle = Handle::decode(handle)?;
        let again = memory::live(|range| {
            range.kind == Kind::Imported && range.id == handle.id && range.device == device.ordinal
        });
        if let Some(range) = again.first() {
            range.opened.fetch_add(1, Ordering::SeqCst);
            return address.set(range.base as u64);
        }
        let fd = handle.open()?;
        address.set(memory::import(device.ordinal, handle.len as usize, handle.id, fd)?.base as u64)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcCloseMemHandle(address: u64) -> u32 {
    call("cuIpcCloseMemHandle", || {
        device::current()?;
        let range = memory::begins(address, &[Kind::Imported]).ok_or(CudaError::INVALID_VALUE)?;
        if range.opened.fetch_sub(1, Ordering::SeqCst) == 1 {
            range.free();
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcGetEventHandle(handle: Out<RawHandle>, event: usize) -> u32 {
    call("cuIpcGetEventHandle", || {
        device::current()?;
        let event = event::get(event)?;
        let (id, fd) = event.shared.as_ref().ok_or(CudaError::INVALID_VALUE)?;
        handle.set(Handle::of(fd, 0, *id).encode())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcOpenEventHandle(event: Out<usize>, handle: RawHandle) -> u32 {
    call("cuIpcOpenEventHandle", || {
        let device = device::current()?;
        event.set(event::import(device.ordinal, &Handle::decode(handle)?.open()?)?)
    })
}
