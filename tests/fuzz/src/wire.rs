//! The data protocol between clients and a host: the body of a request (`q`) or of an answer (`a`) with its operation in front,
//! a header (`h`), what a host is sent on its socket (`s`, as it is; `f`, framed), and a ring in shared memory (`r`).

mod host;
mod ring;

use crate::kind;
use kvasir_dataplane::wire::{BODY_MAX, HEADER_LEN, Header, Op, Reply, Request, VERSIONS, WireError};
use std::fmt::Debug;

/// The longest text of a frame.
const TEXT_MAX: usize = 1024;

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b'q', body)) => with_op(body, request),
        Some((b'a', body)) => with_op(body, reply),
        Some((b'h', bytes)) => header(bytes),
        Some((b's', bytes)) => host::run(bytes, false),
        Some((b'f', bytes)) => host::run(bytes, true),
        Some((b'r', steps)) => ring::run(steps),
        _ => {}
    }
}

fn with_op(data: &[u8], check: fn(Op, &[u8])) {
    let Some((&op, body)) = data.split_first() else { return };
    if let Some(op) = Op::from_repr(op) {
        check(op, body);
    }
}

fn request(op: Op, body: &[u8]) {
    let request = match Request::decode(op, body) {
        Ok(request) => request,
        Err(refusal) => return refused(&refusal),
    };
    assert_eq!(request.op(), op);
    let encode = |request: &Request, frame: &mut Vec<u8>| request.encode(7, 0, frame);
    again(&request, false, encode, Request::decode);
    let mut owned = request.clone();
    owned.belong_to(5);
    assert_eq!(owned.op(), op);
    if let Request::Hello { namespace, token, versions, .. } = request {
        assert!(namespace.len() <= TEXT_MAX && token.len() <= TEXT_MAX);
        assert!(versions.common(VERSIONS).is_some());
    }
}

fn reply(op: Op, body: &[u8]) {
    let reply = match Reply::decode(op, body) {
        Ok(reply) => reply,
        Err(refusal) => return refused(&refusal),
    };
    assert_eq!(reply.op(), op);
    again(&reply, true, |reply, frame| reply.encode(7, 0, frame), Reply::decode);
    if let Reply::Error { message, .. } | Reply::Refused { message, .. } = reply {
        assert!(message.len() <= TEXT_MAX);
    }
}

/// What was read is written, and reads as the same.
fn again<M: PartialEq + Debug>(
    message: &M,
    is_reply: bool,
    encode: impl Fn(&M, &mut Vec<u8>),
    decode: impl Fn(Op, &[u8]) -> Result<M, WireError>,
) {
    let (mut frame, mut second) = (Vec::new(), Vec::new());
    encode(message, &mut frame);
    let (head, body) = frame.split_first_chunk::<HEADER_LEN>().expect("a header");
    let header = Header::decode(head).expect("what is written reads");
    assert_eq!((header.reply, header.request, header.payload_len), (is_reply, 7, 0));
    assert_eq!(header.body_len as usize, body.len());
    assert!(body.len() <= BODY_MAX);
    let read = decode(header.op, body).expect("what is written reads");
    assert_eq!(&read, message);
    encode(&read, &mut second);
    assert_eq!(second, frame);
}

fn header(bytes: &[u8]) {
    let Ok(bytes) = bytes.try_into() else { return };
    match Header::decode(bytes) {
        Ok(header) => {
            assert!(header.body_len as usize <= BODY_MAX);
            assert_eq!(header.encode(), *bytes);
        }
        Err(refusal) => refused(&refusal),
    }
}

fn refused(refusal: &WireError) {
    crate::text::told(refusal);
}
