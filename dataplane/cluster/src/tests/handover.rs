//! Blocks that go from host to host layer by layer.

use std::time::Instant;

use super::super::handover::{Arrival, HAND_OVERS_MAX, HandOverError, HandingOver, Waited};
use super::super::message::{Copied, Keep, Reply};
use super::super::push::Pushed;
use super::super::table::Generation;
use super::*;
use kvasir_protocol::block::checksum;
use kvasir_store::dram::OwnerId;

const LAYERS: u32 = 4;
const LAYER: usize = (BLOCK / LAYERS) as usize;

/// Two hosts whose silence does no harm, with reservations of this many seconds.
fn pair(reservation_s: u64) -> (Host, Host) {
    let ports = ports(2);
    let start = |n| {
        let dram =
            DramConfig { reservation_ttl: Duration::from_secs(reservation_s), ..DramConfig::default() };
        Host::start_with(n, &ports, dram, |config| config.silence = Duration::from_secs(60))
    };
    let (from, to) = (start(0), start(1));
    until("both are up", || from.up() == 1 && to.up() == 1);
    (from, to)
}

fn metas(numbers: &[u32]) -> Vec<BlockMeta> {
    numbers.iter().map(|&n| BlockMeta::single(key(n), BLOCK)).collect()
}

fn sums(numbers: &[u32]) -> Vec<u64> {
    numbers.iter().map(|&n| checksum(&content(n))).collect()
}

impl Host {
    fn begin(&self, owner: OwnerId, request: u64, numbers: &[u32]) -> HandingOver {
        self.cluster.hand_over(owner, request, "host-1", &metas(numbers), LAYERS).unwrap()
    }

    /// What a prefill instance does: computes a layer in place.
    fn fill(&self, handing: &HandingOver, numbers: &[u32], layer: u32) {
        let at = layer as usize * LAYER;
        for (place, &n) in handing.places().iter().zip(numbers).filter(|(place, _)| place.to_fill) {
            let bytes = &content(n)[at..at + LAYER];
            assert!(self.store.pool().mapping().write(place.offset + at as u64, bytes));
        }
    }

    fn produce(&self, handing: &mut HandingOver, numbers: &[u32], layer: u32) {
        self.fill(handing, numbers, layer);
        handing.layer_done(layer).unwrap();
    }

    fn arrival(&self, request: u64) -> Arrival {
        self.cluster.arrival(0, request, soon()).unwrap().unwrap()
    }

    /// A layer is here, of all blocks, bit-exact.
    fn has_layer(&self, arrival: &Arrival, numbers: &[u32], layer: u32) {
        assert_eq!(arrival.wait(Some(layer), soon()), Waited::Here);
        let at = layer as usize * LAYER;
        for (block, &n) in arrival.blocks().iter().zip(numbers) {
            let bytes = self.store.pool().mapping().bytes(block.offset + at as u64, LAYER as u64).unwrap();
            assert!(block.key == key(n) && bytes == content(n)[at..at + LAYER], "block {n}");
        }
    }

