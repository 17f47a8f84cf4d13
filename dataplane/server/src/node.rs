//! Every operation on blocks that a host offers, for all callers.
//!
//! Which tiers are woken and whether other hosts are asked is decided here. The doors (connections of the data protocol, and
//! the host's gRPC services) decide who may call, put the caller's tenant into the keys, and convert; so both give the same
//! answer to the same question. Batches hold at most [`BATCH_MAX`](kvasir_protocol::block::BATCH_MAX) items; a larger one
//! is refused whole, which is what the calls fail with unless they say more.

use std::io;
use std::sync::Arc;

use kvasir_cluster::Cluster;
use kvasir_cluster::handover::{Arrival, HandOverError, HandingOver};
use kvasir_cluster::primary::Primary;
use kvasir_cluster::push::{PushError, Pushed};
use kvasir_memory::shared::Place;
use kvasir_os::planted::{self, Bug};
use kvasir_os::random;
use kvasir_os::time::Instant;
use kvasir_protocol::block::{BlockKey, BlockMeta, Pin};
use kvasir_protocol::clock::Clock;
use kvasir_protocol::wire::Outcome;
use kvasir_store::departures;
use kvasir_store::dram::{BlockStat, DramStore, Evict, Lookup, OwnerId, Pinning, Remove, Reserve, Verify};
use kvasir_store::error::StoreError;
use kvasir_store::tiering::{Onboarded, Read, Residency, Tiering};
use parking_lot::Mutex;

/// One outcome per item of a batch.
type Each<T> = Result<Vec<T>, StoreError>;
/// Some of the blocks in the pool, and where the next page begins unless it is the last.
type Page = (Vec<(BlockStat, Residency)>, Option<u32>);

/// The blocks of one host: its pool, the tiers below, and the hosts it knows.
pub struct Node {
    tiering: Arc<Tiering>,
    cluster: Option<Arc<Cluster>>,
    clock: Clock,
    /// Held by the one caller that compares blocks with their checksums. A request of a few bytes may ask for the whole pool
    /// to be read, and a client with many connections could take all processors.
    verifying: Mutex<()>,
    boot: u64,
}

impl Node {
    /// `cluster` is `None` if this host knows no others.
    pub fn new(tiering: Arc<Tiering>, cluster: Option<Arc<Cluster>>, clock: Clock) -> Self {
        Self { tiering, cluster, clock, verifying: Mutex::default(), boot: random::number() }
    }

    /// A pool, with no tier below and no other hosts.
    pub fn dram_only(store: Arc<DramStore>, clock: Clock) -> Arc<Self> {
        Arc::new(Self::new(Arc::new(Tiering::dram_only(store, clock)), None, clock))
    }

    pub fn store(&self) -> &Arc<DramStore> {
        self.tiering.dram()
    }

    pub fn tiering(&self) -> &Arc<Tiering> {
        &self.tiering
    }

