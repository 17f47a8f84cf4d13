//! What the NVMe tier finds on its disk: the header page of a group as it is (`p`), or with fields and entries that are right
//! but for what they say (`g`); and a folder of segments that a store left, in which something was changed since (`d`).

mod damage;
mod folder;

use crate::input::Input;
use crate::kind;
use kvasir_dataplane::tier::nvme::format::{
    ENTRIES_MAX, ENTRY, Entry, GroupHead, Kind, PAGE, Place, decode_group, encode_group, pages,
};

/// Of the pages that are read here.
const AT: Place = Place { segment: 1, page: 2 };
const STORE: u64 = 42;
const SEGMENT_PAGES: u32 = 64;

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b'p', page)) => raw(page),
        Some((b'g', fields)) => group(&mut Input(fields)),
        Some((b'd', steps)) => folder::run(steps),
        _ => {}
    }
}

fn raw(bytes: &[u8]) {
    let mut page = bytes.to_vec();
    for _ in 0..2 {
        if let Some((head, entries)) = decode_group(&page, AT, STORE, SEGMENT_PAGES) {
            sound(&head, &entries);
        }
        page.resize(PAGE, 0);
    }
}

/// Whether a group that was read is one: inside its segment, and its blocks inside of it.
fn sound(head: &GroupHead, entries: &[Entry]) {
    assert_eq!((head.segment, head.page), (AT.segment, AT.page));
    assert!((1..=SEGMENT_PAGES - AT.page).contains(&head.pages) && entries.len() <= ENTRIES_MAX);
    for entry in entries {
        if let Entry::Block(block) = entry {
            assert!(block.meta.size > 0 && block.page > head.page);
            assert!(block.page + pages(block.meta.size) <= head.page + head.pages);
        }
    }
}

/// What is written reads as it was, or not at all.
fn group(input: &mut Input<'_>) {
    let (head, entries) = (head(input, AT), entries(input));
    let mut page = vec![0; PAGE];
    encode_group(&head, &entries, STORE, &mut page);
    let Some(read) = decode_group(&page, AT, STORE, SEGMENT_PAGES) else { return };
    sound(&read.0, &read.1);
    assert_eq!(read, (head, entries));
    for (store, at) in
        [(STORE + 1, AT), (STORE, Place { page: 3, ..AT }), (STORE, Place { segment: 2, ..AT })]
    {
        assert!(decode_group(&page, at, store, SEGMENT_PAGES).is_none(), "it is of another place");
    }
}

fn head(input: &mut Input<'_>, at: Place) -> GroupHead {
    let kind = [Kind::Hot, Kind::Cold, Kind::Free][usize::from(input.byte()) % 3];
    let (epoch, pages) = (input.u64(), input.u32());
    GroupHead { segment: at.segment, epoch, page: at.page, pages, kind }
}

/// As many as are there and fit into a page.
fn entries(input: &mut Input<'_>) -> Vec<Entry> {
    let count = usize::from(input.byte()) % (ENTRIES_MAX + 1);
    (0..count).map_while(|_| Entry::decode(&input.array::<ENTRY>())).collect()
}
