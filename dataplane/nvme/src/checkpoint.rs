//! What recovery need not read again: a summary of every sealed segment, kept in `sled`.
//!
//! A summary lists the records of one segment, and is saved once those are durable; so the checkpoint grows by one
//! segment at a time, each atomically, and never needs the whole index. It is soft state: without it, or if any of it is
//! damaged, the segments themselves are read.
//!
//! Keys are segment (4 B, big-endian) and part (4 B): part 0 is the head, the others hold 512 entries each.

use std::path::{Path, PathBuf};

use kvasir_protocol::block::Checksum;
use kvasir_state_db as state_db;

use super::format::{ENTRY, Entry, Kind, NUMBERS_END};

const CACHE_BYTES: u64 = 16 << 20;
const PART_ENTRIES: usize = 512;
const VERSION: u8 = 1;

/// What is in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) segment: u32,
    pub(super) epoch: u64,
    pub(super) kind: Kind,
    /// Nothing is added behind `end` any more.
    pub(super) sealed: bool,
    /// Pages that the summary describes.
    pub(super) end: u32,
    /// Header pages of groups that hold blocks.
    pub(super) headers: u32,
    pub(super) entries: Vec<Entry>,
}

pub(super) struct Checkpoint(state_db::Db);

impl Summary {
    pub(super) fn new(segment: u32, epoch: u64, kind: Kind) -> Self {
        Self { segment, epoch, kind, sealed: false, end: 0, headers: 0, entries: Vec::new() }
    }

    /// Whether it can describe a segment of `segment_pages` pages.
    fn fits(&self, segment_pages: u32) -> bool {
        let part = 0..self.end;
        let within = |entry: &Entry| entry.is_within(&part, segment_pages);
        self.epoch < NUMBERS_END
            && self.headers <= self.end
            && self.end <= segment_pages
            && self.entries.iter().all(within)
    }
}

impl Checkpoint {
    /// Opens the checkpoint. Also says where a damaged one was put, if this one takes its place.
    pub(super) fn open(path: &Path) -> Result<(Self, Option<PathBuf>), state_db::OpenError> {
        let opened = state_db::open(path, CACHE_BYTES)?;
        Ok((Self(opened.db), opened.set_aside))
    }

    pub(super) fn save(&self, summaries: &[Summary]) -> sled::Result<()> {
        for summary in summaries {
            let mut batch = self.removal(summary.segment)?;
            let mut hasher = Checksum::default();
            for (part, entries) in (1..).zip(summary.entries.chunks(PART_ENTRIES)) {
                let bytes: Vec<u8> = entries.iter().flat_map(Entry::encode).collect();
                hasher.update(&bytes);
                batch.insert(&key(summary.segment, part), bytes);
            }
            batch.insert(&key(summary.segment, 0), head(summary, hasher.finish()).as_slice());
            self.0.apply_batch(batch)?;
        }
        self.0.flush()
    }

    pub(super) fn remove(&self, segment: u32) -> sled::Result<()> {
        self.0.apply_batch(self.removal(segment)?)
    }

    /// The summary of a segment of `segment_pages` pages, or `None` if there is no whole one that makes sense.
    pub(super) fn load(&self, segment: u32, segment_pages: u32) -> Option<Summary> {
        let head = self.0.get(key(segment, 0)).ok()??;
        let (mut summary, count, checksum) = parse_head(segment, &head)?;
        let mut hasher = Checksum::default();
        for part in 1..=count.div_ceil(PART_ENTRIES) as u32 {
            let bytes = self.0.get(key(segment, part)).ok()??;
            hasher.update(&bytes);
            let entries: Option<Vec<Entry>> = bytes.chunks(ENTRY).map(Entry::decode).collect();
            summary.entries.extend(entries?);
        }
        let whole = summary.entries.len() == count && hasher.finish() == checksum;
        (whole && summary.fits(segment_pages)).then_some(summary)
    }

    fn removal(&self, segment: u32) -> sled::Result<sled::Batch> {
        let mut batch = sled::Batch::default();
        for found in self.0.scan_prefix(segment.to_be_bytes()).keys() {
            batch.remove(found?);
        }
        Ok(batch)
    }
}

fn key(segment: u32, part: u32) -> [u8; 8] {
    (u64::from(segment) << 32 | u64::from(part)).to_be_bytes()
}

