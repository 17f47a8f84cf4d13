//! Sessions against a real host in this process, over both transports.

use super::*;
use crate::replay::generate::{self, Generator, Plan, Workload};
use crate::replay::trace::Reader;
use kvasir_client::data::{Endpoint, Options};
use kvasir_dataplane::server::access::OwnUser;
use kvasir_dataplane::server::node::Node;
use kvasir_dataplane::server::{Listen, Server};
use kvasir_dataplane::{Clock, DramConfig, DramStore, ServerConfig};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A store, its server, and a thread that evicts the least recently used blocks.
struct Host {
    folder: tempfile::TempDir,
    store: Arc<DramStore>,
    server: Option<Server>,
    evicting: Arc<AtomicBool>,
    evictor: Option<JoinHandle<()>>,
}

/// What clients over TCP show.
const TOKEN: &str = "only for tests";

fn options() -> Options {
    Options { token: TOKEN.into(), ..Options::default() }
}

impl Host {
    fn start(pool_bytes: u64) -> Self {
        Self::with(DramConfig { pool_bytes, put_wait: Duration::from_secs(5), ..DramConfig::default() }, true)
    }

    fn with(config: DramConfig, evicts: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(DramStore::open(config).unwrap());
        let listen = Listen {
            unix: Some(folder.path().join("data.sock")),
            tcp: Some(([127, 0, 0, 1], 0).into()),
            ..Listen::default()
        };
        let gate = Arc::new(OwnUser { token: Some(TOKEN.into()) });
        let clock = Clock::start();
        let node = Node::dram_only(Arc::clone(&store), clock);
        let server = Server::start(node, &listen, gate, ServerConfig::default()).unwrap();
        let evicting = Arc::new(AtomicBool::new(evicts));
        let evictor = std::thread::spawn({
            let (store, evicting) = (Arc::clone(&store), Arc::clone(&evicting));
            move || evict_least_recent(&store, clock, &evicting)
        });
        Self { folder, store, server: Some(server), evicting, evictor: Some(evictor) }
    }

    fn endpoints(&self) -> [Endpoint; 2] {
        let tcp = self.server.as_ref().unwrap().tcp_addr().unwrap();
        [Endpoint::Unix(self.folder.path().join("data.sock")), Endpoint::Tcp(tcp)]
    }

    fn sessions(&self, block_bytes: u32) -> [Session; 2] {
        self.endpoints().map(|endpoint| {
            Session::new(Client::connect(&endpoint, options()).unwrap(), block_bytes).unwrap()
        })
    }

    /// Changes one byte of a resident block behind the store's back.
    fn rot(&self, key: BlockKey) {
        let owner = self.store.new_owner();
        let lookup = self.store.get(owner, &[key], 0, 0).unwrap()[0];
        let kvasir_dataplane::tier::dram::Lookup::Hit(lease) = lookup else { panic!("{lookup:?}") };
        let old = self.store.pool().mapping().bytes(lease.offset, 1).unwrap().to_vec()[0];
        assert!(self.store.pool().mapping().write(lease.offset, &[old ^ 1]));
        self.store.release_owner(owner, 0);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.evicting.store(false, Ordering::Relaxed);
        self.evictor.take().unwrap().join().unwrap();
    }
}

fn evict_least_recent(store: &DramStore, clock: Clock, go_on: &AtomicBool) {
    let mut events = Vec::new();
    while go_on.load(Ordering::Relaxed) {
        let pressure = store.wait_pressure(Duration::from_millis(5));
        if !pressure.is_low() || pressure.reserve > 0 {
            continue;
        }
        events.clear();
        store.drain_events(&mut events);
        let mut blocks = store.list(0, usize::MAX).0;
        blocks.sort_by_key(|block| (block.used_ms.max(block.inserted_ms), Reverse(block.depth)));
        let slots: Vec<u32> = blocks.iter().map(|block| block.slot).take(256).collect();
        store.offer_victims(&slots, clock.now_ms());
    }
}

fn chat(requests: u64) -> Vec<Request> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jsonl");
    let plan = Plan { workload: Workload::Chat, requests, rate_rps: 5.0, seed: 11 };
    generate::write(Generator::new(&plan).unwrap(), &path, || ()).unwrap();
    Reader::open(&path).unwrap().collect::<Result<_, _>>().unwrap()
}

fn request(blocks: &[u64]) -> Request {
    let input_tokens = blocks.len() as u32 * trace::BLOCK_SIZE_TOKENS;
    Request { input_tokens, output_tokens: 1, blocks: blocks.to_vec(), ..Request::default() }
}

