//! Whether an evictor takes blocks before their descendants: what is behind a hole can be used by no prompt.

use super::panel::Failure;
use super::trials::{engines, rng};
use super::{Row, Trial};
use crate::policy::evictor::EvictorHook;
use crate::policy::slot::{Hook, Prepared};
use kvasir_policy::evictor::{Event, EventKind, Layout, NO_SLOT, Victim};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

const SLOTS: u32 = 512;
/// Conversations that go on at the same time, each with a new one behind it.
const CHAINS: usize = 60;
const REQUESTS: u64 = 600;
/// A conversation ends with so many blocks.
const CHAIN_MAX: usize = 24;

/// What is in a slot.
#[derive(Clone, Copy)]
struct Block {
    parent: u32,
    depth: u32,
    identity: u64,
}

/// A pool whose prompts are conversations: each uses all blocks of the one before it, as far as they are there, first block first.
struct Conversations {
    rng: ChaCha8Rng,
    slots: Vec<Option<Block>>,
    chains: Vec<Vec<u64>>,
    identities: u64,
    now_ms: u64,
    victims: u64,
    /// Victims of which a block behind them stayed, which could be evicted.
    too_early: u64,
}

pub(super) fn row(prepared: &Prepared<EvictorHook>, trial: &Trial) -> Row {
    let came = engines(prepared, 1).and_then(|mut engines| {
        let mut pool = Conversations::new(rng(trial, usize::MAX));
        let engine = &mut *engines[0];
        engine.open(&Layout::of(SLOTS).encode()).map_err(|fault| format!("`open` {fault}"))?;
        (0..REQUESTS).try_for_each(|_| pool.request(engine)).map_err(|failure| failure.to_string())?;
        let Conversations { victims, too_early, .. } = pool;
        match too_early {
            0 => Ok(format!("{victims} victims, none before a block behind it")),
            _ => Err(format!(
                "{too_early} of {victims} victims left a block behind them that no prompt can reach; evict leaves first"
            )),
        }
    });
    Row::new("ancestors", "no block goes before its descendants", came)
}

type Evictor = <EvictorHook as Hook>::Engine;

impl Conversations {
    fn new(rng: ChaCha8Rng) -> Self {
        let (slots, chains) = (vec![None; SLOTS as usize], vec![Vec::new(); CHAINS]);
        Self { rng, slots, chains, identities: 0, now_ms: 1, victims: 0, too_early: 0 }
    }

    fn request(&mut self, engine: &mut Evictor) -> Result<(), Failure> {
        self.now_ms += self.rng.random_range(1..1_000);
        // Some are used often.
        let chain = self.rng.random_range(0..CHAINS).min(self.rng.random_range(0..CHAINS));
        if self.chains[chain].len() >= CHAIN_MAX {
            self.chains[chain].clear();
        }
        for _ in 0..self.rng.random_range(1..5) {
            self.identities += 1;
            self.chains[chain].push(self.identities);
        }
        let (mut parent, mut events) = (NO_SLOT, Vec::new());
        for (depth, identity) in self.chains[chain].clone().into_iter().enumerate() {
            if let Some(slot) = self.slot(|block| block.is_some_and(|block| block.identity == identity)) {
                events.push(self.event(EventKind::Hit, slot));
                parent = slot;
                continue;
            }
            let free = match self.slot(|block| block.is_none()) {
                Some(free) => free,
                None => {
                    self.tell(engine, &mut events)?;
                    self.evict(engine)?;
                    self.slot(|block| block.is_none()).expect("a block was just evicted")
                }
            };
            // Its parent may be what was evicted for it.
            parent =
                if self.slots.get(parent as usize).copied().flatten().is_some() { parent } else { NO_SLOT };
            self.slots[free as usize] = Some(Block { parent, depth: depth as u32, identity });
            events.push(self.event(EventKind::Insert, free));
            parent = free;
        }
        self.tell(engine, &mut events)
    }

    fn slot(&self, is_it: impl Fn(Option<Block>) -> bool) -> Option<u32> {
        self.slots.iter().position(|block| is_it(*block)).map(|slot| slot as u32)
    }

    fn event(&self, kind: EventKind, slot: u32) -> Event {
        let Block { parent, depth, identity } = self.slots[slot as usize].expect("it was found there");
        Event {
            kind,
            replayed: false,
            class: 0,
            slot,
            parent_or_uses: if kind == EventKind::Insert { parent } else { 1 },
            depth,
            size_bytes: 1 << 16,
            time_ms: self.now_ms,
            identity: identity.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            tenant: 0,
        }
    }

    fn tell(&self, engine: &mut Evictor, events: &mut Vec<Event>) -> Result<(), Failure> {
        let mut words = Vec::new();
        events.drain(..).for_each(|event| event.encode(0, &mut words));
        engine.on_events(0, &words).map_err(|fault| Failure::Fault { call: "on-events", fault })
    }

    /// Some blocks at once, as a host keeps some free.
    fn evict(&mut self, engine: &mut Evictor) -> Result<(), Failure> {
        let mut victims = Vec::new();
        let want = self.rng.random_range(1..9);
        let chosen = engine.select_victims(self.now_ms, want, &mut victims);
        chosen.map_err(|fault| Failure::Fault { call: "select-victims", fault })?;
        if victims.is_empty() {
            return Err(Failure::invalid("select-victims", "no victim of a full pool"));
        }
        for Victim { slot, .. } in victims {
            let known = self.slots.get_mut(slot as usize).and_then(Option::take);
            known
                .ok_or_else(|| Failure::invalid("select-victims", format!("{slot} is no resident block")))?;
            let stays = self.slots.iter().flatten().any(|block| block.parent == slot);
            (self.victims, self.too_early) = (self.victims + 1, self.too_early + u64::from(stays));
            self.slots
                .iter_mut()
                .flatten()
                .filter(|block| block.parent == slot)
                .for_each(|block| block.parent = NO_SLOT);
        }
        Ok(())
    }
}
