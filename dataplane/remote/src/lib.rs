//! The remote tier: one object per block, in a directory or an S3-compatible store.
//!
//! **Threads.** The data plane is synchronous; requests run on a small runtime of this tier's own.
//!
//! **Order.** Puts and removals of one key exclude each other by a lock that is striped over keys; gets take none, and
//! what they learn about a key counts only if meanwhile no put or removal of its stripe ended, and no key of it was
//! forgotten. A stripe is locked before a request gets its permit, never after it.
//!
//! **What is there** is known from a listing at open and from what this host did since, within a bound. Other hosts
//! may share the place: blocks of one key have the same bytes, so they cannot clash, and a get asks the store also for
//! keys it does not know. A lookup that finds a block nowhere asks the store for it first ([`absent`]). A put that failed may have arrived all the same; a later get or listing finds it.
//!
//! **Durability.** A put is done when the store has the object. In a directory that is the system's cache, not the
//! disk: power that fails can cost blocks, and the frame shows it.
//!
//! **Damage.** An object carries what is needed to see that it is whole ([`frame`]). One that is not is counted, a miss, and
//! no longer known, so that the next put replaces it. It is deleted only where no other host stores: to others it may be
//! whole, because what damaged it may be this host or its way there. One sealed with a key that this host lacks is an error and stays; so is one that is not sealed,
//! where blocks are.

mod absent;
mod config;
mod frame;
mod index;
mod leftovers;
mod requests;
mod seal;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use self::absent::Absent;
pub use self::config::{OpenError, Place, RemoteConfig, S3};
use self::frame::{FRAME_BYTES, Unusable};
use self::index::{Index, Room};
use self::requests::{Failure, Requests};
use self::seal::KeyRing;
pub use self::seal::TenantKey;
use kvasir_protocol::block::BlockKey;
use kvasir_store::counters::Counters;
use kvasir_store::store::{
    BlockStore, Cancelled, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, Stored, Tier,
    TierError, TierStats,
};

const NAME: &str = "remote";
const STRIPES: usize = 1024;
const THREADS: usize = 2;

/// Blocks as objects. See the module text.
pub struct RemoteStore {
    remote: Arc<Remote>,
    report: OpenReport,
    /// Items taken and not yet done.
    taken: watch::Sender<usize>,
    /// Dropped in the background, so that a store may be dropped anywhere.
    runtime: Option<Runtime>,
}

/// What a listing found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    pub blocks: u64,
    pub block_bytes: u64,
    /// Blocks beyond the bounds of this host: found by a get, not by `exists`.
    pub beyond_bounds: u64,
    /// Objects that cannot be blocks by their name or length; left alone.
    pub foreign: u64,
}

struct Remote {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    block_bytes_max: u64,
    capacity_bytes: Option<u64>,
    requests_max: usize,
    queue_max: usize,
    keys: KeyRing,
    index: Index,
    /// Whether other hosts store there too.
    shared: bool,
    absent: Absent,
    requests: Requests,
    counters: Counters,
    stripes: Vec<Stripe>,
}

#[derive(Default)]
struct Stripe {
    lock: tokio::sync::Mutex<()>,
    /// Puts and removals that ended, changed under the lock, and blocks that were forgotten, changed without it.
    changes: AtomicU64,
}

