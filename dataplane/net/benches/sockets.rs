//! How a connection's threads should read and write: non-blocking calls and `poll`, as the TCP transport does, or
//! `io_uring`. Both ways ask and answer over one loopback connection, with nothing else on top.
//!
//! `cargo bench -p kvasir-net --bench sockets`; what came of it is in docs/design/0006-transfer-engine.md.
#![allow(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use rustix::event::{PollFd, PollFlags};
use rustix::time::{ClockId, clock_gettime};

const REQUEST: usize = 32;
/// What answers are taken from, and where they go: more than processors cache of it.
const MEMORY: usize = 32 << 20;
/// The most bytes of one call.
const CALL_MAX: usize = 1 << 20;

/// A way to do both at once: send all of `out`, and receive at least one byte. Returns how many were received.
trait Exchange {
    fn exchange(&mut self, out: &[u8], into: &mut [u8]) -> io::Result<usize>;
}

/// Tries first, and waits for readiness only if there is nothing to do.
struct Polled(TcpStream);

impl Exchange for Polled {
    fn exchange(&mut self, mut out: &[u8], into: &mut [u8]) -> io::Result<usize> {
        let mut received = 0;
        loop {
            let sent = if out.is_empty() { None } else { ready(self.0.write(out))? };
            out = &out[sent.unwrap_or(0)..];
            if received == 0 || !out.is_empty() {
                let got =
                    if received < into.len() { ready(self.0.read(&mut into[received..]))? } else { None };
                if got == Some(0) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                received += got.unwrap_or(0);
            }
            match (out.is_empty(), received > 0) {
                (true, true) => return Ok(received),
                (false, _) => self.wait(PollFlags::IN | PollFlags::OUT)?,
                (true, false) => self.wait(PollFlags::IN)?,
            }
        }
    }
}

impl Polled {
    fn wait(&self, events: PollFlags) -> io::Result<()> {
        match rustix::event::poll(&mut [PollFd::new(&self.0, events)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn ready(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Both in one system call, with the flags that suit a ring of one thread.
struct Ringed {
    ring: IoUring,
    // Open for as long as the ring names its descriptor.
    _socket: TcpStream,
}

impl Ringed {
    fn new(socket: TcpStream) -> io::Result<Self> {
        let ring =
            IoUring::builder().setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun().build(8)?;
        ring.submitter().register_files(&[socket.as_raw_fd()])?;
        Ok(Self { ring, _socket: socket })
    }
}

impl Exchange for Ringed {
    fn exchange(&mut self, out: &[u8], into: &mut [u8]) -> io::Result<usize> {
        const SEND: u64 = 1;
        let receive = opcode::Recv::new(types::Fixed(0), into.as_mut_ptr(), into.len() as u32).build();
        let send = opcode::Send::new(types::Fixed(0), out.as_ptr(), out.len() as u32)
            .flags(libc::MSG_WAITALL | libc::MSG_NOSIGNAL)
            .build()
            .user_data(SEND);
        let count = if out.is_empty() { 1 } else { 2 };
        // SAFETY: both slices outlive the operations, because this returns only when both have completed.
        unsafe {
            let mut queue = self.ring.submission();
            if count == 2 {
                queue.push(&send).map_err(io::Error::other)?;
            }
            queue.push(&receive).map_err(io::Error::other)?;
        }
        let (mut done, mut received) = (0, Ok(0));
        while done < count {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel may still use the slices.
                Err(error) => panic!("the ring is broken: {error}"),
            }
            for entry in self.ring.completion() {
                done += 1;
                match (entry.user_data(), entry.result()) {
                    (_, error) if error < 0 => received = Err(io::Error::from_raw_os_error(-error)),
                    (SEND, _) => {}
                    (_, 0) => received = Err(io::ErrorKind::UnexpectedEof.into()),
                    (_, got) => received = received.map(|_| got as usize),
                }
            }
        }
        received
    }
}

/// Answers requests with `len` bytes each, until the asking side has gone.
fn answer(way: &mut impl Exchange, len: usize) {
    let (source, mut requests) = (vec![7; MEMORY], vec![0; 64 << 10]);
    let (mut at, mut partly, mut owed) = (0, 0, 0);
    loop {
        let out = owed.min(CALL_MAX).min(MEMORY - at);
        // It holds at least one whole answer if anything is owed, so something is asked for again.
        let Ok(got) = way.exchange(&source[at..at + out], &mut requests) else { return };
        (at, owed) = ((at + out) % MEMORY, owed - out);
        partly += got;
        owed += partly / REQUEST * len;
        partly %= REQUEST;
    }
}

/// Asks for `len` bytes, `depth` times at once, for a while. Returns operations, seconds, CPU seconds of both sides.
fn ask(way: &mut impl Exchange, len: usize, depth: usize, time: Duration) -> io::Result<(u64, f64, f64)> {
    let (mut target, requests) = (vec![1; MEMORY], vec![0; REQUEST * depth]);
    let (mut at, mut partly, mut wanted, mut count) = (0, 0, depth, 0u64);
    let (start, cpu) = (Instant::now(), process_cpu());
    while start.elapsed() < time {
        let end = (at + CALL_MAX).min(MEMORY);
        let got = way.exchange(&requests[..wanted * REQUEST], &mut target[at..end])?;
        at = (at + got) % MEMORY;
        partly += got;
        (wanted, partly) = (partly / len, partly % len);
        count += wanted as u64;
    }
    Ok((count, start.elapsed().as_secs_f64(), process_cpu() - cpu))
}

fn process_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn run<W: Exchange>(
    make: &(impl Fn(TcpStream) -> io::Result<W> + Sync),
    len: usize,
    depth: usize,
    time: Duration,
) -> io::Result<(u64, f64, f64)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    thread::scope(|scope| {
        // A ring belongs to the thread that makes it.
        scope.spawn(move || make(server).map(|mut way| answer(&mut way, len)));
        ask(&mut make(client)?, len, depth, time)
    })
}

fn main() -> io::Result<()> {
    // `cargo test` runs it without: once, at the smallest size.
    let full = std::env::args().any(|arg| arg == "--bench");
    let (time, rounds) = if full { (Duration::from_millis(300), 7) } else { (Duration::from_millis(2), 1) };
    let polled = |socket: TcpStream| socket.set_nonblocking(true).map(|()| Polled(socket));
    for (len, depth) in [(4 << 10, 1), (4 << 10, 32), (64 << 10, 16), (1 << 20, 4)] {
        let mut rows = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            rows[0].push(run(&polled, len, depth, time)?);
            rows[1].push(run(&Ringed::new, len, depth, time)?);
        }
        for (name, rounds) in ["poll", "io_uring"].iter().zip(rows) {
            let median = |of: &dyn Fn(&(u64, f64, f64)) -> f64| {
                let mut values: Vec<f64> = rounds.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                values[values.len() / 2]
            };
            let rate = median(&|(count, seconds, _)| *count as f64 / seconds);
            let cpu = median(&|(count, _, cpu)| cpu * 1e6 / *count as f64);
            let gb = rate * len as f64 / 1e9;
            println!(
                "{len:>8} B x {depth:<3} {name:<9} {rate:>10.0} op/s {gb:>7.3} GB/s {cpu:>8.1} CPU-us/op"
            );
        }
    }
    Ok(())
}
