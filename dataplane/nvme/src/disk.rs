//! The directory: its lock, its identity, the segment files in it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::OpenError;
use super::format::PAGE;
use kvasir_memory::buffer::Buffer;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::{disk, random, thread};

const LOCK_WAIT: Duration = Duration::from_secs(5);

pub(super) struct Disk {
    dir: PathBuf,
    pub(super) segment_bytes: u64,
    /// Random; it prevents groups of another store's files from being taken for ours.
    pub(super) store: u64,
    /// Whether files are opened with `O_DIRECT`.
    pub(super) direct: bool,
    /// Handle of the directory, to make new files in it durable.
    pub(super) handle: Arc<File>,
    /// Held as long as the store is open.
    pub(super) lock: File,
}

impl Disk {
    pub(super) fn open(dir: &Path, segment_bytes: u64, want_direct: bool) -> Result<Self, OpenError> {
        let failed = |step, source| OpenError::Io { step, path: dir.into(), source };
        std::fs::create_dir_all(dir).map_err(|source| failed("creating the directory", source))?;
        let handle = Arc::new(File::open(dir).map_err(|source| failed("opening the directory", source))?);
        let lock =
            open_rw(&dir.join("lock"), false).map_err(|source| failed("creating the lock file", source))?;
        if !take(&lock) {
            return Err(OpenError::Locked { path: dir.into() });
        }
        let direct = want_direct && takes_direct(&dir.join("probe"));
        let mut disk = Self { dir: dir.into(), segment_bytes, store: 0, direct, handle, lock };
        disk.store = disk.identity()?;
        Ok(disk)
    }

    /// The file of a segment, created at its full size if need be.
    pub(super) fn segment(&self, number: u32) -> io::Result<File> {
        let file = open_rw(&self.segment_path(number), self.direct)?;
        if file.metadata()?.len() < self.segment_bytes {
            match fallocate(&file, FallocateFlags::empty(), 0, self.segment_bytes) {
                Ok(()) => {}
                // The file system cannot reserve space; a full disk then shows when a put writes.
                Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(self.segment_bytes)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(file)
    }

    /// The file of a segment, if there is one. If it was truncated, its end reads as zeros now.
    pub(super) fn existing(&self, number: u32) -> io::Result<Option<File>> {
        match self.segment_path(number).try_exists()? {
            true => self.segment(number).map(Some),
            false => Ok(None),
        }
    }

    pub(super) fn checkpoint_path(&self) -> PathBuf {
        self.dir.join("checkpoint")
    }

    fn segment_path(&self, number: u32) -> PathBuf {
        self.dir.join(format!("segment-{number:06}"))
    }

    /// The store's id, from a file that is written once.
    fn identity(&self) -> Result<u64, OpenError> {
        let path = self.dir.join("store");
        let failed = |step, source| OpenError::Io { step, path: path.clone(), source };
        match std::fs::read_to_string(&path) {
            Ok(text) => self.parse_identity(&text, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let store = fresh_id();
                self.write_identity(store, &path)
                    .map_err(|source| failed("writing the store's identity to", source))?;
                Ok(store)
            }
            Err(source) => Err(failed("reading", source)),
        }
    }

    fn write_identity(&self, store: u64, path: &Path) -> io::Result<()> {
        let text = format!("kvasir-nvme 1\nid {store:016x}\nsegment_bytes {}\n", self.segment_bytes);
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        self.handle.sync_all()
    }

    fn parse_identity(&self, text: &str, path: &Path) -> Result<u64, OpenError> {
        let mut lines = text.lines();
        let version = lines.next();
        let id = lines.next().and_then(|line| line.strip_prefix("id "));
        let id = id.and_then(|id| u64::from_str_radix(id, 16).ok());
        let bytes = lines.next().and_then(|line| line.strip_prefix("segment_bytes "));
        let bytes = bytes.and_then(|bytes| bytes.parse().ok());
        match (version, id, bytes) {
            (Some("kvasir-nvme 1"), Some(id), Some(bytes)) if bytes == self.segment_bytes => Ok(id),
            (Some("kvasir-nvme 1"), Some(_), Some(found)) => {
                Err(OpenError::SegmentBytes { path: self.dir.clone(), found, wanted: self.segment_bytes })
            }
            _ => Err(OpenError::NotAStore { path: path.into() }),
        }
    }
}

fn open_rw(path: &Path, direct: bool) -> io::Result<File> {
    let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
    let mut options = OpenOptions::new();
    disk::open(options.read(true).write(true).create(true).truncate(false).custom_flags(flags), path)
}

/// Takes the lock if its last owner is gone or about to go: the kernel holds it until the writes of a killed process
/// have ended.
fn take(lock: &File) -> bool {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match disk::lock(lock) {
            Ok(()) => return true,
            Err(_) if Instant::now() > deadline => return false,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Whether the file system takes `O_DIRECT`, found out by doing it.
fn takes_direct(probe: &Path) -> bool {
    let page = Buffer::zeroed(PAGE);
    let took = open_rw(probe, true).and_then(|file| file.write_all_at(page.bytes(), 0));
    // What is left behind does no harm.
    let _ = std::fs::remove_file(probe);
    took.is_ok()
}

fn fresh_id() -> u64 {
    let mut bytes = [0; 8];
    random::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}
