//! The evictor slot: `eviction` in `wit/policy-0.1/evictor.wit`.

use crate::{Description, Settings};

/// Words of an event record that this SDK knows; a host may send longer ones.
pub const EVENT: usize = 9;
/// The most events in one call of `on-events`.
pub const EVENTS_MAX: usize = 2_048;
/// The most victims wanted in one call of `select-victims`.
pub const VICTIMS_MAX: u32 = 256;
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

    /// The tiers that blocks can go to and come back from, all that the host has; after `open`, and when they change.
    fn update_tiers(&mut self, _tiers: &[TierRow]) {}

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

/// The sizes of what an evictor is told (`open` of the contract).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Block slots of the pool.
    pub slots: u32,
    /// Words in one event record.
    pub event_words: usize,
    /// Values in one row of a tier.
    pub tier_values: usize,
}

impl Layout {
    /// The sizes of a host of this version.
    pub fn of(slots: u32) -> Self {
        Self { slots, event_words: EVENT, tier_values: TierRow::VALUES }
    }

    pub fn encode(&self) -> [u32; 3] {
        [self.slots, self.event_words as u32, self.tier_values as u32]
    }

    /// What is absent is as in [`Layout::of`]; no host has shorter records than this version.
    pub fn decode(words: &[u32]) -> Self {
        let least = Self::of(words.first().copied().unwrap_or(0));
        let at = |i: usize, least: usize| words.get(i).map_or(least, |&n| least.max(n as usize));
        Self { event_words: at(1, least.event_words), tier_values: at(2, least.tier_values), ..least }
    }
}

/// One tier that blocks can go to and come back from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierRow {
    /// 1 HBM, 2 DRAM (the pool itself), 3 NVMe, 4 remote.
    pub tier: u8,
    /// 0 = not known.
    pub capacity_mib: f32,
    pub used_mib: f32,
    /// Fixed cost of bringing blocks up from there; 0 = not known yet.
    pub load_fixed_ms: f32,
    pub load_ms_per_mib: f32,
    /// It takes copies now.
    pub takes_copies: bool,
}

impl TierRow {
    /// Values of a row that this SDK knows; a host may send longer ones.
    pub const VALUES: usize = 6;

    pub fn encode(&self) -> [f32; Self::VALUES] {
        let Self { tier, capacity_mib, used_mib, load_fixed_ms, load_ms_per_mib, takes_copies } = *self;
        [tier.into(), capacity_mib, used_mib, load_fixed_ms, load_ms_per_mib, takes_copies.into()]
    }

    fn decode(row: &[f32]) -> Option<Self> {
        let &[tier, capacity_mib, used_mib, load_fixed_ms, load_ms_per_mib, takes] = row.first_chunk()?;
        let (tier, takes_copies) = (tier as u8, takes == 1.0);
        Some(Self { tier, capacity_mib, used_mib, load_fixed_ms, load_ms_per_mib, takes_copies })
    }
}

/// An evictor and the sizes of what it is told: the exports of `eviction`, natively.
pub struct Kept<E: ?Sized> {
    layout: Layout,
    tiers: Vec<TierRow>,
    victims: Vec<Victim>,
    evictor: Box<E>,
}

impl<E: Evictor + ?Sized> Kept<E> {
    pub fn new(evictor: Box<E>) -> Self {
        Self { layout: Layout::of(0), tiers: Vec::new(), victims: Vec::new(), evictor }
    }

    pub fn evictor(&mut self) -> &mut E {
        &mut self.evictor
    }

    pub fn open(&mut self, layout: &[u32]) {
        self.layout = Layout::decode(layout);
        self.evictor.open(self.layout.slots);
    }

    pub fn update_tiers(&mut self, rows: &[f32]) {
        self.tiers.clear();
        self.tiers.extend(rows.chunks_exact(self.layout.tier_values).filter_map(TierRow::decode));
        self.evictor.update_tiers(&self.tiers);
    }

    pub fn on_events(&mut self, base_ms: u64, words: &[u32]) {
        self.evictor.on_events(Events::new(base_ms, self.layout.event_words, words));
    }

    /// The victims, packed.
    pub fn select_victims(&mut self, now_ms: u64, want: u32) -> impl Iterator<Item = u32> {
        self.victims.clear();
        self.evictor.select_victims(now_ms, want, &mut self.victims);
        self.victims.iter().map(|victim| victim.pack())
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
    /// Dense number; 0 = all tenants without settings of their own.
    pub tenant: u32,
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
            self.tenant,
        ]);
    }
}

