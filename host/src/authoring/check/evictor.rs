//! Pools that evictors are tried in.

use super::panel::{Failure, Panel};
use super::trials::World;
use super::{Row, Trial, ancestors};
use crate::policy::PolicyConfig;
use crate::policy::evictor::EvictorHook;
use crate::policy::record::{Call, Push, bits};
use crate::policy::slot::Prepared;
use kvasir_policy::evictor::{Event, EventKind, Layout, NO_SLOT, TierRow, VICTIMS_MAX, Victim};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

/// What is known of a block slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    Resident,
    Pinned,
    /// It was chosen as a victim, and nothing was told of it since.
    Chosen,
}

/// A block as its `insert` named it.
#[derive(Clone, Copy)]
struct Block {
    parent: u32,
    depth: u32,
    inserted_ms: u64,
}

pub(super) struct Pool {
    slots: Vec<Slot>,
    blocks: Vec<Block>,
    /// Slots of `slots` that events are about; of a huge pool, a part.
    lively: u32,
    kind: usize,
    rng: ChaCha8Rng,
    now_ms: u64,
    /// Words of one record.
    stride: usize,
}

/// Prompts of one batch.
const PROMPTS: u32 = 12;
const FULL: usize = 3;
const PINNED: usize = 4;
const LATER_HOST: usize = 5;
const LARGEST: usize = 6;

impl World for Pool {
    type Hook = EvictorHook;
    const KINDS: &'static [&'static str] = &[
        "a pool of one block",
        "a pool of 64 blocks",
        "a pool of 4,096 blocks",
        "a pool that is full, 256 victims at a time",
        "a pool of which much is pinned",
        "a later host, whose records are longer and of unknown kinds",
        "the largest pool of a host",
    ];
    const ORDINARY: usize = 2;
    const SUCCESSOR_DECIDES_ALIKE: bool = false;

    fn new(kind: usize, trial: &Trial, rng: ChaCha8Rng) -> Self {
        let slots = match kind {
            0 => 1,
            1 | PINNED => 64,
            LARGEST => trial.config.evictor_slots,
            _ => 4_096,
        };
        let layout = Layout::of(slots);
        let stride = layout.event_words + usize::from(kind == LATER_HOST);
        let block = Block { parent: NO_SLOT, depth: 0, inserted_ms: 0 };
        Self {
            slots: vec![Slot::Free; slots as usize],
            blocks: vec![block; slots as usize],
            lively: slots.min(4_096),
            kind,
            rng,
            now_ms: 1,
            stride,
        }
    }

    fn config(&self, trial: &Trial) -> PolicyConfig {
        PolicyConfig { evictor_slots: self.slots.len() as u32, ..trial.config.clone() }
    }

    fn steps(&self) -> usize {
        if self.kind == LARGEST { 20 } else { 200 }
    }

    fn own(prepared: &Prepared<EvictorHook>, trial: &Trial) -> Option<Row> {
        Some(ancestors::row(prepared, trial))
    }

    fn told(&self) -> Vec<Push> {
        let layout = Layout { event_words: self.stride, ..Layout::of(self.slots.len() as u32) };
        let mut told = vec![
            ("open".to_owned(), layout.encode().to_vec()),
            ("update-tiers".to_owned(), bits(&self.tiers())),
        ];
        let mut resident: Vec<u32> = (0..self.slots.len() as u32).filter(|slot| self.holds(*slot)).collect();
        resident.sort_by_key(|slot| (self.blocks[*slot as usize].inserted_ms, *slot));
        let events =
            resident.iter().map(|slot| Event { replayed: true, ..self.event(EventKind::Insert, *slot) });
        let pins = resident.iter().filter(|slot| self.slots[**slot as usize] == Slot::Pinned);
        let pins = pins.map(|slot| self.event(EventKind::Pin, *slot));
        let all: Vec<_> = events.chain(pins).collect();
        // Behind the time, which begins with the pool.
        let batch = |events: &[Event]| [vec![0, 0], self.encoded(events)].concat();
        told.extend(all.chunks(256).map(|events| ("on-events".to_owned(), batch(events))));
        told
    }

    fn asked(&mut self) -> Call {
        Call::select_victims(self.now_ms, self.want().into())
    }

    fn step(&mut self, panel: &mut Panel<EvictorHook>) -> Result<(), Failure> {
        self.now_ms += self.rng.random_range(0..1_000);
        let events = self.happenings();
        let words = self.encoded(&events);
        panel.tell("on-events", |engine| engine.on_events(0, &words))?;
        if self.rng.random_bool(0.1) {
            let tiers = self.tiers();
            panel.tell("update-tiers", |engine| engine.update_tiers(&tiers))?;
        }
        let want = self.want();
        let now_ms = self.now_ms;
        let victims = panel.ask("select-victims", |engine| {
            let mut victims = Vec::new();
            engine.select_victims(now_ms, want, &mut victims).map(|()| victims)
        })?;
        self.choose(want, &victims).map_err(|reason| Failure::invalid("select-victims", reason))
    }
}

