//! Memory that transfers may touch: a [`Region`] knows where its bytes are and keeps them there.
//!
//! Everyone who names a region shares it, and its bytes are written by sockets, devices and peers while other
//! parts of the process hold the region too. Therefore no `&[u8]` is given out here: bytes are copied in and out. Which
//! party may touch which range, and when, is settled above, by reservations, leases and grants. A party that breaks those rules
//! makes others see other *bytes*, never an invalid value.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};

use super::buffer::Buffer;
use super::device_handle::MemoryHandle;
use super::host::{HostPool, Mapping};
use super::shared::{Place, Shared};

/// Where memory is, as the topology matrix names it: `cpu:0` is the memory of NUMA node 0, `cuda:0` that of GPU 0.
/// GPUs count in order of PCI address, as CUDA does with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Location {
    Cpu(u16),
    Cuda(u16),
}

impl Location {
    /// Whether a processor reads and writes it directly.
    pub fn is_host(self) -> bool {
        matches!(self, Self::Cpu(_))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, number) = match self {
            Self::Cpu(node) => ("cpu", node),
            Self::Cuda(device) => ("cuda", device),
        };
        f.pad(&format!("{kind}:{number}"))
    }
}

/// Text that names no location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no memory location; write cpu:N or cuda:N")]
pub struct NotALocation(String);

impl FromStr for Location {
    type Err = NotALocation;

    fn from_str(text: &str) -> Result<Self, NotALocation> {
        let parsed = text.split_once(':').and_then(|(kind, number)| {
            // `parse` alone would also take "+1".
            let number = number.parse().ok().filter(|_| number.bytes().all(|b| b.is_ascii_digit()))?;
            match kind {
                "cpu" => Some(Self::Cpu(number)),
                "cuda" => Some(Self::Cuda(number)),
                _ => None,
            }
        });
        // It may come from a peer, so the message is kept short.
        parsed.ok_or_else(|| NotALocation(text.chars().take(64).collect()))
    }
}

impl From<Location> for String {
    fn from(location: Location) -> Self {
        location.to_string()
    }
}

impl TryFrom<String> for Location {
    type Error = NotALocation;

    fn try_from(text: String) -> Result<Self, NotALocation> {
        text.parse()
    }
}

/// Something that owns bytes at a fixed address.
///
/// # Safety
/// From the first call on and for as long as the value lives, `base` returns the same address, and `len` bytes from
/// there are valid for reads (and for writes if `writable`) by the processor where `location` is a host location, and
/// by the device that `location` names otherwise.
pub unsafe trait Memory: Send + Sync {
    fn base(&self) -> NonNull<u8>;
    fn len(&self) -> u64;
    fn location(&self) -> Location {
        Location::Cpu(0)
    }
    fn writable(&self) -> bool {
        true
    }
    /// The descriptor whose bytes from 0 on are this memory, if other processes may map it.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// A descriptor of the same memory that cannot be mapped for writing, if other processes may map it.
    fn readonly_fd(&self) -> Option<OwnedFd> {
        None
    }
    /// The handle by which another process opens this memory, if it is on a device.
    fn handle(&self) -> Option<MemoryHandle> {
        None
    }
    /// A dma-buf of all of this memory, by which a network adapter reaches it; or why there is none. Not called for memory
    /// of the host.
    fn dma_buf(&self) -> Result<OwnedFd, String> {
        Err("nobody exports it as a dma-buf".to_owned())
    }
    /// Copies a device's bytes out, from `offset` on; the range lies inside. Returns false if it cannot; `to` is then
    /// undefined. Not called for memory of the host.
    fn load(&self, _offset: u64, _to: &mut [u8]) -> bool {
        false
    }
    /// Copies bytes to a device, like [`load`](Self::load).
    fn store(&self, _offset: u64, _from: &[u8]) -> bool {
        false
    }
    /// Takes all of its memory from the system, in pages that suit a card best. Called before a card pins it; what fails is met again there.
    fn fill(&self) {}
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes of a pool, kept mapped for as long as a region names them.
struct PoolMemory(Arc<HostPool>);

// SAFETY: a mapping does not move or shrink (it is sealed) while the pool lives, and a pool is mapped for writing.
unsafe impl Memory for PoolMemory {
    fn base(&self) -> NonNull<u8> {
        self.0.mapping().base()
    }
    fn len(&self) -> u64 {
        self.0.bytes()
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.writable_fd())
    }
    fn readonly_fd(&self) -> Option<OwnedFd> {
        self.0.readonly_fd().ok()
    }
    fn fill(&self) {
        let _ = self.0.fill();
    }
}

/// A peer's pool, mapped here.
struct MappedMemory(Arc<Mapping>);

