//! How a connection begins, ends and is made anew.

use std::os::unix::net::UnixListener;
use std::time::Instant;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use kvasir_protocol::stream::send_with_fds;
use kvasir_protocol::wire::{Found, HEADER_LEN, VERSION, Versions};

use super::*;

#[test]
fn a_client_is_made_anew_and_tells_that_the_host_is_another() {
    let mut host = Host::small();
    let links = [host.unix(), host.tcp()].map(|endpoint| Reconnecting::new(endpoint, options()));
    let first = links.each_ref().map(|link| link.client().unwrap());
    assert_eq!(first[0].boot(), first[1].boot(), "one host");
    put(&first[0], 1, 4096).unwrap();
    let lent = first[0].get(&[key(1)], 0).unwrap().remove(0).unwrap();
    for (link, first) in links.iter().zip(&first) {
        assert!(Arc::ptr_eq(&link.client().unwrap(), first), "it works, so it stays");
    }
    let addr = host.stop();
    for link in &links {
        let refused = link.client().err().unwrap();
        assert!(refused.retryable(), "{refused}");
    }
    assert!(matches!(lent.bytes(), Err(ClientError::LenderGone { .. })), "no call had met the end");
    assert!(matches!(first[0].exists(&[key(1)]), Err(ClientError::Closed { .. })));

    let host = host.again(addr);
    for (link, first) in links.iter().zip(&first) {
        let client = link.client().unwrap();
        assert_ne!(client.boot(), first.boot());
        assert_eq!(client.exists(&[key(1)]).unwrap(), [false]);
        assert!(put(&client, 2, 100).is_ok());
    }
    drop(host);
}

#[test]
fn a_connection_that_broke_by_itself_is_replaced_while_the_host_stays() {
    let host = Host::small();
    let link = Reconnecting::new(host.tcp(), Options { write: false, ..options() });
    let first = link.client().unwrap();
    assert!(put(&first, 1, 10).is_err(), "the host ends a connection that breaks its word");
    let second = link.client().unwrap();
    assert!(!Arc::ptr_eq(&first, &second) && first.boot() == second.boot());
    assert_eq!(second.exists(&[key(1)]).unwrap(), [false]);
}

#[test]
fn versions_without_overlap_are_refused_with_both_named() {
    let host = Host::small();
    let hello = |lowest, highest| Request::Hello {
        versions: Versions { lowest, highest },
        wants_write: false,
        wants_ring: false,
        tenant: 0,
        namespace: String::new(),
        token: String::new(),
    };
    let ask = |lowest, highest| {
        let mut stream = UnixStream::connect(host.dir.path().join("data.sock")).unwrap();
        let mut frame = Vec::new();
        hello(lowest, highest).encode(0, 0, &mut frame);
        // As a client of another release sends it.
        frame[4] = highest;
        stream.write_all(&frame).unwrap();
        let mut header = [0; HEADER_LEN];
        stream.read_exact(&mut header).unwrap();
        let header = kvasir_protocol::wire::Header::decode(&header).unwrap();
        let mut body = vec![0; header.body_len as usize];
        stream.read_exact(&mut body).unwrap();
        Reply::decode(header.op, &body).unwrap()
    };
    for (lowest, highest) in [(VERSION + 1, VERSION + 4), (1, VERSIONS.lowest - 1)] {
        let Reply::Error { retryable, message } = ask(lowest, highest) else { panic!("it was let in") };
        let expected = format!("data protocol {lowest} to {highest}, this host {VERSIONS}");
        assert!(message.contains(&expected) && !retryable, "{message}");
    }
    assert!(matches!(ask(1, 200), Reply::Hello { .. }));

    // And a host of another release, as this client meets it.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("newer.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let newer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut frame = Vec::new();
        let message = "the client speaks data protocol 6 to 6, this host 8 to 9".to_owned();
        Reply::Error { retryable: false, message }.encode(0, 0, &mut frame);
        frame[4] = 9;
        stream.write_all(&frame).unwrap();
    });
    let refused = Client::connect(&Endpoint::Unix(path), options()).err().unwrap();
    assert!(!refused.retryable() && refused.to_string().contains("this host 8 to 9"), "{refused}");
    newer.join().unwrap();
}

/// A host that says hello and nothing more.
pub(super) fn mute_host() -> (tempfile::TempDir, Endpoint, std::thread::JoinHandle<UnixStream>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mute.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let host = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut frame = Vec::new();
        Reply::Hello {
            shared: false,
            writable: true,
            ring: false,
            boot: 1,
            pool_bytes: 0,
            lease_ms: 0,
            reservation_ms: 0,
            payload_max: 1 << 20,
        }
        .encode(0, 0, &mut frame);
        // A client that has no patience is gone already.
        let _ = stream.write_all(&frame);
        stream
    });
    (dir, Endpoint::Unix(path), host)
}

#[test]
fn a_call_ends_by_its_deadline_though_the_host_says_nothing() {
    let (_dir, endpoint, host) = mute_host();
    let patient = Options { timeout: Duration::from_secs(3600), ..Options::default() };
    let client = Client::connect(&endpoint, patient).unwrap();
    let stream = host.join().unwrap();

    client.set_deadline(Some(Instant::now()));
    let late = client.exists(&[key(1)]).unwrap_err();
    assert!(late.retryable() && matches!(late, ClientError::DeadlinePassed { .. }), "{late}");
    client.set_deadline(Some(Instant::now() + Duration::from_millis(20)));
    let lost = client.exists(&[key(1)]).unwrap_err();
    assert!(matches!(lost, ClientError::Lost { .. }), "the first one had not broken it: {lost}");
    client.set_deadline(None);
    assert!(matches!(client.exists(&[key(1)]), Err(ClientError::Closed { .. })), "its answer may still come");
    drop(stream);
}

