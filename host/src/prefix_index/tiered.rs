//! Which instance holds how much of a prompt, and how much of that in HBM or DRAM.
//!
//! Where blocks lie is kept beside the index of all blocks, in one more index for each tier that instances name; while
//! nobody names any, there is none, and nothing costs more. An instance either says where its blocks lie or does not: when one
//! begins to say it, its blocks from before are in no known tier.

#[cfg(test)]
mod tests;

use super::{Limits, PrefixIndex, Slot, Stats, Stored};

/// Where an instance keeps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    Hbm,
    Dram,
    Nvme,
    Remote,
}

/// Tiers that count together: HBM alone, or HBM and DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Near {
    Hbm,
    Dram,
}

/// See the module documentation.
#[derive(Debug)]
pub struct TieredIndex {
    limits: Limits,
    /// In any tier.
    all: PrefixIndex,
    /// Those that have stored something are below this.
    slots: usize,
    tiers: Option<Box<Tiers>>,
}

/// The indices of the instances that say where their blocks lie.
#[derive(Debug)]
struct Tiers {
    /// By tier.
    each: [PrefixIndex; 4],
    /// In HBM or DRAM; a prompt may lie in both in turns.
    near: PrefixIndex,
    /// By slot: whether it names tiers.
    named: Vec<bool>,
}

impl TieredIndex {
    /// `limits` are those of the index of all blocks, and of each beside it.
    pub fn new(limits: Limits) -> Self {
        Self { limits, all: PrefixIndex::new(limits), slots: 0, tiers: None }
    }

    /// As [`PrefixIndex::store`]; `tier`: where they lie, if the instance says it. What lies elsewhere too stays there.
    pub fn store(&mut self, slot: Slot, tier: Option<Tier>, parent: Option<u64>, hashes: &[u64]) -> Stored {
        self.slots = self.slots.max(usize::from(slot) + 1);
        let stored = self.all.store(slot, parent, hashes);
        if let Some(tier) = tier {
            let limits = self.limits;
            self.tiers.get_or_insert_with(|| Tiers::new(limits)).store(slot, tier, parent, hashes);
        }
        stored
    }

    /// No slot from this on holds anything.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// `slot` no longer holds `hashes` in `tier`. `None` means any; what lies in another one, it still holds.
    pub fn remove(&mut self, slot: Slot, tier: Option<Tier>, hashes: &[u64]) {
        match (self.tiers.as_deref_mut().filter(|tiers| tiers.names(slot)), tier) {
            (None, _) => {
                self.all.remove(slot, hashes);
            }
            (Some(tiers), None) => {
                self.all.remove(slot, hashes);
                for index in tiers.indices_mut() {
                    index.remove(slot, hashes);
                }
            }
            (Some(tiers), Some(tier)) => {
                for &hash in hashes {
                    if !tiers.remove(slot, tier, hash) {
                        self.all.remove(slot, &[hash]);
                    }
                }
            }
        }
    }

    /// As [`PrefixIndex::drop_instance`]; that it names tiers is forgotten too.
    pub fn drop_instance(&mut self, slot: Slot) {
        self.all.drop_instance(slot);
        let Some(tiers) = self.tiers.as_deref_mut().filter(|tiers| tiers.names(slot)) else { return };
        for index in tiers.indices_mut() {
            index.drop_instance(slot);
        }
        tiers.named[usize::from(slot)] = false;
        if !tiers.named.contains(&true) {
            self.tiers = None;
        }
    }

    /// As [`PrefixIndex::sweep`], in one index after the other.
    pub fn sweep(&mut self, most: usize) -> bool {
        let beside = self.tiers.iter_mut().flat_map(|tiers| tiers.indices_mut());
        [&mut self.all].into_iter().chain(beside).any(|index| index.sweep(most))
    }

    /// As [`PrefixIndex::lookup`], in whatever tier.
    pub fn lookup(&self, chain: &[u64], out: &mut [u32]) -> u32 {
        self.all.lookup(chain, out)
    }

    /// Whether any instance says where its blocks lie.
    pub fn names_tiers(&self) -> bool {
        self.tiers.is_some()
    }

    /// The leading part of `all`, which [`Self::lookup`] found by slot, that is `near`; all of it at an instance that
    /// does not say where its blocks lie.
    pub fn lookup_near(&self, near: Near, chain: &[u64], all: &[u32], out: &mut [u32]) {
        let Some(tiers) = &self.tiers else { return out.copy_from_slice(all) };
        let index = match near {
            Near::Hbm => &tiers.each[Tier::Hbm as usize],
            Near::Dram => &tiers.near,
        };
        index.lookup(chain, out);
        for ((slot, out), &all) in (0..).zip(out).zip(all) {
            // An index that is full may lack what this one has.
            *out = if tiers.names(slot) { all.min(*out) } else { all };
        }
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Statistics of all indices together.
    pub fn stats(&self) -> Stats {
        let beside = self.tiers.iter().flat_map(|tiers| tiers.each.iter().chain([&tiers.near]));
        beside.map(PrefixIndex::stats).fold(self.all.stats(), Stats::plus)
    }
}

impl Tiers {
    fn new(limits: Limits) -> Box<Self> {
        let index = || PrefixIndex::new(limits);
        Box::new(Self { each: std::array::from_fn(|_| index()), near: index(), named: Vec::new() })
    }

    fn names(&self, slot: Slot) -> bool {
        self.named.get(usize::from(slot)) == Some(&true)
    }

    fn indices_mut(&mut self) -> impl Iterator<Item = &mut PrefixIndex> {
        self.each.iter_mut().chain([&mut self.near])
    }

    fn store(&mut self, slot: Slot, tier: Tier, parent: Option<u64>, hashes: &[u64]) {
        let at = usize::from(slot);
        self.named.resize(self.named.len().max(at + 1), false);
        self.named[at] = true;
        self.each[tier as usize].store(slot, parent, hashes);
        if tier <= Tier::Dram {
            self.near.store(slot, parent, hashes);
        }
    }

    /// Whether the instance still holds the block in another tier.
    fn remove(&mut self, slot: Slot, tier: Tier, hash: u64) -> bool {
        self.each[tier as usize].remove(slot, &[hash]);
        let [hbm, dram, below @ ..] = &self.each;
        let near = hbm.holds(slot, hash) || dram.holds(slot, hash);
        if !near {
            self.near.remove(slot, &[hash]);
        }
        near || below.iter().any(|index| index.holds(slot, hash))
    }
}
