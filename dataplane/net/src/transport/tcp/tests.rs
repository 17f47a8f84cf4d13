use std::io::{Read, Write};
use std::net::Ipv4Addr;

use super::*;
use crate::transport::auth;
use crate::transport::conformance::{self, Pair};
use crate::transport::node::Secret;
use crate::transport::{Access, Completion, CompletionQueue, Direction, Grant, Op, OpError, Sink};
use kvasir_memory::buffer::Buffer;
use kvasir_memory::host::HostPool;
use kvasir_os::thread;

const HOUR: Duration = Duration::from_secs(3600);
const PATIENCE: Duration = Duration::from_secs(120);

fn node(name: &str) -> Arc<Node> {
    Arc::new(Node::new(name, Secret::new(b"secret"), 1))
}

/// Timeouts that no load of the machine reaches.
fn config() -> TcpConfig {
    TcpConfig {
        listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
        connect_timeout: PATIENCE,
        handshake_timeout: PATIENCE,
        peer_timeout: PATIENCE,
        ..TcpConfig::default()
    }
}

fn pair(change: impl Fn(&mut TcpConfig)) -> Pair {
    let mut config = config();
    change(&mut config);
    let (client_node, server_node) = (node("client"), node("server"));
    let server = Arc::new(Tcp::new(server_node.clone(), config.clone()).unwrap());
    let client = Arc::new(Tcp::new(client_node.clone(), TcpConfig { listen: None, ..config }).unwrap());
    let vanishing = server.clone();
    Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
}

#[test]
fn keeps_the_rules() {
    conformance::run(&|| pair(|_| {}));
}

#[test]
fn keeps_the_rules_with_more_connections_and_checksums() {
    conformance::run(&|| {
        pair(|config| {
            config.connections = 3;
            config.checksum = true;
            config.bind = Some(Ipv4Addr::LOCALHOST.into());
        })
    });
}

/// A client of `address` with memory and a queue of its own.
struct Client {
    endpoint: Arc<dyn Endpoint>,
    ours: Region,
    queue: Arc<CompletionQueue>,
}

impl Client {
    fn new(address: &str, config: TcpConfig) -> Self {
        let tcp = Tcp::new(node("client"), TcpConfig { listen: None, ..config }).unwrap();
        let endpoint = tcp.connect(address).unwrap();
        Self { endpoint, ours: Region::of_buffer(Buffer::zeroed(4096)), queue: CompletionQueue::new() }
    }

    fn read(&self, grant: &Arc<Grant>, len: u64) -> Completion {
        let (local, remote) = (vec![self.ours.range(0, len).unwrap()], vec![grant.range(0, len)]);
        let op = Op { id: 1, direction: Direction::Read, grant: grant.clone(), local, remote, cancel: None };
        self.endpoint.submit(vec![op], &self.queue.sink());
        self.queue.wait(Instant::now() + PATIENCE).expect("a completion")
    }
}

fn server(config: TcpConfig) -> (Tcp, String) {
    let node = node("server");
    node.exports
        .export("kv", vec![Region::of_buffer(Buffer::zeroed(4096))], Access::ReadWrite, HOUR)
        .unwrap();
    let tcp = Tcp::new(node, config).unwrap();
    let address = tcp.address().unwrap();
    (tcp, address)
}

#[test]
fn who_hears_that_a_read_was_refused_may_close_the_endpoint() {
    let (peer, address) = server(config());
    let client = Client::new(&address, config());
    let grant = client.endpoint.open("kv").unwrap();
    // The endpoint breaks while the receiving thread is at work, and the submitter leaves the sending to that thread.
    assert_eq!(client.read(&grant, 64).result, Ok(()));
    peer.shut_down();
    while client.endpoint.down().is_none() {
        thread::yield_now();
    }
    let (heard, hears) = std::sync::mpsc::channel();
    let (endpoint, closing) = (client.endpoint.clone(), client.endpoint.clone());
    let range = client.ours.range(0, 64).unwrap();
    thread::spawn(move || {
        let sink: Arc<dyn Sink> = Arc::new(move |completion: Completion| {
            closing.close();
            let _ = heard.send(completion);
        });
        let remote = vec![grant.range(0, 64)];
        let op = Op { id: 1, direction: Direction::Read, grant, local: vec![range], remote, cancel: None };
        endpoint.submit(vec![op], &sink);
    });
    let refused = hears.recv_timeout(PATIENCE).expect("it is told");
    assert!(matches!(refused.result, Err(OpError::PeerDown { .. })), "{refused:?}");
}

/// A peer that authenticates and then says what `talk` makes it say.
fn scripted(talk: impl FnOnce(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        auth::accept(&mut stream, &node("scripted"), "").unwrap();
        talk(stream);
    });
    address
}

