//! A client that takes every connection there is.

use super::{Peace, hello, key};
use crate::process::{Host, Transport};
use crate::replicas::until;
use kvasir_client::data::{Client, Options};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

const SLOTS: usize = 12;

#[test]
fn a_client_that_takes_every_connection_is_refused_and_others_are_served_again() {
    let dir = tempfile::tempdir().unwrap();
    let set = [format!("store.connections_max={SLOTS}"), "store.stall_timeout=1s".to_owned()];
    let host = Host::start_with(dir.path(), &set.each_ref().map(String::as_str));
    let peace = Peace::new(&host);
    let path = host.addr("socket");

    // Silent ones lose their place again by themselves.
    let silent: Vec<_> = (0..4 * SLOTS).map(|_| UnixStream::connect(path).unwrap()).collect();
    until("silent connections make room", || {
        Client::connect(&host.endpoint(Transport::Unix), Options::default()).is_ok()
    });
    drop(silent);
    until("room for one more", || {
        Client::connect(&host.endpoint(Transport::Unix), Options::default()).is_ok()
    });

    // Those that said hello may stay. They keep the others of the socket out, who hear why, and nobody else.
    let mut greedy = Vec::new();
    until("no room", || {
        let mut stream = UnixStream::connect(path).unwrap();
        let mut frame = Vec::new();
        hello(false, "").encode(0, 0, &mut frame);
        let _ = stream.write_all(&frame);
        greedy.push(stream);
        greedy.len() > SLOTS
    });
    let full =
        Client::connect(&host.endpoint(Transport::Unix), Options::default()).err().unwrap().to_string();
    assert!(full.contains("connections are open") && full.contains("try again"), "{full}");
    assert!(host.client(Transport::Tcp).exists(&[key(0)]).unwrap()[0]);
    assert!(peace.client.exists(&[key(0)]).unwrap()[0], "who was there before stays");
    drop(greedy);
    until("room again", || Client::connect(&host.endpoint(Transport::Unix), Options::default()).is_ok());
    peace.holds("a client that took every connection");
}

#[test]
fn callers_that_say_nothing_keep_nobody_out_of_the_control_ports() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    let peace = Peace::new(&host);
    // More than a port has room for.
    let many = 300;
    let control = host.addr("control");
    let silent: Vec<_> = (0..many).map(|_| UnixStream::connect(control).unwrap()).collect();
    let ports = ["grpc", "http"].map(|name| host.addr(name));
    let on_ports = ports.iter().flat_map(|addr| (0..many).map(move |_| TcpStream::connect(addr).unwrap()));
    let silent_too: Vec<_> = on_ports.collect();
    // Nor those that nobody knows.
    let strangers: Vec<_> = (0..many)
        .map(|_| {
            let mut stream = TcpStream::connect(host.addr("http")).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            stream
        })
        .collect();
    host.check(&["policy", "list"], b"", 0, "evictor");
    assert!(host.page("/metrics").contains("kvasir_"));
    let live = std::process::Command::new(crate::process::KVASIR)
        .args(["node", "list", "--grpc", host.addr("grpc")])
        .env("KVASIR_TOKEN", host.token_for(&["--role", "observer"]))
        .output()
        .unwrap();
    assert!(live.status.success(), "{}", String::from_utf8_lossy(&live.stderr));
    drop((silent, silent_too, strangers));
    peace.holds("callers that said nothing");
}
