use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown as How, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::mpsc;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn door() -> (TcpListener, SocketAddr) {
    let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = door.local_addr().unwrap();
    (door, addr)
}

/// Answers each byte with the same one, and takes the first for a greeting.
fn echo(mut stream: impl Read + Write, seat: &Seat) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        seat.greeted();
        if stream.write_all(&byte).is_err() {
            return;
        }
    }
}

fn refuse(mut stream: TcpStream) {
    stream.write_all(b"full").unwrap();
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A connection that was served and is known.
fn known(addr: SocketAddr) -> TcpStream {
    let mut stream = connect(addr);
    assert!(echoes(&mut stream));
    stream
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    stream.write_all(b"x").is_ok() && stream.read_exact(&mut byte).is_ok() && byte == *b"x"
}

fn ended(mut stream: impl Read) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => rest.is_empty(),
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::yield_now();
    }
}

#[test]
fn beyond_the_limit_connections_are_refused_and_counted() {
    let (door, addr) = door();
    let listener = Listener::start(door, "test", Limits::of(2), echo, refuse).unwrap();
    let (first, mut second) = (known(addr), known(addr));
    let mut answer = Vec::new();
    connect(addr).read_to_end(&mut answer).unwrap();
    assert_eq!((answer.as_slice(), listener.refused(), listener.open()), (&b"full"[..], 1, 2));
    drop(first);
    until("a place is free again", || listener.open() == 1);
    let _third = known(addr);
    assert!(echoes(&mut second));
    assert_eq!(listener.refused(), 1);
}

#[test]
fn one_who_is_silent_makes_way_and_one_who_is_known_does_not() {
    let (door, addr) = door();
    let limits = Limits { connections_max: 2, grace: Duration::ZERO };
    let listener = Listener::start(door, "test", limits, echo, refuse).unwrap();
    let mut known_one = known(addr);
    let silent = connect(addr);
    until("it has the last place", || listener.open() == 2);
    let mut newcomer = known(addr);
    assert!(ended(silent));
    assert!(echoes(&mut known_one) && echoes(&mut newcomer));
    assert_eq!((listener.open(), listener.refused()), (2, 0));
}

/// Fails in every way that `accept` does, and then accepts.
struct Troubled {
    door: TcpListener,
    troubles: Mutex<Vec<Errno>>,
}

impl AsFd for Troubled {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.door.as_fd()
    }
}

impl Door for Troubled {
    type Stream = TcpStream;

    fn next(&self) -> io::Result<TcpStream> {
        match self.troubles.lock().pop() {
            Some(errno) => Err(errno.into()),
            None => self.door.next(),
        }
    }
}

#[test]
fn trouble_with_accepting_passes() {
    let (door, addr) = door();
    let troubles =
        vec![Errno::MFILE, Errno::CONNABORTED, Errno::NFILE, Errno::NOMEM, Errno::INTR, Errno::NOBUFS];
    let door = Troubled { door, troubles: Mutex::new(troubles) };
    let listener = Listener::start(door, "test", Limits::of(2), echo, refuse).unwrap();
    assert!(echoes(&mut connect(addr)));
    listener.stop();
}

/// Out of descriptors for good: it neither accepts nor stands in the way of stopping.
struct Exhausted(TcpListener, mpsc::Sender<()>);

impl AsFd for Exhausted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Door for Exhausted {
    type Stream = TcpStream;

    fn next(&self) -> io::Result<TcpStream> {
        let _ = self.1.send(());
        Err(Errno::MFILE.into())
    }
}

#[test]
fn one_without_descriptors_can_be_stopped() {
    let (tried, tries) = mpsc::channel();
    let door = Exhausted(door().0, tried);
    let listener = Listener::start(door, "test", Limits::of(2), echo, refuse).unwrap();
    (0..3).for_each(|_| tries.recv().unwrap());
    listener.stop();
}

#[test]
fn stopping_ends_every_connection_and_waits_for_it() {
    let (door, addr) = door();
    let serving = Arc::new(());
    let (told, handles) = mpsc::channel();
    let inside = Arc::clone(&serving);
    let serve = move |stream: TcpStream, seat: &Seat| {
        let _serving = Arc::clone(&inside);
        told.send(seat.handle()).unwrap();
        echo(stream, seat);
    };
    let listener = Listener::start(door, "test", Limits::of(8), serve, refuse).unwrap();
    let (known_one, silent) = (known(addr), connect(addr));
    let handles = [handles.recv().unwrap(), handles.recv().unwrap()];
    listener.stop();
    // What the closure holds went with the accepting thread.
    assert_eq!((Arc::strong_count(&serving), listener.open()), (1, 0));
    assert!(handles.iter().all(|handle| Arc::strong_count(&handle.0) == 1), "a descriptor is still held");
    assert!(ended(known_one) && ended(silent));
    assert!(TcpStream::connect(addr).is_err(), "the port is closed");
    listener.stop();
}

#[test]
fn stopping_at_any_moment_works() {
    for turn in 0..200 {
        let (door, addr) = door();
        let listener = Listener::start(door, "test", Limits::of(8), echo, refuse).unwrap();
        let calling = (turn % 2 == 0).then(|| thread::spawn(move || TcpStream::connect(addr).map(ended)));
        listener.stop();
        assert_eq!(listener.open(), 0);
        let called = calling.map(|calling| calling.join().unwrap());
        // Whoever got through was sent away again.
        assert!(!matches!(called, Some(Ok(false))));
    }
}

#[test]
fn unix_sockets_are_served_alike() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door");
    let door = UnixListener::bind(&path).unwrap();
    let listener = Listener::start(door, "test", Limits::of(8), echo, drop).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).unwrap();
    listener.stop();
    assert!(ended(stream));
    assert!(UnixStream::connect(&path).is_err());
}

#[test]
fn a_connection_whose_thread_panics_gives_its_place_back() {
    let (door, addr) = door();
    let serve = |_: TcpStream, _: &Seat| panic!("a fault of ours");
    let listener = Listener::start(door, "test", Limits::of(1), serve, refuse).unwrap();
    assert!(ended(connect(addr)));
    until("its place is free", || listener.open() == 0);
}

#[test]
fn one_that_may_read_no_more_can_still_write() {
    let (door, addr) = door();
    let (told, handles) = mpsc::channel();
    let serve = move |mut stream: TcpStream, seat: &Seat| {
        told.send(seat.handle()).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        stream.write_all(b"bye").unwrap();
    };
    let _listener = Listener::start(door, "test", Limits::of(1), serve, refuse).unwrap();
    let mut stream = connect(addr);
    handles.recv().unwrap().stop_reading();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"bye");
    let _ = stream.shutdown(How::Both);
}
