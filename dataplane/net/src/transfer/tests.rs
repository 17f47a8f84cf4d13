use std::future::Future;
use std::net::Ipv4Addr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Wake};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::entry::{BatchTooLarge, ENTRIES_MAX};
use super::*;
use crate::transport::fault::{Fault, Faults, FaultyTransport};
use crate::transport::loopback::{Loopback, LoopbackNet};
use crate::transport::node::{Node, Secret};
use crate::transport::tcp::{Tcp, TcpConfig};
use crate::transport::{Access, Denied, Direction, Op, OpError, RemoteRange, Transport};
use kvasir_memory::host::HostPool;
use kvasir_memory::region::Region;

const PATIENCE: Duration = Duration::from_secs(120);
const HOUR: Duration = Duration::from_secs(3600);
const MIB: u64 = 1 << 20;

type Script = Box<dyn FnMut(u64, &Op) -> Fault + Send>;

/// Two nodes with one loopback rail per fault script.
struct World {
    engine: Engine,
    peer: Arc<Peer>,
    segment: Arc<Segment>,
    server: Arc<Node>,
    servers: Vec<Loopback>,
    faults: Vec<Arc<Faults>>,
    ours: Region,
    theirs: Region,
}

fn node(name: &str) -> Arc<Node> {
    Arc::new(Node::new(name, Secret::new(b"secret"), 1))
}

fn region(bytes: u64) -> Region {
    Region::of_pool(Arc::new(HostPool::new(bytes, false).unwrap()))
}

fn fill(region: &Region, seed: u8) {
    let bytes: Vec<u8> = (0..region.len()).map(|n| (n * 31 + n / 251) as u8 ^ seed).collect();
    region.whole().unwrap().copy_in(&bytes);
}

fn bytes(region: &Region, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    region.range(offset, len).unwrap().copy_out(&mut out);
    out
}

impl World {
    fn new(bytes: u64, config: EngineConfig, scripts: Vec<Script>) -> Self {
        let (client, server) = (node("client"), node("server"));
        let (ours, theirs) = (region(bytes), region(bytes));
        fill(&ours, 1);
        fill(&theirs, 2);
        server.exports.export("kv", vec![theirs.clone()], Access::ReadWrite, HOUR).unwrap();
        let (mut servers, mut faults, mut rails) = (Vec::new(), Vec::new(), Vec::new());
        for script in scripts {
            let net = Arc::new(LoopbackNet::default());
            servers.push(Loopback::new(net.clone(), server.clone()));
            faults.push(Faults::new(script));
            let inner = Arc::new(Loopback::new(net, client.clone()));
            rails
                .push(Arc::new(FaultyTransport::new(inner, faults[faults.len() - 1].clone()))
                    as Arc<dyn Transport>);
        }
        let addresses: Vec<_> = (0..rails.len()).map(|n| (n, "server".to_owned())).collect();
        let engine = Engine::new(config, rails).unwrap();
        engine.register(&ours).unwrap();
        let peer = engine.connect(&addresses).unwrap();
        let segment = peer.open_segment("kv").unwrap();
        Self { engine, peer, segment, server, servers, faults, ours, theirs }
    }

    fn entry(&self, direction: Direction, offset: u64, len: u64) -> Entry {
        let local = vec![self.ours.range(offset, len).unwrap()];
        let remote = vec![RemoteRange { region: 0, offset, len }];
        Entry { direction, segment: self.segment.clone(), local, remote }
    }

    fn submit(&self, entries: Vec<Entry>) -> Transfer {
        self.engine.submit(Batch { entries, ..Batch::new(Class::Prefill) }).unwrap()
    }

    /// Every range said to be valid has the right bytes, on either side.
    fn check_valid(&self, transfer: &Transfer, at: &[(u64, u64)]) {
        for (n, &(offset, len)) in at.iter().enumerate() {
            let status = transfer.poll_entry(n).unwrap();
            assert!(!status.pending);
            let whole = status.valid.first().is_some_and(|first| *first == (0..len));
            assert_eq!(status.error.is_none(), whole, "entry {n}: {status:?}");
            for range in status.valid {
                let (start, len) = (offset + range.start, range.end - range.start);
                assert!(
                    bytes(&self.ours, start, len) == bytes(&self.theirs, start, len),
                    "entry {n} {range:?}"
                );
            }
        }
    }
}

