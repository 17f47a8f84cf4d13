//! The client against a real server, over both transports.

mod connection;
#[cfg(feature = "gpu")]
mod gpu;
mod handing;
mod handover;
mod hold;
mod jobs;
mod labels;
mod liar;
mod pair;
mod removals;
mod runs;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvasir_protocol::block::{BlockMeta, Pin, checksum};
use kvasir_protocol::clock::Clock;
use kvasir_protocol::wire::Placed;
use kvasir_server::access::OwnUser;
use kvasir_server::node::Node;
use kvasir_server::{Listen, ServeError, Server, ServerConfig};
use kvasir_store::config::DramConfig;
use kvasir_store::dram::{DramStore, Reserve};

use super::*;

/// What the tests' clients say over TCP.
const TOKEN: &str = "only for tests";

fn gate() -> Arc<OwnUser> {
    Arc::new(OwnUser { token: Some(TOKEN.into()) })
}

fn options() -> Options {
    Options { token: TOKEN.into(), ..Options::default() }
}

struct Host {
    dir: tempfile::TempDir,
    store: Arc<DramStore>,
    server: Option<Server>,
}

impl Host {
    fn start(dram: DramConfig, config: ServerConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::start_at(dir, ([127, 0, 0, 1], 0).into(), dram, config)
    }

    fn start_at(dir: tempfile::TempDir, tcp: SocketAddr, dram: DramConfig, config: ServerConfig) -> Self {
        let store = Arc::new(DramStore::open(dram).unwrap());
        let listen = Listen { unix: Some(dir.path().join("data.sock")), tcp: Some(tcp), ..Listen::default() };
        let node = Node::dram_only(Arc::clone(&store), Clock::start());
        let server = Server::start(node, &listen, gate(), config).unwrap();
        Self { dir, store, server: Some(server) }
    }

    fn stop(&mut self) -> SocketAddr {
        let server = self.server.take().unwrap();
        let addr = server.tcp_addr().unwrap();
        server.stop();
        addr
    }

    /// Another host, with an empty store, where this one was until it was stopped.
    fn again(self, tcp: SocketAddr) -> Self {
        let (dram, config) = (self.store.config().clone(), ServerConfig::default());
        Self::start_at(self.dir, tcp, dram, config)
    }

