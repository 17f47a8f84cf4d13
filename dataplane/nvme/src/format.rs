//! The format on the disk: groups of records inside segment files.
//!
//! A group is one header page and the payloads of up to 63 blocks, each padded to a page, written in one go. The header
//! names its own place (store, segment, epoch, page), so a page of an earlier life of the file, or a header that is
//! really the content of a block, is never taken for a group. Version 1; numbers are little-endian.
//!
//! ```text
//! header page   0 magic 8 | 8 store id 8 | 16 epoch 8 | 24 segment 4 | 28 page 4 | 32 pages 4 | 36 entries 2 | 38 kind 1
//!               39 version 1 | 40 zero 16 | 56 xxh3 of the page before and after these 8 bytes, up to the last entry
//!               64 entries of 64 bytes
//! block         0 key 16 | 16 parent 16 | 32 checksum 8 | 40 sequence 8 | 48 size 4 | 52 depth 4 | 56 page 2
//!               58 tenant 2 | 60 class 2 | 62 kind 1 (1, or 2 with a parent)
//! tombstone     0 key 16 | 16 zero 16 | 32 target epoch 8 | 40 sequence 8 | 48 target segment 4
//!               56 target page 2 | 62 kind 3
//! ```

use std::ops::Range;

use kvasir_protocol::block::{BlockKey, BlockMeta, Checksum};

/// Unit of everything on the disk; what `O_DIRECT` asks for on any device in use.
pub const PAGE: usize = 4096;
/// Blocks and tombstones that one header page names.
pub const ENTRIES_MAX: usize = (PAGE - HEAD) / ENTRY;
/// The most entries of a segment's first group. They share the smallest sector of a disk with their head, so a power cut leaves that or
/// what was there before: were it torn, nothing would tell an earlier life of the segment from the present one.
pub const FIRST_ENTRIES_MAX: usize = (512 - HEAD) / ENTRY;
/// The most pages of a segment: a page within one is 16 bits on the disk and in the index.
pub const SEGMENT_PAGES_MAX: u64 = 1 << 16;
/// Bytes of one entry, in a header page and in a checkpoint.
pub const ENTRY: usize = 64;

/// Epochs and sequences are below this. A store that counts from one of them has numbers left for all that it will ever do.
pub(super) const NUMBERS_END: u64 = 1 << 63;

const HEAD: usize = 64;
const MAGIC: &[u8; 8] = b"KvasirSG";
const VERSION: u8 = 1;

/// Pages of the largest block: all of a segment but its first header page, and one page of slack.
pub(super) fn block_pages_largest(segment_pages: u32) -> u32 {
    segment_pages.saturating_sub(2)
}

/// Pages that `bytes` of payload take.
pub fn pages(bytes: u32) -> u32 {
    bytes.div_ceil(PAGE as u32)
}

/// Where a record is: payload of a block, or the header page of a tombstone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub segment: u32,
    pub page: u32,
}

/// Which of the two open ends of the log a group belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// New blocks.
    Hot = 1,
    /// Blocks that compaction moved.
    Cold = 2,
    /// This is not a group: the segment has been free since this epoch.
    Free = 3,
}

/// What a header page says of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupHead {
    pub segment: u32,
    pub epoch: u64,
    /// Where the header page is.
    pub page: u32,
    /// Header page and payloads.
    pub pages: u32,
    pub kind: Kind,
}

/// A block of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub meta: BlockMeta,
    pub checksum: u64,
    /// Rises with every put and remove of the store; a copy made by compaction keeps it. 0 if it is not known.
    pub sequence: u64,
    /// First page of the payload within its segment.
    pub page: u32,
}

/// Says that a block was removed: the copy at `target`, and any other with a smaller sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tombstone {
    pub key: BlockKey,
    pub sequence: u64,
    pub target: Place,
    /// Epoch of the target's segment; once that life of the segment is over, the tombstone has done its work.
    pub target_epoch: u64,
}

/// What a header page, or a summary, names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    Block(Block),
    Tombstone(Tombstone),
}

