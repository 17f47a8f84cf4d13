//! What every transport must do, as checks that any of them can run. A check panics where a rule is broken.
//!
//! It is part of the library so that transports whose tests need a machine of their own can run it too.

use kvasir_os::time::{Duration, Instant};
use std::sync::Arc;

use super::{
    Access, Cancel, Completion, CompletionQueue, Denied, Direction, Endpoint, Error, Grant, Node, Op,
    OpError, RemoteRange, Transport,
};
use kvasir_memory::host::HostPool;
use kvasir_memory::region::{LocalRange, Region};

/// Two nodes that can reach each other, of the transport under test.
#[derive(Clone)]
pub struct Pair {
    pub client_node: Arc<Node>,
    pub server_node: Arc<Node>,
    pub client: Arc<dyn Transport>,
    pub server: Arc<dyn Transport>,
    /// Makes the server vanish, as its peers see it.
    pub kill: Arc<dyn Fn() + Send + Sync>,
}

/// A node of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

/// Where a side has its memory: makes a region of the given length in bytes, which peers can open.
pub type Place = Arc<dyn Fn(Side, u64) -> Region + Send + Sync>;

/// What a check works with.
struct Setup {
    pair: Pair,
    place: Place,
}

type Check = (&'static str, fn(Setup));

/// Runs every check, each on a pair of its own, with memory of the host.
pub fn run(make: &dyn Fn() -> Pair) {
    run_in(make, &(Arc::new(|_, bytes| region(bytes)) as Place));
}

/// As [`run`], with memory of other kinds.
pub fn run_in(make: &dyn Fn() -> Pair, place: &Place) {
    let checks: [Check; 11] = [
        ("sizes", sizes),
        ("scatter and gather", scatter_gather),
        ("bad ranges", bad_ranges),
        ("bad grants", bad_grants),
        ("dead grants", dead_grants),
        ("many small operations", many_small),
        ("both directions at once", both_directions),
        ("peer killed", peer_killed),
        ("closed endpoint", closed_endpoint),
        ("cancelled operations", cancelled),
        ("notices", notices),
    ];
    for (name, check) in checks {
        println!("conformance: {name}");
        check(Setup { pair: make(), place: place.clone() });
    }
}

/// Far longer than any of this takes on a loaded machine: reaching it means a lost completion.
const PATIENCE: Duration = Duration::from_secs(120);
const HOUR: Duration = Duration::from_secs(3600);
const MIB: u64 = 1 << 20;

/// A client with an endpoint to a server, and a registered region on either side.
struct Bench {
    pair: Pair,
    place: Place,
    endpoint: Arc<dyn Endpoint>,
    grant: Arc<Grant>,
    ours: Region,
    theirs: Region,
    queue: Arc<CompletionQueue>,
}

impl Bench {
    fn new(setup: Setup, bytes: u64, access: Access, lease: Duration) -> Self {
        let Setup { pair, place } = setup;
        let (ours, theirs) = (place(Side::Client, bytes), place(Side::Server, bytes));
        pair.client.register(&ours).unwrap_or_else(|e| panic!("register: {e}"));
        pair.server.register(&theirs).unwrap_or_else(|e| panic!("register: {e}"));
        pair.server_node
            .exports
            .export("kv", vec![theirs.clone()], access, lease)
            .unwrap_or_else(|e| panic!("export: {e}"));
        let endpoint = connect(&pair);
        let grant = endpoint.open("kv").unwrap_or_else(|e| panic!("open: {e}"));
        Self { pair, place, endpoint, grant, ours, theirs, queue: CompletionQueue::new() }
    }

    fn op(&self, id: u64, direction: Direction, offset: u64, len: u64) -> Op {
        let local = self.ours.range(offset, len).into_iter().collect();
        let remote = vec![RemoteRange { region: 0, offset, len }];
        Op { id, direction, grant: self.grant.clone(), local, remote, cancel: None }
    }

    fn submit(&self, ops: Vec<Op>) {
        self.endpoint.submit(ops, &self.queue.sink());
    }

    fn wait(&self, count: usize) -> Vec<Completion> {
        let completions = self.queue.wait_many(count, Instant::now() + PATIENCE);
        assert_eq!(completions.len(), count, "operations were lost");
        completions
    }

    fn one(&self, op: Op) -> Completion {
        self.submit(vec![op]);
        let mut completions = self.wait(1);
        completions.remove(0)
    }

    fn done(&self, op: Op) {
        let (id, len) = (op.id, op.len());
        assert_eq!(self.one(op), Completion { id, valid_bytes: len, result: Ok(()) });
    }

    fn denied(&self, op: Op, denied: Denied) {
        let id = op.id;
        assert_eq!(self.one(op), Completion::failed(id, 0, OpError::Denied(denied)));
    }
}

fn connect(pair: &Pair) -> Arc<dyn Endpoint> {
    let address = pair.server.address().unwrap_or_else(|| panic!("the server has no address"));
    let endpoint = pair.client.connect(&address).unwrap_or_else(|e| panic!("connect: {e}"));
    assert_eq!((endpoint.peer(), endpoint.down()), (pair.server_node.name.as_str(), None));
    endpoint
}

fn region(bytes: u64) -> Region {
    Region::of_pool(Arc::new(HostPool::new(bytes, false).unwrap_or_else(|e| panic!("memory: {e}"))))
}

/// Bytes that differ from place to place and from seed to seed.
fn fill(region: &Region, seed: u64) {
    /// A prime, so that the pattern does not repeat at any power of two.
    const PERIOD: usize = 65_521;
    let mut state = seed | 1;
    let step = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    let pattern: Vec<u8> = (0..PERIOD).map(step).collect();
    for offset in (0..region.len()).step_by(PERIOD) {
        range(region, offset, region.len() - offset).copy_in(&pattern);
    }
}

fn range(region: &Region, offset: u64, len: u64) -> LocalRange {
    region.range(offset, len).unwrap_or_else(|| panic!("{offset}+{len} is outside of {region:?}"))
}

fn bytes(region: &Region, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    range(region, offset, len).copy_out(&mut out);
    out
}

fn assert_same(a: &Region, b: &Region, offset: u64, len: u64) {
    // Not `assert_eq`: nobody wants to read 64 MiB.
    assert!(bytes(a, offset, len) == bytes(b, offset, len), "{len} B at {offset} differ");
}

/// From one byte to 64 MiB, both ways; nothing outside the range is touched.
fn sizes(setup: Setup) {
    let bench = Bench::new(setup, 64 * MIB, Access::ReadWrite, HOUR);
    let max = bench.pair.client.capabilities().message_bytes_max;
    for (n, len) in [1, 2, 63, 4096, 65_537, MIB, 16 * MIB + 1, 64 * MIB].into_iter().enumerate() {
        let (len, offset) = (len.min(max), if len < 32 * MIB { 3 + n as u64 } else { 0 });
        fill(&bench.theirs, n as u64);
        fill(&bench.ours, 100 + n as u64);
        let before = bytes(&bench.ours, 0, bench.ours.len());
        bench.done(bench.op(1, Direction::Read, offset, len));
        assert_same(&bench.ours, &bench.theirs, offset, len);
        let after = bytes(&bench.ours, 0, bench.ours.len());
        let (start, end) = (offset as usize, (offset + len) as usize);
        assert!(before[..start] == after[..start] && before[end..] == after[end..], "{len} B spilled");

        fill(&bench.ours, 200 + n as u64);
        bench.done(bench.op(2, Direction::Write, offset, len));
        assert_same(&bench.ours, &bench.theirs, offset, len);
    }
}

/// Lists of ranges of unequal lengths on both sides.
fn scatter_gather(setup: Setup) {
    let bench = Bench::new(setup, MIB, Access::ReadWrite, HOUR);
    let local = [(700_000, 10), (5, 99_990), (300_000, 1), (400_000, 50_000)];
    let remote = [(0, 70_001), (900_000, 79_999), (100_000, 1)];
    let op = |direction| {
        let mut op = bench.op(3, direction, 0, 1);
        op.local = local.iter().map(|&(offset, len)| range(&bench.ours, offset, len)).collect();
        op.remote = remote.iter().map(|&(offset, len)| RemoteRange { region: 0, offset, len }).collect();
        op
    };
    let gathered = |region: &Region, list: &[(u64, u64)]| -> Vec<u8> {
        list.iter().flat_map(|&(offset, len)| bytes(region, offset, len)).collect()
    };
    for direction in [Direction::Read, Direction::Write] {
        fill(&bench.ours, 1);
        fill(&bench.theirs, 2);
        bench.done(op(direction));
        assert!(gathered(&bench.ours, &local) == gathered(&bench.theirs, &remote), "{direction:?}");
    }
    let many = bench.pair.client.capabilities().ranges_max.min(256) as u64;
    let mut op = op(Direction::Read);
    op.local = (0..many).map(|n| range(&bench.ours, n * 7, 5)).collect();
    op.remote = (0..many).map(|n| RemoteRange { region: 0, offset: 4096 - n * 5, len: 5 }).collect();
    bench.done(op);
    for n in 0..many {
        assert_eq!(bytes(&bench.ours, n * 7, 5), bytes(&bench.theirs, 4096 - n * 5, 5), "range {n}");
    }
}

/// Nothing to move, unequal lengths, ranges outside of what was granted: refused, and the endpoint goes on.
fn bad_ranges(setup: Setup) {
    let bench = Bench::new(setup, 8192, Access::ReadWrite, HOUR);
    let lengths = |local, remote| Err(OpError::Lengths { local, remote });
    let outside = || Err(OpError::Denied(Denied::OutOfRange));
    let remote = |region, offset, len| vec![RemoteRange { region, offset, len }];
    for (ranges, expected) in [
        (vec![], lengths(100, 0)),
        (remote(0, 0, 99), lengths(100, 99)),
        (remote(0, 0, 0), outside()),
        (remote(0, 8092, 101), outside()),
        (remote(0, u64::MAX, 100), outside()),
        (remote(1, 0, 100), outside()),
    ] {
        let mut op = bench.op(4, Direction::Write, 0, 100);
        op.remote = ranges;
        let completion = bench.one(op);
        assert_eq!((completion.valid_bytes, completion.result), (0, expected));
    }
    let mut empty = bench.op(4, Direction::Read, 0, 1);
    (empty.local, empty.remote) = (vec![], vec![]);
    assert_eq!(bench.one(empty).result, lengths(0, 0));
    bench.done(bench.op(5, Direction::Read, 0, 8192));
}

/// A client that lies about its grant is stopped by the server itself.
fn bad_grants(setup: Setup) {
    let bench = Bench::new(setup, 8192, Access::Read, HOUR);
    fill(&bench.theirs, 1);
    let before = bytes(&bench.theirs, 0, 8192);
    let forged = |change: &dyn Fn(&mut Grant), direction| {
        let mut grant = Grant::clone(&bench.grant);
        change(&mut grant);
        let mut op = bench.op(6, direction, 0, 4096);
        op.grant = Arc::new(grant);
        op
    };
    bench.denied(bench.op(6, Direction::Write, 0, 10), Denied::Direction);
    let write = forged(&|grant| grant.access = Access::ReadWrite, Direction::Write);
    refused(&bench.one(write));
    let wrong_key = |grant: &mut Grant| {
        grant.key ^= 1;
        grant.regions[0].key ^= 0x5a5a;
    };
    refused(&bench_again(&bench).one(forged(&wrong_key, Direction::Read)));
    let wider = |grant: &mut Grant| grant.regions[0].len += 1 << 30;
    let again = bench_again(&bench);
    let mut op = forged(&wider, Direction::Read);
    op.remote[0].offset = 8192 - 4095;
    refused(&again.one(op));
    assert!(bytes(&bench.theirs, 0, 8192) == before, "a refused write changed memory");
    bench_again(&bench).done(bench.op(7, Direction::Read, 0, 4096));
}

/// Hardware answers a violation by ending the connection; software says which rule was broken.
fn refused(completion: &Completion) {
    let is_refusal = matches!(completion.result, Err(OpError::Denied(_) | OpError::PeerDown { .. }));
    assert!(is_refusal && completion.valid_bytes == 0, "{completion:?}");
}

/// The same bench over a fresh endpoint, if a violation ended the old one.
fn bench_again(bench: &Bench) -> Bench {
    let mut endpoint = bench.endpoint.clone();
    if endpoint.down().is_some() {
        endpoint = connect(&bench.pair);
    }
    Bench {
        pair: bench.pair.clone(),
        place: bench.place.clone(),
        endpoint,
        grant: bench.grant.clone(),
        ours: bench.ours.clone(),
        theirs: bench.theirs.clone(),
        queue: CompletionQueue::new(),
    }
}

/// Grants end with their lease, with the epoch and when revoked.
fn dead_grants(setup: Setup) {
    let bench = Bench::new(setup, 8192, Access::ReadWrite, Duration::ZERO);
    bench.denied(bench.op(8, Direction::Read, 0, 10), Denied::LeaseEnded);
    let exports = &bench.pair.server_node.exports;
    let renew = |bench: &Bench| {
        exports
            .export("kv", vec![bench.theirs.clone()], Access::ReadWrite, HOUR)
            .unwrap_or_else(|e| panic!("export: {e}"));
        let again = bench_again(bench);
        let grant = again.endpoint.open("kv").unwrap_or_else(|e| panic!("open: {e}"));
        Bench { grant, ..again }
    };

    let bench = renew(&bench);
    bench.done(bench.op(9, Direction::Read, 0, 10));
    exports.fence();
    bench.pair.server.revoked();
    refused(&bench.one(bench.op(10, Direction::Read, 0, 10)));

    let bench = renew(&bench);
    bench.done(bench.op(11, Direction::Write, 0, 10));
    exports.revoke("kv");
    bench.pair.server.revoked();
    refused(&bench.one(bench.op(12, Direction::Write, 0, 10)));
    let again = bench_again(&bench);
    let error = again.endpoint.open("kv").err();
    assert!(matches!(error, Some(Error::Denied { denied: Denied::NoSegment, .. })), "{error:?}");
}

/// Thousands of operations at once, each completed once.
fn many_small(setup: Setup) {
    let bench = Bench::new(setup, 4 * MIB, Access::ReadWrite, HOUR);
    fill(&bench.theirs, 5);
    let depth = bench.pair.client.capabilities().queue_depth as u64;
    let count = 10_000u64;
    let mut seen = vec![0u8; count as usize];
    let mut next = 0;
    let mut open = 0;
    while next < count || open > 0 {
        let batch = (count - next).min(depth - open);
        bench.submit((next..next + batch).map(|n| bench.op(n, Direction::Read, n * 400, 400)).collect());
        (next, open) = (next + batch, open + batch);
        for completion in bench.wait(1) {
            assert_eq!((completion.valid_bytes, completion.result), (400, Ok(())));
            seen[completion.id as usize] += 1;
            open -= 1;
        }
    }
    assert!(seen.iter().all(|&times| times == 1) && bench.queue.poll().is_none());
    assert_same(&bench.ours, &bench.theirs, 0, count * 400);
}

/// Reads and writes from several threads over one endpoint.
fn both_directions(setup: Setup) {
    const PARTS: u64 = 4;
    let bench = Bench::new(setup, 8 * MIB, Access::ReadWrite, HOUR);
    fill(&bench.ours, 1);
    fill(&bench.theirs, 2);
    let expected = (bytes(&bench.ours, 4 * MIB, 4 * MIB), bytes(&bench.theirs, 0, 4 * MIB));
    std::thread::scope(|scope| {
        for (direction, base) in [(Direction::Read, 0), (Direction::Write, 4 * MIB)] {
            let bench = &bench;
            scope.spawn(move || {
                let queue = CompletionQueue::new();
                let len = 4 * MIB / PARTS;
                for round in 0..8 {
                    let ops = (0..PARTS).map(|n| bench.op(round, direction, base + n * len, len)).collect();
                    bench.endpoint.submit(ops, &queue.sink());
                    let completions = queue.wait_many(PARTS as usize, Instant::now() + PATIENCE);
                    assert_eq!(completions.len(), PARTS as usize);
                    assert!(completions.iter().all(|completion| completion.result.is_ok()));
                }
            });
        }
    });
    assert!(bytes(&bench.theirs, 4 * MIB, 4 * MIB) == expected.0, "writes");
    assert!(bytes(&bench.ours, 0, 4 * MIB) == expected.1, "reads");
}

/// The peer vanishes amid transfers: each completes, with all of its bytes or with the exact reason.
fn peer_killed(setup: Setup) {
    let bench = Bench::new(setup, 16 * MIB, Access::ReadWrite, HOUR);
    fill(&bench.theirs, 1);
    fill(&bench.ours, 2);
    // Writes go to the upper half, reads come into the lower.
    let count = bench.pair.client.capabilities().queue_depth.min(64);
    let op = |n: usize| {
        let direction = if n.is_multiple_of(2) { Direction::Read } else { Direction::Write };
        bench.op(n as u64, direction, (n as u64 % 2) * 8 * MIB, 8 * MIB)
    };
    bench.submit((0..count).map(op).collect());
    (bench.pair.kill)();
    for completion in bench.wait(count) {
        check_after_kill(&bench, &completion);
    }
    // The endpoint may notice it only when it is used next.
    let deadline = Instant::now() + PATIENCE;
    while bench.one(bench.op(0, Direction::Read, 0, 10)).result.is_ok() {
        assert!(Instant::now() < deadline, "a dead peer answers");
    }
    assert!(bench.endpoint.down().is_some());
    let late = bench.one(bench.op(0, Direction::Read, 0, 10));
    assert!(matches!(late.result, Err(OpError::PeerDown { .. })), "{late:?}");
    assert!(bench.endpoint.open("kv").is_err() && bench.endpoint.notify(b"x").is_err());
    assert_eq!(bench.endpoint.in_flight(), 0);
}

fn check_after_kill(bench: &Bench, completion: &Completion) {
    match &completion.result {
        Ok(()) => assert_eq!(completion.valid_bytes, 8 * MIB),
        Err(OpError::PeerDown { peer, .. }) => assert_eq!(peer, &bench.pair.server_node.name),
        Err(error) => panic!("{error}"),
    }
    if completion.id.is_multiple_of(2) && completion.valid_bytes > 0 {
        assert_same(&bench.ours, &bench.theirs, 0, completion.valid_bytes);
    }
}

/// After `close` everything is refused at once, and other endpoints go on.
fn closed_endpoint(setup: Setup) {
    let bench = Bench::new(setup, 8 * MIB, Access::ReadWrite, HOUR);
    let other = connect(&bench.pair);
    bench.submit((0..8).map(|n| bench.op(n, Direction::Read, 0, 8 * MIB)).collect());
    bench.endpoint.close();
    for completion in bench.wait(8) {
        let ok = completion.result.is_ok() && completion.valid_bytes == 8 * MIB;
        assert!(ok || matches!(completion.result, Err(OpError::PeerDown { .. })), "{completion:?}");
    }
    assert!(bench.endpoint.down().is_some());
    let late = bench.one(bench.op(0, Direction::Read, 0, 10));
    assert!(matches!(late.result, Err(OpError::PeerDown { .. })), "{late:?}");
    bench.endpoint.close();

    let grant = other.open("kv").unwrap_or_else(|e| panic!("open: {e}"));
    let again = Bench { endpoint: other, grant, ..bench };
    again.done(again.op(1, Direction::Read, 0, 8 * MIB));
}

/// A cancelled operation completes, and its memory is left alone from then on.
fn cancelled(setup: Setup) {
    let bench = Bench::new(setup, 8 * MIB, Access::ReadWrite, HOUR);
    let mut completed_early = bench.op(1, Direction::Read, 0, 10);
    let cancel = Cancel::default();
    cancel.set();
    completed_early.cancel = Some(cancel);
    assert_eq!(bench.one(completed_early), Completion::failed(1, 0, OpError::Cancelled));

    fill(&bench.theirs, 1);
    let cancel = Cancel::default();
    let ops =
        (0..16).map(|n| Op { cancel: Some(cancel.clone()), ..bench.op(n, Direction::Read, 0, 8 * MIB) });
    bench.submit(ops.collect());
    bench.endpoint.cancel(&cancel);
    for completion in bench.wait(16) {
        let done = completion.result.is_ok() && completion.valid_bytes == 8 * MIB;
        assert!(done || completion.result == Err(OpError::Cancelled), "{completion:?}");
    }
    // All have completed, so this memory is ours again: other bytes put there must stay, whatever the peer still sends.
    fill(&bench.ours, 77);
    let ours = bytes(&bench.ours, 0, 8 * MIB);
    // One more operation elsewhere: nothing older can follow it on the link.
    let other = (bench.place)(Side::Client, 4096);
    bench.pair.client.register(&other).unwrap_or_else(|e| panic!("register: {e}"));
    let mut op = bench.op(99, Direction::Read, 0, 4096);
    op.local = vec![range(&other, 0, 4096)];
    bench.done(op);
    assert!(bytes(&bench.ours, 0, 8 * MIB) == ours, "written after completion");
    assert_same(&other, &bench.theirs, 0, 4096);
}

/// Notices arrive in order, after the writes that completed before them.
fn notices(setup: Setup) {
    let bench = Bench::new(setup, 4096, Access::ReadWrite, HOUR);
    for n in 0..100u64 {
        range(&bench.ours, 0, 8).copy_in(&n.to_le_bytes());
        bench.done(bench.op(n, Direction::Write, 0, 8));
        bench.endpoint.notify(&n.to_le_bytes()).unwrap_or_else(|e| panic!("notify: {e}"));
        let notice = bench.pair.server_node.notices.wait(Instant::now() + PATIENCE);
        let notice = notice.unwrap_or_else(|| panic!("notice {n} was lost"));
        assert_eq!(
            (notice.peer, notice.message),
            (bench.pair.client_node.name.clone(), n.to_le_bytes().into())
        );
        assert_eq!(bytes(&bench.theirs, 0, 8), n.to_le_bytes());
    }
    let long = bench.endpoint.notify(&vec![0; super::node::NOTICE_MAX + 1]);
    assert!(matches!(long, Err(Error::NoticeTooLong { .. })));
}