/// The events of one batch, oldest first; records of unknown kind are skipped.
#[derive(Clone, Copy, Debug)]
pub struct Events<'a> {
    base_ms: u64,
    stride: usize,
    words: &'a [u32],
}

impl<'a> Events<'a> {
    /// `words`: whole records of `stride` words, which are at least [`EVENT`]; a ragged tail is ignored.
    pub fn new(base_ms: u64, stride: usize, words: &'a [u32]) -> Self {
        Self { base_ms, stride: stride.max(EVENT), words }
    }
}

impl<'a> IntoIterator for Events<'a> {
    type Item = Event;
    type IntoIter = EventIter<'a>;

    fn into_iter(self) -> EventIter<'a> {
        EventIter { base_ms: self.base_ms, records: self.words.chunks_exact(self.stride) }
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
            let word: &[u32; EVENT] = self.records.next()?.first_chunk()?;
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
                tenant: word[8],
            });
        }
    }
}

/// One answer of `select-victims`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    pub slot: u32,
    /// [`HOST_DECIDES`], [`DROP`], or the tier to demote to: 1 HBM, 3 NVMe, 4 remote.
    pub demote_to: u8,
}

/// The host decides where a victim goes, by its configuration.
pub const HOST_DECIDES: u8 = 0;
/// The victim is not worth a copy in any tier.
pub const DROP: u8 = 15;

impl Victim {
    /// A block to evict; the host decides where to.
    pub fn new(slot: u32) -> Self {
        Self { slot, demote_to: HOST_DECIDES }
    }

    /// A block to evict without a copy.
    pub fn drop(slot: u32) -> Self {
        Self { slot, demote_to: DROP }
    }

    /// A block to copy to `tier`, however seldom it was used: 1 HBM, 3 NVMe, 4 remote.
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

    const EVENT_OF_ALL: Event = Event {
        kind: EventKind::Insert,
        replayed: true,
        class: 65_535,
        slot: 5,
        parent_or_uses: NO_SLOT,
        depth: 9,
        size_bytes: 1 << 20,
        time_ms: 1_000_000_123,
        identity: 0x0123_4567_89ab_cdef,
        tenant: 77,
    };

    #[test]
    fn events_survive_encoding() {
        let mut words = Vec::new();
        EVENT_OF_ALL.encode(1_000_000_000, &mut words);
        words.extend([99, 0, 0, 0, 0, 0, 0, 0, 0]); // a kind of a later version
        words.push(1); // ragged
        let back: Vec<_> = Events::new(1_000_000_000, EVENT, &words).into_iter().collect();
        assert_eq!(back, [EVENT_OF_ALL]);
        for victim in [Victim::new(1), Victim::drop(2), Victim::demote(0x0fff_ffff, 3)] {
            assert_eq!(Victim::unpack(victim.pack()), victim);
        }
    }

    /// Keeps what it is told.
    #[derive(Default)]
    struct Hearing(u32, Vec<TierRow>, Vec<Event>);

    impl Evictor for Hearing {
        fn describe(&self) -> Description {
            Description::evictor("hearing", "0.0.0")
        }

        fn open(&mut self, slots: u32) {
            self.0 = slots;
        }

        fn update_tiers(&mut self, tiers: &[TierRow]) {
            self.1 = tiers.to_vec();
        }

        fn on_events(&mut self, events: Events<'_>) {
            self.2.extend(events);
        }

        fn select_victims(&mut self, _: u64, _: u32, _: &mut Vec<Victim>) {}
    }

    #[test]
    fn longer_records_of_a_later_host_are_stepped_over() {
        let row = TierRow {
            tier: 3,
            capacity_mib: 4_096.0,
            used_mib: 1.5,
            load_fixed_ms: 0.25,
            load_ms_per_mib: 0.5,
            takes_copies: true,
        };
        for (layout, more) in [(vec![8], 0), (vec![8, 9, 6, 5], 0), (vec![8, 12, 9], 3), (vec![8, 0, 0], 0)] {
            let mut kept = Kept::new(Box::<Hearing>::default());
            kept.open(&layout);
            let (mut rows, mut words) = (Vec::new(), Vec::new());
            for _ in 0..2 {
                rows.extend(row.encode());
                rows.extend(std::iter::repeat_n(f32::NAN, more));
                EVENT_OF_ALL.encode(1_000_000_000, &mut words);
                words.extend(std::iter::repeat_n(1, more));
            }
            kept.update_tiers(&rows);
            kept.on_events(1_000_000_000, &words);
            let Hearing(slots, tiers, events) = kept.evictor();
            assert_eq!((*slots, &tiers[..], &events[..]), (8, &[row; 2][..], &[EVENT_OF_ALL; 2][..]));
        }
    }
}
