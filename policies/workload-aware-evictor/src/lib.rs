//! Evicts the block that by its class is least likely to be used again soon ("KVCache Cache in the
//! Wild", USENIX ATC '25): lowest (ReuseProb_w(t, life), -offset) first.
//!
//! Per class `w` of requests, recent samples give the share `p` of uses that were followed by another,
//! an exponential distribution `F` of the time between the two, and the mean life span `life` of a
//! block. A block last used `t` ago has priority `p (F(t + life) - F(t))`. Within a class that only
//! falls with `t`, so one queue per class, least recently used first, leaves one candidate per class.
//!
//! * Samples of evicted blocks continue: the pool remembers when it last saw them. Without that a small
//!   pool would learn only from the reuse it happened to catch.
//! * Priorities are compared as logarithms, `ln(p (1 - exp(-rate life))) - rate t`: no exponential per
//!   decision, and no underflow to equal zeros for old blocks.
//! * A candidate with resident children is set aside until the last of them has left.
#![deny(clippy::disallowed_methods)]

mod fit;

use fit::{Fit, Samples};
use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::list::{Family, Lists, Walk};
use kvasir_policy::{Description, Evictor, Settings};

/// Classes told apart; higher ones count as the last of these.
const CLASSES: usize = 64;
/// The list of blocks set aside until their children have left.
const WAITING: u32 = CLASSES as u32;
/// How many older blocks a returning block is put behind, at most.
const MAX_RETURN_STEPS: u32 = 32;

/// Resident blocks by class, and what was learned about the classes.
pub struct WorkloadAware {
    settings: fit::Settings,
    blocks: Vec<Block>,
    queues: Lists,
    /// One bit per class that was ever used: the classes that a decision looks at.
    used: u64,
    walk: Walk,
    family: Family,
    samples: [Samples; CLASSES],
    fits: [Fit; CLASSES],
    /// When samples were last aged, and when that is due next.
    fitted_ms: u64,
    next_fit_ms: u64,
    ghosts: Vec<Ghost>,
}

#[derive(Clone, Copy, Default)]
struct Block {
    identity: u64,
    last_ms: u64,
    depth: u32,
    class: u8,
    waiting: bool,
}

/// An evicted block; the table is direct-mapped by identity, so a newer block overwrites an older.
#[derive(Clone, Copy, Default)]
struct Ghost {
    /// 0: none.
    identity: u64,
    last_ms: u64,
    class: u8,
}

/// The candidate of one class.
#[derive(Clone, Copy)]
struct Head {
    /// Logarithm of the priority.
    key: f64,
    slot: u32,
    depth: u32,
}

impl Default for WorkloadAware {
    fn default() -> Self {
        Self {
            settings: fit::Settings::default(),
            blocks: Vec::new(),
            queues: Lists::default(),
            used: 0,
            walk: Walk::default(),
            family: Family::default(),
            samples: [Samples::default(); CLASSES],
            fits: [Fit::default(); CLASSES],
            fitted_ms: 0,
            next_fit_ms: 0,
            ghosts: Vec::new(),
        }
    }
}

impl WorkloadAware {
    /// Puts the block at the recent end of its class, behind deeper blocks of the same request.
    fn touch(&mut self, event: &Event) {
        let (slot, class) = (event.slot, queue_of(event.class));
        let before = self.walk.shallower(event);
        let Some(block) = self.blocks.get_mut(slot as usize) else { return };
        *block = Block {
            identity: event.identity,
            last_ms: event.time_ms,
            depth: event.depth,
            class,
            waiting: false,
        };
        let before = before.filter(|&at| {
            let at = self.blocks.get(at as usize);
            at.is_some_and(|at| at.class == class && at.last_ms == event.time_ms && !at.waiting)
        });
        if !before.is_some_and(|at| self.queues.insert_before(at, slot)) {
            self.queues.push_back(class.into(), slot);
        }
        self.used |= 1 << class;
    }

    /// Counts a block that became resident: a new one, or one seen before.
    fn learn_insert(&mut self, event: &Event) {
        let class = usize::from(queue_of(event.class));
        self.samples[class].uses += 1.0;
        let ghost = match self.ghosts.len() {
            0 => Ghost::default(),
            len => std::mem::take(&mut self.ghosts[event.identity as usize & (len - 1)]),
        };
        let gap_ms = event.time_ms.saturating_sub(ghost.last_ms) as f64;
        if ghost.identity == event.identity && gap_ms < self.settings.forget_ms && event.identity != 0 {
            self.samples[usize::from(ghost.class)].reuse(gap_ms);
        } else {
            self.samples[class].blocks += 1.0;
        }
    }

    fn learn_hit(&mut self, event: &Event) {
        let Some(&block) = self.blocks.get(event.slot as usize) else { return };
        self.samples[usize::from(queue_of(event.class))].uses += 1.0;
        let gap_ms = event.time_ms.saturating_sub(block.last_ms) as f64;
        self.samples[usize::from(block.class)].reuse(gap_ms);
    }

    fn refit_if_due(&mut self, now_ms: u64) {
        if now_ms < self.next_fit_ms {
            return;
        }
        let elapsed_ms = now_ms.saturating_sub(self.fitted_ms) as f64;
        fit::age(&mut self.samples, elapsed_ms, &self.settings);
        fit::refit(&self.samples, &mut self.fits, &self.settings);
        self.fitted_ms = now_ms;
        self.next_fit_ms = now_ms.saturating_add(self.settings.refit_ms as u64);
    }

