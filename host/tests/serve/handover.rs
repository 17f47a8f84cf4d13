//! A request's blocks go from a prefill host to a decode host layer by layer: real processes, and their deaths.

use crate::process::{Host, Transport, content};
use crate::replicas::{Plan, metric, until};
use kvasir_client::data::{Arrivals, Client, ClientError, HandOver};
use kvasir_dataplane::{BlockKey, BlockMeta, checksum};
use std::time::Duration;

const LAYERS: u32 = 4;
const BLOCK: u32 = 64 << 10;
const LAYER: usize = (BLOCK / LAYERS) as usize;
const BLOCKS: u32 = 3;
const LONG: Duration = Duration::from_secs(120);

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("handover", &n.to_le_bytes())
}

fn metas(first: u32) -> Vec<BlockMeta> {
    (first..first + BLOCKS).map(|n| BlockMeta::single(key(n), BLOCK)).collect()
}

fn part(n: u32, layer: u32) -> Vec<u8> {
    content(n, BLOCK)[layer as usize * LAYER..][..LAYER].to_vec()
}

fn produce(handing: &HandOver<'_>, first: u32, layer: u32) -> Result<(), ClientError> {
    for block in 0..BLOCKS {
        handing.fill(block as usize, layer, &part(first + block, layer))?;
    }
    handing.layer_done(layer)
}

fn has_layer(arrivals: &Arrivals<'_>, first: u32, layer: u32) -> Result<(), ClientError> {
    arrivals.wait_layer(layer, LONG)?;
    for block in 0..BLOCKS {
        let bytes = arrivals.layer(block as usize, layer)?;
        assert!(bytes == part(first + block, layer), "block {block}, layer {layer}");
    }
    Ok(())
}

struct Pair {
    plan: Plan,
    hosts: [Host; 2],
}

impl Pair {
    fn start() -> Self {
        let plan = Plan::new(2);
        let pair = Self { hosts: [plan.start(0, &[]), plan.start(1, &[])], plan };
        pair.meet();
        pair
    }