    fn free(&self) -> u64 {
        self.store.pressure().free_bytes
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// The second hears nothing of the first, only what that one asks. Where it tries to hear it is the third.
fn pair_of_which_one_is_not_heard() -> (Host, Host, TcpListener) {
    let ports = ports(2);
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = deaf.local_addr().unwrap().to_string();
    let quiet = |config: &mut ClusterConfig| config.silence = Duration::from_secs(60);
    let from = Host::start(0, &ports, quiet);
    let to = Host::start(1, &ports, |config| {
        quiet(config);
        config.peers[0].address = address;
    });
    until("the receiver is up", || from.up() == 1);
    (from, to, deaf)
}

#[test]
fn what_is_removed_after_a_push_is_removed_later_than_it_was_put() {
    let (from, to, _deaf) = pair_of_which_one_is_not_heard();
    let generations = |host: &Host| host.cluster.shared.copies.generations.next();
    let ahead = Generation(generations(&from).0 + 1_800_000_000);
    from.cluster.shared.heard(ahead);
    from.put(1);
    assert_eq!(from.cluster.push("host-1", &[key(1)]).unwrap(), [Pushed::Done]);
    assert!(generations(&to) > ahead, "though its clock is behind");
}

#[test]
fn a_sender_that_the_receiver_never_reached_is_not_given_up() {
    let (from, to, deaf) = pair_of_which_one_is_not_heard();
    let (numbers, owner) = ([1, 2], from.store.new_owner());
    let mut handing = from.begin(owner, 7, &numbers);
    // When the receiver tries again, the previous attempt has failed.
    (0..2).for_each(|_| drop(deaf.accept().unwrap()));
    (0..LAYERS).for_each(|layer| from.produce(&mut handing, &numbers, layer));
    handing.finish(&sums(&numbers)).unwrap();
    assert!(to.up() == 0 && numbers.iter().all(|&n| to.is_resident(n)));
}

#[test]
fn a_layer_is_read_before_the_next_is_produced() {
    let (from, to) = pair(600);
    let (numbers, owner) = ([1, 2, 3], from.store.new_owner());
    let mut handing = from.begin(owner, 7, &numbers);
    let arrival = to.arrival(7);
    assert_eq!((arrival.layers(), arrival.blocks().len()), (LAYERS, 3));
    for layer in [2, 0, 3, 1] {
        assert_eq!(arrival.wait(Some(layer), Instant::now()), Waited::NotYet);
        from.produce(&mut handing, &numbers, layer);
        to.has_layer(&arrival, &numbers, layer);
        assert!(numbers.iter().all(|&n| !to.is_resident(n)), "not yet compared");
    }
    assert_eq!(arrival.wait(None, Instant::now()), Waited::NotYet);
    handing.finish(&sums(&numbers)).unwrap();
    assert_eq!(arrival.wait(None, soon()), Waited::Here);
    assert!(numbers.iter().all(|&n| from.is_resident(n) && to.is_resident(n)));
    // A reader of the layers may go on: the blocks stay where they are.
    let evict = || to.store.evict_keys(&numbers.map(key), to.clock.now_ms()).unwrap();
    assert_eq!(evict(), [Evict::InUse; 3]);
    to.has_layer(&arrival, &numbers, 0);
    drop(arrival);
    assert!(numbers.iter().all(|&n| to.reads(n) && from.reads(n)));

    // A late reader may still read them; after that they are blocks like others.
    to.has_layer(&to.arrival(7), &numbers, 3);
    assert_eq!(evict(), [Evict::Evicted; 3]);
    assert!(to.cluster.arrival(0, 7, soon()).is_err_and(|reason| reason.contains("evicted")));
}

/// Each tenant numbers its requests by itself, and hears nothing of another's.
#[test]
fn two_tenants_hand_requests_of_one_number_over() {
    let (from, to) = pair(600);
    let of = |tenant: u16, n: u32| BlockMeta { tenant, ..BlockMeta::single(key(n).of_tenant(tenant), BLOCK) };
    let begin =
        |blocks: &[BlockMeta]| from.cluster.hand_over(from.store.new_owner(), 7, "host-1", blocks, LAYERS);
    let third = begin(&[of(3, 1), of(3, 2)]).unwrap();
    assert!(to.cluster.arrival(4, 7, Instant::now()).unwrap().is_none(), "it is not that tenant's");
    let fourth = begin(&[of(4, 1)]).unwrap();
    let keys = |tenant| -> Vec<BlockKey> {
        let arrival = to.cluster.arrival(tenant, 7, soon()).unwrap().unwrap();
        arrival.blocks().iter().map(|block| block.key).collect()
    };
    assert_eq!(keys(3), [1, 2].map(|n| of(3, n).key));
    assert_eq!(keys(4), [of(4, 1).key]);
    let again = begin(&[of(3, 3)]).err().unwrap().to_string();
    assert!(again.contains("request 7 is being handed over by host-0 already"), "{again}");
    drop((third, fourth));
    let free = to.free();
    for mixed in [of(4, 9), BlockMeta { tenant: 3, ..of(4, 9) }] {
        let error = begin(&[of(3, 8), mixed]).err().unwrap().to_string();
        assert!(error.contains("the blocks of a request are one tenant's"), "{error}");
    }
    assert_eq!(to.free(), free);
}

#[test]
fn places_under_a_client_that_may_be_writing_go_to_nobody() {
    let (from, to) = pair(600);
    let (client, free) = (from.store.new_client(), from.free());
    let handing = from.begin(client, 7, &[1, 2]);
    let reservations = handing.reservations();
    // Whatever ends it, the client may just be filling a layer.
    drop(handing);
    assert_eq!(from.store.metrics().quarantined_bytes, 2 * u64::from(BLOCK));
    assert!(from.free() < free && to.free() == to.store.pool().bytes());
    let _ = from.store.abort(client, &reservations).unwrap();
    assert_eq!((from.free(), from.store.metrics().quarantined_bytes), (free, 0));
}

#[test]
fn what_either_host_has_already_is_not_sent_or_filled_again() {
    let (from, to) = pair(600);
    from.put(1);
    to.put(2);
    [&from, &to].into_iter().for_each(|host| host.put(3));
    let (numbers, owner) = ([1, 2, 3, 4], from.store.new_owner());
    let mut handing = from.begin(owner, 7, &numbers);
    let to_fill: Vec<bool> = handing.places().iter().map(|place| place.to_fill).collect();
    assert_eq!(to_fill, [false, true, false, true]);
    let arrival = to.arrival(7);
    for layer in 0..LAYERS {
        from.produce(&mut handing, &numbers, layer);
        to.has_layer(&arrival, &numbers, layer);
    }
    handing.finish(&sums(&numbers)).unwrap();
    assert!(numbers.iter().all(|&n| from.reads(n) && to.reads(n)));

    // All of it is there: nothing travels, and nobody waits.
    let mut handing = from.begin(owner, 8, &numbers);
    assert_eq!(to.arrival(8).wait(Some(3), Instant::now()), Waited::Here);
    (0..LAYERS).for_each(|layer| handing.layer_done(layer).unwrap());
    handing.finish(&sums(&numbers)).unwrap();
}

#[test]
fn a_wrong_checksum_keeps_nothing_anywhere() {
    let (from, to) = pair(600);
    let (free, owner) = ((from.free(), to.free()), from.store.new_owner());
    let mut handing = from.begin(owner, 7, &[1, 2]);
    let arrival = to.arrival(7);
    (0..LAYERS).for_each(|layer| from.produce(&mut handing, &[1, 2], layer));
    let error = handing.finish(&sums(&[1, 9])).unwrap_err();
    assert!(error.is_end() && error.to_string().contains(&key(2).to_string()), "{error}");
    drop(handing);
    assert!(matches!(arrival.wait(None, soon()), Waited::Failed(reason) if reason.contains("checksum")));
    drop(arrival);
    assert_eq!((from.free(), to.free()), free);
    assert!([1, 2].iter().all(|&n| !from.is_resident(n) && !to.is_resident(n)));
}

#[test]
fn a_sender_that_gives_up_ends_it_but_not_under_a_reader() {
    let (from, to) = pair(600);
    let (free, owner) = ((from.free(), to.free()), from.store.new_owner());
    let mut handing = from.begin(owner, 7, &[1, 2]);
    from.produce(&mut handing, &[1, 2], 0);
    let arrival = to.arrival(7);
    to.has_layer(&arrival, &[1, 2], 0);
    drop(handing);
    assert_eq!(from.free(), free.0);
    assert!(matches!(arrival.wait(Some(1), soon()), Waited::Failed(reason) if reason.contains("gave it up")));
    assert!(to.free() < free.1, "the places are still somebody's");
    assert!(to.cluster.arrival(0, 7, soon()).is_err(), "who comes late learns it, too");
    drop(arrival);
    assert_eq!(to.free(), free.1);
}

#[test]
fn a_lost_host_ends_it_on_the_other() {
    let (from, to) = pair(600);
    let free = to.free();
    let mut handing = from.begin(from.store.new_owner(), 7, &[1]);
    from.produce(&mut handing, &[1], 0);
    let arrival = to.arrival(7);
    to.has_layer(&arrival, &[1], 0);
    // As if its process ended: without a word to the other side.
    from.cluster.stop();
    assert!(matches!(arrival.wait(Some(1), soon()), Waited::Failed(reason) if reason.contains("gone")));
    drop(arrival);
    assert_eq!(to.free(), free);
    drop((handing, from));

    let (from, to) = pair(600);
    let (free, mut handing) = (from.free(), from.begin(from.store.new_owner(), 7, &[1]));
    assert!(from.free() < free);
    from.produce(&mut handing, &[1], 0);
    drop(to);
    for layer in 1..LAYERS {
        from.fill(&handing, &[1], layer);
        let _ = handing.layer_done(layer);
    }
    let error = handing.finish(&sums(&[1])).unwrap_err();
    assert!(matches!(error, HandOverError::Broken { .. } | HandOverError::LayerMissing { .. }), "{error}");
    drop(handing);
    assert_eq!(from.free(), free);
}

#[test]
fn its_time_ends_it_on_both_sides() {
    let (from, to) = pair(3);
    let free = (from.free(), to.free());
    let mut handing = from.begin(from.store.new_owner(), 7, &[1]);
    let arrival = to.arrival(7);
    assert!(matches!(arrival.wait(None, soon()), Waited::Failed(reason) if reason.contains("in its time")));
    until("it is late here as well", || handing.until() < Instant::now());
    assert!(matches!(handing.layer_done(0), Err(HandOverError::Late { ms: 1500 })));
    drop((handing, arrival));
    until("the places are back", || (from.free(), to.free()) == free);
}

#[test]
fn bad_calls_say_what_is_wrong() {
    let (from, to) = pair(600);
    let owner = from.store.new_owner();
    let begin = |peer: &str, metas: &[BlockMeta], layers: u32, expected: &str| {
        let begun = from.cluster.hand_over(owner, 7, peer, metas, layers);
        let text = begun.map_or_else(|error| error.to_string(), |_| "begun".to_owned());
        assert!(text.contains(expected), "{text}");
    };
    let free = (from.free(), to.free());
    begin("host-9", &metas(&[1]), 4, "no peer is called host-9; there are: host-1");
    begin("host-1", &[], 4, "1 to 1024 blocks, not 0");
    begin("host-1", &metas(&[1; 1025]), 4, "1 to 1024 blocks, not 1025");
    begin("host-1", &metas(&[1]), 0, "1 to 1024 layers, not 0");
    begin("host-1", &metas(&[1]), 1025, "1 to 1024 layers, not 1025");
    begin("host-1", &metas(&[1]), 3, "does not consist of 3 equal layers");
    begin("host-1", &metas(&[1, 1]), 4, "another writer is storing the block");
    begin("host-1", &[BlockMeta::single(key(1), 33 << 20)], 4, "larger than the host's pool");
    assert_eq!((from.free(), to.free()), free);

    from.put(5);
    let shorter = [BlockMeta::single(key(5), BLOCK / 2)];
    let error = from.cluster.hand_over(owner, 7, "host-1", &shorter, 4).err().unwrap();
    assert!(error.to_string().contains("stored already, with 65536 B") && !error.retryable(), "{error}");

    let mut handing = from.begin(owner, 7, &[1]);
    begin("host-1", &metas(&[2]), 4, "request 7 is being handed over by host-0 already");
    let check = |result: Result<(), HandOverError>, expected: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(expected) && !error.is_end(), "{error}");
    };
    from.produce(&mut handing, &[1], 1);
    check(handing.layer_done(1), "layer 1 was handed over already");
    check(handing.layer_done(4), "layer 4 does not exist; the hand-over has 4");
    check(handing.finish(&sums(&[1])), "layer 0 was not handed over yet");
    [0, 2, 3].into_iter().for_each(|layer| from.produce(&mut handing, &[1], layer));
    check(handing.finish(&[]), "0 checksums for 1 blocks");
    handing.finish(&sums(&[1])).unwrap();
    assert!(to.reads(1));
    assert!(to.cluster.arrival(0, 99, Instant::now()).unwrap().is_none(), "nothing begun");
}

