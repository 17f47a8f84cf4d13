//! Host memory shared between the daemon and local engines: one `memfd`, mapped by everyone who holds its
//! descriptor.
//!
//! Other processes map the same memory. Bytes of a committed block do not change while a reader holds a lease, because
//! the store hands a range to a writer only after the last lease on it ended. A party that breaks this rule can make a
//! reader see other *bytes*, which the block's checksum then exposes; no reference to these bytes is given out
//! ([`shared`](super::shared)), so it cannot break what the compiler assumes. The descriptor is sealed against shrinking,
//! so a mapped page cannot disappear.
//!
//! **Who may write.** A client that reads gets a descriptor that maps read-only, and the file's mode is 0, so that another
//! user cannot open it again for writing through `/proc/self/fd`. That does not stop processes of the daemon's own
//! user, which may change the mode back, nor root: they could write to the daemon itself. Among those, and against
//! clients that write, only checksums help, which tell of accidents. A pool that nobody else ever writes to
//! ([`HostPool::read_only_to_others`]) is sealed against writing, and that holds against everybody.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::extents::PAGE;
use super::filling::Filling;
use super::placing::{HUGE_PAGE, HugePages, Pages, Placed, Placing, Range, choose_pages};
use super::runs::{CHUNK, Scatter, checksum_of};
use super::shared::{Place, Shared};
use super::stream::{STEP, copy_past_cache, settle};
use crate::checksum::Checksum;
use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("a pool of 0 B cannot hold a block; set store.pool_bytes")]
    Empty,
    #[error(
        "a pool of {wanted} B is larger than the {available} B this machine can give now; \
         lower store.pool_bytes or stop something else"
    )]
    LargerThanMemory { wanted: u64, available: u64 },
    #[error("a pool of {wanted} B is beyond the most this store addresses, {max} B", max = POOL_MAX)]
    TooLarge { wanted: u64 },
    #[error("the pool of {bytes} B could not be set up: {step} failed: {source}")]
    System { step: &'static str, bytes: u64, source: io::Error },
    #[error(
        "the pool needs {needed} huge pages of 2 MiB and the machine has {free} free; reserve them \
         (sysctl vm.nr_hugepages) or set store.huge_pages = \"auto\""
    )]
    HugePages { needed: u64, free: u64 },
    #[error("NUMA node {node} does not exist, this machine has {there}; change store.numa_node")]
    NumaNode { node: u32, there: String },
    #[error("the pool cannot be bound to NUMA node {node}: {source}; leave store.numa_node empty")]
    Bind { node: u32, source: io::Error },
    #[error(
        "{bytes} B cannot be locked in memory: {source}; the limit is {limit}. Raise it (ulimit -l, LimitMEMLOCK of \
         the service, or the capability CAP_IPC_LOCK) or set store.lock_memory = false"
    )]
    Lock { bytes: u64, limit: String, source: io::Error },
}

/// The extents of a pool count pages with 32 bits.
const POOL_MAX: u64 = (u32::MAX as u64 - 1) * PAGE;

/// A pool in a `memfd`, mapped for reading and writing.
pub struct HostPool {
    fd: OwnedFd,
    /// The same file, opened for reading only, while its mode still allowed that.
    readonly: OwnedFd,
    mapping: Mapping,
    placed: Placed,
    /// All of it has pages.
    filled: AtomicBool,
}

impl HostPool {
    /// Makes a pool of `bytes`, rounded up to whole ordinary pages. With `prefault`, every page is touched now.
    pub fn new(bytes: u64, prefault: bool) -> Result<Self, PoolError> {
        Self::open(bytes, &Placing { huge_pages: HugePages::Off, prefault, ..Placing::default() })
    }

    /// Makes a pool of `bytes`, rounded up to whole pages, that lies as `placing` asks.
    pub fn open(bytes: u64, placing: &Placing) -> Result<Self, PoolError> {
        Self::with_available(bytes, placing, available_memory(), SealFlags::empty())
    }

    /// As [`new`](Self::new), but nobody else can map it for writing, whichever descriptor they have.
    pub fn read_only_to_others(bytes: u64) -> Result<Self, PoolError> {
        let placing = Placing { huge_pages: HugePages::Off, prefault: true, ..Placing::default() };
        Self::with_available(bytes, &placing, available_memory(), SealFlags::FUTURE_WRITE)
    }

