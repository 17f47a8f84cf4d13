//! Peers that die, links that break, and connections by the thousand.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_net::endpoint_pool::{Connector, EndpointPool, PoolConfig};
use kvasir_net::transport::Access;
use kvasir_net::transport::rdma::connect::Connection;
use kvasir_net::transport::rdma::qp::{Piece, Request, Verb};
use kvasir_net::transport::rdma::{self, Failure};

use crate::side::{DEADLINE, Side, join, pair, pattern};

const MEMORY: usize = 1 << 20;
const FULL: Option<Access> = Some(Access::ReadWrite);
/// Where the child process below is told to connect to.
const PARENT: &str = "KVASIR_TEST_RDMA_PARENT";

/// Another process with a device of its own. Killed when dropped, so that a failed test leaves nothing behind.
struct Peer {
    process: Child,
    address: u64,
    key: u32,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts this program again as [`the_other_process`] and connects to it.
fn peer_process(a: &Side) -> (Peer, Connection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "failures::the_other_process", "--ignored", "--nocapture"])
        .env(PARENT, listener.local_addr().unwrap().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut peer = Peer { process, address: 0, key: 0 };
    let mut control = listener.accept().unwrap().0;
    control.set_read_timeout(Some(DEADLINE)).unwrap();
    let connection = a.connect(&mut control);
    let mut words = [0; 12];
    control.read_exact(&mut words).unwrap();
    peer.address = u64::from_le_bytes(words[..8].try_into().unwrap());
    peer.key = u32::from_le_bytes(words[8..].try_into().unwrap());
    (peer, connection, control)
}

