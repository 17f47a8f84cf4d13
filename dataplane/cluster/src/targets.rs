//! How many copies are wanted of the blocks that this host holds, kept on disk beside them, so that it outlives a restart
//! of all holders.
//!
//! The table's log tells peers about this host's own copies, which is what must be kept. So one thread follows it as a
//! peer does: a few hundred milliseconds late, and from the whole table if it lags too far. When the host starts, those
//! blocks that a tier of it still has are claimed as before; the rest follows from that. It is soft state: without it, a
//! block is not copied again before somebody asks for that.
//!
//! A record is the key (16 B, big-endian) and 22 B: version, target, size, primary, generation.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::copies::FACTS_MAX;
use super::counts::add;
use super::table::{Fact, Generation, Heard, Holding, NodeId};
use super::{Event, Shared};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_state_db as state_db;
use kvasir_store::tiering::Tiering;

const VERSION: u8 = 3;
const RECORD_LEN: usize = 22;
const CACHE_BYTES: u64 = 8 << 20;
/// The longest time for which a fact is written and may still be lost.
const FLUSH: Duration = Duration::from_millis(200);

pub(super) struct Targets(state_db::Db);

impl Targets {
    /// Opens the records. Also says where damaged ones were put, if these take their place.
    pub(super) fn open(path: &Path) -> Result<(Self, Option<PathBuf>), state_db::OpenError> {
        let opened = state_db::open(path, CACHE_BYTES)?;
        Ok((Self(opened.db), opened.set_aside))
    }

    /// What was kept, as far as it can be read.
    fn all(&self) -> impl Iterator<Item = (BlockKey, Option<Holding>)> + use<> {
        self.0.iter().filter_map(Result::ok).filter_map(|(key, record)| {
            let key = BlockKey(u128::from_be_bytes(key.as_ref().try_into().ok()?));
            Some((key, decode(&record)))
        })
    }

    fn apply(&self, facts: &[Fact]) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        for fact in facts {
            let key = fact.key().0.to_be_bytes();
            match fact {
                Fact::Holds(_, holding) => batch.insert(&key, &encode(holding)),
                Fact::Gone(..) => batch.remove(&key),
                // Kept by the host that carried it out.
                Fact::Removed(..) => {}
            }
        }
        self.0.apply_batch(batch)
    }

    /// Keeps these records and no others.
    fn replace(&self, own: &[Fact]) -> sled::Result<()> {
        self.0.clear()?;
        own.chunks(FACTS_MAX).try_for_each(|facts| self.apply(facts))
    }
}

impl Shared {
    /// Claims again what this host held before it was started, as far as one of its tiers still has it.
    pub(super) fn restore_targets(&self, targets: &Targets, tiering: &Tiering) {
        let mut all = targets.all();
        loop {
            let kept: Vec<(BlockKey, Option<Holding>)> = all.by_ref().take(BATCH_MAX).collect();
            if kept.is_empty() {
                return;
            }
            let keys: Vec<BlockKey> = kept.iter().map(|(key, _)| *key).collect();
            let Ok(found) = tiering.residency_here(&keys) else { return };
            let (mut gone, mut removed) = (sled::Batch::default(), Vec::new());
            let mut table = self.table();
            for ((key, holding), found) in kept.into_iter().zip(found) {
                let holding = holding.zip(found.size).map(|(holding, size)| Holding { size, ..holding });
                let heard = holding.map(|holding| {
                    self.copies.generations.heard(holding.generation);
                    table.holds(0, key, holding)
                });
                if heard == Some(Heard::Outdated) {
                    removed.push(key);
                }
                match heard {
                    Some(Heard::New | Heard::Known) => add(&self.counts.restored, 1),
                    _ => gone.remove(&key.0.to_be_bytes()),
                }
            }
            drop(table);
            // The host stopped between a removal and its end.
            self.drop_here(&removed);
            // If this fails, they are looked at again the next time.
            let _ = targets.0.apply_batch(gone);
        }
    }

