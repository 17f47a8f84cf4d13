//! The side that owns the memory: one thread per connection answers in order.

use std::io;
use std::sync::Arc;

use super::client::LARGE;
use super::queue::{Cursor, Inbox, Outbox, crc};
use super::socket::Socket;
use super::wire::{self, CODE_CHECKSUM, Header, Kind, WireError};
use crate::transport::grant::{Denied, Granted};
use crate::transport::{Direction, Node};
use kvasir_memory::region::LocalRange;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::stream::Habits;

/// Answers are sent at the latest when this many bytes of them are waiting.
const OUTBOX_MAX: u64 = 1 << 20;
/// Bytes received at once where frames are expected: about 200 small questions.
const READ_AHEAD: usize = 16 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("peer broke the protocol: {0}")]
    Wire(#[from] WireError),
}

/// One accepted, authenticated connection.
pub(super) struct Serving<'a> {
    node: &'a Node,
    peer: &'a str,
    socket: &'a Socket,
    checksum: bool,
    /// A peer that sends no byte for this long is gone: clients ping when idle.
    patience: Duration,
    inbox: Inbox,
    outbox: Outbox,
    habits: Habits,
    /// Bytes that the last question moved.
    moved: u64,
}

impl<'a> Serving<'a> {
    pub(super) fn new(
        node: &'a Node,
        peer: &'a str,
        socket: &'a Socket,
        checksum: bool,
        patience: Duration,
    ) -> Self {
        let (inbox, outbox, habits) = (Inbox::new(), Outbox::default(), Habits::new(Habits::SOCKET));
        Self { node, peer, socket, checksum, patience, inbox, outbox, habits, moved: 0 }
    }

    /// Serves until the connection ends, and says why it did.
    pub(super) fn run(&mut self) -> Ended {
        loop {
            if let Err(ended) = self.step() {
                return ended;
            }
        }
    }

