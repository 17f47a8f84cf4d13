//! Bytes both ways through memory that the two ends of a Unix socket share: no system call while both are awake.
//!
//! One ring per direction, with one reader and one writer each. Positions count bytes since the start and wrap. Before
//! an end sleeps it says so in the ring, and the other one then wakes it with a byte on the socket, which also tells when
//! the other end is gone. No position of the other end is trusted: one that makes no sense ends the connection.

use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::net::SendFlags;

use super::{LONGEST, poll, unless_blocked};
use kvasir_memory::host::{HostPool, Mapping, PoolError};
use kvasir_memory::shared::{Place, Shared};
use kvasir_os::time::Instant;

/// Bytes of one direction. A longer frame goes through in parts.
const CAPACITY: u32 = 64 << 10;
/// Bytes of both rings with their words; pages exist once they are used.
const LEN: u64 = WORDS_LEN + 2 * CAPACITY as u64;
const WORDS_LEN: u64 = 4096;

/// The words of a direction, each on lines of its own, so that the two ends do not slow each other down.
#[derive(Clone, Copy)]
enum Word {
    Written = 0,
    Read = 32,
    ReaderSleeps = 64,
    WriterSleeps = 96,
}
const WORDS: u64 = 128;

/// Which end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Host,
}

/// Memory for a connection, to be sent to the client.
pub fn memory() -> Result<HostPool, PoolError> {
    HostPool::new(LEN, false)
}

/// One end, for one thread at a time: of two that sleep at the socket, the wrong one might be woken.
pub struct Ring {
    memory: Mapping,
    socket: UnixStream,
    /// Direction in which this end writes: 0 to the host, 1 to the client.
    outward: u64,
    written: AtomicU32,
    read: AtomicU32,
    /// Up to where the other end had read what this one wrote, when that was last looked at: a line that the other end changes with each
    /// read is fetched from it only when there seems to be no room.
    seen_read: AtomicU32,
}