    fn head(&self, class: usize, now_ms: u64) -> Option<Head> {
        let slot = self.queues.front(class as u32)?;
        let block = &self.blocks[slot as usize];
        let age_ms = now_ms.saturating_sub(block.last_ms) as f64;
        Some(Head { key: self.fits[class].log_priority(age_ms), slot, depth: block.depth })
    }

    /// Takes the cheapest candidate without resident children off the queues.
    fn victim(&mut self, heads: &mut [Option<Head>; CLASSES], now_ms: u64) -> Option<u32> {
        while let Some((class, slot)) = cheapest(heads, self.used) {
            self.queues.remove(slot);
            let leaf = !self.family.has_children(slot);
            if !leaf {
                self.blocks[slot as usize].waiting = true;
                self.queues.push_back(WAITING, slot);
            }
            heads[class] = self.head(class, now_ms);
            if leaf {
                return Some(slot);
            }
        }
        // Only ancestors of pinned blocks are left.
        self.queues.pop_front(WAITING)
    }

    /// Forgets the block; a parent that waited for it is a candidate again.
    fn evict(&mut self, slot: u32, heads: &mut [Option<Head>; CLASSES], now_ms: u64) {
        let block = &mut self.blocks[slot as usize];
        block.waiting = false;
        if !self.ghosts.is_empty() {
            let index = block.identity as usize & (self.ghosts.len() - 1);
            self.ghosts[index] =
                Ghost { identity: block.identity, last_ms: block.last_ms, class: block.class };
        }
        if let Some(class) = self.leave(slot) {
            heads[class] = self.head(class, now_ms);
        }
    }

    /// Removes the block from its family. Returns the class of a parent that is a candidate again.
    fn leave(&mut self, slot: u32) -> Option<usize> {
        let parent = self.family.leave(slot)?;
        let Block { waiting: true, class, last_ms, .. } = self.blocks[parent as usize] else { return None };
        self.blocks[parent as usize].waiting = false;
        // It was the front of its class, so all that is older now came back before it.
        let mut at = self.queues.front(class.into());
        for _ in 0..MAX_RETURN_STEPS {
            match at {
                Some(older) if self.blocks[older as usize].last_ms < last_ms => at = self.queues.next(older),
                _ => break,
            }
        }
        if !at.is_some_and(|at| self.queues.insert_before(at, parent)) {
            self.queues.push_back(class.into(), parent);
        }
        Some(class.into())
    }
}

/// The class's queue.
fn queue_of(class: u16) -> u8 {
    usize::from(class).min(CLASSES - 1) as u8
}

/// Classes of a bit set, lowest first.
fn classes(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let class = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(class)
    })
}

/// Lowest priority, then deepest, then lowest class.
fn cheapest(heads: &[Option<Head>; CLASSES], used: u64) -> Option<(usize, u32)> {
    let mut best: Option<(usize, Head)> = None;
    for class in classes(used) {
        let Some(head) = heads[class] else { continue };
        let better = |best: &Head| head.key < best.key || (head.key == best.key && head.depth > best.depth);
        if best.as_ref().is_none_or(|(_, best)| better(best)) {
            best = Some((class, head));
        }
    }
    best.map(|(class, head)| (class, head.slot))
}

impl Evictor for WorkloadAware {
    fn describe(&self) -> Description {
        fit::Settings::describe(Description::evictor("workload-aware", env!("CARGO_PKG_VERSION")))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.settings = fit::Settings::parse(settings)?;
        Ok(())
    }

    fn open(&mut self, slots: u32) {
        // What was imported is kept.
        let (settings, samples) = (self.settings, self.samples);
        *self = Self {
            settings,
            samples,
            blocks: vec![Block::default(); slots as usize],
            queues: Lists::new(slots, CLASSES as u32 + 1),
            family: Family::new(slots),
            ghosts: vec![Ghost::default(); settings.ghost_slots()],
            ..Self::default()
        };
        fit::refit(&self.samples, &mut self.fits, &self.settings);
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            self.refit_if_due(event.time_ms);
            match event.kind {
                EventKind::Insert => {
                    if !event.replayed {
                        self.learn_insert(&event);
                    }
                    self.queues.remove(event.slot);
                    self.leave(event.slot);
                    self.touch(&event);
                    self.family.insert(event.slot, event.parent_or_uses);
                }
                EventKind::Hit => {
                    if !event.replayed {
                        self.learn_hit(&event);
                    }
                    self.touch(&event);
                }
                EventKind::Keep => {
                    self.touch(&event);
                    self.family.stay(event.slot);
                }
                EventKind::Unpin => {
                    self.queues.remove(event.slot);
                    self.touch(&event);
                }
                EventKind::Remove => {
                    self.queues.remove(event.slot);
                    self.leave(event.slot);
                    // Its children may stay, and must not call it back when they go.
                    if let Some(block) = self.blocks.get_mut(event.slot as usize) {
                        block.waiting = false;
                    }
                }
                EventKind::Pin => self.queues.hold(event.slot),
            }
        }
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) {
        self.refit_if_due(now_ms);
        let mut heads = [None; CLASSES];
        for class in classes(self.used) {
            heads[class] = self.head(class, now_ms);
        }
        for _ in 0..want {
            let Some(slot) = self.victim(&mut heads, now_ms) else { return };
            self.evict(slot, &mut heads, now_ms);
            victims.push(Victim::new(slot));
        }
    }

    fn export_state(&self) -> Vec<u8> {
        fit::export(&self.samples)
    }

    fn import_state(&mut self, state: &[u8]) -> Result<(), String> {
        self.samples = fit::import(state)?;
        Ok(())
    }
}

kvasir_policy::export_evictor!(WorkloadAware);

#[cfg(test)]
mod tests;