    fn step(&mut self) -> Result<(), Ended> {
        while self.outbox.bytes() < OUTBOX_MAX && self.answer_next()? {}
        self.send()?;
        if self.inbox.frame()?.is_none() {
            self.receive()?;
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        while !self.outbox.flush(self.socket)? {
            self.socket.wait_writable(self.patience)?;
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + self.patience;
        let wanted = if self.inbox.bytes().len() < READ_AHEAD { READ_AHEAD } else { usize::MAX };
        while !self.inbox.fill(self.socket, wanted)? {
            self.await_bytes(deadline)?;
        }
        Ok(())
    }

    fn await_bytes(&mut self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "nothing was heard from the peer"));
        }
        let wait = |time| self.socket.wait(false, None, time);
        // After a large answer the peer has enough to do.
        let ready = if self.moved < LARGE {
            self.habits.wait(&mut (), |()| self.socket.wait_now(None), |()| wait(left))
        } else {
            wait(left)
        };
        ready.map(|_| ())
    }

    /// Answers the next frame. Returns whether there was one.
    fn answer_next(&mut self) -> Result<bool, Ended> {
        let Some((header, body)) = self.inbox.frame()? else { return Ok(false) };
        self.moved = header.payload_len;
        match header.kind {
            Kind::Open => {
                let name = wire::decode_segment(body)?;
                match self.node.exports.grant(name, self.peer) {
                    Ok(granted) => self.outbox.push(|to| wire::encode_grant(to, header.request, &granted)),
                    Err(denied) => refuse(&mut self.outbox, Kind::Grant, &header, denied as u8),
                }
            }
            Kind::Read => {
                let asked = wire::decode_op(&header, body)?;
                self.moved = asked.len;
                match self.authorize(&asked, Direction::Read) {
                    Ok((granted, ranges)) => self.push_data(&header, asked.len, granted, ranges),
                    Err(denied) => refuse(&mut self.outbox, Kind::Data, &header, denied as u8),
                }
            }
            Kind::Write => {
                let asked = wire::decode_op(&header, body)?;
                let allowed = self.authorize(&asked, Direction::Write);
                self.inbox.consume_frame(&header);
                let code = match allowed {
                    Ok((granted, ranges)) => self.accept_payload(&header, &granted, ranges)?,
                    Err(denied) => self.skip_payload(header.payload_len, denied)?,
                };
                refuse(&mut self.outbox, Kind::Ack, &header, code);
                return Ok(true);
            }
            // A full queue drops notices and counts them.
            Kind::Notice => {
                self.node.notices.push(self.peer, body);
            }
            Kind::Ping => self.outbox.push(|to| to.extend(Header::new(Kind::Pong, header.request).encode())),
            kind @ (Kind::Grant | Kind::Data | Kind::Ack | Kind::Pong) => {
                return Err(WireError::Unasked(kind).into());
            }
        }
        self.inbox.consume_frame(&header);
        Ok(true)
    }

    fn authorize(
        &self,
        asked: &wire::Asked,
        direction: Direction,
    ) -> Result<(Arc<Granted>, Vec<LocalRange>), Denied> {
        let granted = self.node.exports.authorize(self.peer, asked.key, asked.epoch, direction)?;
        let ranges = asked.ranges.iter().map(|range| granted.range(*range)).collect::<Result<Vec<_>, _>>()?;
        let on_host = ranges.iter().all(|range| range.region().location().is_host());
        if on_host { Ok((granted, ranges)) } else { Err(Denied::Unreachable) }
    }

    fn push_data(&mut self, asked: &Header, len: u64, granted: Arc<Granted>, ranges: Vec<LocalRange>) {
        let crc = self.checksum.then(|| crc(&ranges));
        let header = Header { payload_len: len, crc, ..Header::new(Kind::Data, asked.request) };
        let encode = |to: &mut Vec<u8>| to.extend(header.encode());
        self.outbox.push_frame(encode, Cursor::new(ranges), Some(granted), asked.request);
    }

    /// Receives a write straight into its place. Returns the code of the answer.
    fn accept_payload(
        &mut self,
        header: &Header,
        granted: &Granted,
        ranges: Vec<LocalRange>,
    ) -> Result<u8, Ended> {
        let expected = header.crc.map(|crc| (crc, ranges.clone()));
        let mut cursor = Cursor::new(ranges);
        let mut deadline = Instant::now() + self.patience;
        while cursor.left() > 0 {
            let entry = match granted.enter() {
                Ok(entry) => entry,
                Err(denied) => return self.skip_payload(cursor.left(), denied),
            };
            let waiting = self.inbox.bytes();
            let progress = if waiting.is_empty() {
                self.inbox.fill_memory(self.socket, &mut cursor)?
            } else {
                let count = cursor.copy_in(waiting);
                self.inbox.consume(count);
                true
            };
            drop(entry);
            if progress {
                deadline = Instant::now() + self.patience;
            } else {
                self.stall(deadline)?;
            }
        }
        let wrong = expected.is_some_and(|(expected, ranges)| crc(&ranges) != expected);
        Ok(if wrong { CODE_CHECKSUM } else { 0 })
    }

    /// Reads past the payload of a refused write.
    fn skip_payload(&mut self, mut left: u64, denied: Denied) -> Result<u8, Ended> {
        let mut deadline = Instant::now() + self.patience;
        while left > 0 {
            let waiting = self.inbox.bytes().len().min(usize::try_from(left).unwrap_or(usize::MAX));
            self.inbox.consume(waiting);
            left -= waiting as u64;
            let wanted = usize::try_from(left).unwrap_or(usize::MAX);
            if waiting > 0 {
                deadline = Instant::now() + self.patience;
            } else if !self.inbox.fill(self.socket, wanted)? {
                self.stall(deadline)?;
            }
        }
        Ok(denied as u8)
    }

    /// Nothing arrives in the middle of a payload: sends the answers that the peer may be waiting for, then waits.
    fn stall(&mut self, deadline: Instant) -> io::Result<()> {
        self.send()?;
        self.await_bytes(deadline)
    }
}

/// Queues an answer that is only a code; 0 says that a write is done.
fn refuse(outbox: &mut Outbox, kind: Kind, asked: &Header, code: u8) {
    outbox.push(|to| to.extend(Header { code, ..Header::new(kind, asked.request) }.encode()));
}
