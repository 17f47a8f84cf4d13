//! The Unix socket of a connection.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvasir_protocol::stream::receive_with_fds;

pub(super) fn receive_fd(stream: &mut UnixStream) -> io::Result<OwnedFd> {
    let fds = receive_with_fds(stream, &mut [0])?;
    fds.into_iter().next().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "a descriptor was announced and did not come")
    })
}

pub(super) fn end(stream: &UnixStream) {
    // It may have ended already, which is just as well.
    let _ = stream.shutdown(Shutdown::Both);
}

/// A socket with a deadline for everything done on it.
pub(super) struct Deadlined<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl<'a> Deadlined<'a> {
    pub(super) fn new(stream: &'a UnixStream, timeout: Duration) -> Self {
        Self { stream, deadline: Instant::now() + timeout }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        left.map(Some).ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl Read for Deadlined<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Deadlined<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