impl RemoteStore {
    /// Opens the place and lists what is there.
    ///
    /// # Errors
    /// Settings that make no sense, or a place that does not answer.
    pub fn open(config: &RemoteConfig) -> Result<Self, OpenError> {
        config.validate()?;
        let (objects, prefix) = config.place.connect(config)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(config.requests_max)
            .thread_name("kvasir-remote")
            .enable_all()
            .build()
            .map_err(OpenError::Threads)?;
        let remote = Arc::new(Remote {
            objects,
            prefix,
            block_bytes_max: config.block_bytes_max.min(u32::MAX.into()),
            capacity_bytes: config.capacity_bytes,
            requests_max: config.requests_max,
            queue_max: config.queue_max,
            keys: KeyRing::new(&config.keys, config.allow_plain),
            index: Index::new(config.blocks_max, config.capacity_bytes.unwrap_or(u64::MAX)),
            shared: config.shared,
            absent: Absent::default(),
            requests: Requests::new(config),
            counters: Counters::default(),
            stripes: std::iter::repeat_with(Stripe::default).take(STRIPES).collect(),
        });
        let listing = Arc::clone(&remote);
        let (send, receive) = oneshot::channel();
        // Not `block_on`, which a caller inside another runtime could not use.
        runtime.spawn(async move { send.send(listing.list().await) });
        let listed = receive.recv().unwrap_or(Err(Failure::Closed));
        let report = listed.map_err(|failure| {
            let (place, (attempts, reason)) = (config.place.name(), explain(failure));
            OpenError::List { place, attempts, reason }
        })?;
        Ok(Self { remote, report, taken: watch::Sender::new(0), runtime: Some(runtime) })
    }

    /// What was there at open.
    pub fn report(&self) -> OpenReport {
        self.report
    }

    /// Attempts beyond the first, of all requests so far.
    pub fn retries(&self) -> u64 {
        self.remote.requests.retries()
    }

    /// Runs `work` on every item of a batch and answers in order; `busy` answers for all if too many wait already.
    fn batch<I, O, W, F>(&self, items: Vec<I>, busy: fn(I, TierError) -> O, work: W) -> Pending<Vec<O>>
    where
        I: Send + 'static,
        O: Send + 'static,
        W: Fn(Arc<Remote>, I, Cancelled) -> F + Send + Sync + 'static,
        F: Future<Output = O> + Send + 'static,
    {
        let (count, limit) = (items.len(), self.remote.queue_max);
        let Some(runtime) = self.runtime.as_ref().filter(|_| count > 0) else {
            return Pending::ready(Vec::new());
        };
        let taken = self.taken.send_if_modified(|taken| {
            let room = *taken + count <= limit;
            *taken += if room { count } else { 0 };
            room
        });
        if !taken {
            let busy = |item| busy(item, TierError::Busy { tier: NAME, limit });
            return Pending::ready(items.into_iter().map(busy).collect());
        }
        let (completion, pending) = Pending::new();
        let (remote, ended) = (Arc::clone(&self.remote), self.taken.clone());
        runtime.spawn(async move {
            let at_once = remote.requests_max;
            let each =
                items.into_iter().map(|item| work(Arc::clone(&remote), item, completion.cancelled.clone()));
            let done = stream::iter(each).buffered(at_once).collect().await;
            completion.done(done);
            ended.send_modify(|taken| *taken -= count);
        });
        pending
    }
}

impl BlockStore for RemoteStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: Tier::Remote,
            name: NAME,
            durable: true,
            block_bytes_max: self.remote.block_bytes_max,
            capacity_bytes: self.remote.capacity_bytes,
        }
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        let busy = |put: Put, error| PutDone { buffer: put.buffer, outcome: Err(error) };
        self.batch(batch, busy, |remote, put, cancelled| async move {
            let outcome = remote.put(&put, &cancelled).await;
            PutDone { buffer: put.buffer, outcome }
        })
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        let busy = |get: Get, error| GetDone { buffer: get.buffer, outcome: Err(error) };
        self.batch(batch, busy, |remote, mut get, cancelled| async move {
            let outcome = remote.get(&mut get, &cancelled).await;
            GetDone { buffer: get.buffer, outcome }
        })
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        self.remote.index.sizes(keys)
    }

    fn look_up(&self, keys: Vec<BlockKey>) -> Pending<Vec<Option<u32>>> {
        let (remote, now) = (&self.remote, Instant::now());
        if !remote.shared || !keys.iter().any(|&key| remote.absent.is_worth_asking(key, now)) {
            return Pending::ready(self.sizes(&keys));
        }
        let work = |remote: Arc<Remote>, key, cancelled: Cancelled| async move {
            remote.look_up(key, &cancelled).await
        };
        self.batch(keys, |_, _| None, work)
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        let work = |remote: Arc<Remote>, key, cancelled: Cancelled| async move {
            remote.remove(key, &cancelled).await
        };
        self.batch(keys, |_, error| Err(error), work)
    }

    fn forget(&self, keys: &[BlockKey]) {
        for &key in keys {
            // First, so that whoever just learns of the key takes that back: see `Remote::settle`.
            self.remote.stripe(key).changes.fetch_add(1, Ordering::Release);
            self.remote.index.forget(key);
        }
    }

    /// A put is done when the store has it, so there is nothing left to do.
    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    fn stats(&self) -> TierStats {
        let (blocks, block_bytes) = self.remote.index.totals();
        let used_bytes = block_bytes + blocks * FRAME_BYTES as u64;
        TierStats { blocks, block_bytes, used_bytes, ..self.remote.counters.totals() }
    }
}

