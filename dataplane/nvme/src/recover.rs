//! Rebuilds index and books when a store opens: from the checkpoint where it has a segment, from the segment otherwise.
//!
//! Tombstones are gathered first, then the blocks are entered. A tombstone kills the copy at its target, and every
//! copy of the key with a smaller sequence: a crash in the middle of a compaction leaves two. A copy that is dead for
//! any other reason than a tombstone of its own is owed one, since the reason may be gone by the next recovery.

use std::fs::File;
use std::io;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::append::Head;
use super::checkpoint::{Checkpoint, Summary};
use super::config::{NvmeConfig, OpenReport};
use super::disk::Disk;
use super::format::{self, Block, Entry, Kind, PAGE, Place, Tombstone};
use super::index::{Found, Index};
use super::scan::Scan;
use super::segments::{Segments, State};
use kvasir_os::planted::{self, Bug};
use kvasir_protocol::block::BlockKey;

pub(super) struct Recovered {
    pub(super) index: Index,
    pub(super) segments: Segments,
    /// Where the log continues.
    pub(super) heads: [Option<Head>; 2],
    /// The summaries of the heads' segments.
    pub(super) open: Vec<Summary>,
    /// The summaries of segments that had to be read and are complete. They must be saved.
    pub(super) sealed: Vec<Summary>,
    pub(super) owed: Vec<Tombstone>,
    pub(super) sequence: u64,
    pub(super) report: OpenReport,
}

/// One segment that is in use.
struct InUse {
    segment: u32,
    epoch: u64,
    kind: Kind,
    end: u32,
    headers: u32,
    /// Everything of it is in the checkpoint, and nothing will be added.
    saved: bool,
    /// `None` if the checkpoint has them.
    entries: Option<Vec<Entry>>,
}

/// What is known to have been removed.
#[derive(Default)]
struct Graves {
    places: HashSet<(u64, u32)>,
    keys: HashMap<BlockKey, u64>,
}

pub(super) fn recover(
    config: &NvmeConfig,
    disk: &Disk,
    checkpoint: Option<&Checkpoint>,
) -> io::Result<Recovered> {
    let mut segments = Segments::new(config.segments(), config.segment_pages());
    let mut report = OpenReport::default();
    let mut in_use = Vec::new();
    for number in 0..config.segments() {
        let Some(file) = disk.existing(number)? else {
            // A power cut may have taken its name. No later life may have the epoch of one that the checkpoint knows.
            let known = checkpoint.and_then(|checkpoint| checkpoint.load(number, segments.pages));
            let known =
                known.filter(|_| !planted::is(Bug::GivesEpochAgain)).map_or(0, |summary| summary.epoch);
            segments.next_epoch = segments.next_epoch.max(known + 1);
            continue;
        };
        let found = look(number, &file, disk, checkpoint, &mut segments, &mut report)?;
        let is_durable = found.as_ref().map_or(planted::is(Bug::TrustsFreeUnsynced), |found| found.saved);
        if !is_durable {
            // A killed process may have left it to the system. What is relied on from here on must survive a power cut,
            // the first page above all: the segment's epoch goes with it, or that the segment is free and removals of what
            // was in it are no longer needed.
            kvasir_os::disk::sync(&file)?;
        }
        segments.at(number).file = Some(Arc::new(file));
        in_use.extend(found);
    }
    kvasir_os::disk::sync_folder(&disk.handle)?;
    // The youngest copy of a block wins, and the youngest segments are the ones to go on with.
    in_use.sort_by_key(|segment| std::cmp::Reverse(segment.epoch));
    let mut recovered = Recovered {
        index: Index::new(disk.store),
        segments,
        heads: [None; 2],
        open: Vec::new(),
        sealed: Vec::new(),
        owed: Vec::new(),
        sequence: 0,
        report,
    };
    let mut graves = Graves::default();
    for segment in &in_use {
        for entry in entries(segment, checkpoint, recovered.segments.pages).iter() {
            recovered.sequence = recovered.sequence.max(entry.sequence());
            graves.dig(entry);
        }
    }
    // A removal may outlive the segment of its block; no later one may have that segment's epoch.
    let buried = graves.places.iter().map(|(epoch, _)| epoch + 1).max();
    recovered.segments.next_epoch = recovered.segments.next_epoch.max(buried.unwrap_or_default());
    for segment in in_use {
        recovered.enter(segment, checkpoint, &graves);
    }
    Ok(recovered)
}

