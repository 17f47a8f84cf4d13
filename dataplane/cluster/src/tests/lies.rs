//! A peer that knows the secret and lies: in what it asks, and in what it answers.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;
use crate::message::{Copied, FrameError, Keep, Loan, Reply, Request, Since, Status, Welcome};
use crate::table::{Fact, Generation, Gone, Holding};
use kvasir_net::transport::Node;
use kvasir_net::transport::tcp::greet;
use kvasir_net::transport::tcp::socket::{Deadlined, Socket};

const PATIENCE: Duration = Duration::from_secs(60);

fn node(n: usize) -> Node {
    Node::new(&format!("host-{n}"), Secret::new(b"the secret of this cluster"), 7)
}

/// Host 0 alone; this test plays host 1. What was reserved for a liar is free again after a second or two.
fn victim(ports: &[SocketAddr]) -> Host {
    let dram = DramConfig { reservation_ttl: Duration::from_secs(1), ..DramConfig::default() };
    let host = Host::start_with(0, ports, dram, |_| {});
    (0..8).for_each(|n| host.put(n));
    host
}

fn loan(n: u32) -> Loan {
    Loan { meta: BlockMeta::single(key(n), BLOCK), checksum: 7, offset: 0, lease: 0 }
}

/// The lying side of a connection to `host`.
struct Liar(Socket);

impl Liar {
    fn connect(host: &Host) -> Self {
        let stream = TcpStream::connect(host.cluster.addr()).unwrap();
        let until = Instant::now() + PATIENCE;
        let (socket, _) = greet::connect(stream, None, &node(1), "", until).unwrap();
        let liar = Self(socket);
        let cluster = host.cluster.config().cluster.clone();
        assert!(matches!(liar.ask(&Request::Hello { cluster }), Ok(Reply::Welcome(_))));
        liar
    }

    fn line(&self) -> Deadlined<'_> {
        Deadlined { socket: &self.0, deadline: Instant::now() + PATIENCE }
    }

    fn ask(&self, request: &Request) -> Result<Reply, FrameError> {
        message::write(&mut self.line(), request).and_then(|()| message::read(&mut self.line()))
    }
}

/// What nobody honest says. `theirs`: a lease of somebody else.
fn lies(theirs: u64) -> Vec<Request> {
    let huge = BlockMeta { size: u32::MAX, depth: u32::MAX, ..loan(50).meta };
    let huge = Loan { meta: huge, offset: u64::MAX, lease: u64::MAX, ..loan(50) };
    let holding = Holding {
        size: BLOCK,
        target: 255,
        primary: table::NodeId(u64::MAX),
        generation: Generation(u64::MAX),
    };
    let copy = |loans: Vec<Loan>| Request::Copy {
        items: loans.into_iter().map(|loan| (loan, holding)).collect(),
        lease_ms: u64::MAX,
    };
    let open = |id, keep, layers, loans: Vec<Loan>| {
        let blocks: Vec<_> = loans.iter().map(|loan| loan.meta).collect();
        let put_after = vec![Generation(1); blocks.len()];
        Request::Open { id, keep, layers, blocks, put_after, now: Generation(1) }
    };
    let at_times = |put_after, now| {
        let blocks = vec![loan(90).meta];
        Request::Open { id: 10, keep: Keep::Each, layers: 1, blocks, put_after, now }
    };
    let whole = |layers, loans| open(9, Keep::All { request: 9 }, layers, loans);
    let each = |id, loans| open(id, Keep::Each, 1, loans);
    vec![
        Request::Hello { cluster: "x".repeat(100_000) },
        Request::Watch { since: Since::At(u64::MAX) },
        Request::Watch { since: Since::Rest },
        // Leases it was not given, and blocks that nobody has.
        Request::Lend { keys: vec![], release: (theirs.wrapping_sub(64)..theirs.wrapping_add(64)).collect() },
        Request::Lend { keys: (0..4096).map(|n| key(1000 + n)).collect(), release: vec![u64::MAX; 4096] },
        // Copies of blocks that are here in another version, of none, and of more than there can be.
        copy(vec![loan(1), loan(1), loan(2)]),
        copy(vec![loan(60), Loan { offset: u64::MAX, ..loan(61) }]),
        copy(vec![huge, huge]),
        copy(vec![Loan { meta: BlockMeta { parent: Some(key(62)), ..loan(62).meta }, ..loan(62) }]),
        Request::Has { keys: vec![key(1); 4096] },
        Request::Remove { keys: vec![key(99); 64], at: Generation(u64::MAX) },
        Request::Remove { keys: vec![key(99); 64], at: Generation(1) },
        // Places for the same block twice, for one that is here, and for more than a pool holds.
        each(1, vec![loan(70), loan(70), loan(3)]),
        each(1, vec![loan(71)]),
        each(2, vec![huge; 9]),
        each(3, vec![]),
        Request::Settle { id: 1, checksums: vec![7; 3] },
        Request::Settle { id: u64::MAX, checksums: vec![7] },
        whole(0, vec![loan(80)]),
        whole(u32::MAX, vec![loan(80)]),
        whole(3, vec![loan(80)]),
        whole(4, vec![]),
        whole(4, vec![loan(80), loan(80)]),
        whole(4, vec![huge]),
        whole(4, vec![loan(80)]),
        Request::Settle { id: 9, checksums: vec![1; 4096] },
        Request::Settle { id: 9, checksums: vec![1] },
        Request::Settle { id: 8, checksums: vec![] },
        Request::GiveUp { id: 9, reason: "r".repeat(500_000) },
        Request::GiveUp { id: 77, reason: String::new() },
        Request::Lend { keys: vec![key(0); 5000], release: vec![] },
        // More times than blocks, and a time that no clock has shown yet.
        at_times(vec![Generation(1); 2], Generation(1)),
        at_times(vec![Generation(u64::MAX)], Generation(1)),
        at_times(vec![Generation(1)], Generation(u64::MAX)),
        Request::Describe,
    ]
}

