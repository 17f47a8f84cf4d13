//! What happens to the files of a store while it is away.

use super::folder::{Left, SEGMENT_BYTES, SEGMENTS};
use super::{entries, head};
use crate::input::Input;
use kvasir_dataplane::tier::nvme::format::{Entry, Kind, PAGE, Place, encode_group};
use kvasir_dataplane::{BlockKey, checksum};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const STEPS_MAX: usize = 12;
const PAGES: u32 = (SEGMENT_BYTES / PAGE as u64) as u32;

/// What somebody has written who knows the format.
#[derive(Default)]
pub(super) struct Forged {
    pub(super) is_any: bool,
    /// Blocks that were never put.
    pub(super) keys: Vec<BlockKey>,
}

impl Forged {
    fn add(&mut self, keys: Vec<BlockKey>) {
        self.is_any = true;
        self.keys.extend(keys);
    }
}

/// Does it.
pub(super) fn all(dir: &Path, left: &Left, input: &mut Input<'_>) -> Forged {
    let mut forged = Forged::default();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.byte() % 7 {
            0 => change(dir, input),
            1 => clear(dir, input),
            2 => misplace(dir, input),
            3 => cut(dir, input),
            4 => write(dir, place(input), input.part()),
            5 => forged.add(forge(dir, left, input)),
            _ => forged.add(summary(dir, input)),
        }
    }
    forged
}

fn place(input: &mut Input<'_>) -> Place {
    Place { segment: u32::from(input.byte()) % SEGMENTS, page: u32::from(input.byte()) % PAGES }
}

fn file(dir: &Path, segment: u32) -> File {
    let path = dir.join(format!("segment-{segment:06}"));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.expect("a segment");
    if file.metadata().expect("a size").len() == 0 {
        file.set_len(SEGMENT_BYTES).expect("room");
    }
    file
}

fn write(dir: &Path, place: Place, bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(PAGE)];
    let at = u64::from(place.page) * PAGE as u64;
    file(dir, place.segment).write_all_at(bytes, at).expect("a page is written");
}

fn page(dir: &Path, place: Place) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    // What is behind the end of a file that was cut reads as zeros.
    let at = u64::from(place.page) * PAGE as u64;
    let _ = file(dir, place.segment).read_at(&mut page, at).expect("a page is read");
    page
}

/// Bits flip.
fn change(dir: &Path, input: &mut Input<'_>) {
    let (place, at, bits) = (place(input), usize::from(input.u16()) % PAGE, input.byte());
    let mut page = page(dir, place);
    page[at] ^= bits;
    write(dir, place, &page);
}

/// A write never came to the disk.
fn clear(dir: &Path, input: &mut Input<'_>) {
    write(dir, place(input), &[0; PAGE]);
}

/// A write came to another place than it was meant for.
fn misplace(dir: &Path, input: &mut Input<'_>) {
    let page = page(dir, place(input));
    write(dir, place(input), &page);
}

fn cut(dir: &Path, input: &mut Input<'_>) {
    let segment = place(input).segment;
    file(dir, segment).set_len(u64::from(input.u16())).expect("a file is cut");
}

/// Somebody who knows the format writes a group whose checksum is right.
fn forge(dir: &Path, left: &Left, input: &mut Input<'_>) -> Vec<BlockKey> {
    let at = place(input);
    let (head, mut entries) = (head(input, at), entries(input));
    let keys = renamed(&mut entries);
    let mut page = vec![0; PAGE];
    encode_group(&head, &entries, left.store, &mut page);
    write(dir, at, &page);
    keys
}

/// Names the blocks as no block of the store is named: what is forged under its names has its bytes, too.
fn renamed(entries: &mut [Entry]) -> Vec<BlockKey> {
    let mut keys = Vec::new();
    for entry in entries {
        if let Entry::Block(block) = entry {
            block.meta.key = BlockKey(block.meta.key.0 as u8 as u128);
            keys.push(block.meta.key);
        }
    }
    keys
}

/// The same with a summary in the checkpoint: its head with the checksum of its entries, and these.
fn summary(dir: &Path, input: &mut Input<'_>) -> Vec<BlockKey> {
    let segment = place(input).segment;
    let mut entries = entries(input);
    let keys = renamed(&mut entries);
    let bytes: Vec<u8> = entries.iter().flat_map(Entry::encode).collect();
    let kind = if input.byte().is_multiple_of(2) { Kind::Hot } else { Kind::Cold };
    let sealed = u8::from(input.byte().is_multiple_of(2));
    let (end, epoch, headers) = (input.u32(), input.u64(), input.u32());
    let head = [
        &[1, kind as u8, sealed, 0][..],
        &end.to_le_bytes(),
        &epoch.to_le_bytes(),
        &(entries.len() as u32).to_le_bytes(),
        &headers.to_le_bytes(),
        &checksum(&bytes).to_le_bytes(),
    ];
    // It waits for the lock of one that was closed just now.
    let db = kvasir_state_db::open(&dir.join("checkpoint"), 1 << 20).expect("a checkpoint").db;
    for (part, bytes) in [(0, head.concat()), (1, bytes)] {
        let key = (u64::from(segment) << 32 | part).to_be_bytes();
        db.insert(key, bytes).expect("a record is written");
    }
    keys
}
