//! The write side of the engine: puts, removes and moves become groups at the ends of the log.
//!
//! Whatever waits when a group can be started goes into it together (group commit): tombstones first, then blocks, up
//! to 63 of them or about 1 MiB. Several groups are under way at once, except that the first group of a segment is
//! waited for until it is durable: recovery reads the segment's epoch from it. If a power cut could take it and leave
//! what came later, that would be ignored, its epoch given again, and its records taken for those of the new life.
//!
//! A group with a removal is durable before the removal is done, whatever the mode: nobody repeats a removal, while a
//! block that is lost is a miss.

use std::sync::Arc;

use super::checkpoint::Summary;
use super::engine::{End, Engine, Ticket, Work, sync, sync_folder};
use super::format::{
    self, Block, ENTRIES_MAX, Entry, FIRST_ENTRIES_MAX, GroupHead, Kind, PAGE, Place, Tombstone,
};
use super::index::Found;
use super::io::{Op, OpKind, Piece};
use super::segments::State;
use super::shared::{count, uncount};
use super::{NAME, OnFull, SyncMode};
use kvasir_memory::buffer::Buffer;
use kvasir_memory::shared::Shared;
use kvasir_os::planted::{self, Bug};
use kvasir_protocol::block::BlockKey;
use kvasir_store::store::{Put, PutDone, Stored, TierError};

/// A group takes no further block once it is this long: the size of write from which devices run at full speed.
const GROUP_PAGES: u32 = (1 << 20) / PAGE as u32;
/// The most copies in doubt; a disk that fails more writes is not written to any more.
const DOUBTFUL_MAX: usize = 1 << 16;

type Removed = Result<bool, TierError>;

/// One record on its way into the log.
pub(super) enum Append {
    Put { put: Put, ticket: Ticket<PutDone>, sequence: u64 },
    Move { block: Block, from: Place, buffer: Buffer, ticket: Ticket<bool> },
    Tombstone { tombstone: Tombstone, purpose: Purpose },
}

/// Why a tombstone is written.
pub(super) enum Purpose {
    Remove(Ticket<Removed>),
    /// Compaction moves it.
    Move(Ticket<bool>),
    /// It belongs to a copy that nobody can see.
    Tidy,
}

/// A record that compaction moves.
pub(super) enum Moving {
    Block { block: Block, from: Place, buffer: Buffer },
    Tombstone(Tombstone),
}

/// A caller that waits until a key's record is written.
pub(super) enum Waiter {
    Put(Put, Ticket<PutDone>),
    Remove(Ticket<Removed>),
    Move(Moving, Ticket<bool>),
}

/// An open end of the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) segment: u32,
    pub(super) epoch: u64,
    /// Where the next group goes.
    pub(super) page: u32,
    /// The segment's first group is durable.
    pub(super) begun: bool,
}

/// A group under way.
pub(super) struct Group {
    head: GroupHead,
    appended: Vec<(Append, Entry)>,
    /// The header page, and copies of what cannot be written from where it is. Held until the write is done.
    _pages: Vec<Buffer>,
    /// Syncs under way, and why one of them failed.
    syncs: u32,
    failed: Option<String>,
}

impl Group {
    /// Whether it must be durable before it counts.
    fn is_synced(&self, mode: SyncMode) -> bool {
        let removes = |(append, _): &(Append, Entry)| {
            matches!(append, Append::Tombstone { purpose: Purpose::Remove(_), .. })
        };
        mode == SyncMode::Batch
            || (self.head.page == 0 && !planted::is(Bug::BeginsSegmentUnsynced))
            || (self.appended.iter().any(removes) && !planted::is(Bug::AnswersRemovalUnsynced))
    }
}

impl Append {
    fn pages(&self) -> u32 {
        match self {
            Self::Put { put, .. } => format::pages(put.meta.size),
            Self::Move { block, .. } => format::pages(block.meta.size),
            Self::Tombstone { .. } => 0,
        }
    }

