//! Initialisation, devices, contexts, texts of errors.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::device;
use crate::memory;
use crate::outcome::{CudaError, Out, call};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(_flags: c_uint) -> u32 {
    call("cuInit", || {
        device::initialise();
        if device::all()?.is_empty() { Err(CudaError(100)) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> u32 {
    call("cuDeviceGetCount", || count.set(device::all()?.len() as c_int))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGet(found: Out<c_int>, ordinal: c_int) -> u32 {
    call("cuDeviceGet", || found.set(device::get(ordinal)?.ordinal as c_int))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetName(name: Out<c_char>, len: c_int, ordinal: c_int) -> u32 {
    call("cuDeviceGetName", || {
        device::get(ordinal)?;
        set_text(&name, len, "Kvasir software device")
    })
}

/// The last device has the lowest address: their order is not that of their numbers.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetPCIBusId(address: Out<c_char>, len: c_int, ordinal: c_int) -> u32 {
    call("cuDeviceGetPCIBusId", || {
        device::get(ordinal)?;
        set_text(&address, len, &format!("0000:{:02X}:00.0", 0xE0 - ordinal))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetAttribute(value: Out<c_int>, attribute: u32, ordinal: c_int) -> u32 {
    const MULTIPROCESSORS: u32 = 16;
    const SAME_ADDRESSES_OF_REGISTERED_MEMORY: u32 = 91;
    const MEMORY_POOLS: u32 = 115;
    const DMA_BUF: u32 = 124;
    call("cuDeviceGetAttribute", || {
        device::get(ordinal)?;
        match attribute {
            MULTIPROCESSORS => value.set(4),
            SAME_ADDRESSES_OF_REGISTERED_MEMORY => value.set(1),
            MEMORY_POOLS => value.set(0),
            DMA_BUF => value.set(1),
            _ => Err(CudaError::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRetain(context: Out<*mut c_void>, ordinal: c_int) -> u32 {
    call("cuDevicePrimaryCtxRetain", || {
        let device = device::get(ordinal)?;
        device.check()?;
        context.set(device.retain())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) -> u32 {
    call("cuDevicePrimaryCtxRelease_v2", || device::get(ordinal)?.release())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetCurrent(context: Out<*mut c_void>) -> u32 {
    call("cuCtxGetCurrent", || context.set(device::bound()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> u32 {
    call("cuCtxSetCurrent", || device::bind(context))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSynchronize() -> u32 {
    call("cuCtxSynchronize", || device::current()?.synchronise())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> u32 {
    call("cuMemGetInfo_v2", || {
        let device = device::current()?;
        free.set(device.bytes.saturating_sub(memory::used_bytes(device.ordinal)) as usize)?;
        total.set(device.bytes as usize)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorName(error: u32, name: Out<*const c_char>) -> u32 {
    call("cuGetErrorName", || name.set(CudaError::texts(error).ok_or(CudaError::INVALID_VALUE)?.0.as_ptr()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorString(error: u32, text: Out<*const c_char>) -> u32 {
    call("cuGetErrorString", || text.set(CudaError::texts(error).ok_or(CudaError::INVALID_VALUE)?.1.as_ptr()))
}

fn set_text(to: &Out<c_char>, len: c_int, text: &str) -> Result<(), CudaError> {
    let room = usize::try_from(len).map_err(|_| CudaError::INVALID_VALUE)?;
    let mut bytes: Vec<c_char> =
        text.bytes().take(room.saturating_sub(1)).map(|byte| byte as c_char).collect();
    if room > 0 {
        bytes.push(0);
    }
    to.set_all(&bytes)
}
