//! A client that asks for much, and does not take it.

use super::{BLOCK, Peace, hello, key, meta};
use crate::process::{Host, Transport, content};
use crate::replicas::{metric, until};
use kvasir_dataplane::wire::{HEADER_LEN, Header, Request};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// More than the sockets between two processes hold.
const ASKED: usize = 96;

/// Until all is sent, the blocks cannot be evicted, nor their memory be used for others' loads.
#[test]
fn a_reader_that_does_not_read_is_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["store.stall_timeout=500ms"]);
    let peace = Peace::new(&host);
    let client = host.client(Transport::Unix);
    client.put(&meta(2_000), &content(2_000, BLOCK)).unwrap();
    let connected = || metric(&host, "kvasir_connections", "");
    until("only these two clients are connected", || connected() == 2);

    let mut stream = TcpStream::connect(host.addr("data")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut call = |number: u64, request: Request| {
        let mut frame = Vec::new();
        request.encode(number, 0, &mut frame);
        stream.write_all(&frame).unwrap();
        let mut header = [0; HEADER_LEN];
        stream.read_exact(&mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        stream.read_exact(&mut vec![0; header.body_len as usize]).unwrap();
        header.payload_len
    };
    assert_eq!(call(0, hello(false, &host.token())), 0);
    let get = Request::Get { class: 0, release: vec![], keys: vec![key(2_000); ASKED] };
    let announced = call(1, get);
    assert_eq!(announced, ASKED as u64 * u64::from(BLOCK));
    until("it is let go", || connected() == 2);
    let mut sent = Vec::new();
    let _ = stream.read_to_end(&mut sent);
    assert!((sent.len() as u64) < announced, "it was not waited for");
    peace.holds("a reader that does not read");
}
