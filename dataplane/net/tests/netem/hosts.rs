//! Two hosts, each in a network namespace of its own, with two rails between them.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvasir_memory::buffer::Buffer;
use kvasir_memory::region::Region;
use kvasir_net::transfer::{Batch, Class, Engine, EngineConfig, Entry, EntryStatus, Peer, Segment, Transfer};
use kvasir_net::transport::node::{Node, Secret};
use kvasir_net::transport::tcp::{Tcp, TcpConfig};
use kvasir_net::transport::{Access, Direction, RemoteRange, Transport};

pub(crate) const MIB: u64 = 1 << 20;
/// Of each host.
const MEMORY: u64 = 16 * MIB;
/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(240);
/// A peer that is silent for this long is down: more than the default, because the machine may be emulated, and busy.
const SILENCE: Duration = Duration::from_secs(2);

pub(crate) type Ends = Vec<EntryStatus>;

/// A client with an engine, and a server.
pub(crate) struct Hosts {
    pub(crate) peer: Arc<Peer>,
    engine: Engine,
    segment: Arc<Segment>,
    ours: Region,
    theirs: Region,
    // In this order: servers end before their namespaces go.
    _servers: Vec<Tcp>,
    names: Names,
}

/// The namespaces, while they are there.
struct Names {
    client: String,
    server: String,
}

impl Drop for Names {
    fn drop(&mut self) {
        for name in [&self.client, &self.server] {
            // If it fails, there is nothing to remove.
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

impl Hosts {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let name = |role: &str| format!("kvasir-{role}-{}-{}", number.0, number.1);
        let names = Names { client: name("client"), server: name("server") };
        for name in [&names.client, &names.server] {
            run(&format!("ip netns add {name}"));
        }
        for rail in 0..2 {
            let Names { client, server } = &names;
            run(&format!("ip link add r{rail} netns {client} type veth peer name r{rail} netns {server}"));
            for (end, name) in [(1, client), (2, server)] {
                run(&format!("ip -n {name} addr add 10.77.{rail}.{end}/24 dev r{rail}"));
                run(&format!("ip -n {name} link set r{rail} up"));
            }
        }
        Self::start(names)
    }

    fn start(names: Names) -> Self {
        let (ours, theirs) = (memory(1), memory(2));
        let exported = theirs.clone();
        let servers = within(&names.server, move || {
            let node = node("server");
            node.exports.export("kv", vec![exported], Access::ReadWrite, Duration::from_secs(3600)).unwrap();
            (0..2).map(|rail| Tcp::new(node.clone(), server(rail)).unwrap()).collect::<Vec<_>>()
        });
        let (engine, peer, segment) = within(&names.client, || {
            let node = node("client");
            let client = |rail| Arc::new(Tcp::new(node.clone(), client(rail)).unwrap()) as Arc<dyn Transport>;
            let engine = Engine::new(EngineConfig::default(), (0..2).map(client).collect()).unwrap();
            let address = |rail| (rail, SocketAddr::new(end(rail, 2), PORT).to_string());
            let peer = engine.connect(&(0..2).map(address).collect::<Vec<_>>()).unwrap();
            let segment = peer.open_segment("kv").unwrap();
            (engine, peer, segment)
        });
        let hosts = Self { peer, engine, segment, ours, theirs, _servers: servers, names };
        hosts.until_usable();
        hosts
    }

    pub(crate) fn silence(&self) -> Duration {
        SILENCE
    }

    pub(crate) fn has_netem(&self) -> bool {
        let add = format!("tc -n {} qdisc replace dev r0 root netem loss 0%", self.names.client);
        output(&add).status.success()
    }

    /// What both directions of a rail suffer.
    pub(crate) fn netem(&self, rail: usize, what: &str) {
        [true, false].iter().for_each(|&to_client| self.netem_one_way(rail, to_client, what));
    }

    pub(crate) fn netem_one_way(&self, rail: usize, to_client: bool, what: &str) {
        // A qdisc delays what leaves.
        let name = if to_client { &self.names.server } else { &self.names.client };
        // Room for everything under way: what is dropped for lack of room would be unintended loss.
        run(&format!("tc -n {name} qdisc replace dev r{rail} root netem limit 10000 {what}"));
    }

    pub(crate) fn set_link(&self, rail: usize, up: bool) {
        let state = if up { "up" } else { "down" };
        run(&format!("ip -n {} link set r{rail} {state}", self.names.client));
    }

    /// Starts to move `bytes`, in entries of several sizes.
    pub(crate) fn transfer(&self, direction: Direction, bytes: u64, deadline: Duration) -> Moving<'_> {
        let blank = if direction == Direction::Read { &self.ours } else { &self.theirs };
        blank.whole().unwrap().copy_in(&vec![0; MEMORY as usize]);
        let source = if direction == Direction::Read { &self.theirs } else { &self.ours };
        let seed = if direction == Direction::Read { 2 } else { 1 };
        source.whole().unwrap().copy_in(&pattern(seed));
        let (mut ranges, mut offset) = (Vec::new(), 0);
        for len in [1, 4096, 300_000, 77, 65_536, 2_000_000].into_iter().cycle() {
            let len = len.min(bytes - offset);
            ranges.push((offset, len));
            offset += len;
            if offset == bytes {
                break;
            }
        }
        let entries = ranges.iter().map(|&(offset, len)| self.entry(direction, offset, len)).collect();
        let batch = Batch { deadline: Some(deadline), entries, ..Batch::new(Class::Prefill) };
        Moving { hosts: self, ranges, transfer: self.engine.submit(batch).unwrap() }
    }

    fn entry(&self, direction: Direction, offset: u64, len: u64) -> Entry {
        let local = vec![self.ours.range(offset, len).unwrap()];
        let remote = vec![RemoteRange { region: 0, offset, len }];
        Entry { direction, segment: self.segment.clone(), local, remote }
    }

    /// Waits until this many more bytes than now have been delivered.
    pub(crate) fn until_delivered(&self, bytes: u64) {
        let delivered = || self.peer.rails().iter().map(|rail| rail.delivered_bytes).sum::<u64>();
        let start = delivered();
        until("the transfer is under way", || delivered() >= start + bytes);
    }

    /// Waits until all rails work.
    pub(crate) fn until_usable(&self) {
        until("all rails work", || self.peer.rails().iter().all(|rail| rail.usable));
    }
}

/// A transfer that was started.
pub(crate) struct Moving<'a> {
    hosts: &'a Hosts,
    ranges: Vec<(u64, u64)>,
    transfer: Transfer,
}

