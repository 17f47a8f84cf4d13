//! Modules and their kernels.

use std::ffi::{c_uint, c_void};

use crate::device;
use crate::kernel;
use crate::outcome::{CudaError, Out, Text, call};
use crate::stream;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleLoadData(module: Out<usize>, image: Text) -> u32 {
    call("cuModuleLoadData", || module.set(kernel::load(device::current()?.ordinal, &image.get()?)?))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleGetFunction(function: Out<usize>, module: usize, name: Text) -> u32 {
    call("cuModuleGetFunction", || {
        device::current()?;
        function.set(kernel::function(module, &name.get()?)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleUnload(module: usize) -> u32 {
    call("cuModuleUnload", || {
        device::current()?;
        kernel::unload(module)
    })
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // the driver's own
pub(crate) extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    stream: usize,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    call("cuLaunchKernel", || {
        device::current()?;
        let stream = stream::get(stream)?;
        if !extra.is_null() {
            return Err(CudaError::NOT_SUPPORTED);
        }
        let launch =
            kernel::launch(function, [grid_x, grid_y, grid_z, block_x, block_y, block_z], arguments)?;
        stream.submit(move |_| {
            launch.run();
            Ok(())
        });
        Ok(())
    })
}
