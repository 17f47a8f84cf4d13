//! What the policy, which runs beside the store, is told.

use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;

use super::{DramStore, SHARDS, TICK_MS, slot_of, split, ticks};
use crate::events::{AccessEvent, Drained, EventBuffer, EventKind, NO_SLOT};
use crate::record::Record;
use crate::shard::Shard;

/// Records of a shard looked at under one lock.
const RECORDS_LOCKED: usize = 8192;

/// The order of events in a [`History`]: by time. At the same time, inserts come before uses, and a
/// parent before its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Past {
    /// Units of [`TICK_MS`].
    ticks: u32,
    /// The highest bit is set for a use; below it the depth.
    kind: u32,
    slot: u32,
}

impl Past {
    const USE: u32 = 1 << 31;

    fn insert(record: &Record, slot: u32) -> Self {
        Self { ticks: record.inserted, kind: record.depth(), slot }
    }

    fn used(record: &Record, slot: u32) -> Self {
        Self { ticks: record.used, kind: Self::USE | record.depth(), slot }
    }

    pub fn slot(&self) -> u32 {
        self.slot
    }

    pub fn is_use(&self) -> bool {
        self.kind & Self::USE != 0
    }
}

/// What happened to the blocks that were resident at one time.
#[derive(Debug, Default)]
pub struct History {
    pub entries: Vec<Past>,
    /// Units of [`TICK_MS`]: when it was made.
    pub until: u32,
}

impl History {
    /// Oldest first. Takes seconds in a pool of ten million blocks, and no lock.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.entries.sort_unstable();
        self
    }
}

/// A resident block as a policy that starts now is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    pub insert: AccessEvent,
    pub pinned: bool,
}

impl DramStore {
    /// Moves what happened since the last call to `out`, oldest first.
    pub fn drain_events(&self, out: &mut Vec<AccessEvent>) -> Drained {
        let drained = self.lock_events().drain(out);
        self.hits_dropped.fetch_add(drained.hits_dropped, Ordering::Relaxed);
        drained
    }

    /// Records events again from here on; called after [`Drained::start_over`].
    pub fn restart_events(&self) {
        self.lock_events().restart();
    }

    /// What a policy that starts now is told of what is resident: each block's `Insert` and, if it was used, its last use. Not
    /// [in order](History::in_order) yet. No lock is held for longer than a few thousand records take.
    ///
    /// The pool lives on meanwhile, so an entry only says when to look: [`resident`](Self::resident) and
    /// [`past_use`](Self::past_use) tell what is there by then.
    pub fn history(&self, now_ms: u64) -> History {
        // Room for all, since growing copies; pages that are not needed are never touched.
        let mut entries = Vec::with_capacity(2 * self.slots() as usize);
        for shard in 0..SHARDS {
            let mut at = 0;
            while let Some(next) = self.append_past(shard, at, &mut entries) {
                at = next;
            }
        }
        History { entries, until: ticks(now_ms) }
    }

    /// Appends what happened to some blocks of a shard from `at` on. Returns where the next ones begin.
    fn append_past(&self, shard: usize, at: usize, entries: &mut Vec<Past>) -> Option<usize> {
        let guard = self.read(shard);
        let records = guard.records.get(at..).filter(|records| !records.is_empty())?;
        for (local, record) in (at..).zip(records.iter().take(RECORDS_LOCKED)) {
            if record.is_resident() && !record.in_reserve() {
                let slot = slot_of(local as u32, shard);
                entries.push(Past::insert(record, slot));
                entries.extend((record.uses() > 0).then(|| Past::used(record, slot)));
            }
        }
        Some(at + RECORDS_LOCKED)
    }

    /// A resident block as the `Insert` that a new policy is told; `None` for a slot without a block, and for one that
    /// was chosen as a victim.
    pub fn resident(&self, slot: u32) -> Option<Resident> {
        let (local, shard) = split(slot);
        let guard = self.read(shard);
        let record = guard.records.get(local as usize)?;
        if !record.is_resident() || record.in_reserve() {
            return None;
        }
        let pinned = record.has_extras() && !guard.extras.pins(local).is_empty();
        let parent = record.parent_slot();
        let mut insert = self.past(EventKind::Insert, record, slot, parent, record.inserted);
        if parent != NO_SLOT {
            let child = record.clone();
            drop(guard); // the parent may be in another shard, and no two are locked at once
            let (local, shard) = split(parent);
            // The parent's slot may hold another block by now.
            let guard = self.read(shard);
            let is_parent = |parent| child.is_child_of(parent, guard.key(local));
            if !guard.records.get(local as usize).is_some_and(is_parent) {
                insert.parent_or_uses = NO_SLOT;
            }
        }
        Some(Resident { insert, pinned })
    }

