//! The two queues in front of a [`Socket`]: bytes received and not yet understood ([`Inbox`]), frames to send
//! ([`Outbox`]); and how far each got into memory ([`Cursor`]).

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::socket::Socket;
use super::wire::{BODY_MAX, HEADER_LEN, Header, WireError};
use crate::transport::grant::Granted;
use kvasir_memory::region::LocalRange;
use kvasir_memory::shared::{PARTS_MAX, Place, Shared};

/// How far a list of ranges has been filled or sent.
#[derive(Default)]
pub(super) struct Cursor {
    ranges: Vec<LocalRange>,
    index: usize,
    offset: u64,
    left: u64,
}

impl Cursor {
    pub(super) fn new(ranges: Vec<LocalRange>) -> Self {
        let left = ranges.iter().map(LocalRange::len).sum();
        Self { ranges, index: 0, offset: 0, left }
    }

    /// A cursor for bytes that are received and thrown away.
    pub(super) fn skipping(left: u64) -> Self {
        Self { left, ..Self::default() }
    }

    /// Counts skipped bytes.
    pub(super) fn skip(&mut self, count: u64) {
        self.left -= count;
    }

    /// Bytes still to go.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    pub(super) fn parts_left(&self) -> usize {
        self.ranges.len() - self.index
    }

    /// What is still to be sent.
    fn shared(&self) -> impl Iterator<Item = Shared<'_>> {
        let skip = |n| if n == 0 { self.offset as usize } else { 0 };
        let left = self.ranges[self.index..].iter().filter_map(LocalRange::shared);
        left.enumerate().map(move |(n, part)| part.after(skip(n)))
    }

    /// What is still to be filled.
    pub(super) fn places(&self) -> impl Iterator<Item = Place<'_>> {
        let skip = |n| if n == 0 { self.offset as usize } else { 0 };
        let left = self.ranges[self.index..].iter().filter_map(LocalRange::place);
        left.enumerate().map(move |(n, place)| place.after(skip(n)))
    }

    pub(super) fn advance(&mut self, mut count: u64) {
        self.left -= count;
        while count > 0 {
            let here = self.ranges[self.index].len() - self.offset;
            if count < here {
                self.offset += count;
                return;
            }
            count -= here;
            (self.index, self.offset) = (self.index + 1, 0);
        }
    }

    /// Copies bytes into memory, as many as fit, and goes on behind them.
    pub(super) fn copy_in(&mut self, mut from: &[u8]) -> usize {
        let before = from.len();
        while let Some(range) = self.ranges.get(self.index).filter(|_| !from.is_empty()) {
            let Some(rest) = range.part(self.offset, range.len() - self.offset) else { break };
            let count = rest.copy_in(from);
            if count == 0 {
                break;
            }
            from = &from[count..];
            self.advance(count as u64);
        }
        before - from.len()
    }
}

/// The CRC-32 of the bytes of a list of ranges.
pub(super) fn crc(ranges: &[LocalRange]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = [0; 4096];
    for range in ranges {
        let mut done = 0;
        while let Some(part) = range.part(done, (range.len() - done).min(buffer.len() as u64)) {
            let count = part.copy_out(&mut buffer);
            hasher.update(&buffer[..count]);
            done += part.len();
        }
    }
    hasher.finalize()
}

/// Bytes received and not yet understood. Bounded: the longest header and body fit.
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Self {
        let len = (HEADER_LEN + BODY_MAX).next_multiple_of(64 << 10);
        Self { buffer: vec![0; len].into(), start: 0, end: 0 }
    }

    /// Receives more, but keeps no more than `wanted` bytes waiting. Returns false if there is nothing now. What
    /// belongs to a payload and lands here is copied once more, so ask for no more than frames need.
    pub(super) fn fill(&mut self, socket: &Socket, wanted: usize) -> io::Result<bool> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let wanted = wanted.min(self.buffer.len());
        if self.end >= wanted {
            return Ok(true);
        }
        let Some(count) = socket.receive(&mut self.buffer[self.end..wanted])? else { return Ok(false) };
        self.end += count;
        Ok(true)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Receives straight into memory, and with the last of it the next header, which saves a call. Call it only while
    /// nothing waits here. Returns false if there is nothing now.
    pub(super) fn fill_memory(&mut self, socket: &Socket, cursor: &mut Cursor) -> io::Result<bool> {
        debug_assert!(self.bytes().is_empty(), "bytes that came earlier go first");
        (self.start, self.end) = (0, 0);
        let Some(beyond) = socket.receive_into(cursor, &mut self.buffer[..HEADER_LEN])? else {
            return Ok(false);
        };
        self.end = beyond;
        Ok(true)
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// The next frame's header and body, if they are here whole. [`consume_frame`](Self::consume_frame) removes them.
    pub(super) fn frame(&self) -> Result<Option<(Header, &[u8])>, WireError> {
        let Some((head, rest)) = self.bytes().split_first_chunk() else { return Ok(None) };
        let header = Header::decode(head)?;
        Ok(rest.get(..header.body_len as usize).map(|body| (header, body)))
    }

    pub(super) fn consume_frame(&mut self, header: &Header) {
        self.consume(HEADER_LEN + header.body_len as usize);
    }
}

