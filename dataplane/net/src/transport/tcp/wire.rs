//! The frames of an authenticated connection.
//!
//! A frame is a 32-byte header, a body of at most [`BODY_MAX`] bytes that describes something, and for `Write` and
//! `Data` a payload: the bytes that move, straight from and to registered memory. Little-endian.
//!
//! ```text
//! 0 magic "KVTF" · 4 kind u8 · 5 code u8 · 6 flags u16 (bit 0: crc is set) · 8 request u64
//! 16 body length u32 · 20 crc32 of the payload u32 · 24 payload length u64
//! ```
//!
//! The client asks (`Open`, `Read`, `Write`, `Notice`, `Ping`), the server answers each but `Notice`, in the order of
//! the questions (`Grant`, `Data`, `Ack`, `Pong`). An answer with a code other than 0 is a refusal without body or
//! payload. A frame that does not decode ends the connection.

use crate::transport::grant::{Access, Granted, NAME_MAX, REGIONS_MAX, RemoteRegion};
use crate::transport::node::NOTICE_MAX;
use crate::transport::op::{Op, overlap};
use crate::transport::{Grant, RemoteRange};
use kvasir_memory::region::Location;
use kvasir_os::time::{Duration, Instant};

const MAGIC: [u8; 4] = *b"KVTF";
/// Bytes of a header.
pub const HEADER_LEN: usize = 32;
const CRC: u16 = 1;
/// The most ranges of one operation.
pub const RANGES_MAX: usize = 1024;
/// The most bytes of one operation.
pub const PAYLOAD_MAX: u64 = 1 << 30;
const RANGE_LEN: usize = 20;
const REGION_LEN: usize = 11;
const GRANT_HEAD: usize = 33;
/// The longest body: a notice or a grant.
pub const BODY_MAX: usize = {
    let grant = GRANT_HEAD + REGIONS_MAX * REGION_LEN;
    if grant > NOTICE_MAX { grant } else { NOTICE_MAX }
};
/// The code of an answer to a write whose bytes did not match their checksum.
pub(in crate::transport) const CODE_CHECKSUM: u8 = 255;

/// A frame that makes no sense. The connection ends: the two sides no longer agree where a frame starts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("a frame starts with {0:02x?}")]
    Magic([u8; 4]),
    #[error("frame kind {0} is not known here")]
    Kind(u8),
    #[error("{field} of {value} is above the limit of {max}")]
    TooLong { field: &'static str, value: u64, max: u64 },
    #[error("the body of a {0:?} frame makes no sense")]
    Body(Kind),
    #[error("an answer of {0:?} to a question that was not asked")]
    Unasked(Kind),
}

/// What a frame is. Numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Kind {
    Open = 1,
    Read = 2,
    Write = 3,
    Notice = 4,
    Ping = 5,
    Grant = 6,
    Data = 7,
    Ack = 8,
    Pong = 9,
}

impl Kind {
    fn has_payload(self) -> bool {
        matches!(self, Self::Write | Self::Data)
    }
}

/// How a frame begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    /// 0, or why an answer is a refusal.
    pub code: u8,
    pub request: u64,
    pub body_len: u32,
    pub payload_len: u64,
    pub crc: Option<u32>,
}

impl Header {
    /// The header of a frame without body and payload.
    pub fn new(kind: Kind, request: u64) -> Self {
        Self { kind, code: 0, request, body_len: 0, payload_len: 0, crc: None }
    }

    /// The bytes of the header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.code;
        bytes[6..8].copy_from_slice(&(if self.crc.is_some() { CRC } else { 0 }).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.crc.unwrap_or(0).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes
    }

    /// # Errors
    /// The bytes are no header, or announce more than a frame may have.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        let magic = reader.array().unwrap_or_default();
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        let (number, code) = (reader.u8().unwrap_or(0), reader.u8().unwrap_or(0));
        let kind = Kind::from_repr(number).ok_or(WireError::Kind(number))?;
        let flags = reader.u16().unwrap_or(0);
        let (request, body_len) = (reader.u64().unwrap_or(0), reader.u32().unwrap_or(0));
        let (crc, payload_len) = (reader.u32().unwrap_or(0), reader.u64().unwrap_or(0));
        let limit = |field, value, max| {
            if value > max { Err(WireError::TooLong { field, value, max }) } else { Ok(()) }
        };
        limit("body", body_len.into(), BODY_MAX as u64)?;
        limit("payload", payload_len, if kind.has_payload() { PAYLOAD_MAX } else { 0 })?;
        if flags & !CRC != 0 || (code != 0 && (body_len != 0 || payload_len != 0)) {
            return Err(WireError::Body(kind));
        }
        Ok(Self { kind, code, request, body_len, payload_len, crc: (flags & CRC != 0).then_some(crc) })
    }
}