impl Entry {
    /// The sequence number of the put or removal that it tells of.
    pub fn sequence(&self) -> u64 {
        match self {
            Self::Block(block) => block.sequence,
            Self::Tombstone(tombstone) => tombstone.sequence,
        }
    }

    /// The bytes of the entry.
    pub fn encode(&self) -> [u8; ENTRY] {
        let mut out = [0; ENTRY];
        match self {
            Self::Block(block) => {
                let parent = block.meta.parent;
                out[0..16].copy_from_slice(&block.meta.key.0.to_le_bytes());
                out[16..32].copy_from_slice(&parent.unwrap_or_default().0.to_le_bytes());
                out[32..40].copy_from_slice(&block.checksum.to_le_bytes());
                out[40..48].copy_from_slice(&block.sequence.to_le_bytes());
                out[48..52].copy_from_slice(&block.meta.size.to_le_bytes());
                out[52..56].copy_from_slice(&block.meta.depth.to_le_bytes());
                out[56..58].copy_from_slice(&(block.page as u16).to_le_bytes());
                out[58..60].copy_from_slice(&block.meta.tenant.to_le_bytes());
                out[60..62].copy_from_slice(&block.meta.class.to_le_bytes());
                out[62] = if parent.is_some() { 2 } else { 1 };
            }
            Self::Tombstone(tombstone) => {
                out[0..16].copy_from_slice(&tombstone.key.0.to_le_bytes());
                out[32..40].copy_from_slice(&tombstone.target_epoch.to_le_bytes());
                out[40..48].copy_from_slice(&tombstone.sequence.to_le_bytes());
                out[48..52].copy_from_slice(&tombstone.target.segment.to_le_bytes());
                out[56..58].copy_from_slice(&(tombstone.target.page as u16).to_le_bytes());
                out[62] = 3;
            }
        }
        out
    }

    /// Whether it may stand in this part of a segment, which begins with a header page.
    pub(super) fn is_within(&self, part: &Range<u32>, segment_pages: u32) -> bool {
        let fits = match self {
            Self::Block(block) => {
                let pages = pages(block.meta.size);
                let end = block.page.checked_add(pages);
                block.page > part.start
                    && end.is_some_and(|end| end <= part.end)
                    && pages <= block_pages_largest(segment_pages)
            }
            Self::Tombstone(tombstone) => tombstone.target_epoch < NUMBERS_END,
        };
        fits && self.sequence() < NUMBERS_END
    }

    /// Returns `None` if the bytes are not an entry. The caller must check whether its numbers make sense in a segment.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let key = BlockKey(u128::from_le_bytes(array(bytes, 0)?));
        let checksum_or_epoch = u64::from_le_bytes(array(bytes, 32)?);
        let sequence = u64::from_le_bytes(array(bytes, 40)?);
        let size_or_segment = u32::from_le_bytes(array(bytes, 48)?);
        let depth = u32::from_le_bytes(array(bytes, 52)?);
        let page = u32::from(u16::from_le_bytes(array(bytes, 56)?));
        let tenant = u16::from_le_bytes(array(bytes, 58)?);
        let class = u16::from_le_bytes(array(bytes, 60)?);
        let kind = *bytes.get(62)?;
        match kind {
            1 | 2 if size_or_segment > 0 => {
                let parent = BlockKey(u128::from_le_bytes(array(bytes, 16)?));
                let parent = (kind == 2).then_some(parent);
                let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms: 0, size: size_or_segment };
                Some(Self::Block(Block { meta, checksum: checksum_or_epoch, sequence, page }))
            }
            3 => Some(Self::Tombstone(Tombstone {
                key,
                sequence,
                target: Place { segment: size_or_segment, page },
                target_epoch: checksum_or_epoch,
            })),
            _ => None,
        }
    }
}