impl Ring {
    /// The end `side` of the rings in `memory`, which nobody has used yet, with the `socket` to the other end.
    pub fn new(memory: BorrowedFd<'_>, side: Side, socket: UnixStream) -> io::Result<Self> {
        let memory = Mapping::new(memory, LEN, true)?;
        let outward = u64::from(side == Side::Host);
        let [written, read, seen_read] = [const { AtomicU32::new(0) }; 3];
        Ok(Self { memory, socket, outward, written, read, seen_read })
    }

    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Reads what is there already; [`io::ErrorKind::WouldBlock`] if nothing is.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fill_now(&mut Place::from(buffer))
    }

    /// As [`read_now`](Self::read_now), into memory that others may be reading.
    pub(super) fn fill_now(&self, place: &mut Place<'_>) -> io::Result<usize> {
        let inward = 1 - self.outward;
        let read = self.read.load(Ordering::Relaxed);
        let there = distance(read, self.load(inward, Word::Written))?;
        let count = there.min(u32::try_from(place.left()).unwrap_or(u32::MAX));
        if count == 0 {
            return if place.left() == 0 { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let first = before_the_end(read, count);
        place.copy_in(self.bytes(inward, read, first)?);
        place.copy_in(self.bytes(inward, 0, count as usize - first)?);
        let read = read.wrapping_add(count);
        self.read.store(read, Ordering::Relaxed);
        self.store(inward, Word::Read, read);
        self.wake(inward, Word::WriterSleeps)?;
        Ok(count as usize)
    }

    /// Reads something. As from a socket: 0 at the end, an error when its timeout has passed.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fill(&mut Place::from(buffer))
    }

    /// As [`read`](Self::read), into memory that others may be reading.
    pub(super) fn fill(&self, place: &mut Place<'_>) -> io::Result<usize> {
        let done = self.wait(1 - self.outward, Word::ReaderSleeps, || self.fill_now(place))?;
        Ok(done.unwrap_or(0))
    }

    /// Writes something. As to a socket, except that an end that is gone is noticed only when the ring is full.
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes.into())
    }

    /// As [`write`](Self::write), from memory that others may be changing.
    pub(super) fn send(&self, bytes: Shared<'_>) -> io::Result<usize> {
        match self.write_now(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let done = self.wait(self.outward, Word::WriterSleeps, || self.write_now(bytes))?;
                done.ok_or_else(|| io::ErrorKind::BrokenPipe.into())
            }
            done => done,
        }
    }

    fn write_now(&self, bytes: Shared<'_>) -> io::Result<usize> {
        let written = self.written.load(Ordering::Relaxed);
        let wanted = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut free = CAPACITY - distance(self.seen_read.load(Ordering::Relaxed), written)?;
        if free < wanted {
            let read = self.load(self.outward, Word::Read);
            free = CAPACITY - distance(read, written)?;
            self.seen_read.store(read, Ordering::Relaxed);
        }
        let count = free.min(wanted);
        if count == 0 {
            return if bytes.is_empty() { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let bytes = bytes.first(count as usize);
        let first = before_the_end(written, count);
        self.place(self.outward, written, first)?.copy_in(bytes);
        self.place(self.outward, 0, count as usize - first)?.copy_in(bytes.after(first));
        let written = written.wrapping_add(count);
        self.written.store(written, Ordering::Relaxed);
        self.store(self.outward, Word::Written, written);
        self.wake(self.outward, Word::ReaderSleeps)?;
        Ok(count as usize)
    }

    /// Wakes the other end if it sleeps, so that it is awake when something is written within the next microseconds.
    pub fn announce(&self) -> io::Result<()> {
        self.wake(self.outward, Word::ReaderSleeps)
    }

    /// Sleeps at the socket until `step` does something. Returns `None` when the other end is gone and nothing is left to do.
    fn wait(
        &self,
        direction: u64,
        sleeps: Word,
        mut step: impl FnMut() -> io::Result<usize>,
    ) -> io::Result<Option<usize>> {
        let mut gone = None;
        // When bells that announce nothing have gone on for as long as a silent socket may be.
        let mut until = None;
        loop {
            self.store(direction, sleeps, 1);
            // The other end stores its position and then looks at this word; one of the two sees what the other did.
            fence(Ordering::SeqCst);
            match step() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    self.store(direction, sleeps, 0);
                    return done.map(Some);
                }
            }
            if let Some(gone) = gone {
                return gone;
            }
            match (&self.socket).read(&mut [0; 64]) {
                // The other end may have written before it went.
                Ok(0) => gone = Some(Ok(None)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => gone = Some(Err(error)),
                // This bell announces what is there, or will be in a moment.
                Ok(_) => {
                    if let Ok(done) = poll(LONGEST, || unless_blocked(step())) {
                        return done.map(Some);
                    }
                    if until.is_none() {
                        until = self.socket.read_timeout()?.map(|timeout| Instant::now() + timeout);
                    } else if until.is_some_and(|until| Instant::now() >= until) {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Wakes the other end if it sleeps waiting for what was just changed.
    fn wake(&self, direction: u64, sleeps: Word) -> io::Result<()> {
        fence(Ordering::SeqCst);
        if self.load(direction, sleeps) == 0 {
            return Ok(());
        }
        self.store(direction, sleeps, 0);
        match rustix::net::send(&self.socket, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            // Enough bells are unread already; one more would change nothing.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn load(&self, direction: u64, word: Word) -> u32 {
        // The word always exists: the mapping is LEN bytes long.
        self.memory.load_word(direction * WORDS + word as u64).unwrap_or_default()
    }

    fn store(&self, direction: u64, word: Word, value: u32) {
        self.memory.store_word(direction * WORDS + word as u64, value);
    }

    fn bytes(&self, direction: u64, position: u32, len: usize) -> io::Result<Shared<'_>> {
        self.memory.bytes(place(direction, position), len as u64).ok_or_else(outside)
    }

    fn place(&self, direction: u64, position: u32, len: usize) -> io::Result<Place<'_>> {
        self.memory.place(place(direction, position), len as u64).ok_or_else(outside)
    }
}

/// Where the byte at `position` of a direction lies.
fn place(direction: u64, position: u32) -> u64 {
    WORDS_LEN + direction * u64::from(CAPACITY) + u64::from(position % CAPACITY)
}

/// How many of `count` bytes from `position` on come before the ring begins again.
fn before_the_end(position: u32, count: u32) -> usize {
    count.min(CAPACITY - position % CAPACITY) as usize
}

/// Bytes in the ring.
fn distance(read: u32, written: u32) -> io::Result<u32> {
    let there = written.wrapping_sub(read);
    if there <= CAPACITY { Ok(there) } else { Err(outside()) }
}

fn outside() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the other end stored a position outside the shared ring")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn pair() -> (Ring, Ring) {
        let (near, far) = UnixStream::pair().unwrap();
        let memory = memory().unwrap();
        let end = |side, socket| Ring::new(memory.writable_fd(), side, socket).unwrap();
        (end(Side::Client, near), end(Side::Host, far))
    }

    fn write_all(ring: &Ring, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = &bytes[ring.write(bytes).unwrap()..];
        }
    }

    fn read_exact(ring: &Ring, bytes: &mut [u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let count = ring.read(&mut bytes[at..]).unwrap();
            assert!(count > 0, "ended after {at} B");
            at += count;
        }
    }

    #[test]
    fn frames_of_every_length_go_to_and_fro_and_nobody_sleeps_for_ever() {
        let (near, far) = pair();
        // Lengths around the capacity, so that both ends fill up, run dry and wrap.
        let lengths =
            |n: u32| [1, 7, 100, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY][n as usize % 7];
        let echo = thread::spawn(move || {
            for n in 0..2_000 {
                let mut bytes = vec![0; lengths(n) as usize];
                read_exact(&far, &mut bytes);
                write_all(&far, &bytes);
            }
        });
        let bytes =
            |n: u32| (0..lengths(n)).map(move |at| (at.wrapping_mul(31) ^ n) as u8).collect::<Vec<_>>();
        for n in 0..2_000 {
            write_all(&near, &bytes(n));
            let mut received = vec![0; lengths(n) as usize];
            read_exact(&near, &mut received);
            assert!(received == bytes(n), "frame {n}");
        }
        echo.join().unwrap();
    }

    #[test]
    fn what_was_written_before_the_end_is_still_read() {
        let (near, far) = pair();
        assert_eq!(far.read_now(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        write_all(&near, b"last words");
        drop(near);
        let mut bytes = [0; 32];
        assert_eq!(far.read(&mut bytes).unwrap(), 10);
        assert_eq!(&bytes[..10], b"last words");
        assert_eq!(far.read(&mut bytes).unwrap(), 0);
        let full = (0..).find_map(|_| far.write(&[0; 1 << 12]).err()).unwrap();
        assert_eq!(full.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn an_end_that_was_woken_for_nothing_sleeps_on() {
        let (near, far) = pair();
        let reader = thread::spawn(move || {
            let mut bytes = [0; 3];
            read_exact(&far, &mut bytes);
            bytes
        });
        while near.load(0, Word::ReaderSleeps) == 0 {
            thread::yield_now();
        }
        near.announce().unwrap();
        // It has polled in vain and sleeps again.
        while near.load(0, Word::ReaderSleeps) == 0 {
            thread::yield_now();
        }
        write_all(&near, b"now");
        assert_eq!(&reader.join().unwrap(), b"now");
    }

    #[test]
    fn a_wait_ends_with_the_timeout_of_the_socket() {
        let (near, _far) = pair();
        near.socket().set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert_eq!(near.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        write_all(&near, &vec![1; CAPACITY as usize]);
        assert_eq!(near.write(&[1]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn bells_without_end_do_not_outlast_the_timeout() {
        let (near, far) = pair();
        near.socket().set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let ringing = thread::spawn(move || while (&far.socket).write(&[1]).is_ok() {});
        assert_eq!(near.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(near);
        ringing.join().unwrap();
    }

    #[test]
    fn positions_that_make_no_sense_are_refused() {
        let (near, far) = pair();
        near.store(0, Word::Written, CAPACITY + 1);
        assert_eq!(far.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // This one is looked at where there seems to be no room.
        write_all(&near, &vec![0; CAPACITY as usize]);
        far.store(0, Word::Read, CAPACITY + 1);
        assert_eq!(near.write(&[0]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
