//! Questions that wait for their answers, and the read whose payload is coming in.

use std::io;
use std::sync::Arc;

use super::queue::{Cursor, Inbox, crc};
use super::socket::Socket;
use super::wire::{CODE_CHECKSUM, Header, Kind, WireError};
use crate::transport::grant::Denied;
use crate::transport::{Cancel, Completion, Direction, Grant, OpError, Sink};
use kvasir_memory::region::LocalRange;
use kvasir_os::time::Instant;

pub(super) struct Question {
    pub(super) request: u64,
    pub(super) asked: Asked,
}

pub(super) enum Asked {
    Op(Asking),
    Open { segment: String, at: Instant, reply: oneshot::Sender<Result<Arc<Grant>, Denied>> },
    Ping,
}

impl Asked {
    /// Bytes that it moves; 0 if it is no operation.
    pub(super) fn bytes(&self) -> u64 {
        if let Self::Op(asking) = self { asking.len } else { 0 }
    }

    pub(super) fn fits(&self, answer: &Header) -> bool {
        match (self, answer.kind) {
            (Self::Op(asking), Kind::Data) if asking.direction == Direction::Read => {
                answer.code != 0 || answer.payload_len == asking.len
            }
            (Self::Op(asking), Kind::Ack) => asking.direction == Direction::Write,
            (Self::Open { .. }, Kind::Grant) | (Self::Ping, Kind::Pong) => true,
            _ => false,
        }
    }
}

/// An operation that waits for its answer.
pub(super) struct Asking {
    pub(super) id: u64,
    pub(super) direction: Direction,
    pub(super) len: u64,
    pub(super) cancel: Option<Cancel>,
    /// Where a read goes. Empty for a write, whose memory is in the outbox.
    pub(super) local: Vec<LocalRange>,
    /// `None` once it was cancelled: the bytes of its answer are then thrown away.
    pub(super) sink: Option<Arc<dyn Sink>>,
}

/// A read whose payload is coming in.
pub(super) struct Receiving {
    pub(super) asking: Asking,
    pub(super) cursor: Cursor,
    /// The checksum that the payload must have, and where the payload goes.
    pub(super) crc: Option<(u32, Vec<LocalRange>)>,
}

/// A completion that is about to be reported.
pub(super) type Told = (Arc<dyn Sink>, Completion);

impl Asking {
    /// Its completion, unless it was reported before.
    pub(super) fn end(&mut self, valid_bytes: u64, result: Result<(), OpError>) -> Option<Told> {
        let sink = self.sink.take()?;
        Some((sink, Completion { id: self.id, valid_bytes, result }))
    }
}

impl Receiving {
    pub(super) fn valid(&self) -> u64 {
        // With a checksum, nothing is known to be right before all of it is here.
        if self.crc.is_some() { 0 } else { self.asking.len - self.cursor.left() }
    }

    /// Ends it early; the rest of the payload is thrown away.
    pub(super) fn abandon(&mut self) -> Option<Told> {
        let valid = self.valid();
        let told = self.asking.end(valid, Err(OpError::Cancelled));
        self.cursor = Cursor::skipping(self.cursor.left());
        self.crc = None;
        told
    }

    pub(super) fn finish(&mut self) -> Option<Told> {
        let (valid, result) = match self.crc.take() {
            Some((expected, local)) => match crc(&local) {
                found if found == expected => (self.asking.len, Ok(())),
                found => (0, Err(OpError::Checksum { expected, found })),
            },
            None => (self.asking.len, Ok(())),
        };
        self.cursor = Cursor::default();
        self.asking.end(valid, result)
    }

    /// Fills memory with what is here. Returns whether there was anything.
    pub(super) fn fill(&mut self, inbox: &mut Inbox, socket: &Socket) -> io::Result<bool> {
        if inbox.bytes().is_empty() {
            return inbox.fill_memory(socket, &mut self.cursor);
        }
        let count = self.cursor.copy_in(inbox.bytes());
        inbox.consume(count);
        Ok(true)
    }

    pub(super) fn skip(&mut self, inbox: &mut Inbox, socket: &Socket) -> io::Result<bool> {
        let left = usize::try_from(self.cursor.left()).unwrap_or(usize::MAX);
        if inbox.bytes().is_empty() {
            return inbox.fill(socket, left);
        }
        let count = inbox.bytes().len().min(left);
        inbox.consume(count);
        self.cursor.skip(count as u64);
        Ok(true)
    }
}

pub(super) fn outcome(code: u8) -> Result<Result<(), OpError>, WireError> {
    match code {
        0 => Ok(Ok(())),
        CODE_CHECKSUM => Ok(Err(OpError::PeerChecksum)),
        code => Denied::from_repr(code).map(|denied| Err(denied.into())).ok_or(WireError::Kind(code)),
    }
}
