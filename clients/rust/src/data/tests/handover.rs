//! Hand-overs call by call, and the moments after which a place may be another's.

use super::pair::{LAYERS, LONG, Pair};
use super::*;

const LAYER: usize = 1024;

fn block() -> BlockMeta {
    BlockMeta::single(key(1), LAYERS * LAYER as u32)
}

/// Clients on both hosts.
fn clients(pair: &Pair) -> [Client; 2] {
    pair.nodes.each_ref().map(|node| Client::connect(&node.host.unix(), options()).unwrap())
}

/// What lies in the pool of the first host.
fn bytes_at(pair: &Pair, offset: u64, len: usize) -> Vec<u8> {
    pair.nodes[0].host.store.pool().mapping().bytes(offset, len as u64).unwrap().to_vec()
}

#[test]
fn nothing_is_filled_once_the_time_is_over() {
    let pair = Pair::start();
    let [prefill, _] = clients(&pair);
    let mut handing = prefill.hand_over(1, "host-1", &[block()], LAYERS).unwrap();
    let at = handing.place(0).unwrap();
    handing.fill(0, 0, &[7; LAYER]).unwrap();
    handing.until = Instant::now();
    assert!(matches!(handing.fill(0, 0, &[8; LAYER]), Err(ClientError::TooLate { request: 1 })));
    assert!(bytes_at(&pair, at, LAYER) == [7; LAYER], "by now it may be another's place");
}

/// Tries until one fill begins before its time is over and ends after, which the bytes that it wrote tell.
#[test]
fn a_fill_that_began_in_time_and_ends_too_late_is_an_error() {
    const SIZE: u32 = 16 << 20;
    let pair = Pair::start();
    let [prefill, _] = clients(&pair);
    let large = BlockMeta::single(key(1), SIZE);
    let mut handing = prefill.hand_over(1, "host-1", &[large], 1).unwrap();
    let last = handing.place(0).unwrap() + u64::from(SIZE) - 1;
    let mut bytes = vec![0; SIZE as usize];
    let found = (1..=1000).any(|round| {
        let mark = (round % 251) as u8;
        bytes.fill(mark);
        handing.until = Instant::now() + Duration::from_micros(10 * round);
        let late = matches!(handing.fill(0, 0, &bytes), Err(ClientError::TooLate { .. }));
        late && bytes_at(&pair, last, 1) == [mark]
    });
    assert!(found, "each fill that wrote its bytes was called good");
}

#[test]
fn a_layer_is_not_read_over_a_connection_that_has_ended() {
    let mut pair = Pair::start();
    let [prefill, decode] = clients(&pair);
    let [_, other] = clients(&pair);
    let handing = prefill.hand_over(1, "host-1", &[block()], LAYERS).unwrap();
    handing.fill(0, 0, &[7; LAYER]).unwrap();
    handing.layer_done(0).unwrap();
    let [here, elsewhere] = [&decode, &other].map(|client| {
        let arrivals = client.arrivals(1, LONG).unwrap();
        arrivals.wait_layer(0, LONG).unwrap();
        assert_eq!(arrivals.layer(0, 0).unwrap(), [7; LAYER][..]);
        arrivals
    });
    let is_gone = |arrivals: &Arrivals<'_>| {
        let key = block().key;
        matches!(arrivals.layer(0, 0), Err(ClientError::LenderGone { key: gone }) if gone == key)
    };
    {
        // A call is under way, and has just found out.
        let _turn = other.wire.lock();
        other.disown();
        assert!(is_gone(&elsewhere));
    }
    // No call has met it yet.
    assert!(!is_gone(&here));
    pair.nodes[1].stop();
    assert!(is_gone(&here));
}