/// Nothing of others has changed, and nothing is left of what the liar was given.
fn unharmed(host: &Host, free: u64, after: &str) {
    assert!(host.cluster.shared.copies.generations.next().is_plausible(), "{after}: puts can still be later");
    (0..8).for_each(|n| assert!(host.reads(n), "block {n} is gone: {after}"));
    until(&format!("its places are free again: {after}"), || host.store.pressure().free_bytes == free);
    assert_eq!(host.store.metrics().reservations, 0, "{after}");
}

#[test]
fn a_peer_that_asks_for_nonsense_gets_nothing_of_others() {
    let ports = ports(2);
    let host = victim(&ports);
    let reader = host.store.new_owner();
    let lookup = host.store.get(reader, &[key(0)], 0, host.clock.now_ms()).unwrap()[0];
    let Lookup::Hit(lease) = lookup else { panic!("{lookup:?}") };
    let free = host.store.pressure().free_bytes;
    let liar = Liar::connect(&host);
    for request in lies(lease.id) {
        let reply = liar.ask(&request).unwrap_or_else(|error| panic!("{error} after {request:?}"));
        // It is never told that a copy is kept which is not, and never lent what it did not name.
        match &reply {
            Reply::Copied { outcomes } => assert!(!outcomes.contains(&Copied::Done), "{request:?}"),
            Reply::Lent { loans, .. } => assert!(loans.iter().all(Option::is_none), "{request:?}"),
            _ => {}
        }
    }
    assert!(!(50..100).any(|n| host.is_resident(n)));
    assert!(
        matches!(host.store.evict_keys(&[key(0)], 0).unwrap()[0], Evict::InUse),
        "the lease of another ended"
    );
    host.store.release(reader, &[lease.id]).unwrap().remove(0).unwrap();
    drop(liar);
    unharmed(&host, free, "nonsense");
}

/// The real frames of all requests, cut off, with flipped bits, and with other counts.
#[test]
fn damaged_frames_of_a_peer_end_its_connection_alone() {
    let ports = ports(2);
    let host = victim(&ports);
    let free = host.store.pressure().free_bytes;
    let mut chance = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        chance as usize % below
    };
    for request in lies(1 << 32) {
        let mut frame = Vec::new();
        message::write(&mut frame, &request).unwrap();
        // The rest of a long frame is more of the same.
        let head = frame.len().min(200);
        for turn in 0..6 {
            let mut frame = frame.clone();
            match turn % 3 {
                0 => frame.truncate(1 + next(head)),
                1 => frame[next(head)] ^= 1 << next(8),
                // A length, a discriminant or a count as large as can be written.
                _ => frame[8 + next(head - 8)] = 0xff,
            }
            let liar = Liar::connect(&host);
            let _ = liar.line().write_all(&frame);
            liar.0.shut_down();
        }
    }
    unharmed(&host, free, "damaged frames");
    until("its connections are closed", || {
        host.cluster.listener.get().is_some_and(|listener| listener.open() == 0)
    });
}

