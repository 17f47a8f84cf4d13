//! A connection of any kind, with the three things the protocol needs beyond read and write: deadlines,
//! gathering writes, and descriptors that travel with a frame.

mod dial;
pub mod ring;

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

use rustix::event::{PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

pub use self::dial::connect_unix;
use self::ring::Ring;
use kvasir_memory::shared::{self, Place, Shared};
use kvasir_os::net::{self, PollFd, Shutdown, SocketAddr, TcpStream};
use kvasir_os::time::{Duration, Instant};

pub enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    /// Began as a Unix socket.
    Ring(Arc<Ring>),
    /// Encrypted, over TCP.
    Sealed(Arc<dyn Sealed>),
}

/// Bytes of one TLS record: what is encrypted or decrypted at once, beside memory that others may be changing.
const RECORD: usize = 16 << 10;

/// An encrypted stream. One thread reads and writes it; any may end it by its socket.
pub trait Sealed: Send + Sync {
    /// # Errors
    /// As [`Read::read`]; a handshake that fails is an error of the first read or write.
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Reads what has arrived and is decrypted already.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if nothing is.
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// # Errors
    /// As [`Write::write`]. What is written is sent at once.
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// What carries the encrypted bytes.
    fn socket(&self) -> &TcpStream;

    /// The certificate that the other side has shown, in DER, once the handshake is done.
    fn certificate(&self) -> Option<Vec<u8>>;
}