    fn small() -> Self {
        let dram = DramConfig {
            pool_bytes: 4 << 20,
            blocks_max: 4096,
            put_wait: Duration::ZERO,
            ..DramConfig::default()
        };
        Self::start(dram, ServerConfig::default())
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn unix(&self) -> Endpoint {
        Endpoint::Unix(self.dir.path().join("data.sock"))
    }

    fn tcp(&self) -> Endpoint {
        Endpoint::Tcp(self.server().tcp_addr().unwrap())
    }

    fn both(&self) -> [Client; 2] {
        [self.unix(), self.tcp()].map(|endpoint| Client::connect(&endpoint, options()).unwrap())
    }

    /// Waits until the server has noticed that clients are gone.
    fn until(&self, done: impl Fn(&Self) -> bool) {
        for _ in 0..60_000 {
            if done(self) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("a minute passed and the server has not noticed");
    }
}

fn key(n: u64) -> BlockKey {
    BlockKey::from_engine_hash("t", &n.to_le_bytes())
}

fn bytes_of(n: u64, size: u32) -> Vec<u8> {
    (0..size).map(|i| (i as u8).wrapping_mul(3).wrapping_add(n as u8)).collect()
}

fn put(client: &Client, n: u64, size: u32) -> Result<Put, ClientError> {
    client.put(&BlockMeta::single(key(n), size), &bytes_of(n, size))
}

/// "It was not there" would be a promise.
#[test]
fn what_cannot_be_removed_yet_is_an_error_and_the_others_are_removed() {
    let host = Host::small();
    let client = Client::connect(&host.unix(), Options::default()).unwrap();
    put(&client, 1, 4096).unwrap();
    let writer = host.store.new_owner();
    let reserved = host.store.reserve(writer, &[BlockMeta::single(key(2), 4096)], 0).unwrap().remove(0);
    let Reserve::Reserved(reserved) = reserved else { panic!("{reserved:?}") };
    let error = client.remove(&[key(2), key(1)]).unwrap_err();
    assert!(matches!(error, ClientError::NotRemoved { key: which } if which == key(2)), "{error}");
    assert!(error.retryable());
    assert_eq!(client.exists(&[key(1)]).unwrap(), [false]);
    host.store.abort(writer, &[reserved.id]).unwrap();
    assert_eq!(client.remove(&[key(2), key(1)]).unwrap(), [false, false]);
}

#[test]
fn both_transports_do_the_same() {
    for transport in 0..2 {
        let host = Host::small();
        let [unix, tcp] = host.both();
        assert!(unix.is_local() && !tcp.is_local());
        let (client, other) = if transport == 0 { (&unix, &tcp) } else { (&tcp, &unix) };
        let sizes = [1, 100, 4096, 70_000, 1 << 20];
        let data: Vec<_> = (0..5).map(|n| bytes_of(n, sizes[n as usize])).collect();
        let batch: Vec<_> = (0..5u64)
            .map(|n| (BlockMeta::single(key(n), sizes[n as usize]), &data[n as usize][..]))
            .collect();
        assert!(client.put_batch(&batch).unwrap().into_iter().all(|put| put.unwrap() == Put::Stored));
        assert_eq!(put(other, 2, 4096).unwrap(), Put::AlreadyStored);
        for reader in [client, other] {
            let keys = [0, 9, 1, 2, 3, 4].map(key);
            assert_eq!(reader.exists(&keys).unwrap(), [true, false, true, true, true, true]);
            let blocks = reader.get(&keys, 7).unwrap();
            let got: Vec<_> = blocks.iter().flatten().map(|block| block.bytes().unwrap().to_vec()).collect();
            assert!(blocks[1].is_none());
            assert_eq!(got, data);
            let mut buffers = vec![vec![0; 1 << 20]; 6];
            let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
            let found = reader.get_into(&keys, 7, &mut slices).unwrap();
            assert_eq!(found, [Some(1), None, Some(100), Some(4096), Some(70_000), Some(1 << 20)]);
            assert_eq!(buffers[4][..70_000], data[3]);
        }
        let stat = client.stat(&[key(3), key(9)]).unwrap();
        assert_eq!((stat[0].unwrap().size, stat[0].unwrap().uses, stat[1]), (70_000, 4, None));
        assert_eq!(client.verify(&[key(3), key(9)]).unwrap(), [true, false]);
        assert_eq!(client.remove(&[key(3), key(9)]).unwrap(), [true, false]);
        assert_eq!(other.exists(&[key(3)]).unwrap(), [false]);
    }
}

#[test]
fn lent_blocks_go_back() {
    let host = Host::small();
    let [client, _] = host.both();
    put(&client, 1, 4096).unwrap();
    let block = client.get(&[key(1)], 0).unwrap().remove(0).unwrap();
    assert_eq!(host.store.metrics().leases, 1);
    drop(block);
    assert!(client.get(&[key(2)], 0).unwrap()[0].is_none(), "the next call carries the lease back");
    assert_eq!(host.store.metrics().leases, 0);
    let held = client.get(&[key(1)], 0).unwrap();
    drop(client);
    host.until(|host| host.store.metrics().leases == 0);
    let error = held[0].as_ref().unwrap().bytes().unwrap_err();
    assert!(error.retryable() && matches!(error, ClientError::LenderGone { .. }), "{error}");
    assert!(held[0].as_ref().unwrap().copy_to(&mut [0; 4096]).is_err());
}

#[test]
fn what_a_connection_was_lent_stays_in_place_when_the_host_ends_it() {
    let config = ServerConfig {
        stall_timeout: Duration::from_millis(5),
        idle_timeout: Duration::from_millis(5),
        ..ServerConfig::default()
    };
    let dram =
        DramConfig { pool_bytes: 1 << 20, lease_ttl: Duration::from_secs(3600), ..DramConfig::default() };
    let host = Host::start(dram, config);
    let client = Client::connect(&host.unix(), Options::default()).unwrap();
    put(&client, 1, 4096).unwrap();
    let block = client.get(&[key(1)], 0).unwrap().remove(0).unwrap();
    // It is silent for longer than the host likes.
    host.until(|host| host.server().metrics().connections == 0);
    assert_eq!(host.store.metrics().leases, 1, "it does not know that it is cut off, and may be reading");
    assert_eq!(block.bytes().unwrap(), bytes_of(1, 4096));
    assert!(client.exists(&[key(1)]).is_err());
    assert!(block.bytes().is_err(), "now it knows");
}

#[test]
fn a_writer_that_is_late_commits_nothing_and_harms_nobody() {
    // Every write of a client is late.
    let dram = DramConfig {
        pool_bytes: 1 << 20,
        reservation_ttl: Duration::from_nanos(1),
        put_wait: Duration::ZERO,
        ..DramConfig::default()
    };
    let host = Host::start(dram, ServerConfig::default());
    let [unix, tcp] = host.both();
    let error = put(&unix, 1, 4096).unwrap_err();
    assert!(
        error.retryable() && matches!(error, ClientError::Block { outcome: Outcome::Aborted, .. }),
        "{error}"
    );
    let metrics = host.store.metrics();
    assert_eq!((metrics.reservations, metrics.quarantined_bytes), (0, 0), "it said that it writes no more");

    // One that is frozen between its reservation and its write.
    let reply = unix.call(&Request::Reserve(vec![BlockMeta::single(key(2), 64 << 10)])).unwrap();
    let Reply::Reserve(placed) = reply else { panic!("{reply:?}") };
    let Placed::At { reservation, offset } = placed[0] else { panic!("{placed:?}") };
    host.until(|host| host.store.metrics().quarantined_bytes == 64 << 10);
    let owner = host.store.new_owner();
    let sum = |n| checksum(&bytes_of(n, 64 << 10));
    for n in 10..40 {
        // What is left of the pool, and no more, is filled with other blocks. Their writer is in time: it reserves an hour
        // ahead of the clock by which reservations are taken back.
        let (block, bytes) = (BlockMeta::single(key(n), 64 << 10), bytes_of(n, 64 << 10));
        let _ = host.store.put(owner, &block, &bytes, 3_600_000).unwrap();
    }
    assert!(unix.local.as_ref().unwrap().mapping.write(offset, &vec![0xee; 64 << 10]));
    let stored: Vec<u64> = (10..40).filter(|&n| host.store.exists(&[key(n)]).unwrap()[0]).collect();
    assert_eq!(stored.len(), 15);
    for n in stored {
        let block = tcp.get(&[key(n)], 0).unwrap().remove(0).unwrap();
        assert_eq!(block.bytes().unwrap().checksum(), sum(n), "block {n}");
    }
    assert_eq!(unix.outcomes(&Request::Commit(vec![(reservation, 0)]), 1).unwrap(), [Outcome::Aborted]);
    assert_eq!(host.store.metrics().quarantined_bytes, 0);
}

#[test]
fn an_expired_lease_is_not_read() {
    let dram =
        DramConfig { pool_bytes: 1 << 20, lease_ttl: Duration::from_millis(1), ..DramConfig::default() };
    let host = Host::start(dram, ServerConfig::default());
    let [client, _] = host.both();
    put(&client, 1, 4096).unwrap();
    let block = client.get(&[key(1)], 0).unwrap().remove(0).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    let error = block.bytes().unwrap_err();
    assert!(error.retryable() && matches!(error, ClientError::LeaseExpired { .. }), "{error}");
    assert!(block.copy_to(&mut [0; 4096]).is_err());
}

#[test]
fn corrupt_bytes_are_a_miss_on_every_path() {
    let host = Host::small();
    for client in host.both() {
        put(&client, 1, 4096).unwrap();
        let slot = host.store.list(0, 1).0[0];
        let lookup = host.store.get(host.store.new_owner(), &[slot.key], 0, 0).unwrap()[0];
        let kvasir_store::dram::Lookup::Hit(lease) = lookup else { panic!("{lookup:?}") };
        assert!(host.store.pool().mapping().write(lease.offset + 9, b"rot"));
        assert!(client.get(&[key(1)], 0).unwrap()[0].is_none());
        assert_eq!(client.checksum_failures(), 1);
        assert_eq!(client.exists(&[key(1)]).unwrap(), [false], "the host dropped it");
        assert_eq!(put(&client, 1, 4096).unwrap(), Put::Stored);
        assert!(client.get(&[key(1)], 0).unwrap()[0].is_some());
        client.remove(&[key(1)]).unwrap();
    }
    assert_eq!(host.store.metrics().checksum_failures, 2);
}

#[test]
fn a_client_that_dies_in_a_put_leaves_nothing() {
    let host = Host::small();
    let free = host.store.metrics().free_bytes;
    // Over TCP: half of the payload, then gone.
    let mut stream = TcpStream::connect(host.server().tcp_addr().unwrap()).unwrap();
    let mut frame = Vec::new();
    Request::Hello {
        versions: VERSIONS,
        wants_write: true,
        wants_ring: false,
        tenant: 0,
        namespace: String::new(),
        token: TOKEN.into(),
    }
    .encode(0, 0, &mut frame);
    stream.write_all(&frame).unwrap();
    Request::Put(vec![(BlockMeta::single(key(1), 1 << 20), 0)]).encode(1, 1 << 20, &mut frame);
    stream.write_all(&frame).unwrap();
    stream.write_all(&vec![1; 1 << 19]).unwrap();
    host.until(|host| host.store.metrics().reservations == 1);
    drop(stream);
    // Over the socket: reserved, never committed.
    let client = Client::connect(&host.unix(), options()).unwrap();
    let reply = client.call(&Request::Reserve(vec![BlockMeta::single(key(2), 5000)])).unwrap();
    assert!(matches!(reply, Reply::Reserve(_)));
    drop(client);
    host.until(|host| host.store.metrics().reservations == 0 && host.server().metrics().connections == 0);
    // A grace time later.
    host.until(|host| host.store.metrics().quarantined_bytes == 0);
    let metrics = host.store.metrics();
    assert_eq!((metrics.free_bytes, metrics.reservations_reclaimed), (free, 2));
    let [client, _] = host.both();
    assert_eq!(client.exists(&[key(1), key(2)]).unwrap(), [false, false]);
    assert_eq!(put(&client, 1, 1 << 20).unwrap(), Put::Stored);
}

#[test]
fn a_tenant_neither_sees_nor_touches_the_blocks_of_another() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        let [three, four] =
            [3, 4].map(|tenant| Client::connect(&endpoint, Options { tenant, ..options() }).unwrap());
        put(&three, 1, 100).unwrap();
        // Also with a key into which the other tenant's number was written.
        for key in [key(1), key(1).of_tenant(3)] {
            assert_eq!(four.exists(&[key]).unwrap(), [false]);
            assert!(four.get(&[key], 0).unwrap()[0].is_none() && four.stat(&[key]).unwrap()[0].is_none());
            assert_eq!(four.remove(&[key]).unwrap(), [false]);
            assert!(
                four.pin(&[key], Pin::Hard { duration_ms: 1000 }).unwrap()[0]
                    .as_ref()
                    .is_ok_and(|found| !found)
            );
        }
        // Both keep a block of that name, each its own.
        assert_eq!(put(&four, 1, 200).unwrap(), Put::Stored);
        let size = |client: &Client| client.stat(&[key(1)]).unwrap()[0].map(|stat| stat.size);
        assert_eq!((size(&three), size(&four)), (Some(100), Some(200)));
        assert_eq!(three.remove(&[key(1)]).unwrap(), [true]);
        assert_eq!(four.remove(&[key(1)]).unwrap(), [true]);
    }
}

