//! What the policy that runs beside is told.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use super::{DramStore, SHARDS, TICK_MS, lock, slot_of, split, ticks};
use crate::tier::events::{AccessEvent, Drained, EventBuffer, EventKind, NO_SLOT};
use crate::tier::shard::{Record, Shard, tag};

impl DramStore {
    /// Moves what happened since the last call to `out`, oldest first.
    pub fn drain_events(&self, out: &mut Vec<AccessEvent>) -> Drained {
        let drained = self.lock_events().drain(out);
        self.hits_dropped.fetch_add(drained.hits_dropped, Ordering::Relaxed);
        drained
    }

    /// Every resident block as an `Insert` and, if used, one `Hit`, oldest first, for a policy that starts now;
    /// what the next [`drain_events`](Self::drain_events) returns happened after. Empties the reserve of victims.
    pub fn replay_resident(&self, out: &mut Vec<AccessEvent>) {
        lock(&self.victims).clear();
        self.lock_events().begin_replay();
        let start = out.len();
        let mut parents: Vec<(usize, u16)> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            for (local, record) in guard.records.iter_mut().enumerate() {
                if !record.state.is_resident() {
                    continue;
                }
                record.in_reserve = false;
                parents.push((out.len(), record.parent_tag));
                push_replayed(out, record, slot_of(local as u32, shard));
            }
            self.lock_events().replayed(shard as u32 + 1);
        }
        self.check_replayed_parents(out, &parents);
        out[start..].sort_by_key(|event| (event.time_ms, event.kind as u8, event.depth));
    }

    /// A parent's slot may hold another block by now.
    fn check_replayed_parents(&self, out: &mut [AccessEvent], inserts: &[(usize, u16)]) {
        for &(at, parent_tag) in inserts {
            let parent = out[at].parent_or_uses;
            if parent == NO_SLOT {
                continue;
            }
            let (local, shard) = split(parent);
            let guard = self.read(shard);
            let same = guard
                .records
                .get(local as usize)
                .is_some_and(|r| r.state.is_resident() && tag(r.key) == parent_tag);
            if !same {
                out[at].parent_or_uses = NO_SLOT;
            }
        }
    }

    /// A use of a resident block: counted, told to the policy, and out of the reserve of victims.
    pub(super) fn note_use(&self, record: &mut Record, slot: u32, class: u16, now_ms: u64) {
        record.used = ticks(now_ms);
        record.uses = record.uses.saturating_add(1);
        record.in_reserve = false;
        let mut hit = event(EventKind::Hit, record, slot, 1, now_ms);
        hit.class = class;
        record.epoch = self.push(hit);
    }

    /// Tells the policy that a block leaves, unless it is off the policy's books already.
    pub(super) fn push_removal(&self, guard: &mut Shard, slot: u32, now_ms: u64) {
        let record = &mut guard.records[split(slot).0 as usize];
        if !std::mem::take(&mut record.in_reserve) {
            self.push(event(EventKind::Remove, record, slot, 0, now_ms));
        }
    }

    pub(super) fn push(&self, event: AccessEvent) -> u8 {
        self.lock_events().push(event)
    }

    pub(super) fn lock_events(&self) -> MutexGuard<'_, EventBuffer> {
        lock(&self.events)
    }
}

fn push_replayed(out: &mut Vec<AccessEvent>, record: &Record, slot: u32) {
    let inserted_ms = u64::from(record.inserted) * TICK_MS;
    let mut insert = event(EventKind::Insert, record, slot, record.parent_slot, inserted_ms);
    insert.replayed = true;
    out.push(insert);
    if record.uses > 0 {
        let used_ms = u64::from(record.used) * TICK_MS;
        let mut hit = event(EventKind::Hit, record, slot, record.uses.into(), used_ms);
        hit.replayed = true;
        out.push(hit);
    }
}

pub(super) fn event(
    kind: EventKind,
    record: &Record,
    slot: u32,
    parent_or_uses: u32,
    time_ms: u64,
) -> AccessEvent {
    AccessEvent {
        kind,
        replayed: false,
        class: record.class,
        slot,
        parent_or_uses,
        depth: record.depth,
        size: record.size,
        time_ms,
        identity: record.key.identity(),
    }
}
