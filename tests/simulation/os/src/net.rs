//! TCP between simulated hosts.
//!
//! A host's end of a connection is one end of a pair of Unix sockets, so that everything that asks the kernel about a
//! descriptor finds one. The network has the other ends: whenever no thread can run, it takes what was written ([`Network`]),
//! and puts it into the other host's socket when its time has come. The only place where a thread waits is [`poll`].

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use std::net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs};

use rustix::event::{PollFlags, Timespec};

use crate::schedule::{self, On};

mod network;
mod watch;

pub(crate) use network::Network;
pub(crate) use watch::Watch;

/// What [`poll`] waits for on one descriptor.
pub struct PollFd<'a> {
    fd: BorrowedFd<'a>,
    events: PollFlags,
    revents: PollFlags,
}

impl<'a> PollFd<'a> {
    pub fn new(fd: &'a impl AsFd, events: PollFlags) -> Self {
        Self::from_borrowed_fd(fd.as_fd(), events)
    }

    pub fn from_borrowed_fd(fd: BorrowedFd<'a>, events: PollFlags) -> Self {
        Self { fd, events, revents: PollFlags::empty() }
    }

    pub fn revents(&self) -> PollFlags {
        self.revents
    }
}

/// As `poll(2)`, in virtual time.
pub fn poll(fds: &mut [PollFd<'_>], timeout: Option<&Timespec>) -> rustix::io::Result<usize> {
    let nanos = |time: &Timespec| (time.tv_sec as u64).saturating_mul(1_000_000_000) + time.tv_nsec as u64;
    let until = timeout.map(|time| schedule::now().saturating_add(nanos(time)));
    loop {
        let mut real: Vec<rustix::event::PollFd<'_>> =
            fds.iter().map(|fd| rustix::event::PollFd::from_borrowed_fd(fd.fd, fd.events)).collect();
        let ready = rustix::event::poll(&mut real, Some(&Timespec::default()))?;
        let revents: Vec<PollFlags> = real.iter().map(rustix::event::PollFd::revents).collect();
        fds.iter_mut().zip(revents).for_each(|(fd, revents)| fd.revents = revents);
        if ready > 0 || until.is_some_and(|until| until <= schedule::now()) {
            return Ok(ready);
        }
        let _watched = watch::Watched::new(fds.iter().map(|fd| (fd.fd, fd.events)))?;
        schedule::wait(On::Sockets, until);
    }
}

fn wait_for(fd: &impl AsFd, events: PollFlags, time: Option<Duration>) -> io::Result<()> {
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    let ready = poll(&mut [PollFd::new(fd, events)], time.as_ref())?;
    if ready == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
}

#[derive(Debug)]
pub struct TcpStream {
    /// Handles on it have one descriptor: 30 hosts have thousands of connections.
    socket: Arc<UnixStream>,
    local: SocketAddr,
    peer: SocketAddr,
    shared: Arc<Settings>,
}

/// What all handles on a socket share.
#[derive(Debug, Default)]
struct Settings {
    nonblocking: AtomicBool,
    timeouts: Mutex<(Option<Duration>, Option<Duration>)>,
}

impl TcpStream {
    fn new(socket: UnixStream, local: SocketAddr, peer: SocketAddr) -> Self {
        socket.set_nonblocking(true).expect("a socket can be told not to block");
        Self { socket: Arc::new(socket), local, peer, shared: Arc::default() }
    }

    pub fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        let address = address.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
        Self::connect_timeout(&address, Duration::from_secs(120))
    }

    pub fn connect_timeout(address: &SocketAddr, timeout: Duration) -> io::Result<Self> {
        network::connect(*address, timeout)
    }

    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        let (socket, shared) = (Arc::clone(&self.socket), Arc::clone(&self.shared));
        Ok(Self { socket, local: self.local, peer: self.peer, shared })
    }

    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    pub fn set_nodelay(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.shared.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.shared.timeouts.lock().unwrap_or_else(PoisonError::into_inner).0 = time;
        Ok(())
    }

    pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.shared.timeouts.lock().unwrap_or_else(PoisonError::into_inner).1 = time;
        Ok(())
    }

    fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.repeat(PollFlags::IN, || (&*self.socket).read(buffer))
    }

    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        self.repeat(PollFlags::OUT, || (&*self.socket).write(bytes))
    }

    fn repeat(&self, events: PollFlags, mut attempt: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match attempt() {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && !self.shared.nonblocking.load(Ordering::Relaxed) => {}
                done => return done,
            }
            let (read, write) = *self.shared.timeouts.lock().unwrap_or_else(PoisonError::into_inner);
            wait_for(&*self.socket, events, if events == PollFlags::IN { read } else { write })?;
        }
    }
}

impl Read for TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_some(buffer)
    }
}

impl Read for &TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_some(buffer)
    }
}

impl Write for TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_some(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Write for &TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_some(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A door: the network writes a byte into it for each connection that waits.
#[derive(Debug)]
pub struct TcpListener {
    door: UnixStream,
    address: SocketAddr,
    /// Closes the port with the last handle.
    port: Arc<Port>,
}

#[derive(Debug)]
struct Port(SocketAddr);

impl Drop for Port {
    fn drop(&mut self) {
        schedule::world().net.close(self.0);
    }
}

impl TcpListener {
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        let address = address.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
        let (door, outside) = UnixStream::pair()?;
        door.set_nonblocking(true)?;
        let address = network::listen(address, outside)?;
        Ok(Self { door, address, port: Arc::new(Port(address)) })
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { door: self.door.try_clone()?, address: self.address, port: Arc::clone(&self.port) })
    }

    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        loop {
            match (&self.door).read(&mut [0]) {
                // It was shut down.
                Ok(0) => return Err(rustix::io::Errno::INVAL.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_for(&self.door, PollFlags::IN, None)?;
                    continue;
                }
                Err(error) => return Err(error),
            }
            if let Some((socket, peer)) = schedule::world().net.accepted(self.address) {
                return Ok((TcpStream::new(socket, self.address, peer), peer));
            }
        }
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.door.as_fd()
    }
}

/// Connects within `timeout`, from a local address if one is given.
pub fn connect_from(_: Option<IpAddr>, to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    network::connect(to, timeout)
}
