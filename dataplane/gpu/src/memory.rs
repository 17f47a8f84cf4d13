//! Memory of NVIDIA GPUs, through the driver's own library, which is opened at run time.
//!
//! Nothing here is linked: where `libcuda.so.1` or a device is missing, [`Device::open`] says so and everything else
//! works. What a driver of today has and an older one lacks is looked up before it is called.
//!
//! [`Device`] is a GPU, [`DevicePool`] its memory with our allocator on top, [`Pinned`] memory of the host that the GPU
//! reads and writes itself, [`Stream`] an order of work and [`Event`] a point in it. [`Lane`] moves bytes between the
//! host and a pool, [`SideStream`] between the host and an engine's blocks, which a [`DevicePlan`] names. [`ipc`] shares
//! memory between processes, [`paged`] gathers and scatters an engine's pages.

mod device;
mod engine;
mod error;
mod event;
#[cfg(test)]
pub(crate) mod gpu;
pub mod ipc;
mod lane;
pub mod paged;
mod pinned;
mod pool;
mod side;
mod staging;
mod stream;

pub use device::{Device, devices};
pub use engine::{DevicePlan, DevicePlanError, Room};
pub use error::CudaError;
pub use event::Event;
pub use lane::{Download, Lane, Upload};
pub use pinned::Pinned;
pub use pool::{DevicePool, DeviceRange};
pub use side::SideStream;
pub use stream::Stream;
