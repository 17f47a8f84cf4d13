//! Settings of the NVMe tier, and why it may not open.

use std::io;
use std::path::PathBuf;

use super::format::{PAGE, SEGMENT_PAGES_MAX, block_pages_largest};
use super::segments::RESERVE;
use kvasir_store::config::{ConfigError, OnFull, at_least_one, invalid};
use kvasir_store::units::{self, Size};
use serde::{Deserialize, Serialize};

/// Settings of one NVMe store: a tier on a local disk. Its blocks outlive the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvmeConfig {
    /// Folder of its files, created if necessary; one host at a time. If empty, a host has no such tier.
    pub dir: PathBuf,
    /// The most bytes that its files take. At least seven segments. Blocks get 7/8 of it less two segments
    /// ([`block_bytes_max`](Self::block_bytes_max)): compaction needs the rest to stay cheap.
    #[serde(with = "units::size")]
    pub capacity_bytes: u64,
    /// Size of one file, a multiple of 4 KiB up to 256 MiB. Fixed once the folder is in use; the largest block is 8 KiB
    /// smaller. Let that be a quarter at most, or much is lost at the ends.
    #[serde(with = "units::size")]
    pub segment_bytes: u64,
    /// Operations at the device at once.
    pub queue_depth: u32,
    /// When what is written becomes durable: [`SyncMode`].
    pub sync: SyncMode,
    /// Use `O_DIRECT` if the file system takes it.
    pub direct_io: bool,
    /// Use `io_uring` if the kernel allows it.
    pub io_uring: bool,
    /// The most bytes that compaction reads per second while nothing waits for space.
    #[serde(with = "units::size")]
    pub compaction_bytes_per_s: u64,
    /// Bytes that are compared with their checksums per second, whether or not anybody asks for them. 0: none.
    #[serde(with = "units::size")]
    pub scrub_bytes_per_s: u64,
    /// What a put does if there is no space for it. Default: it is refused. To evict: the oldest segment goes, with the
    /// blocks that still live in it.
    #[serde(skip)]
    pub on_full: OnFull,
    /// Items under way at once; a batch beyond them is answered `Busy`.
    #[serde(skip)]
    pub items_max: usize,
}

/// When what is written becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyncMode {
    /// At a flush, and when the host stops. A killed process loses nothing that was done; a power cut loses what was not
    /// flushed. Removals are durable when they are done all the same.
    #[default]
    Flush,
    /// Before any put or remove is done: the items written together are synced together.
    Batch,
}

impl Default for NvmeConfig {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            capacity_bytes: 8 << 30,
            segment_bytes: 64 << 20,
            queue_depth: 64,
            sync: SyncMode::Flush,
            direct_io: true,
            io_uring: true,
            compaction_bytes_per_s: 256 << 20,
            scrub_bytes_per_s: 8 << 20,
            on_full: OnFull::Refuse,
            items_max: 1 << 16,
        }
    }
}

impl NvmeConfig {
    /// The defaults, in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), ..Self::default() }
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

    /// The largest block.
    pub(super) fn block_bytes_largest(&self) -> u64 {
        u64::from(block_pages_largest(self.segment_pages())) * PAGE as u64
    }

    /// # Errors
    /// The first setting that makes no sense, with its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (segment, capacity) = (self.segment_bytes, self.capacity_bytes);
        if !segment.is_multiple_of(PAGE as u64)
            || !(64 << 10..=SEGMENT_PAGES_MAX * PAGE as u64).contains(&segment)
        {
            let why = "must be a multiple of 4KiB from 64KiB to 256MiB";
            return Err(invalid("nvme.segment_bytes", Size(segment), why));
        }
        if !(7..1 << 31).contains(&(capacity / segment)) {
            let why = format!("must hold 7 to {} segments of {}", (1u64 << 31) - 1, Size(segment));
            return Err(invalid("nvme.capacity_bytes", Size(capacity), &why));
        }
        if !(1..=4096).contains(&self.queue_depth) {
            return Err(invalid("nvme.queue_depth", self.queue_depth, "must be 1 to 4096"));
        }
        if self.compaction_bytes_per_s < 1 << 20 {
            let rate = Size(self.compaction_bytes_per_s);
            return Err(invalid("nvme.compaction_bytes_per_s", rate, "must be at least 1MiB"));
        }
        at_least_one(&[("items_max of the NVMe tier", self.items_max as u64)])
    }
}

/// Why a store did not open. Nothing was changed, except that directories may have been created.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Setting(#[from] ConfigError),
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
