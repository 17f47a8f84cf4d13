//! Frames of every kind go and come back; other bytes are refused.

use super::*;
use crate::block::{BlockKey, BlockMeta, Pin};
use proptest::prelude::*;

fn key() -> impl Strategy<Value = BlockKey> {
    any::<u128>().prop_map(BlockKey)
}

fn keys() -> impl Strategy<Value = Vec<BlockKey>> {
    prop::collection::vec(key(), 0..20)
}

fn ids() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(any::<u64>(), 0..20)
}

fn meta() -> impl Strategy<Value = BlockMeta> {
    (key(), prop::option::of(key()), any::<(u32, u16, u32, u32)>()).prop_map(
        |(key, parent, (depth, class, ttl_ms, size))| BlockMeta {
            key,
            parent,
            depth,
            class,
            tenant: 0,
            ttl_ms,
            size,
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let pairs = prop::collection::vec(any::<(u64, u64)>(), 0..20);
    prop_oneof![
        (any::<(bool, bool)>(), any::<u16>(), ".{0,40}").prop_map(
            |((wants_write, wants_ring), tenant, namespace)| {
                let token = "t".to_owned();
                Request::Hello { versions: VERSIONS, wants_write, wants_ring, tenant, namespace, token }
            }
        ),
        keys().prop_map(Request::Exists),
        (any::<u16>(), ids(), keys()).prop_map(|(class, release, keys)| Request::Get {
            class,
            release,
            keys
        }),
        prop::collection::vec((meta(), any::<u64>()), 0..20).prop_map(Request::Put),
        prop::collection::vec(meta(), 0..20).prop_map(Request::Reserve),
        pairs.prop_map(Request::Commit),
        ids().prop_map(Request::Abort),
        ids().prop_map(Request::Release),
        keys().prop_map(Request::Remove),
        keys().prop_map(Request::Stat),
        keys().prop_map(Request::Verify),
        (any::<(bool, u32)>(), keys()).prop_map(|((hard, amount), keys)| {
            let pin = if hard { Pin::Hard { duration_ms: amount } } else { Pin::Soft { weight: amount } };
            Request::Pin { pin, keys }
        }),
        keys().prop_map(Request::Unpin),
        (any::<u32>(), keys()).prop_map(|(ms, keys)| Request::Hold { ms, keys }),
        keys().prop_map(Request::EndHold),
        keys().prop_map(Request::Evict),
        (any::<u8>(), keys()).prop_map(|(copies, keys)| Request::Replicate { copies, keys }),
        hand_over().prop_map(Request::HandOver),
        any::<(u64, u8)>().prop_map(|(bytes, copies)| Request::Place { bytes, copies }),
        any::<(u64, u32)>().prop_map(|(since, max)| Request::Removals { since, max }),
    ]
}

fn hand_over() -> impl Strategy<Value = HandOverCall> {
    let request = any::<u64>;
    let numbers = any::<(u64, u32)>;
    prop_oneof![
        (numbers(), ".{0,40}", prop::collection::vec(meta(), 0..20)).prop_map(
            |((request, layers), peer, blocks)| HandOverCall::Begin { request, layers, peer, blocks }
        ),
        numbers().prop_map(|(request, layer)| HandOverCall::LayerDone { request, layer }),
        (request(), ids()).prop_map(|(request, checksums)| HandOverCall::Finish { request, checksums }),
        request().prop_map(|request| HandOverCall::Drop { request }),
        numbers().prop_map(|(request, wait_ms)| HandOverCall::Arrivals { request, wait_ms }),
        (numbers(), prop::option::of(any::<u32>()))
            .prop_map(|((request, wait_ms), layer)| HandOverCall::Wait { request, layer, wait_ms }),
        request().prop_map(|request| HandOverCall::Leave { request }),
    ]
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop::sample::select(Outcome::VARIANTS)
}

fn failure() -> impl Strategy<Value = Outcome> {
    prop::sample::select(&Outcome::VARIANTS[1..])
}

fn reply() -> impl Strategy<Value = Reply> {
    let hit = any::<(u64, u32, u64, u64)>().prop_map(|(offset, size, checksum, lease)| Found::Hit {
        offset,
        size,
        checksum,
        lease,
    });
    let at = any::<(u64, u64)>().prop_map(|(reservation, offset)| Placed::At { reservation, offset });
    let stat = any::<(u32, u8, u64, u32, u16, u32, u32, u64, u64)>().prop_map(
        |(size, tiers, checksum, depth, class, uses, leases, age_ms, idle_ms)| Stat {
            size,
            tiers,
            checksum,
            depth,
            class,
            uses,
            leases,
            age_ms,
            idle_ms,
        },
    );
    let op = prop::sample::select(vec![
        Op::Put,
        Op::Commit,
        Op::Abort,
        Op::Release,
        Op::Remove,
        Op::Verify,
        Op::Pin,
        Op::Unpin,
        Op::Hold,
        Op::EndHold,
        Op::Evict,
        Op::Replicate,
        Op::LayerDone,
        Op::Finish,
        Op::DropHandOver,
        Op::WaitArrival,
        Op::LeaveArrivals,
    ]);
    let handed = any::<(u64, bool)>().prop_map(|(offset, to_fill)| HandedPlace { offset, to_fill });
    let arriving =
        (key(), any::<(u32, u64)>()).prop_map(|(key, (size, offset))| ArrivingBlock { key, size, offset });
    prop_oneof![
        (any::<bool>(), ".{0,40}").prop_map(|(retryable, message)| Reply::Error { retryable, message }),
        any::<((bool, bool, bool), u64, u64, u64, u64, u64)>().prop_map(
            |((shared, writable, ring), boot, pool_bytes, lease_ms, reservation_ms, payload_max)| {
                Reply::Hello {
                    shared,
                    writable,
                    ring,
                    boot,
                    pool_bytes,
                    lease_ms,
                    reservation_ms,
                    payload_max,
                }
            }
        ),
        prop::collection::vec(any::<bool>(), 0..20).prop_map(Reply::Exists),
        prop::collection::vec(prop_oneof![hit, failure().prop_map(Found::Not)], 0..20).prop_map(Reply::Get),
        prop::collection::vec(prop_oneof![at, failure().prop_map(Placed::Not)], 0..20)
            .prop_map(Reply::Reserve),
        prop::collection::vec(prop::option::of(stat), 0..20).prop_map(Reply::Stat),
        (any::<bool>(), ".{0,40}").prop_map(|(retryable, message)| Reply::Refused { retryable, message }),
        (".{0,40}", ".{0,40}").prop_map(|(node, data)| Reply::Place { node, data }),
        (any::<u64>(), prop::collection::vec(handed, 0..20))
            .prop_map(|(time_ms, places)| Reply::HandOver { time_ms, places }),
        (any::<(u64, u32)>(), prop::collection::vec(arriving, 0..20))
            .prop_map(|((time_ms, layers), blocks)| Reply::Arrivals { time_ms, layers, blocks }),
        (any::<(u64, bool)>(), keys()).prop_map(|((next, lost), keys)| Reply::Removals { next, lost, keys }),
        (op, prop::collection::vec(outcome(), 0..20)).prop_map(|(op, list)| Reply::Outcomes(op, list)),
    ]
}

fn split(frame: &[u8]) -> (Header, &[u8]) {
    let (header, body) = frame.split_first_chunk().unwrap();
    (Header::decode(header).unwrap(), body)
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(request in request(), reply in reply(), id: u64, payload: u64) {
        let mut frame = Vec::new();
        request.encode(id, payload, &mut frame);
        let (header, body) = split(&frame);
        let body_len = body.len() as u32;
        prop_assert_eq!(header, Header { version: request.op().since(), op: request.op(), reply: false, request: id, body_len, payload_len: payload });
        prop_assert_eq!(Request::decode(header.op, body).unwrap(), request);
        reply.encode(id, payload, &mut frame);
        let (header, body) = split(&frame);
        prop_assert!(header.reply);
        prop_assert_eq!(Reply::decode(header.op, body).unwrap(), reply);
    }

    /// Damaged frames never panic, and every cut one is refused.
    #[test]
    fn damage_is_refused_or_harmless(
        request in request(), reply in reply(),
        at: prop::sample::Index, byte: u8, noise in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut frame = Vec::new();
        for is_reply in [false, true] {
            if is_reply { reply.encode(1, 0, &mut frame) } else { request.encode(1, 0, &mut frame) }
            let (header, body) = split(&frame);
            if !body.is_empty() {
                let cut = &body[..at.index(body.len())];
                let refused = if is_reply { Reply::decode(header.op, cut).is_err() } else { Request::decode(header.op, cut).is_err() };
                prop_assert!(refused);
            }
            let position = at.index(frame.len());
            frame[position] = byte;
            if let Ok(header) = Header::decode(frame.first_chunk().unwrap()) {
                let _ = Request::decode(header.op, &frame[HEADER_LEN..]);
                let _ = Reply::decode(header.op, &frame[HEADER_LEN..]);
            }
        }
        for &op in Op::VARIANTS {
            let _ = Request::decode(op, &noise);
            let _ = Reply::decode(op, &noise);
        }
    }
}

#[test]
fn operations_keep_their_numbers_and_names() {
    let expected = "error hello exists get put reserve commit abort release remove stat verify pin unpin evict \
                    replicate refused hand-over layer-done finish drop-hand-over arrivals wait-arrival \
                    leave-arrivals place hold end-hold removals";
    let names = (0..=u8::MAX).map_while(Op::from_repr).map(Op::name);
    assert_eq!(names.collect::<Vec<_>>(), expected.split(' ').collect::<Vec<_>>());
    assert_eq!(expected.split(' ').count(), Op::VARIANTS.len());
}

fn hello(lowest: u8, highest: u8) -> Vec<u8> {
    let versions = Versions { lowest, highest };
    let (namespace, token) = ("n".to_owned(), String::new());
    let hello =
        Request::Hello { versions, wants_write: true, wants_ring: false, tenant: 3, namespace, token };
    let mut frame = Vec::new();
    hello.encode(7, 0, &mut frame);
    frame
}

/// Sides of any two releases exchange these, so they stay as they are.
#[test]
fn what_is_said_before_a_version_is_agreed_on_keeps_its_bytes() {
    let header = |version: u8, op: u8, reply: u8, id: u8, len: u8| {
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(b"KVSR");
        [bytes[4], bytes[5], bytes[6], bytes[8], bytes[16]] = [version, op, reply, id, len];
        bytes
    };
    let body = [6, 9, 1, 0, 3, 0, 1, 0, b'n', 0, 0];
    assert_eq!(hello(6, 9), [&header(VERSIONS.lowest, 1, 0, 7, 11)[..], &body].concat());
    let mut frame = Vec::new();
    Reply::Error { retryable: true, message: "no".into() }.encode(7, 0, &mut frame);
    assert_eq!(frame, [&header(VERSIONS.lowest, 0, 1, 7, 5)[..], &[1, 2, 0, b'n', b'o']].concat());
}

#[test]
fn two_releases_speak_what_both_know_or_say_what_each_does() {
    let (lowest_own, own) = (VERSIONS.lowest, VERSIONS.highest);
    let ask = |lowest, highest| Request::decode(Op::Hello, &hello(lowest, highest)[HEADER_LEN..]);
    for (lowest, highest) in [(own, own), (lowest_own, lowest_own), (1, own), (own, 200), (0, 255)] {
        assert!(ask(lowest, highest).is_ok(), "{lowest} to {highest}");
    }
    for (lowest, highest) in [(own + 1, 200), (1, lowest_own - 1), (200, 1)] {
        let text = ask(lowest, highest).unwrap_err().to_string();
        let expected = format!("speaks data protocol {lowest} to {highest}, this host {lowest_own} to {own}");
        assert!(text.contains(&expected), "{text}");
    }
    // A newer client's hello has another version in its header, and more behind what is known here.
    let mut newer = hello(own, own + 3);
    newer[4] = own + 3;
    newer.extend(b"more");
    let (header, body) = newer.split_first_chunk().unwrap();
    assert_eq!(Header::decode(header).unwrap().op, Op::Hello);
    assert_eq!(Request::decode(Op::Hello, body), ask(own, own + 3));
    // A newer host's refusal is understood, and nothing else that it says.
    let check = |op, reply, understood| {
        let mut bytes = Header { version: own, op, reply, request: 0, body_len: 0, payload_len: 0 }.encode();
        bytes[4] = own + 3;
        assert_eq!(Header::decode(&bytes).is_ok(), understood, "{op:?}");
    };
    check(Op::Error, true, true);
    check(Op::Error, false, false);
    check(Op::Hello, true, false);
    check(Op::Get, false, false);
}

#[test]
fn bad_headers_say_what_is_wrong() {
    let good =
        Header { version: VERSION, op: Op::Get, reply: false, request: 1, body_len: 8, payload_len: 0 }
            .encode();
    let check = |at: usize, value: u8, expected: &str| {
        let mut bytes = good;
        bytes[at] = value;
        let text = Header::decode(&bytes).map_or_else(|error| error.to_string(), |_| "fine".into());
        assert!(text.contains(expected), "{text}");
    };
    check(0, b'K', "fine");
    check(0, b'G', "not a Kvasir data connection");
    check(4, 9, "speaks data protocol 9");
    check(5, 200, "operation 200");
    check(7, 1, "flags 0x100");
    check(18, 255, "above the limit");
    check(20, 1, "no meaning");
}

#[test]
fn a_batch_beyond_the_limit_is_refused_before_it_is_read() {
    let body = (BATCH_MAX as u32 + 1).to_le_bytes();
    assert_eq!(Request::decode(Op::Exists, &body), Err(WireError::Batch { len: 4097 }));
    let mut frame = Vec::new();
    let meta = BlockMeta::single(BlockKey(1), 1);
    Request::Put(vec![(meta, 0); BATCH_MAX]).encode(0, 0, &mut frame);
    assert!(frame.len() - HEADER_LEN <= BODY_MAX);
}

#[test]
fn what_stands_for_bytes_that_are_no_text_is_no_longer_than_a_text() {
    let body = [&[0][..], &1024_u16.to_le_bytes(), &[0xff; 1024]].concat();
    let message = "\u{fffd}".repeat(341);
    assert_eq!(Reply::decode(Op::Error, &body), Ok(Reply::Error { retryable: false, message }));
}