impl Stream {
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Ring(ring) => Self::Ring(Arc::clone(ring)),
            Self::Sealed(sealed) => Self::Sealed(Arc::clone(sealed)),
        })
    }

    /// The address of the other side; `None` on a Unix socket.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) | Self::Ring(_) => None,
            Self::Tcp(stream) => stream.peer_addr().ok(),
            Self::Sealed(sealed) => sealed.socket().peer_addr().ok(),
        }
    }

    /// No single read or write takes longer than `timeout`.
    pub fn set_timeouts(&self, timeout: Duration) -> io::Result<()> {
        let unix = |stream: &UnixStream| {
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))
        };
        let tcp = |stream: &TcpStream| {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))
        };
        match self {
            Self::Unix(stream) => unix(stream),
            Self::Ring(ring) => unix(ring.socket()),
            Self::Tcp(stream) => tcp(stream),
            Self::Sealed(sealed) => tcp(sealed.socket()),
        }
    }

    /// Ends the connection for every clone of it.
    pub fn shutdown(&self) {
        // It may be closed already, which is just as well.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Ring(ring) => ring.socket().shutdown(Shutdown::Both),
            Self::Sealed(sealed) => sealed.socket().shutdown(Shutdown::Both),
        };
    }

    /// A read that waits, and those that come, find the end. What is being written goes on.
    pub fn stop_reading(&self) {
        // It may be closed already, which is just as well.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Read),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Read),
            Self::Ring(ring) => ring.socket().shutdown(Shutdown::Read),
            Self::Sealed(sealed) => sealed.socket().shutdown(Shutdown::Read),
        };
    }

    /// Whether the other side has closed it. What it sent before may still be unread.
    pub fn is_hung_up(&self) -> bool {
        self.waits_for_hang_up(Duration::ZERO)
    }

    /// As [`is_hung_up`](Self::is_hung_up), and waits for it for at most `timeout`.
    pub fn waits_for_hang_up(&self, timeout: Duration) -> bool {
        let fd = match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
            Self::Ring(ring) => ring.socket().as_fd(),
            Self::Sealed(sealed) => sealed.socket().as_fd(),
        };
        let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::RDHUP)];
        let over = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let timeout = Timespec::try_from(timeout).unwrap_or_default();
        // A question that fails says nothing.
        net::poll(&mut polled, Some(&timeout)).is_ok() && polled[0].revents().intersects(over)
    }

    /// Whether bytes have arrived that nobody has read. For sockets; a ring has its own way to tell.
    pub fn has_unread(&self) -> bool {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let seen = match self {
            Self::Unix(stream) => rustix::net::recv(stream, &mut [0; 1][..], flags),
            Self::Tcp(stream) => rustix::net::recv(stream, &mut [0; 1][..], flags),
            Self::Ring(_) | Self::Sealed(_) => return false,
        };
        seen.is_ok_and(|(count, _)| count > 0)
    }

    /// What is there already; [`io::ErrorKind::WouldBlock`] if nothing is.
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let received = match self {
            Self::Unix(stream) => rustix::net::recv(stream, buffer, RecvFlags::DONTWAIT),
            Self::Tcp(stream) => rustix::net::recv(stream, buffer, RecvFlags::DONTWAIT),
            Self::Ring(ring) => return ring.read_now(buffer),
            Self::Sealed(sealed) => return sealed.read_now(buffer),
        };
        Ok(received?.0)
    }

    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Write::write_all(self, bytes)
    }

    /// Writes all parts, in as few calls as the system allows, without joining them first.
    pub fn write_parts(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let parts: Vec<Shared<'_>> = parts.iter().map(|&part| part.into()).collect();
        self.write_parts_until(&parts, None)
    }

    /// As [`write_parts`](Self::write_parts), from memory that others may be changing; fails once the deadline has passed and something is left, however often the
    /// other side takes a little.
    pub fn write_parts_until(&mut self, parts: &[Shared<'_>], deadline: Option<Instant>) -> io::Result<()> {
        let mut parts = parts.to_vec();
        let mut left = &mut parts[..];
        Shared::advance(&mut left, 0);
        while !left.is_empty() {
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.write_some(left, deadline) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => Shared::advance(&mut left, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes what is taken at once of parts of which the first is not empty.
    fn write_some(&mut self, parts: &[Shared<'_>], deadline: Option<Instant>) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => match deadline {
                Some(deadline) => send_until(stream, parts, deadline),
                None => shared::send(stream.as_fd(), parts),
            },
            Self::Tcp(stream) => shared::send(stream.as_fd(), parts),
            Self::Ring(ring) => ring.send(parts[0]),
            Self::Sealed(sealed) => {
                let mut record = [0; RECORD];
                let count = parts[0].copy_to(&mut record);
                sealed.write(&record[..count])
            }
        }
    }

    /// Fills some of `place`, as [`read`](Read::read) does. `now`: as [`read_now`](Self::read_now).
    fn fill(&mut self, place: &mut Place<'_>, now: bool) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => place.receive(stream.as_fd(), now),
            Self::Tcp(stream) => place.receive(stream.as_fd(), now),
            Self::Ring(ring) if now => ring.fill_now(place),
            Self::Ring(ring) => ring.fill(place),
            Self::Sealed(sealed) => {
                let mut record = [0; RECORD];
                let room = &mut record[..place.left().min(RECORD)];
                let got = if now { sealed.read_now(room) } else { sealed.read(room) }?;
                Ok(place.copy_in(record[..got].into()))
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
            Self::Ring(ring) => ring.read(buffer),
            Self::Sealed(sealed) => sealed.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
            Self::Ring(ring) => ring.write(bytes),
            Self::Sealed(sealed) => sealed.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends what a Unix socket takes at once of `parts`, and waits until it takes something: until the deadline, and no longer
/// than the socket's own timeout.
///
/// A call that waits in the kernel would not end by then. Linux splits it into pieces and begins the socket's timeout anew
/// with each, so a reader that takes a little at a time keeps the caller until it has everything.
fn send_until(socket: &UnixStream, parts: &[Shared<'_>], deadline: Instant) -> io::Result<usize> {
    loop {
        match shared::send_now(socket.as_fd(), parts) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for_room(socket, deadline)?,
            done => return done,
        }
    }
}

fn wait_for_room(socket: &UnixStream, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let wait = socket.write_timeout()?.map_or(left, |timeout| timeout.min(left));
    let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
    let ready = net::poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&wait))?;
    if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}

/// Whether to poll for a moment before a sleep, as earlier waits suggest: between two busy threads an answer takes
/// microseconds, and a sleep costs a switch here and a wake-up there.
pub struct Habits {
    /// Whether the last wait was short. What follows depends on it: a writer asks for a place, fills it for long, and
    /// has the next request ready as soon as that is committed.
    was_short: bool,
    /// Habits of the waits after a long one, and after a short one.
    after: [Habit; 2],
    /// A sleep that ended within this, waking up included, might have been a poll.
    short: Duration,
    /// Every wait begins with a poll of this length, whatever was learned.
    always: Duration,
    /// Whether it naps, as [`Eager::napping`] says.
    naps: bool,
}

#[derive(Clone, Copy)]
struct Habit {
    /// Waits in a row that were short, and how many it takes before one is polled through.
    short: u32,
    needed: u32,
    /// Waits in a row that were slept through, and after how many one is polled through on trial. Where waking takes long, no
    /// sleep is ever short: both sides would sleep for ever because both do.
    slept: u32,
    trial: u32,
    /// Microseconds that the last waits took; 0 for one that was polled through.
    took: [u32; 4],
}

impl Habit {
    /// Microseconds of waits that are worth a nap. Shorter ones can be polled through; of longer ones a wake-up is no great part.
    const WORTH_A_NAP: RangeInclusive<u32> = 30..=500;
    /// Microseconds before the end of an expected wait by which a nap should be over: it lasts up to 40 longer than it should, and then
    /// there is a poll.
    const EARLY: u32 = 80;
    /// Each poll without result doubles the number needed for the next, up to this.
    const NEEDED_MAX: u32 = 4096;
    const NEEDED_MIN: u32 = 4;
    /// The same for trials. At first they cost a connection that never polls less than a microsecond a wait.
    const TRIAL_MAX: u32 = 4096;
    const TRIAL_MIN: u32 = 64;

    const UNKNOWN: Self =
        Self { short: 0, needed: Self::NEEDED_MIN, slept: 0, trial: Self::TRIAL_MIN, took: [0; 4] };

    /// How long to sleep by the clock at the beginning of a wait, by the shortest of the last ones: at least half of that.
    fn nap(&self) -> Option<Duration> {
        let shortest = self.took.into_iter().min().filter(|time| Self::WORTH_A_NAP.contains(time))?;
        Some(Duration::from_micros((shortest / 2).max(shortest.saturating_sub(Self::EARLY)).into()))
    }

    fn took(&mut self, time: Duration) {
        self.took.rotate_right(1);
        self.took[0] = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    }

    fn polls(&self) -> bool {
        self.short >= self.needed || self.slept >= self.trial
    }

    /// A poll that found something.
    fn found(&mut self) {
        self.needed = (self.needed - 1).max(Self::NEEDED_MIN);
        self.short = self.short.saturating_add(1).max(self.needed);
        (self.slept, self.trial) = (0, Self::TRIAL_MIN);
    }

    /// A sleep, after a poll without result or without one.
    fn slept(&mut self, polled: bool, short: bool) {
        if polled {
            // Where waits are known to be short, a trial that failed changes nothing.
            if self.short >= self.needed {
                self.needed = (self.needed * 2).min(Self::NEEDED_MAX);
            } else {
                self.trial = (self.trial * 2).min(Self::TRIAL_MAX);
            }
            self.slept = 0;
        } else {
            self.slept = self.slept.saturating_add(1);
        }
        self.short = if short { self.short.saturating_add(1) } else { 0 };
    }
}

impl Habits {
    /// The limit where both sides sleep in sockets: the other one had to be woken as well.
    pub const SOCKET: Duration = Duration::from_micros(120);
    /// The limit where a bell wakes the other side early. It is shorter, or filling a block of 1 MiB would count as a short wait.
    const RING: Duration = Duration::from_micros(55);

    /// What waking a thread costs the one who does so. Without, two sides that once slept, for whatever reason, find every wait of the other one
    /// long, because it was woken for it, and sleep on: a tenth of the puts took 50 us longer.
    const ALWAYS: Duration = Duration::from_micros(10);

    pub const fn new(short: Duration) -> Self {
        Self { was_short: false, after: [Habit::UNKNOWN; 2], short, always: Duration::ZERO, naps: false }
    }

    fn of_ring() -> Self {
        let always = if alone() { Duration::ZERO } else { Self::ALWAYS };
        Self { always, ..Self::new(Self::RING) }
    }

    /// What `poll` finds within a moment, if that is worth a try; else what `sleep` returns. Each gets `context`.
    pub fn wait<C, T>(
        &mut self,
        context: &mut C,
        mut poll: impl FnMut(&mut C) -> Option<T>,
        sleep: impl FnOnce(&mut C) -> T,
    ) -> T {
        let habit = &mut self.after[usize::from(self.was_short)];
        if let Some(nap) = habit.nap().filter(|_| self.naps && !alone()) {
            let start = Instant::now();
            kvasir_os::thread::sleep(nap);
            self.was_short = false;
            let there = poll(context);
            // It may have been there for long. So this counts as short, and the next waits begin without a nap.
            let overslept = there.is_some();
            let done = there
                .or_else(|| self::poll(LONGEST, || poll(context)).ok())
                .unwrap_or_else(|| sleep(context));
            habit.took(if overslept { Duration::ZERO } else { start.elapsed() });
            return done;
        }
        let polls = habit.polls() && !alone();
        let longest = if polls { LONGEST } else { self.always };
        let polled = match self::poll(longest, || poll(context)) {
            Ok(done) => {
                habit.found();
                habit.took(Duration::ZERO);
                self.was_short = true;
                return done;
            }
            Err(polled) => polled,
        };
        let start = Instant::now();
        let done = sleep(context);
        let took = polled + start.elapsed();
        self.was_short = !polls && took <= self.short;
        habit.slept(polls, self.was_short);
        habit.took(took);
        done
    }
}

/// Roughly what a switch to another thread and back costs.
const LONGEST: Duration = Duration::from_micros(40);

/// Repeats `step` for at least `time`. If there was nothing all that time, returns how long it was.
fn poll<T>(time: Duration, mut step: impl FnMut() -> Option<T>) -> Result<T, Duration> {
    /// Between looks at the clock, each of which takes longer than a step.
    const STEPS: u32 = 16;
    if time.is_zero() {
        return Err(time);
    }
    let mut start = None;
    loop {
        for _ in 0..STEPS {
            if let Some(done) = step() {
                return Ok(done);
            }
            std::hint::spin_loop();
        }
        let spent = start.get_or_insert_with(Instant::now).elapsed();
        if spent >= time {
            return Err(spent);
        }
    }
}

/// Returns `None` if there is nothing yet.
fn unless_blocked(result: io::Result<usize>) -> Option<io::Result<usize>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        done => Some(done),
    }
}

/// With one processor the other side could not answer while this one polls.
fn alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| kvasir_os::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1))
}