#[test]
fn those_that_are_over_do_not_count_and_the_last_ones_are_known() {
    let (from, to) = pair(600);
    let owner = from.store.new_owner();
    // More in a row than there may be at once.
    for n in 0..HAND_OVERS_MAX as u32 + 6 {
        let mut handing = from.begin(owner, n.into(), &[n]);
        (0..LAYERS).for_each(|layer| from.produce(&mut handing, &[n], layer));
        handing.finish(&sums(&[n])).unwrap();
    }
    let last = HAND_OVERS_MAX as u32 + 5;
    to.has_layer(&to.arrival(last.into()), &[last], 0);
}

#[test]
fn a_block_stored_in_another_version_does_not_end_it() {
    let (from, to) = pair(600);
    to.put_other(1);
    from.put_other(2);
    let (numbers, owner) = ([1, 2, 3], from.store.new_owner());
    let mut handing = from.begin(owner, 7, &numbers);
    (0..LAYERS).for_each(|layer| from.produce(&mut handing, &numbers, layer));
    handing.finish(&sums(&numbers)).unwrap();
    let stored = |n: u32| to.store.stat(&[key(n)]).unwrap()[0].unwrap().checksum;
    // What was stored there stays, what was stored here goes as it is, and the rest is what was computed.
    let expected = [OTHER + 1, OTHER + 2, 3].map(|n| checksum(&content(n)));
    assert_eq!(numbers.map(stored), expected);
}

