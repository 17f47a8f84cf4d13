//! The read side of the engine: gets become runs, one read for payloads that stand next to each other.
//!
//! A chain that was stored together lies together, so a batch that asks for it costs a few large reads. Every payload
//! is compared with its checksum; a damaged one becomes a miss.

use super::engine::{End, Engine, Ticket, Why, Work, io_error};
use super::format::{self, PAGE};
use super::index::Found;
use super::io::{Op, OpKind, PIECES_MAX, Piece};
use super::shared::count;
use kvasir_memory::buffer::Buffer;
use kvasir_os::planted::{self, Bug};
use kvasir_protocol::block::checksum;
use kvasir_store::store::{Get, GetDone, Loaded, TierError};

/// A run takes no further block once it is this long.
const RUN_PAGES: u32 = (1 << 20) / PAGE as u32;
/// What may lie between two payloads of a run: the header page of the next group, read and thrown away.
const GAP_PAGES: u32 = 1;

/// One read.
pub(super) struct Run {
    reads: Vec<Read>,
    /// Where gaps are read to.
    gap: Option<Buffer>,
}

struct Read {
    found: Found,
    buffer: Buffer,
    /// The end of the payload that does not fill a page, padding included.
    tail: Option<Buffer>,
    ticket: Ticket<GetDone>,
}

impl Read {
    fn end(&self) -> u32 {
        self.found.place.page + format::pages(self.found.meta.size)
    }
}

impl Engine {
    pub(super) fn start_gets(&mut self, gets: impl Iterator<Item = (Get, Ticket<GetDone>)>) {
        let mut reads: Vec<Read> = gets.filter_map(|(get, ticket)| self.start_get(get, ticket)).collect();
        reads.sort_by_key(|read| read.found.place);
        let mut run: Vec<Read> = Vec::new();
        for read in reads {
            if run.last().is_some_and(|last| !follows(&run[0], last, &read)) {
                self.runs.push_back(Run { reads: std::mem::take(&mut run), gap: None });
            }
            run.push(read);
        }
        if !run.is_empty() {
            self.runs.push_back(Run { reads: run, gap: None });
        }
    }

    fn start_get(&mut self, get: Get, ticket: Ticket<GetDone>) -> Option<Read> {
        let Get { key, buffer } = get;
        if ticket.cancelled() {
            ticket.done(GetDone { buffer, outcome: Err(TierError::Cancelled) });
            return None;
        }
        let Some(found) = self.shared.index.get(key) else {
            count(&self.shared.counters.misses, 1);
            ticket.done(GetDone { buffer, outcome: Ok(None) });
            return None;
        };
        let (size, len) = (u64::from(found.meta.size), buffer.len() as u64);
        if len < size {
            ticket.done(GetDone { buffer, outcome: Err(TierError::Buffer { key, size, len }) });
            return None;
        }
        self.shared.segments().at(found.place.segment).readers += 1;
        Some(Read { found, buffer, tail: None, ticket })
    }

    pub(super) fn submit_run(&mut self, mut run: Run) {
        let place = run.reads[0].found.place;
        let Some(file) = self.shared.segments().at(place.segment).file.clone() else {
            return self.finish_run(run, End::Failed("the segment has no file".into()));
        };
        let mut pieces = Vec::new();
        let mut at = place.page;
        for read in &mut run.reads {
            if read.found.place.page > at {
                let gap = run.gap.get_or_insert_with(|| Buffer::zeroed(GAP_PAGES as usize * PAGE));
                pieces.push(Piece::of_mut(&mut gap.bytes_mut()[..PAGE]));
            }
            scatter_payload(read, &mut pieces);
            at = read.end();
        }
        let offset = u64::from(place.page) * PAGE as u64;
        let op = Op { kind: OpKind::Read, file, slot: Some(place.segment), offset, pieces };
        self.submit(op, Work::Read(run));
    }

    pub(super) fn finish_run(&mut self, run: Run, end: End) {
        if !matches!(end, End::Done) && run.reads.len() > 1 {
            // Each is read alone, to find out which of them failed.
            let alone = |read| Run { reads: vec![Read { tail: None, ..read }], gap: None };
            return self.runs.extend(run.reads.into_iter().map(alone));
        }
        for read in run.reads {
            self.finish_read(read, &end);
        }
    }

    fn finish_read(&mut self, mut read: Read, end: &End) {
        let Found { meta, checksum: expected, place } = read.found;
        self.shared.segments().at(place.segment).readers -= 1;
        let counters = &self.shared.counters;
        let outcome = match end {
            End::Failed(reason) => Err(io_error("read", meta.key, reason.clone())),
            End::Done if is_intact(&mut read, expected) => {
                count(&counters.hits, 1);
                count(&counters.read_bytes, meta.size.into());
                Ok(Some(Loaded { meta, checksum: expected }))
            }
            End::Done | End::Short => {
                count(&counters.misses, 1);
                self.forget(meta.key, place, Why::Corrupt);
                Ok(None)
            }
        };
        read.ticket.done(GetDone { buffer: read.buffer, outcome });
    }
}

fn follows(first: &Read, last: &Read, next: &Read) -> bool {
    let (begin, end) = (first.found.place, last.end());
    let gap = next.found.place.page.checked_sub(end);
    // Two gets of one block are two reads: each fills its own buffer.
    next.found.place.segment == begin.segment
        && gap.is_some_and(|gap| gap <= GAP_PAGES)
        && next.end() - begin.page <= RUN_PAGES
        && ((next.end() - begin.page) as usize) < PIECES_MAX / 3
}

/// Reads whole pages straight into the buffer; what lies behind the block in it stays as it is.
fn scatter_payload(read: &mut Read, pieces: &mut Vec<Piece>) {
    let size = read.found.meta.size as usize;
    let whole = size / PAGE * PAGE;
    if let Some(direct) = read.buffer.bytes_mut().get_mut(..whole)
        && whole > 0
    {
        pieces.push(Piece::of_mut(direct));
    }
    if whole < size {
        let tail = read.tail.insert(Buffer::zeroed(PAGE));
        pieces.push(Piece::of_mut(tail.bytes_mut()));
    }
}

fn is_intact(read: &mut Read, expected: u64) -> bool {
    let size = read.found.meta.size as usize;
    let whole = size / PAGE * PAGE;
    let Some(bytes) = read.buffer.bytes_mut().get_mut(..size) else { return false };
    if let Some(tail) = &read.tail {
        bytes[whole..].copy_from_slice(&tail.bytes()[..size - whole]);
    }
    checksum(bytes) == expected || planted::is(Bug::ServesDamaged)
}
