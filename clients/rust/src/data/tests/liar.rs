//! A host that says what is not true: the client errs, and writes nowhere but into the runs it was given.

use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use kvasir_memory::host::HostPool;
use kvasir_protocol::stream::send_with_fds;
use kvasir_protocol::wire::{Found, HEADER_LEN, Header};

use super::*;

const POOL: u64 = 8192;
/// Every block is this long, by right.
const SIZE: u32 = 3000;

/// What it answers to a get of one block.
#[derive(Clone, Copy)]
struct Lie {
    /// Lends from a pool, or sends bytes along.
    in_place: bool,
    offset: u64,
    size: u32,
    checksum: u64,
    /// Bytes that it announces, and bytes that it sends.
    payload: (u64, usize),
}

impl Lie {
    fn honest(in_place: bool) -> Self {
        let payload = if in_place { (0, 0) } else { (SIZE.into(), SIZE as usize) };
        Self { in_place, offset: 100, size: SIZE, checksum: checksum(&[7; SIZE as usize]), payload }
    }
}

/// Serves one connection until it ends. The pool, and what is sent, are sevens.
fn host_that_tells(lie: Lie, dir: &tempfile::TempDir) -> (Endpoint, JoinHandle<()>) {
    let path = dir.path().join("liar.sock");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let host = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let pool = HostPool::new(POOL, false).unwrap();
        assert!(pool.mapping().write(0, &[7; POOL as usize]));
        let mut frame = Vec::new();
        while let Some((header, request)) = next(&mut stream) {
            let (reply, announced, sent) = match request {
                Request::Hello { .. } => (hello(lie.in_place), 0, 0),
                Request::Get { .. } => {
                    let Lie { offset, size, checksum, payload, .. } = lie;
                    let hit = Found::Hit { offset, size, checksum, lease: 1 };
                    (Reply::Get(vec![hit]), payload.0, payload.1)
                }
                other => (Reply::Outcomes(other.op(), vec![Outcome::Done]), 0, 0),
            };
            reply.encode(header.request, announced, &mut frame);
            let fds: Vec<_> =
                (header.op == Op::Hello && lie.in_place).then(|| pool.writable_fd()).into_iter().collect();
            send_with_fds(&mut stream, &frame, &fds).unwrap();
            if stream.write_all(&vec![7; sent]).is_err() || (sent as u64) < announced {
                return;
            }
        }
    });
    (Endpoint::Unix(path), host)
}

pub(super) fn hello(shared: bool) -> Reply {
    let (lease_ms, reservation_ms, payload_max) = (3_600_000, 3_600_000, 1 << 20);
    let pool_bytes = POOL;
    Reply::Hello {
        shared,
        writable: true,
        ring: false,
        boot: 1,
        pool_bytes,
        lease_ms,
        reservation_ms,
        payload_max,
    }
}

pub(super) fn next(stream: &mut UnixStream) -> Option<(Header, Request)> {
    let mut header = [0; HEADER_LEN];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).unwrap();
    let mut body = vec![0; header.body_len as usize];
    stream.read_exact(&mut body).unwrap();
    Some((header, Request::decode(header.op, &body).unwrap()))
}

/// Reads the block into three runs between which there is other memory, and says what came of it.
fn ask(lie: Lie) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (endpoint, host) = host_that_tells(lie, &dir);
    let client = Client::connect(&endpoint, options()).unwrap();
    assert_eq!(client.is_local(), lie.in_place);
    let mut memory = vec![0xee; 5000];
    let (before, rest) = memory.split_at_mut(100);
    let (first, rest) = rest.split_at_mut(1000);
    let (between, rest) = rest.split_at_mut(50);
    let (second, behind) = rest.split_at_mut(2000);
    let got = client.get_scattered(&[key(1)], 0, &mut [&mut [first, second]]);
    let beside = [&*before, between, behind];
    assert!(beside.concat().iter().all(|&byte| byte == 0xee), "it wrote beside the runs");
    drop(client);
    host.join().unwrap();
    match got {
        Ok(found) => format!("{found:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn lies_about_a_block_are_errors_or_misses_and_harm_nothing() {
    let check = |lie: Lie, expected: &str| {
        let text = ask(lie);
        assert!(text.contains(expected), "{text}, not {expected}");
    };
    for in_place in [true, false] {
        let honest = Lie::honest(in_place);
        check(honest, "[Some(3000)]");
        check(Lie { checksum: honest.checksum + 1, ..honest }, "[None]");
    }
    let place = Lie::honest(true);
    check(Lie { offset: POOL - 1, ..place }, "something else");
    check(Lie { offset: u64::MAX, ..place }, "something else");
    check(Lie { size: u32::MAX, ..place }, "something else");
    check(Lie { size: SIZE + 1, ..place }, "does not fit the buffer of 3000 B");
    check(Lie { size: SIZE - 1, ..place }, "[None]");
    let sent = Lie::honest(false);
    check(Lie { size: SIZE + 1, payload: (3001, 3001), ..sent }, "does not fit the buffer of 3000 B");
    check(Lie { size: SIZE - 1, payload: (2999, 2999), ..sent }, "[None]");
    check(Lie { size: SIZE + 1, ..sent }, "payload length");
    check(Lie { payload: (3001, 3001), ..sent }, "payload length");
    check(Lie { size: u32::MAX, payload: (u32::MAX.into(), 0), ..sent }, "payload length");
    check(Lie { payload: (SIZE.into(), 10), ..sent }, "broke in the middle of Get");
}