/// A grant as a scripted peer might have given it.
fn made_up_grant() -> Arc<Grant> {
    let exports = crate::transport::Exports::new(1);
    exports.export("kv", vec![Region::of_buffer(Buffer::zeroed(4096))], Access::ReadWrite, HOUR).unwrap();
    Arc::new(exports.grant("kv", "peer").unwrap().describe())
}

/// The next question of a client: its header, its body read past.
fn next_question(stream: &mut TcpStream) -> wire::Header {
    let mut head = [0; wire::HEADER_LEN];
    stream.read_exact(&mut head).unwrap();
    let header = wire::Header::decode(&head).unwrap();
    stream.read_exact(&mut vec![0; header.body_len as usize]).unwrap();
    header
}

/// Whether the other side has ended the connection, after reading what it still sent.
fn hung_up(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_silent_peer_is_down() {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let address = scripted(move |stream| {
        // Connected, but silent until the test is over.
        let _ = wait.recv();
        drop(stream);
    });
    let quick = Duration::from_millis(20);
    let client = Client::new(&address, TcpConfig { heartbeat: quick, peer_timeout: quick, ..config() });
    let completion = client.read(&made_up_grant(), 100);
    let Err(OpError::PeerDown { peer, reason }) = &completion.result else { panic!("{completion:?}") };
    assert!(peer == "scripted" && reason.contains("nothing was heard"), "{reason}");
    // From now on there is no wait, and idle endpoints learn of it too.
    assert!(matches!(client.read(&made_up_grant(), 100).result, Err(OpError::PeerDown { .. })));
    drop(done);
}

#[test]
fn an_idle_endpoint_learns_that_its_peer_is_gone() {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let address = scripted(move |stream| {
        let _ = wait.recv();
        drop(stream);
    });
    let quick = Duration::from_millis(20);
    let client = Client::new(&address, TcpConfig { heartbeat: quick, peer_timeout: quick, ..config() });
    let deadline = Instant::now() + PATIENCE;
    while client.endpoint.down().is_none() {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    drop(done);
}

#[test]
fn answers_that_make_no_sense_end_the_connection() {
    let header = |kind, request| wire::Header::new(kind, request);
    let data = |request, payload_len| wire::Header { payload_len, ..header(wire::Kind::Data, request) };
    let check = |change: &(dyn Fn(u64) -> Vec<u8> + Sync), expected: &str| {
        thread::scope(|scope| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let address = listener.local_addr().unwrap().to_string();
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                auth::accept(&mut stream, &node("scripted"), "").unwrap();
                let request = next_question(&mut stream).request;
                stream.write_all(&change(request)).unwrap();
                assert!(hung_up(&mut stream));
            });
            let client = Client::new(&address, TcpConfig { heartbeat: PATIENCE, ..config() });
            let completion = client.read(&made_up_grant(), 100);
            let text = completion.result.unwrap_err().to_string();
            assert!(text.contains(expected) && completion.valid_bytes == 0, "{text}");
            assert_eq!(client.endpoint.in_flight(), 0);
            client.endpoint.close();
        });
    };
    check(&|_| b"HTTP/1.1 400 Bad Request\r\n\r\n padding".to_vec(), "starts with");
    check(&|request| data(request + 1, 100).encode().into(), "not asked");
    check(&|request| data(request, 99).encode().into(), "not asked");
    check(&|request| header(wire::Kind::Ack, request).encode().into(), "not asked");
    check(&|request| header(wire::Kind::Read, request).encode().into(), "not asked");
    check(
        &|request| wire::Header { code: 77, ..header(wire::Kind::Data, request) }.encode().into(),
        "kind 77",
    );
}

#[test]
fn damaged_payloads_are_told_from_good_ones() {
    let address = scripted(|mut stream| {
        for crc in [Some(crc32fast::hash(&[7; 100])), Some(1)] {
            let request = next_question(&mut stream).request;
            let header =
                wire::Header { payload_len: 100, crc, ..wire::Header::new(wire::Kind::Data, request) };
            stream.write_all(&[&header.encode()[..], &[7; 100]].concat()).unwrap();
        }
        hung_up(&mut stream);
    });
    let client = Client::new(&address, TcpConfig { heartbeat: PATIENCE, ..config() });
    assert_eq!(client.read(&made_up_grant(), 100), Completion { id: 1, valid_bytes: 100, result: Ok(()) });
    let damaged = client.read(&made_up_grant(), 100);
    assert!(
        damaged.valid_bytes == 0 && matches!(damaged.result, Err(OpError::Checksum { .. })),
        "{damaged:?}"
    );
}

