//! The Unix socket of a connection.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

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