    /// `seals`: in addition to those that every pool has.
    fn with_available(
        bytes: u64,
        placing: &Placing,
        available: Option<u64>,
        seals: SealFlags,
    ) -> Result<Self, PoolError> {
        if bytes == 0 {
            return Err(PoolError::Empty);
        }
        if bytes > POOL_MAX {
            return Err(PoolError::TooLarge { wanted: bytes });
        }
        let pages = choose_pages(placing.huge_pages, bytes)?;
        let (page, flags) = match pages {
            Pages::Reserved => (HUGE_PAGE, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB),
            _ => (PAGE, MemfdFlags::empty()),
        };
        let bytes = bytes.next_multiple_of(page);
        // Reserved pages are not part of what is available.
        let short = |&available: &u64| pages != Pages::Reserved && available < bytes;
        if let Some(available) = available.filter(short) {
            return Err(PoolError::LargerThanMemory { wanted: bytes, available });
        }
        let failed = |step| move |error: io::Error| PoolError::System { step, bytes, source: error };
        let fd =
            rustix::fs::memfd_create("kvasir-pool", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .map_err(|e| failed("memfd_create")(e.into()))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(|e| failed("ftruncate")(e.into()))?;
        let seal = |seals| rustix::fs::fcntl_add_seals(&fd, seals).map_err(|e| failed("sealing")(e.into()));
        seal(SealFlags::SHRINK | SealFlags::GROW)?;
        let mapping = Mapping::new(fd.as_fd(), bytes, true).map_err(failed("mmap"))?;
        seal(seals | SealFlags::SEAL)?;
        let readonly =
            File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(failed("opening it again"))?;
        rustix::fs::fchmod(&fd, Mode::empty()).map_err(|e| failed("fchmod")(e.into()))?;
        let placed = Placed { pages, numa_node: placing.numa_node, locked: placing.lock };
        let mut pool =
            Self { fd, readonly: readonly.into(), mapping, placed, filled: AtomicBool::new(false) };
        let memory = pool.range(0, bytes);
        if pages == Pages::Transparent && !memory.advise_huge() {
            pool.placed.pages = Pages::Ordinary;
        }
        placing.numa_node.map_or(Ok(()), |node| memory.bind(node))?;
        if placing.lock {
            memory.lock()?;
        }
        if placing.lock || placing.prefault {
            pool.fill().map_err(failed("prefault"))?;
        }
        Ok(pool)
    }

    /// Gives pages to all of it now, unless that was done before. A card that is to read it takes them otherwise, and takes small ones.
    ///
    /// # Errors
    /// There is no memory left.
    pub fn fill(&self) -> io::Result<()> {
        let (mut filling, mut filled) = (Filling::default(), 0);
        while !self.is_filled() && filled < self.bytes() {
            filled = filling.step(self, filled)?;
        }
        self.filled.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether [`fill`](Self::fill) gave pages to all of it.
    pub fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    /// Bytes `from..to` of it, of which whoever asks is to be sure that they lie in it.
    pub(super) fn range(&self, from: u64, to: u64) -> Range {
        Range {
            base: self.mapping.base.as_ptr().wrapping_add(from as usize).cast(),
            len: (to - from) as usize,
        }
    }

    /// Bytes of the pool, whole pages.
    pub fn bytes(&self) -> u64 {
        self.mapping.len()
    }

    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// How its pages lie.
    pub fn placed(&self) -> Placed {
        self.placed
    }

    /// The descriptor that a writer maps.
    pub fn writable_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A read-only descriptor of the same memory: it cannot be mapped for writing. See the module text about who could
    /// make another one of it.
    pub fn readonly_fd(&self) -> io::Result<OwnedFd> {
        self.readonly.try_clone()
    }
}

/// A shared mapping of a pool, in the daemon or in a client.
pub struct Mapping {
    base: NonNull<u8>,
    len: u64,
    writable: bool,
}

// SAFETY: the mapping is plain memory owned by this value; it is not tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives reads of bytes and copies into ranges that the store has lent to one writer; see the
// module text for what happens when a peer breaks that rule.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd`, which must be a sealed pool of at least that length.
    pub fn new(fd: BorrowedFd<'_>, len: u64, writable: bool) -> io::Result<Self> {
        let real = rustix::fs::fstat(fd)?.st_size as u64;
        let sealed = rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
        if len == 0 || real < len || !sealed {
            let text =
                format!("descriptor has {real} B, sealed: {sealed}; a sealed pool of {len} B was announced");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let size = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let base = map_aligned(fd, size, prot)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Self { base, len, writable })
    }

    /// The address of the first byte.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The `index`-th 32-bit word, loaded atomically; what was written before it was stored is visible afterwards.
    /// Returns `None` if it lies outside.
    pub fn load_word(&self, index: u64) -> Option<u32> {
        self.word(index).map(|word| word.load(Ordering::Acquire))
    }

    /// Stores the `index`-th 32-bit word. Returns false and stores nothing if it lies outside or the mapping is
    /// read-only.
    pub fn store_word(&self, index: u64, value: u32) -> bool {
        let word = self.word(index).filter(|_| self.writable);
        word.inspect(|word| word.store(value, Ordering::Release)).is_some()
    }

    fn word(&self, index: u64) -> Option<&AtomicU32> {
        let at = self.at(index.checked_mul(4)?, 4)?;
        // SAFETY: four bytes inside the mapping, aligned because the mapping begins at a page; other processes touch
        // them as atomics too. Loads are plain reads, which a read-only mapping allows; `store_word` checks.
        Some(unsafe { AtomicU32::from_ptr(at.cast()) })
    }

    /// The bytes of a range, or `None` if it does not lie in the mapping. They are a committed block's if the caller holds
    /// a lease on it.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<Shared<'_>> {
        let at = NonNull::new(self.at(offset, len)?)?;
        // SAFETY: the range lies in the mapping, which lives as long as `self`; `u8` has no invalid values.
        Some(unsafe { Shared::new(at, len as usize) })
    }

