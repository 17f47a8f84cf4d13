//! Allocation, page-locked memory, what lies at an address.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::IntoRawFd;

use crate::device;
use crate::memory::{self, Kind};
use crate::outcome::{CudaError, Out, call};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAlloc_v2(address: Out<u64>, len: usize) -> u32 {
    call("cuMemAlloc_v2", || {
        let device = device::current()?;
        if len == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        if len as u64 > device.bytes.saturating_sub(memory::used_bytes(device.ordinal)) {
            return Err(CudaError::OUT_OF_MEMORY);
        }
        address.set(memory::allocate(device.ordinal, len)?.base as u64)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    call("cuMemFree_v2", || {
        device::current()?;
        memory::begins(address, &[Kind::Device]).ok_or(CudaError::INVALID_VALUE)?.free();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostAlloc(address: Out<*mut c_void>, len: usize, _flags: c_uint) -> u32 {
    call("cuMemHostAlloc", || {
        let device = device::current()?;
        if len == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        address.set(memory::allocate_on_host(device.ordinal, len)?.base as *mut c_void)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeHost(address: *mut c_void) -> u32 {
    call("cuMemFreeHost", || {
        device::current()?;
        memory::begins(address as u64, &[Kind::Host]).ok_or(CudaError::INVALID_VALUE)?.free();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostRegister_v2(address: *mut c_void, len: usize, _flags: c_uint) -> u32 {
    call("cuMemHostRegister_v2", || {
        let device = device::current()?;
        if address.is_null() || len == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        memory::register(device.ordinal, address as u64, len)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostUnregister(address: *mut c_void) -> u32 {
    call("cuMemHostUnregister", || {
        device::current()?;
        let range = memory::begins(address as u64, &[Kind::Registered]);
        range.ok_or(CudaError::HOST_MEMORY_NOT_REGISTERED)?.free();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemGetAddressRange_v2(base: Out<u64>, len: Out<usize>, address: u64) -> u32 {
    call("cuMemGetAddressRange_v2", || {
        device::current()?;
        let range = memory::range_of(address).ok_or(CudaError::NOT_FOUND)?;
        base.set(range.base as u64)?;
        len.set(range.len)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuPointerGetAttribute(answer: Out<u32>, attribute: u32, address: u64) -> u32 {
    const MEMORY_TYPE: u32 = 2;
    const DEVICE_ORDINAL: u32 = 9;
    call("cuPointerGetAttribute", || {
        device::current()?;
        let range = memory::range_of(address).ok_or(CudaError::INVALID_VALUE)?;
        match attribute {
            MEMORY_TYPE => answer.set(match range.kind {
                Kind::Host | Kind::Registered => 1,
                Kind::Device | Kind::Imported => 2,
            }),
            DEVICE_ORDINAL => answer.set(range.device as u32),
            _ => Err(CudaError::INVALID_VALUE),
        }
    })
}

/// The descriptor of the memory itself. It is no dma-buf, but as one it may be kept, sent and closed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemGetHandleForAddressRange(
    fd: Out<c_int>,
    address: u64,
    len: usize,
    kind: u32,
    _flags: c_ulonglong,
) -> u32 {
    const DMA_BUF: u32 = 1;
    call("cuMemGetHandleForAddressRange", || {
        device::current()?;
        let range = memory::range_of(address).filter(|range| range.kind == Kind::Device);
        let range = range.ok_or(CudaError::INVALID_VALUE)?;
        let inside =
            (address - range.base as u64).checked_add(len as u64).is_some_and(|end| end <= range.len as u64);
        if kind != DMA_BUF
            || !address.is_multiple_of(4096)
            || !len.is_multiple_of(4096)
            || len == 0
            || !inside
        {
            return Err(CudaError::INVALID_VALUE);
        }
        let copy = range.fd.as_ref().and_then(|fd| fd.try_clone().ok()).ok_or(CudaError::UNKNOWN)?;
        fd.set(copy.into_raw_fd())
    })
}