/// The far side of the tests with two processes; does nothing when it is not started by one of them.
#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn the_other_process() {
    let Ok(parent) = std::env::var(PARENT) else { return };
    let b = Side::new(1, MEMORY, FULL);
    b.fill(0, &pattern(MEMORY, 9));
    let mut control = TcpStream::connect(parent).unwrap();
    let _connection = b.connect(&mut control);
    control.write_all(&b.region.address().to_le_bytes()).unwrap();
    control.write_all(&b.region.remote_key().to_le_bytes()).unwrap();
    // Until the parent is done, or kills us. For each line, the first bytes of our memory.
    for line in BufReader::new(control.try_clone().unwrap()).lines() {
        let len: u64 = line.unwrap().parse().unwrap();
        control.write_all(&b.bytes(0, len)).unwrap();
    }
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn two_processes_write_and_read() {
    let a = Side::new(0, MEMORY, None);
    let (peer, to_b, mut control) = peer_process(&a);
    let request = |verb, len| Request {
        token: 0,
        verb,
        local: vec![a.piece(0, len)],
        remote_address: peer.address,
        remote_key: peer.key,
    };
    assert_eq!(a.run(&to_b, request(Verb::Read, MEMORY as u32)), Ok(()));
    assert!(a.bytes(0, MEMORY as u64) == pattern(MEMORY, 9), "what the other process put there");

    let data = pattern(100_000, 8);
    a.fill(0, &data);
    assert_eq!(a.run(&to_b, request(Verb::Write, 100_000)), Ok(()));
    control.write_all(b"100000\n").unwrap();
    let mut there = vec![0; 100_000];
    control.read_exact(&mut there).unwrap();
    assert!(there == data, "what the other process finds there");
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn a_peer_killed_amid_transfers_ends_every_request() {
    let a = Side::new(0, MEMORY, None);
    let (mut peer, to_b, _control) = peer_process(&a);
    let request = |token: u64| Request {
        token,
        verb: if token.is_multiple_of(2) { Verb::Write } else { Verb::Read },
        local: vec![a.piece(0, MEMORY as u32)],
        remote_address: peer.address,
        remote_key: peer.key,
    };
    // 128 MiB: far from done when the first is.
    to_b.queue.post((0..128).map(request).collect()).map_err(|refused| refused.error).unwrap();
    let mut done = a.finish(&to_b, 1);
    peer.process.kill().unwrap();
    peer.process.wait().unwrap();
    done.extend(a.finish(&to_b, 128 - done.len()));

    assert!(done.iter().map(|done| done.request.token).eq(0..128), "each once, in order");
    let failed = done.iter().position(|done| done.result.is_err()).expect("some were not done");
    assert_eq!(done[failed].result, Err(Failure::Unreachable), "request {failed}");
    assert!(done[failed + 1..].iter().all(|done| done.result == Err(Failure::Flushed)));
}

/// The network interface of a side, taken down. It comes back whatever becomes of the test.
struct LinkDown(String);

impl LinkDown {
    fn of(side: &Side) -> Self {
        let (name, gid) = (side.device.name(), side.device.gid_index().unwrap());
        let path = format!("/sys/class/infiniband/{name}/ports/1/gid_attrs/ndevs/{gid}");
        let interface = std::fs::read_to_string(path).unwrap().trim().to_owned();
        set_link(&interface, "down");
        Self(interface)
    }
}

impl Drop for LinkDown {
    fn drop(&mut self) {
        set_link(&self.0, "up");
    }
}

fn set_link(interface: &str, state: &str) {
    let status = Command::new("ip").args(["link", "set", interface, state]).status().unwrap();
    assert!(status.success(), "ip link set {interface} {state}");
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn a_link_that_breaks_and_returns_takes_a_new_connection() {
    let [(a, to_b), (b, _to_a)] = pair(MEMORY, FULL);
    b.fill(0, &pattern(4096, 5));
    let read = || a.request(Verb::Read, vec![a.piece(0, 4096)], &b.region, 0);
    assert_eq!(a.run(&to_b, read()), Ok(()));

    let down = LinkDown::of(&b);
    assert_eq!(a.run(&to_b, read()), Err(Failure::Unreachable));
    assert!(to_b.queue.post(vec![read()]).is_err(), "the connection is broken, and says so");
    assert!(to_b.queue.close().is_empty() && !b.device.is_up());
    drop(down);

    let start = Instant::now();
    while !a.device.is_up() || !b.device.is_up() {
        assert!(start.elapsed() < DEADLINE, "the link does not return");
        std::thread::sleep(Duration::from_millis(50));
    }
    a.fill(0, &[0; 4096]);
    let (_to_a, to_b) = join(&a, &b);
    assert_eq!(a.run(&to_b, read()), Ok(()));
    assert_eq!(a.bytes(0, 4096), pattern(4096, 5));
}

/// Peers are numbers; each is a pair of queue pairs between the same two devices.
struct Numbered {
    a: Side,
    b: Side,
}

impl Connector for Numbered {
    type Peer = usize;
    type Endpoint = Arc<(Connection, Connection)>;
    type Error = rdma::Error;

    fn connect(&self, _peer: &usize) -> Result<Self::Endpoint, rdma::Error> {
        Ok(Arc::new(join(&self.a, &self.b)))
    }

    fn is_broken(&self, _endpoint: &Self::Endpoint) -> bool {
        false
    }

    fn close(&self, endpoint: &Self::Endpoint) {
        assert!(endpoint.0.queue.close().is_empty() && endpoint.1.queue.close().is_empty());
    }
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn endpoints_come_and_go_through_a_pool_of_64() {
    const CAP: usize = 64;
    // Emulation takes about 70 ms for each on a busy machine: a thousand by default, ten thousand on request.
    let count = std::env::var("KVASIR_TEST_ENDPOINTS").map_or(1_000, |count| count.parse().unwrap());
    let (a, b) = (Side::new(0, MEMORY, FULL), Side::new(1, MEMORY, FULL));
    b.fill(0, &pattern(4096, 6));
    let (memory, theirs) = (a.piece(0, 4096), Arc::clone(&b.region));
    let side = a.clone();
    let pool =
        EndpointPool::new(Numbered { a, b }, PoolConfig { endpoints_max: CAP, ..PoolConfig::default() });
    let start = Instant::now();
    for n in 0..count {
        let used = pool.get(&n, || 0).unwrap();
        let at = (n % 64) * 64;
        let local = vec![Piece { offset: at as u64, len: 64, ..memory.clone() }];
        let read = side.request(Verb::Read, local, &theirs, at as u64);
        assert_eq!(side.run(&used.1, read), Ok(()), "endpoint {n}");
        used.worked();
        assert!(pool.open() <= CAP);
    }
    assert_eq!(side.bytes(0, 4096), pattern(4096, 6));
    assert_eq!((pool.stats().connects, pool.stats().evicted), (count as u64, (count - CAP) as u64));
    println!("{count} endpoints, {CAP} at once, {:.1} s", start.elapsed().as_secs_f64());
}
