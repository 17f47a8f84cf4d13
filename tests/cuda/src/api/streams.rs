//! Streams, and events in them.

use std::ffi::c_uint;

use crate::device;
use crate::event;
use crate::outcome::{CudaError, Out, call};
use crate::stream;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreate(made: Out<usize>, _flags: c_uint) -> u32 {
    call("cuStreamCreate", || made.set(stream::create(device::current()?.ordinal)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(handle: usize) -> u32 {
    call("cuStreamDestroy_v2", || stream::destroy(handle))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(handle: usize) -> u32 {
    call("cuStreamSynchronize", || {
        device::current()?;
        stream::get(handle)?.wait_for_all();
        device::current().map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(handle: usize, event: usize, _flags: c_uint) -> u32 {
    call("cuStreamWaitEvent", || {
        device::current()?;
        let (stream, event) = (stream::get(handle)?, event::get(event)?);
        // The point that was recorded last before this call, whatever is recorded later.
        let point = event.point();
        let device = device::get(stream.device as i32)?;
        stream.submit(move |_| event.wait(point, device));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventCreate(made: Out<usize>, flags: c_uint) -> u32 {
    const NO_TIMING: c_uint = 2;
    const SHARED: c_uint = 4;
    call("cuEventCreate", || {
        let device = device::current()?;
        let shared = flags & SHARED != 0;
        if shared && flags & NO_TIMING == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        made.set(event::create(device.ordinal, shared)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(handle: usize) -> u32 {
    call("cuEventDestroy_v2", || event::destroy(handle))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(handle: usize, stream: usize) -> u32 {
    call("cuEventRecord", || {
        device::current()?;
        let (event, stream) = (event::get(handle)?, stream::get(stream)?);
        if event.device()?.ordinal != stream.device {
            return Err(CudaError::INVALID_HANDLE);
        }
        let point = event.record();
        stream.mark(move || event.reach(point));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(handle: usize) -> u32 {
    call("cuEventQuery", || {
        device::current()?;
        let event = event::get(handle)?;
        let complete = event.is_complete(event.point());
        // Work that failed completes its events, so the failure is looked for afterwards.
        device::current()?;
        if complete { Ok(()) } else { Err(CudaError::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventSynchronize(handle: usize) -> u32 {
    call("cuEventSynchronize", || {
        device::current()?;
        let event = event::get(handle)?;
        event.wait(event.point(), event.device()?)
    })
}
