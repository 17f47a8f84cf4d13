//! Memory that another thread or another process may be changing: [`Shared`] is read, [`Place`] is filled.
//!
//! The compiler may assume that what a `&[u8]` shows does not change, and that nobody else touches what a `&mut [u8]`
//! shows. For a pool that clients map and peers read, neither is certain: leases and reservations settle which party may touch
//! which range, and when, and a faulty party may break them. So no reference to such bytes is ever given out. They are copied
//! through pointers, or the kernel is given their addresses. A party that breaks the rules makes others see other *bytes*,
//! which the block's checksum exposes.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::checksum::{Checksum, checksum};

/// Bytes are looked at through a copy of this many at a time, which stays in the first-level cache.
const CHUNK: usize = 8 << 10;
/// The most parts that Linux takes in one call.
pub const PARTS_MAX: usize = 1024;

/// Bytes to read, in memory that others may be changing.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Shared<'a>(libc::iovec, PhantomData<&'a [u8]>);

/// Bytes to write, in memory that others may be reading. Filling it from the front makes it shorter.
#[repr(transparent)]
pub struct Place<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> Shared<'a> {
    /// # Safety
    /// `len` bytes at `base` are initialised and can be read for `'a`.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len }, PhantomData)
    }

    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of the first byte, for a device or a kernel that reads in place.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.iov_base.cast()
    }

    /// What is left after the first `count` bytes; empty if that is all.
    #[must_use]
    pub fn after(&self, count: usize) -> Self {
        let count = count.min(self.len());
        let rest = libc::iovec {
            // SAFETY: `count` is at most the length, so the address stays inside or one past the end.
            iov_base: unsafe { self.0.iov_base.cast::<u8>().add(count) }.cast(),
            iov_len: self.len() - count,
        };
        Self(rest, PhantomData)
    }

    /// The first `count` bytes, or all if there are fewer.
    #[must_use]
    pub fn first(&self, count: usize) -> Self {
        Self(libc::iovec { iov_base: self.0.iov_base, iov_len: count.min(self.len()) }, PhantomData)
    }

    /// Copies its first bytes out, as many as both have, and returns how many.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let count = self.len().min(to.len());
        // SAFETY: both hold `count` bytes. `to` is a unique borrow, and nobody borrows from memory that is shared.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr(), to.as_mut_ptr(), count) };
        count
    }

    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len()];
        self.copy_to(&mut copy);
        copy
    }

    /// Shows the bytes to `look`, a copied piece at a time.
    fn each(&self, mut look: impl FnMut(&[u8])) {
        let mut rest = *self;
        let mut chunk = [0; CHUNK];
        while !rest.is_empty() {
            let count = rest.copy_to(&mut chunk);
            look(&chunk[..count]);
            rest = rest.after(count);
        }
    }

    /// The [`checksum`] of the bytes. Of bytes that are changed meanwhile it is some number.
    pub fn checksum(&self) -> u64 {
        self.hash(checksum)
    }

    /// Adds the bytes to a sum.
    pub fn add_to(&self, sum: &mut Checksum) {
        self.hash(|bytes| sum.update(bytes));
    }

    /// `hash` computes a checksum, and nothing else.
    fn hash<T>(&self, hash: impl FnOnce(&[u8]) -> T) -> T {
        // SAFETY: `len` initialised bytes for as long as `self`. This is the one place where shared bytes are looked at in
        // place: a copy first costs a third of the speed (48 to 61 us for 1 MiB). Where it reads and where it branches
        // depends on the length alone, never on the bytes, and each is read once: a faulty party that changes them gets a
        // sum that does not match.
        hash(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) })
    }

    /// Drops what was sent from the front of a list.
    pub fn advance(parts: &mut &mut [Self], mut count: usize) {
        let mut done = 0;
        for part in parts.iter_mut() {
            let here = count.min(part.len());
            *part = part.after(here);
            count -= here;
            if !part.is_empty() {
                break;
            }
            done += 1;
        }
        *parts = &mut std::mem::take(parts)[done..];
    }
}

impl<'a> From<&'a [u8]> for Shared<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is readable for as long as it is borrowed.
        unsafe { Self::new(NonNull::from(bytes).cast(), bytes.len()) }
    }
}

