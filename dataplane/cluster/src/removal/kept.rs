//! Removals on disk: the key (16 B, big-endian) and the generation (8 B, the same) of each; and under `clock` one that no generation
//! was later than.

use std::path::{Path, PathBuf};

use crate::table::Generation;
use kvasir_protocol::block::BlockKey;
use kvasir_state_db as state_db;

const CACHE_BYTES: u64 = 4 << 20;
const CLOCK: &[u8] = b"clock";

pub(crate) struct Kept(state_db::Db);

impl Kept {
    /// Opens the records. Also says where damaged ones were put, if these take their place.
    pub(crate) fn open(path: &Path) -> Result<(Self, Option<PathBuf>), state_db::OpenError> {
        let opened = state_db::open(path, CACHE_BYTES)?;
        Ok((Self(opened.db), opened.set_aside))
    }

    /// Keeps removals. They are on the disk when this returns.
    pub(super) fn add(&self, removals: &[(BlockKey, Generation)]) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        for (key, at) in removals {
            batch.insert(&key.0.to_be_bytes(), &at.0.to_be_bytes());
        }
        self.0.apply_batch(batch)?;
        self.0.flush()
    }

    /// Forgets removals. A crash may bring them back.
    pub(super) fn forget(&self, keys: &[BlockKey]) -> sled::Result<()> {
        let mut batch = sled::Batch::default();
        keys.iter().for_each(|key| batch.remove(&key.0.to_be_bytes()));
        self.0.apply_batch(batch)
    }

    /// Keeps what [`clock`](Self::clock) tells. It is on the disk when this returns.
    pub(super) fn keep_clock(&self, until: Generation) -> sled::Result<()> {
        self.0.insert(CLOCK, &until.0.to_be_bytes())?;
        self.0.flush()
    }

    /// What was kept last.
    pub(super) fn clock(&self) -> Option<Generation> {
        let kept = self.0.get(CLOCK).ok()??;
        Some(Generation(u64::from_be_bytes(kept.as_ref().try_into().ok()?)))
    }

    /// What was kept, as far as it can be read.
    pub(super) fn all(&self) -> impl Iterator<Item = (BlockKey, Generation)> + use<> {
        self.0.iter().filter_map(Result::ok).filter_map(|(key, at)| {
            let key = BlockKey(u128::from_be_bytes(key.as_ref().try_into().ok()?));
            Some((key, Generation(u64::from_be_bytes(at.as_ref().try_into().ok()?))))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_there_after_it_was_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("removals");
        let (kept, _) = Kept::open(&path).unwrap();
        let removal = |n: u64| (BlockKey(n.into()), Generation(n << 40));
        kept.add(&[removal(1), removal(2), removal(3)]).unwrap();
        kept.forget(&[BlockKey(2)]).unwrap();
        kept.add(&[(BlockKey(3), Generation(9))]).unwrap();
        kept.0.insert(b"noise", b"noise").unwrap();
        assert_eq!(kept.clock(), None);
        kept.keep_clock(Generation(7)).unwrap();
        drop(kept);
        let (kept, _) = Kept::open(&path).unwrap();
        assert_eq!(kept.all().collect::<Vec<_>>(), [removal(1), (BlockKey(3), Generation(9))]);
        assert_eq!(kept.clock(), Some(Generation(7)));
    }
}