/// What host 1 says to host 0, which keeps each block by itself.
struct Sender<'a> {
    to: &'a Host,
    link: Link,
}

impl<'a> Sender<'a> {
    fn named(name: &str, to: &'a Host) -> Self {
        let config = PeerConfig { name: name.to_owned(), ..to.cluster.config().peers[0].clone() };
        let shared = &to.cluster.shared;
        Self { to, link: Link::new(1, config, &to.store, &shared.ways, &shared.stop) }
    }

    fn open(&self, id: u64, numbers: &[u32]) -> Reply {
        self.open_put_after(id, numbers, Generation::default())
    }

    fn open_put_after(&self, id: u64, numbers: &[u32], at: Generation) -> Reply {
        let blocks = metas(numbers).into_iter().map(|meta| (meta, at)).collect();
        self.to.cluster.shared.receiving.open(&self.link, id, Keep::Each, 1, blocks)
    }

    /// Writes a block of the only hand-over into its place.
    fn write(&self, opened: &Reply, n: u32) {
        let Reply::Opened { segment, .. } = opened else { panic!("{opened:?}") };
        let exports = &self.to.cluster.shared.ways.node.exports;
        let granted = exports.grant(segment, &self.link.config.name).unwrap();
        granted.regions[0].whole().unwrap().copy_in(&content(n));
    }