#[test]
fn a_deadline_that_is_kept_changes_nothing() {
    let host = Host::small();
    for client in host.both() {
        client.set_deadline(Some(Instant::now() + Duration::from_secs(3600)));
        assert_eq!(put(&client, 1, 70_000).unwrap(), Put::Stored);
        assert!(client.get(&[key(1)], 0).unwrap()[0].is_some());
        client.set_deadline(Some(Instant::now()));
        assert!(matches!(client.get(&[key(1)], 0), Err(ClientError::DeadlinePassed { .. })));
        client.set_deadline(None);
        assert_eq!(client.remove(&[key(1)]).unwrap(), [true]);
    }
}

/// Lends a block, and takes a place to be filled, but does not answer what ends either.
#[test]
fn last_words_end_by_the_deadline_too() {
    for saves in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forgetful.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let host = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let pool = kvasir_memory::host::HostPool::new(8192, false).unwrap();
            assert!(pool.mapping().write(0, &bytes_of(1, 100)));
            let mut frame = Vec::new();
            loop {
                let (header, request) = super::liar::next(&mut stream).unwrap();
                let reply = match request {
                    Request::Hello { .. } => super::liar::hello(true),
                    Request::Get { .. } => {
                        let checksum = checksum(&bytes_of(1, 100));
                        Reply::Get(vec![Found::Hit { offset: 0, size: 100, checksum, lease: 1 }])
                    }
                    Request::Reserve(_) => Reply::Reserve(vec![Placed::At { reservation: 1, offset: 0 }]),
                    Request::Release(_) | Request::Commit(_) => break,
                    other => panic!("{other:?}"),
                };
                reply.encode(header.request, 0, &mut frame);
                let fds: Vec<_> = (header.op == Op::Hello).then(|| pool.writable_fd()).into_iter().collect();
                send_with_fds(&mut stream, &frame, &fds).unwrap();
            }
            assert!(super::liar::next(&mut stream).is_none(), "the client has hung up");
        });
        let patient = Options { timeout: Duration::from_secs(3600), ..Options::default() };
        let client = Client::connect(&Endpoint::Unix(path), patient).unwrap();
        // Enough for what comes before, on any machine; or this fails with the wrong error.
        client.set_deadline(Some(Instant::now() + Duration::from_secs(3)));
        let lost = if saves {
            put(&client, 1, 100).unwrap_err()
        } else {
            let block = client.get(&[key(1)], 0).unwrap().remove(0).unwrap();
            client.set_deadline(Some(Instant::now()));
            client.release([block]).unwrap_err()
        };
        let op = if saves { Op::Commit } else { Op::Release };
        assert!(matches!(&lost, ClientError::Lost { op: of, .. } if *of == op), "{lost}");
        drop(client);
        host.join().unwrap();
    }
}

#[test]
fn what_is_borrowed_is_not_read_after_hanging_up() {
    let host = Host::small();
    let client = Client::connect(&host.unix(), options()).unwrap();
    put(&client, 1, 100).unwrap();
    let block = client.get(&[key(1)], 0).unwrap().remove(0).unwrap();
    client.hang_up();
    let mut bytes = [0; 100];
    assert!(matches!(block.copy_to(&mut bytes), Err(ClientError::LenderGone { .. })));
}

#[test]
fn closing_ends_the_connection_whoever_looks_at_it_meanwhile() {
    let host = Host::small();
    for _ in 0..100 {
        let link = Reconnecting::new(host.unix(), options());
        let client = link.client().unwrap();
        let closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !closed.load(Ordering::Relaxed) {
                        link.current();
                    }
                });
            }
            link.close();
            closed.store(true, Ordering::Relaxed);
        });
        assert!(client.exists(&[key(1)]).is_err());
    }
}

#[test]
fn a_host_stops_though_a_client_asks_without_a_pause() {
    let mut host = Host::small();
    let client = Client::connect(&host.unix(), options()).unwrap();
    let asked = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while client.exists(&[key(1)]).is_ok() {
                asked.store(true, Ordering::Relaxed);
            }
        });
        while !asked.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        host.stop();
    });
}

#[test]
fn a_host_that_accepts_nobody_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // As many as may wait.
    let _waits = UnixStream::connect(&path).unwrap();
    let hurried = Options { timeout: Duration::from_millis(20), ..options() };
    let refused = Client::connect(&Endpoint::Unix(path), hurried).err().unwrap();
    assert!(refused.retryable() && refused.to_string().contains("nobody was accepted"), "{refused}");
}

#[test]
fn a_host_that_does_not_answer_is_told_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mute.sock");
    let _accepts = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let hurried = Options { timeout: Duration::from_millis(20), ..options() };
    let late = Client::connect(&Endpoint::Unix(path), hurried).err().unwrap();
    assert!(late.retryable() && late.to_string().contains("no answer within the time limit"), "{late}");
}

#[test]
fn a_closed_link_makes_no_further_connection() {
    let host = Host::small();
    let link = Reconnecting::new(host.unix(), options());
    assert!(link.current().is_none(), "nobody has asked for one");
    let client = link.client().unwrap();
    assert!(Arc::ptr_eq(&client, &link.current().unwrap()));
    link.close();
    assert!(client.exists(&[key(1)]).is_err());
    assert!(link.current().is_none());
    assert!(matches!(link.client(), Err(ClientError::Closed { .. })));
}
