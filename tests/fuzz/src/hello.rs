//! How hosts meet, and what they say on a rail. A stranger's part of a handshake (`s`), or two that know the secret, with somebody
//! between them who changes bytes (`b`); a header of TCP transfers (`h`), the body of a question (`q`) or of a grant (`g`); the
//! hello of an RDMA connection (`e`), frames of its control stream in pieces (`f`), and a grant there (`a`).

use crate::input::Input;
use crate::kind;
use crate::text::told;
use kvasir_dataplane::transport::auth::{self, AuthError};
use kvasir_dataplane::transport::grant::REGIONS_MAX;
use kvasir_dataplane::transport::node::{Node, Secret};
use kvasir_dataplane::transport::rdma::connect::{HELLO_BYTES, Hello};
use kvasir_dataplane::transport::rdma::wire::{self as rdma, Inbox};
use kvasir_dataplane::transport::tcp::wire::{self as tcp, BODY_MAX, Header, Kind, PAYLOAD_MAX, RANGES_MAX};
use kvasir_dataplane::transport::{Direction, Grant, Op};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

/// Where a side says how long its name is.
const NAME_LEN_AT: usize = 5;

static NODE: LazyLock<Node> = LazyLock::new(|| node("host"));

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b's', bytes)) => stranger(bytes),
        Some((b'b', steps)) => between(&mut Input(steps)),
        Some((b'h', bytes)) => header(bytes),
        Some((b'q', bytes)) => question(&mut Input(bytes)),
        Some((b'g', body)) => grant(tcp::decode_grant("kv", Instant::now(), body).ok(), body),
        Some((b'e', bytes)) => hello(bytes),
        Some((b'f', bytes)) => frames(bytes),
        Some((b'a', body)) => grant(rdma::decode_grant("kv", Instant::now(), body), body),
        _ => {}
    }
}

fn node(name: &str) -> Node {
    Node::new(name, Secret::new(b"they know it"), 1)
}

/// A peer that says what it says, whatever it hears.
struct Script<'a>(&'a [u8]);

impl Read for Script<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.0.read(to)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Without the secret nobody is believed.
fn stranger(bytes: &[u8]) {
    for met in [auth::accept(&mut Script(bytes), &NODE, "c"), auth::connect(&mut Script(bytes), &NODE, "c")] {
        told(&met.expect_err("a stranger"));
    }
}

/// Both believe each other if nothing was changed, and neither would believe another name.
fn between(input: &mut Input<'_>) {
    let name: String = String::from_utf8_lossy(input.part()).into_owned();
    let changes = [Change::of(input), Change::of(input)];
    // One that is told of a longer name than comes waits for the rest of it; on a busy machine also one that is not told so yet.
    let is_patient = changes.iter().all(|change| change.at != NAME_LEN_AT || change.bits == 0);
    let timeout = Duration::from_millis(if is_patient { 20_000 } else { 20 });
    let (near, far) = UnixStream::pair().expect("two sockets");
    let [mut near, mut far] = [(near, changes[0]), (far, changes[1])].map(|(socket, change)| {
        socket.set_read_timeout(Some(timeout)).expect("a timeout");
        Changed { socket, change, written: 0 }
    });
    let peer = node(&name);
    let (accepted, connected) = thread::scope(|scope| {
        let connecting = scope.spawn(|| meet(&mut far, |far| auth::connect(far, &peer, "c")));
        let accepted = meet(&mut near, |near| auth::accept(near, &NODE, "c"));
        (accepted, connecting.join().expect("no panic"))
    });
    let is_changed = near.is_reached() || far.is_reached();
    match (accepted, connected) {
        (Ok(found), Ok(host)) => {
            assert!(!is_changed, "a change went unnoticed");
            assert_eq!((found.as_str(), host.as_str()), (&name[..name.floor_char_boundary(255)], "host"));
        }
        (accepted, connected) => {
            assert!(is_changed || !is_patient || name.is_empty(), "{accepted:?}, {connected:?}");
        }
    }
}

/// The side hangs up once it is through, so that the other never waits for long.
fn meet(
    side: &mut Changed,
    how: impl FnOnce(&mut Changed) -> Result<String, AuthError>,
) -> Result<String, AuthError> {
    let met = how(side);
    if met.is_err() {
        let _ = side.socket.shutdown(std::net::Shutdown::Both);
    }
    met
}

/// Which bits of which byte that a side writes.
#[derive(Clone, Copy)]
struct Change {
    at: usize,
    bits: u8,
}

impl Change {
    fn of(input: &mut Input<'_>) -> Self {
        Self { at: usize::from(input.u16()) % 512, bits: input.byte() }
    }
}

struct Changed {
    socket: UnixStream,
    change: Change,
    written: usize,
}

