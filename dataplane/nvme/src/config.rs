//! Settings of the NVMe tier, and why it may not open.

use std::io;
use std::path::PathBuf;

use super::format::{PAGE, SEGMENT_PAGES_MAX};
use super::segments::RESERVE;

/// Settings of one NVMe store.
#[derive(Clone, Debug, PartialEq)]
pub struct NvmeConfig {
    /// Where the files are; created if necessary. One store at a time.
    pub dir: PathBuf,
    /// Bytes the segment files take at most; at least seven segments. Blocks get 7/8 of it less two segments
    /// ([`block_bytes_max`](Self::block_bytes_max)): compaction needs the rest to stay cheap. Default 8 GiB.
    pub capacity_bytes: u64,
    /// Bytes of one segment file, a multiple of 4 KiB up to 256 MiB. Fixed when the store is first opened. The largest
    /// block is two pages less; let it be a quarter at most, or much is lost at the ends. Default 64 MiB.
    pub segment_bytes: u64,
    /// Operations at the device at once. Default 64.
    pub queue_depth: u32,
    /// When what is written becomes durable. Default: at a flush.
    pub sync: SyncMode,
    /// What a put does if there is no space for it. Default: it is refused.
    pub on_full: OnFull,
    /// Use `O_DIRECT` where the file system takes it. Default true.
    pub direct_io: bool,
    /// Use `io_uring` where the kernel allows it. Default true.
    pub io_uring: bool,
    /// The most bytes that compaction reads per second while no put waits for space. Default 256 MiB.
    pub compaction_bytes_per_s: u64,
    /// Items under way at once; a batch beyond them is answered `Busy`. Default 65,536.
    pub items_max: usize,
}

/// When what is written becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SyncMode {
    /// At a flush. A killed process loses nothing that was done; a power cut loses what was not flushed. Removals are
    /// durable when they are done all the same.
    #[default]
    None,
    /// Before any put or remove is done: the items written together are synced together.
    Batch,
}

/// What a put does if there is no space for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnFull {
    /// It ends with `Full`; the caller evicts.
    #[default]
    Refuse,
    /// It waits until the oldest segment is dropped, with the blocks that still live in it.
    Evict,
}

impl NvmeConfig {
    /// The defaults, in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            capacity_bytes: 8 << 30,
            segment_bytes: 64 << 20,
            queue_depth: 64,
            sync: SyncMode::None,
            on_full: OnFull::Refuse,
            direct_io: true,
            io_uring: true,
            compaction_bytes_per_s: 256 << 20,
            items_max: 1 << 16,
        }
    }

    /// Bytes of blocks, each rounded up to 4 KiB, that the store holds at most.
    pub fn block_bytes_max(&self) -> u64 {
        self.block_pages_max() * PAGE as u64
    }

    pub(super) fn block_pages_max(&self) -> u64 {
        let segments = u64::from(self.segments()).saturating_sub(RESERVE as u64);
        segments * u64::from(self.segment_pages()) / 8 * 7
    }

    pub(super) fn segments(&self) -> u32 {
        (self.capacity_bytes / self.segment_bytes.max(1)).min(u32::MAX.into()) as u32
    }

    pub(super) fn segment_pages(&self) -> u32 {
        (self.segment_bytes / PAGE as u64) as u32
    }

    /// The largest block: all of a segment but its first header page, and one page of slack.
    pub(super) fn block_bytes_largest(&self) -> u64 {
        self.segment_bytes - 2 * PAGE as u64
    }

    pub(super) fn check(&self) -> Result<(), OpenError> {
        let refuse = |name, value, rule| Err(OpenError::Setting { name, value, rule });
        let segment = self.segment_bytes;
        if !segment.is_multiple_of(PAGE as u64)
            || !(64 << 10..=SEGMENT_PAGES_MAX * PAGE as u64).contains(&segment)
        {
            return refuse("segment_bytes", segment, "a multiple of 4 KiB from 64 KiB to 256 MiB");
        }
        if !(7..1 << 31).contains(&(self.capacity_bytes / segment)) {
            return refuse("capacity_bytes", self.capacity_bytes, "at least seven segments");
        }
        if !(1..=4096).contains(&self.queue_depth) {
            return refuse("queue_depth", self.queue_depth.into(), "from 1 to 4096");
        }
        if self.items_max == 0 {
            return refuse("items_max", 0, "at least 1");
        }
        if self.compaction_bytes_per_s < 1 << 20 {
            return refuse("compaction_bytes_per_s", self.compaction_bytes_per_s, "at least 1 MiB");
        }
        Ok(())
    }
}

/// Why a store did not open. Nothing was changed, except that directories may have been created.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("nvme.{name} is {value}; it must be {rule}")]
    Setting { name: &'static str, value: u64, rule: &'static str },
    #[error("{step} {path} failed: {source}", path = path.display())]
    Io { step: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is in use by another store; stop it or choose another directory", path = path.display())]
    Locked { path: PathBuf },
    #[error(
        "{path} was made with segments of {found} B, not {wanted} B; set segment_bytes so, or empty the directory",
        path = path.display()
    )]
    SegmentBytes { path: PathBuf, found: u64, wanted: u64 },
    #[error("{path} does not describe a store of this version; empty the directory", path = path.display())]
    NotAStore { path: PathBuf },
    #[error("{path} holds segment {found}, but a capacity of {segments} segments has none; raise capacity_bytes or \
             empty the directory", path = path.display())]
    Shrunk { path: PathBuf, found: u32, segments: u32 },
    #[error(
        "{segments} segment files need as many descriptors, and the limit is {limit}; raise it (ulimit -n) or \
             segment_bytes"
    )]
    Descriptors { segments: u32, limit: u64 },
}

/// What opening a store found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    pub blocks: u64,
    /// Bytes of those blocks.
    pub block_bytes: u64,
    /// Segments taken from the checkpoint, and those read because it did not have (all of) them.
    pub segments_from_checkpoint: u32,
    pub segments_scanned: u32,
    pub scanned_bytes: u64,
    pub took: std::time::Duration,
    /// Damaged records found; they are misses.
    pub corrupt: u64,
    /// Something is slower or less safe than it could be; each says why.
    pub warnings: Vec<String>,
}
