//! A choice of victims as a record that any evictor can be asked again.
//!
//! A pool of a million blocks, and all that ever happened in it, does not fit into a record. So it holds a piece of the pool: the victims
//! and some of the other blocks, told in the way a new policy is told of a pool. Its answer is that of a new instance of
//! the policy, which knows this piece and nothing else; where the policy ranks by what it was told there, that is also the order
//! in which it would have chosen these blocks in the pool.

use crate::policy::SlotKind;
use crate::policy::record::{Call, FORMAT, PolicyOf, Push, Record, bits, halves};
use kvasir_dataplane::DramStore;
use kvasir_dataplane::tier::dram::History;
use kvasir_dataplane::tier::events::{AccessEvent, EventKind, NO_SLOT};
use kvasir_eviction::encode;
use kvasir_policy::evictor::{EVENTS_MAX, Layout, Victim};
use std::collections::HashMap;

/// Blocks of a piece: each is told as an insert, and as a hit if it was used, all in one call.
const BLOCKS_MAX: usize = EVENTS_MAX / 2;
/// The most slots that are looked at to find them.
const SLOTS_SEEN: u32 = 4 * BLOCKS_MAX as u32;

/// A choice that has just been made.
pub(super) struct Chosen<'a> {
    pub(super) id: u64,
    pub(super) now_ms: u64,
    pub(super) at_ms: u64,
    pub(super) policy: PolicyOf,
    /// How many victims were asked for.
    pub(super) want: u32,
    pub(super) victims: &'a [Victim],
    /// Rows of the tiers, as the policy knows them.
    pub(super) tiers: &'a [f32],
}

/// The record, without an answer.
pub(super) fn record(store: &DramStore, chosen: Chosen<'_>) -> Record {
    let Chosen { id, now_ms, at_ms, policy, want, victims, tiers } = chosen;
    let (events, blocks) = events(store, id, victims);
    let mut words = Vec::new();
    let base_ms = encode(&events, &mut words);
    let told = [&halves(base_ms)[..], &words].concat();
    let mut pushed: Vec<Push> = vec![("open".to_owned(), Layout::of(blocks).encode().to_vec())];
    if !tiers.is_empty() {
        pushed.push(("update-tiers".to_owned(), bits(tiers)));
    }
    pushed.push(("on-events".to_owned(), told));
    Record {
        record: FORMAT,
        slot: SlotKind::Evictor.to_string(),
        id,
        at_ms,
        policy,
        pushed,
        asked: Call::select_victims(now_ms, want.min(blocks).into()),
        answer: Vec::new(),
        scores: Vec::new(),
        fallback: None,
        ns: 0,
    }
}

/// The events of the piece, oldest first, and how many blocks it has. Slots are renumbered from 0; pinned blocks, which
/// cannot be chosen, are left out.
fn events(store: &DramStore, id: u64, victims: &[Victim]) -> (Vec<AccessEvent>, u32) {
    let slots = store.slots().max(1);
    let start = (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % slots;
    let others = (0..SLOTS_SEEN.min(slots)).map(|step| (start + step) % slots);
    let all = History { entries: Vec::new(), until: u32::MAX };
    let mut numbers = HashMap::new();
    let mut events = Vec::new();
    for slot in victims.iter().map(|victim| victim.slot).chain(others) {
        if numbers.len() == BLOCKS_MAX || numbers.contains_key(&slot) {
            continue;
        }
        let Some(resident) = store.resident(slot).filter(|resident| !resident.pinned) else { continue };
        numbers.insert(slot, numbers.len() as u32);
        events.push(resident.insert);
        events.extend(store.past_use(slot, &all));
    }
    events.sort_by_key(|event| (event.time_ms, event.kind == EventKind::Hit, event.depth));
    let number = |slot: u32| numbers.get(&slot).copied();
    let mut told = vec![false; numbers.len()];
    for event in &mut events {
        event.slot = number(event.slot).unwrap_or(0);
        if event.kind == EventKind::Insert {
            // A parent that came back after its child is not there yet.
            let parent = number(event.parent_or_uses).filter(|parent| told[*parent as usize]);
            event.parent_or_uses = parent.unwrap_or(NO_SLOT);
            told[event.slot as usize] = true;
        }
    }
    (events, numbers.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::record::Player;
    use crate::policy::{Engine, PolicyConfig, Source};
    use kvasir_dataplane::tier::dram::OwnerId;
    use kvasir_dataplane::{BlockKey, BlockMeta, DramConfig};

    #[test]
    fn a_piece_of_a_pool_is_asked_like_a_pool() {
        let config = DramConfig { pool_bytes: 64 * 4096, blocks_max: 256, ..DramConfig::default() };
        let store = DramStore::open(config).unwrap();
        let key = |n: u64| BlockKey::from_engine_hash("piece", &n.to_le_bytes());
        for n in 0..20 {
            let parent = (n % 4 > 0).then(|| key(n - 1));
            let meta = BlockMeta { parent, depth: (n % 4) as u32, ..BlockMeta::single(key(n), 4096) };
            store.put(OwnerId(0), &meta, &[n as u8; 4096], 1_000 * n).unwrap();
        }
        let slot = |n: u64| store.stat(&[key(n)]).unwrap()[0].as_ref().unwrap().slot;
        let victims = [Victim::new(slot(2)), Victim::new(slot(7))];
        let policy = PolicyOf::default();
        let chosen =
            Chosen { id: 1, now_ms: 99_000, at_ms: 5, policy, want: 2, victims: &victims, tiers: &[] };
        let record = record(&store, chosen);
        record.check().unwrap();
        assert_eq!(record.pushed[0].1[0], 20, "all blocks of a small pool");
        assert_eq!(record.asked.scalars, [99_000, 2]);
        let config = PolicyConfig::default();
        let engine = Engine::new(&config, None).unwrap();
        let play = |source| {
            let player = Player::new(&engine, &config, SlotKind::Evictor, source, Vec::new()).unwrap();
            player.play(&record, false).unwrap().answer
        };
        for name in ["lru", "fifo", "sieve", "workload-aware"] {
            let answer = play(Source::Native(name.to_owned()));
            assert_eq!(answer.len(), 2, "{name}");
            assert_eq!(answer, play(Source::Builtin(name.to_owned())), "{name}");
        }
    }
}