/// Adds the frame that asks for a read, or announces a write, of `op`.
pub fn encode_op(to: &mut Vec<u8>, header: Header, op: &Op) {
    let body_len = 16 + op.remote.len() * RANGE_LEN;
    to.reserve(HEADER_LEN + body_len);
    to.extend(Header { body_len: body_len as u32, ..header }.encode());
    to.extend(op.grant.key.to_le_bytes());
    to.extend(op.grant.epoch.to_le_bytes());
    for range in &op.remote {
        to.extend(range.region.to_le_bytes());
        to.extend(range.offset.to_le_bytes());
        to.extend(range.len.to_le_bytes());
    }
}

/// What a peer wants to read or write.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    pub key: u64,
    pub epoch: u64,
    pub ranges: Vec<RemoteRange>,
    /// Bytes of all ranges.
    pub len: u64,
}

/// # Errors
/// [`WireError::Body`]: no ranges or too many of them, too many bytes, or a write whose ranges overlap or do not match its payload.
pub fn decode_op(header: &Header, body: &[u8]) -> Result<Asked, WireError> {
    let broken = WireError::Body(header.kind);
    let mut reader = Reader(body);
    let (Some(key), Some(epoch)) = (reader.u64(), reader.u64()) else { return Err(broken) };
    let count = reader.0.len() / RANGE_LEN;
    if count == 0 || count > RANGES_MAX || !reader.0.len().is_multiple_of(RANGE_LEN) {
        return Err(broken);
    }
    let mut asked = Asked { key, epoch, ranges: Vec::with_capacity(count), len: 0 };
    while let (Some(region), Some(offset), Some(len)) = (reader.u32(), reader.u64(), reader.u64()) {
        asked.ranges.push(RemoteRange { region, offset, len });
        asked.len = asked.len.checked_add(len).filter(|&len| len <= PAYLOAD_MAX).ok_or(broken.clone())?;
    }
    // Which of its bytes a place then holds would depend on the order in which the kernel fills them.
    let sound = header.kind != Kind::Write || (asked.len == header.payload_len && !overlap(&asked.ranges));
    if sound { Ok(asked) } else { Err(broken) }
}

/// Adds the answer to an `Open`.
pub(in crate::transport) fn encode_grant(to: &mut Vec<u8>, request: u64, granted: &Granted) {
    let body_len = (GRANT_HEAD + granted.regions.len() * REGION_LEN) as u32;
    to.extend(Header { body_len, ..Header::new(Kind::Grant, request) }.encode());
    to.extend(granted.key.to_le_bytes());
    to.extend(granted.epoch.to_le_bytes());
    to.push(granted.access as u8);
    let lease = granted.expires.saturating_duration_since(Instant::now());
    to.extend((lease.as_nanos().min(u128::from(u64::MAX)) as u64).to_le_bytes());
    to.extend((granted.regions.len() as u64).to_le_bytes());
    for region in granted.regions.iter() {
        let (kind, number) = match region.location() {
            Location::Cpu(node) => (0, node),
            Location::Cuda(device) => (1, device),
        };
        to.extend(region.len().to_le_bytes());
        to.push(kind);
        to.extend(number.to_le_bytes());
    }
}

/// `now` is when the grant was asked for: the lease is counted from then, so that it never ends later here than there.
pub fn decode_grant(segment: &str, now: Instant, body: &[u8]) -> Result<Grant, WireError> {
    parse_grant(segment, now, body).ok_or(WireError::Body(Kind::Grant))
}

fn parse_grant(segment: &str, now: Instant, body: &[u8]) -> Option<Grant> {
    /// Longer leases are cut to this, so that no peer can make clocks overflow.
    const LEASE_MAX: Duration = Duration::from_secs(100 * 365 * 86_400);
    let mut reader = Reader(body);
    let (key, epoch) = (reader.u64()?, reader.u64()?);
    let access = Access::from_repr(reader.u8()?)?;
    let lease = Duration::from_nanos(reader.u64()?).min(LEASE_MAX);
    let count = usize::try_from(reader.u64()?).ok()?;
    if count > REGIONS_MAX || reader.0.len() != count * REGION_LEN {
        return None;
    }
    let mut regions = Vec::with_capacity(count);
    while let Some(len) = reader.u64() {
        let location = match (reader.u8()?, reader.u16()?) {
            (0, node) => Location::Cpu(node),
            (1, device) => Location::Cuda(device),
            _ => return None,
        };
        regions.push(RemoteRegion { len, location, address: 0, key: 0 });
    }
    let expires = now.checked_add(lease)?;
    Some(Grant { segment: segment.to_owned(), key, epoch, access, expires, regions })
}

