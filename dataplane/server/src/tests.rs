use std::io::{Read, Write};
use std::net::TcpStream;

use super::access::{Act, Refused, Role};
use super::*;
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};
use kvasir_protocol::clock::Clock;
use kvasir_protocol::stream::receive_with_fds;
use kvasir_protocol::wire::{Found, HEADER_LEN, Header, Outcome, Placed, Request, VERSIONS};
use kvasir_store::config::DramConfig;
use kvasir_store::dram::DramStore;

struct Broken;

impl Gate for Broken {
    fn local(&self, _uid: u32, _gid: u32) -> Result<Identity, Refused> {
        panic!("a fault of ours")
    }
    fn bearer(&self, _token: &str) -> Result<Identity, Refused> {
        panic!("a fault of ours")
    }
}

/// Says of everybody the same.
struct Everybody(Identity);

impl Gate for Everybody {
    fn local(&self, _uid: u32, _gid: u32) -> Result<Identity, Refused> {
        Ok(self.0.clone())
    }
    fn bearer(&self, _token: &str) -> Result<Identity, Refused> {
        Ok(self.0.clone())
    }
}

/// Says of everybody the same, and has a fault when something is to be noted.
struct FailsToNote(Identity);

impl Gate for FailsToNote {
    fn local(&self, _uid: u32, _gid: u32) -> Result<Identity, Refused> {
        Ok(self.0.clone())
    }
    fn bearer(&self, _token: &str) -> Result<Identity, Refused> {
        Ok(self.0.clone())
    }
    fn note(&self, _act: &Act<'_>) {
        panic!("a fault of ours")
    }
}

/// A client, frame by frame.
struct Line(UnixStream);

impl Line {
    fn to(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(stream)
    }

    fn ask(&mut self, request: &Request) -> (Reply, usize) {
        self.ask_with(request, &[])
    }

    fn say(&mut self, request: &Request, payload: &[u8]) {
        let mut frame = Vec::new();
        request.encode(7, payload.len() as u64, &mut frame);
        self.0.write_all(&frame).unwrap();
        self.0.write_all(payload).unwrap();
    }

    fn ask_with(&mut self, request: &Request, payload: &[u8]) -> (Reply, usize) {
        self.say(request, payload);
        let mut header = [0; HEADER_LEN];
        let fds = receive_with_fds(&mut self.0, &mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        let mut body = vec![0; header.body_len as usize];
        self.0.read_exact(&mut body).unwrap();
        (Reply::decode(header.op, &body).unwrap(), fds.len())
    }

    fn hello(&mut self) -> (Reply, usize) {
        let (namespace, token) = (String::new(), String::new());
        let versions = VERSIONS;
        self.ask(&Request::Hello {
            versions,
            wants_write: true,
            wants_ring: false,
            tenant: 0,
            namespace,
            token,
        })
    }
}

/// A server for callers that are all `identity`, with its store.
fn serve(dir: &Path, identity: Identity) -> (Server, Arc<DramStore>, PathBuf) {
    serve_with(dir, Arc::new(Everybody(identity)), 1 << 20, ServerConfig::default())
}

fn serve_with(
    dir: &Path,
    gate: Arc<dyn Gate>,
    pool_bytes: u64,
    config: ServerConfig,
) -> (Server, Arc<DramStore>, PathBuf) {
    let dram = DramConfig { pool_bytes, blocks_max: 64, ..DramConfig::default() };
    let store = Arc::new(DramStore::open(dram).unwrap());
    let socket = dir.join("data.sock");
    let listen = Listen { unix: Some(socket.clone()), ..Listen::default() };
    let node = Node::dram_only(Arc::clone(&store), Clock::start());
    (Server::start(node, &listen, gate, config).unwrap(), store, socket)
}

fn caller(role: Role, in_place: bool) -> Identity {
    let (roles, tenant) = ([role].into_iter().collect(), Some(3));
    Identity { name: "user 7".into(), roles, tenant, shared: Vec::new(), in_place }
}

/// Whether it does within two minutes.
fn comes_true(condition: impl Fn() -> bool) -> bool {
    (0..6000).any(|_| {
        let is_true = condition();
        if !is_true {
            thread::sleep(Duration::from_millis(20));
        }
        is_true
    })
}

#[test]
fn a_caller_that_may_not_store_gets_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, _, socket) = serve(dir.path(), caller(Role::Observer, true));
    let (reply, fds) = Line::to(&socket).hello();
    let Reply::Error { message, .. } = reply else { panic!("{reply:?}") };
    assert!(message.contains("takes role engine"), "{message}");
    assert_eq!(fds, 0);
}

