//! Requests and replies on one connection.

use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvasir_memory::shared::Shared;
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::stream::ring::{Ring, Side};
use kvasir_protocol::stream::{Eager, Stream, Timed, receive_with_fds};
use kvasir_protocol::wire::{HEADER_LEN, Header, Op, Reply, Request, WireError};

use super::Endpoint;
use super::error::{ClientError, wrong};

/// What a host says.
pub(super) type Reader = BufReader<Timed>;
/// How many bytes are read from the connection at once when fewer are asked for.
pub(super) const READ_AHEAD: usize = 16 << 10;

/// A connection; one call at a time.
pub(super) struct Wire {
    reader: Reader,
    pub(super) writer: Stream,
    /// The longest that a single read or write waits now.
    wait: Duration,
    next: u64,
    frame: Vec<u8>,
    body: Vec<u8>,
    /// The two sides no longer agree on where a frame starts.
    pub(super) broken: bool,
}

impl Wire {
    pub(super) fn new(stream: Stream, timeout: Duration) -> io::Result<Self> {
        stream.set_timeouts(timeout)?;
        let (writer, reader) = (stream.try_clone()?, read_ahead(stream));
        Ok(Self {
            reader,
            writer,
            wait: timeout,
            next: 1,
            frame: Vec::new(),
            body: Vec::new(),
            broken: false,
        })
    }

    /// Returns the answer, the descriptors that came with it, and the version of the protocol.
    pub(super) fn greet(&mut self, hello: &Request) -> Result<(Reply, Vec<OwnedFd>, u8), Fault> {
        hello.encode(0, 0, &mut self.frame);
        // A host that is full says so and closes, perhaps before it reads this; its answer is still there.
        let sent = self.writer.write_all(&self.frame);
        let mut header = [0; HEADER_LEN];
        let fds = match &mut self.writer {
            Stream::Unix(stream) => receive_with_fds(stream, &mut header),
            _ => self.reader.read_exact(&mut header).map(|()| Vec::new()),
        };
        if fds.is_err() {
            sent?;
        }
        let fds = fds?;
        let header = Header::decode(&header)?;
        Ok((self.read_reply(header)?, fds, header.version))
    }

    /// Continues through memory that the host shares.
    pub(super) fn share(&mut self, memory: &OwnedFd) -> io::Result<()> {
        let Stream::Unix(socket) = &self.writer else { return Ok(()) };
        let ring = Arc::new(Ring::new(memory.as_fd(), Side::Client, socket.try_clone()?)?);
        self.writer = Stream::Ring(Arc::clone(&ring));
        self.reader = read_ahead(Stream::Ring(ring));
        Ok(())
    }

    /// From now on no wait for the other side is longer than `timeout`, and nothing is begun after `deadline`.
    pub(super) fn limit(&mut self, timeout: Duration, deadline: Option<Instant>) -> io::Result<()> {
        let deadline = deadline.filter(|_| !planted::is(Bug::WaitsBeyondDeadline));
        self.reader.get_mut().deadline = deadline;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // A socket takes 0 for no end.
        let wait = left.map_or(timeout, |left| left.max(Duration::from_millis(1)).min(timeout));
        if wait != self.wait {
            self.writer.set_timeouts(wait)?;
            self.wait = wait;
        }
        Ok(())
    }

    pub(super) fn exchange<T>(
        &mut self,
        request: &Request,
        payload: &[Shared<'_>],
        receive: impl FnOnce(&mut Reader, Reply, u64) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let id = self.next;
        self.next += 1;
        let payload_len = payload.iter().map(|part| part.len() as u64).sum();
        request.encode(id, payload_len, &mut self.frame);
        let sent = if payload.is_empty() {
            self.writer.write_all(&self.frame)
        } else {
            let frame = Shared::from(&self.frame[..]);
            let parts: Vec<Shared<'_>> = std::iter::once(frame).chain(payload.iter().copied()).collect();
            self.writer.write_parts_until(&parts, self.reader.get_ref().deadline)
        };
        let mut header = [0; HEADER_LEN];
        // A host that refuses a request may close before it has read all of it; its reason is worth more.
        let read = self.reader.read_exact(&mut header);
        if read.is_err() {
            sent?;
        }
        read?;
        let header = Header::decode(&header)?;
        let reply = self.read_reply(header)?;
        if matches!(reply, Reply::Error { .. }) {
            return Err(Fault::Reply(reply));
        }
        if header.request != id {
            return Err(WireError::Value { field: "request id", value: header.request }.into());
        }
        receive(&mut self.reader, reply, header.payload_len)
    }

    fn read_reply(&mut self, header: Header) -> Result<Reply, Fault> {
        if !header.reply {
            return Err(WireError::Op { op: header.op as u8, flags: 0 }.into());
        }
        self.body.resize(header.body_len as usize, 0);
        self.reader.read_exact(&mut self.body)?;
        Ok(Reply::decode(header.op, &self.body)?)
    }
}

fn read_ahead(stream: Stream) -> Reader {
    BufReader::with_capacity(READ_AHEAD, Timed { stream: Eager::new(stream), deadline: None })
}

/// Takes a reply that has no payload.
pub(super) fn no_payload(_: &mut Reader, reply: Reply, payload_len: u64) -> Result<Reply, Fault> {
    match payload_len {
        0 => Ok(reply),
        value => Err(WireError::Value { field: "payload length", value }.into()),
    }
}

/// What went wrong on the wire, before it is known where and during what.
pub(super) enum Fault {
    Io(io::Error),
    Wire(WireError),
    Reply(Reply),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<WireError> for Fault {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl Fault {
    pub(super) fn at(self, endpoint: &Endpoint, op: Op) -> ClientError {
        let endpoint = endpoint.clone();
        match self {
            // What a socket says at the end of its time limit.
            Self::Io(source) if source.kind() == io::ErrorKind::WouldBlock => {
                let source = io::Error::new(io::ErrorKind::TimedOut, "no answer within the time limit");
                ClientError::Lost { endpoint, op, source }
            }
            Self::Io(source) => ClientError::Lost { endpoint, op, source },
            Self::Wire(source) => ClientError::Protocol { endpoint, source },
            Self::Reply(reply) => wrong(&endpoint, op, reply),
        }
    }
}
