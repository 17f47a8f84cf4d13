//! What the policy, which runs beside the store, is told.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use super::{DramStore, SHARDS, TICK_MS, lock, slot_of, split, ticks};
use crate::events::{AccessEvent, Drained, EventBuffer, EventKind, NO_SLOT};
use crate::record::Record;
use crate::shard::Shard;

impl DramStore {
    /// Moves what happened since the last call to `out`, oldest first.
    pub fn drain_events(&self, out: &mut Vec<AccessEvent>) -> Drained {
        let drained = self.lock_events().drain(out);
        self.hits_dropped.fetch_add(drained.hits_dropped, Ordering::Relaxed);
        drained
    }

    /// Every resident block as an `Insert` and, if used, one `Hit`, and if pinned, a `Pin`, oldest first, for a policy that starts now;
    /// what the next [`drain_events`](Self::drain_events) returns happened after. Empties the reserve of victims.
    pub fn replay_resident(&self, out: &mut Vec<AccessEvent>) {
        lock(&self.victims).clear();
        self.lock_events().begin_replay();
        let start = out.len();
        let mut children: Vec<(usize, Record)> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            let Shard { records, extras, .. } = &mut *guard;
            for (local, record) in records.iter_mut().enumerate() {
                if !record.is_resident() {
                    continue;
                }
                record.set_in_reserve(false);
                if record.parent_slot() != NO_SLOT {
                    children.push((out.len(), record.clone()));
                }
                let pinned = record.has_extras() && !extras.pins(local as u32).is_empty();
                self.push_replayed(out, record, slot_of(local as u32, shard), pinned);
            }
            self.lock_events().replayed(shard as u32 + 1);
        }
        self.check_replayed_parents(out, &children);
        out[start..].sort_by_key(|event| (event.time_ms, event.kind as u8, event.depth));
    }

    /// A parent's slot may hold another block by now.
    fn check_replayed_parents(&self, out: &mut [AccessEvent], children: &[(usize, Record)]) {
        for (at, child) in children {
            let (local, shard) = split(child.parent_slot());
            let guard = self.read(shard);
            if !guard.records.get(local as usize).is_some_and(|parent| child.is_child_of(parent)) {
                out[*at].parent_or_uses = NO_SLOT;
            }
        }
    }

    /// A use of a resident block: counted, told to the policy, and out of the reserve of victims.
    pub(super) fn note_use(&self, guard: &mut Shard, slot: u32, class: u16, now_ms: u64) {
        let record = &mut guard.records[split(slot).0 as usize];
        guard.counters.reuse_interval.record(now_ms.saturating_sub(u64::from(record.used) * TICK_MS));
        record.used = ticks(now_ms);
        record.count_use();
        record.set_in_reserve(false);
        record.set_epoch(self.push(AccessEvent { class, ..event(EventKind::Hit, record, slot, 1, now_ms) }));
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

    /// An event with the class that the block was stored with.
    pub(super) fn event(
        &self,
        kind: EventKind,
        record: &Record,
        slot: u32,
        of: u32,
        now_ms: u64,
    ) -> AccessEvent {
        let class = self.tenants.class_of(record.label());
        AccessEvent { class, ..event(kind, record, slot, of, now_ms) }
    }

    fn push_replayed(&self, out: &mut Vec<AccessEvent>, record: &Record, slot: u32, pinned: bool) {
        let mut push = |kind, of, ticks| {
            let event = self.event(kind, record, slot, of, u64::from(ticks) * TICK_MS);
            out.push(AccessEvent { replayed: true, ..event });
        };
        push(EventKind::Insert, record.parent_slot(), record.inserted);
        if record.uses() > 0 {
            push(EventKind::Hit, record.uses(), record.used);
        }
        if pinned {
            push(EventKind::Pin, 0, record.used);
        }
    }

    pub(super) fn push(&self, event: AccessEvent) -> u8 {
        self.lock_events().push(event)
    }

    pub(super) fn lock_events(&self) -> MutexGuard<'_, EventBuffer> {
        lock(&self.events)
    }
}

fn event(kind: EventKind, record: &Record, slot: u32, parent_or_uses: u32, time_ms: u64) -> AccessEvent {
    AccessEvent {
        kind,
        replayed: false,
        class: 0,
        slot,
        parent_or_uses,
        depth: record.depth(),
        size: record.size,
        time_ms,
        identity: record.key().identity(),
    }
}
