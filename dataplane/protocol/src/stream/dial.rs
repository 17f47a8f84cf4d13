//! Connecting to a Unix socket without waiting for ever.

use kvasir_os::time::{Duration, Instant};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Practically no limit, and still a point in time.
const LIMIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Connects to the socket at `path`. [`UnixStream::connect`] waits until the other side accepts somebody, if as many as it lets
/// wait are waiting; this waits for `limit` at most. The stream has no timeouts.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] if nobody was accepted in time; others as [`UnixStream::connect`].
pub fn connect_unix(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let until = Instant::now() + limit.min(LIMIT_MAX);
    loop {
        // A non-blocking socket would not do: Linux tells it to try again, and offers nothing to wait for.
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        set_socket_timeout(&socket, Timeout::Send, Some(left))?;
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) if Instant::now() < until => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                let text = format!("nobody was accepted there for {limit:?}; it is overloaded, or it hangs");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(error) => return Err(error.into()),
        }
    }
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_socket_where_nobody_is_accepted_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("full.sock");
        let nobody = connect_unix(&path, Duration::from_secs(3600)).unwrap_err();
        assert_eq!(nobody.kind(), io::ErrorKind::NotFound);

        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        // One waits to be accepted, which is as many as may.
        let mut first = connect_unix(&path, Duration::from_secs(3600)).unwrap();
        let late = connect_unix(&path, Duration::from_millis(20)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "{late}");

        let mut other = UnixStream::from(rustix::net::accept(&socket).unwrap());
        first.write_all(b"word").unwrap();
        other.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(first.write_timeout().unwrap(), None);
        drop((other, socket));
        let closed = connect_unix(&path, Duration::from_secs(3600)).unwrap_err();
        assert_eq!(closed.kind(), io::ErrorKind::ConnectionRefused);
    }
}
