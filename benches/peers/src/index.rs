//! One interface over the prefix indexes.

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData, KvCacheStoredBlockData,
    LocalBlockHash, RouterEvent,
};

use crate::prefix_index::{Limits, PrefixIndex, Slot};

/// An index of the chains of block hashes that each instance holds.
pub(crate) trait Index: Default {
    const NAME: &str;

    /// An instance says that it has these blocks, the first of which follows `parent`.
    fn store(&mut self, slot: Slot, parent: Option<u64>, blocks: &[u64]);

    /// How many leading blocks of the chain each instance has.
    fn lookup(&self, chain: &[u64], matched: &mut [u32]);
}

/// Ours, as it stands in the daemon.
pub(crate) struct Kvasir(PrefixIndex);

impl Default for Kvasir {
    fn default() -> Self {
        Self(PrefixIndex::new(Limits::default()))
    }
}

impl Index for Kvasir {
    const NAME: &str = "kvasir";

    fn store(&mut self, slot: Slot, parent: Option<u64>, blocks: &[u64]) {
        self.0.store(slot, parent, blocks);
    }

    fn lookup(&self, chain: &[u64], matched: &mut [u32]) {
        self.0.lookup(chain, matched);
    }
}

/// The index of NVIDIA Dynamo's router, in the crate that they publish, fed by its events.
#[derive(Default)]
pub(crate) struct Dynamo {
    tree: RadixTree,
    events: u64,
}

impl Index for Dynamo {
    const NAME: &str = "dynamo";

    /// Both hashes of a block are the same here: those of the chain are distinct, so nothing is found that should not be.
    fn store(&mut self, slot: Slot, parent: Option<u64>, blocks: &[u64]) {
        let blocks = blocks.iter().map(|&hash| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(hash),
            tokens_hash: LocalBlockHash(hash),
            mm_extra_info: None,
        });
        let data = KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: blocks.collect(),
        });
        self.events += 1;
        let event = KvCacheEvent { event_id: self.events, data, dp_rank: 0 };
        let stored = self.tree.apply_event(RouterEvent::new(slot.into(), event));
        stored.expect("the parent is there");
    }

    fn lookup(&self, chain: &[u64], matched: &mut [u32]) {
        let found = self.tree.find_matches(chain.iter().map(|&hash| LocalBlockHash(hash)).collect(), false);
        matched.fill(0);
        for (worker, blocks) in &found.scores {
            matched[worker.worker_id as usize] = *blocks as u32;
        }
    }
}
