//! The evictor slot: `eviction` in `wit/policy-0.1/evictor.wit`.

use crate::{Description, Settings};

/// Words in one event record.
pub const EVENT: usize = 8;
/// `parent` word of a block whose parent is not resident.
pub const NO_SLOT: u32 = u32::MAX;

/// Ranks the blocks of one pool for eviction.
pub trait Evictor: Send {
    fn describe(&self) -> Description;

    /// Takes the operator's settings, before `open`.
    ///
    /// # Errors
    /// A value that cannot be used; the text goes to the operator.
    fn configure(&mut self, _settings: &Settings) -> Result<(), String> {
        Ok(())
    }

    /// Empties the policy; block slots are below `slots`.
    fn open(&mut self, slots: u32);

    /// What happened since the last call, oldest first.
    fn on_events(&mut self, events: Events<'_>);

    /// Appends `want` blocks to evict next, most expendable first. The policy forgets them until an
    /// event names them again.
    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>);

    fn export_state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// # Errors
    /// The state cannot be used; the policy starts cold.
    fn import_state(&mut self, _state: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// What an event says; the numbers are the contract's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Insert = 1,
    Hit = 2,
    Remove = 3,
    Keep = 4,
    Pin = 5,
    Unpin = 6,
}

/// One access event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: EventKind,
    /// Replayed from a resident pool, not live traffic.
    pub replayed: bool,
    /// Class of the request; 0 = unknown.
    pub class: u16,
    pub slot: u32,
    /// `Insert`: slot of the resident parent, or else [`NO_SLOT`]. `Hit`: how many uses this event stands for.
    pub parent_or_uses: u32,
    /// Position in the chain, 0 = first block of a prompt.
    pub depth: u32,
    pub size_bytes: u32,
    pub time_ms: u64,
    /// Hash of the block's identity.
    pub identity: u64,
}

impl Event {
    /// Appends the record; times before `base_ms`, or beyond 2^32 ms after it, are clamped.
    pub fn encode(&self, base_ms: u64, words: &mut Vec<u32>) {
        let after_base = self.time_ms.saturating_sub(base_ms).min(u64::from(u32::MAX)) as u32;
        words.extend_from_slice(&[
            self.kind as u32 | u32::from(self.replayed) << 8 | u32::from(self.class) << 16,
            self.slot,
            self.parent_or_uses,
            self.depth,
            self.size_bytes,
            after_base,
            self.identity as u32,
            (self.identity >> 32) as u32,
        ]);
    }
}

/// The events of one batch, oldest first; records of unknown kind are skipped.
#[derive(Clone, Copy, Debug)]
pub struct Events<'a> {
    base_ms: u64,
    words: &'a [u32],
}

impl<'a> Events<'a> {
    /// `words`: whole records; a ragged tail is ignored.
    pub fn new(base_ms: u64, words: &'a [u32]) -> Self {
        Self { base_ms, words }
    }
}

impl<'a> IntoIterator for Events<'a> {
    type Item = Event;
    type IntoIter = EventIter<'a>;

    fn into_iter(self) -> EventIter<'a> {
        EventIter { base_ms: self.base_ms, records: self.words.chunks_exact(EVENT) }
    }
}

/// Iterator over [`Events`].
pub struct EventIter<'a> {
    base_ms: u64,
    records: std::slice::ChunksExact<'a, u32>,
}

impl Iterator for EventIter<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            let word = self.records.next()?;
            let kind = match word[0] as u8 {
                1 => EventKind::Insert,
                2 => EventKind::Hit,
                3 => EventKind::Remove,
                4 => EventKind::Keep,
                5 => EventKind::Pin,
                6 => EventKind::Unpin,
                _ => continue,
            };
            return Some(Event {
                kind,
                replayed: word[0] >> 8 & 1 == 1,
                class: (word[0] >> 16) as u16,
                slot: word[1],
                parent_or_uses: word[2],
                depth: word[3],
                size_bytes: word[4],
                time_ms: self.base_ms + u64::from(word[5]),
                identity: u64::from(word[6]) | u64::from(word[7]) << 32,
            });
        }
    }
}

/// One answer of `select-victims`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    pub slot: u32,
    /// [`HOST_DECIDES`], [`DROP`], or the tier to demote to: 3 NVMe, 4 remote.
    pub demote_to: u8,
}

/// Where a victim goes is the host's to decide, by its configuration.
pub const HOST_DECIDES: u8 = 0;
/// The victim is not worth a copy in any tier.
pub const DROP: u8 = 15;

impl Victim {
    /// A block to evict; where to is the host's to decide.
    pub fn new(slot: u32) -> Self {
        Self { slot, demote_to: HOST_DECIDES }
    }

    /// A block to evict without a copy.
    pub fn drop(slot: u32) -> Self {
        Self { slot, demote_to: DROP }
    }

    /// A block to copy to `tier`, however seldom it was used: 3 NVMe, 4 remote.
    pub fn demote(slot: u32, tier: u8) -> Self {
        Self { slot, demote_to: tier }
    }

    pub fn pack(self) -> u32 {
        self.slot & 0x0fff_ffff | u32::from(self.demote_to) << 28
    }

    pub fn unpack(word: u32) -> Self {
        Self { slot: word & 0x0fff_ffff, demote_to: (word >> 28) as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_encoding() {
        let event = Event {
            kind: EventKind::Insert,
            replayed: true,
            class: 65_535,
            slot: 5,
            parent_or_uses: NO_SLOT,
            depth: 9,
            size_bytes: 1 << 20,
            time_ms: 1_000_000_123,
            identity: 0x0123_4567_89ab_cdef,
        };
        let mut words = Vec::new();
        event.encode(1_000_000_000, &mut words);
        words.extend([99, 0, 0, 0, 0, 0, 0, 0]); // a kind of a later version
        words.push(1); // ragged
        let back: Vec<_> = Events::new(1_000_000_000, &words).into_iter().collect();
        assert_eq!(back, [event]);
        for victim in [Victim::new(1), Victim::drop(2), Victim::demote(0x0fff_ffff, 3)] {
            assert_eq!(Victim::unpack(victim.pack()), victim);
        }
    }
}