impl Drop for RemoteStore {
    /// Lets requests under way end, for as long as one may take; what has not begun fails as closed.
    fn drop(&mut self) {
        self.remote.requests.close();
        let Some(runtime) = self.runtime.take() else { return };
        let (mut taken, (send, receive)) = (self.taken.subscribe(), oneshot::channel());
        runtime.spawn(async move { send.send(taken.wait_for(|&taken| taken == 0).await.is_ok()) });
        // Every attempt has a timeout, so this ends.
        let _ = receive.recv();
        runtime.shutdown_background();
    }
}

impl Remote {
    async fn put(&self, put: &Put, cancelled: &Cancelled) -> Result<Stored, TierError> {
        put.check(NAME, self.block_bytes_max)?;
        let (key, size) = (put.meta.key, put.meta.size);
        let stripe = self.stripe(key);
        let _alone = stripe.lock.lock().await;
        match self.index.take_room(key, size) {
            Room::Known => return Ok(Stored::AlreadyStored),
            Room::Full => return Err(TierError::Full { tier: NAME, key, size: size.into() }),
            Room::Taken => {}
        }
        let result = self.store(put, cancelled).await;
        self.index.settle(key, size, result.is_ok());
        stripe.changes.fetch_add(1, Ordering::Release);
        result.map(|()| Stored::Stored)
    }

    async fn store(&self, put: &Put, cancelled: &Cancelled) -> Result<(), TierError> {
        let meta = put.meta;
        let loaded = Loaded { meta, checksum: put.checksum };
        let seal = self.keys.of_tenant(meta.tenant);
        if seal.is_none() && !self.keys.takes_plain() {
            return Err(plain(meta.key, "put"));
        }
        let object = frame::encode(&loaded, put.bytes()?, seal);
        let object = Bytes::from(object.ok_or_else(|| no_seal(meta.key))?);
        let path = self.path(meta.key);
        let request = || self.objects.put(&path, object.clone().into());
        let result = self.requests.run(cancelled, request).await;
        result.map_err(|failure| self.failed(failure, "put", meta.key, meta.size))?;
        self.counters.written(meta.size);
        Ok(())
    }