/// Prefix hits of a cache that never evicts.
fn most_hits(session: &Session, requests: &[Request]) -> u64 {
    let mut seen = HashSet::new();
    let hits = |request: &Request| {
        let keys = session.keys(request);
        let hits = keys.iter().take_while(|&key| seen.contains(key)).count() as u64;
        seen.extend(keys);
        hits
    };
    requests.iter().map(hits).sum()
}

#[test]
fn a_host_with_room_hits_whatever_was_seen_before() {
    let requests = chat(250);
    for transport in 0..2 {
        let host = Host::start(64 << 20);
        let [mut session, mut other] = host.sessions(1001);
        if transport == 1 {
            std::mem::swap(&mut session, &mut other);
        }
        let report = replay(&mut session, requests.iter().cloned().map(Ok), 512, Pace::Unpaced).unwrap();
        let moved = &report.moved;
        assert_eq!((report.requests, moved.prefix_hits), (250, most_hits(&session, &requests)));
        assert!(report.hit_rate_percent > 0.0, "{report:?}");
        assert_eq!(moved.block_references, moved.prefix_hits + moved.blocks_put);
        assert_eq!((moved.bytes_put, moved.bytes_read), (moved.blocks_put * 1001, moved.prefix_hits * 1001));
        assert_eq!((moved.bytes_verified, moved.wrong_bytes), (moved.bytes_read, 0));
        assert_eq!((moved.checksum_failures, moved.retries, moved.blocks_refused), (0, 0, 0));

        // A later session, over the other transport, finds all of it.
        let again = other.request(&requests[249], 1).unwrap();
        assert_eq!((again.prefix_hits, again.blocks_put), (again.block_references, 0));
        assert_eq!(again.bytes_verified, again.block_references * 1001);
        // Blocks of another size are other blocks.
        let [mut larger, _] = host.sessions(1002);
        assert_eq!(larger.request(&requests[249], 1).unwrap().prefix_hits, 0);
    }
}

#[test]
fn a_host_that_evicts_hits_less_and_never_wrong() {
    let requests = chat(400);
    for transport in 0..2 {
        let host = Host::start(2 << 20);
        let [unix, tcp] = host.sessions(4096);
        let mut session = if transport == 0 { unix } else { tcp };
        let most = most_hits(&session, &requests);
        let report = replay(&mut session, requests.iter().cloned().map(Ok), 512, Pace::Unpaced).unwrap();
        let moved = &report.moved;
        assert!((1..most).contains(&moved.prefix_hits), "{report:?}, most {most}");
        assert!(moved.bytes_read >= moved.prefix_hits * 4096);
        assert_eq!((moved.bytes_verified, moved.wrong_bytes), (moved.bytes_read, 0), "{report:?}");
        assert_eq!(moved.checksum_failures, 0);
        assert!(host.store.metrics().evicted_bytes > 0);
    }
}

#[test]
fn metadata_of_a_chain_arrives_with_its_blocks() {
    let host = Host::start(1 << 20);
    let [mut session, _] = host.sessions(64);
    let request = request(&[5, 6, 7]);
    session.request(&request, 9).unwrap();
    let keys = session.keys(&request);
    let stats: Vec<_> = host.store.stat(&keys).unwrap().into_iter().flatten().collect();
    let seen: Vec<_> = stats.iter().map(|stat| (stat.depth, stat.class, stat.parent)).collect();
    assert_eq!(seen, [(0, 9, None), (1, 9, Some(keys[0])), (2, 9, Some(keys[1]))]);
}

#[test]
fn a_rotten_byte_is_reported_and_not_served() {
    for transport in 0..2 {
        let host = Host::start(1 << 20);
        let [unix, tcp] = host.sessions(4096);
        let mut session = if transport == 0 { unix } else { tcp };
        let request = request(&[1, 2, 3, 4]);
        assert_eq!(session.request(&request, 1).unwrap().blocks_put, 4);
        host.rot(session.keys(&request)[2]);
        let report = session.request(&request, 1).unwrap();
        assert_eq!((report.checksum_failures, report.wrong_bytes), (1, 0));
        assert_eq!((report.prefix_hits, report.blocks_put), (2, 1), "the rest was behind a gap");
        assert_eq!((report.bytes_read, report.bytes_verified), (3 * 4096, 3 * 4096));
        assert_eq!(host.store.metrics().checksum_failures, 1);
        let healed = session.request(&request, 1).unwrap();
        assert_eq!((healed.prefix_hits, healed.checksum_failures), (4, 0));
    }
}

