//! Clients that ask for much, and do not take it. Until all is sent, the blocks cannot be evicted, nor their memory be used
//! for others' loads. Blocks also go through the Unix socket, to users who may not map the pool: a test in `dataplane/server`
//! is one of them.

use super::{BLOCK, Peace, hello, key, meta};
use crate::process::{Host, Transport, content};
use crate::replicas::{metric, until};
use kvasir_dataplane::wire::{HEADER_LEN, Header, Request};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Asks over TCP for one block `count` times, and reads up to where the answer's bytes begin. Their number.
fn ask(host: &Host, count: u64) -> (TcpStream, u64) {
    let mut stream = TcpStream::connect(host.addr("data")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let get = Request::Get { class: 0, release: vec![], keys: vec![key(2_000); count as usize] };
    let mut announced = 0;
    for (number, request) in (0..).zip([hello(false, &host.token()), get]) {
        let mut frame = Vec::new();
        request.encode(number, 0, &mut frame);
        stream.write_all(&frame).unwrap();
        let mut header = [0; HEADER_LEN];
        stream.read_exact(&mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        stream.read_exact(&mut vec![0; header.body_len as usize]).unwrap();
        announced = header.payload_len;
    }
    assert_eq!(announced, count * u64::from(BLOCK));
    (stream, announced)
}

/// A host, of whose clients one asks for `count` blocks and takes them as `read` does: it is let go before it has them all.
fn is_let_go(stall: &str, count: u64, read: impl FnOnce(&mut TcpStream, &dyn Fn() -> u64) -> u64) {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &[stall]);
    let peace = Peace::new(&host);
    let client = host.client(Transport::Unix);
    client.put(&meta(2_000), &content(2_000, BLOCK)).unwrap();
    let connected = || metric(&host, "kvasir_connections", "");
    until("only these two clients are connected", || connected() == 2);
    let (mut stream, announced) = ask(&host, count);
    let taken = read(&mut stream, &connected);
    assert!(taken < announced, "it was waited for until it had all");
    until("its connection is gone", || connected() == 2);
    peace.holds("a reader that takes too long");
}

#[test]
fn a_reader_that_does_not_read_is_let_go() {
    // 6 MiB are more than the sockets between two processes hold.
    is_let_go("store.stall_timeout=500ms", 96, |stream, connected| {
        until("it is let go", || connected() == 2);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest.len() as u64
    });
}

/// Each of the host's writes gets on, so it is the whole that takes too long: 16 MiB within 19 s, of which the sockets hold
/// 4 MiB and the reader takes half a MiB a second. A machine that is slower than that proves less, and nothing wrong.
#[test]
fn a_reader_that_takes_a_little_at_a_time_is_let_go() {
    is_let_go("store.stall_timeout=3s", 256, |stream, _| {
        let (mut taken, mut bytes) = (0, vec![0; 64 << 10]);
        while stream.read_exact(&mut bytes).is_ok() {
            taken += bytes.len() as u64;
            std::thread::sleep(Duration::from_millis(125));
        }
        taken
    });
}
