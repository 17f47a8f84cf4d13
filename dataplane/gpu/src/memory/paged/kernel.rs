//! The kernel of `gather.cu`: launched once per list of tiles.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::tiles::{Move, TILE_LEN, WIDTHS, tiles, width};
use crate::memory::device::Device;
use crate::memory::error::CudaError;
use crate::memory::event::Event;
use crate::memory::pool::{DevicePool, DeviceRange};
use crate::memory::staging::Staging;
use crate::memory::stream::Stream;

/// As PTX for the oldest architecture, which the driver compiles for the GPU it has.
const PTX: &str = concat!(include_str!("gather.ptx"), "\0");
/// Threads of a block: eight warps, enough of which share a multiprocessor to hide each other's waiting.
const THREADS: u32 = 256;
/// Thread blocks for each multiprocessor of the GPU.
const BLOCKS_EACH: u32 = 8;
/// Tiles of one launch; a longer list takes several.
const TABLE_TILES: usize = 8 << 10;
/// Lists that may be under way at once; another waits for the oldest.
const TABLES: usize = 4;

/// The kernels on one GPU, loaded once for everyone in the process.
#[derive(Debug)]
pub(in crate::memory) struct Kernels {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    /// One per width.
    functions: [sys::CUfunction; WIDTHS.len()],
    /// As many thread blocks as the GPU has room for.
    every: u32,
}

// SAFETY: handles of the thread-safe driver, not tied to a thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing changes them.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// # Errors
    /// What the driver says, or that a kernel could not use the addresses of registered memory.
    pub(in crate::memory) fn load(device: &Device) -> Result<Self, CudaError> {
        use sys::CUdevice_attribute as Ask;
        device.bind()?;
        let context = Arc::clone(device.context());
        let same = context.attribute(Ask::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
        if !matches!(same, Ok(1)) {
            let reason = "it has other addresses for registered memory of the host";
            return Err(device.unsupported("run the gather kernel", reason));
        }
        let multiprocessors = context.attribute(Ask::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        // SAFETY: a text that ends with a zero.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) };
        let module = module.map_err(device.failed("loading the gather kernel"))?;
        let every = multiprocessors.unwrap_or(1).max(1) as u32 * BLOCKS_EACH;
        let mut kernels = Self { context, module, functions: [ptr::null_mut(); WIDTHS.len()], every };
        for (function, width) in kernels.functions.iter_mut().zip(WIDTHS) {
            let name = CString::new(format!("move_{width}")).unwrap_or_default();
            // SAFETY: the module is loaded.
            *function = unsafe { result::module::get_function(module, name) }
                .map_err(device.failed("loading the gather kernel"))?;
        }
        Ok(kernels)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Work under way still runs them. If waiting for it fails, the driver has ended it.
        let _ = self.context.synchronize();
        // SAFETY: loaded by `load`, and nothing runs it any more.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// Launches kernels, with lists of tiles of its own.
pub(in crate::memory) struct Kernel {
    device: Arc<Device>,
    tables: Vec<Table>,
    next: usize,
}

/// A list of tiles on its way to the GPU.
struct Table {
    host: Staging,
    device: DeviceRange,
    used: Event,
}

impl Kernel {
    /// # Errors
    /// What the driver says.
    pub(in crate::memory) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.kernels()?;
        let mut kernel = Self { device: Arc::clone(device), tables: Vec::new(), next: 0 };
        kernel.add_tables()?;
        Ok(kernel)
    }

    fn add_tables(&mut self) -> Result<(), CudaError> {
        let bytes = TABLE_TILES * TILE_LEN;
        let pool = DevicePool::open(&self.device, (bytes * TABLES) as u64)?;
        for _ in 0..TABLES {
            let device = pool.allocate(bytes as u64);
            let device = device.ok_or_else(|| self.device.unsupported("hold lists of tiles", "no room"))?;
            let host = Staging::new(&self.device, bytes)?;
            self.tables.push(Table { host, device, used: Event::new(&self.device)? });
        }
        Ok(())
    }

    /// Begins moves, in at most `thread_blocks` at once.
    ///
    /// # Safety
    /// Their memory stays valid for this GPU until they are complete, which of the host's only registered memory is.
    ///
    /// # Errors
    /// What the driver says.
    pub(in crate::memory) unsafe fn begin(
        &mut self,
        stream: &Stream,
        moves: &[Move],
        gather: bool,
        thread_blocks: u32,
    ) -> Result<(), CudaError> {
        let width = width(moves);
        let tiles = tiles(moves, width);
        let kernels = self.device.kernels()?;
        let function = WIDTHS.iter().position(|&w| w == width).map(|nth| kernels.functions[nth]);
        let function = function.ok_or_else(|| self.device.unsupported("move units", "no such width"))?;
        for part in tiles.chunks(TABLE_TILES) {
            let table = &mut self.tables[self.next % TABLES];
            self.next += 1;
            table.used.wait()?;
            for (to, tile) in table.host.bytes().chunks_exact_mut(TILE_LEN).zip(part) {
                to.copy_from_slice(&tile.encode());
            }
            let (list, mut count, mut gather) =
                (table.device.address(), part.len() as u32, i32::from(gather));
            // SAFETY: both hold a whole table, which nobody touches before `used` is complete.
            unsafe { stream.copy(list, table.host.address(), part.len() * TILE_LEN) }?;
            let mut list = list;
            let mut arguments = [(&raw mut list).cast(), (&raw mut count).cast(), (&raw mut gather).cast()];
            let grid = (count.min(thread_blocks).min(kernels.every), 1, 1);
            // SAFETY: the function takes an address, a 32-bit count and a 32-bit flag, which the driver copies before it
            // returns; the tiles are cut for its width, from moves for which the caller answers.
            unsafe {
                result::launch_kernel(function, grid, (THREADS, 1, 1), 0, stream.raw(), &mut arguments)
            }
            .map_err(self.device.failed("launching the gather kernel"))?;
            stream.record(&table.used)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use sha2::Digest as _;

    use super::*;

    #[test]
    fn the_ptx_is_of_this_source() {
        let digest: String = sha2::Sha256::digest(include_bytes!("gather.cu"))
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let first = format!("// gather.cu {digest}\n");
        assert!(PTX.starts_with(&first), "gather.cu changed: make gather.ptx again by make_ptx.py");
        for width in WIDTHS {
            assert!(PTX.contains(&format!(".entry move_{width}(")), "{width}");
        }
        assert!(PTX.contains("ld.v4") && PTX.contains("st.v4"), "16 bytes at once");
    }
}
