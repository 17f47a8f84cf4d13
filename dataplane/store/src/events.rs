//! What happened to resident blocks, for the eviction policy, which learns from it beside the data path.

/// The kind of access that an event reports. The numbers are those of the policy contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// The block became resident.
    Insert = 1,
    /// A request used the resident block.
    Hit = 2,
    /// The block left for a reason other than the policy's choice.
    Remove = 3,
    /// A victim the policy chose was not evicted and stays resident.
    Keep = 4,
    /// The block cannot be evicted until `Unpin`.
    Pin = 5,
    Unpin = 6,
}

/// The slot of no block.
pub const NO_SLOT: u32 = u32::MAX;

/// One event, with the fields of the policy contract's `on-events`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessEvent {
    pub kind: EventKind,
    /// Whether it was replayed from a resident pool instead of live traffic.
    pub replayed: bool,
    /// Class of the request, 0 = unknown.
    pub class: u16,
    /// The block's slot, below [`DramStore::slots`](super::dram::DramStore::slots).
    pub slot: u32,
    /// `Insert`: slot of the resident parent or [`NO_SLOT`]; `Hit`: how many uses this event stands for;
    /// otherwise 0.
    pub parent_or_uses: u32,
    pub depth: u32,
    /// Bytes.
    pub size: u32,
    /// Milliseconds on the clock that the store's callers pass as `now_ms`.
    pub time_ms: u64,
    /// [`BlockKey::identity`](kvasir_protocol::block::BlockKey::identity).
    pub identity: u64,
    /// Dense number; 0 = all tenants without settings of their own.
    pub tenant: u16,
}

/// What a drain found besides the events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Hits that were not recorded since the last drain because the buffer was full.
    pub hits_dropped: u64,
    /// The buffer ran over its last bound: call
    /// [`restart_events`](super::dram::DramStore::restart_events), forget everything and ask for the
    /// [`history`](super::dram::DramStore::history).
    pub start_over: bool,
}

/// A buffer of this many times `bound` inserts and removes has no reader; the reader must start over.
const OVERRUN: usize = 16;

/// Events since the last drain.
pub(super) struct EventBuffer {
    events: Vec<AccessEvent>,
    bound: usize,
    hits_dropped: u64,
    start_over: bool,
    /// Counts drains, modulo 256: an event carries the epoch it was pushed in.
    epoch: u8,
}

impl EventBuffer {
    pub(super) fn new(bound: usize) -> Self {
        Self { events: Vec::new(), bound, hits_dropped: 0, start_over: false, epoch: 0 }
    }

    /// Records an event and returns the current epoch.
    pub(super) fn push(&mut self, event: AccessEvent) -> u8 {
        if self.start_over {
            return self.epoch;
        }
        if event.kind == EventKind::Hit && self.events.len() >= self.bound {
            self.hits_dropped += 1;
        } else if self.events.len() >= self.bound * OVERRUN {
            self.events = Vec::new();
            self.start_over = true;
        } else {
            self.events.push(event);
        }
        self.epoch
    }

    pub(super) fn epoch(&self) -> u8 {
        self.epoch
    }

    /// Moves all events to `out`.
    pub(super) fn drain(&mut self, out: &mut Vec<AccessEvent>) -> Drained {
        out.append(&mut self.events);
        self.epoch = self.epoch.wrapping_add(1);
        Drained { hits_dropped: std::mem::take(&mut self.hits_dropped), start_over: self.start_over }
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    pub(super) fn restart(&mut self) {
        self.events.clear();
        self.start_over = false;
        self.hits_dropped = 0;
        self.epoch = self.epoch.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, slot: u32) -> AccessEvent {
        AccessEvent {
            kind,
            replayed: false,
            class: 0,
            slot,
            parent_or_uses: 0,
            depth: 0,
            size: 1,
            time_ms: 0,
            identity: 0,
            tenant: 0,
        }
    }

    #[test]
    fn hits_give_way_to_inserts_and_an_overrun_starts_over() {
        let mut buffer = EventBuffer::new(2);
        for slot in 0..5 {
            buffer.push(event(EventKind::Hit, slot));
        }
        buffer.push(event(EventKind::Insert, 9));
        let mut out = Vec::new();
        assert_eq!(buffer.drain(&mut out), Drained { hits_dropped: 3, start_over: false });
        assert_eq!(out.iter().map(|e| e.slot).collect::<Vec<_>>(), [0, 1, 9]);

        for slot in 0..1000 {
            buffer.push(event(EventKind::Insert, slot));
        }
        assert_eq!(buffer.len(), 0);
        assert!(buffer.drain(&mut out).start_over);
        assert!(buffer.drain(&mut out).start_over, "until the reader does start over");
        buffer.restart();
        buffer.push(event(EventKind::Insert, 2));
        out.clear();
        assert_eq!(buffer.drain(&mut out), Drained::default());
        assert_eq!(out.iter().map(|e| e.slot).collect::<Vec<_>>(), [2]);
    }
}