fn healthy() -> Script {
    Box::new(|_, _| Fault::None)
}

fn done(transfer: &Transfer) -> Status {
    let status = transfer.wait(Instant::now() + PATIENCE);
    assert!(status.is_complete(), "stuck: {status:?}");
    status
}

#[test]
fn a_large_entry_goes_over_every_rail() {
    let world = World::new(64 * MIB, EngineConfig::default(), vec![healthy(), healthy(), healthy()]);
    for direction in [Direction::Read, Direction::Write] {
        fill(&world.ours, 9);
        let transfer = world.submit(vec![world.entry(direction, 5, 64 * MIB - 5)]);
        assert_eq!(done(&transfer), Status { entries: 1, pending: 0, failed: 0, valid_bytes: 64 * MIB - 5 });
        world.check_valid(&transfer, &[(5, 64 * MIB - 5)]);
    }
    let rails = world.peer.rails();
    assert!(
        rails.iter().all(|rail| rail.slices > 0 && rail.failures == 0 && rail.queued_bytes == 0),
        "{rails:?}"
    );
    assert_eq!(rails.iter().map(|rail| rail.delivered_bytes).sum::<u64>(), 2 * (64 * MIB - 5));
    assert_eq!(world.engine.in_flight_bytes(), [0; 3]);
}

#[test]
fn thousands_of_small_ranges_travel_in_few_operations() {
    let world = World::new(4 * MIB, EngineConfig::default(), vec![healthy()]);
    let at: Vec<(u64, u64)> = (0..4096).map(|n| (n * 1000, 512)).collect();
    let transfer =
        world.submit(at.iter().map(|&(offset, len)| world.entry(Direction::Read, offset, len)).collect());
    assert_eq!(done(&transfer).failed, 0);
    world.check_valid(&transfer, &at);
    assert!(world.faults[0].seen() <= 20, "{} operations", world.faults[0].seen());

    // One entry of thousands of ranges on one side and few on the other; half of them are neighbours.
    let mut entry = world.entry(Direction::Write, 0, 1);
    entry.local = (0..4096).map(|n| world.ours.range(n / 2 * 800 + n % 2 * 100, 100).unwrap()).collect();
    entry.remote = vec![RemoteRange { region: 0, offset: 7, len: 100_000 }, world_range(2 * MIB, 309_600)];
    let transfer = world.submit(vec![entry]);
    assert_eq!(done(&transfer).failed, 0);
    let sent: Vec<u8> = (0..2048).flat_map(|n| bytes(&world.ours, n * 800, 200)).collect();
    let got = [bytes(&world.theirs, 7, 100_000), bytes(&world.theirs, 2 * MIB, 309_600)].concat();
    assert!(sent == got);
}

fn world_range(offset: u64, len: u64) -> RemoteRange {
    RemoteRange { region: 0, offset, len }
}

#[test]
fn what_fails_on_one_rail_goes_over_another() {
    let failing: Script = Box::new(|n, _| match n % 3 {
        0 => Fault::Fail,
        1 => Fault::Partial(1000),
        _ => Fault::None,
    });
    let world = World::new(32 * MIB, EngineConfig::default(), vec![failing, healthy()]);
    let transfer = world.submit(vec![world.entry(Direction::Read, 0, 32 * MIB)]);
    assert_eq!(done(&transfer).valid_bytes, 32 * MIB);
    world.check_valid(&transfer, &[(0, 32 * MIB)]);
    assert!(world.engine.retried() > 0);
}