/// One frame to send, or several without payload.
struct Outgoing {
    head: Vec<u8>,
    head_sent: usize,
    body: Cursor,
    /// The grant under which `body` is read, on the side that gave it.
    granted: Option<Arc<Granted>>,
    request: u64,
}

/// Frames to send, in order.
#[derive(Default)]
pub(super) struct Outbox {
    queue: VecDeque<Outgoing>,
    bytes: u64,
}

impl Outbox {
    /// Bytes not yet sent.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds what `encode` writes: whole frames without payload.
    pub(super) fn push(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        /// Small frames share one piece of memory up to this size.
        const MERGED_MAX: usize = 64 << 10;
        let joins = |last: &&mut Outgoing| last.body.left() == 0 && last.head.len() < MERGED_MAX;
        if let Some(last) = self.queue.back_mut().filter(joins) {
            let before = last.head.len();
            encode(&mut last.head);
            self.bytes += (last.head.len() - before) as u64;
            return;
        }
        self.push_frame(encode, Cursor::default(), None, 0);
    }

    /// Adds a frame with a payload.
    pub(super) fn push_frame(
        &mut self,
        encode: impl FnOnce(&mut Vec<u8>),
        body: Cursor,
        granted: Option<Arc<Granted>>,
        request: u64,
    ) {
        let mut head = Vec::new();
        encode(&mut head);
        self.bytes += head.len() as u64 + body.left();
        self.queue.push_back(Outgoing { head, head_sent: 0, body, granted, request });
    }

    /// Takes back a frame with a payload if nothing of it has been sent.
    pub(super) fn take_back(&mut self, request: u64) -> bool {
        let unsent = |frame: &Outgoing| {
            frame.request == request && frame.head_sent == 0 && !frame.body.ranges.is_empty()
        };
        let Some(at) = self.queue.iter().position(unsent) else { return false };
        if let Some(frame) = self.queue.remove(at) {
            self.bytes -= frame.head.len() as u64 + frame.body.left();
        }
        true
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.bytes = 0;
    }

    /// Sends what the socket takes now. Returns whether everything was sent.
    pub(super) fn flush(&mut self, socket: &Socket) -> io::Result<bool> {
        while !self.queue.is_empty() {
            let Some(count) = self.send_some(socket)? else { return Ok(false) };
            self.advance(count);
        }
        socket.flush()
    }

    fn send_some(&self, socket: &Socket) -> io::Result<Option<usize>> {
        let mut parts = Vec::with_capacity(16);
        let mut entries = Vec::new();
        let mut entered: Option<&Arc<Granted>> = None;
        for frame in &self.queue {
            if parts.len() + 2 > PARTS_MAX {
                break;
            }
            if let Some(granted) = frame.granted.as_ref()
                && !entered.is_some_and(|entered| Arc::ptr_eq(entered, granted))
            {
                let entry = granted.enter();
                entries.push(entry.map_err(|denied| io::Error::other(format!("amid a read: {denied}")))?);
                entered = Some(granted);
            }
            let head = &frame.head[frame.head_sent..];
            if !head.is_empty() {
                parts.push(Shared::from(head));
            }
            parts.extend(frame.body.shared().take(PARTS_MAX - parts.len()));
        }
        socket.send(&parts)
    }

    fn advance(&mut self, mut count: usize) {
        self.bytes -= count as u64;
        while count > 0 {
            let Some(frame) = self.queue.front_mut() else { return };
            let head = count.min(frame.head.len() - frame.head_sent);
            frame.head_sent += head;
            let body = ((count - head) as u64).min(frame.body.left());
            frame.body.advance(body);
            count -= head + body as usize;
            if frame.body.left() == 0 && frame.head_sent == frame.head.len() {
                self.queue.pop_front();
            }
        }
    }
}
