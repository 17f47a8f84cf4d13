//! Reads what is in a segment from the segment itself.

use std::fs::File;

use kvasir_protocol::block::Checksum;

use super::format::{self, Block, Entry, GroupHead, Kind, PAGE, Place};
use kvasir_memory::buffer::Buffer;
use kvasir_os::disk;

/// Pages read at once when everything is read.
const WINDOW: u32 = (1 << 20) / PAGE as u32;

/// How to read a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan {
    pub(super) segment: u32,
    /// Pages of the segment.
    pub(super) pages: u32,
    pub(super) store: u64,
    /// Where to begin.
    pub(super) from: u32,
    /// Groups of an earlier epoch are stale; with a later one, all found before it were.
    pub(super) epoch: u64,
    /// Compare every payload with its checksum, as is needed for what was never known to be durable.
    pub(super) verify: bool,
}

/// What a scan found.
#[derive(Debug, Default)]
pub(super) struct Scanned {
    pub(super) epoch: u64,
    pub(super) kind: Option<Kind>,
    /// The page behind the last group.
    pub(super) end: u32,
    /// Header pages of groups that hold blocks.
    pub(super) headers: u32,
    pub(super) entries: Vec<Entry>,
    /// Payloads that do not match, and places where a header should be and is not.
    pub(super) corrupt: u64,
    /// Pages that the disk refused to read.
    pub(super) unreadable: u64,
    pub(super) read_bytes: u64,
}

impl Scan {
    /// Never fails: what cannot be read is damaged, and everything behind it is still read.
    pub(super) fn run(&self, file: &File) -> Scanned {
        let mut reader = Reader::new(file, if self.verify { WINDOW } else { 1 });
        let mut out = Scanned { epoch: self.epoch, end: self.from, ..Scanned::default() };
        let mut page = self.from;
        while page < self.pages {
            let at = Place { segment: self.segment, page };
            let group =
                reader.page(page).and_then(|bytes| format::decode_group(bytes, at, self.store, self.pages));
            page += match group {
                Some((head, entries)) if head.kind != Kind::Free && head.epoch >= out.epoch => {
                    self.take(&head, entries, &mut reader, &mut out);
                    head.pages
                }
                _ => 1,
            };
        }
        (out.read_bytes, out.unreadable) = (reader.read_bytes, reader.unreadable);
        out
    }

    fn take(&self, head: &GroupHead, entries: Vec<Entry>, reader: &mut Reader<'_>, out: &mut Scanned) {
        if head.epoch > out.epoch {
            *out = Scanned { epoch: head.epoch, end: self.from, ..Scanned::default() };
        }
        out.corrupt += u64::from(head.page > out.end);
        out.kind = Some(head.kind);
        out.headers += u32::from(head.pages > 1);
        out.end = head.page + head.pages;
        for entry in entries {
            match entry {
                Entry::Block(block) if self.verify && !reader.is_intact(&block) => out.corrupt += 1,
                _ => out.entries.push(entry),
            }
        }
    }
}

/// Reads a file a window at a time.
struct Reader<'a> {
    file: &'a File,
    window: Buffer,
    start: u32,
    /// Bytes of the window that the file had.
    len: usize,
    read_bytes: u64,
    unreadable: u64,
}

impl<'a> Reader<'a> {
    fn new(file: &'a File, window_pages: u32) -> Self {
        Self {
            file,
            window: Buffer::zeroed(window_pages as usize * PAGE),
            start: 0,
            len: 0,
            read_bytes: 0,
            unreadable: 0,
        }
    }

    /// One page, or `None` if it cannot be read.
    fn page(&mut self, page: u32) -> Option<&[u8]> {
        let inside = page >= self.start && (page - self.start) as usize * PAGE + PAGE <= self.len;
        if !inside {
            self.fill(page);
        }
        let at = (page - self.start) as usize * PAGE;
        self.window.bytes()[..self.len].get(at..at + PAGE)
    }

    fn fill(&mut self, page: u32) {
        let offset = u64::from(page) * PAGE as u64;
        let window = self.window.bytes_mut();
        self.start = page;
        self.len = disk::read_at(self.file, window, offset).unwrap_or_else(|_| {
            // One page of it may be bad: continue page by page.
            disk::read_at(self.file, &mut window[..PAGE], offset).unwrap_or_else(|_| {
                self.unreadable += 1;
                0
            })
        });
        self.read_bytes += self.len as u64;
    }

    fn is_intact(&mut self, block: &Block) -> bool {
        let mut hasher = Checksum::default();
        let mut left = block.meta.size as usize;
        for page in block.page..block.page + format::pages(block.meta.size) {
            let Some(bytes) = self.page(page) else { return false };
            let take = left.min(PAGE);
            hasher.update(&bytes[..take]);
            left -= take;
        }
        hasher.finish() == block.checksum
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    /// A file that is open for writing alone refuses every read; an empty one has nothing to read.
    #[test]
    fn pages_that_the_disk_refuses_are_counted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let scan = Scan { segment: 0, pages: 8, store: 1, from: 2, epoch: 0, verify: true };
        assert_eq!(scan.run(file.as_file()).unreadable, 0);
        let refuses = OpenOptions::new().write(true).open(file.path()).unwrap();
        assert_eq!(scan.run(&refuses).unreadable, 6);
    }
}