#[test]
fn strangers_and_loiterers_are_turned_away() {
    let quick = TcpConfig { handshake_timeout: Duration::from_millis(50), ..config() };
    let (server, address) = server(quick);
    let mut garbage = TcpStream::connect(&address).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n").unwrap();
    assert!(hung_up(&mut garbage));
    // Slow-loris: says nothing, or greets and stops.
    let mut silent = TcpStream::connect(&address).unwrap();
    assert!(hung_up(&mut silent));
    let mut slow = TcpStream::connect(&address).unwrap();
    slow.write_all(b"KVTX\x01\x05slo").unwrap();
    assert!(hung_up(&mut slow));
    let wrong = Arc::new(Node::new("mallory", Secret::new(b"guess"), 1));
    let wrong = Tcp::new(wrong, TcpConfig { listen: None, ..config() }).unwrap();
    assert!(matches!(wrong.connect(&address), Err(Error::Authentication { .. })));
    let deadline = Instant::now() + PATIENCE;
    while server.accepted() != (0, 4) {
        assert!(Instant::now() < deadline, "{:?}", server.accepted());
        thread::yield_now();
    }
}

/// It knows the secret, and was removed from the cluster, or never was in it, or is in another.
#[test]
fn who_is_no_member_is_turned_away() {
    let of = |name: &str, cluster: &str| {
        let members = ["client", "server"].map(str::to_owned);
        Arc::new(Node::new(name, Secret::new(b"secret"), 1).of_cluster(cluster, members))
    };
    let server_node = of("server", "one");
    server_node
        .exports
        .export("kv", vec![Region::of_buffer(Buffer::zeroed(64))], Access::Read, HOUR)
        .unwrap();
    let server = Tcp::new(server_node, config()).unwrap();
    let open = |node| {
        let client = Tcp::new(node, TcpConfig { listen: None, ..config() }).unwrap();
        client.connect(&server.address().unwrap()).and_then(|endpoint| endpoint.open("kv"))
    };
    assert!(open(of("client", "one")).is_ok());
    let removed = open(of("removed", "one"));
    assert!(matches!(removed, Err(Error::PeerDown { .. })), "{removed:?}");
    let other = open(of("client", "two"));
    assert!(matches!(other, Err(Error::Authentication { .. })), "{other:?}");
}

#[test]
fn connections_are_bounded() {
    let (server, address) = server(TcpConfig { connections_max: 2, ..config() });
    let first = Client::new(&address, config());
    let _second = Client::new(&address, config());
    let third = Tcp::new(node("client"), TcpConfig { listen: None, ..config() }).unwrap();
    assert!(third.connect(&address).is_err());
    assert!(first.endpoint.open("kv").is_ok());
    assert!(server.accepted().1 >= 1);
}

/// Frames that lie about lengths, after a good handshake: the connection ends, and nothing was allocated for them.
#[test]
fn hostile_frames_end_the_connection() {
    let (server, address) = server(config());
    let mut frames: Vec<Vec<u8>> = Vec::new();
    let head = |kind| wire::Header::new(kind, 1);
    frames.push(wire::Header { body_len: u32::MAX, ..head(wire::Kind::Open) }.encode().into());
    frames.push(wire::Header { payload_len: u64::MAX, ..head(wire::Kind::Write) }.encode().into());
    frames.push(head(wire::Kind::Grant).encode().into());
    frames.push(vec![0xff; 64]);
    let write = wire::Header { body_len: 36, payload_len: 5, ..head(wire::Kind::Write) };
    frames.push([&write.encode()[..], &[0; 28], &u64::MAX.to_le_bytes()].concat());
    for frame in frames {
        let mut stream = TcpStream::connect(&address).unwrap();
        auth::connect(&mut stream, &node("mallory"), "").unwrap();
        stream.write_all(&frame).unwrap();
        assert!(hung_up(&mut stream));
    }
    let client = Client::new(&address, config());
    let grant = client.endpoint.open("kv").unwrap();
    assert_eq!(client.read(&grant, 4096).result, Ok(()), "others are served on");
    drop(server);
}

/// A write that is refused amid its payload leaves the connection in step.
#[test]
fn refused_writes_are_read_past() {
    let (server, address) = server(config());
    let client = Client::new(&address, config());
    let grant = client.endpoint.open("kv").unwrap();
    let stale = Arc::new(Grant { epoch: 99, ..Grant::clone(&grant) });
    let big = Region::of_pool(Arc::new(HostPool::new(4 << 20, false).unwrap()));
    let wide = Arc::new(Grant {
        regions: vec![crate::transport::grant::RemoteRegion { len: 4 << 20, ..grant.regions[0] }],
        ..Grant::clone(&stale)
    });
    let op = Op {
        id: 9,
        direction: Direction::Write,
        grant: wide.clone(),
        local: vec![big.whole().unwrap()],
        remote: vec![wide.range(0, 4 << 20)],
        cancel: None,
    };
    client.endpoint.submit(vec![op], &client.queue.sink());
    let refused = client.queue.wait(Instant::now() + PATIENCE).unwrap();
    assert_eq!(refused.result, Err(OpError::Denied(crate::transport::Denied::StaleEpoch)));
    assert_eq!(client.read(&grant, 100).result, Ok(()));
    drop(server);
}
