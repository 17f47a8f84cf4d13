//! A plain stream for a while in which everything must be done: the handshake.

use kvasir_os::time::{Duration, Instant};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use kvasir_os::net::{self, PollFd};
use rustix::event::{PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

/// A socket with a deadline for all that is done on it, however often a byte comes. Its own timeouts stay as they are.
pub(super) struct Deadlined<'a, S> {
    socket: &'a S,
    deadline: Instant,
}

impl<'a, S: AsFd> Deadlined<'a, S> {
    pub(super) fn new(socket: &'a S, timeout: Duration) -> Self {
        Self { socket, deadline: Instant::now() + timeout }
    }

    /// Repeats `attempt`, which does not wait, until it succeeds or the time is over.
    fn until_done(
        &self,
        events: PollFlags,
        mut attempt: impl FnMut() -> rustix::io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match attempt() {
                Err(Errno::AGAIN | Errno::INTR) => {}
                done => return Ok(done?),
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            match net::poll(&mut [PollFd::new(self.socket, events)], Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl<S: AsFd> Read for Deadlined<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let receive = || Ok(rustix::net::recv(self.socket, &mut *buffer, RecvFlags::DONTWAIT)?.0);
        self.until_done(PollFlags::IN, receive)
    }
}

impl<S: AsFd> Write for Deadlined<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let send = || rustix::net::send(self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.until_done(PollFlags::OUT, send)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn the_time_is_over_for_reads_and_writes_alike() {
        let (near, far) = UnixStream::pair().unwrap();
        let over = |done: io::Result<()>| done.unwrap_err().kind() == io::ErrorKind::TimedOut;
        assert!(over(Deadlined::new(&near, Duration::ZERO).read_exact(&mut [0])));
        // More than the socket takes in while nobody reads.
        assert!(over(Deadlined::new(&near, Duration::ZERO).write_all(&vec![7; 64 << 20])));
        let mut bytes = [0; 5];
        let mut patient = Deadlined::new(&far, Duration::from_secs(60));
        patient.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, [7; 5]);
        drop(near);
        assert!(patient.write_all(b"x").is_err(), "an end is an error and no signal");
    }

    /// Each wait for such a peer is short, and all of them together would take ten seconds.
    #[test]
    fn a_peer_that_sends_a_little_at_a_time_does_not_outlast_the_deadline() {
        const TOTAL: usize = 2000;
        let (near, far) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            let dribble = |_: &usize| {
                thread::sleep(Duration::from_millis(5));
                (&far).write(&[7]).is_ok_and(|count| count > 0)
            };
            (0..TOTAL).take_while(dribble).count()
        });
        let mut bytes = [0; TOTAL];
        let read = Deadlined::new(&near, Duration::from_millis(200)).read_exact(&mut bytes);
        drop(near);
        let sent = peer.join().unwrap();
        assert_eq!(read.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut), "{sent} B");
        assert!(sent < TOTAL, "{sent} B of {TOTAL} B");
    }

    #[test]
    fn a_peer_that_takes_a_little_at_a_time_does_not_outlast_the_deadline() {
        const TOTAL: usize = 16 << 20;
        let (near, far) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            let (mut taken, mut piece) = (0, vec![0; 16 << 10]);
            while let Ok(count @ 1..) = (&far).read(&mut piece) {
                taken += count;
                thread::sleep(Duration::from_millis(5));
            }
            taken
        });
        let written = Deadlined::new(&near, Duration::from_millis(200)).write_all(&vec![7; TOTAL]);
        drop(near);
        let taken = peer.join().unwrap();
        assert_eq!(written.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut), "{taken} B");
        assert!((1..TOTAL).contains(&taken), "{taken} B of {TOTAL} B");
    }
}
