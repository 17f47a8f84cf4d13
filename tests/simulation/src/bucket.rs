//! A bucket that hosts share, and what each knows to be in it. It stands in for the remote tier, whose runtime takes turns by itself; what
//! is looked at is how tiers and hosts use such a place.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_os::thread;
use kvasir_os::time::Duration;
use kvasir_os::world::{self, Chance};
use kvasir_protocol::block::BlockKey;
use kvasir_store::counters::Counters;
use kvasir_store::fault::{FaultStore, Rates};
use kvasir_store::store::{
    BlockStore, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, Stored, Tier, TierError, TierStats,
};

use crate::model::Model;
use crate::violated;

const NAME: &str = "bucket";
const REQUEST_MS: u64 = 30;
/// Of so many requests one is lost, and the answer of one.
const LOST: u64 = 30;

/// What is there. Its locks give nobody a turn: a host that crashes holds none.
pub(crate) struct Bucket {
    objects: Mutex<BTreeMap<BlockKey, Object>>,
    model: Arc<Mutex<Model>>,
    works: AtomicBool,
}

#[derive(Clone)]
struct Object {
    loaded: Loaded,
    bytes: Vec<u8>,
}

/// The bucket as a process uses it.
struct Remote {
    bucket: Arc<Bucket>,
    /// Sizes of what was there when it began, and of what it has stored or found since.
    known: Mutex<BTreeMap<BlockKey, u32>>,
    chance: Mutex<Chance>,
    counters: Counters,
}

/// What becomes of a request.
enum Fate {
    Lost,
    AnswerLost,
    Done,
}

impl Bucket {
    pub(crate) fn new(model: Arc<Mutex<Model>>) -> Arc<Self> {
        Arc::new(Self { objects: Mutex::default(), model, works: AtomicBool::new(false) })
    }

    /// As a process that begins now uses it, one request after the other.
    pub(crate) fn open(self: &Arc<Self>, chance: Chance) -> FaultStore {
        let known = self.objects().iter().map(|(key, object)| (*key, object.loaded.meta.size)).collect();
        let remote = Remote {
            bucket: Arc::clone(self),
            known: Mutex::new(known),
            chance: Mutex::new(chance),
            counters: Counters::default(),
        };
        FaultStore::new(Arc::new(remote), 0, Rates::default())
    }

    /// From now on no request is lost.
    pub(crate) fn mend(&self) {
        self.works.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has(&self, key: BlockKey) -> bool {
        self.objects().contains_key(&key)
    }

    /// Only a block that is removed everywhere is deleted here: to other hosts it may be the last copy.
    fn delete(&self, key: BlockKey) -> bool {
        let is_removed = self.model().is_being_removed(key);
        let was_there = self.objects().remove(&key).is_some();
        if was_there && !is_removed {
            let name = self.name(key);
            violated(&format!("{name} is deleted from the bucket, and nobody has begun to remove it"));
        }
        was_there
    }

    fn name(&self, of: BlockKey) -> String {
        let number = self.model().number(of);
        number.map_or_else(|| "a block that nobody has put".into(), |n| format!("block {n}"))
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn objects(&self) -> MutexGuard<'_, BTreeMap<BlockKey, Object>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Remote {
    fn known(&self) -> MutexGuard<'_, BTreeMap<BlockKey, u32>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something there, after some time. Its error says nothing about whether it was done.
    fn request<T>(
        &self,
        step: &'static str,
        key: BlockKey,
        work: impl FnOnce(&Bucket) -> T,
    ) -> Result<T, TierError> {
        let works = self.bucket.works.load(Ordering::Relaxed);
        let (pause, fate) = {
            let mut chance = self.chance.lock().unwrap_or_else(PoisonError::into_inner);
            let fate = match chance.below(LOST) {
                0 if !works => Fate::Lost,
                1 if !works => Fate::AnswerLost,
                _ => Fate::Done,
            };
            (chance.below(REQUEST_MS), fate)
        };
        thread::sleep(Duration::from_millis(pause));
        world::note(&format!("asks the bucket to {step} {}", self.bucket.name(key)));
        let done = match fate {
            Fate::Lost => None,
            Fate::AnswerLost => Some(work(&self.bucket)).and(None),
            Fate::Done => Some(work(&self.bucket)),
        };
        let lost = || TierError::Io { tier: NAME, step, key, reason: "no answer".into(), retryable: true };
        done.ok_or_else(lost)
    }

    fn put_one(&self, put: &Put) -> Result<Stored, TierError> {
        let Put { meta, checksum, .. } = *put;
        put.check(NAME, u32::MAX.into())?;
        if self.known().contains_key(&meta.key) {
            return Ok(Stored::AlreadyStored);
        }
        let object = Object { loaded: Loaded { meta, checksum }, bytes: put.bytes()?.to_vec() };
        self.request("put", meta.key, |bucket| bucket.objects().insert(meta.key, object))?;
        self.known().insert(meta.key, meta.size);
        self.counters.written(meta.size);
        Ok(Stored::Stored)
    }

    fn get_one(&self, get: &mut Get) -> Result<Option<Loaded>, TierError> {
        let found = self.request("get", get.key, |bucket| bucket.objects().get(&get.key).cloned())?;
        let Some(Object { loaded, bytes }) = found else {
            self.known().remove(&get.key);
            self.counters.miss();
            return Ok(None);
        };
        get.target(loaded.meta.size)?.copy_from_slice(&bytes);
        self.known().insert(get.key, loaded.meta.size);
        self.counters.hit(loaded.meta.size);
        Ok(Some(loaded))
    }

    fn remove_one(&self, key: BlockKey) -> Result<bool, TierError> {
        let was_there = self.request("delete", key, |bucket| bucket.delete(key))?;
        self.known().remove(&key);
        Ok(was_there)
    }
}

impl BlockStore for Remote {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: Tier::Remote,
            name: NAME,
            durable: true,
            block_bytes_max: u32::MAX.into(),
            capacity_bytes: None,
        }
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        let done = |put: Put| PutDone { outcome: self.put_one(&put), buffer: put.buffer };
        Pending::ready(batch.into_iter().map(done).collect())
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        let done = |mut get: Get| GetDone { outcome: self.get_one(&mut get), buffer: get.buffer };
        Pending::ready(batch.into_iter().map(done).collect())
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        let known = self.known();
        keys.iter().map(|key| known.get(key).copied()).collect()
    }

    fn look_up(&self, keys: Vec<BlockKey>) -> Pending<Vec<Option<u32>>> {
        let look = |&key: &BlockKey| {
            let size = |bucket: &Bucket| Some(bucket.objects().get(&key)?.loaded.meta.size);
            let size = self.request("look up", key, size).ok().flatten();
            self.known().extend(size.map(|size| (key, size)));
            size
        };
        Pending::ready(keys.iter().map(look).collect())
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        Pending::ready(keys.into_iter().map(|key| self.remove_one(key)).collect())
    }

    fn forget(&self, keys: &[BlockKey]) {
        self.known().retain(|key, _| !keys.contains(key));
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    fn stats(&self) -> TierStats {
        TierStats { blocks: self.known().len() as u64, ..self.counters.totals() }
    }
}