// SAFETY: a mapping does not move or shrink (its descriptor is sealed) while it lives.
unsafe impl Memory for MappedMemory {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn writable(&self) -> bool {
        self.0.is_writable()
    }
}

/// A buffer of our own; `base` was taken while it could still be borrowed for writing.
struct BufferMemory {
    base: NonNull<u8>,
    buffer: Buffer,
}

// SAFETY: the buffer is owned by this value, which never touches its bytes itself.
unsafe impl Send for BufferMemory {}
// SAFETY: as above.
unsafe impl Sync for BufferMemory {}

// SAFETY: a buffer's bytes have a fixed address until it is dropped.
unsafe impl Memory for BufferMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn len(&self) -> u64 {
        self.buffer.len() as u64
    }
    fn writable(&self) -> bool {
        true
    }
}

/// A piece of another region.
struct RangeMemory(LocalRange);

// SAFETY: a range lies inside its region, whose memory stays where it is while the range keeps the region.
unsafe impl Memory for RangeMemory {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: `offset` lies inside the region, so the address stays in the same allocation.
        unsafe { self.0.region.base().add(self.0.offset as usize) }
    }
    fn len(&self) -> u64 {
        self.0.len
    }
    fn location(&self) -> Location {
        self.0.region.location()
    }
    fn writable(&self) -> bool {
        self.0.region.writable()
    }
    fn fill(&self) {
        self.0.region.fill();
    }
}

/// Memory that transfers may name. Clones are the same region; the memory lives until the last is gone, so an
/// operation that holds a range of it can never be left with a dangling address.
#[derive(Clone)]
pub struct Region(Arc<Inner>);

struct Inner {
    id: u64,
    base: NonNull<u8>,
    len: u64,
    location: Location,
    writable: bool,
    memory: Box<dyn Memory>,
}

// SAFETY: the pointer belongs to `memory`, which is `Send + Sync` and lives as long.
unsafe impl Send for Inner {}
// SAFETY: as above; bytes are only ever copied through raw pointers.
unsafe impl Sync for Inner {}

impl Region {
    pub fn new(memory: Box<dyn Memory>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let (base, len) = (memory.base(), memory.len());
        let (location, writable) = (memory.location(), memory.writable());
        Self(Arc::new(Inner { id, base, len, location, writable, memory }))
    }

    /// The whole of a pool.
    pub fn of_pool(pool: Arc<HostPool>) -> Self {
        Self::new(Box::new(PoolMemory(pool)))
    }

    /// All of a mapping; read-only if the mapping is.
    pub fn of_mapping(mapping: Arc<Mapping>) -> Self {
        Self::new(Box::new(MappedMemory(mapping)))
    }

    /// A buffer's bytes.
    pub fn of_buffer(mut buffer: Buffer) -> Self {
        let base = NonNull::from(buffer.bytes_mut()).cast();
        Self::new(Box::new(BufferMemory { base, buffer }))
    }

    /// A reference to it that does not keep it alive.
    pub fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.0))
    }

    /// A region of just these bytes, so that a peer can be granted no more of the memory.
    pub fn of_range(range: LocalRange) -> Self {
        Self::new(Box::new(RangeMemory(range)))
    }

    /// Unique in this process and never reused.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    pub fn len(&self) -> u64 {
        self.0.len
    }

    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    pub fn location(&self) -> Location {
        self.0.location
    }

    pub fn writable(&self) -> bool {
        self.0.writable
    }

    /// See [`Memory::fd`].
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.memory.fd()
    }

    /// See [`Memory::readonly_fd`].
    pub fn readonly_fd(&self) -> Option<OwnedFd> {
        self.0.memory.readonly_fd()
    }

    /// See [`Memory::handle`].
    pub fn handle(&self) -> Option<MemoryHandle> {
        self.0.memory.handle()
    }

    /// See [`Memory::dma_buf`].
    pub fn dma_buf(&self) -> Result<OwnedFd, String> {
        self.0.memory.dma_buf()
    }

    /// See [`Memory::fill`].
    pub fn fill(&self) {
        self.0.memory.fill();
    }

    /// The address of the first byte; a device address if [`location`](Self::location) is a device.
    pub fn base(&self) -> NonNull<u8> {
        self.0.base
    }

    /// A range of this region, or `None` if it is empty or does not lie inside.
    pub fn range(&self, offset: u64, len: u64) -> Option<LocalRange> {
        let inside = len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.len());
        inside.then(|| LocalRange { region: self.clone(), offset, len })
    }

    /// All of it, or `None` if it is empty.
    pub fn whole(&self) -> Option<LocalRange> {
        self.range(0, self.len())
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {} ({} B at {})", self.id, self.len, self.location)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A reference to a region that may be gone.
#[derive(Clone, Debug)]
pub struct WeakRegion(Weak<Inner>);

impl WeakRegion {
    /// The region, if someone still holds it.
    pub fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(Region)
    }
}

