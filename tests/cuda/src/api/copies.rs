//! Copies, each in a stream.

use std::ffi::c_void;
use std::sync::Arc;

use crate::copy::Copy;
use crate::device;
use crate::outcome::{CudaError, In, Out, Outcome, call};
use crate::stream::{self, Stream};

/// The longest pitch of a copy of rows; GPUs report this number.
const PITCH_MAX: usize = i32::MAX as usize;

/// Submits a copy and waits for it where the driver does.
fn submit(stream: &Arc<Stream>, copy: Copy) -> Outcome<()> {
    let copy = copy.stage()?;
    let waits = copy.is_waited_for() || copy.has_pageable_source();
    stream.submit(move |chance| copy.run(chance));
    if waits {
        stream.wait_for_all();
        device::current()?;
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize) -> u32 {
    call("cuMemcpyAsync", || {
        device::current()?;
        let stream = stream::get(stream)?;
        if len == 0 {
            return Ok(());
        }
        submit(&stream, Copy::plain(to, from, len)?)
    })
}

/// Returns when the bytes are there.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> u32 {
    call("cuMemcpyDtoH_v2", || {
        let stream = device::current()?.default_stream();
        if len == 0 {
            return Ok(());
        }
        submit(&stream, Copy::plain(to as u64, from, len)?)?;
        stream.wait_for_all();
        device::current().map(drop)
    })
}

/// Returns when the driver has the bytes; from memory that it does not know, they may arrive later.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> u32 {
    call("cuMemcpyHtoD_v2", || {
        let stream = device::current()?.default_stream();
        if len == 0 {
            return Ok(());
        }
        let copy = Copy::plain(to, from as u64, len)?;
        let staged = copy.has_pageable_source();
        submit(&stream, copy)?;
        if !staged {
            stream.wait_for_all();
        }
        device::current().map(drop)
    })
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy2d {
    from: Side2d,
    to: Side2d,
    width: usize,
    rows: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Side2d {
    x: usize,
    y: usize,
    memory_type: u32,
    host: u64,
    device: u64,
    array: usize,
    pitch: usize,
}

impl Side2d {
    /// Where it begins, and its pitch.
    fn place(&self, width: usize) -> Outcome<(u64, usize)> {
        const UNIFIED: u32 = 4;
        if self.memory_type != UNIFIED || self.pitch < width || self.pitch > PITCH_MAX {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok((self.device + (self.y * self.pitch + self.x) as u64, self.pitch))
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpy2DAsync_v2(copy: In<Copy2d>, stream: usize) -> u32 {
    call("cuMemcpy2DAsync_v2", || {
        device::current()?;
        let (copy, stream) = (copy.get()?, stream::get(stream)?);
        let (to, from) = (copy.to.place(copy.width)?, copy.from.place(copy.width)?);
        if copy.width == 0 || copy.rows == 0 {
            return Ok(());
        }
        submit(&stream, Copy::of_rows(to, from, copy.width, copy.rows)?)
    })
}

/// `CUmemcpyAttributes`, with both hints as kind and number.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    order: u32,
    from: [u32; 2],
    to: [u32; 2],
    flags: u32,
}

/// The lists of a batch.
struct Batch {
    to: In<u64>,
    from: In<u64>,
    lens: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    first: In<usize>,
    attribute_count: usize,
}

impl Batch {
    /// The copies of a batch have no order among each other, so they are made in any.
    fn submit(&self, stream: usize, failed: &mut usize) -> Outcome<()> {
        device::current()?;
        *failed = usize::MAX;
        // The default stream is refused.
        let stream = if stream == 0 { Err(CudaError::INVALID_VALUE) } else { stream::get(stream) }?;
        let (attributes, first) =
            (self.attributes.list(self.attribute_count)?, self.first.list(self.attribute_count)?);
        let orders = attributes.iter().all(|attribute| (1..=3).contains(&attribute.order));
        if self.count == 0 || first.first() != Some(&0) || !first.is_sorted() || !orders {
            return Err(CudaError::INVALID_VALUE);
        }
        let (to, from, lens) =
            (self.to.list(self.count)?, self.from.list(self.count)?, self.lens.list(self.count)?);
        let mut copies = Vec::new();
        for (nth, ((to, from), len)) in to.into_iter().zip(from).zip(lens).enumerate() {
            *failed = nth;
            let copy = if len == 0 { Err(CudaError::INVALID_VALUE) } else { Copy::plain(to, from, len) }?;
            copies.push(copy.stage()?);
        }
        let waits = copies.iter().any(Copy::is_waited_for);
        stream.submit(move |chance| {
            chance.shuffle(&mut copies);
            copies.iter().try_for_each(|copy| copy.run(chance))
        });
        if waits {
            stream.wait_for_all();
        }
        device::current().map(drop)
    }
}

/// As CUDA 12.8 declares it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyBatchAsync(
    to: In<u64>,
    from: In<u64>,
    lens: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    first: In<usize>,
    attribute_count: usize,
    failed: Out<usize>,
    stream: usize,
) -> u32 {
    call("cuMemcpyBatchAsync", || {
        let batch = Batch { to, from, lens, count, attributes, first, attribute_count };
        let mut nth = usize::MAX;
        let outcome = batch.submit(stream, &mut nth);
        if outcome.is_err() && !failed.is_null() {
            failed.set(nth)?;
        }
        outcome
    })
}

/// As CUDA 13 declares it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyBatchAsync_v2(
    to: In<u64>,
    from: In<u64>,
    lens: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    first: In<usize>,
    attribute_count: usize,
    stream: usize,
) -> u32 {
    call("cuMemcpyBatchAsync_v2", || {
        let batch = Batch { to, from, lens, count, attributes, first, attribute_count };
        batch.submit(stream, &mut 0)
    })
}
