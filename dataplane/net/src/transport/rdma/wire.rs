//! What is said on the control stream of a connection, once both sides are connected.
//!
//! A frame is 8 bytes, `kind u8 · code u8 · reserved u16 · body length u32`, and a body. Little-endian. The client
//! asks (`Open`, `Notice`, `Ping`); the server answers `Open` and `Ping` in order (`Grant`, `Pong`). A `Grant` with a
//! code other than 0 is a refusal without body. A frame that does not decode ends the connection.

use std::io::{self, Read};

use super::memory::MemoryRegion;
use crate::transport::grant::{Access, Granted, REGIONS_MAX, RemoteRegion};
use crate::transport::node::NOTICE_MAX;
use crate::transport::{Denied, Grant};
use kvasir_memory::region::Location;
use kvasir_os::time::{Duration, Instant};
use std::sync::Arc;

const HEADER_BYTES: usize = 8;
const GRANT_HEAD: usize = 25;
const REGION_BYTES: usize = 23;
const BODY_MAX: usize = {
    let grant = GRANT_HEAD + REGIONS_MAX * REGION_BYTES;
    if grant > NOTICE_MAX { grant } else { NOTICE_MAX }
};
/// Longer leases are cut to this, so that no peer can make clocks overflow.
const LEASE_MAX: Duration = Duration::from_secs(100 * 365 * 86_400);

/// What a frame is. Numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Kind {
    Open = 1,
    Notice = 2,
    Ping = 3,
    Grant = 4,
    Pong = 5,
}

/// One frame of the control stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub code: u8,
    pub body: Vec<u8>,
}

impl Frame {
    pub(super) fn new(kind: Kind, body: &[u8]) -> Self {
        Self { kind, code: 0, body: body.to_vec() }
    }

    pub(super) fn refusal(denied: Denied) -> Self {
        Self { kind: Kind::Grant, code: denied as u8, body: Vec::new() }
    }

    /// The bytes of the frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind as u8, self.code, 0, 0];
        bytes.extend((self.body.len() as u32).to_le_bytes());
        bytes.extend(&self.body);
        bytes
    }

    /// The first frame of `bytes` and its length, or `None` if it is not all there yet.
    fn decode(bytes: &[u8]) -> io::Result<Option<(Self, usize)>> {
        let Some((&[kind, code, a, b, c, d, e, f], rest)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let known = Kind::from_repr(kind);
        let len = u32::from_le_bytes([c, d, e, f]) as usize;
        let Some(kind) = known.filter(|_| [a, b] == [0; 2] && len <= BODY_MAX && (code == 0 || len == 0))
        else {
            let text = format!("the peer sent a frame of kind {kind}, code {code}, {len} B");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        };
        let body = rest.get(..len).map(<[u8]>::to_vec);
        Ok(body.map(|body| (Self { kind, code, body }, HEADER_BYTES + len)))
    }
}

/// Frames out of a stream, across reads that time out in the middle of one.
#[derive(Default)]
pub struct Inbox(Vec<u8>);