/// 0 version 1 | 1 kind 1 | 2 sealed 1 | 3 zero 1 | 4 end 4 | 8 epoch 8 | 16 entries 4 | 20 headers 4 | 24 checksum 8
fn head(summary: &Summary, checksum: u64) -> [u8; 32] {
    let mut out = [0; 32];
    out[..3].copy_from_slice(&[VERSION, summary.kind as u8, summary.sealed.into()]);
    out[4..8].copy_from_slice(&summary.end.to_le_bytes());
    out[8..16].copy_from_slice(&summary.epoch.to_le_bytes());
    out[16..20].copy_from_slice(&(summary.entries.len() as u32).to_le_bytes());
    out[20..24].copy_from_slice(&summary.headers.to_le_bytes());
    out[24..].copy_from_slice(&checksum.to_le_bytes());
    out
}

fn parse_head(segment: u32, bytes: &[u8]) -> Option<(Summary, usize, u64)> {
    let bytes: &[u8; 32] = bytes.try_into().ok()?;
    let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let kind = match (bytes[0], bytes[1]) {
        (VERSION, 1) => Kind::Hot,
        (VERSION, 2) => Kind::Cold,
        _ => return None,
    };
    let mut summary = Summary::new(segment, u64_at(8), kind);
    (summary.sealed, summary.end, summary.headers) = (bytes[2] == 1, u32_at(4), u32_at(20));
    Some((summary, u32_at(16) as usize, u64_at(24)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Block;
    use kvasir_protocol::block::{BlockKey, BlockMeta};

    /// Of a segment.
    const PAGES: u32 = 4096;

    fn summary(segment: u32, blocks: u32) -> Summary {
        let block = |n| {
            let meta = BlockMeta::single(BlockKey(u128::from(n)), n + 1);
            Entry::Block(Block { meta, checksum: 3, sequence: u64::from(n), page: n + 1 })
        };
        let mut summary = Summary::new(segment, 9, Kind::Cold);
        (summary.end, summary.headers, summary.sealed) = (blocks + 1, 1, true);
        summary.entries = (0..blocks).map(block).collect();
        summary
    }

    /// What hosts have on their disks.
    #[test]
    fn the_layout_of_a_head_is_fixed() {
        let mut summary = summary(1, 3);
        (summary.end, summary.headers) = (0x1112_1314, 0x2122_2324);
        let expected = [
            0x01, 2, 1, 0, 0x14, 0x13, 0x12, 0x11, 9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0x24, 0x23, 0x22,
            0x21, 0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,
        ];
        assert_eq!(head(&summary, 0x3132_3334_3536_3738), expected);
    }

    #[test]
    fn summaries_outlive_a_reopen_and_a_damaged_checkpoint_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint");
        let (large, small) = (summary(1, 1500), summary(2, 3));
        let (checkpoint, _) = Checkpoint::open(&path).unwrap();
        checkpoint.save(&[large.clone(), small.clone()]).unwrap();
        drop(checkpoint);
        let (checkpoint, _) = Checkpoint::open(&path).unwrap();
        assert_eq!(
            (checkpoint.load(1, PAGES), checkpoint.load(2, PAGES), checkpoint.load(3, PAGES)),
            (Some(large), Some(small), None)
        );
        checkpoint.save(&[summary(1, 2)]).unwrap();
        assert_eq!(checkpoint.load(1, PAGES), Some(summary(1, 2)), "the longer one left nothing behind");
        checkpoint.0.remove(key(2, 1)).unwrap();
        assert_eq!(checkpoint.load(2, PAGES), None, "a part is missing");
        for change in [
            |summary: &mut Summary| summary.end = PAGES + 1,
            |summary: &mut Summary| summary.end -= 1,
            |summary: &mut Summary| summary.headers = u32::MAX,
            |summary: &mut Summary| summary.epoch = u64::MAX,
        ] {
            let mut nonsense = summary(3, 2);
            change(&mut nonsense);
            checkpoint.save(&[nonsense]).unwrap();
            assert_eq!(checkpoint.load(3, PAGES), None, "it is of no segment");
        }
        checkpoint.remove(1).unwrap();
        assert_eq!(checkpoint.load(1, PAGES), None);
        drop(checkpoint);

        std::fs::write(path.join("conf"), "nonsense").unwrap();
        std::fs::write(path.join("db"), "nonsense").unwrap();
        let (checkpoint, set_aside) = Checkpoint::open(&path).unwrap();
        assert!(checkpoint.load(2, PAGES).is_none() && set_aside.is_some_and(|kept| kept.exists()));
    }
}