/// A piece of a region. It lies inside and has at least one byte.
#[derive(Clone, Debug)]
pub struct LocalRange {
    region: Region,
    offset: u64,
    len: u64,
}

impl LocalRange {
    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false; it is here only because [`len`](Self::len) is.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The address of its first byte; see [`Region::base`].
    pub fn address(&self) -> *mut u8 {
        // SAFETY: `offset` lies inside the region, so the address stays in the same allocation.
        unsafe { self.region.base().as_ptr().add(self.offset as usize) }
    }

    /// Its bytes for the kernel to read. `None` means that they are on a device.
    pub fn shared(&self) -> Option<Shared<'_>> {
        let base = NonNull::new(self.address()).filter(|_| self.region.location().is_host())?;
        // SAFETY: the range lies in its region, which is memory of the host and lives as long as `self`.
        Some(unsafe { Shared::new(base, self.len as usize) })
    }

    /// Its bytes for the kernel to fill. `None` means that they are on a device, or read-only.
    pub fn place(&self) -> Option<Place<'_>> {
        let usable = self.region.location().is_host() && self.region.writable();
        let base = NonNull::new(self.address()).filter(|_| usable)?;
        // SAFETY: the range lies in its region, which is writable memory of the host and lives as long as `self`; regions
        // give out no references.
        Some(unsafe { Place::new(base, self.len as usize) })
    }

    /// The part of it that begins `skip` bytes in and has `len` bytes, or `None` if that does not lie inside.
    pub fn part(&self, skip: u64, len: u64) -> Option<Self> {
        let inside = len > 0 && skip.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Self { region: self.region.clone(), offset: self.offset + skip, len })
    }

    /// Takes in a range that begins where this one ends. Returns whether it did.
    pub fn join(&mut self, next: &Self) -> bool {
        let adjoins = self.region.id() == next.region.id() && self.offset + self.len == next.offset;
        if adjoins {
            self.len += next.len;
        }
        adjoins
    }

    /// Copies its first bytes out, as many as both have, and returns how many: 0 if a device has them and does not give
    /// them.
    pub fn copy_out(&self, to: &mut [u8]) -> usize {
        let len = to.len().min(self.len as usize);
        if !self.region.location().is_host() {
            return if self.region.0.memory.load(self.offset, &mut to[..len]) { len } else { 0 };
        }
        // SAFETY: both sides hold `len` bytes, `to` is a unique borrow, and regions give out no borrows of their own.
        unsafe { std::ptr::copy_nonoverlapping(self.address(), to.as_mut_ptr(), len) };
        len
    }

    /// Copies bytes in, as many as both have, and returns how many: 0 if the memory is read-only, or on a device that
    /// does not take them.
    pub fn copy_in(&self, from: &[u8]) -> usize {
        let len = if self.region.writable() { from.len().min(self.len as usize) } else { 0 };
        if !self.region.location().is_host() {
            return if self.region.0.memory.store(self.offset, &from[..len]) { len } else { 0 };
        }
        // SAFETY: as for `copy_out`; the memory is writable. A caller with a slice of the same memory from elsewhere
        // (a pool's mapping) may overlap it, which `copy` allows.
        unsafe { std::ptr::copy(from.as_ptr(), self.address(), len) };
        len
    }

    /// Copies from another range, as many bytes as both have. Host memory only. Returns how many were copied.
    pub fn copy_from(&self, from: &Self) -> u64 {
        let usable =
            self.region.location().is_host() && self.region.writable() && from.region.location().is_host();
        let len = if usable { self.len.min(from.len) } else { 0 };
        // SAFETY: both ranges lie in live host memory; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from.address(), self.address(), len as usize) };
        len
    }
}

/// Copies the bytes of one list of ranges to another, in order, at most `chunk` bytes at a time, until either ends.
/// Before each chunk it calls `go_on`, and holds the result while it copies. Returns how many bytes were copied,
/// and why it stopped before the end. Host memory only.
pub fn copy_ranges<G, E>(
    from: &[LocalRange],
    to: &[LocalRange],
    chunk: u64,
    mut go_on: impl FnMut() -> Result<G, E>,
) -> (u64, Result<(), E>) {
    let mut copied = 0;
    for (source, target) in pairs(from, to, chunk) {
        let guard = match go_on() {
            Ok(guard) => guard,
            Err(error) => return (copied, Err(error)),
        };
        if target.copy_from(&source) != source.len {
            break;
        }
        drop(guard);
        copied += source.len;
    }
    (copied, Ok(()))
}