/// Answers as no honest host would. Notes the times of removals: what it says of the first is plausible, that it knows of a later put.
fn answer_with_lies(listener: &TcpListener, stop: &AtomicBool, removals: &Mutex<Vec<Generation>>) {
    let node = node(1);
    let serve = |stream: TcpStream| -> Option<()> {
        let (socket, _) = greet::accept(stream, None, &node, "", Instant::now() + PATIENCE).ok()?;
        let line = || Deadlined { socket: &socket, deadline: Instant::now() + PATIENCE };
        let mut first = true;
        loop {
            let request: Request = message::read(&mut line()).ok()?;
            let reply = match request {
                Request::Hello { .. } | Request::Describe => Reply::Welcome(Welcome {
                    rails: vec![
                        ("tcp".into(), "127.0.0.1:1".into()),
                        ("shm".into(), "/nowhere".into()),
                        ("x".into(), String::new()),
                    ],
                    matrix: "{\"nics\": [".repeat(1000),
                    nics: vec!["mlx5_0".into(); 2000],
                    machine: "m".repeat(4096),
                    revision: u32::MAX,
                    data: "not an address".into(),
                }),
                Request::Watch { .. } => {
                    let holding = Holding {
                        size: 0,
                        target: 255,
                        primary: table::NodeId(0),
                        generation: Generation(1),
                    };
                    let late = Holding { generation: Generation(u64::MAX), ..holding };
                    let which = |n: u32| if n.is_multiple_of(2) { holding } else { late };
                    let facts = (0..4096).map(|n| Fact::Holds(key(n), which(n)));
                    let gone = (0..64).map(|n| Fact::Gone(key(n), Gone::Lost));
                    let status =
                        Status { free_bytes: u64::MAX, pool_bytes: 1, load: u64::MAX, revision: u32::MAX };
                    let facts = if first { facts.chain(gone).collect() } else { Vec::new() };
                    thread::sleep(Duration::from_millis(10));
                    Reply::News {
                        reset: std::mem::take(&mut first),
                        facts,
                        next: Since::At(u64::MAX),
                        status,
                    }
                }
                // Loans of other keys, of sizes that overflow, and too many of them.
                Request::Lend { keys, .. } => {
                    let meta = BlockMeta { size: u32::MAX, ..loan(12).meta };
                    let lie = Loan { meta, offset: u64::MAX - 5, lease: u64::MAX, ..loan(12) };
                    let mut loans = vec![Some(lie); keys.len()];
                    loans.extend([Some(loan(1)); 3]);
                    Reply::Lent { loans, lease_ms: u64::MAX }
                }
                Request::Copy { items, .. } => {
                    Reply::Copied { outcomes: vec![Copied::Done; items.len() + 9] }
                }
                Request::Has { .. } => Reply::Has { held: vec![true; 9999] },
                Request::Remove { keys, at } => {
                    let mut removals = removals.lock();
                    let later = if removals.is_empty() { at.0 + 1_000_000 } else { u64::MAX };
                    removals.push(at);
                    Reply::Removed { removed: vec![true; keys.len()], later: Some(Generation(later)) }
                }
                Request::Open { blocks, .. } => {
                    Reply::Opened { segment: "s".repeat(5000), wanted: vec![true; blocks.len() + 1] }
                }
                Request::Settle { .. } => Reply::Copied { outcomes: vec![] },
                Request::GiveUp { .. } => Reply::GivenUp,
            };
            message::write(&mut line(), &reply).ok()?;
        }
    };
    thread::scope(|scope| {
        while !stop.load(Ordering::SeqCst) {
            let Ok((stream, _)) = listener.accept() else { return };
            scope.spawn(move || serve(stream));
        }
    });
}

#[test]
fn a_peer_that_answers_with_lies_costs_misses_and_nothing_else() {
    let ports = ports(2);
    let listener = TcpListener::bind(ports[1]).unwrap();
    let (stop, removals) = (AtomicBool::new(false), Mutex::default());
    thread::scope(|scope| {
        scope.spawn(|| answer_with_lies(&listener, &stop, &removals));
        let host = victim(&ports);
        let free = host.store.pressure().free_bytes;
        until("it is believed to be a peer", || host.up() == 1);
        assert!((8..40).all(|n| !host.reads(n)), "what it says it has is not there");
        assert_eq!(host.cluster.replicate(&[key(0)], 2), [Outcome::Done]);
        let _ = host.cluster.push("host-1", &[key(0), key(1)]);
        for n in [6, 7] {
            let operator = host.tiering.remove(&[key(n)], host.clock.now_ms()).unwrap();
            assert_eq!(operator, [Remove::Removed]);
        }
        let at = removals.lock().clone();
        assert!(at.len() == 3 && at[1].0 > at[0].0 + 1_000_000, "a later put is removed, once: {at:?}");
        assert!(host.cluster.shared.copies.generations.now().is_plausible(), "nobody's time is that late");
        host.put(6);
        host.put(7);
        unharmed(&host, free, "a lying peer");
        drop(host);
        stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(ports[1]));
    });
}

