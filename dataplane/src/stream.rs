//! A connection of either kind, with the three things the protocol needs beyond read and write: deadlines,
//! gathering writes, and descriptors that travel with a frame.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

pub enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// No single read or write takes longer than `timeout`.
    pub fn set_timeouts(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))
            }
            Self::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))
            }
        }
    }

    /// Ends the connection for every clone of it.
    pub fn shutdown(&self) {
        // It may be closed already, which is what is wanted.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// What is there already; [`io::ErrorKind::WouldBlock`] if nothing is.
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let received = match self {
            Self::Unix(stream) => rustix::net::recv(stream, buffer, RecvFlags::DONTWAIT),
            Self::Tcp(stream) => rustix::net::recv(stream, buffer, RecvFlags::DONTWAIT),
        };
        Ok(received?.0)
    }

    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Write::write_all(self, bytes)
    }

    /// Writes all parts, in as few calls as the system allows, without joining them first.
    pub fn write_parts(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        /// The most parts that Linux takes at once.
        const AT_ONCE: usize = 1024;
        for parts in parts.chunks(AT_ONCE) {
            let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let mut left = &mut slices[..];
            IoSlice::advance_slices(&mut left, 0);
            while !left.is_empty() {
                match self.write_vectored(left) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(written) => IoSlice::advance_slices(&mut left, written),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write_vectored(parts),
            Self::Tcp(stream) => stream.write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A reader that polls for a moment before it sleeps, while that pays: between two busy threads an answer takes
/// microseconds, and a sleep costs a switch here and a wake-up there.
pub struct Eager {
    pub stream: Stream,
    /// Waits in a row that were short enough to be polled through, and how many it takes before that is tried.
    short: u32,
    needed: u32,
}

impl Eager {
    /// How long a poll lasts.
    const POLL: Duration = Duration::from_micros(40);
    /// A sleep that ended within this, waking up included, might have been a poll.
    const SHORT: Duration = Duration::from_micros(120);
    /// Polls in vain double what is needed for the next, up to this.
    const NEEDED_MAX: u32 = 4096;
    const NEEDED_MIN: u32 = 4;

    pub fn new(stream: Stream) -> Self {
        // With one processor the other side could not answer meanwhile.
        let alone = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        Self { stream, short: 0, needed: if alone { u32::MAX } else { Self::NEEDED_MIN } }
    }

    /// What arrives while polling; none if nothing does.
    fn poll(&mut self, buffer: &mut [u8]) -> Option<io::Result<usize>> {
        let start = Instant::now();
        loop {
            match self.stream.read_now(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if start.elapsed() >= Self::POLL {
                        return None;
                    }
                    std::hint::spin_loop();
                }
                done => return Some(done),
            }
        }
    }
}

impl Read for Eager {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.short >= self.needed {
            if let Some(done) = self.poll(buffer) {
                self.needed = (self.needed - 1).max(Self::NEEDED_MIN);
                return done;
            }
            (self.short, self.needed) = (0, self.needed.saturating_mul(2).min(Self::NEEDED_MAX));
        }
        let start = Instant::now();
        let done = self.stream.read(buffer);
        self.short = if start.elapsed() <= Self::SHORT { self.short.saturating_add(1) } else { 0 };
        done
    }
}

/// A reader that a slow peer cannot keep for ever: reads fail once the deadline has passed, however often single
/// bytes keep arriving.
pub struct Timed {
    pub stream: Eager,
    pub deadline: Option<Instant>,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.read(buffer)
    }
}

/// Writes `bytes` with a descriptor attached to the first of them.
pub fn send_with_fd(stream: &mut UnixStream, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for one descriptor"));
    }
    let sent = rustix::net::sendmsg(&*stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}

/// Reads exactly `bytes`, and the descriptor that came with them, if any.
pub fn receive_with_fd(stream: &mut UnixStream, bytes: &mut [u8]) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(bytes)];
    let got = rustix::net::recvmsg(&*stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(&mut bytes[got..])?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eager_reader_gets_every_byte_the_end_and_its_timeout() {
        let (near, far) = UnixStream::pair().unwrap();
        let echo = std::thread::spawn(move || {
            let (mut reader, mut writer) = (Eager::new(Stream::Unix(far.try_clone().unwrap())), far);
            let mut bytes = [0; 8];
            while reader.read_exact(&mut bytes).is_ok() {
                writer.write_all(&bytes).unwrap();
            }
        });
        let mut writer = near.try_clone().unwrap();
        let mut reader = Eager::new(Stream::Unix(near));
        for n in 0..2_000u64 {
            writer.write_all(&n.to_le_bytes()).unwrap();
            let mut bytes = [0; 8];
            reader.read_exact(&mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), n);
        }
        reader.stream.set_timeouts(Duration::from_millis(1)).unwrap();
        for _ in 0..10 {
            // Also right after a poll in vain.
            assert_eq!(reader.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            reader.short = reader.needed;
        }
        writer.shutdown(Shutdown::Write).unwrap();
        echo.join().unwrap();
        reader.short = reader.needed;
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }
}
