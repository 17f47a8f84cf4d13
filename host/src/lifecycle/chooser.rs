//! The eviction policy of a pool, as the thread that owns it asks it; keeps what it chose for those who ask why.

use super::piece;
use crate::calendar::unix_ms;
use crate::explain::Explain;
use crate::explain::blocks::{self, Evicted};
use crate::policy::EvictorWorker;
use kvasir_dataplane::DramStore;
use kvasir_eviction::{Choice, Chooser, KnowsNothing};
use kvasir_policy::evictor::{TierRow, Victim};
use std::sync::Arc;

pub struct PolicyChooser {
    worker: EvictorWorker,
    evicted: Arc<Evicted>,
    explain: Arc<Explain>,
    /// Choices so far.
    asked: u64,
    /// The native twin makes this one in place of a policy, about which it says nothing.
    natively: bool,
    /// Name of the policy that chooses, by its generation.
    name: (u64, Arc<str>),
    choices: Vec<blocks::Choice>,
}

impl PolicyChooser {
    /// Remembers no choice.
    pub fn new(worker: EvictorWorker) -> Self {
        Self::remembering(worker, Arc::new(Evicted::new(0)), Explain::off())
    }

    /// Remembers in `evicted` what was chosen, and gives a sample of it to `explain`.
    pub fn remembering(worker: EvictorWorker, evicted: Arc<Evicted>, explain: Arc<Explain>) -> Self {
        let name = (0, Arc::from(""));
        Self { worker, evicted, explain, asked: 0, natively: false, name, choices: Vec::new() }
    }

    /// Keeps what was chosen, for callers that ask.
    fn remember(&mut self, store: &DramStore, now_ms: u64, victims: &[Victim]) {
        if !self.evicted.is_on() {
            return;
        }
        let generation = self.worker.generation();
        if self.name.0 != generation {
            self.name = (generation, Arc::from(self.worker.policy()));
        }
        self.choices.clear();
        for (victim, rank) in victims.iter().zip(1..) {
            let Some(stat) = store.stat_at(victim.slot) else { continue };
            self.choices.push(blocks::Choice {
                key: stat.key,
                at_ms: now_ms,
                inserted_ms: stat.inserted_ms,
                used_ms: stat.used_ms,
                uses: stat.uses,
                policy: Arc::clone(&self.name.1),
                generation,
                rank,
                of: victims.len() as u16,
                to: victim.demote_to,
                fallback: self.natively,
            });
        }
        self.evicted.note(self.choices.drain(..));
    }

    /// Writes a choice to the file of samples, if it is one of them.
    fn sample(&self, choice: &Choice<'_>) {
        if self.natively || !self.explain.takes(self.asked) {
            return;
        }
        let Choice { store, now_ms, want, victims } = *choice;
        let chosen = piece::Chosen {
            id: self.asked,
            now_ms,
            at_ms: unix_ms(),
            policy: self.worker.policy_of(),
            want,
            victims: victims.unwrap_or_default(),
            tiers: self.worker.tiers(),
        };
        let mut record = piece::record(store, chosen);
        let Err(failure) = victims else {
            return self.explain.write(self.worker.answered(record));
        };
        record.fallback = Some(failure.to_owned());
        self.explain.write(move || Some(record));
    }
}

impl Chooser for PolicyChooser {
    fn refresh(&mut self) -> bool {
        self.worker.refresh()
    }

    fn open(&mut self) {
        self.worker.open();
    }

    fn update_tiers(&mut self, tiers: &[TierRow]) -> Result<(), KnowsNothing> {
        self.worker.update_tiers(tiers)
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), KnowsNothing> {
        self.worker.on_events(base_ms, words)
    }

    fn tell_next(&mut self, base_ms: u64, words: &[u32]) -> bool {
        self.worker.tell_next(base_ms, words)
    }

    fn forget_next(&mut self) {
        self.worker.forget_next();
    }

    fn promote(&mut self) {
        self.worker.promote();
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), String> {
        self.asked += 1;
        self.natively = self.worker.on_fallback();
        self.worker.select_victims(now_ms, want, victims).map_err(|fault| fault.to_string())
    }

    fn invalid(&mut self, reason: &str) {
        self.worker.invalid(reason.to_owned());
    }

    fn chosen(&mut self, choice: &Choice<'_>) {
        if let Ok(victims) = choice.victims {
            self.remember(choice.store, choice.now_ms, victims);
        }
        self.sample(choice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PolicyConfig, PolicyHost, SlotKind, Source, Wanted};
    use kvasir_dataplane::tier::tiering::Tiering;
    use kvasir_dataplane::{BlockKey, BlockMeta, Clock, DramConfig};
    use kvasir_eviction::Eviction;
    use kvasir_store::memory::MemoryStore;
    use kvasir_store::store::{BlockStore, Tier};
    use kvasir_store::tiering::{AdmitAll, TieringConfig};

    /// A policy's log says what it was told of the tiers: the pool as it fills, the disk, and nothing of peers.
    #[test]
    fn every_evictor_is_told_of_the_tiers_and_again_when_they_change() {
        let config = DramConfig { pool_bytes: 64 << 20, blocks_max: 256, ..DramConfig::default() };
        let store = Arc::new(DramStore::open(config).unwrap());
        let config = PolicyConfig { evictor_slots: store.slots(), ..PolicyConfig::default() };
        let policies = PolicyHost::open(&config, Wanted::default(), None).unwrap();
        let tier = |tier| -> Arc<dyn BlockStore> { Arc::new(MemoryStore::new(tier, 512 << 20)) };
        let below = vec![tier(Tier::Nvme), tier(Tier::Peer), tier(Tier::Remote)];
        let clock = Clock::start();
        let admit = Box::new(AdmitAll);
        let tiering =
            Tiering::start(Arc::clone(&store), below, admit, TieringConfig::default(), clock).unwrap();
        let _eviction = Eviction::start(
            Arc::new(tiering),
            PolicyChooser::new(policies.evictor_worker(store.slots())),
            clock,
        )
        .unwrap();
        let bytes = kvasir_tests::guest("evictor").to_vec();
        policies.load(SlotKind::Evictor, Source::Bytes { name: "bad".into(), bytes }, Vec::new()).unwrap();
        let told = |used_mib: u32| {
            let pool = format!("TierRow {{ tier: 2, capacity_mib: 64.0, used_mib: {used_mib}.0, ");
            while !policies.logs(SlotKind::Evictor).0.iter().any(|line| line.text.starts_with(&pool)) {
                std::thread::yield_now(); // the test runner's time limit ends this if it is never told
            }
        };
        told(0);
        let meta = BlockMeta::single(BlockKey::from_engine_hash("tiers", b"1"), 3 << 20);
        store.put(store.new_owner(), &meta, &vec![7; 3 << 20], clock.now_ms()).unwrap();
        told(3);
        let lines = policies.logs(SlotKind::Evictor).0;
        let tiers = |tier| lines.iter().filter(|l| l.text.contains(&format!("tier: {tier},"))).count();
        assert!(tiers(3) > 0 && tiers(4) > 0);
        assert_eq!(
            tiers(2) + tiers(3) + tiers(4),
            lines.iter().filter(|l| l.text.contains("tier: ")).count()
        );
        let below = "capacity_mib: 512.0, used_mib: 0.0, load_fixed_ms: 0.0, load_ms_per_mib: 0.0, takes_copies: true";
        assert!(lines.iter().any(|l| l.text.contains(below)), "{lines:?}");
    }
}