/// Cuts two lists of ranges, in order, into pairs of equally long pieces of at most `chunk` bytes, until either ends.
pub fn pairs(
    from: &[LocalRange],
    to: &[LocalRange],
    chunk: u64,
) -> impl Iterator<Item = (LocalRange, LocalRange)> {
    let (mut from, mut to) = (from.iter().cloned(), to.iter().cloned());
    let (mut source, mut target) = (from.next(), to.next());
    std::iter::from_fn(move || {
        let (s, t) = (source.as_ref()?, target.as_ref()?);
        let len = s.len.min(t.len).min(chunk.max(1));
        let pair = (s.part(0, len)?, t.part(0, len)?);
        let (next_source, next_target) = (s.part(len, s.len - len), t.part(len, t.len - len));
        source = next_source.or_else(|| from.next());
        target = next_target.or_else(|| to.next());
        Some(pair)
    })
}

/// The slice of at most `len` bytes of a list of ranges that begins `skip` bytes in.
pub fn part_of(ranges: &[LocalRange], mut skip: u64, mut len: u64) -> Vec<LocalRange> {
    let mut parts = Vec::new();
    for range in ranges {
        if len == 0 {
            break;
        }
        if skip >= range.len {
            skip -= range.len;
            continue;
        }
        let take = len.min(range.len - skip);
        parts.extend(range.part(skip, take));
        (skip, len) = (0, len - take);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_read_as_they_print() {
        for location in [Location::Cpu(0), Location::Cpu(7), Location::Cuda(3)] {
            assert_eq!(location.to_string().parse(), Ok(location));
        }
        for text in ["", "cpu", "cpu:", "cpu:-1", "gpu:0", "cuda:99999"] {
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
    }

    #[test]
    fn ranges_lie_inside() {
        let region = Region::of_buffer(Buffer::zeroed(100));
        for (offset, len, expected) in [
            (0, 100, true),
            (99, 1, true),
            (0, 0, false),
            (100, 1, false),
            (1, 100, false),
            (u64::MAX, 2, false),
        ] {
            assert_eq!(region.range(offset, len).is_some(), expected, "{offset} {len}");
        }
        let range = region.range(10, 20).unwrap();
        assert_eq!(range.part(5, 15).map(|part| (part.offset(), part.len())), Some((15, 15)));
        assert!(range.part(5, 16).is_none() && range.part(u64::MAX, 1).is_none());
    }

    #[test]
    fn bytes_are_copied_in_across_and_out() {
        let pool = Arc::new(HostPool::new(8192, false).unwrap());
        let (a, b) = (Region::of_pool(pool.clone()), Region::of_buffer(Buffer::zeroed(64)));
        assert!(a.fd().is_some() && b.fd().is_none());
        assert_eq!(a.range(4096, 5).unwrap().copy_in(b"bytes and more"), 5);
        assert_eq!(pool.mapping().bytes(4096, 6).unwrap(), &b"bytes\0"[..]);
        assert_eq!(b.range(1, 5).unwrap().copy_from(&a.range(4096, 4096).unwrap()), 5);
        let mut out = [9; 6];
        assert_eq!(b.range(0, 6).unwrap().copy_out(&mut out), 6);
        assert_eq!(&out, b"\0bytes");
    }

    #[test]
    fn lists_of_ranges_are_cut_and_copied_in_order() {
        let from = Region::of_buffer(Buffer::copy_of(b"abcdefghij"));
        let to = Region::of_buffer(Buffer::zeroed(10));
        let ranges = |region: &Region, list: &[(u64, u64)]| -> Vec<LocalRange> {
            list.iter().map(|&(offset, len)| region.range(offset, len).unwrap()).collect()
        };
        let (a, b) = (ranges(&from, &[(5, 5), (0, 5)]), ranges(&to, &[(0, 3), (6, 4), (3, 3)]));
        assert_eq!(copy_ranges(&a, &b, 2, || Ok::<_, ()>(())), (10, Ok(())));
        let mut out = [0; 10];
        to.whole().unwrap().copy_out(&mut out);
        assert_eq!(&out, b"fghcdeijab");

        let mut calls = 0;
        let stop = || {
            if {
                calls += 1;
                calls
            } > 2
            {
                Err("stop")
            } else {
                Ok(())
            }
        };
        assert_eq!(copy_ranges(&a, &b, 2, stop), (3, Err("stop")), "two chunks: 2 B, then 1 B");

        let spans: Vec<_> = part_of(&b, 2, 6).iter().map(|part| (part.offset(), part.len())).collect();
        assert_eq!(spans, [(2, 1), (6, 4), (3, 1)]);
        assert!(part_of(&b, 10, 1).is_empty() && part_of(&b, 0, 0).is_empty());
    }
}