#[test]
fn a_broken_rail_is_left_and_mended() {
    let mut broken = false;
    let breaking: Script = Box::new(move |_, _| {
        let fault = if broken { Fault::None } else { Fault::Break };
        broken = true;
        fault
    });
    let world = World::new(32 * MIB, EngineConfig::default(), vec![breaking, healthy()]);
    let transfer = world.submit(vec![world.entry(Direction::Read, 0, 32 * MIB)]);
    assert_eq!(done(&transfer).failed, 0);
    world.check_valid(&transfer, &[(0, 32 * MIB)]);
    let deadline = Instant::now() + PATIENCE;
    while !world.peer.rails().iter().all(|rail| rail.usable) {
        assert!(Instant::now() < deadline, "never mended");
        thread::yield_now();
    }
    let transfer = world.submit(vec![world.entry(Direction::Write, 0, 32 * MIB)]);
    assert_eq!(done(&transfer).failed, 0);
    assert!(world.peer.rails()[0].delivered_bytes > 0);
}

#[test]
fn a_dead_peer_fails_everything_with_what_arrived() {
    // The third operation finds the peer gone, on its only rail.
    let world = World::new(
        32 * MIB,
        EngineConfig::default(),
        vec![Box::new(|n, _| if n < 3 { Fault::None } else { Fault::Break })],
    );
    world.servers[0].shut_down();
    let at = [(0, 16 * MIB), (16 * MIB, 16 * MIB)];
    let transfer = world.submit(at.iter().map(|&(o, l)| world.entry(Direction::Read, o, l)).collect());
    assert_eq!(done(&transfer).failed, 2);
    world.check_valid(&transfer, &at);
    let late = world.submit(vec![world.entry(Direction::Read, 0, 100)]);
    let error = late.poll_entry(0).unwrap().error;
    assert_eq!(error, Some(TransferError::PeerDown { peer: "server".into() }), "at once");
}

#[test]
fn a_refusal_is_not_tried_again() {
    let world = World::new(MIB, EngineConfig::default(), vec![healthy(), healthy()]);
    world.server.exports.revoke("kv");
    let transfer = world.submit(vec![world.entry(Direction::Read, 0, 100)]);
    done(&transfer);
    let error = transfer.poll_entry(0).unwrap().error;
    let Some(TransferError::Op { error, attempts: 1, .. }) = error else { panic!("{error:?}") };
    assert_eq!((error, world.engine.retried()), (OpError::Denied(Denied::UnknownKey), 0));

    let mut uneven = world.entry(Direction::Read, 0, 100);
    uneven.remote[0].len = 99;
    let transfer = world.submit(vec![uneven]);
    assert_eq!(done(&transfer).failed, 1);
}

#[test]
fn deadlines_end_what_is_stuck_and_keep_what_arrived() {
    let stuck: Script = Box::new(|n, _| if n == 0 { Fault::None } else { Fault::Drop });
    let world = World::new(MIB, EngineConfig::default(), vec![stuck]);
    let first = world.submit(vec![world.entry(Direction::Read, 0, 1000)]);
    assert_eq!(done(&first).failed, 0);
    let batch = Batch {
        deadline: Some(Duration::from_millis(20)),
        entries: vec![world.entry(Direction::Read, 0, 100_000)],
        ..Batch::new(Class::DecodeCritical)
    };
    let transfer = world.engine.submit(batch).unwrap();
    done(&transfer);
    let status = transfer.poll_entry(0).unwrap();
    assert_eq!((status.error, status.valid.len()), (Some(TransferError::TimedOut), 0));
    assert_eq!(world.engine.in_flight_bytes(), [0; 3]);
}

#[test]
fn cancelled_transfers_complete_and_touch_nothing_more() {
    let world = World::new(32 * MIB, EngineConfig::default(), vec![Box::new(|_, _| Fault::Delay)]);
    let transfer = world.submit(vec![world.entry(Direction::Read, 0, 32 * MIB)]);
    assert_eq!(transfer.poll().pending, 1);
    world.engine.cancel(&transfer);
    assert_eq!(done(&transfer).valid_bytes, 0);
    assert_eq!(transfer.poll_entry(0).unwrap().error, Some(TransferError::Cancelled));
    let before = bytes(&world.ours, 0, 32 * MIB);
    world.faults[0].release();
    assert!(bytes(&world.ours, 0, 32 * MIB) == before);
}

