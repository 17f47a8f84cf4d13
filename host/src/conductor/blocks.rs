//! Which instance holds which blocks, behind a lock of its own: a decision looks here before it looks at the tables. What an
//! instance tells is taken in piece by piece, and a decision that waits comes between two of them; it does not sleep at
//! first, since to be woken takes longer than a piece.
//!
//! Order of locks: [`Blocks::order`], the state, the indices.

use super::Holder;
use crate::prefix_index::{Limits, Near, SWEEP, Stats, Tier, TieredIndex};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Blocks that are stored or removed at a time: some 5 µs, as decisions wait for it.
const PIECE: usize = 64;
/// How often a decision tries, before it sleeps until the indices are free: some 50 µs.
const TRIES: u32 = 1_000;
/// How long a piece gives way to decisions that wait, in turns of a loop: some 10 µs, if the processor runs others instead of them.
const GIVE_WAY: u32 = 200;

/// See the module documentation.
pub(super) struct Blocks {
    order: Mutex<()>,
    indices: RwLock<Indices>,
    /// How often an instance's blocks were forgotten. Changes under the lock of the state alone.
    dropped: AtomicU64,
    /// Decisions that wait for the indices.
    waiting: AtomicUsize,
}

struct Indices {
    /// By prefill slot.
    prefill: TieredIndex,
    /// By decode slot, of instances that only decode.
    decode: TieredIndex,
}

impl Indices {
    fn of(&mut self, holder: Holder) -> (&mut TieredIndex, u16) {
        match holder {
            Holder::Prefill(slot) => (&mut self.prefill, slot),
            Holder::Decode(slot) => (&mut self.decode, slot),
        }
    }
}

impl Blocks {
    pub(super) fn new(limits: Limits) -> Self {
        let index = || TieredIndex::new(limits);
        Self {
            order: Mutex::default(),
            indices: RwLock::new(Indices { prefill: index(), decode: index() }),
            dropped: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Held from before an instance's message is looked at until it is taken in, and while instances come and go: so
    /// messages of one instance are taken in one after the other, and its slot is not another's meanwhile.
    pub(super) fn order(&self) -> MutexGuard<'_, ()> {
        self.order.lock()
    }

    pub(super) fn store(&self, holder: Holder, tier: Option<Tier>, mut parent: Option<u64>, blocks: &[u64]) {
        for piece in blocks.chunks(PIECE) {
            let refused = self.piece(|indices| {
                let (index, slot) = indices.of(holder);
                index.store(slot, tier, parent, piece).refused
            });
            if refused > 0 {
                // There is no room for what follows either.
                break;
            }
            parent = piece.last().copied();
        }
    }

    pub(super) fn remove(&self, holder: Holder, tier: Option<Tier>, blocks: &[u64]) {
        for piece in blocks.chunks(PIECE) {
            self.piece(|indices| {
                let (index, slot) = indices.of(holder);
                index.remove(slot, tier, piece);
            });
        }
    }

    /// Forgets what an instance holds. The caller has the lock of the state.
    pub(super) fn drop_instance(&self, holder: Holder) {
        let mut indices = self.indices.write();
        let (index, slot) = indices.of(holder);
        index.drop_instance(slot);
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a piece of what is forgotten out of the indices. Returns whether more is left.
    pub(super) fn sweep(&self) -> bool {
        self.piece(|indices| indices.prefill.sweep(SWEEP) || indices.decode.sweep(SWEEP))
    }

    /// Decisions that wait come before the next piece.
    fn piece<R>(&self, change: impl FnOnce(&mut Indices) -> R) -> R {
        let result = change(&mut self.indices.write());
        for _ in 0..GIVE_WAY {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            spin_loop();
        }
        result
    }

    fn read(&self) -> RwLockReadGuard<'_, Indices> {
        if let Some(indices) = self.indices.try_read() {
            return indices;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let soon = (0..TRIES).find_map(|_| {
            spin_loop();
            self.indices.try_read()
        });
        let indices = soon.unwrap_or_else(|| self.indices.read());
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        indices
    }

    /// Looks up a chain.
    pub(super) fn look(&self, chain: &[u64], found: &mut Found) {
        let indices = self.read();
        found.dropped = self.dropped.load(Ordering::Relaxed);
        found.prefill.look(&indices.prefill, chain);
        found.decode.look(&indices.decode, chain);
    }

    /// Whether slots mean in what was found what they mean now. The caller has the lock of the state.
    pub(super) fn are_as_found(&self, found: &Found) -> bool {
        found.dropped == self.dropped.load(Ordering::Relaxed)
    }

    /// Statistics of both indices together.
    pub(super) fn stats(&self) -> Stats {
        let indices = self.read();
        indices.prefill.stats().plus(indices.decode.stats())
    }
}

/// What the indices say of a chain, in buffers that are used again.
#[derive(Default)]
pub(super) struct Found {
    pub(super) prefill: Matches,
    pub(super) decode: Matches,
    /// How often instances' blocks had been forgotten: if that is not what it is now, slots may mean others.
    dropped: u64,
}

/// What one index says of a chain, by slot. Slots beyond the last hold nothing.
#[derive(Default)]
pub(super) struct Matches {
    /// Leading blocks of the chain.
    pub(super) all: Vec<u32>,
    /// The leading part of those that is in HBM, and in HBM or DRAM. Of no use unless an instance names tiers.
    near: [Vec<u32>; 2],
    pub(super) names_tiers: bool,
    /// The index has no blocks at all.
    pub(super) is_empty: bool,
}

impl Matches {
    fn look(&mut self, index: &TieredIndex, chain: &[u64]) {
        self.names_tiers = index.names_tiers();
        self.is_empty = index.is_empty();
        self.all.resize(index.slots(), 0);
        index.lookup(chain, &mut self.all);
        if self.names_tiers {
            for near in [Near::Hbm, Near::Dram] {
                let column = &mut self.near[near as usize];
                column.resize(self.all.len(), 0);
                index.lookup_near(near, chain, &self.all, column);
            }
        }
    }

    /// The part that is near: all of it where no instance says where its blocks lie.
    pub(super) fn near(&self, near: Near) -> &[u32] {
        if self.names_tiers { &self.near[near as usize] } else { &self.all }
    }
}

/// Fills a column with what was found. Returns whether there is any.
pub(super) fn fill(slots: &mut [u32], found: &[u32]) -> bool {
    let known = slots.len().min(found.len());
    slots[..known].copy_from_slice(&found[..known]);
    slots[known..].fill(0);
    slots.iter().any(|&blocks| blocks > 0)
}