    fn entry(&self, page: u32) -> Entry {
        match self {
            Self::Put { put, sequence, .. } => {
                Entry::Block(Block { meta: put.meta, checksum: put.checksum, sequence: *sequence, page })
            }
            Self::Move { block, .. } => Entry::Block(Block { page, ..*block }),
            Self::Tombstone { tombstone, .. } => Entry::Tombstone(*tombstone),
        }
    }

    fn payload(&self) -> Shared<'_> {
        match self {
            Self::Put { put, .. } => put.buffer.shared().first(put.meta.size as usize),
            Self::Move { block, buffer, .. } => buffer.bytes()[..block.meta.size as usize].into(),
            Self::Tombstone { .. } => [][..].into(),
        }
    }
}

impl Engine {
    /// The store has checked size, buffer and checksum.
    pub(super) fn start_put(&mut self, put: Put, ticket: Ticket<PutDone>) {
        let (key, pages) = (put.meta.key, u64::from(format::pages(put.meta.size)));
        let refused = |put: Put, error| PutDone { buffer: put.buffer, outcome: Err(error) };
        if ticket.cancelled() {
            return ticket.done(refused(put, TierError::Cancelled));
        }
        if self.shared.index.contains(key) {
            return ticket.done(PutDone { buffer: put.buffer, outcome: Ok(Stored::AlreadyStored) });
        }
        if let Some(waiters) = self.writing.get_mut(&key) {
            return waiters.push(Waiter::Put(put, ticket));
        }
        let claimed = &self.shared.counters.claimed_pages;
        let after = claimed.load(std::sync::atomic::Ordering::Relaxed) + pages;
        if self.shared.config.on_full == OnFull::Refuse && after > self.shared.config.block_pages_max() {
            let full = TierError::Full { tier: NAME, key, size: put.meta.size.into() };
            return ticket.done(refused(put, full));
        }
        count(claimed, pages);
        self.writing.insert(key, Vec::new());
        let sequence = self.sequence();
        self.puts.push_back(Append::Put { put, ticket, sequence });
    }

    /// The block stays visible until its tombstone is written.
    pub(super) fn start_remove(&mut self, key: BlockKey, ticket: Ticket<Removed>) {
        if ticket.cancelled() {
            return ticket.done(Err(TierError::Cancelled));
        }
        if let Some(waiters) = self.writing.get_mut(&key) {
            return waiters.push(Waiter::Remove(ticket));
        }
        let mut copies = self.take_doubts(key);
        if let Some(found) = self.shared.index.get(key) {
            copies.push(self.tombstone(key, found.place, 0));
        }
        let Some(last) = copies.pop() else { return ticket.done(Ok(false)) };
        // Its sequence kills the others as well, but only as long as the last one is on the disk.
        copies.into_iter().for_each(|copy| self.owe(copy));
        let tombstone = Tombstone { sequence: self.sequence(), ..last };
        self.writing.insert(key, Vec::new());
        self.tombstones.push_back(Append::Tombstone { tombstone, purpose: Purpose::Remove(ticket) });
    }

    pub(super) fn start_move(&mut self, moving: Moving, ticket: Ticket<bool>) {
        match moving {
            Moving::Tombstone(tombstone) => {
                // Its target may have gone since the janitor looked.
                let needed = self.shared.segments().holds(&tombstone);
                match needed {
                    true => {
                        self.moves.push_back(Append::Tombstone { tombstone, purpose: Purpose::Move(ticket) })
                    }
                    false => ticket.done(true),
                }
            }
            Moving::Block { mut block, from, buffer } => {
                let key = block.meta.key;
                let has_gone = self.shared.index.get(key).is_none_or(|found| found.place != from);
                let waits = planted::is(Bug::MoveWaitsForPut) && self.writing.contains_key(&key);
                if has_gone && !waits {
                    // It has gone since the janitor looked. It must not wait for a put of the key, which may itself wait for
                    // the space that the janitor makes.
                    ticket.done(true);
                } else if let Some(waiters) = self.writing.get_mut(&key) {
                    waiters.push(Waiter::Move(Moving::Block { block, from, buffer }, ticket));
                } else {
                    if block.sequence == 0 {
                        // The block is alive, so whatever removed the key before was about an earlier copy.
                        block.sequence = self.sequence();
                    }
                    self.writing.insert(key, Vec::new());
                    self.moves.push_back(Append::Move { block, from, buffer, ticket });
                }
            }
        }
    }