    /// Returns `None` if this host knows no others.
    pub fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.cluster.as_ref()
    }

    /// A number of this run of the host, which differs from run to run and is no secret.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// The time by which leases, pins and ages are counted.
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Collects expired leases and abandoned reservations.
    pub fn sweep(&self) {
        self.store().sweep(self.now_ms());
    }

    /// A connection that may hold reservations and leases. `in_place`: its client reads and writes the pool itself.
    pub fn enter(&self, in_place: bool) -> OwnerId {
        if in_place { self.store().new_client() } else { self.store().new_sender() }
    }

    /// Takes back what a caller holds. With `is_gone` its leases end at once. Otherwise they end in their time, because it may still be
    /// reading in place.
    pub fn leave(&self, owner: OwnerId, is_gone: bool) {
        if planted::is(Bug::KeepsPlacesOfTheGone) {
            return;
        }
        if is_gone {
            self.store().release_owner(owner, self.now_ms());
        } else {
            self.store().abandon_owner(owner, self.now_ms());
        }
    }

    /// Which blocks any tier or other host holds.
    pub fn exists(&self, keys: &[BlockKey]) -> Each<bool> {
        self.tiering.exists(keys)
    }

    /// Leases on blocks, wherever they are; gives the leases in `release` back first.
    pub fn get(&self, owner: OwnerId, release: &[u64], keys: &[BlockKey], class: u16) -> Each<Lookup> {
        // A lease that expired on its way back does no harm.
        self.store().release(owner, release)?;
        self.tiering.get(owner, keys, class, self.now_ms())
    }

    /// Blocks to be sent away, at most `bytes_max` in total. Hand those that were brought up to [`sent`](Self::sent).
    pub fn read(&self, keys: &[BlockKey], class: u16, bytes_max: u64) -> Vec<Read> {
        self.tiering.read(keys, class, self.now_ms(), bytes_max)
    }

    /// Called when a block was brought up and sent. Keeps it in the pool if that is worth it.
    pub fn sent(&self, block: &Onboarded) {
        self.tiering.promote_on_evidence(block, self.now_ms());
    }

    pub fn release(&self, owner: OwnerId, leases: &[u64]) -> Each<Result<(), StoreError>> {
        self.store().release(owner, leases)
    }

    /// Places for blocks that `owner` will fill and commit.
    pub fn reserve(&self, owner: OwnerId, blocks: &[BlockMeta]) -> Each<Reserve> {
        self.tiering.reserve(owner, blocks, self.now_ms())
    }

    /// Has `fill` write into a reserved place.
    ///
    /// # Errors
    /// The reservation is not one of `owner`'s, or has been reclaimed: `fill` was not called. What `fill` says is inside.
    pub fn receive(
        &self,
        owner: OwnerId,
        reservation: u64,
        fill: impl FnOnce(&mut Place<'_>) -> io::Result<()>,
    ) -> Result<io::Result<()>, StoreError> {
        self.store().receive(owner, reservation, fill)
    }

    /// Makes filled reservations visible, each with the checksum its writer names.
    pub fn commit(&self, owner: OwnerId, items: &[(u64, Option<u64>)]) -> Each<Result<u32, StoreError>> {
        self.store().commit(owner, items, self.now_ms())
    }

    pub fn abort(&self, owner: OwnerId, reservations: &[u64]) -> Each<Result<(), StoreError>> {
        self.store().abort(owner, reservations)
    }

    /// Removes blocks from every tier, and on every host.
    pub fn remove(&self, keys: &[BlockKey]) -> Each<Remove> {
        self.tiering.remove(keys, self.now_ms())
    }

    /// Compares blocks in the pool with their checksums.
    pub fn verify(&self, keys: &[BlockKey]) -> Each<Verify> {
        let _one = self.verifying.lock();
        self.store().verify(keys, self.now_ms())
    }

    /// Pins blocks in the pool, on the account of `tenant`.
    pub fn pin(&self, tenant: u16, keys: &[BlockKey], pin: Pin) -> Each<Pinning> {
        self.store().pin(tenant, keys, pin, self.now_ms())
    }

    /// Per block: whether it was pinned.
    pub fn unpin(&self, tenant: u16, keys: &[BlockKey]) -> Each<bool> {
        self.store().unpin(tenant, keys, self.now_ms())
    }

    /// Keeps blocks in the pool until `caller` leaves, for `lasts_ms` at most, on the account of `tenant`.
    pub fn hold(&self, tenant: u16, caller: OwnerId, keys: &[BlockKey], lasts_ms: u64) -> Each<Pinning> {
        self.store().hold_keys(tenant, caller, keys, lasts_ms, self.now_ms())
    }

    /// Takes back one hold on each block. Per block: whether there was one.
    pub fn end_hold(&self, tenant: u16, caller: OwnerId, keys: &[BlockKey]) -> Each<bool> {
        self.store().end_hold(tenant, caller, keys, self.now_ms())
    }

    /// Drops blocks from the pool; they stay wherever else they are.
    pub fn evict(&self, keys: &[BlockKey]) -> Each<Evict> {
        self.store().evict_keys(keys, self.now_ms())
    }

    /// What is known of each block in the pool, and which tiers hold it. Not a use of it.
    pub fn stat(&self, keys: &[BlockKey]) -> Each<(Option<BlockStat>, Residency)> {
        Ok(self.store().stat(keys)?.into_iter().zip(self.tiering.residency(keys)?).collect())
    }

    /// Names of the peers known to hold a block, beginning with the one that would be read first. No peer is asked.
    pub fn holders(&self, key: BlockKey) -> Vec<String> {
        self.cluster.as_ref().map_or_else(Vec::new, |cluster| cluster.holders(key))
    }

    /// Blocks in the pool, as [`stat`](Self::stat) knows them, a page at a time from `from` on.
    ///
    /// # Errors
    /// `max` is more than a batch holds.
    pub fn list(&self, from: u32, max: usize) -> Result<Page, StoreError> {
        let (blocks, next) = self.store().list(from, max);
        let keys: Vec<BlockKey> = blocks.iter().map(|block| block.key).collect();
        let places = self.tiering.residency(&keys)?;
        Ok((blocks.into_iter().zip(places).collect(), next))
    }

    /// Blocks of `tenant` that have left this host since, a page of at most `max` notes at a time.
    ///
    /// # Errors
    /// The store's own fault.
    pub fn departed(&self, tenant: u16, since: u64, max: usize) -> Result<departures::Page, StoreError> {
        self.tiering.departed(tenant, since, max)
    }

    /// Has blocks held by `copies` hosts in total.
    pub fn replicate(&self, keys: &[BlockKey], copies: u8) -> Vec<Outcome> {
        match &self.cluster {
            Some(cluster) => cluster.replicate(keys, copies),
            None if copies <= 1 => vec![Outcome::Done; keys.len()],
            None => vec![Outcome::TooFewHosts; keys.len()],
        }
    }

    /// Which host should take a put. Returns `None` if this one knows no others.
    pub fn primary(&self, bytes: u64, copies: u8) -> Option<Primary> {
        self.cluster.as_ref().map(|cluster| cluster.primary(bytes, copies))
    }

    /// Writes blocks into a peer's pool; takes as long as the transfer. Returns `None` if this host knows no others.
    ///
    /// # Errors
    /// The peer is not known or does not take them.
    pub fn push(&self, peer: &str, keys: &[BlockKey]) -> Option<Result<Vec<Pushed>, PushError>> {
        self.cluster.as_ref().map(|cluster| cluster.push(peer, keys))
    }

    /// Begins to hand blocks over to a peer, layer by layer.
    ///
    /// # Errors
    /// Nothing has begun.
    pub fn hand_over(
        &self,
        owner: OwnerId,
        request: u64,
        peer: &str,
        blocks: &[BlockMeta],
        layers: u32,
    ) -> Result<HandingOver, HandOverError> {
        let cluster = self.cluster.as_ref().ok_or(HandOverError::Alone)?;
        cluster.hand_over(owner, request, peer, blocks, layers)
    }

    /// Waits for the blocks of a tenant's request to begin to arrive. Returns `None` if this host knows no others.
    ///
    /// # Errors
    /// The hand-over broke off, with the reason.
    pub fn arrival(
        &self,
        tenant: u16,
        request: u64,
        until: Instant,
    ) -> Option<Result<Option<Arrival>, String>> {
        self.cluster.as_ref().map(|cluster| cluster.arrival(tenant, request, until))
    }
}