impl PartialEq<[u8]> for Shared<'_> {
    fn eq(&self, other: &[u8]) -> bool {
        let (mut same, mut rest) = (self.len() == other.len(), other);
        self.each(|chunk| {
            let expected = rest.split_off(..chunk.len()).unwrap_or_default();
            same &= expected == chunk;
        });
        same
    }
}

impl PartialEq<&[u8]> for Shared<'_> {
    fn eq(&self, other: &&[u8]) -> bool {
        *self == **other
    }
}

impl PartialEq<Vec<u8>> for Shared<'_> {
    fn eq(&self, other: &Vec<u8>) -> bool {
        *self == other[..]
    }
}

impl fmt::Debug for Shared<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Enough to tell two blocks apart.
        const SHOWN: usize = 32;
        write!(f, "{} shared bytes: {:02x?}", self.len(), self.first(SHOWN).to_vec())
    }
}

impl<'a> Place<'a> {
    /// # Safety
    /// `len` bytes at `base` can be written for `'a`, and nobody holds a reference to them.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len }, PhantomData)
    }

    /// What is left after the first `count` bytes; empty if that is all.
    #[must_use]
    pub fn after(mut self, count: usize) -> Self {
        self.advance(count.min(self.left()));
        self
    }

    /// The first `count` bytes, or all if there are fewer. Filling them does not make this place shorter.
    pub(crate) fn first(&mut self, count: usize) -> Place<'_> {
        let base = self.0.iov_base;
        Place(libc::iovec { iov_base: base, iov_len: count.min(self.left()) }, PhantomData)
    }

    /// What lies in the first `count` bytes now.
    ///
    /// # Safety
    /// They are initialised.
    pub(crate) unsafe fn shown(&self, count: usize) -> Shared<'_> {
        Shared(libc::iovec { iov_base: self.0.iov_base, iov_len: count.min(self.left()) }, PhantomData)
    }

    /// Bytes that are still to be filled.
    pub fn left(&self) -> usize {
        self.0.iov_len
    }

    /// The address of the first of them, for a device that fills them.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Copies bytes in, as many as fit, and goes on behind them. Returns how many.
    pub fn copy_in(&mut self, from: Shared<'_>) -> usize {
        let count = from.len().min(self.left());
        // SAFETY: both hold `count` bytes; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from.as_ptr(), self.0.iov_base.cast(), count) };
        self.advance(count);
        count
    }

    /// Receives what a socket has, as much as fits, and goes on behind it. Returns how many bytes; 0 at the end of the
    /// stream. `now`: an error of kind [`io::ErrorKind::WouldBlock`] instead of waiting.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, now: bool) -> io::Result<usize> {
        let flags = if now { libc::MSG_DONTWAIT } else { 0 };
        let (base, len) = (self.0.iov_base, self.0.iov_len);
        // SAFETY: the kernel writes at most `len` bytes to a place that holds as many.
        let got = counted(unsafe { libc::recv(socket.as_raw_fd(), base, len, flags) })?;
        self.advance(got);
        Ok(got)
    }

    /// Goes on behind the first `count` bytes, of which there are as many.
    pub(crate) fn advance(&mut self, count: usize) {
        let count = count.min(self.left());
        // SAFETY: `count` is at most the length, so the address stays inside or one past the end.
        self.0.iov_base = unsafe { self.0.iov_base.cast::<u8>().add(count) }.cast();
        self.0.iov_len -= count;
    }
}

impl<'a> From<&'a mut [u8]> for Place<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        let len = bytes.len();
        // SAFETY: a slice is writable for as long as it is borrowed, here by this value alone.
        unsafe { Self::new(NonNull::from(bytes).cast(), len) }
    }
}

/// Receives into places in order, [`PARTS_MAX`] at most. Returns how many bytes came; 0 at the end of the stream.
pub fn receive(socket: BorrowedFd<'_>, places: &mut [Place<'_>]) -> io::Result<usize> {
    let count = places.len().min(PARTS_MAX) as libc::c_int;
    // SAFETY: a place is an iovec (transparent) whose bytes may be written for as long as it lives.
    counted(unsafe { libc::readv(socket.as_raw_fd(), places.as_ptr().cast(), count) })
}

