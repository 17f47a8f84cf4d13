//! Requests and replies on one connection.

use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvasir_protocol::stream::ring::{Ring, Side};
use kvasir_protocol::stream::{Eager, Stream, receive_with_fds};
use kvasir_protocol::wire::{HEADER_LEN, Header, Op, Reply, Request, WireError};

use super::Endpoint;
use super::error::{ClientError, wrong};

/// A connection; one call at a time.
pub(super) struct Wire {
    reader: BufReader<Eager>,
    pub(super) writer: Stream,
    next: u64,
    frame: Vec<u8>,
    body: Vec<u8>,
    /// The two sides no longer agree on where a frame starts.
    pub(super) broken: bool,
}

impl Wire {
    pub(super) fn new(stream: Stream) -> io::Result<Self> {
        let writer = stream.try_clone()?;
        let reader = BufReader::with_capacity(16 << 10, Eager::new(stream));
        Ok(Self { reader, writer, next: 1, frame: Vec::new(), body: Vec::new(), broken: false })
    }

    pub(super) fn greet(&mut self, hello: &Request) -> Result<(Reply, Vec<OwnedFd>), Fault> {
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
        Ok((self.read_reply(header)?, fds))
    }

    /// Continues through memory that the host shares.
    pub(super) fn share(&mut self, memory: &OwnedFd) -> io::Result<()> {
        let Stream::Unix(socket) = &self.writer else { return Ok(()) };
        let ring = Arc::new(Ring::new(memory.as_fd(), Side::Client, socket.try_clone()?)?);
        self.writer = Stream::Ring(Arc::clone(&ring));
        self.reader = BufReader::with_capacity(16 << 10, Eager::new(Stream::Ring(ring)));
        Ok(())
    }

    pub(super) fn exchange<T>(
        &mut self,
        request: &Request,
        payload: &[&[u8]],
        receive: impl FnOnce(&mut BufReader<Eager>, Reply, u64) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let id = self.next;
        self.next += 1;
        let payload_len = payload.iter().map(|part| part.len() as u64).sum();
        request.encode(id, payload_len, &mut self.frame);
        let sent = if payload.is_empty() {
            self.writer.write_all(&self.frame)
        } else {
            let parts: Vec<&[u8]> = std::iter::once(&self.frame[..]).chain(payload.iter().copied()).collect();
            self.writer.write_parts(&parts)
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

/// Takes a reply that has no payload.
pub(super) fn no_payload(_: &mut BufReader<Eager>, reply: Reply, payload_len: u64) -> Result<Reply, Fault> {
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
            Self::Io(source) => ClientError::Lost { endpoint, op, source },
            Self::Wire(source) => ClientError::Protocol { endpoint, source },
            Self::Reply(reply) => wrong(&endpoint, op, reply),
        }
    }
}
