//! Settings of the tiers below the pool, and of the traffic between them.

use super::{Error, Size, Span, invalid, positive};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What goes down to the tiers below the pool, and comes back up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tiering {
    /// `all`: every block about to be evicted is offered to the nearest tier below, unless the evictor names another.
    /// `policy`: only those for which the evictor names a tier.
    pub offload: Offload,
    /// How many times a block must be used after it was first stored to be offered; a block that was turned away before
    /// and came back counts as used once more. 0 leaves it to the admitter alone.
    pub min_uses: u32,
    /// The most blocks per tier being copied down. A victim that finds the queue full is evicted without a copy.
    pub queue_blocks: u32,
    /// The same in bytes; a quarter of the pool at most.
    pub queue_bytes: Size,
    /// The most memory for blocks being loaded; lookups beyond it are told to try again.
    pub load_bytes: Size,
    /// How long a lookup waits for one tier before the block counts as missing there.
    pub load_timeout: Span,
    /// How many blocks are remembered as turned away (per tier), as requested, and as followed by another. 80 B in
    /// total.
    pub recent_blocks: u32,
    /// The most blocks brought up ahead of a reader that walks a chain a few blocks at a time. 0: none.
    pub read_ahead_blocks: u32,
    /// How long a stopping host may take to copy blocks that only the pool has to the NVMe tier, most used first, to
    /// finish copies, and to make them durable. What is not done then is lost.
    pub shutdown_timeout: Span,
}

/// Which victims are offered to the tiers below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    All,
    Policy,
}

/// A tier on a local disk. Its blocks outlive the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nvme {
    /// Folder of its files; one host at a time. If empty, there is no such tier.
    pub dir: PathBuf,
    /// The most bytes that its files take. At least seven segments.
    pub capacity_bytes: Size,
    /// Size of one file. Fixed once the folder is in use; the largest block is 8 KiB smaller.
    pub segment_bytes: Size,
    /// Operations at the device at once.
    pub queue_depth: u32,
    /// `flush`: writes are durable after a flush and when the host stops; a killed host loses nothing, a power cut
    /// loses puts that were not flushed. `batch`: writes that are made together are also synced together.
    pub sync: Sync,
    /// Use `O_DIRECT` if the file system takes it.
    pub direct_io: bool,
    /// Use `io_uring` if the kernel allows it.
    pub io_uring: bool,
    /// The most bytes that compaction reads per second while nothing waits for space.
    pub compaction_bytes_per_s: Size,
}

/// A tier that many hosts may share: a folder, or a bucket of an S3-compatible store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Remote {
    /// `s3://bucket/prefix`, or the path of a folder, local or mounted. If empty, there is no such tier. Credentials
    /// come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`) or the machine.
    pub url: String,
    /// Address of the S3-compatible store, such as `http://10.0.0.7:9000`. If empty: AWS.
    pub endpoint: String,
    pub region: String,
    /// The most bytes this host stores there or learns of. `0B`: no limit.
    pub capacity_bytes: Size,
    /// The most blocks of which this host keeps track. 40 B each.
    pub blocks_max: u64,
    /// The most requests at once; each keeps a copy of its block.
    pub requests_max: u32,
    /// How often a request is made before it fails.
    pub attempts_max: u32,
    /// How long one attempt may take.
    pub attempt_timeout: Span,
    /// Tenants whose blocks are sealed before they leave this host, one `[[remote.keys]]` each.
    pub keys: Vec<TenantKey>,
    /// Other hosts store there too: a lookup that finds a block nowhere else asks for it there, one small request per key at
    /// most every 10 s.
    pub shared: bool,
    /// With keys: also store blocks of tenants without one in clear, and read blocks in clear. Whoever can write there can
    /// then put a block of their own in the place of a sealed one.
    pub allow_plain: bool,
}

/// The key that seals a tenant's blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantKey {
    pub tenant: u16,
    /// File of 64 hexadecimal digits. If it is lost, so are the blocks. A tenant may have several: all of them open
    /// blocks, and the last one seals.
    pub file: PathBuf,
}

/// What [`Remote::url`] names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteUrl {
    Folder(PathBuf),
    S3 { bucket: String, prefix: String },
}

/// When writes are durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sync {
    Flush,
    Batch,
}