/// Writes a group's header page. `entries` are at most [`ENTRIES_MAX`].
pub fn encode_group(head: &GroupHead, entries: &[Entry], store: u64, page: &mut [u8]) {
    debug_assert!(entries.len() <= ENTRIES_MAX && page.len() == PAGE);
    page.fill(0);
    page[0..8].copy_from_slice(MAGIC);
    page[8..16].copy_from_slice(&store.to_le_bytes());
    page[16..24].copy_from_slice(&head.epoch.to_le_bytes());
    page[24..28].copy_from_slice(&head.segment.to_le_bytes());
    page[28..32].copy_from_slice(&head.page.to_le_bytes());
    page[32..36].copy_from_slice(&head.pages.to_le_bytes());
    page[36..38].copy_from_slice(&(entries.len() as u16).to_le_bytes());
    page[38] = head.kind as u8;
    page[39] = VERSION;
    for (slot, entry) in page[HEAD..].chunks_exact_mut(ENTRY).zip(entries) {
        slot.copy_from_slice(&entry.encode());
    }
    let sum = header_checksum(page, entries.len());
    page[56..64].copy_from_slice(&sum.to_le_bytes());
}

/// Reads a header page that should stand at `at` in a segment of `segment_pages`. `None` means that it is anything else, however
/// it came to be so: never written, of an earlier store, torn, damaged.
pub fn decode_group(
    page: &[u8],
    at: Place,
    store: u64,
    segment_pages: u32,
) -> Option<(GroupHead, Vec<Entry>)> {
    let kind = match *page.get(38)? {
        1 => Kind::Hot,
        2 => Kind::Cold,
        3 => Kind::Free,
        _ => return None,
    };
    let count = usize::from(u16::from_le_bytes(array(page, 36)?));
    let head = GroupHead {
        segment: u32::from_le_bytes(array(page, 24)?),
        epoch: u64::from_le_bytes(array(page, 16)?),
        page: u32::from_le_bytes(array(page, 28)?),
        pages: u32::from_le_bytes(array(page, 32)?),
        kind,
    };
    let known = page.starts_with(MAGIC) && page[39] == VERSION && page.len() == PAGE;
    let here =
        u64::from_le_bytes(array(page, 8)?) == store && head.segment == at.segment && head.page == at.page;
    let fits = count <= ENTRIES_MAX && head.pages >= 1 && head.pages <= segment_pages.saturating_sub(at.page);
    let fits = fits && head.epoch < NUMBERS_END;
    if !known || !here || !fits || u64::from_le_bytes(array(page, 56)?) != header_checksum(page, count) {
        return None;
    }
    let entries: Option<Vec<_>> = page[HEAD..].chunks_exact(ENTRY).take(count).map(Entry::decode).collect();
    // `head.pages` is within the segment.
    let inside = head.page..head.page + head.pages;
    let entries =
        entries.filter(|entries| entries.iter().all(|entry| entry.is_within(&inside, segment_pages)))?;
    Some((head, entries))
}