    /// A range to be filled, or `None` if it does not lie in the mapping or the mapping is read-only. Filling one that the
    /// caller has not reserved damages what others keep there, as any process that maps it could; no reference sees it.
    pub fn place(&self, offset: u64, len: u64) -> Option<Place<'_>> {
        let at = NonNull::new(self.at(offset, len).filter(|_| self.writable)?)?;
        // SAFETY: the range lies in the mapping, which is writable and lives as long as `self`; no references to its bytes
        // are made in this crate.
        Some(unsafe { Place::new(at, len as usize) })
    }

    /// Copies `from` to `offset`, where the caller has reserved as much (see [`place`](Self::place)). Returns false and
    /// writes nothing if the range does not lie in the mapping or the mapping is read-only.
    pub fn write(&self, offset: u64, from: &[u8]) -> bool {
        let place = self.place(offset, from.len() as u64);
        place.map(|mut place| place.copy_in(from.into())).is_some()
    }

    /// Like [`write`](Self::write), for blocks: large ones are copied past the cache.
    pub fn write_block(&self, offset: u64, block: &[u8]) -> bool {
        let Some(place) = self.place(offset, block.len() as u64) else { return false };
        Scatter::new(&mut [place], false).copy(block.into());
        true
    }

    /// Like [`write`](Self::write), and returns the checksum of what was written, taken while the bytes are in cache.
    /// Calls `soon` about ten microseconds before it is done.
    pub fn write_checksummed(&self, offset: u64, from: &[u8], soon: impl Fn()) -> Option<u64> {
        self.gather(offset, &[from.into()], soon)
    }

    /// [`write_checksummed`](Self::write_checksummed) of parts that follow each other at `offset`, in the same single pass.
    pub fn gather(&self, offset: u64, parts: &[Shared<'_>], soon: impl Fn()) -> Option<u64> {
        const SOON: usize = 256 << 10;
        let len = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(part.len()))?;
        let to = self.at(offset, len as u64).filter(|_| self.writable)?;
        // A caller that made a slice of this memory by itself may name the very place that it fills.
        let (start, end) = (to as usize, to as usize + len);
        let overlaps = |part: &Shared<'_>| {
            let at = part.as_ptr() as usize;
            !part.is_empty() && at < end && start < at + part.len()
        };
        if parts.iter().any(overlaps) {
            return None;
        }
        if len <= CHUNK {
            soon();
            let mut place = self.place(offset, len as u64)?;
            for &part in parts {
                place.copy_in(part);
            }
            return Some(checksum_of(parts));
        }
        let (mut sum, mut done, mut is_soon) = (Checksum::default(), 0, false);
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                if !is_soon && done + SOON >= len {
                    is_soon = true;
                    soon();
                }
                let chunk = rest.first(STEP);
                // The checksum first, which brings the chunk into the cache, then the copy out of it.
                chunk.add_to(&mut sum);
                // SAFETY: what was done and this chunk are at most `len` bytes, which fit at `to`, and no part was found to
                // overlap them.
                unsafe { copy_past_cache(chunk, to.add(done)) };
                done += chunk.len();
                rest = rest.after(STEP);
            }
        }
        settle();
        Some(sum.finish())
    }

    fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        // SAFETY: offset <= end <= len of the mapping, so the pointer stays inside it (or one past its end).
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(offset as usize) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length and is not used after this.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) };
    }
}

