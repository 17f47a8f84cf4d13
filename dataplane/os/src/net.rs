//! TCP, and the one call in which a thread waits for sockets.

use std::io;
use std::time::Duration;

pub use rustix::event::{PollFd, poll};
pub use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};

/// Connects within `timeout`, from a local address if one is given, which picks the network card.
///
/// # Errors
/// As [`TcpStream::connect_timeout`]; the local address is none of this machine.
pub fn connect_from(local: Option<IpAddr>, to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(to), socket2::Type::STREAM, None)?;
    if let Some(local) = local {
        socket.bind(&SocketAddr::new(local, 0).into())?;
    }
    socket.connect_timeout(&to.into(), timeout)?;
    Ok(socket.into())
}