fn header_checksum(page: &[u8], entries: usize) -> u64 {
    let mut hasher = Checksum::default();
    hasher.update(&page[..56]);
    hasher.update(&page[HEAD..HEAD + entries * ENTRY]);
    hasher.finish()
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries() -> Vec<Entry> {
        let mut meta = BlockMeta::single(BlockKey(7), 5000);
        (meta.class, meta.tenant) = (3, 6);
        let block = Block { meta, checksum: 11, sequence: 12, page: 3 };
        meta.parent = Some(BlockKey(9));
        meta.depth = 4;
        let target = Place { segment: 2, page: 8 };
        let tombstone = Tombstone { key: BlockKey(1 << 100), sequence: 5, target, target_epoch: 6 };
        vec![Entry::Block(block), Entry::Block(Block { meta, page: 5, ..block }), Entry::Tombstone(tombstone)]
    }

    const AT: Place = Place { segment: 1, page: 2 };

    fn page() -> Vec<u8> {
        let mut page = vec![0xff; PAGE];
        let head = GroupHead { segment: 1, epoch: 77, page: 2, pages: 5, kind: Kind::Hot };
        encode_group(&head, &entries(), 42, &mut page);
        page
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What hosts have on their disks.
    #[test]
    fn the_layout_is_fixed() {
        let page = page();
        let head = concat!(
            "4b766173697253472a000000000000004d000000000000000100000002000000",
            "050000000300010100000000000000000000000000000000",
        );
        let entries = concat!(
            "0700000000000000000000000000000000000000000000000000000000000000",
            "0b000000000000000c0000000000000088130000000000000300060003000100",
            "0700000000000000000000000000000009000000000000000000000000000000",
            "0b000000000000000c0000000000000088130000040000000500060003000200",
            "0000000000000000000000001000000000000000000000000000000000000000",
            "0600000000000000050000000000000002000000000000000800000000000300",
        );
        assert_eq!((hex(&page[..56]), hex(&page[64..64 + 3 * 64])), (head.into(), entries.into()));
        let sum = u64::from_le_bytes(*page[56..].first_chunk().unwrap());
        assert_eq!(sum, kvasir_protocol::block::checksum(&[&page[..56], &page[64..64 + 3 * 64]].concat()));
        assert!(page[64 + 3 * 64..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_first_group_is_within_one_sector() {
        let entries = vec![entries()[0]; FIRST_ENTRIES_MAX + 1];
        let mut page = vec![0; PAGE];
        let mut ends = |count: usize| {
            encode_group(
                &GroupHead { segment: 1, epoch: 2, page: 0, pages: 1, kind: Kind::Hot },
                &entries[..count],
                42,
                &mut page,
            );
            page.iter().rposition(|&byte| byte != 0).unwrap()
        };
        assert!(ends(FIRST_ENTRIES_MAX) < 512 && ends(FIRST_ENTRIES_MAX + 1) >= 512);
    }

    #[test]
    fn a_group_reads_as_it_was_written_and_only_where_it_stands() {
        let page = page();
        let (head, read) = decode_group(&page, AT, 42, 64).unwrap();
        assert_eq!((head.epoch, head.pages, read), (77, 5, entries()));
        assert!(decode_group(&page, Place { page: 3, ..AT }, 42, 64).is_none());
        assert!(decode_group(&page, Place { segment: 0, ..AT }, 42, 64).is_none());
        assert!(decode_group(&page, AT, 43, 64).is_none(), "of another store");
        assert!(decode_group(&page, AT, 42, 6).is_none(), "longer than its segment");
    }

    /// With a checksum that is right, too: it is no secret.
    #[test]
    fn numbers_behind_which_there_is_none_and_blocks_larger_than_any_are_refused() {
        let mut page = vec![0; PAGE];
        let mut reads = |epoch: u64, sequence: u64, pages: u32| {
            let meta = BlockMeta::single(BlockKey(7), pages * PAGE as u32);
            let entries = [Entry::Block(Block { meta, checksum: 11, sequence, page: 1 })];
            let head = GroupHead { segment: 1, epoch, page: 0, pages: 1 + pages, kind: Kind::Hot };
            encode_group(&head, &entries, 42, &mut page);
            decode_group(&page, Place { segment: 1, page: 0 }, 42, 16).is_some()
        };
        assert!(reads(NUMBERS_END - 1, NUMBERS_END - 1, 14));
        assert!(!reads(NUMBERS_END, 1, 14) && !reads(1, NUMBERS_END, 14) && !reads(1, 1, 15));
        let mut buries = |target_epoch: u64| {
            let target = Place { segment: 2, page: 3 };
            let entries =
                [Entry::Tombstone(Tombstone { key: BlockKey(7), sequence: 1, target, target_epoch })];
            let head = GroupHead { segment: 1, epoch: 1, page: 0, pages: 1, kind: Kind::Hot };
            encode_group(&head, &entries, 42, &mut page);
            decode_group(&page, Place { segment: 1, page: 0 }, 42, 16).is_some()
        };
        assert!(buries(NUMBERS_END - 1) && !buries(NUMBERS_END));
    }

    proptest! {
        #[test]
        fn a_flipped_bit_of_what_is_used_is_noticed(bit in 0..(64 + 3 * ENTRY) * 8) {
            let mut page = page();
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(decode_group(&page, AT, 42, 64).is_none());
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..PAGE + 10), sign in any::<bool>()) {
            if sign && bytes.len() > 8 {
                bytes[..8].copy_from_slice(MAGIC);
            }
            prop_assert!(decode_group(&bytes, AT, 42, 64).is_none());
        }
    }
}