/// A reader that polls for a moment before it sleeps, while that pays.
pub struct Eager {
    pub stream: Stream,
    habits: Habits,
}

impl Eager {
    pub fn new(stream: Stream) -> Self {
        let habits =
            if matches!(stream, Stream::Ring(_)) { Habits::of_ring() } else { Habits::new(Habits::SOCKET) };
        Self { stream, habits }
    }

    /// As [`new`](Self::new), for the side that is asked, by the thread that will read.
    ///
    /// Waking a thread takes the one who does so some ten microseconds, a tenth of what a client needs to fill 1 MiB. So where waits are all
    /// of about one length, this side sleeps through most of it by the clock, and then polls: it is awake before anything comes.
    pub fn napping(stream: Stream) -> Self {
        // Else Linux lets each nap last 50 us longer. Where it refuses, naps are overslept, and given up.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut eager = Self::new(stream);
        eager.habits.naps = true;
        eager
    }

    fn fill(&mut self, place: &mut Place<'_>) -> io::Result<usize> {
        let Self { stream, habits } = self;
        habits.wait(
            &mut (stream, place),
            |(stream, place)| unless_blocked(stream.fill(place, true)),
            |(stream, place)| stream.fill(place, false),
        )
    }
}

impl Read for Eager {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Self { stream, habits } = self;
        habits.wait(
            &mut (stream, buffer),
            |(stream, buffer)| unless_blocked(stream.read_now(buffer)),
            |(stream, buffer)| stream.read(buffer),
        )
    }
}