#[test]
fn a_caller_without_a_token_gets_nowhere_over_tcp() {
    let host = Host::small();
    for token in ["", "a wrong one"] {
        let options = Options { token: token.into(), ..Options::default() };
        let refused = Client::connect(&host.tcp(), options).err().unwrap().to_string();
        assert!(refused.contains("a token is needed") && refused.contains("kvasir token new"), "{refused}");
    }
    // On the Unix socket the kernel says who it is.
    assert!(Client::connect(&host.unix(), Options::default()).is_ok());
}

#[test]
fn failures_are_told_apart() {
    let host = Host::small();
    for client in host.both() {
        let error = |result: Result<Put, ClientError>| {
            let error = result.unwrap_err();
            (error.to_string(), error.retryable())
        };
        let (text, retryable) = error(put(&client, 1, 5 << 20));
        assert!(text.contains("larger than the host's pool") && !retryable, "{text}");
        let (text, retryable) = error(put(&client, 1, 0));
        assert!(text.contains("at least one byte") && !retryable, "{text}");
        assert_eq!(put(&client, 1, 3 << 20).unwrap(), Put::Stored);
        let (text, retryable) = error(put(&client, 2, 2 << 20));
        assert!(text.contains("pool is full") && retryable, "{text}");
        assert!(client.put(&BlockMeta::single(key(3), 5), b"four").is_err());
        assert!(matches!(client.exists(&vec![key(0); 4097]), Err(ClientError::Batch { len: 4097 })));
        let found = client.get_into(&[key(1)], 0, &mut [&mut [0; 10]]);
        assert!(matches!(found, Err(ClientError::Buffer { len: 10, .. })));
        assert_eq!(client.remove(&[key(1)]).unwrap(), [true], "the connection still works");
    }
    let read_only = Options { write: false, ..options() };
    for endpoint in [host.unix(), host.tcp()] {
        let client = Client::connect(&endpoint, read_only.clone()).unwrap();
        let text = put(&client, 1, 10).unwrap_err().to_string();
        assert!(text.contains("did not ask to write"), "{text}");
        assert!(matches!(client.exists(&[key(1)]), Err(ClientError::Closed { .. })));
    }
    let nowhere = Client::connect(&"unix:/nowhere/at/all".parse().unwrap(), options());
    assert!(nowhere.err().unwrap().to_string().contains("no Kvasir host at unix:/nowhere/at/all"));
    assert_eq!("tcp:127.0.0.1:7".parse::<Endpoint>().unwrap(), "127.0.0.1:7".parse().unwrap());
    assert_eq!("tcp://127.0.0.1:7".parse::<Endpoint>().unwrap(), "127.0.0.1:7".parse().unwrap());
    assert!("no-port".parse::<Endpoint>().unwrap_err().to_string().contains("host:port"));
}