/// Finds out whether a segment is in use, and what is in it.
fn look(
    number: u32,
    file: &File,
    disk: &Disk,
    checkpoint: Option<&Checkpoint>,
    segments: &mut Segments,
    report: &mut OpenReport,
) -> io::Result<Option<InUse>> {
    let first = first_page(number, file, disk, segments.pages)?;
    let mut summary = checkpoint.and_then(|checkpoint| checkpoint.load(number, segments.pages));
    let epoch = first.map_or(0, |(_, epoch)| epoch);
    // The file may have begun another life since.
    summary = summary.filter(|summary| match first {
        Some((Kind::Free, freed)) => summary.epoch > freed,
        Some((_, epoch)) => summary.epoch >= epoch,
        None => true,
    });
    let newest = summary.as_ref().map_or(epoch, |summary| summary.epoch.max(epoch));
    segments.next_epoch = segments.next_epoch.max(newest + 1);
    if let Some((Kind::Free, _)) = first
        && summary.is_none()
    {
        return Ok(None);
    }
    if let Some(summary) = summary.take_if(|summary| summary.sealed) {
        report.segments_from_checkpoint += 1;
        let Summary { segment, epoch, kind, end, headers, .. } = summary;
        return Ok(Some(InUse { segment, epoch, kind, end, headers, saved: true, entries: None }));
    }
    let (from, epoch) = summary.as_ref().map_or((0, 0), |summary| (summary.end, summary.epoch));
    let scan = Scan { segment: number, pages: segments.pages, store: disk.store, from, epoch, verify: true };
    let scanned = scan.run(file);
    report.segments_scanned += 1;
    report.scanned_bytes += scanned.read_bytes;
    report.corrupt += scanned.corrupt;
    segments.next_epoch = segments.next_epoch.max(scanned.epoch + 1);
    let before = summary.filter(|summary| summary.epoch == scanned.epoch);
    let kind = scanned.kind.or(before.as_ref().map(|summary| summary.kind));
    let Some(kind) = kind else { return Ok(None) };
    let (mut entries, headers) = before.map_or((Vec::new(), 0), |summary| (summary.entries, summary.headers));
    entries.extend(scanned.entries);
    let headers = headers + scanned.headers;
    let (epoch, end) = (scanned.epoch, scanned.end);
    Ok(Some(InUse { segment: number, epoch, kind, end, headers, saved: false, entries: Some(entries) }))
}

/// What the first page says about the segment, and since which epoch.
fn first_page(number: u32, file: &File, disk: &Disk, pages: u32) -> io::Result<Option<(Kind, u64)>> {
    let mut page = kvasir_memory::buffer::Buffer::zeroed(PAGE);
    let read = kvasir_os::disk::read_at(file, page.bytes_mut(), 0);
    if read.is_err() {
        // A page that cannot be read tells as little as a damaged one.
        return Ok(None);
    }
    let group = format::decode_group(page.bytes(), Place { segment: number, page: 0 }, disk.store, pages);
    Ok(group.map(|(head, _)| (head.kind, head.epoch)))
}

fn entries<'a>(
    segment: &'a InUse,
    checkpoint: Option<&Checkpoint>,
    pages: u32,
) -> std::borrow::Cow<'a, [Entry]> {
    match &segment.entries {
        Some(entries) => entries.into(),
        // It was there a moment ago; if not, its blocks are misses.
        None => checkpoint
            .and_then(|checkpoint| checkpoint.load(segment.segment, pages))
            .map(|s| s.entries)
            .unwrap_or_default()
            .into(),
    }
}

impl Graves {
    fn dig(&mut self, entry: &Entry) {
        if let Entry::Tombstone(tombstone) = entry {
            self.places.insert((tombstone.target_epoch, tombstone.target.page));
            let newest = self.keys.entry(tombstone.key).or_default();
            *newest = tombstone.sequence.max(*newest);
        }
    }

    /// Whether a removed block had its place behind what is left of the segment.
    fn is_behind(&self, segment: &InUse) -> bool {
        self.places.iter().any(|&(epoch, page)| epoch == segment.epoch && page >= segment.end)
    }

    fn killed(&self, block: &Block) -> bool {
        self.keys.get(&block.meta.key).is_some_and(|&sequence| block.sequence < sequence)
    }
}

impl Recovered {
    fn enter(&mut self, found: InUse, checkpoint: Option<&Checkpoint>, graves: &Graves) {
        let number = found.segment;
        let segment = self.segments.at(number);
        (segment.epoch, segment.end) = (found.epoch, found.end);
        segment.state = State::Sealed;
        for entry in entries(&found, checkpoint, self.segments.pages).iter() {
            if let Entry::Block(block) = entry {
                self.enter_block(block, number, found.epoch, graves);
            }
        }
        let resumes = !graves.is_behind(&found) && self.resume(&found);
        let pages = self.segments.pages;
        let segment = self.segments.at(number);
        segment.dead_pages = found.end.saturating_sub(segment.live_pages + found.headers);
        let Some(entries) = found.entries else { return };
        let (epoch, kind, end, headers) = (found.epoch, found.kind, found.end, found.headers);
        let summary = Summary { segment: number, epoch, kind, sealed: !resumes, end, headers, entries };
        if resumes {
            self.open.push(summary);
        } else {
            // Its end is out of reach until it is compacted.
            segment.dead_pages += pages.saturating_sub(end);
            self.sealed.push(summary);
        }
    }

    fn enter_block(&mut self, block: &Block, segment: u32, epoch: u64, graves: &Graves) {
        let place = Place { segment, page: block.page };
        let owed = |sequence| Tombstone { key: block.meta.key, sequence, target: place, target_epoch: epoch };
        if graves.places.contains(&(epoch, block.page)) {
            return;
        }
        if graves.killed(block) {
            return self.owed.push(owed(0));
        }
        if self.index.contains(block.meta.key) {
            return self.owed.push(owed(0));
        }
        self.index.insert(&Found { meta: block.meta, checksum: block.checksum, place });
        self.segments.at(segment).lives(format::pages(block.meta.size));
        self.report.blocks += 1;
        self.report.block_bytes += u64::from(block.meta.size);
    }

    /// Makes a segment the head of its kind again, if it is the youngest of that kind and has room.
    fn resume(&mut self, found: &InUse) -> bool {
        let head = &mut self.heads[usize::from(found.kind == Kind::Cold)];
        if found.saved || head.is_some() || found.end.saturating_add(2) > self.segments.pages {
            return false;
        }
        *head = Some(Head { segment: found.segment, epoch: found.epoch, page: found.end, begun: true });
        self.segments.at(found.segment).state = State::Open(found.kind);
        true
    }
}