/// Sends parts in order, [`PARTS_MAX`] at most. Returns how many bytes were taken. A peer that is gone is an error, no signal.
pub fn send(socket: BorrowedFd<'_>, parts: &[Shared<'_>]) -> io::Result<usize> {
    send_with(socket, parts, libc::MSG_NOSIGNAL)
}

/// As [`send`], and takes only what fits now: an error of kind [`io::ErrorKind::WouldBlock`] instead of waiting.
pub fn send_now(socket: BorrowedFd<'_>, parts: &[Shared<'_>]) -> io::Result<usize> {
    send_with(socket, parts, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
}

fn send_with(socket: BorrowedFd<'_>, parts: &[Shared<'_>], flags: libc::c_int) -> io::Result<usize> {
    // SAFETY: a message of zeros is one without name and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // The kernel only reads what is sent, and the list of it.
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len().min(PARTS_MAX) as _;
    // SAFETY: a part is an iovec (transparent) whose bytes can be read for as long as it lives; `message` names as many.
    counted(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

fn counted(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_read_is_what_lies_there() {
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7] {
            let mut bytes: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            let copy = bytes.clone();
            let shared = Shared::from(&bytes[..]);
            assert_eq!(shared, copy, "{len} B");
            assert_eq!(shared.checksum(), checksum(&copy), "{len} B");
            assert_eq!((shared.to_vec(), shared.after(len + 1).len()), (copy.clone(), 0));
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
                assert!(Shared::from(&bytes[..]) != copy, "another byte at the end of {len} B");
            }
        }
    }

    #[test]
    fn parts_are_dropped_from_the_front_as_they_are_sent() {
        let parts = [&b"ab"[..], b"", b"cde"].map(Shared::from);
        for (count, expected) in [(0, &b"abcde"[..]), (1, b"bcde"), (2, b"cde"), (4, b"e"), (5, b"")] {
            let mut copy = parts;
            let mut left = &mut copy[..];
            Shared::advance(&mut left, count);
            let rest: Vec<u8> = left.iter().flat_map(Shared::to_vec).collect();
            assert_eq!(rest, expected, "after {count} B");
            assert_eq!(left.is_empty(), expected.is_empty(), "after {count} B");
        }
    }

    #[test]
    fn a_place_is_filled_from_the_front_and_no_further() {
        let mut bytes = [0; 5];
        let mut place = Place::from(&mut bytes[..]);
        assert_eq!(place.copy_in(Shared::from(&b"abc"[..])), 3);
        assert_eq!((place.left(), place.copy_in(Shared::from(&b"defg"[..]))), (2, 2));
        assert_eq!(place.copy_in(Shared::from(&b"h"[..])), 0);
        assert_eq!(&bytes, b"abcde");
    }

    #[test]
    #[cfg_attr(miri, ignore = "calls that Miri does not know")]
    fn sockets_take_and_fill_parts_in_order() {
        let (near, far) = UnixStream::pair().unwrap();
        let sent = send(near.as_fd(), &[&b"abc"[..], b"", b"defgh"].map(Shared::from)).unwrap();
        assert_eq!(sent, 8);
        let (mut first, mut second, mut third) = ([0; 2], [0; 4], [0; 9]);
        let mut places = [&mut first[..], &mut second[..]].map(Place::from);
        assert_eq!(receive(far.as_fd(), &mut places).unwrap(), 6);
        let mut rest = Place::from(&mut third[..]);
        assert_eq!((rest.receive(far.as_fd(), true).unwrap(), rest.left()), (2, 7));
        let blocked = rest.receive(far.as_fd(), true).unwrap_err();
        assert_eq!(blocked.kind(), io::ErrorKind::WouldBlock);
        drop(near);
        assert_eq!(rest.receive(far.as_fd(), false).unwrap(), 0);
        assert_eq!((&first, &second, &third[..2]), (b"ab", b"cdef", &b"gh"[..]));
        assert!(send(far.as_fd(), &[Shared::from(&b"x"[..])]).is_err());
    }
}