    fn meet(&self) {
        until("peers", || self.hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    }

    fn clients(&self) -> [Client; 2] {
        self.hosts.each_ref().map(|host| host.client(Transport::Unix))
    }
}

/// Runs `attempt` with new request and block numbers until nothing broke that a busy machine breaks: hosts that starve
/// take each other for dead, and need a while to meet again.
fn patiently(mut attempt: impl FnMut(u32) -> Result<(), ClientError>) {
    let mut firsts = (0..).step_by(1000);
    until("a hand-over while the hosts hear each other", || match attempt(firsts.next().unwrap()) {
        Ok(()) => true,
        Err(error @ ClientError::Refused { retryable: true, .. }) => {
            println!("{error}");
            false
        }
        Err(error) => panic!("{error}"),
    });
}

fn reservations(host: &Host) -> u64 {
    metric(host, "kvasir_reservations", "")
}

#[test]
fn a_layer_is_read_at_the_other_host_before_the_next_is_produced() {
    let pair = Pair::start();
    let [from, to] = pair.clients();
    patiently(|first| {
        let request = first.into();
        let mut handing = from.hand_over(request, "host-1", &metas(first), LAYERS)?;
        let arrivals = to.arrivals(request, LONG)?;
        assert_eq!((arrivals.layers(), arrivals.blocks().len()), (LAYERS, BLOCKS as usize));
        for layer in [0, 2, 3, 1] {
            let early = arrivals.layer(0, layer).unwrap_err();
            assert!(matches!(early, ClientError::NotArrived { .. }), "{early}");
            produce(&handing, first, layer)?;
            has_layer(&arrivals, first, layer)?;
        }
        let keys: Vec<BlockKey> = metas(first).iter().map(|meta| meta.key).collect();
        assert_eq!(to.exists(&keys).unwrap(), [false; BLOCKS as usize], "not before it is compared");
        let sums = handing.checksums();
        assert!((0..BLOCKS).zip(&sums).all(|(n, sum)| checksum(&content(first + n, BLOCK)) == *sum));
        handing.finish(&sums)?;
        let whole = arrivals.finished(LONG)?;
        for (n, block) in (first..).zip(whole) {
            assert!(block.unwrap().bytes().unwrap() == content(n, BLOCK));
        }
        let arrived = arrivals.layer(1, 3).unwrap();
        assert!(arrived == part(first + 1, 3), "the places stay while somebody reads");
        assert_eq!(from.exists(&keys).unwrap(), [true; BLOCKS as usize]);
        Ok(())
    });
    assert_eq!(pair.hosts.each_ref().map(reservations), [0, 0]);
}

#[test]
fn a_prefill_host_killed_in_mid_layer_leaves_nothing() {
    let mut pair = Pair::start();
    let [from, to] = pair.clients();
    let mut killed = None;
    patiently(|first| {
        let handing = from.hand_over(first.into(), "host-1", &metas(first), LAYERS)?;
        let arrivals = to.arrivals(first.into(), LONG)?;
        produce(&handing, first, 0)?;
        has_layer(&arrivals, first, 0)?;
        handing.fill(0, 1, &part(first, 1))?;
        pair.hosts[0].kill();
        let broken = arrivals.wait_layer(1, LONG).unwrap_err();
        assert!(matches!(&broken, ClientError::Refused { retryable: true, .. }), "{broken}");
        assert!(arrivals.finished(LONG).is_err());
        killed = Some(first);
        Ok(())
    });
    let keys: Vec<BlockKey> = metas(killed.unwrap()).iter().map(|meta| meta.key).collect();
    assert_eq!(to.exists(&keys).unwrap(), [false; BLOCKS as usize]);
    until("the places are back", || reservations(&pair.hosts[1]) == 0);

    // The same blocks again, from the host that was restarted.
    pair.hosts[0] = pair.plan.start(0, &[]);
    pair.meet();
    let from = pair.hosts[0].client(Transport::Unix);
    patiently(|first| {
        let first = first + 7;
        let mut handing = from.hand_over(first.into(), "host-1", &metas(first), LAYERS)?;
        (0..LAYERS).try_for_each(|layer| produce(&handing, first, layer))?;
        let sums = handing.checksums();
        handing.finish(&sums)
    });
}

#[test]
fn a_decode_host_that_is_killed_ends_it_at_the_prefill_host() {
    let mut pair = Pair::start();
    let [from, to] = pair.clients();
    patiently(|first| {
        let mut handing = from.hand_over(first.into(), "host-1", &metas(first), LAYERS)?;
        let arrivals = to.arrivals(first.into(), LONG)?;
        produce(&handing, first, 0)?;
        has_layer(&arrivals, first, 0)?;
        pair.hosts[1].kill();
        let rest = (1..LAYERS).try_for_each(|layer| produce(&handing, first, layer));
        let sums = handing.checksums();
        let broken = rest.and_then(|()| handing.finish(&sums)).unwrap_err();
        assert!(matches!(broken, ClientError::Refused { retryable: true, .. }), "{broken}");
        drop(handing);
        let keys: Vec<BlockKey> = metas(first).iter().map(|meta| meta.key).collect();
        assert_eq!(from.exists(&keys).unwrap(), [false; BLOCKS as usize]);
        Ok(())
    });
    until("the places are back", || reservations(&pair.hosts[0]) == 0);
    let again = from.hand_over(1, "host-1", &metas(1), LAYERS).err().unwrap();
    assert!(matches!(&again, ClientError::Refused { retryable: true, .. }), "{again}");
    let n = 99;
    from.put(&BlockMeta::single(key(n), BLOCK), &content(n, BLOCK)).unwrap();
}

#[test]
fn an_engine_that_dies_gives_everything_back_on_both_hosts() {
    let pair = Pair::start();
    let [from, to] = pair.clients();
    patiently(|first| {
        let arrivals;
        {
            let dying = pair.hosts[0].client(Transport::Unix);
            let handing = dying.hand_over(first.into(), "host-1", &metas(first), LAYERS)?;
            arrivals = to.arrivals(first.into(), LONG)?;
            produce(&handing, first, 0)?;
            has_layer(&arrivals, first, 0)?;
            // As its process would end: without a word, and without the destructor's.
            std::mem::forget(handing);
        }
        let broken = arrivals.wait_layer(1, LONG).unwrap_err();
        assert!(matches!(&broken, ClientError::Refused { retryable: true, .. }), "{broken}");
        assert_eq!(reservations(&pair.hosts[1]), u64::from(BLOCKS), "while somebody reads them");
        Ok(())
    });
    until("all places are back", || pair.hosts.each_ref().map(reservations) == [0, 0]);
    drop(from);
}

#[test]
fn bad_calls_are_refused_and_the_connection_goes_on() {
    let pair = Pair::start();
    let [from, to] = pair.clients();
    let refused = |result: Result<(), ClientError>, expected: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    };
    let begin = |peer: &str, layers| from.hand_over(7, peer, &metas(0), layers).map(drop);
    refused(begin("host-9", 4), "no peer is called host-9; there are: host-1");
    refused(begin("host-1", 7), "does not consist of 7 equal layers");
    let tcp = pair.hosts[0].client(Transport::Tcp);
    refused(tcp.hand_over(7, "host-1", &metas(0), 4).map(drop), "Unix socket");
    let none = to.arrivals(4711, Duration::ZERO).map(drop);
    refused(none, "the beginning of the hand-over of request 4711 is not here yet");
    patiently(|first| {
        let mut handing = from.hand_over(first.into(), "host-1", &metas(first), LAYERS)?;
        refused(
            from.hand_over(first.into(), "host-1", &metas(500), 4).map(drop),
            "is being handed over already",
        );
        refused(handing.fill(3, 0, &part(0, 0)), "block 3, layer 0 does not exist");
        refused(handing.fill(0, 0, &[0; 5]), "block of 5 B does not match");
        produce(&handing, first, 0)?;
        refused(handing.layer_done(0), "layer 0 was handed over already");
        refused(handing.layer_done(4), "layer 4 does not exist");
        refused(handing.finish(&[1, 2, 3]), "layer 1 was not handed over yet");
        (1..LAYERS).try_for_each(|layer| produce(&handing, first, layer))?;
        let arrivals = to.arrivals(first.into(), LONG)?;
        refused(arrivals.wait_layer(4, LONG), "layer 4 does not exist");
        refused(handing.finish(&[1, 2, 3]), "did not arrive with the checksum given");
        refused(arrivals.finished(LONG).map(drop), "broke off");
        Ok(())
    });
    assert_eq!(from.exists(&[key(0)]).unwrap(), [false]);
}