impl Pool {
    fn want(&mut self) -> u32 {
        if self.kind == FULL { VICTIMS_MAX } else { self.rng.random_range(0..20) }
    }

    fn holds(&self, slot: u32) -> bool {
        matches!(self.slots[slot as usize], Slot::Resident | Slot::Pinned)
    }

    fn tiers(&self) -> Vec<f32> {
        let tier = |tier, load_fixed_ms, takes_copies| TierRow {
            tier,
            capacity_mib: 1024.0,
            used_mib: 100.0,
            load_fixed_ms,
            load_ms_per_mib: 0.1,
            takes_copies,
        };
        [tier(2, 0.0, true), tier(3, 0.2, true), tier(4, 0.0, false)]
            .iter()
            .flat_map(TierRow::encode)
            .collect()
    }

    /// First what became of the victims, then what requests did.
    fn happenings(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for slot in 0..self.lively {
            if self.slots[slot as usize] != Slot::Chosen {
                continue;
            }
            self.slots[slot as usize] = Slot::Free;
            if self.rng.random_bool(0.1) {
                self.slots[slot as usize] = Slot::Resident;
                events.push(self.event(EventKind::Keep, slot));
            }
        }
        for _ in 0..self.rng.random_range(0..PROMPTS) {
            self.prompt(&mut events);
        }
        let wish = self.rng.random_range(0..self.lively);
        match (self.slots[wish as usize], self.kind) {
            (Slot::Resident, PINNED) => self.becomes(wish, Slot::Pinned, EventKind::Pin, &mut events),
            (Slot::Resident, _) if self.rng.random_bool(0.2) => {
                self.becomes(wish, Slot::Pinned, EventKind::Pin, &mut events);
            }
            (Slot::Resident, _) => self.becomes(wish, Slot::Free, EventKind::Remove, &mut events),
            (Slot::Pinned, _) if self.rng.random_bool(0.3) => {
                self.becomes(wish, Slot::Resident, EventKind::Unpin, &mut events);
            }
            _ => {}
        }
        events
    }

    /// A prompt whose first blocks may be there already; the others are put behind them.
    fn prompt(&mut self, events: &mut Vec<Event>) {
        let known = self.rng.random_range(0..self.lively);
        let mut parent = NO_SLOT;
        if self.holds(known) {
            parent = known;
            events.push(self.event(EventKind::Hit, known));
        }
        let blocks = if self.kind == FULL { 200 } else { 5 };
        let start = self.rng.random_range(0..self.lively);
        let around = (start..self.lively).chain(0..start);
        for slot in
            around.filter(|slot| self.slots[*slot as usize] == Slot::Free).take(blocks).collect::<Vec<_>>()
        {
            let depth = self.blocks.get(parent as usize).map_or(0, |block| block.depth + 1);
            self.blocks[slot as usize] = Block { parent, depth, inserted_ms: self.now_ms };
            self.becomes(slot, Slot::Resident, EventKind::Insert, events);
            parent = slot;
        }
    }

    fn becomes(&mut self, slot: u32, now: Slot, kind: EventKind, events: &mut Vec<Event>) {
        self.slots[slot as usize] = now;
        events.push(self.event(kind, slot));
    }

    fn event(&self, kind: EventKind, slot: u32) -> Event {
        let Block { parent, depth, inserted_ms } = self.blocks[slot as usize];
        Event {
            kind,
            replayed: false,
            class: slot as u16 % 4,
            slot,
            parent_or_uses: if kind == EventKind::Insert { parent } else { 1 },
            depth,
            size_bytes: 1 << (12 + slot % 9),
            time_ms: if kind == EventKind::Insert { inserted_ms } else { self.now_ms },
            identity: u64::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            tenant: slot % 3,
        }
    }

    /// Records of the host's length; a later one's also tell of things that are not known yet.
    fn encoded(&self, events: &[Event]) -> Vec<u32> {
        let mut words = Vec::new();
        for event in events {
            event.encode(0, &mut words);
            if self.kind == LATER_HOST {
                words.push(u32::MAX);
                let unknown = words.len() - self.stride;
                words.extend_from_within(unknown..);
                let kind = words.len() - self.stride;
                words[kind] = words[kind] & !0xff | 99;
            }
        }
        words
    }

    /// Takes victims off the books.
    fn choose(&mut self, want: u32, victims: &[Victim]) -> Result<(), String> {
        let free = self.slots.iter().filter(|slot| **slot == Slot::Resident).count();
        for victim in victims {
            let known = self.slots.get_mut(victim.slot as usize);
            let known = known.ok_or_else(|| format!("victim {} is outside the pool", victim.slot))?;
            match known {
                Slot::Resident => *known = Slot::Chosen,
                Slot::Free => return Err(format!("victim {} is a free slot", victim.slot)),
                Slot::Pinned => return Err(format!("victim {} is pinned", victim.slot)),
                Slot::Chosen => return Err(format!("victim {} was chosen before", victim.slot)),
            }
        }
        let expected = free.min(want as usize);
        if victims.len() == expected {
            return Ok(());
        }
        Err(format!("{} victims where {want} were wanted of {free} that can be evicted", victims.len()))
    }
}