impl Changed {
    /// Whether the byte that would be changed was written.
    fn is_reached(&self) -> bool {
        self.change.bits != 0 && self.change.at < self.written
    }
}

impl Read for Changed {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.socket.read(to)
    }
}

impl Write for Changed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut bytes = bytes.to_vec();
        if let Some(byte) = self.change.at.checked_sub(self.written).and_then(|at| bytes.get_mut(at)) {
            *byte ^= self.change.bits;
        }
        self.written += bytes.len();
        self.socket.write_all(&bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn header(bytes: &[u8]) {
    let Ok(bytes) = bytes.try_into() else { return };
    match Header::decode(bytes) {
        Ok(header) => {
            assert!(header.body_len as usize <= BODY_MAX && header.payload_len <= PAYLOAD_MAX);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

/// What a peer wants to read or write.
fn question(input: &mut Input<'_>) {
    let kind = if input.byte().is_multiple_of(2) { Kind::Read } else { Kind::Write };
    let payload_len = u64::from(input.u32());
    let payload_len = if kind == Kind::Write { payload_len } else { 0 };
    let header = Header { payload_len, ..Header::new(kind, 7) };
    let asked = match tcp::decode_op(&header, input.0) {
        Ok(asked) => asked,
        Err(refusal) => return drop(told(&refusal)),
    };
    assert!((1..=RANGES_MAX).contains(&asked.ranges.len()) && asked.len <= PAYLOAD_MAX);
    assert_eq!(asked.ranges.iter().map(|range| range.len).sum::<u64>(), asked.len);
    let grant = Grant { key: asked.key, epoch: asked.epoch, ..some_grant() };
    let direction = if kind == Kind::Read { Direction::Read } else { Direction::Write };
    let (grant, remote) = (Arc::new(grant), asked.ranges);
    let op = Op { id: 0, direction, grant, local: Vec::new(), remote, cancel: None };
    let mut frame = Vec::new();
    tcp::encode_op(&mut frame, header, &op);
    assert_eq!(frame[tcp::HEADER_LEN..], *input.0);
}

fn some_grant() -> Grant {
    let body = [&[0; 16][..], &[1], &[0; 8], &[0; 8]].concat();
    tcp::decode_grant("kv", Instant::now(), &body).expect("a grant of nothing")
}

/// No more regions than are in the body, none of which wraps around, and a lease that ends.
fn grant(grant: Option<Grant>, body: &[u8]) {
    let Some(grant) = grant else { return };
    assert!(grant.regions.len() <= REGIONS_MAX && grant.regions.len() <= body.len() / 11);
    assert!(grant.regions.iter().all(|region| region.address.checked_add(region.len).is_some()));
    assert_eq!([grant.key.to_le_bytes(), grant.epoch.to_le_bytes()].concat(), body[..16]);
    for region in 0..=grant.regions.len() {
        let whole = grant.regions.get(region).map(|region| region.len);
        let mut range = grant.range(0, whole.unwrap_or(1).max(1));
        range.region = region as u32;
        assert_eq!(grant.covers(range).is_ok(), whole.is_some_and(|len| len > 0));
    }
}

fn hello(bytes: &[u8]) {
    let mut hello = [0; HELLO_BYTES];
    let len = bytes.len().min(HELLO_BYTES);
    hello[..len].copy_from_slice(&bytes[..len]);
    match Hello::decode(&hello) {
        Ok(read) => {
            let address = &read.address;
            assert!(address.number >> 24 == 0 && address.sequence >> 24 == 0 && address.mtu <= 5);
            assert_eq!(Hello::decode(&read.encode()).ok(), Some(read));
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

/// Gives its bytes out a few at a time, with a timeout between them.
struct Drip<'a>(&'a [u8], usize, bool);

impl Read for Drip<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.2 = !self.2;
        if self.2 && !self.0.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = self.0.len().min(self.1).min(to.len());
        self.0.read(&mut to[..count])
    }
}

/// However they arrive, the same frames are read, and are written as they came.
fn frames(bytes: &[u8]) {
    let read = |piece| {
        let (mut stream, mut inbox, mut frames) = (Drip(bytes, piece, false), Inbox::default(), Vec::new());
        let end = loop {
            match inbox.next(&mut stream) {
                Ok(frame) => frames.extend(frame),
                Err(error) => break error.kind(),
            }
        };
        (frames, end)
    };
    let (frames, end) = read(1 << 12);
    assert_eq!(read(3), (frames.clone(), end));
    let written: Vec<u8> = frames.iter().flat_map(rdma::Frame::encode).collect();
    assert!(bytes.starts_with(&written));
    assert!(matches!(end, io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData));
}