impl Inbox {
    /// The next frame, or `None` if the stream's read timeout passed first.
    pub fn next(&mut self, stream: &mut impl Read) -> io::Result<Option<Frame>> {
        let mut chunk = [0; 4096];
        loop {
            if let Some((frame, len)) = Frame::decode(&self.0)? {
                self.0.drain(..len);
                return Ok(Some(frame));
            }
            match stream.read(&mut chunk) {
                Ok(0) => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "its connection ended"));
                }
                Ok(count) => self.0.extend(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// What a client needs to use a grant: `regions` are the granted ones as this connection's adapter knows them.
pub(super) fn encode_grant(granted: &Granted, regions: &[Arc<MemoryRegion>]) -> Frame {
    let mut body = Vec::with_capacity(GRANT_HEAD + regions.len() * REGION_BYTES);
    body.extend(granted.key.to_le_bytes());
    body.extend(granted.epoch.to_le_bytes());
    body.push(granted.access as u8);
    let lease = granted.expires.saturating_duration_since(Instant::now());
    body.extend((lease.as_nanos().min(u128::from(u64::MAX)) as u64).to_le_bytes());
    for (region, registered) in granted.regions.iter().zip(regions) {
        let (kind, number) = match region.location() {
            Location::Cpu(node) => (0, node),
            Location::Cuda(device) => (1, device),
        };
        body.extend(region.len().to_le_bytes());
        body.extend(registered.address().to_le_bytes());
        body.extend(registered.remote_key().to_le_bytes());
        body.push(kind);
        body.extend(number.to_le_bytes());
    }
    Frame::new(Kind::Grant, &body)
}

/// `asked` is when the grant was asked for: the lease is counted from then, so that it never ends later here than
/// there. Returns `None` if the body makes no sense.
pub fn decode_grant(segment: &str, asked: Instant, body: &[u8]) -> Option<Grant> {
    let mut rest = body;
    let (key, epoch) = (u64::from_le_bytes(take(&mut rest)?), u64::from_le_bytes(take(&mut rest)?));
    let [access] = take(&mut rest)?;
    let access = Access::from_repr(access)?;
    let lease = Duration::from_nanos(u64::from_le_bytes(take(&mut rest)?)).min(LEASE_MAX);
    let expires = asked.checked_add(lease)?;
    let mut regions = Vec::with_capacity(rest.len() / REGION_BYTES);
    while !rest.is_empty() {
        let len = u64::from_le_bytes(take(&mut rest)?);
        let address = u64::from_le_bytes(take(&mut rest)?);
        let key = u32::from_le_bytes(take(&mut rest)?).into();
        let [kind] = take(&mut rest)?;
        let number = u16::from_le_bytes(take(&mut rest)?);
        let location = match kind {
            0 => Location::Cpu(number),
            1 => Location::Cuda(number),
            _ => return None,
        };
        // The way to the adapter adds offsets to addresses.
        address.checked_add(len)?;
        regions.push(RemoteRegion { len, location, address, key });
    }
    Some(Grant { segment: segment.to_owned(), key, epoch, access, expires, regions })
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Gives its bytes out in pieces, with a timeout between them.
    struct Drip<'a>(&'a [u8], bool);

    impl Read for Drip<'_> {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 && !self.0.is_empty() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let count = self.0.len().min(3);
            self.0.read(&mut to[..count])
        }
    }

    #[test]
    fn frames_survive_timeouts_in_their_middle() {
        let frames = [
            Frame::new(Kind::Open, b"kv"),
            Frame::refusal(Denied::NoSegment),
            Frame::new(Kind::Notice, &[7; 10_000]),
            Frame::new(Kind::Ping, b""),
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        let (mut stream, mut inbox, mut found) = (Drip(&bytes, false), Inbox::default(), Vec::new());
        let end = loop {
            match inbox.next(&mut stream) {
                Ok(frame) => found.extend(frame),
                Err(error) => break error,
            }
        };
        assert_eq!((found.as_slice(), end.kind()), (&frames[..], io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn the_layout_is_fixed() {
        let frame = Frame { kind: Kind::Notice, code: 0, body: vec![7; 0x0102] };
        assert_eq!(frame.encode()[..9], [2, 0, 0, 0, 2, 1, 0, 0, 7]);
        let mut body = Vec::new();
        body.extend(
            [&7u64.to_le_bytes()[..], &8u64.to_le_bytes(), &[Access::Read as u8], &9u64.to_le_bytes()]
                .concat(),
        );
        body.extend(
            [&10u64.to_le_bytes()[..], &11u64.to_le_bytes(), &12u32.to_le_bytes(), &[1, 3, 0]].concat(),
        );
        let asked = Instant::now();
        let region = RemoteRegion { len: 10, location: Location::Cuda(3), address: 11, key: 12 };
        let expected = Grant {
            segment: "kv".into(),
            key: 7,
            epoch: 8,
            access: Access::Read,
            expires: asked + Duration::from_nanos(9),
            regions: vec![region],
        };
        assert_eq!(decode_grant("kv", asked, &body), Some(expected));
    }

    #[test]
    fn nonsense_ends_the_connection() {
        for bytes in [
            [0, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 9],
            [4, 1, 0, 0, 1, 0, 0, 0],
            [3, 0, 1, 0, 0, 0, 0, 0],
        ] {
            let error = Inbox::default().next(&mut &bytes[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Frame::decode(&bytes);
            if let Some(grant) = decode_grant("kv", Instant::now(), &bytes) {
                prop_assert!(grant.regions.iter().all(|region| region.address.checked_add(region.len).is_some()));
            }
        }
    }
}