#[test]
fn only_a_caller_with_leave_to_maps_the_pool() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, store, socket) = serve(dir.path(), caller(Role::Engine, false));
    let mut line = Line::to(&socket);
    let (reply, fds) = line.hello();
    assert!(matches!(reply, Reply::Hello { shared: false, ring: false, .. }), "{reply:?}");
    assert_eq!(fds, 0);
    let block = BlockMeta::single(BlockKey(1), 4096);
    let (reply, _) = line.ask(&Request::Reserve(vec![block]));
    let Reply::Error { message, .. } = reply else { panic!("{reply:?}") };
    assert!(message.contains("`in_place`"), "{message}");
    assert_eq!(store.metrics().reservations, 0);
}

/// A caller that may not map the pool gets blocks through its socket. At this pace all would take 8 s, and it has 4 s: 2 s,
/// and one for each MiB. A machine that is slower than that proves less, and nothing wrong.
#[test]
fn a_reader_on_the_socket_that_takes_a_little_at_a_time_is_let_go() {
    const BLOCK: u32 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let config = ServerConfig { stall_timeout: Duration::from_secs(2), ..ServerConfig::default() };
    let gate = Arc::new(Everybody(caller(Role::Engine, false)));
    let (_server, store, socket) = serve_with(dir.path(), gate, 2 << 20, config);
    let stored = BlockMeta::single(BlockKey(1).of_tenant(3), BLOCK);
    store.put(store.new_owner(), &stored, &[7; BLOCK as usize], 0).unwrap();
    let mut line = Line::to(&socket);
    line.hello();
    let (reply, _) = line.ask(&Request::Get { class: 0, release: vec![], keys: vec![BlockKey(1); 2] });
    let Reply::Get(found) = reply else { panic!("{reply:?}") };
    assert!(found.iter().all(|found| matches!(found, Found::Hit { size: BLOCK, .. })), "{found:?}");
    let (mut taken, mut piece) = (0, vec![0; 64 << 10]);
    while let Ok(count @ 1..) = line.0.read(&mut piece) {
        taken += count;
        thread::sleep(Duration::from_millis(250));
    }
    assert!(taken < 2 * BLOCK as usize, "it was waited for until it had all: {taken} B");
    let leases = || store.stat(&[stored.key]).unwrap()[0].map(|block| block.leases);
    assert!(comes_true(|| leases() == Some(0)), "two minutes passed, and its block is still held");
}

/// Four blocks, of which two fit into a third of the pool.
#[test]
fn a_caller_that_sends_blocks_has_a_share_of_the_pool_until_they_are_committed() {
    const BLOCK: u32 = 128 << 10;
    let dir = tempfile::tempdir().unwrap();
    let (_server, store, socket) = serve(dir.path(), caller(Role::Engine, false));
    let bytes = vec![7; BLOCK as usize];
    let sum = checksum(&bytes);
    let mut line = Line::to(&socket);
    line.hello();
    let mut put = |first: u128| {
        let blocks = (first..first + 4).map(|n| (BlockMeta::single(BlockKey(n), BLOCK), sum)).collect();
        line.ask_with(&Request::Put(blocks), &bytes.repeat(4)).0
    };
    let outcomes = [Outcome::Done, Outcome::Done, Outcome::Throttled, Outcome::Throttled];
    assert_eq!(put(10), Reply::Outcomes(Op::Put, outcomes.to_vec()));
    assert_eq!(put(20), Reply::Outcomes(Op::Put, outcomes.to_vec()));
    assert_eq!(store.metrics().free_bytes, (1 << 20) - 4 * u64::from(BLOCK));
}

