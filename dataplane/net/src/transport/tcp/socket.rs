//! A connection whose reads and writes never block; it blocks only where it is told to wait.
//!
//! Because no system call blocks, a lock or a grant's [`Entry`](crate::transport::grant::Entry) is held only while
//! bytes are really copied.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::pki_types::CertificateDer;

use super::queue::Cursor;
use super::tls::{self, Kernel, Session};
use kvasir_memory::shared::{self, PARTS_MAX, Place, Shared};
use kvasir_os::net::{self, PollFd, Shutdown, SocketAddr, TcpStream};
use kvasir_os::time::{Duration, Instant};

/// Wakes a thread that waits on a [`Socket`].
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn wake(&self) {
        // It fails only when 2^64 wakes are pending, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

pub struct Socket {
    stream: TcpStream,
    by: By,
    /// What the peer has shown, with TLS.
    certificate: Option<CertificateDer<'static>>,
}

/// Who encrypts.
enum By {
    Nobody,
    Session(Box<Session>),
    Kernel(Kernel),
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, by: By::Nobody, certificate: None })
    }

    /// Encrypts all that follows, once both sides have shown their certificates; `in_kernel`: where the kernel can, it does.
    pub(super) fn encrypt(
        mut self,
        mut connection: rustls::Connection,
        in_kernel: bool,
        deadline: Instant,
    ) -> io::Result<Self> {
        let waiting = Deadlined { socket: &self, deadline };
        if let Err(error) = tls::shake_hands(&mut connection, &self.stream, |out| waiting.wait_for(out)) {
            waiting.part();
            return Err(error);
        }
        let shown = connection.peer_certificates().and_then(<[_]>::first);
        self.certificate = shown.cloned();
        self.by = if in_kernel && tls::takes(&connection, &self.stream) {
            By::Kernel(Kernel::take_over(connection, &self.stream)?)
        } else {
            By::Session(Box::new(Session::new(connection, self.stream.try_clone()?)))
        };
        Ok(self)
    }

    pub(super) fn is_encrypted(&self) -> bool {
        !matches!(self.by, By::Nobody)
    }

    #[cfg(test)]
    pub(super) fn is_in_kernel(&self) -> bool {
        matches!(self.by, By::Kernel(_))
    }

    /// Checks that the peer has shown a certificate for the name that it gives itself, or says why not. Without TLS its
    /// word counts.
    pub(super) fn certified(&self, peer: &str) -> Result<(), String> {
        if !self.is_encrypted() {
            return Ok(());
        }
        tls::check_name(self.certificate.as_ref().ok_or("it showed none")?, peer)
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Receives bytes and returns how many, or `None` if there are none now.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if let By::Session(session) = &self.by {
            return session.receive(&mut [Place::from(buffer)]);
        }
        match rustix::net::recv(&self.stream, buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => Ok(Some(count)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(self.explain(error.into())),
        }
    }

    /// Receives straight into memory, and what follows into `spare`. Returns how many bytes went to `spare`, or `None`
    /// if there is nothing now.
    pub(super) fn receive_into(&self, cursor: &mut Cursor, spare: &mut [u8]) -> io::Result<Option<usize>> {
        let mut places = Vec::with_capacity(cursor.parts_left().min(PARTS_MAX) + 1);
        places.extend(cursor.places().take(PARTS_MAX - 1));
        // A range that cannot be filled here would shift all that follow it.
        if places.len() < cursor.parts_left().min(PARTS_MAX - 1) {
            return Err(io::Error::other("an operation names memory that this host cannot write"));
        }
        if cursor.parts_left() < PARTS_MAX {
            places.push(Place::from(spare));
        }
        let Some(count) = self.receive_parts(&mut places)? else { return Ok(None) };
        drop(places);
        let here = (count as u64).min(cursor.left());
        cursor.advance(here);
        Ok(Some(count - here as usize))
    }

    fn receive_parts(&self, places: &mut [Place<'_>]) -> io::Result<Option<usize>> {
        if let By::Session(session) = &self.by {
            return session.receive(places);
        }
        match unless_later(shared::receive(self.stream.as_fd(), places)) {
            Ok(Some(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            received => received.map_err(|error| self.explain(error)),
        }
    }

    fn explain(&self, error: io::Error) -> io::Error {
        if matches!(self.by, By::Kernel(_)) { tls::explain(error, &self.stream) } else { error }
    }

    /// Returns how many bytes were taken, or `None` if there is no room now. What was taken is out once
    /// [`flush`](Self::flush) says so.
    pub(super) fn send(&self, parts: &[Shared<'_>]) -> io::Result<Option<usize>> {
        match &self.by {
            By::Nobody => unless_later(shared::send(self.stream.as_fd(), parts)),
            By::Session(session) => session.send(parts),
            By::Kernel(kernel) => unless_later(kernel.send(&self.stream, parts)),
        }
    }

    /// Sends what was taken and is not out yet, as much as fits now. Returns whether nothing is left.
    pub(super) fn flush(&self) -> io::Result<bool> {
        if let By::Session(session) = &self.by { session.flush() } else { Ok(true) }
    }

    /// Waits until something can be read (or, with `out`, written), `wake` is woken, or `timeout` has passed. Returns
    /// whether the socket is the reason.
    pub(super) fn wait(&self, out: bool, wake: Option<&Wake>, timeout: Duration) -> io::Result<bool> {
        let events = if out { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        Ok(self.poll(events, wake, timeout)? == Some(Reason::Socket))
    }

    /// As [`wait`](Self::wait) for something to read, but returns `None` instead of waiting.
    pub(super) fn wait_now(&self, wake: Option<&Wake>) -> Option<io::Result<bool>> {
        let reason = self.poll(PollFlags::IN, wake, Duration::ZERO).transpose();
        reason.map(|reason| Ok(reason? == Reason::Socket))
    }

    /// Waits until something can be written. Fails if that takes longer than `timeout`.
    pub(super) fn wait_writable(&self, timeout: Duration) -> io::Result<()> {
        let ready = self.poll(PollFlags::OUT, None, timeout)?;
        if ready.is_some() { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Why the wait ended, or `None` if the time was over.
    fn poll(&self, events: PollFlags, wake: Option<&Wake>, timeout: Duration) -> io::Result<Option<Reason>> {
        let mut fds = [PollFd::new(&self.stream, events), PollFd::new(&self.stream, PollFlags::empty())];
        let used = if let Some(wake) = wake {
            fds[1] = PollFd::new(&wake.0, PollFlags::IN);
            2
        } else {
            1
        };
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match net::poll(&mut fds[..used], Some(&timeout)) {
            Ok(_) => {}
            // Callers try again, and then wait again.
            Err(Errno::INTR) => return Ok(Some(Reason::Socket)),
            Err(error) => return Err(error.into()),
        }
        let woken = wake.filter(|_| !fds[1].revents().is_empty());
        woken.inspect(|wake| wake.clear());
        let ready = !fds[0].revents().is_empty();
        Ok(if ready { Some(Reason::Socket) } else { woken.map(|_| Reason::Wake) })
    }

    /// Ends the connection in both directions. Waiting threads wake.
    pub fn shut_down(&self) {
        // It may have ended already, which is what is wanted.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Returns `None` if the same call may succeed later.
fn unless_later(done: io::Result<usize>) -> io::Result<Option<usize>> {
    use io::ErrorKind::{Interrupted, WouldBlock};
    match done {
        Err(error) if matches!(error.kind(), Interrupted | WouldBlock) => Ok(None),
        done => done.map(Some),
    }
}

/// Why a wait ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    Socket,
    Wake,
}

/// A socket for a while in which everything must be done: the handshake.
pub struct Deadlined<'a> {
    pub socket: &'a Socket,
    pub deadline: Instant,
}

impl Deadlined<'_> {
    fn wait_for(&self, out: bool) -> io::Result<()> {
        self.wait(if out { PollFlags::OUT } else { PollFlags::IN })
    }

    /// Lets the peer read why it was refused: closing while its bytes wait here would throw away what it has not read.
    pub(super) fn part(&self) {
        let _ = self.socket.stream.shutdown(Shutdown::Write);
        while self.wait(PollFlags::IN).is_ok() && self.socket.receive(&mut [0; 4096]).is_ok() {}
    }

    fn wait(&self, events: PollFlags) -> io::Result<()> {
        let left = self.deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        let left = left.ok_or(io::ErrorKind::TimedOut)?;
        self.socket.poll(events, None, left).map(|_| ())
    }
}

impl Read for Deadlined<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(count) = self.socket.receive(buffer)? {
                return Ok(count);
            }
            self.wait(PollFlags::IN)?;
        }
    }
}

impl Write for Deadlined<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            if let Some(count) = self.socket.send(&[bytes.into()])? {
                return self.flush().map(|()| count);
            }
            self.wait(PollFlags::OUT)?;
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.socket.flush()? {
            self.wait(PollFlags::OUT)?;
        }
        Ok(())
    }
}