#[test]
fn connections_are_capped_and_come_back() {
    let config = ServerConfig { connections_max: 1, ..ServerConfig::default() };
    let host = Host::start(DramConfig { pool_bytes: 1 << 20, ..DramConfig::default() }, config);
    let [unix, tcp] = host.both();
    for endpoint in [host.unix(), host.tcp()] {
        let refused = Client::connect(&endpoint, options()).err().unwrap();
        assert!(
            refused.retryable() && refused.to_string().contains("the most this host allows is 1"),
            "{refused}"
        );
    }
    drop(tcp);
    host.until(|host| host.server().metrics().connections == 1);
    assert!(Client::connect(&host.tcp(), options()).is_ok());
    assert!(unix.exists(&[key(1)]).is_ok());
    assert_eq!(host.server().metrics().refused, 2);
}

#[test]
fn a_connection_without_a_hello_does_not_keep_its_place() {
    let config = ServerConfig {
        connections_max: 1,
        stall_timeout: Duration::from_millis(50),
        ..ServerConfig::default()
    };
    let host = Host::start(DramConfig { pool_bytes: 1 << 20, ..DramConfig::default() }, config);
    let silent = TcpStream::connect(host.server().tcp_addr().unwrap()).unwrap();
    host.until(|host| host.server().metrics().connections == 1);
    // Its kind is full; the other one is not.
    assert!(Client::connect(&host.unix(), Options::default()).is_ok());
    host.until(|host| Client::connect(&host.tcp(), options()).is_ok());
    drop(silent);
}