    async fn get(&self, get: &mut Get, cancelled: &Cancelled) -> Result<Option<Loaded>, TierError> {
        let key = get.key;
        let seen = self.stripe(key).changes.load(Ordering::Acquire);
        let known = self.index.size(key);
        if let Some(size) = known {
            get.target(size)?;
        }
        let object = match self.fetch(key, cancelled).await {
            Ok(object) => object,
            Err(Failure::NotFound) => {
                self.counters.miss();
                self.settle(key, seen, |index| index.forget(key)).await;
                return Ok(None);
            }
            Err(failure) => return Err(self.failed(failure, "get", key, 0)),
        };
        let decoded =
            object.ok_or(Unusable::Damaged).and_then(|object| frame::decode(key, object, &self.keys));
        let (loaded, bytes) = match decoded {
            Ok(found) => found,
            Err(Unusable::UnknownKey(id)) => return Err(unknown_key(key, id)),
            Err(Unusable::Plain) => return Err(plain(key, "open")),
            Err(Unusable::Damaged) => {
                self.counters.corrupt();
                if self.shared {
                    self.absent.note(key, Instant::now());
                    self.settle(key, seen, |index| index.forget(key)).await;
                } else {
                    self.drop_damaged(key, seen).await;
                }
                return Ok(None);
            }
        };
        get.target(loaded.meta.size)?.copy_from_slice(&bytes);
        self.counters.hit(loaded.meta.size);
        if known.is_none() {
            self.settle(key, seen, |index| index.learn(key, loaded.meta.size)).await;
        }
        Ok(Some(loaded))
    }

    /// The size of a block that this host may not know of.
    async fn look_up(&self, key: BlockKey, cancelled: &Cancelled) -> Option<u32> {
        let known = self.index.size(key);
        if known.is_some() || !self.absent.is_worth_asking(key, Instant::now()) {
            return known;
        }
        let (path, seen) = (self.path(key), self.stripe(key).changes.load(Ordering::Acquire));
        match self.requests.run(cancelled, || self.objects.head(&path)).await {
            Ok(object) => {
                let (_, size) = block_of(&object).filter(|(found, _)| *found == key)?;
                self.settle(key, seen, |index| index.learn(key, size)).await;
                Some(size)
            }
            Err(Failure::NotFound) => {
                self.absent.note(key, Instant::now());
                None
            }
            // This caller has waited in vain; the next ones need not.
            Err(_) => {
                self.absent.pause(Instant::now());
                None
            }
        }
    }

    /// The object. Returns `None` if it is longer than any block of ours.
    async fn fetch(&self, key: BlockKey, cancelled: &Cancelled) -> Result<Option<Bytes>, Failure> {
        let path = self.path(key);
        let request = || async {
            let found = self.objects.get(&path).await?;
            if found.meta.size > self.block_bytes_max + FRAME_BYTES as u64 {
                return Ok(None);
            }
            found.bytes().await.map(Some)
        };
        self.requests.run(cancelled, request).await
    }

    async fn remove(&self, key: BlockKey, cancelled: &Cancelled) -> Result<bool, TierError> {
        let (stripe, path) = (self.stripe(key), self.path(key));
        let _alone = stripe.lock.lock().await;
        // Stores do not tell whether there was an object to delete.
        if self.index.size(key).is_none() {
            match self.requests.run(cancelled, || self.objects.head(&path)).await {
                Ok(_) => {}
                Err(Failure::NotFound) => return Ok(false),
                Err(failure) => return Err(self.failed(failure, "remove", key, 0)),
            }
        }
        match self.requests.run(cancelled, || self.objects.delete(&path)).await {
            Ok(()) | Err(Failure::NotFound) => {}
            Err(failure) => return Err(self.failed(failure, "remove", key, 0)),
        }
        self.index.forget(key);
        stripe.changes.fetch_add(1, Ordering::Release);
        Ok(true)
    }

    /// Corrects what is known of a key, unless a put or removal came between, or the key was forgotten.
    async fn settle(&self, key: BlockKey, seen: u64, correct: impl FnOnce(&Index) -> bool) {
        let stripe = self.stripe(key);
        let _alone = stripe.lock.lock().await;
        if stripe.changes.load(Ordering::Acquire) == seen {
            correct(&self.index);
            // A caller that forgets the key takes no lock.
            if stripe.changes.load(Ordering::Acquire) != seen {
                self.index.forget(key);
            }
        }
    }

    async fn drop_damaged(&self, key: BlockKey, seen: u64) {
        let (stripe, path) = (self.stripe(key), self.path(key));
        let _alone = stripe.lock.lock().await;
        if stripe.changes.load(Ordering::Acquire) != seen {
            return;
        }
        // If this fails, the next get finds the same damage.
        let _ = self.requests.run(&Cancelled::default(), || self.objects.delete(&path)).await;
        self.index.forget(key);
        stripe.changes.fetch_add(1, Ordering::Release);
    }

