//! Moves by the driver's own copies: all runs in one call, or a call per descriptor.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::driver::sys;

use super::tiles::Move;
use crate::memory::device::{Device, driver_has};
use crate::memory::error::CudaError;
use crate::memory::stream::Stream;

type Addresses = *mut sys::CUdeviceptr;
type Attributes = *mut sys::CUmemcpyAttributes;
/// As CUDA 12.8 declares it: with a place for the number of the copy that failed.
type BatchV1 = unsafe extern "C" fn(
    Addresses,
    Addresses,
    *mut usize,
    usize,
    Attributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> sys::CUresult;
/// As CUDA 13 declares it.
type BatchV2 = unsafe extern "C" fn(
    Addresses,
    Addresses,
    *mut usize,
    usize,
    Attributes,
    *mut usize,
    usize,
    sys::CUstream,
) -> sys::CUresult;

/// `cuMemcpyBatchAsync`, in the form that this driver has.
#[derive(Clone, Copy)]
pub(in crate::memory) enum Batch {
    V1(BatchV1),
    V2(BatchV2),
}

impl Batch {
    pub(in crate::memory) fn find(device: &Device) -> Result<Self, CudaError> {
        device.bind()?;
        if driver_has("cuMemcpyBatchAsync_v2") {
            // SAFETY: a device is open, so the library is there; the type is what CUDA 13's header declares.
            let found = unsafe { sys::culib().get::<BatchV2>(b"cuMemcpyBatchAsync_v2") };
            if let Ok(function) = found {
                return Ok(Self::V2(*function));
            }
        }
        Self::find_older(device)
    }

    /// The form of CUDA 12.8, which later drivers keep.
    pub(super) fn find_older(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: a device is open, so the library is there; the type is what CUDA 12.8's header declares.
        let found = unsafe { sys::culib().get::<BatchV1>(b"cuMemcpyBatchAsync") };
        found
            .map(|function| Self::V1(*function))
            .map_err(|_| device.unsupported("copy in batches", "the driver is older than CUDA 12.8"))
    }

    /// Begins all runs of the moves.
    ///
    /// # Safety
    /// Their memory stays valid for this GPU until they are complete.
    pub(in crate::memory) unsafe fn begin(
        self,
        stream: &Stream,
        moves: &[Move],
        gather: bool,
    ) -> Result<(), CudaError> {
        let device = stream.device();
        device.bind()?;
        let (mut to, mut from, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        for m in moves {
            for row in 0..m.rows {
                let (engine, block) = (m.engine + row * m.engine_stride, m.block + row * m.block_stride);
                let (target, source) = if gather { (block, engine) } else { (engine, block) };
                to.push(target);
                from.push(source);
                sizes.push(m.run_bytes as usize);
            }
        }
        if sizes.is_empty() {
            return Ok(());
        }
        // SAFETY: plain numbers, for which zero means "no hint"; the one field that must not be zero is set below.
        let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut first, mut failed) = (0usize, 0usize);
        let (to, from, lens, count) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr(), sizes.len());
        // SAFETY: three lists of `count` entries and one attribute that holds from the first copy on; the driver reads
        // them before it returns. The caller answers for the memory.
        let begun = unsafe {
            match self {
                Self::V1(call) => {
                    call(to, from, lens, count, &mut attributes, &mut first, 1, &mut failed, stream.raw())
                }
                Self::V2(call) => call(to, from, lens, count, &mut attributes, &mut first, 1, stream.raw()),
            }
        };
        begun.result().map_err(device.failed("starting a batch of copies"))
    }
}

/// Begins the moves, each as a two-dimensional copy (a plain one for a single row).
///
/// # Safety
/// As for [`Batch::begin`].
pub(in crate::memory) unsafe fn begin_2d(
    stream: &Stream,
    moves: &[Move],
    gather: bool,
) -> Result<(), CudaError> {
    for m in moves {
        let (engine, block) = ((m.engine, m.engine_stride), (m.block, m.block_stride));
        let (from, to) = if gather { (engine, block) } else { (block, engine) };
        if m.rows > 1 && pitch(m, from.1) && pitch(m, to.1) {
            // SAFETY: passed on to the caller.
            unsafe { copy_2d(stream, from, to, m.run_bytes, m.rows) }?;
        } else {
            // A single row needs no more; rows that overlap or lie too far apart for a 2-D copy go one by one.
            for row in 0..m.rows {
                // SAFETY: passed on to the caller.
                unsafe { stream.copy(to.0 + row * to.1, from.0 + row * from.1, m.run_bytes as usize) }?;
            }
        }
    }
    Ok(())
}

/// Whether the driver takes a stride as the pitch of a copy.
fn pitch(m: &Move, stride: u64) -> bool {
    /// What every GPU allows.
    const PITCH_MAX: u64 = i32::MAX as u64;
    (m.run_bytes..=PITCH_MAX).contains(&stride)
}

unsafe fn copy_2d(
    stream: &Stream,
    from: (u64, u64),
    to: (u64, u64),
    run_bytes: u64,
    rows: u64,
) -> Result<(), CudaError> {
    stream.device().bind()?;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: std::ptr::null::<c_void>(),
        srcDevice: from.0,
        srcArray: std::ptr::null_mut(),
        srcPitch: from.1 as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: std::ptr::null_mut::<c_void>(),
        dstDevice: to.0,
        dstArray: std::ptr::null_mut(),
        dstPitch: to.1 as usize,
        WidthInBytes: run_bytes as usize,
        Height: rows as usize,
    };
    // SAFETY: the structure is complete and read before the call returns; the caller answers for the memory.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) }
        .result()
        .map_err(stream.device().failed("starting a 2-D copy"))
}