pub(in crate::transport) fn encode_named(to: &mut Vec<u8>, kind: Kind, request: u64, body: &[u8]) {
    to.extend(Header { body_len: body.len() as u32, ..Header::new(kind, request) }.encode());
    to.extend(body);
}

/// The name of the segment to open.
///
/// # Errors
/// [`WireError::Body`]: it is empty, too long or no text.
pub fn decode_segment(body: &[u8]) -> Result<&str, WireError> {
    let name = std::str::from_utf8(body).ok().filter(|name| !name.is_empty() && name.len() <= NAME_MAX);
    name.ok_or(WireError::Body(Kind::Open))
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::transport::{Direction, Exports};
    use kvasir_memory::buffer::Buffer;
    use kvasir_memory::region::Region;

    #[test]
    fn frames_read_as_they_were_written() {
        let exports = Exports::new(9);
        let region = Region::of_buffer(Buffer::zeroed(4096));
        let regions = vec![region.clone(), region.clone()];
        exports.export("kv", regions, Access::ReadWrite, Duration::from_secs(60)).unwrap();
        let granted = exports.grant("kv", "peer").unwrap();
        let mut bytes = Vec::new();
        encode_grant(&mut bytes, 5, &granted);
        let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(
            (header.kind, header.request, header.body_len as usize),
            (Kind::Grant, 5, bytes.len() - 32)
        );
        let now = Instant::now();
        let grant = decode_grant("kv", now, &bytes[32..]).unwrap();
        let expected = granted.describe();
        assert!(grant.expires > now && grant.expires <= now + Duration::from_secs(60));
        assert_eq!(Grant { expires: expected.expires, ..grant.clone() }, expected);

        let remote = vec![grant.range(1, 2), RemoteRange { region: 1, offset: 3, len: 4 }];
        let local = vec![region.range(0, 6).unwrap()];
        let op =
            Op { id: 0, direction: Direction::Write, grant: Arc::new(grant), local, remote, cancel: None };
        let mut bytes = Vec::new();
        let header = Header { payload_len: 6, crc: Some(7), ..Header::new(Kind::Write, 8) };
        encode_op(&mut bytes, header, &op);
        let decoded = Header::decode(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(decoded, Header { body_len: decoded.body_len, ..header });
        let asked = decode_op(&decoded, &bytes[32..]).unwrap();
        assert_eq!((asked.key, asked.epoch, asked.ranges, asked.len), (granted.key, 9, op.remote, 6));
    }

    #[test]
    fn the_layout_is_fixed() {
        let exports = Exports::new(0x0908);
        let region = Region::of_buffer(Buffer::zeroed(0x1234));
        exports.export("kv", vec![region.clone()], Access::Read, Duration::from_secs(1)).unwrap();
        let granted = exports.grant("kv", "peer").unwrap();
        let mut frame = Vec::new();
        encode_grant(&mut frame, 0x0102, &granted);
        let head = b"KVTF\x06\0\0\0\x02\x01\0\0\0\0\0\0\x2c\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let Location::Cpu(node) = region.location() else { panic!("a buffer is in memory of the host") };
        let body = [&granted.key.to_le_bytes()[..], &[8, 9, 0, 0, 0, 0, 0, 0, granted.access as u8]].concat();
        let tail =
            [&[1, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 0, 0, 0][..], &node.to_le_bytes()].concat();
        // Between them is what is left of the lease.
        let (lease, rest) = frame[32 + 17..].split_first_chunk().unwrap();
        assert!((1..=1_000_000_000).contains(&u64::from_le_bytes(*lease)));
        assert_eq!((&frame[..32], &frame[32..32 + 17], rest), (&head[..], &body[..], &tail[..]));

        let remote = vec![RemoteRange { region: 0x0102, offset: 0x0304, len: 6 }];
        let (grant, local) = (Arc::new(granted.describe()), vec![region.range(0, 6).unwrap()]);
        let op = Op { id: 0, direction: Direction::Write, grant, local, remote, cancel: None };
        let header = Header { payload_len: 6, crc: Some(0x0a0b_0c0d), ..Header::new(Kind::Write, 8) };
        let mut frame = Vec::new();
        encode_op(&mut frame, header, &op);
        let head = b"KVTF\x03\0\x01\0\x08\0\0\0\0\0\0\0\x24\0\0\0\x0d\x0c\x0b\x0a\x06\0\0\0\0\0\0\0";
        let range = b"\x08\x09\0\0\0\0\0\0\x02\x01\0\0\x04\x03\0\0\0\0\0\0\x06\0\0\0\0\0\0\0";
        assert_eq!(frame, [&head[..], &granted.key.to_le_bytes(), range].concat());
    }

    #[test]
    fn limits_hold() {
        let header = |kind, body_len, payload_len| Header { body_len, payload_len, ..Header::new(kind, 1) };
        let check = |header: Header| Header::decode(&header.encode());
        assert!(matches!(check(header(Kind::Write, 36, PAYLOAD_MAX + 1)), Err(WireError::TooLong { .. })));
        assert!(matches!(check(header(Kind::Read, 36, 1)), Err(WireError::TooLong { .. })));
        assert!(matches!(check(header(Kind::Open, u32::MAX, 0)), Err(WireError::TooLong { .. })));
        assert!(check(header(Kind::Data, 0, PAYLOAD_MAX)).is_ok());
        let read = header(Kind::Read, 0, 0);
        for len in [0, 15, 16, 35, 37, 16 + 20 * (RANGES_MAX + 1)] {
            assert_eq!(decode_op(&read, &vec![0; len]), Err(WireError::Body(Kind::Read)), "{len}");
        }
        let huge =
            [&[0; 16][..], &[0; 12], &u64::MAX.to_le_bytes(), &[0; 12], &u64::MAX.to_le_bytes()].concat();
        assert_eq!(decode_op(&read, &huge), Err(WireError::Body(Kind::Read)));
        assert!(decode_segment(&[b'a'; NAME_MAX + 1]).is_err() && decode_segment(b"").is_err());
    }

    proptest! {
        /// No bytes make a decoder panic or allocate beyond its limits; what decodes encodes to the same again.
        #[test]
        fn any_header_decodes_or_fails(mut bytes: [u8; HEADER_LEN], kind in 0u8..12, small: bool) {
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4] = kind;
            if small {
                bytes[6..8].fill(0);
                bytes[20..24].fill(0);
                bytes[26..32].fill(0);
                bytes[18..20].fill(0);
            }
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.body_len as usize <= BODY_MAX && header.payload_len <= PAYLOAD_MAX);
                prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
        }

        #[test]
        fn any_body_decodes_or_fails(body in prop::collection::vec(any::<u8>(), 0..400), payload in 0u64..1000) {
            let mut header = Header::new(Kind::Write, 1);
            header.payload_len = payload;
            if let Ok(asked) = decode_op(&header, &body) {
                prop_assert_eq!(asked.len, payload);
            }
            let grant = decode_grant("kv", Instant::now(), &body);
            prop_assert!(grant.is_err() || body.len() >= GRANT_HEAD);
            let _ = decode_segment(&body);
        }

        /// A write that names a byte twice does not decode; every other one does, in whatever order its ranges come.
        #[test]
        fn writes_that_name_a_byte_twice_are_refused(
            ranges in prop::collection::vec((0u32..3, 0u64..40, 1u64..8), 1..8),
        ) {
            let mut body = vec![0; 16];
            for &(region, offset, len) in &ranges {
                body.extend(region.to_le_bytes().into_iter().chain(offset.to_le_bytes()).chain(len.to_le_bytes()));
            }
            let mut seen = std::collections::HashSet::new();
            let bytes = |&(region, offset, len): &(u32, u64, u64)| (offset..offset + len).map(move |at| (region, at));
            let once = ranges.iter().flat_map(bytes).all(|byte| seen.insert(byte));
            let len = ranges.iter().map(|(_, _, len)| len).sum();
            let write = Header { payload_len: len, ..Header::new(Kind::Write, 1) };
            prop_assert_eq!(decode_op(&write, &body).is_ok(), once);
            prop_assert!(decode_op(&Header::new(Kind::Read, 1), &body).is_ok(), "reading twice harms nobody");
        }

        /// One changed byte of a good grant never breaks its limits.
        #[test]
        fn mutated_grants(at in 0usize..100, to: u8) {
            let exports = Exports::new(1);
            let regions = (0..3).map(|n| Region::of_buffer(Buffer::zeroed(n + 1))).collect();
            exports.export("kv", regions, Access::Read, Duration::from_secs(1)).unwrap();
            let mut bytes = Vec::new();
            encode_grant(&mut bytes, 1, &exports.grant("kv", "peer").unwrap());
            let len = bytes.len();
            bytes[at % len] = to;
            if let Ok(grant) = decode_grant("kv", Instant::now(), &bytes[HEADER_LEN..]) {
                prop_assert_eq!(grant.regions.len(), 3);
            }
        }
    }
}