struct Flag(AtomicBool, thread::Thread);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
        self.1.unpark();
    }
}

#[test]
fn completion_is_told_in_every_way() {
    let world = World::new(MIB, EngineConfig::default(), vec![Box::new(|_, _| Fault::Delay)]);
    let entries = vec![world.entry(Direction::Write, 0, 1000)];
    let batch = Batch { entries, notice: Some(b"done".to_vec()), ..Batch::new(Class::Replication) };
    let transfer = world.engine.submit(batch).unwrap();
    let (tell, told) = mpsc::channel();
    transfer.on_complete(move |status| tell.send(status).unwrap());
    let eventfd = transfer.eventfd().unwrap();
    assert!(rustix::io::read(&eventfd, &mut [0; 8]).is_err(), "not yet");
    let flag = Arc::new(Flag(AtomicBool::new(false), thread::current()));
    let waker = flag.clone().into();
    let mut future = pin!(transfer.completed());
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());

    world.faults[0].release();
    assert_eq!(done(&transfer).failed, 0);
    assert_eq!(told.recv_timeout(PATIENCE).unwrap().valid_bytes, 1000);
    assert_eq!(rustix::io::read(&eventfd, &mut [0; 8]), Ok(8));
    assert!(flag.0.load(Ordering::Acquire));
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
    let notice = world.server.notices.wait(Instant::now() + PATIENCE).unwrap();
    assert_eq!((notice.peer.as_str(), &notice.message[..]), ("client", &b"done"[..]));
    // Asking after the end still gets the answer.
    assert_eq!(rustix::io::read(transfer.eventfd().unwrap(), &mut [0; 8]), Ok(8));
    let (tell, told) = mpsc::channel();
    transfer.on_complete(move |status| tell.send(status).unwrap());
    assert_eq!(told.recv().unwrap().pending, 0);
}

#[test]
fn batches_are_bounded() {
    let world = World::new(MIB, EngineConfig::default(), vec![healthy()]);
    let entries = vec![world.entry(Direction::Read, 0, 1); ENTRIES_MAX + 1];
    let error: BatchTooLarge =
        world.engine.submit(Batch { entries, ..Batch::new(Class::Prefill) }).err().unwrap();
    assert!(error.to_string().contains("65537 entries"));
    assert!(world.submit(Vec::new()).poll().is_complete());
}

/// A replication backlog that fills its budget does not delay what a decode step waits for.
#[test]
fn urgent_transfers_pass_a_backlog() {
    let config = EngineConfig { budgets: [MIB, MIB, MIB], ..EngineConfig::default() };
    let world = World::new(
        32 * MIB,
        config,
        vec![Box::new(|_, op| if op.len() == 100 { Fault::None } else { Fault::Delay })],
    );
    let entries = vec![world.entry(Direction::Read, 0, 32 * MIB)];
    let backlog = world.engine.submit(Batch { entries, ..Batch::new(Class::Replication) }).unwrap();
    assert!(world.engine.in_flight_bytes()[2] <= 2 * MIB);
    let entries = vec![world.entry(Direction::Read, 5, 100)];
    let urgent = world.engine.submit(Batch { entries, ..Batch::new(Class::DecodeCritical) }).unwrap();
    assert_eq!(done(&urgent).failed, 0);
    assert_eq!(backlog.poll().pending, 1);
    while backlog.poll().pending > 0 {
        world.faults[0].release();
    }
    world.check_valid(&backlog, &[(0, 32 * MIB)]);
}