    /// The thread that keeps targets: follows the log from number `at` on.
    pub(super) fn keep_targets(self: &Arc<Self>, targets: &Targets, mut at: u64) {
        let (mut flushed, mut well) = (Instant::now(), true);
        loop {
            let stopping = self.is_stopping();
            let news = self.copies.news(at, FLUSH);
            let kept = match &news {
                Some(facts) => {
                    at += facts.len() as u64;
                    targets.apply(facts)
                }
                None => {
                    let (own, end) = self.table().own();
                    at = end;
                    targets.replace(&own)
                }
            };
            let idle = news.is_some_and(|facts| facts.is_empty());
            let due =
                (idle || flushed.elapsed() >= FLUSH) && self.counts.targets_kept.load(Ordering::Relaxed) < at;
            let kept = kept.and_then(|()| if due || stopping { targets.0.flush() } else { Ok(()) });
            let failed = kept.is_err();
            match kept {
                Ok(()) if due || stopping => {
                    self.counts.targets_kept.store(at, Ordering::Relaxed);
                    flushed = Instant::now();
                }
                Ok(()) => {}
                Err(error) => {
                    if std::mem::take(&mut well) {
                        self.tell(Event::TargetsNotKept { reason: error.to_string() });
                    }
                    self.pause(FLUSH);
                }
            }
            if stopping && (idle || failed) {
                return;
            }
        }
    }
}

/// The record of a holding.
pub fn encode(holding: &Holding) -> [u8; RECORD_LEN] {
    let Holding { size, target, primary, generation } = *holding;
    let mut record = [0; RECORD_LEN];
    (record[0], record[1]) = (VERSION, target);
    record[2..6].copy_from_slice(&size.to_le_bytes());
    record[6..14].copy_from_slice(&primary.0.to_le_bytes());
    record[14..].copy_from_slice(&generation.0.to_le_bytes());
    record
}

/// The holding that a record tells of. `None` means that it is no record.
pub fn decode(record: &[u8]) -> Option<Holding> {
    let ([version, target], rest) = record.split_first_chunk()?;
    let (size, rest) = rest.split_first_chunk()?;
    let (primary, generation) = rest.split_first_chunk()?;
    let holding = Holding {
        size: u32::from_le_bytes(*size),
        target: *target,
        primary: NodeId(u64::from_le_bytes(*primary)),
        generation: Generation(u64::from_le_bytes(generation.try_into().ok()?)),
    };
    (*version == VERSION && holding.size > 0).then_some(holding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Gone;

    fn holding(size: u32) -> Holding {
        let generation = Generation(u64::MAX - 9);
        Holding { size, target: 3, primary: NodeId::of("a"), generation }
    }

    fn kept(targets: &Targets) -> Vec<(u128, Option<Holding>)> {
        targets.all().map(|(key, holding)| (key.0, holding)).collect()
    }

    #[test]
    fn what_was_kept_is_there_after_it_was_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("targets");
        let (targets, _) = Targets::open(&path).unwrap();
        let holds = |n: u128| Fact::Holds(BlockKey(n), holding(n as u32));
        targets.apply(&[holds(1), holds(2), Fact::Gone(BlockKey(1), Gone::LetGo), holds(3)]).unwrap();
        targets.0.flush().unwrap();
        drop(targets);
        let (targets, _) = Targets::open(&path).unwrap();
        assert_eq!(kept(&targets), [(2, Some(holding(2))), (3, Some(holding(3)))]);
        targets.replace(&[holds(3), holds(9)]).unwrap();
        targets.0.insert(7u128.to_be_bytes(), &b"noise"[..]).unwrap();
        targets.0.insert(b"noise", &encode(&holding(1))).unwrap();
        assert_eq!(kept(&targets), [(3, Some(holding(3))), (7, None), (9, Some(holding(9)))]);
    }

    #[test]
    fn a_record_of_another_version_or_length_is_none() {
        let record = encode(&holding(5));
        assert_eq!(decode(&record), Some(holding(5)));
        let mut other = record;
        other[0] = VERSION - 1;
        for record in [&other[..], &record[1..], &record[..RECORD_LEN - 1], &[&record[..], &[0]].concat()] {
            assert_eq!(decode(record), None);
        }
    }

    #[test]
    fn damaged_files_are_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("targets");
        drop(Targets::open(&path).unwrap());
        for file in std::fs::read_dir(&path).unwrap().map(Result::unwrap) {
            if file.file_type().unwrap().is_file() {
                std::fs::write(file.path(), b"not what it was").unwrap();
            }
        }
        let (targets, set_aside) = Targets::open(&path).unwrap();
        assert!(set_aside.is_some_and(|kept| kept.exists()));
        targets.apply(&[Fact::Holds(BlockKey(1), holding(1))]).unwrap();
        assert_eq!(kept(&targets).len(), 1);
    }
}