    async fn list(&self) -> Result<OpenReport, Failure> {
        // An attempt that broke off is made again from the start; what it learned stays true.
        let (beyond, foreign) = (AtomicU64::new(0), AtomicU64::new(0));
        let request = || async {
            beyond.store(0, Ordering::Relaxed);
            foreign.store(0, Ordering::Relaxed);
            let objects = self.objects.list(Some(&self.prefix));
            objects
                .try_for_each(|object| {
                    match block_of(&object) {
                        Some((key, size)) if self.index.learn(key, size) => {}
                        Some(_) => drop(beyond.fetch_add(1, Ordering::Relaxed)),
                        None => drop(foreign.fetch_add(1, Ordering::Relaxed)),
                    }
                    std::future::ready(Ok(()))
                })
                .await
        };
        self.requests.run(&Cancelled::default(), request).await?;
        let (blocks, block_bytes) = self.index.totals();
        let (beyond_bounds, foreign) = (beyond.into_inner(), foreign.into_inner());
        Ok(OpenReport { blocks, block_bytes, beyond_bounds, foreign })
    }

    fn stripe(&self, key: BlockKey) -> &Stripe {
        &self.stripes[key.identity() as usize % STRIPES]
    }

    /// Spread over 256 folders, because one large directory is slow.
    fn path(&self, key: BlockKey) -> Path {
        self.prefix.clone().join(format!("{:02x}", key.0 >> 120)).join(key.to_string())
    }

    fn failed(&self, failure: Failure, step: &'static str, key: BlockKey, size: u32) -> TierError {
        let (tier, retryable) = (NAME, matches!(failure, Failure::Failed { retryable: true, .. }));
        match failure {
            Failure::Cancelled => TierError::Cancelled,
            Failure::Closed => TierError::Closed { tier },
            Failure::NoSpace if step == "put" => TierError::Full { tier, key, size: size.into() },
            failure => {
                self.counters.io_error();
                let (attempts, reason) = explain(failure);
                let reason = format!("gave up after {attempts} attempts: {reason}");
                TierError::Io { tier, step, key, reason, retryable }
            }
        }
    }
}

/// The block that an object's name and length describe.
fn block_of(object: &ObjectMeta) -> Option<(BlockKey, u32)> {
    let name = object.location.filename().filter(|name| name.len() == 32)?;
    let key = u128::from_str_radix(name, 16).ok().map(BlockKey).filter(|key| key.to_string() == name)?;
    let size = object.size.checked_sub(FRAME_BYTES as u64).filter(|&size| size > 0)?;
    Some((key, u32::try_from(size).ok()?))
}

fn explain(failure: Failure) -> (u32, String) {
    match failure {
        Failure::Failed { attempts, reason, .. } => (attempts, reason),
        Failure::NotFound => (1, "it does not exist".into()),
        Failure::NoSpace => (1, "no space left".into()),
        Failure::Cancelled | Failure::Closed => (0, "the tier was closed".into()),
    }
}

fn unknown_key(key: BlockKey, id: seal::KeyId) -> TierError {
    let reason = format!("it is sealed with key {:016x}, which is not among remote.keys; add that key", id.0);
    TierError::Io { tier: NAME, step: "open", key, reason, retryable: false }
}

fn plain(key: BlockKey, step: &'static str) -> TierError {
    let reason = "it is not sealed, and remote.keys are set; give its tenant a key, or set remote.allow_plain if nobody \
                  else can write there"
        .into();
    TierError::Io { tier: NAME, step, key, reason, retryable: false }
}

fn no_seal(key: BlockKey) -> TierError {
    let reason = "the system gave no random bytes".into();
    TierError::Io { tier: NAME, step: "seal", key, reason, retryable: true }
}