    pub(super) fn owe(&mut self, tombstone: Tombstone) {
        self.tombstones.push_back(Append::Tombstone { tombstone, purpose: Purpose::Tidy });
    }

    fn sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence
    }

    /// Starts as many groups as there is work, depth and space for.
    pub(super) fn append(&mut self) {
        if self.shared.broken().is_some() {
            return self.fail_all();
        }
        while self.append_group(Kind::Hot) {}
        // Where new blocks find no space, tombstones may use what is kept for compaction: they are what makes space.
        while self.append_group(Kind::Cold) {}
    }

    fn append_group(&mut self, kind: Kind) -> bool {
        let queue = if kind == Kind::Hot { &self.puts } else { &self.moves };
        let next = self.tombstones.front().or(queue.front()).map(Append::pages);
        let Some(pages) = next.filter(|_| self.may_start()) else { return false };
        let Some(head) = self.head_with(kind, 1 + pages) else { return false };
        if !head.begun && head.page > 0 {
            return false;
        }
        let room = self.shared.segments().pages - head.page;
        let appended = self.gather(kind, head.page, room);
        self.write_group(kind, head, appended);
        true
    }

    /// What the next group holds, with the page of each.
    fn gather(&mut self, kind: Kind, start: u32, room: u32) -> Vec<(Append, Entry)> {
        let (mut appended, mut end) = (Vec::new(), 1);
        let entries_max = if start == 0 { FIRST_ENTRIES_MAX } else { ENTRIES_MAX };
        while appended.len() < entries_max {
            let queue = if kind == Kind::Hot { &mut self.puts } else { &mut self.moves };
            let queue = if self.tombstones.is_empty() { queue } else { &mut self.tombstones };
            let Some(pages) = queue.front().map(Append::pages) else { break };
            if end + pages > room || (end > 1 && end + pages > GROUP_PAGES) {
                break;
            }
            let Some(append) = queue.pop_front() else { break };
            let entry = append.entry(start + end);
            appended.push((append, entry));
            end += pages;
        }
        appended
    }

    fn write_group(&mut self, kind: Kind, at: Head, appended: Vec<(Append, Entry)>) {
        let payload_pages: u32 = appended.iter().map(|(append, _)| append.pages()).sum();
        let pages = 1 + payload_pages;
        let head = GroupHead { segment: at.segment, epoch: at.epoch, page: at.page, pages, kind };
        let entries: Vec<Entry> = appended.iter().map(|(_, entry)| *entry).collect();
        let mut header = Buffer::zeroed(PAGE);
        format::encode_group(&head, &entries, self.shared.disk.store, header.bytes_mut());
        let mut pieces = vec![Piece::of(header.bytes().into())];
        let mut copies = vec![header];
        for (append, _) in &appended {
            gather_payload(append.payload(), &mut pieces, &mut copies);
        }
        let Some(file) = self.claim(kind, &head) else { return };
        let offset = u64::from(head.page) * PAGE as u64;
        let op = Op { kind: OpKind::Write, file, slot: Some(head.segment), offset, pieces };
        let id = self.next_group;
        self.next_group += 1;
        self.groups.insert(id, Group { head, appended, _pages: copies, syncs: 0, failed: None });
        count(&self.shared.counters.written_bytes, u64::from(pages) * PAGE as u64);
        self.submit(op, Work::Write(id));
    }

    /// Books the pages of a group and moves the head past them.
    fn claim(&mut self, kind: Kind, group: &GroupHead) -> Option<Arc<std::fs::File>> {
        if let Some(head) = &mut self.heads[slot(kind)] {
            head.page += group.pages;
        }
        let mut segments = self.shared.segments();
        let segment = segments.at(group.segment);
        segment.end = group.page + group.pages;
        segment.writers += 1;
        segment.file.clone()
    }

    /// The head of `kind`, with room for `pages`; a full one is sealed and the next opened. Returns `None` if space is out.
    fn head_with(&mut self, kind: Kind, pages: u32) -> Option<Head> {
        let size = self.shared.segments().pages;
        if let Some(head) = self.heads[slot(kind)]
            && size - head.page >= pages
        {
            return Some(head);
        }
        let free = self.shared.segments().free_for(kind);
        let Some(segment) = free else {
            self.no_space(kind);
            return None;
        };
        let (file, created) = match self.open_file(segment) {
            Ok(opened) => opened,
            Err(error) => {
                count(&self.shared.counters.io_errors, 1);
                self.fail_queue(kind, &format!("creating segment file {segment}: {error}"));
                return None;
            }
        };
        self.seal(kind);
        let mut segments = self.shared.segments();
        segments.open(segment, kind, file);
        segments.at(segment).unlisted = created;
        let epoch = segments.at(segment).epoch;
        drop(segments);
        self.summaries.insert(segment, Summary::new(segment, epoch, kind));
        self.heads[slot(kind)] = Some(Head { segment, epoch, page: 0, begun: false });
        self.heads[slot(kind)]
    }

    fn no_space(&mut self, kind: Kind) {
        if kind == Kind::Cold {
            // The janitor waits for its moves; only it can make space.
            for append in std::mem::take(&mut self.moves) {
                self.fail(append, "no free segment to move to");
            }
            self.fail_moves_that_wait();
        }
        self.shared.chore(|chores| (chores.look, chores.starving) = (true, true));
    }

    /// Ends the moves of blocks whose removal waits for space itself.
    fn fail_moves_that_wait(&mut self) {
        if planted::is(Bug::MoveWaitsForRemoval) {
            return;
        }
        for waiters in self.writing.values_mut() {
            for waiter in waiters.extract_if(.., |waiter| matches!(waiter, Waiter::Move(..))) {
                let Waiter::Move(_, ticket) = waiter else { continue };
                ticket.done(false);
            }
        }
    }

    /// The file of a segment, and whether its name in the folder may not be durable yet.
    fn open_file(&self, segment: u32) -> std::io::Result<(Arc<std::fs::File>, bool)> {
        let mut segments = self.shared.segments();
        let known = segments.at(segment);
        if let Some(file) = &known.file {
            return Ok((file.clone(), known.unlisted));
        }
        drop(segments);
        Ok((Arc::new(self.shared.disk.segment(segment)?), true))
    }

    fn seal(&mut self, kind: Kind) {
        if let Some(head) = self.heads[slot(kind)].take() {
            self.shared.segments().at(head.segment).state = State::Sealed;
            self.hand_over(head.segment);
            self.shared.chore(|chores| chores.look = true);
        }
    }

    /// Gives the janitor the summary of a segment to which nothing will be added.
    fn hand_over(&mut self, number: u32) {
        let mut segments = self.shared.segments();
        let segment = segments.at(number);
        let complete = segment.state == State::Sealed && segment.writers == 0;
        let end = segment.end;
        drop(segments);
        if complete && let Some(mut summary) = self.summaries.remove(&number) {
            (summary.end, summary.sealed) = (end, true);
            self.shared.chore(|chores| chores.summaries.push(summary));
        }
    }

    pub(super) fn finish_write(&mut self, id: u64, end: End) {
        let failed = end.reason();
        if let Some(group) = self.groups.get(&id) {
            // Only now: a sync that began while it was under way may have missed it.
            self.shared.segments().at(group.head.segment).unsynced = true;
        }
        if failed.is_some() || !self.sync_group(id) {
            self.finish_group(id, failed);
        }
    }

    /// Begins to make a written group durable, if it must be. Returns false if there is nothing to do.
    fn sync_group(&mut self, id: u64) -> bool {
        let mode = self.shared.config.sync;
        let Some(group) = self.groups.get_mut(&id).filter(|group| group.is_synced(mode)) else {
            return false;
        };
        let number = group.head.segment;
        let mut segments = self.shared.segments();
        let segment = segments.at(number);
        let Some(file) = segment.file.clone() else { return false };
        let unlisted = segment.unlisted;
        drop(segments);
        group.syncs = 1 + u32::from(unlisted);
        self.submit(sync(file, Some(number)), Work::GroupSync(id));
        if unlisted {
            self.submit(sync_folder(self.shared.disk.handle.clone()), Work::GroupSync(id));
        }
        true
    }

    pub(super) fn finish_group_sync(&mut self, id: u64, failed: Option<String>) {
        if let Some(reason) = &failed {
            self.shared.breaks(reason);
        }
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.syncs -= 1;
        // The system tells of a failure once, perhaps to another sync that was under way.
        group.failed = failed.or(group.failed.take()).or_else(|| self.shared.broken());
        if group.syncs > 0 {
            return;
        }
        let (failed, number) = (group.failed.take(), group.head.segment);
        if failed.is_none() {
            self.shared.segments().at(number).unlisted = false;
        }
        self.finish_group(id, failed);
    }

    fn finish_group(&mut self, id: u64, failed: Option<String>) {
        let Some(group) = self.groups.remove(&id) else { return };
        let number = group.head.segment;
        if let Some(head) = &mut self.heads[slot(group.head.kind)]
            && head.segment == number
            && group.head.page == 0
        {
            head.begun = true;
            if failed.is_some() {
                // Without its first group the segment has no epoch; nothing else may follow.
                self.seal(group.head.kind);
            }
        }
        let mut dead = 0;
        for (append, entry) in group.appended {
            let (pages, lives) =
                (append.pages(), self.finish_append(append, &entry, number, failed.as_deref()));
            dead += if lives { 0 } else { pages };
            if failed.is_none()
                && let Some(summary) = self.summaries.get_mut(&number)
            {
                summary.entries.push(entry);
            }
        }
        if failed.is_none()
            && group.head.pages > 1
            && let Some(summary) = self.summaries.get_mut(&number)
        {
            summary.headers += 1;
        }
        let mut segments = self.shared.segments();
        let segment = segments.at(number);
        segment.writers -= 1;
        segment.dead_pages += dead + u32::from(group.head.kind == Kind::Hot && group.head.pages == 1);
        drop(segments);
        self.hand_over(number);
    }

    /// Makes a record visible, or says why not. Returns true if it is a block that lives.
    fn finish_append(&mut self, append: Append, entry: &Entry, segment: u32, failed: Option<&str>) -> bool {
        let mut lives = false;
        let written = match append {
            Append::Put { put, ticket, .. } => {
                let (key, pages) = (put.meta.key, format::pages(put.meta.size));
                let outcome = match failed {
                    None => Ok(Stored::Stored),
                    Some(reason) => Err(self.error("write", key, reason)),
                };
                match entry {
                    Entry::Block(block) if outcome.is_ok() => {
                        self.enter(block, segment);
                        self.take_doubts(key).into_iter().for_each(|earlier| self.owe(earlier));
                        lives = true;
                    }
                    _ => uncount(&self.shared.counters.claimed_pages, pages.into()),
                }
                // The first page of a segment is a header: nothing was written there.
                if let (Err(_), Entry::Block(block)) = (&outcome, entry)
                    && block.page > 0
                {
                    let tombstone = self.tombstone(key, Place { segment, page: block.page }, 0);
                    self.doubt(tombstone);
                }
                ticket.done(PutDone { buffer: put.buffer, outcome });
                Some(key)
            }
            Append::Move { block, from, ticket, .. } => {
                match entry {
                    Entry::Block(moved) if failed.is_none() => lives = self.relocate(moved, from, segment),
                    // It may be on the disk all the same, and no removal of the block will know of it.
                    Entry::Block(moved) if moved.page > 0 => {
                        self.owe(self.tombstone(moved.meta.key, Place { segment, page: moved.page }, 0));
                    }
                    _ => {}
                }
                ticket.done(failed.is_none());
                Some(block.meta.key)
            }
            Append::Tombstone { tombstone, purpose } => {
                let removes = matches!(purpose, Purpose::Remove(_));
                self.finish_tombstone(&tombstone, purpose, failed);
                removes.then_some(tombstone.key)
            }
        };
        if let Some(key) = written {
            self.release(key);
        }
        lives
    }

    /// Lets every caller continue that waited for the key's record.
    fn release(&mut self, key: BlockKey) {
        for waiter in self.writing.remove(&key).into_iter().flatten() {
            match waiter {
                Waiter::Put(put, ticket) => self.start_put(put, ticket),
                Waiter::Remove(ticket) => self.start_remove(key, ticket),
                Waiter::Move(moving, ticket) => self.start_move(moving, ticket),
            }
        }
    }

    fn enter(&mut self, block: &Block, segment: u32) {
        let place = Place { segment, page: block.page };
        self.shared.index.insert(&Found { meta: block.meta, checksum: block.checksum, place });
        self.shared.segments().at(segment).lives(format::pages(block.meta.size));
        count(&self.shared.counters.blocks, 1);
        count(&self.shared.counters.block_bytes, block.meta.size.into());
    }

    /// Points the index at a block's new copy, unless the block has gone meanwhile.
    fn relocate(&mut self, block: &Block, from: Place, segment: u32) -> bool {
        let place = Place { segment, page: block.page };
        let pages = format::pages(block.meta.size);
        if self.shared.index.get(block.meta.key).is_none_or(|found| found.place != from) {
            // The copy must not come back after a crash.
            let tombstone = self.tombstone(block.meta.key, place, 0);
            self.owe(tombstone);
            return false;
        }
        self.shared.index.insert(&Found { meta: block.meta, checksum: block.checksum, place });
        let mut segments = self.shared.segments();
        segments.at(from.segment).dies(pages);
        segments.at(segment).lives(pages);
        count(&self.shared.counters.moved_bytes, u64::from(pages) * PAGE as u64);
        true
    }

    fn finish_tombstone(&mut self, tombstone: &Tombstone, purpose: Purpose, failed: Option<&str>) {
        match purpose {
            Purpose::Remove(ticket) => {
                // A removal that failed may be on the disk or not. So the block may be there after a restart or not, and nobody
                // gets it until then, or relies on it.
                let goes = failed.is_none() || !planted::is(Bug::ServesOnIfRemovalFails);
                let found = if goes { self.shared.index.remove(tombstone.key, None) } else { None };
                if let Some(found) = &found {
                    self.dead(found);
                }
                if failed.is_some() && goes {
                    self.doubt(*tombstone);
                }
                ticket.done(match failed {
                    Some(reason) => Err(self.error("remove", tombstone.key, reason)),
                    None => Ok(found.is_some()),
                });
            }
            Purpose::Move(ticket) => ticket.done(failed.is_none()),
            Purpose::Tidy if failed.is_some() => self.doubt(*tombstone),
            Purpose::Tidy => {}
        }
    }

    /// Remembers a copy that may be on the disk although nobody can get it.
    pub(super) fn doubt(&mut self, copy: Tombstone) {
        if planted::is(Bug::ForgetsFailedWrites) {
            return;
        }
        if self.doubtful.len() >= DOUBTFUL_MAX {
            let segments = self.shared.segments();
            self.doubtful.retain(|doubt| segments.holds(doubt));
        }
        if self.doubtful.len() < DOUBTFUL_MAX {
            self.doubtful.insert(Tombstone { sequence: 0, ..copy });
        } else {
            self.shared.breaks(&format!("more than {DOUBTFUL_MAX} writes failed"));
        }
    }

    /// What removes the copies of a block that are in doubt, and may still be on the disk. They are in doubt no more.
    fn take_doubts(&mut self, key: BlockKey) -> Vec<Tombstone> {
        let first = Tombstone { key, sequence: 0, target: Place { segment: 0, page: 0 }, target_epoch: 0 };
        let of_key = self.doubtful.range(first..).take_while(|doubt| doubt.key == key);
        let mut doubts: Vec<_> = of_key.copied().collect();
        // Almost always there is none, and a put needs no lock for it.
        if !doubts.is_empty() {
            for doubt in &doubts {
                self.doubtful.remove(doubt);
            }
            let segments = self.shared.segments();
            doubts.retain(|doubt| segments.holds(doubt));
        }
        doubts
    }

    /// Ends the puts that wait for space.
    pub(super) fn refuse_waiting_puts(&mut self, error: impl Fn(&Put) -> TierError) {
        for append in std::mem::take(&mut self.puts) {
            if let Append::Put { put, ticket, .. } = append {
                let error = error(&put);
                self.give_up(put, ticket, error);
            }
        }
    }

    /// Ends the removals that wait for space, unless they need not wait any more.
    pub(super) fn refuse_waiting_tombstones(&mut self) {
        let segments = self.shared.segments();
        let has_room = self.heads.iter().flatten().any(|head| head.page < segments.pages);
        if has_room || segments.free_for(Kind::Cold).is_some() {
            return;
        }
        drop(segments);
        for append in std::mem::take(&mut self.tombstones) {
            self.fail(append, "no space is left to note it");
        }
    }

    fn give_up(&mut self, put: Put, ticket: Ticket<PutDone>, error: TierError) {
        let (key, pages) = (put.meta.key, format::pages(put.meta.size));
        uncount(&self.shared.counters.claimed_pages, pages.into());
        ticket.done(PutDone { buffer: put.buffer, outcome: Err(error) });
        self.release(key);
    }

    /// Nothing is written any more.
    fn fail_all(&mut self) {
        let reason = self.shared.broken().unwrap_or_default();
        for kind in [Kind::Hot, Kind::Cold] {
            self.fail_queue(kind, &reason);
        }
    }

    fn fail_queue(&mut self, kind: Kind, reason: &str) {
        let queue = if kind == Kind::Hot { &mut self.puts } else { &mut self.moves };
        for append in std::mem::take(queue).into_iter().chain(std::mem::take(&mut self.tombstones)) {
            self.fail(append, reason);
        }
    }

    fn fail(&mut self, append: Append, reason: &str) {
        // Nothing was written, so its page does not matter.
        let entry = append.entry(0);
        self.finish_append(append, &entry, 0, Some(reason));
    }
}

fn slot(kind: Kind) -> usize {
    usize::from(kind == Kind::Cold)
}

/// Adds a payload to a write: from where it is as far as its alignment allows, the rest from a padded copy.
fn gather_payload(bytes: Shared<'_>, pieces: &mut Vec<Piece>, copies: &mut Vec<Buffer>) {
    let aligned = bytes.as_ptr().addr().is_multiple_of(PAGE);
    let whole = if aligned { bytes.len() / PAGE * PAGE } else { 0 };
    let (direct, rest) = (bytes.first(whole), bytes.after(whole));
    if !direct.is_empty() {
        pieces.push(Piece::of(direct));
    }
    if !rest.is_empty() {
        let mut copy = Buffer::zeroed(rest.len().next_multiple_of(PAGE));
        rest.copy_to(copy.bytes_mut());
        pieces.push(Piece::of(copy.bytes().into()));
        copies.push(copy);
    }
}