/// Ten blocks are less than a third of the pool, and 16 half of it.
#[test]
fn many_connections_of_one_caller_have_a_share_of_the_pool_together() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, _store, socket) = serve(dir.path(), caller(Role::Engine, true));
    let reserve = |line: u128| {
        let mut stream = Line::to(&socket);
        stream.hello();
        let blocks = (0..10).map(|n| BlockMeta::single(BlockKey(100 * line + n), 32 << 10)).collect();
        let (reply, _) = stream.ask(&Request::Reserve(blocks));
        let Reply::Reserve(placed) = reply else { panic!("{reply:?}") };
        (stream, placed.iter().filter(|placed| matches!(placed, Placed::At { .. })).count())
    };
    let (_streams, placed): (Vec<Line>, Vec<usize>) = (0..4).map(reserve).unzip();
    assert_eq!(placed, [10, 6, 0, 0]);
}

#[test]
fn the_place_of_a_client_whose_connection_was_ended_waits_until_it_hangs_up() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, store, socket) = serve(dir.path(), caller(Role::Engine, true));
    let mut line = Line::to(&socket);
    assert_eq!(line.hello().1, 1, "the pool's descriptor");
    let (reply, _) = line.ask(&Request::Reserve(vec![BlockMeta::single(BlockKey(1), 4096)]));
    assert!(matches!(reply, Reply::Reserve(_)), "{reply:?}");
    // Ends the connection, which a client may take for an error of this call and write on.
    let (reply, _) = line.ask(&Request::Remove(vec![BlockKey(1)]));
    assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
    let an_hour_later = 3_600_000;
    store.sweep(an_hour_later);
    store.sweep(2 * an_hour_later);
    assert_eq!(store.metrics().free_bytes, (1 << 20) - 4096, "its place went to others");
    drop(line);
    let freed = || {
        store.sweep(3 * an_hour_later);
        store.metrics().free_bytes == 1 << 20
    };
    assert!(comes_true(freed), "two minutes passed, and its place is still held back");
}

#[test]
fn a_connection_whose_thread_panics_leaves_its_place() {
    let store = DramStore::open(DramConfig { pool_bytes: 1 << 20, blocks_max: 64, ..DramConfig::default() });
    let listen = Listen { tcp: Some(([127, 0, 0, 1], 0).into()), ..Listen::default() };
    let gate = Arc::new(Broken);
    let node = Node::dram_only(Arc::new(store.unwrap()), Clock::start());
    let server = Server::start(node, &listen, gate, ServerConfig::default()).unwrap();
    let mut stream = Stream::Tcp(TcpStream::connect(server.tcp_addr().unwrap()).unwrap());
    stream.set_timeouts(Duration::from_secs(60)).unwrap();
    let (namespace, token) = (String::new(), String::new());
    let versions = VERSIONS;
    let hello =
        Request::Hello { versions, wants_write: true, wants_ring: false, tenant: 0, namespace, token };
    let mut frame = Vec::new();
    hello.encode(0, 0, &mut frame);
    stream.write_all(&frame).unwrap();
    // The connection ends with its thread; only then the count says something.
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    if comes_true(|| server.metrics().connections == 0) {
        return server.stop();
    }
    // Stopping would wait for it for ever.
    std::mem::forget(server);
    panic!("two minutes passed, and the connection still counts as open");
}

/// A place that no connection has any more would stay with nobody: it goes when its connection has been gone for a while.
#[test]
fn a_connection_whose_thread_panics_gives_back_what_it_reserved() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(FailsToNote(caller(Role::Operator, true)));
    let (_server, store, socket) = serve_with(dir.path(), gate, 1 << 20, ServerConfig::default());
    let mut line = Line::to(&socket);
    line.hello();
    let (reply, _) = line.ask(&Request::Reserve(vec![BlockMeta::single(BlockKey(1), 4096)]));
    assert!(
        matches!(&reply, Reply::Reserve(placed) if matches!(placed[..], [Placed::At { .. }])),
        "{reply:?}"
    );
    line.say(&Request::Remove(vec![BlockKey(2)]), &[]);
    assert_eq!(line.0.read(&mut [0]).unwrap_or(0), 0, "its thread is gone");
    let freed = || store.metrics().free_bytes == 1 << 20;
    assert!(comes_true(freed), "two minutes passed, and its place is still reserved");
}
