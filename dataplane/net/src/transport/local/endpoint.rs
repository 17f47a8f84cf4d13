//! The side of a connection that uses a peer's memory.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::net::RecvFlags;

use super::server::read_frame;
use super::socket::{end, receive_fd};
use super::{Reach, Taken, word_of};
use crate::transport::grant::{Access, Denied, Grant, RemoteRange};
use crate::transport::node::NOTICE_MAX;
use crate::transport::op::{Completion, Direction, Op, OpError, Sink};
use crate::transport::tcp::wire::{self, Kind};
use crate::transport::{Capabilities, Endpoint, Error, Mapped};
use kvasir_memory::host::Mapping;
use kvasir_memory::region::LocalRange;
use kvasir_os::time::Instant;

/// A segment mapped here.
struct Held {
    epoch: u64,
    access: Access,
    expires: Instant,
    slot: u64,
    word: u32,
    memory: Vec<Taken>,
}

pub(super) struct LocalEndpoint {
    peer: String,
    reach: Arc<dyn Reach>,
    control: Mapping,
    /// For questions, one at a time.
    stream: Mutex<UnixStream>,
    /// The same socket, watched for its end.
    watched: UnixStream,
    held: Mutex<HashMap<u64, Arc<Held>>>,
    down: Mutex<Option<String>>,
    in_flight: AtomicUsize,
}

impl LocalEndpoint {
    pub(super) fn new(
        peer: String,
        reach: Arc<dyn Reach>,
        control: Mapping,
        stream: UnixStream,
    ) -> std::io::Result<Self> {
        Ok(Self {
            peer,
            reach,
            control,
            stream: Mutex::new(stream.try_clone()?),
            watched: stream,
            held: Mutex::default(),
            down: Mutex::default(),
            in_flight: AtomicUsize::new(0),
        })
    }

    fn execute(&self, op: &Op, capabilities: &Capabilities) -> Completion {
        let (valid_bytes, result) = match self.start(op, capabilities) {
            Ok((held, remote)) => {
                let (from, to) = match op.direction {
                    Direction::Read => (&remote, &op.local),
                    Direction::Write => (&op.local, &remote),
                };
                let mut first = true;
                self.reach.copy(op.direction, from, to, &mut || {
                    // `submit` made the first check, for all its operations.
                    if !std::mem::take(&mut first) {
                        self.check_up()?;
                    }
                    if op.is_cancelled() { Err(OpError::Cancelled) } else { Ok(self.check_alive(&held)?) }
                })
            }
            Err(error) => (0, Err(error)),
        };
        Completion { id: op.id, valid_bytes, result }
    }

    fn start(&self, op: &Op, capabilities: &Capabilities) -> Result<(Arc<Held>, Vec<LocalRange>), OpError> {
        op.check(capabilities, Instant::now())?;
        let held = self.held(op.grant.key, op.grant.epoch, op.direction)?;
        let range = |range: &RemoteRange| {
            let taken = held.memory.get(range.region as usize).ok_or(Denied::OutOfRange)?;
            taken.region.range(range.offset, range.len).ok_or(Denied::OutOfRange)
        };
        let remote = op.remote.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        Ok((held, remote))
    }

    fn held(&self, key: u64, epoch: u64, direction: Direction) -> Result<Arc<Held>, Denied> {
        let held = self.held.lock().get(&key).cloned().ok_or(Denied::UnknownKey)?;
        if held.epoch != epoch {
            return Err(Denied::StaleEpoch);
        }
        if !held.access.allows(direction) {
            return Err(Denied::Direction);
        }
        self.check_alive(&held)?;
        Ok(held)
    }

    fn check_alive(&self, held: &Held) -> Result<(), Denied> {
        if self.control.load_word(held.slot) != Some(held.word) {
            return Err(Denied::UnknownKey);
        }
        if Instant::now() >= held.expires { Err(Denied::LeaseEnded) } else { Ok(()) }
    }

    fn check_up(&self) -> Result<(), OpError> {
        match self.down() {
            Some(reason) => Err(OpError::PeerDown { peer: self.peer.clone(), reason }),
            None => Ok(()),
        }
    }