/// Random faults on every rail, from a seed: each transfer ends, and exactly what it says is valid is.
fn chaos(seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let rails = 1 + random(3);
    let scripts = (0..rails).map(|rail| {
        let mut state = seed ^ (rail + 1) << 40 | 1;
        let chance = random(60);
        let script = move |_: u64, op: &Op| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let roll = state >> 33;
            if roll % 100 >= chance {
                return Fault::None;
            }
            match roll / 100 % 16 {
                0 => Fault::Break,
                1 => Fault::Drop,
                2..9 => Fault::Partial(roll % op.len()),
                _ => Fault::Fail,
            }
        };
        Box::new(script) as Script
    });
    let world = World::new(4 * MIB, EngineConfig::default(), scripts.collect());
    let mut at = Vec::new();
    let mut offset = 0;
    while offset < 3 * MIB {
        let most = if random(2) == 0 { 4000 } else { 600_000 };
        let len = 1 + random(most);
        at.push((offset, len));
        offset += len;
    }
    let direction = if random(2) == 0 { Direction::Read } else { Direction::Write };
    let entries = at.iter().map(|&(offset, len)| world.entry(direction, offset, len)).collect();
    // Lost operations end by the deadline.
    let batch = Batch { entries, deadline: Some(Duration::from_millis(30)), ..Batch::new(Class::Prefill) };
    let transfer = world.engine.submit(batch).unwrap();
    done(&transfer);
    world.check_valid(&transfer, &at);
    assert_eq!(world.engine.in_flight_bytes(), [0; 3]);
    assert!(world.peer.rails().iter().all(|rail| rail.queued_bytes == 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_fails_the_account_is_exact(seed: u64) {
        chaos(seed);
    }
}

/// Real sockets: two TCP rails, a request handed over layer by layer, and a rail cut amid it.
#[test]
fn layers_arrive_while_a_rail_is_cut() {
    const LAYERS: u8 = 8;
    let config = || TcpConfig {
        listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
        peer_timeout: PATIENCE,
        handshake_timeout: PATIENCE,
        ..TcpConfig::default()
    };
    let (prefill, decode) = (node("prefill"), node("decode"));
    let rails: Vec<Tcp> = (0..2).map(|_| Tcp::new(decode.clone(), config()).unwrap()).collect();
    let transports: Vec<Arc<dyn Transport>> = (0..2)
        .map(|_| Arc::new(Tcp::new(prefill.clone(), TcpConfig { listen: None, ..config() }).unwrap()) as _)
        .collect();
    let (ours, theirs) = (region(32 * MIB), region(32 * MIB));
    fill(&ours, 3);
    decode.exports.export("kv", vec![theirs.clone()], Access::Write, HOUR).unwrap();
    let engine = Engine::new(EngineConfig::default(), transports).unwrap();
    let addresses: Vec<_> = rails.iter().enumerate().map(|(n, tcp)| (n, tcp.address().unwrap())).collect();
    let peer = engine.connect(&addresses).unwrap();
    let segment = peer.open_segment("kv").unwrap();

    let len = 4 * MIB;
    let push = |layer: u8| {
        let offset = u64::from(layer) * len;
        let local = vec![ours.range(offset, len).unwrap()];
        let remote = vec![RemoteRange { region: 0, offset, len }];
        let entries = vec![Entry { direction: Direction::Write, segment: segment.clone(), local, remote }];
        let batch = Batch { entries, notice: Some(vec![layer]), ..Batch::new(Class::DecodeCritical) };
        engine.submit(batch).unwrap()
    };
    let heard = || decode.notices.wait(Instant::now() + PATIENCE).expect("a notice").message;
    let mut sent = vec![push(0)];
    assert_eq!(heard(), [0]);
    assert!(bytes(&theirs, 0, len) == bytes(&ours, 0, len), "layer 0 is there before layer 1 was made");
    for layer in 1..LAYERS {
        sent.push(push(layer));
        if layer == 4 {
            rails[1].shut_down();
        }
    }
    sent.iter().for_each(|transfer| assert_eq!(done(transfer).failed, 0));
    let mut arrived: Vec<Vec<u8>> = (1..LAYERS).map(|_| heard()).collect();
    arrived.sort_unstable();
    assert_eq!(arrived, (1..LAYERS).map(|layer| vec![layer]).collect::<Vec<_>>());
    assert!(bytes(&theirs, 0, 32 * MIB) == bytes(&ours, 0, 32 * MIB));
}