    fn settle(&self, id: u64, numbers: &[u32]) -> Reply {
        self.to.cluster.shared.receiving.settle(&self.link, id, &sums(numbers))
    }
}

#[test]
fn a_number_is_taken_once_and_its_places_stay_until_nobody_writes_there() {
    let host = Host::start(0, &ports(2), |_| {});
    let (sender, stranger) = (Sender::named("host-1", &host), Sender::named("host-9", &host));
    let free = host.free();
    let opened = sender.open(1, &[1]);
    assert!(matches!(&opened, Reply::Opened { wanted, .. } if *wanted == [true]), "{opened:?}");
    assert_eq!(sender.open(1, &[1]), opened, "asked again, the same answer");
    assert!(matches!(stranger.open(1, &[2]), Reply::Refused { .. }));
    assert!(matches!(sender.open(2, &[]), Reply::Refused { .. }), "nothing to write");
    // However late it is, the place goes to nobody while the peer may write there.
    host.store.sweep(u64::MAX);
    assert_eq!((host.store.metrics().reservations, host.free()), (1, free - u64::from(BLOCK)));

    // It is ended by its own peer alone.
    assert!(matches!(stranger.settle(1, &[1]), Reply::Refused { .. }));
    let nothing = Reply::Copied { outcomes: vec![Copied::Failed] };
    assert_eq!(sender.settle(1, &[1]), nothing, "nothing was written");
    assert_eq!((host.free(), sender.settle(1, &[1])), (free, nothing), "asked again, the same answer");
    assert!(!host.is_resident(1));
}

/// The block is only reserved where it arrives, so a removal finds nothing there to drop.
#[test]
fn a_block_that_is_removed_while_it_is_pushed_does_not_come_back() {
    let host = Host::start(0, &ports(2), |_| {});
    let (sender, shared, free) = (Sender::named("host-1", &host), &host.cluster.shared, host.free());
    let push = |id, at| {
        let opened = sender.open_put_after(id, &[1], at);
        sender.write(&opened, 1);
        sender.settle(id, &[1])
    };
    let refused = Reply::Copied { outcomes: vec![Copied::Enough] };

    let before = shared.copies.generations.next();
    let opened = sender.open_put_after(1, &[1], before);
    sender.write(&opened, 1);
    let removed = shared.copies.generations.next();
    assert_eq!(shared.remove_here(&[key(1)], removed), (vec![false], None));
    assert_eq!(sender.settle(1, &[1]), refused);
    assert!(!host.is_resident(1) && host.free() == free);

    // Nor from a sender that hears of the removal later than this host.
    assert_eq!(push(2, before), refused);
    assert_eq!((host.is_resident(1), host.free()), (false, free));
    // What was put since is as good as any.
    assert_eq!(push(3, removed), Reply::Copied { outcomes: vec![Copied::Done] });
    assert!(host.reads(1));
}