/// Maps a file at an address that is a multiple of a huge page, without which its huge pages are mapped as small ones. The kernel looks for
/// such an address only if it makes huge pages by itself.
fn map_aligned(fd: BorrowedFd<'_>, size: usize, prot: ProtFlags) -> io::Result<*mut c_void> {
    let huge = HUGE_PAGE as usize;
    if size < huge {
        // SAFETY: a fresh mapping at an address the kernel chooses; it aliases nothing in this process.
        return Ok(unsafe { rustix::mm::mmap(null_mut(), size, prot, MapFlags::SHARED, fd, 0) }?);
    }
    let whole = size.checked_next_multiple_of(huge).and_then(|whole| whole.checked_add(huge));
    let whole = whole.ok_or(io::ErrorKind::FileTooLarge)?;
    // SAFETY: as above; it only keeps the addresses.
    let kept = unsafe {
        rustix::mm::mmap_anonymous(
            null_mut(),
            whole,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let before = kept.addr().next_multiple_of(huge) - kept.addr();
    let base = kept.wrapping_byte_add(before);
    // SAFETY: all of it lies in what was just mapped, of which nobody else knows.
    let mapped = unsafe { rustix::mm::mmap(base, size, prot, MapFlags::SHARED | MapFlags::FIXED, fd, 0) };
    // What is not needed is given back, which is all of it if that failed.
    let (used, failed) = match mapped {
        Ok(_) => (before..before + size.next_multiple_of(PAGE as usize), None),
        Err(error) => (0..0, Some(error)),
    };
    for unused in [0..used.start, used.end..whole] {
        if !unused.is_empty() {
            // SAFETY: the part of what was mapped here in which the file is not.
            let _ = unsafe { rustix::mm::munmap(kept.wrapping_byte_add(unused.start), unused.len()) };
        }
    }
    failed.map_or(Ok(base), |error| Err(error.into()))
}

/// Bytes that this machine (and this control group) can still give, or `None` if the system does not say.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024;
    let read =
        |name| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    let group = read("memory.max").map(|max| max.saturating_sub(read("memory.current").unwrap_or(0)));
    Some(group.map_or(machine, |group| group.min(machine)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use crate::checksum::checksum;

    use super::*;

    #[test]
    fn sizes_are_checked() {
        let check = |bytes, available, expected: &str| {
            let placing = Placing { huge_pages: HugePages::Off, ..Placing::default() };
            let result = HostPool::with_available(bytes, &placing, available, SealFlags::empty());
            let text = result.map_or_else(|error| error.to_string(), |pool| format!("{} B", pool.bytes()));
            assert!(text.contains(expected), "{text}");
        };
        check(0, None, "0 B cannot hold");
        check(1, None, "4096 B");
        check(4097, Some(8192), "8192 B");
        check(8193, Some(8192), "12288 B is larger than the 8192 B");
        check(u64::MAX, None, "beyond the most");
    }

    #[test]
    fn readers_see_writes_and_cannot_write() {
        let pool = HostPool::new(8192, true).unwrap();
        assert_eq!(pool.mapping().write_checksummed(4096, b"bytes", || {}), Some(checksum(b"bytes")));
        let fd = pool.readonly_fd().unwrap();
        let reader = Mapping::new(fd.as_fd(), 8192, false).unwrap();
        assert_eq!(reader.bytes(4096, 5).unwrap(), &b"bytes"[..]);
        assert!(!reader.write(0, b"x"));
        assert!(reader.place(0, 1).is_none());
        assert!(Mapping::new(fd.as_fd(), 8192, true).is_err(), "a read-only descriptor maps read-only");
        assert!(Mapping::new(fd.as_fd(), 12288, false).is_err(), "longer than the pool");
    }

    /// Huge pages can be mapped as such then.
    #[test]
    fn what_has_huge_pages_is_mapped_where_one_begins() {
        for bytes in [HUGE_PAGE, HUGE_PAGE + 4096, 5 * HUGE_PAGE] {
            let pool = HostPool::new(bytes, false).unwrap();
            let other = Mapping::new(pool.writable_fd(), bytes, true).unwrap();
            for mapping in [pool.mapping(), &other] {
                assert_eq!(mapping.base.addr().get() % HUGE_PAGE as usize, 0, "{bytes}");
            }
            assert!(other.write(bytes - 1, b"x"));
            assert_eq!(pool.mapping().bytes(bytes - 1, 1).unwrap(), &b"x"[..]);
        }
    }

    /// Whether a process of `user` that inherits `fd` can open it again for reading and writing.
    fn reopens_for_writing(fd: OwnedFd, user: Option<u32>) -> bool {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "exec 3<>/proc/self/fd/0"]).stdin(fd).stderr(std::process::Stdio::null());
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        command.status().unwrap().success()
    }

    #[test]
    fn a_read_only_descriptor_is_not_opened_anew_for_writing() {
        let pool = HostPool::new(4096, false).unwrap();
        // Root opens everything, so it takes the place of another user, without a name on most machines.
        let user = rustix::process::geteuid().is_root().then_some(65_432);
        let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC).unwrap();
        assert!(reopens_for_writing(open, user), "this is what is to be prevented");
        assert!(!reopens_for_writing(pool.readonly_fd().unwrap(), user));
        assert!(pool.readonly_fd().is_ok(), "more than once");
    }

    #[test]
    fn a_pool_that_is_read_only_to_others_is_so_with_every_descriptor() {
        let pool = HostPool::read_only_to_others(4096).unwrap();
        assert!(pool.mapping().store_word(0, 7), "its maker still writes");
        for fd in [pool.writable_fd(), pool.readonly_fd().unwrap().as_fd()] {
            assert!(Mapping::new(fd, 4096, true).is_err());
            assert_eq!(Mapping::new(fd, 4096, false).unwrap().load_word(0), Some(7));
        }
        assert!(rustix::io::pwrite(pool.writable_fd(), b"x", 0).is_err());
    }

    #[test]
    fn ranges_outside_are_refused() {
        let pool = HostPool::new(4096, false).unwrap();
        let mapping = pool.mapping();
        for (offset, len) in [(0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(mapping.bytes(offset, len).is_none());
        }
        assert!(!mapping.write(4095, b"xy"));
        assert!(!mapping.write_block(4095, b"xy"));
        assert_eq!(mapping.write_checksummed(4095, b"xy", || {}), None);
    }

    #[test]
    fn long_writes_have_the_checksum_of_the_whole() {
        let pool = HostPool::new(1 << 20, false).unwrap();
        let data: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
        let calls = std::cell::Cell::new(0);
        for len in [1, 8192, 8193, 100_000] {
            calls.set(0);
            let sum = pool.mapping().write_checksummed(64, &data[..len], || calls.set(calls.get() + 1));
            assert_eq!((sum, calls.get()), (Some(checksum(&data[..len])), 1), "{len} B");
            assert_eq!(pool.mapping().bytes(64, len as u64).unwrap(), &data[..len]);
        }
    }

    #[test]
    fn a_place_is_not_filled_from_itself() {
        let pool = HostPool::new(64 << 10, false).unwrap();
        let whole = pool.mapping().at(0, 64 << 10).unwrap();
        for (from, to, len, expected) in [
            (0, 4096, 4096, true),
            (0, 4095, 4096, false),
            (4096, 1, 4096, false),
            (0, 8192, 16384, false),
            (0, 0, 0, true),
        ] {
            // SAFETY: the pool is mapped for as long as this test runs, and this thread alone touches it.
            let slice = unsafe { std::slice::from_raw_parts(whole.add(from), len) };
            let done = pool.mapping().write_checksummed(to, slice, || {});
            assert_eq!(done.is_some(), expected, "{len} B from {from} to {to}");
        }
    }
}