/// A reader that a slow peer cannot keep for ever: reads fail once the deadline has passed, however often single
/// bytes keep arriving.
pub struct Timed {
    pub stream: Eager,
    pub deadline: Option<Instant>,
}

impl Timed {
    /// Fills all of `place`, memory that others may be reading.
    pub fn fill(&mut self, place: &mut Place<'_>) -> io::Result<()> {
        while place.left() > 0 {
            self.check()?;
            match self.stream.fill(place) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        let late = self.deadline.is_some_and(|deadline| Instant::now() > deadline);
        if late { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.stream.read(buffer)
    }
}

/// The most descriptors that travel with a frame.
const FDS_MAX: usize = 2;

/// Writes `bytes` with descriptors, two at most, attached to the first of them.
pub fn send_with_fds(stream: &mut UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("no room for so many descriptors"));
    }
    let sent = rustix::net::sendmsg(&*stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}

/// Reads exactly `bytes`, and the descriptors that came with them, two at most.
pub fn receive_with_fds(stream: &mut UnixStream, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(bytes)];
    let got = rustix::net::recvmsg(&*stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = fds.flatten().collect();
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(&mut bytes[got..])?;
    Ok(fds)
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
        let polls =
            |reader: &mut Eager| reader.habits.after.iter_mut().for_each(|habit| habit.short = habit.needed);
        for _ in 0..10 {
            // Also right after a poll in vain.
            assert_eq!(reader.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            polls(&mut reader);
        }
        writer.shutdown(Shutdown::Write).unwrap();
        echo.join().unwrap();
        polls(&mut reader);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn who_sleeps_because_waking_takes_long_finds_out_that_polling_would_do() {
        if alone() {
            return;
        }
        // No sleep is short.
        let mut habits = Habits::new(Duration::ZERO);
        let sleeps = |habits: &mut Habits, answer: Option<()>| {
            let mut slept = false;
            habits.wait(&mut slept, |_| answer, |slept| *slept = true);
            slept
        };
        let count =
            |habits: &mut Habits, answer, waits| (0..waits).filter(|_| sleeps(habits, answer)).count();
        assert!(count(&mut habits, Some(()), 1_000) < 200);
        assert_eq!(count(&mut habits, Some(()), 1_000), 0);
    }

    #[test]
    fn waits_of_one_length_begin_with_a_nap_and_one_that_is_overslept_ends_that() {
        if alone() {
            return;
        }
        let mut habit = Habit::UNKNOWN;
        for wait in [100, 90, 120, 240] {
            assert_eq!(habit.nap(), None);
            habit.took(Duration::from_micros(wait));
        }
        assert_eq!(habit.nap(), Some(Duration::from_micros(45)));
        let after = |waits: &[u64]| {
            let mut habit = habit;
            waits.iter().for_each(|&wait| habit.took(Duration::from_micros(wait)));
            habit.nap().map(|nap| nap.as_micros())
        };
        assert_eq!([29, 30, 10_000].map(|wait| after(&[wait])), [None, Some(15), Some(45)]);
        assert_eq!([160, 161, 500, 501].map(|wait| after(&[wait; 4])), [Some(80), Some(81), Some(420), None]);

        let mut habits = Habits::new(Habits::RING);
        habits.after[0] = habit;
        let polled = |habits: &mut Habits| habits.wait(&mut (), |()| Some(true), |()| false);
        assert!(!polled(&mut Habits { naps: false, after: habits.after, ..Habits::new(Habits::RING) }));
        habits.naps = true;
        assert!(polled(&mut habits), "after a nap it looks before it sleeps on");
        assert_eq!(habits.after[0].nap(), None, "it was there when the nap ended");
        assert!(!polled(&mut habits));
    }

    #[test]
    fn a_short_wait_on_a_ring_is_polled_through_after_any_number_of_long_ones() {
        if alone() {
            return;
        }
        let mut habits = Habits::of_ring();
        let polled = |habits: &mut Habits, after: u32| {
            let mut polls = 0;
            let step = |polls: &mut u32| {
                *polls += 1;
                (*polls > after).then_some(true)
            };
            habits.wait(&mut polls, step, |_| false)
        };
        assert!((0..100).all(|_| !polled(&mut habits, u32::MAX)));
        assert!((0..100).all(|_| polled(&mut habits, 2)));
    }

    #[test]
    fn polls_without_result_become_rare() {
        if alone() {
            return;
        }
        let mut habits = Habits::new(Duration::ZERO);
        let mut polls = 0;
        for _ in 0..20_000 {
            let start = polls;
            let mut asked = false;
            habits.wait(
                &mut asked,
                |asked| {
                    *asked = true;
                    None
                },
                |asked| polls = start + usize::from(*asked),
            );
        }
        assert!((1..=20).contains(&polls), "{polls}");
        // Once waits are short they are polled through as soon as ever.
        assert!(habits.after.iter().all(|habit| habit.needed == Habit::NEEDED_MIN));
    }

    #[test]
    fn a_stream_knows_that_the_other_side_hung_up_behind_unread_bytes() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Stream::Unix(near);
        far.write_all(b"unread").unwrap();
        assert!(!near.is_hung_up());
        drop(far);
        assert!(near.is_hung_up());
    }

    #[test]
    fn a_reader_that_takes_little_at_a_time_does_not_outlast_a_deadline() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut near = Stream::Unix(near);
        std::thread::scope(|scope| {
            // It reads all the time, so no single write takes long.
            scope.spawn(move || while far.read(&mut [0; 64]).is_ok_and(|count| count > 0) {});
            let error =
                near.write_parts_until(&[Shared::from(&[0; 8 << 20][..])], Some(Instant::now())).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            near.shutdown();
        });
    }