impl Default for Tiering {
    fn default() -> Self {
        Self {
            offload: Offload::All,
            min_uses: 1,
            queue_blocks: 1024,
            queue_bytes: Size::mib(256),
            load_bytes: Size::mib(256),
            load_timeout: Span::secs(2),
            recent_blocks: 1 << 16,
            read_ahead_blocks: 8,
            shutdown_timeout: Span::secs(5),
        }
    }
}

impl Default for Nvme {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            capacity_bytes: Size::mib(8 << 10),
            segment_bytes: Size::mib(64),
            queue_depth: 64,
            sync: Sync::Flush,
            direct_io: true,
            io_uring: true,
            compaction_bytes_per_s: Size::mib(256),
        }
    }
}

impl Default for Remote {
    fn default() -> Self {
        Self {
            url: String::new(),
            endpoint: String::new(),
            region: "us-east-1".to_owned(),
            capacity_bytes: Size(0),
            blocks_max: 1 << 24,
            requests_max: 32,
            attempts_max: 5,
            attempt_timeout: Span::secs(30),
            keys: Vec::new(),
            shared: true,
            allow_plain: false,
        }
    }
}

impl Tiering {
    pub(super) fn validate(&self) -> Result<(), Error> {
        let least = [
            ("tiering.queue_blocks", u64::from(self.queue_blocks)),
            ("tiering.queue_bytes", self.queue_bytes.0),
            ("tiering.load_bytes", self.load_bytes.0),
            ("tiering.recent_blocks", self.recent_blocks.into()),
        ];
        if let Some((key, _)) = least.iter().find(|(_, value)| *value == 0) {
            return Err(invalid(key, 0, "must be at least 1"));
        }
        positive(&[
            ("tiering.load_timeout", self.load_timeout),
            ("tiering.shutdown_timeout", self.shutdown_timeout),
        ])
    }
}

impl Nvme {
    pub(super) fn validate(&self) -> Result<(), Error> {
        let (segment, capacity) = (self.segment_bytes, self.capacity_bytes);
        if !segment.0.is_multiple_of(4096) || !(64 << 10..=256 << 20).contains(&segment.0) {
            let why = "must be a multiple of 4KiB from 64KiB to 256MiB";
            return Err(invalid("nvme.segment_bytes", segment, why));
        }
        if capacity.0 / segment.0 < 7 {
            let why = format!("must hold at least seven segments of {segment}");
            return Err(invalid("nvme.capacity_bytes", capacity, &why));
        }
        if !(1..=4096).contains(&self.queue_depth) {
            return Err(invalid("nvme.queue_depth", self.queue_depth, "must be 1 to 4096"));
        }
        if self.compaction_bytes_per_s < Size::mib(1) {
            let why = "must be at least 1MiB";
            return Err(invalid("nvme.compaction_bytes_per_s", self.compaction_bytes_per_s, why));
        }
        Ok(())
    }
}

impl Remote {
    /// Returns `None` if there is no such tier.
    ///
    /// # Errors
    /// It is neither a folder nor a bucket.
    pub fn place(&self) -> Result<Option<RemoteUrl>, Error> {
        let wrong = || invalid("remote.url", &self.url, "must be s3://bucket/prefix or the path of a folder");
        match self.url.split_once("://") {
            None if self.url.is_empty() => Ok(None),
            None => Ok(Some(RemoteUrl::Folder(self.url.clone().into()))),
            Some(("s3", rest)) => match rest.split_once('/').unwrap_or((rest, "")) {
                ("", _) => Err(wrong()),
                (bucket, prefix) => Ok(Some(RemoteUrl::S3 { bucket: bucket.into(), prefix: prefix.into() })),
            },
            Some(_) => Err(wrong()),
        }
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        let place = self.place()?;
        if !self.endpoint.is_empty() && !matches!(place, Some(RemoteUrl::S3 { .. })) {
            return Err(invalid("remote.endpoint", &self.endpoint, "needs remote.url = s3://bucket/prefix"));
        }
        let least = [
            ("remote.blocks_max", self.blocks_max),
            ("remote.requests_max", self.requests_max.into()),
            ("remote.attempts_max", self.attempts_max.into()),
        ];
        if let Some((key, _)) = least.iter().find(|(_, value)| *value == 0) {
            return Err(invalid(key, 0, "must be at least 1"));
        }
        positive(&[("remote.attempt_timeout", self.attempt_timeout)])
    }
}
