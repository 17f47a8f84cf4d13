//! The measurements that decide which way is taken.

use std::time::{Duration, Instant};

use super::{Measured, PageMover, Pages, Path, Way};
use crate::memory::error::CudaError;
use crate::memory::pool::DevicePool;
use crate::memory::stream::Stream;
use kvasir_memory::layout::paged::Descriptor;

/// One head's vector of a token, a page of one head, and a page of all heads: the lengths of runs in practice.
const RUN_BYTES: [u64; 4] = [256, 2 << 10, 16 << 10, 128 << 10];
/// Bytes of one sample: a large block.
pub(super) const SAMPLE_BYTES: u64 = 4 << 20;
/// Rows of one descriptor: tokens of a page.
const ROWS: u64 = 16;
/// The first try loads what is loaded lazily and is not counted; the fastest of the others counts.
const TRIES: usize = 4;

/// How long each existing way takes for each length of run. The time is what the caller sees, including the cost of
/// starting and waiting.
pub(super) fn measure(mover: &mut PageMover) -> Result<Vec<Measured>, CudaError> {
    // Pages are at every second place, so that their rows are not adjacent.
    let engine = DevicePool::open(&mover.device, 2 * SAMPLE_BYTES)?.region();
    let block = DevicePool::open(&mover.device, SAMPLE_BYTES)?.region();
    let stream = Stream::new(&mover.device)?;
    let (Some(block), engine) = (block.whole(), [engine]) else { return Ok(Vec::new()) };
    let mut measured = Vec::new();
    for run_bytes in RUN_BYTES {
        let descriptors = sample(run_bytes);
        let pages = Pages { engine: &engine, block: &block, descriptors: &descriptors };
        for path in mover.paths() {
            match fastest(mover, &stream, path, pages) {
                Ok(took) => measured.push(Measured { run_bytes, path, took }),
                Err(error) => mover.forget(path, error)?,
            }
        }
    }
    // A way that failed for one length is not used for another.
    let paths = mover.paths();
    measured.retain(|m| paths.contains(&m.path));
    Ok(measured)
}

fn fastest(
    mover: &mut PageMover,
    stream: &Stream,
    path: Path,
    pages: Pages<'_>,
) -> Result<Duration, CudaError> {
    let mut fastest = Duration::MAX;
    for nth in 0..TRIES {
        let start = Instant::now();
        mover.begin_by(path, stream, pages, Way::Gather)?.wait()?;
        if nth > 0 {
            fastest = fastest.min(start.elapsed());
        }
    }
    Ok(fastest)
}

/// Runs of one length, in descriptors of [`ROWS`] or as many as the sample has.
fn sample(run_bytes: u64) -> Vec<Descriptor> {
    let rows = (SAMPLE_BYTES / run_bytes).min(ROWS);
    let count = SAMPLE_BYTES / (run_bytes * rows);
    let descriptor = |nth: u64| Descriptor {
        layer: 0,
        region: 0,
        engine_offset: nth * rows * run_bytes * 2,
        block_offset: nth * rows * run_bytes,
        run_bytes,
        rows: rows as u32,
        engine_stride: run_bytes * 2,
        block_stride: run_bytes,
    };
    (0..count).map(descriptor).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tiles::{Span, moves};
    use super::*;

    #[test]
    fn samples_are_as_long_as_they_say_and_lie_inside() {
        for run_bytes in RUN_BYTES {
            let sample = sample(run_bytes);
            assert_eq!(sample.iter().map(Descriptor::bytes).sum::<u64>(), SAMPLE_BYTES, "{run_bytes}");
            let (engine, block) =
                (Span { address: 0, len: 2 * SAMPLE_BYTES }, Span { address: 0, len: SAMPLE_BYTES });
            assert!(moves(&[engine], block, &sample).is_ok(), "{run_bytes}");
        }
    }
}