/// What this process takes of the machine.
#[derive(Clone, Copy, Debug)]
struct Vitals {
    resident_kib: u64,
    descriptors: usize,
}

impl Vitals {
    /// More than before that is not called a leak: what the allocator keeps, and connections that are just ending.
    const MARGIN: Self = Self { resident_kib: 16 << 10, descriptors: 6 };

    fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        Self { resident_kib: resident.trim().trim_end_matches(" kB").parse().unwrap(), descriptors }
    }

    fn is_back(self, before: Self) -> bool {
        self.resident_kib <= before.resident_kib + Self::MARGIN.resident_kib
            && self.descriptors <= before.descriptors + Self::MARGIN.descriptors
    }
}

/// Whether this process runs that one test alone. If not, another one does so now, and must succeed.
fn runs_alone(test: &str) -> bool {
    const ALONE: &str = "KVASIR_TEST_RUNS_ALONE";
    let alone = std::env::var_os(ALONE).is_some();
    if !alone {
        let mut run = std::process::Command::new(std::env::current_exe().unwrap());
        let done = run.args([test, "--exact", "--nocapture"]).env(ALONE, "1").status().unwrap();
        assert!(done.success());
    }
    alone
}

/// Tells lies again and again; in the end no more is taken than after the first few times.
fn costs_nothing(what: &str, lie: impl Fn()) {
    (0..4).for_each(|_| lie());
    let before = Vitals::now();
    (0..40).for_each(|_| lie());
    until(&format!("{what} costs nothing, beyond {before:?}"), || Vitals::now().is_back(before));
}

#[test]
fn lies_cost_neither_memory_nor_descriptors() {
    if !runs_alone("tests::lies::lies_cost_neither_memory_nor_descriptors") {
        return;
    }
    let ports = ports(2);
    let host = victim(&ports);
    costs_nothing("a peer that asks for nonsense", || {
        let liar = Liar::connect(&host);
        for request in lies(1 << 32) {
            liar.ask(&request).unwrap();
        }
    });
    let listener = TcpListener::bind(ports[1]).unwrap();
    let (stop, removals) = (AtomicBool::new(false), Mutex::default());
    thread::scope(|scope| {
        scope.spawn(|| answer_with_lies(&listener, &stop, &removals));
        until("it is believed to be a peer", || host.up() == 1);
        costs_nothing("a peer that answers with lies", || {
            assert!((8..12).all(|n| !host.reads(n)));
            let _ = host.cluster.push("host-1", &[key(0), key(1)]);
            let _ = host.cluster.replicate(&[key(0)], 2);
        });
        drop(host);
        stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(ports[1]));
    });
}

/// Numbers are the senders' own choice, so that one may choose another's.
#[test]
fn what_a_peer_says_of_the_hand_overs_of_others_is_not_heard() {
    use crate::handover::notice::encode;
    use kvasir_net::transport::node::Notice;
    let ports = ports(3);
    let host = Host::start(0, &ports, |_| {});
    let shared = &host.cluster.shared;
    let (one, two) = (&shared.links[0], &shared.links[1]);
    let free = host.store.pressure().free_bytes;
    let open = |from, id, keep, n: u32| {
        shared.receiving.open(from, id, keep, 4, vec![(loan(n).meta, Generation(1))])
    };
    let opened = open(one, 9, Keep::All { request: 5 }, 80);
    let Reply::Opened { segment, .. } = &opened else { panic!("{opened:?}") };
    let again = open(two, 9, Keep::All { request: 6 }, 81);
    assert!(matches!(&again, Reply::Refused { reason } if reason.contains("under way already")), "{again:?}");
    assert!(shared.ways.node.exports.grant(segment, "host-1").is_ok(), "the first may go on writing");
    assert!(matches!(shared.receiving.settle(two, 9, &[7]), Reply::Refused { .. }));
    shared.receiving.end("the other one says so", |id, from| id == 9 && from == two.config.name);
    assert_eq!(open(one, 9, Keep::All { request: 5 }, 80), opened, "asked again, the same answer");

    assert!(matches!(open(one, 1, Keep::Each, 82), Reply::Opened { .. }));
    let says = |peer: &str, id, layers| {
        shared.receiving.note_layer(&Notice { peer: peer.to_owned(), message: encode(id, 0, layers) })
    };
    assert!(
        !says("host-2", 1, 4) && !says("host-1", 77, 4) && !says("nobody", 1, 4) && !says("host-1", 1, 3)
    );
    assert!(says("host-1", 1, 4));
    shared.receiving.end("its sender gave up", |_, from| from == one.config.name);
    assert_eq!(host.store.pressure().free_bytes, free);
}