impl Moving<'_> {
    /// How its entries ended. What they call valid is the same on both sides.
    pub(crate) fn wait(self) -> Ends {
        let status = self.transfer.wait(Instant::now() + PATIENCE);
        assert!(status.is_complete(), "it never ended: {status:?}");
        let ends: Ends = (0..self.ranges.len()).map(|n| self.transfer.poll_entry(n).unwrap()).collect();
        for (end, (offset, len)) in ends.iter().zip(&self.ranges) {
            let whole = end.valid.first() == Some(&(0..*len));
            assert_eq!(end.error.is_none(), whole, "{end:?}");
            for range in &end.valid {
                let bytes = |region: &Region| {
                    let mut out = vec![0; (range.end - range.start) as usize];
                    region.range(offset + range.start, out.len() as u64).unwrap().copy_out(&mut out);
                    out
                };
                assert!(bytes(&self.hosts.ours) == bytes(&self.hosts.theirs), "{range:?} of {end:?}");
            }
        }
        ends
    }
}

const PORT: u16 = 7700;

fn end(rail: usize, end: u8) -> IpAddr {
    [10, 77, rail as u8, end].into()
}

fn server(rail: usize) -> TcpConfig {
    TcpConfig { listen: Some(SocketAddr::new(end(rail, 2), PORT)), bind: None, ..client(rail) }
}

fn client(rail: usize) -> TcpConfig {
    // What netem corrupts and TCP's checksum misses, this one finds.
    let bind = Some(end(rail, 1));
    TcpConfig {
        bind,
        checksum: true,
        peer_timeout: SILENCE,
        handshake_timeout: SILENCE,
        ..TcpConfig::default()
    }
}

fn node(name: &str) -> Arc<Node> {
    Arc::new(Node::new(name, Secret::new(b"secret"), 1))
}

fn pattern(seed: u64) -> Vec<u8> {
    (0..MEMORY).map(|n| (n * 31 + n / 251) as u8 ^ seed as u8).collect()
}

fn memory(seed: u64) -> Region {
    Region::of_buffer(Buffer::copy_of(&pattern(seed)))
}

/// Runs something on a thread inside a namespace. The threads that it starts stay there.
fn within<T: Send>(namespace: &str, what: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            let file = File::open(format!("/run/netns/{namespace}")).unwrap();
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(file.as_fd(), kind).unwrap();
            what()
        });
        inside.join().unwrap()
    })
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn output(command: &str) -> std::process::Output {
    let mut words = command.split_whitespace();
    Command::new(words.next().unwrap())
        .args(words)
        .output()
        .unwrap_or_else(|error| panic!("{command}: {error}"))
}

fn run(command: &str) {
    let output = output(command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}
