//! Which way of moving pages is fastest for runs of which length, as measured on this GPU.

use std::fmt;
use std::time::Duration;

/// A way to execute descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// Our own kernel.
    Kernel,
    /// `cuMemcpyBatchAsync`: one call for all runs. Drivers from 12.8 on.
    Batch,
    /// `cuMemcpy2DAsync`: a call per descriptor. Every driver has it.
    Copies2d,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kernel => "kernel",
            Self::Batch => "batch",
            Self::Copies2d => "copies-2d",
        })
    }
}

/// How long one path took for a sample of runs of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    pub run_bytes: u64,
    pub path: Path,
    pub took: Duration,
}

/// The fastest path per length of run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Sorted by length; each is best from its length up to the next.
    best: Vec<(u64, Path)>,
}

impl Choice {
    /// Takes the fastest path for each length that was measured.
    pub fn of(measured: &[Measured]) -> Self {
        let mut all = measured.to_vec();
        all.sort_by_key(|m| (m.run_bytes, m.took));
        all.dedup_by_key(|m| m.run_bytes);
        Self { best: all.into_iter().map(|m| (m.run_bytes, m.path)).collect() }
    }

    /// The path for runs of `run_bytes` on average: that of the longest sample that is no longer, or else of the
    /// shortest.
    pub fn path(&self, run_bytes: u64) -> Path {
        let below = self.best.iter().rev().find(|&&(from, _)| from <= run_bytes);
        below.or(self.best.first()).map_or(Path::Copies2d, |&(_, path)| path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_the_nearest_length_is_taken() {
        let measured = |run_bytes, path, ms| Measured { run_bytes, path, took: Duration::from_millis(ms) };
        let choice = Choice::of(&[
            measured(4096, Path::Kernel, 5),
            measured(256, Path::Copies2d, 9),
            measured(256, Path::Kernel, 3),
            measured(65_536, Path::Kernel, 5),
            measured(65_536, Path::Batch, 4),
            measured(4096, Path::Batch, 6),
        ]);
        for (run_bytes, expected) in [
            (1, Path::Kernel),
            (256, Path::Kernel),
            (65_535, Path::Kernel),
            (65_536, Path::Batch),
            (u64::MAX, Path::Batch),
        ] {
            assert_eq!(choice.path(run_bytes), expected, "{run_bytes}");
        }
        assert_eq!(Choice::of(&[]).path(1), Path::Copies2d, "what every driver has");
    }
}