    #[test]
    fn a_slow_reader_of_a_unix_socket_does_not_outlast_a_deadline_either() {
        const TOTAL: usize = 8 << 20;
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut near = Stream::Unix(near);
        // One wait for it is never long.
        near.set_timeouts(Duration::from_secs(60)).unwrap();
        // At this pace all of it takes more than a second, and the last byte is written near its end.
        let reader = std::thread::spawn(move || {
            let (mut taken, mut piece) = (0, vec![0; 64 << 10]);
            while let Ok(count @ 1..) = far.read(&mut piece) {
                taken += count;
                std::thread::sleep(Duration::from_millis(10));
            }
            taken
        });
        let deadline = Instant::now() + Duration::from_millis(100);
        let written = near.write_parts_until(&[Shared::from(&vec![7; TOTAL][..])], Some(deadline));
        drop(near);
        let taken = reader.join().unwrap();
        assert_eq!(written.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut), "{taken} B");
        assert!(taken < TOTAL, "{taken} B of {TOTAL} B");
    }

    #[test]
    fn a_reader_that_takes_nothing_is_given_up_after_the_sockets_own_timeout() {
        let (near, _far) = UnixStream::pair().unwrap();
        let mut near = Stream::Unix(near);
        near.set_timeouts(Duration::from_millis(1)).unwrap();
        let in_an_hour = Instant::now() + Duration::from_secs(3600);
        let error = near.write_parts_until(&[Shared::from(&[7; 8 << 20][..])], Some(in_an_hour)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