    /// All uses of a block that was there when `history` was made, as one `Hit` at the last of them.
    pub fn past_use(&self, slot: u32, history: &History) -> Option<AccessEvent> {
        let (local, shard) = split(slot);
        let guard = self.read(shard);
        let record = guard.records.get(local as usize)?;
        let counts = record.is_resident() && record.uses() > 0 && record.inserted <= history.until;
        counts.then(|| self.past(EventKind::Hit, record, slot, record.uses(), record.used))
    }

    fn past(&self, kind: EventKind, record: &Record, slot: u32, of: u32, ticks: u32) -> AccessEvent {
        let event = self.event(kind, record, slot, of, u64::from(ticks) * TICK_MS);
        AccessEvent { replayed: true, ..event }
    }

    /// A use of a resident block: counted, told to the policy, and out of the reserve of victims.
    pub(super) fn note_use(&self, guard: &mut Shard, slot: u32, class: u16, now_ms: u64) {
        let record = &mut guard.records[split(slot).0 as usize];
        guard.counters.reuse_interval.record(now_ms.saturating_sub(u64::from(record.used) * TICK_MS));
        record.used = ticks(now_ms);
        record.count_use();
        record.set_in_reserve(false);
        let tenant = self.tenant_of(record);
        let event = self.bare_event(EventKind::Hit, record, slot, 1, now_ms);
        record.set_epoch(self.push(AccessEvent { class, tenant, ..event }));
    }

    /// Tells the policy that a block leaves, unless the policy has forgotten it already.
    pub(super) fn push_removal(&self, guard: &mut Shard, slot: u32, now_ms: u64) {
        let record = &mut guard.records[split(slot).0 as usize];
        if !record.in_reserve() {
            self.push(self.event(EventKind::Remove, record, slot, 0, now_ms));
        }
        record.set_in_reserve(false);
    }

    /// Tells the policy that a victim it chose stays.
    pub(super) fn push_keep(&self, guard: &mut Shard, slot: u32, now_ms: u64) {
        let local = split(slot).0;
        let pinned = guard.is_pinned(local, now_ms, false);
        let record = &mut guard.records[local as usize];
        record.set_in_reserve(false);
        let mut epoch = self.push(self.event(EventKind::Keep, record, slot, 0, now_ms));
        if pinned {
            // It may have been pinned while the policy had forgotten it.
            epoch = self.push(self.event(EventKind::Pin, record, slot, 0, now_ms));
        }
        record.set_epoch(epoch);
    }

    /// An event with its tenant, and the class that the block was stored with.
    pub(super) fn event(
        &self,
        kind: EventKind,
        record: &Record,
        slot: u32,
        of: u32,
        now_ms: u64,
    ) -> AccessEvent {
        let (class, tenant) = (self.tenants.class_of(record.label()), self.tenant_of(record));
        AccessEvent { class, tenant, ..self.bare_event(kind, record, slot, of, now_ms) }
    }

    /// Of a block whose shard the caller has locked.
    fn bare_event(&self, kind: EventKind, record: &Record, slot: u32, of: u32, time_ms: u64) -> AccessEvent {
        let (local, shard) = split(slot);
        AccessEvent {
            kind,
            replayed: false,
            class: 0,
            slot,
            parent_or_uses: of,
            depth: record.depth(),
            size: record.size,
            time_ms,
            identity: self.indexes[shard].key(local).identity(),
            tenant: 0,
        }
    }

    pub(super) fn push(&self, event: AccessEvent) -> u8 {
        self.lock_events().push(event)
    }

    pub(super) fn lock_events(&self) -> MutexGuard<'_, EventBuffer> {
        self.events.lock()
    }
}