#[test]
fn what_was_put_again_after_a_removal_is_pushed_and_handed_over() {
    let (from, to) = pair(600);
    for n in [1, 2] {
        from.put(n);
        assert_eq!(from.tiering.remove(&[key(n)], from.clock.now_ms()).unwrap(), [Remove::Removed]);
        from.put(n);
    }
    assert_eq!(from.cluster.push("host-1", &[key(1)]).unwrap(), [Pushed::Done]);
    let mut handing = from.begin(from.store.new_owner(), 7, &[2]);
    (0..LAYERS).for_each(|layer| from.produce(&mut handing, &[2], layer));
    handing.finish(&sums(&[2])).unwrap();
    assert!(to.reads(1) && to.reads(2));
}

#[test]
fn a_hand_over_of_a_block_that_is_removed_meanwhile_keeps_nothing() {
    let (from, to) = pair(600);
    let free = (from.free(), to.free());
    let mut handing = from.begin(from.store.new_owner(), 7, &[1, 2]);
    (0..LAYERS).for_each(|layer| from.produce(&mut handing, &[1, 2], layer));
    to.tiering.remove(&[key(2)], to.clock.now_ms()).unwrap();
    let error = handing.finish(&sums(&[1, 2])).unwrap_err();
    let expected = format!("block {} was removed meanwhile", key(2));
    assert!(error.is_end() && error.retryable() && error.to_string().contains(&expected), "{error}");
    drop(handing);
    assert!([1, 2].iter().all(|&n| !from.is_resident(n) && !to.is_resident(n)));
    assert_eq!((from.free(), to.free()), free);
}

/// One that begins and never ends costs the others nothing.
#[test]
fn a_peer_that_takes_all_it_can_get_leaves_the_others_theirs() {
    let host = Host::start(0, &ports(2), |_| {});
    let (greedy, honest) = (Sender::named("host-1", &host), Sender::named("host-2", &host));
    let limit = u64::try_from(HAND_OVERS_MAX).unwrap();
    let opened = |reply: &Reply| matches!(reply, Reply::Opened { .. });
    for id in 0..limit {
        assert!(opened(&greedy.open(id, &[id as u32])));
    }
    let refused = greedy.open(limit, &[500]);
    assert!(matches!(&refused, Reply::Refused { reason } if reason.contains("from one host")), "{refused:?}");
    assert!(opened(&honest.open(limit + 1, &[501])));

    // Of the pool, too: 64 of 512 places are taken, and 128 are its share.
    let of = |reply| match reply {
        Reply::Opened { wanted, .. } => wanted.into_iter().filter(|wanted| *wanted).count(),
        other => panic!("{other:?}"),
    };
    host.cluster.shared.receiving.end("done", |id, _| id == 0);
    let many: Vec<u32> = (1000..1500).collect();
    assert_eq!(of(greedy.open(limit + 2, &many)), 128 - 63);
    let others: Vec<u32> = (2000..2100).collect();
    assert_eq!(of(honest.open(limit + 3, &others)), 100);
}

/// A sender that goes away before it settles leaves nothing behind.
#[test]
fn places_of_a_sender_that_is_gone_are_taken_back() {
    let dram = DramConfig { reservation_ttl: Duration::from_secs(1), ..DramConfig::default() };
    let host = Host::start_with(0, &ports(2), dram, |_| {});
    let (sender, free) = (Sender::named("host-1", &host), host.free());
    assert!(matches!(sender.open(7, &[1, 2]), Reply::Opened { .. }));
    until("the places are back", || host.free() == free);
    assert!(matches!(sender.settle(7, &[1, 2]), Reply::Refused { .. }));
}