#[test]
fn what_comes_before_the_answer_to_the_hello_is_refused_and_not_lost() {
    let host = Host::small();
    let mut stream = UnixStream::connect(host.dir.path().join("data.sock")).unwrap();
    let (mut hello, mut early) = (Vec::new(), Vec::new());
    Request::Hello {
        versions: VERSIONS,
        wants_write: true,
        wants_ring: true,
        tenant: 0,
        namespace: String::new(),
        token: String::new(),
    }
    .encode(0, 0, &mut hello);
    Request::Exists(vec![key(1)]).encode(1, 0, &mut early);
    stream.write_all(&[hello, early].concat()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(String::from_utf8_lossy(&answer).contains("waits for the answer to its hello"));
}

#[test]
fn noise_and_stalls_end_one_connection_only() {
    let config = ServerConfig { stall_timeout: Duration::from_secs(1), ..ServerConfig::default() };
    let host = Host::start(DramConfig { pool_bytes: 1 << 20, ..DramConfig::default() }, config);
    let addr = host.server().tcp_addr().unwrap();
    let mut hello = Vec::new();
    Request::Hello {
        versions: VERSIONS,
        wants_write: true,
        wants_ring: false,
        tenant: 0,
        namespace: String::new(),
        token: TOKEN.into(),
    }
    .encode(0, 0, &mut hello);
    let mut greedy = Vec::new();
    Request::Put(vec![(BlockMeta::single(key(1), u32::MAX), 0)]).encode(1, u64::from(u32::MAX), &mut greedy);
    let mut early = Vec::new();
    Request::Exists(vec![key(1)]).encode(1, 0, &mut early);
    let cases = [
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".to_vec(), "not a Kvasir data connection"),
        (hello[..10].to_vec(), ""), // stalls in the header
        (early, "starts with one hello"),
        ([hello.clone(), hello.clone()].concat(), "starts with one hello"),
        ([hello.clone(), greedy].concat(), "above this host's limit"),
    ];
    for (n, (bytes, expected)) in cases.iter().enumerate() {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // A reset instead of an end is how the system tells that bytes were left unread.
        let _ = stream.read_to_end(&mut answer);
        assert!(String::from_utf8_lossy(&answer).contains(expected), "case {n}");
    }
    host.until(|host| host.server().metrics().broken == cases.len() as u64);
    let [client, _] = host.both();
    assert_eq!(put(&client, 1, 100).unwrap(), Put::Stored);
}

#[test]
fn sockets_are_private_and_survive_a_crash() {
    use std::os::unix::fs::PermissionsExt;
    let mut host = Host::small();
    let path = host.dir.path().join("data.sock");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let start = |path: &std::path::Path, tcp| {
        let listen = Listen { unix: Some(path.into()), tcp, ..Listen::default() };
        let node = Node::dram_only(Arc::clone(&host.store), Clock::start());
        Server::start(node, &listen, gate(), ServerConfig::default())
    };
    assert!(matches!(start(&path, None), Err(ServeError::SocketInUse { .. })));
    let tcp = host.server().tcp_addr();
    assert!(matches!(start(&host.dir.path().join("other.sock"), tcp), Err(ServeError::Tcp { .. })));
    let plain = host.dir.path().join("plain");
    std::fs::write(&plain, b"").unwrap();
    assert!(matches!(start(&plain, None), Err(ServeError::NotASocket { .. })));
    assert!(plain.exists());

    let [client, _] = host.both();
    host.server.take().unwrap().stop();
    assert!(!path.exists() && client.exists(&[key(1)]).is_err());
    // What a crash leaves: a socket file that nobody answers on.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(UnixStream::connect(&path).is_err());
    let server = start(&path, tcp).unwrap();
    assert!(Client::connect(&Endpoint::Unix(path), options()).is_ok());
    drop(server);
}

#[test]
fn a_pinned_block_stays_and_an_evicted_one_goes() {
    use kvasir_store::config::TenantConfig;
    let tenant = TenantConfig {
        tenant: 3,
        quota_bytes: Some(64 << 10),
        pin_quota_bytes: Some(8192),
        ..TenantConfig::default()
    };
    let dram = DramConfig {
        pool_bytes: 4 << 20,
        put_wait: Duration::ZERO,
        tenants: vec![tenant],
        ..DramConfig::default()
    };
    let host = Host::start(dram, ServerConfig::default());
    for (round, endpoint) in [host.unix(), host.tcp()].into_iter().enumerate() {
        let own = Client::connect(&endpoint, Options { tenant: 3, ..options() }).unwrap();
        let other = Client::connect(&endpoint, options()).unwrap();
        let keys: Vec<BlockKey> = (0..3).map(|n| BlockKey::from_name(&format!("{round}-{n}"))).collect();
        for &key in &keys {
            assert_eq!(own.put(&BlockMeta::single(key, 4096), &[7; 4096]).unwrap(), Put::Stored);
        }
        let used = |host: &Host| host.store.metrics().tenants[1].used_bytes;
        assert_eq!(used(&host), 3 * 4096, "charged to the connection's tenant");
        let hard = own.pin(&keys[..1], Pin::Hard { duration_ms: 60_000 }).unwrap();
        let soft = own.pin(&keys[1..2], Pin::Soft { weight: 1000 }).unwrap();
        assert!(matches!((&hard[0], &soft[0]), (Ok(true), Ok(true))), "{hard:?} {soft:?}");
        let over = own.pin(&keys[2..], Pin::Soft { weight: 1000 }).unwrap().remove(0).unwrap_err();
        assert!(over.retryable() && over.to_string().contains("pinned as much as it may"), "{over}");
        let theirs = other.pin(&keys[2..], Pin::Soft { weight: 1000 }).unwrap();
        assert!(matches!(theirs[0], Ok(false)), "for another tenant it is not there");
        assert!(other.evict(&keys).unwrap().iter().all(|evicted| matches!(evicted, Ok(false))));

        let kept = own.evict(&keys).unwrap();
        assert!(kept[0].as_ref().is_err_and(|error| error.to_string().contains("hard pin")), "{kept:?}");
        assert!(matches!(kept[1], Ok(true)), "a person overrides a soft pin");
        assert_eq!(other.unpin(&keys).unwrap(), [false, false, false], "only the tenant's own");
        assert_eq!(own.unpin(&keys).unwrap(), [true, false, false]);
        assert!(own.evict(&keys).unwrap().into_iter().map(Result::unwrap).eq([true, false, false]));
        assert!(matches!(own.pin(&keys[..1], Pin::Soft { weight: 2 }).unwrap()[0], Ok(false)));

        for n in 0..20 {
            let key = BlockKey::from_name(&format!("{round}-many-{n}"));
            assert_eq!(own.put(&BlockMeta::single(key, 4096), &[8; 4096]).unwrap(), Put::Stored);
        }
        assert!(used(&host) <= 64 << 10);
        let many: Vec<BlockKey> =
            (0..20).map(|n| BlockKey::from_name(&format!("{round}-many-{n}"))).collect();
        own.remove(&many).unwrap();
        let mut short = BlockMeta::single(keys[0], 4096);
        short.ttl_ms = 1;
        assert_eq!(own.put(&short, &[9; 4096]).unwrap(), Put::Stored);
        host.until(|host| used(host) == 0);
    }
}