#[test]
fn bytes_of_another_block_are_wrong_whatever_their_checksum() {
    let host = Host::start(1 << 20);
    let [mut session, _] = host.sessions(100);
    let request = request(&[1, 2]);
    let key = session.keys(&request)[0];
    let mut bytes = vec![0; 100];
    content::fill(key, &mut bytes);
    bytes[7] ^= 1;
    bytes[99] ^= 1;
    session.client.put(&BlockMeta::single(key, 100), &bytes).unwrap();
    let report = session.request(&request, 1).unwrap();
    assert_eq!((report.wrong_bytes, report.bytes_read, report.bytes_verified), (2, 100, 0));
    content::fill(key, &mut bytes);
    for (len, expected) in [(100, 0), (90, 10), (0, 100)] {
        assert_eq!(differing_bytes(key, &bytes[..len], 100), expected);
    }
    assert!(differing_bytes(key, &bytes, 90) >= 10);
}

#[test]
fn a_host_that_stays_full_is_given_up() {
    let config = DramConfig { pool_bytes: 64 << 10, put_wait: Duration::ZERO, ..DramConfig::default() };
    let host = Host::with(config, false);
    let [mut session, _] = host.sessions(4096);
    let first = session.request(&request(&(0..20).collect::<Vec<_>>()), 1).unwrap();
    assert_eq!((first.blocks_put, first.blocks_refused, first.retries), (16, 4, RETRIES.into()));
    let error = (100..).find_map(|id| session.request(&request(&[id]), 1).err()).unwrap().to_string();
    assert!(error.starts_with("stopped after 17 requests (16 blocks put, 0 B read): "), "{error}");
    assert!(error.contains("the pool is full") && error.contains("evictor"), "{error}");
}

#[test]
fn a_host_that_goes_away_ends_the_session_with_how_far_it_got() {
    for transport in 0..2 {
        let mut host = Host::start(1 << 20);
        let [unix, tcp] = host.sessions(4096);
        let mut session = if transport == 0 { unix } else { tcp };
        session.request(&request(&[1, 2]), 1).unwrap();
        session.request(&request(&[1, 2, 3]), 1).unwrap();
        host.server.take().unwrap().stop();
        let error = session.request(&request(&[1]), 1).unwrap_err().to_string();
        assert!(error.starts_with("stopped after 2 requests (3 blocks put, 8192 B read): "), "{error}");
    }
}

#[test]
fn block_sizes_have_bounds() {
    let host = Host::start(1 << 20);
    for size in [0, MAX_BLOCK_BYTES + 1] {
        let client = Client::connect(&host.endpoints()[0], options()).unwrap();
        assert!(matches!(Session::new(client, size), Err(Error::BlockBytes(_))));
    }
    let [mut session, _] = host.sessions(2 << 20);
    let error = session.request(&request(&[1]), 1).unwrap_err().to_string();
    assert!(error.starts_with("stopped after 0 requests") && error.contains("larger than"), "{error}");
}

#[test]
fn requests_are_due_at_the_times_of_the_trace_divided_by_the_speed() {
    for (speed, after_ms, expected) in [
        (1.0, 0, Duration::ZERO),
        (1.0, 2_000, Duration::from_secs(2)),
        (4.0, 2_000, Duration::from_millis(500)),
        (0.5, 2_000, Duration::from_secs(4)),
        (1e-300, 2_000, Duration::MAX),
    ] {
        assert_eq!(due(Duration::from_millis(after_ms), speed), expected, "{speed}, {after_ms}");
    }
}

#[test]
fn the_clock_is_told_before_each_request_how_long_after_the_first_it_came() {
    let host = Host::start(1 << 20);
    let [mut session, _] = host.sessions(4096);
    let trace = [500, 2_500, 2_500, 60_500].map(|ms| Request { time_us: ms * 1_000, ..request(&[ms]) });
    let mut told = Vec::new();
    let mut move_to = |after_first: Duration| {
        told.push(after_first.as_millis());
        Ok(())
    };
    let report = replay(&mut session, trace.clone().map(Ok), 512, Pace::HostClock(&mut move_to)).unwrap();
    assert_eq!((report.requests, told), (4, vec![0, 2_000, 2_000, 60_000]));
    let mut lost = |after_first: Duration| match after_first {
        Duration::ZERO => Ok(()),
        _ => Err(ControlError::Lost { reason: "gone".into() }),
    };
    let error = replay(&mut session, trace.map(Ok), 512, Pace::HostClock(&mut lost)).unwrap_err().to_string();
    assert!(error.starts_with("stopped after 5 requests") && error.contains("gone"), "{error}");
}