    fn end(&self, reason: &str) -> Error {
        let mut down = self.down.lock();
        let reason = down.get_or_insert_with(|| reason.to_owned()).clone();
        end(&self.watched);
        Error::PeerDown { peer: self.peer.clone(), reason }
    }

    /// Asks for a segment and maps what comes.
    fn ask(&self, segment: &str) -> Result<Result<Arc<Grant>, Denied>, Box<dyn std::error::Error>> {
        let mut stream = self.stream.lock();
        let mut frame = Vec::new();
        let asked_at = Instant::now();
        wire::encode_named(&mut frame, Kind::Open, 0, segment.as_bytes());
        stream.write_all(&frame)?;
        let header = read_frame(&mut *stream, &mut frame)?;
        if header.kind != Kind::Grant {
            return Err(wire::WireError::Unasked(header.kind).into());
        }
        if let Some(denied) = Denied::from_repr(header.code) {
            return Ok(Err(denied));
        }
        let grant = wire::decode_grant(segment, asked_at, &frame)?;
        let writable = grant.access != Access::Read;
        let mut memory = Vec::with_capacity(grant.regions.len());
        for region in &grant.regions {
            memory.push(self.reach.take(receive_fd(&mut stream)?, region, writable)?);
        }
        let Grant { key, epoch, access, expires, .. } = grant;
        let held = Held { epoch, access, expires, slot: header.request, word: word_of(key), memory };
        let mut all = self.held.lock();
        all.retain(|_, held| self.check_alive(held).is_ok());
        all.insert(key, Arc::new(held));
        Ok(Ok(Arc::new(grant)))
    }
}

impl Endpoint for LocalEndpoint {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        let answer = self.ask(segment).map_err(|error| self.end(&error.to_string()))?;
        answer.map_err(|denied| Error::Denied {
            peer: self.peer.clone(),
            segment: segment.to_owned(),
            denied,
        })
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        let capabilities = self.reach.capabilities();
        let up = self.check_up();
        self.in_flight.fetch_add(ops.len(), Ordering::AcqRel);
        for op in ops {
            let completion = match &up {
                Ok(()) => self.execute(&op, &capabilities),
                Err(error) => Completion::failed(op.id, 0, error.clone()),
            };
            drop(op);
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
            sink.complete(completion);
        }
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        if message.len() > NOTICE_MAX {
            return Err(Error::NoticeTooLong { len: message.len() });
        }
        if let Some(reason) = self.down() {
            return Err(Error::PeerDown { peer: self.peer.clone(), reason });
        }
        let mut frame = Vec::new();
        wire::encode_named(&mut frame, Kind::Notice, 0, message);
        let written = self.stream.lock().write_all(&frame);
        written.map_err(|error| self.end(&error.to_string()))
    }

    fn map(&self, grant: &Grant, range: RemoteRange) -> Result<Mapped, Error> {
        if !self.reach.capabilities().zero_copy {
            return Err(Error::Unsupported {
                transport: self.reach.capabilities().name,
                what: "map a peer's memory",
            });
        }
        let mapped = grant.covers(range).and_then(|()| {
            let held = self.held(grant.key, grant.epoch, Direction::Read)?;
            let taken = held.memory.get(range.region as usize).ok_or(Denied::OutOfRange)?;
            let memory = taken.mapping.clone().ok_or(Denied::Unreachable)?;
            let inside = memory.bytes(range.offset, range.len).is_some();
            inside
                .then_some(Mapped { memory, offset: range.offset, len: range.len })
                .ok_or(Denied::OutOfRange)
        });
        mapped.map_err(|denied| Error::Denied {
            peer: self.peer.clone(),
            segment: grant.segment.clone(),
            denied,
        })
    }

    /// Checks the socket: it ends with the peer.
    fn down(&self) -> Option<String> {
        let mut down = self.down.lock();
        if down.is_none() {
            let peeked =
                rustix::net::recv(&self.watched, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            *down = match peeked {
                Ok((0, _)) => Some("it closed its socket".to_owned()),
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
                Err(error) => Some(error.to_string()),
            };
        }
        down.clone()
    }

    fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    fn close(&self) {
        self.end("the endpoint was closed");
    }
}
