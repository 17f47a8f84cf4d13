//! What every [`BlockStore`] must do, as a suite that each tier's tests run.
//!
//! [`check`] wants a fresh tier each time; [`check_durable`] also closes one and opens it again. [`model`] compares
//! random sequences of operations with a map. Give the tier room for 16 to 128 MiB of blocks.

mod calls;
mod contention;
pub mod model;
mod space;

use std::sync::Arc;

use super::store::{BlockStore, Get, GetDone, Loaded, Put, PutDone, Stored, TierError};
use kvasir_memory::buffer::{Buffer, Source};
use kvasir_protocol::block::{BlockKey, BlockMeta, checksum};

/// Checks a tier against the whole contract. `fresh` opens an empty one.
///
/// # Panics
/// If the tier breaks the contract.
pub fn check(fresh: impl Fn() -> Arc<dyn BlockStore>) {
    calls::empty_batches_are_fine(&*fresh());
    calls::blocks_of_all_sizes_come_back(&*fresh());
    calls::bad_items_are_refused_and_leave_the_rest_alone(&*fresh());
    calls::a_block_is_stored_once(&*fresh());
    calls::the_largest_batch_is_taken(&*fresh());
    calls::counts_add_up(&*fresh());
    contention::operations_end_although_nobody_waits(&*fresh());
    contention::cancelled_items_are_as_if_never_asked(&*fresh());
    contention::threads_see_whole_blocks(&*fresh());
    space::a_full_tier_refuses_or_evicts(&*fresh());
    model::check(&fresh, model::Faults::None);
}

/// [`check`], and that flushed blocks outlive the tier. `place` makes a new place, `open` opens the tier there.
///
/// # Panics
/// If the tier breaks the contract.
pub fn check_durable<P>(place: impl Fn() -> P, open: impl Fn(&P) -> Arc<dyn BlockStore>) {
    // The place must outlive its tier, so it is kept until the next one.
    let kept = std::cell::RefCell::new(Vec::new());
    check(|| {
        let place = place();
        let store = open(&place);
        assert!(store.capabilities().durable, "the durable suite is for durable tiers");
        kept.borrow_mut().push(place);
        store
    });
    drop(kept);
    space::flushed_blocks_outlive_the_tier(&place(), &open);
    model::check_durable(place, open);
}

/// A block as it was loaded, and its bytes.
pub type Found = (Loaded, Vec<u8>);

/// The key of block `n`.
pub fn key(n: u64) -> BlockKey {
    BlockKey::from_engine_hash("conformance", &n.to_le_bytes())
}

/// The bytes of block `n` at `size`.
pub fn bytes_of(n: u64, size: u32) -> Vec<u8> {
    let word = |i: u64| (i ^ n << 32 ^ u64::from(size) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = (0..u64::from(size).div_ceil(8)).flat_map(|i| (word(i) ^ word(i) >> 29).to_le_bytes());
    words.take(size as usize).collect()
}

/// Block `n` at `size`, ready to be put.
pub fn block(n: u64, size: u32) -> Put {
    let bytes = bytes_of(n, size);
    let parent = (!n.is_multiple_of(3)).then(|| key(n - 1));
    let meta = BlockMeta { parent, depth: n as u32 % 3, class: n as u16, ..BlockMeta::single(key(n), size) };
    Put { meta, checksum: checksum(&bytes), buffer: Buffer::copy_of(&bytes).into() }
}

/// Puts a batch, and checks that each buffer came back as it was.
pub fn put_all(store: &dyn BlockStore, batch: Vec<Put>) -> Vec<Result<Stored, TierError>> {
    let identity =
        |buffer: &Source| (buffer.shared().as_ptr() as usize, buffer.len(), buffer.shared().checksum());
    let before: Vec<_> = batch.iter().map(|put| identity(&put.buffer)).collect();
    let done = store.put(batch).wait();
    let after: Vec<_> = done.iter().map(|done| identity(&done.buffer)).collect();
    assert_eq!(before, after, "each buffer comes back, in order and unchanged");
    done.into_iter().map(|PutDone { outcome, .. }| outcome).collect()
}

pub fn put(store: &dyn BlockStore, n: u64, size: u32) -> Result<Stored, TierError> {
    put_all(store, vec![block(n, size)]).remove(0)
}

/// Gets blocks into buffers of `len` bytes: what came, with the block's bytes.
pub fn get_all(store: &dyn BlockStore, keys: &[u64], len: usize) -> Vec<Result<Option<Found>, TierError>> {
    let batch: Vec<Get> = keys.iter().map(|&n| Get { key: key(n), buffer: Buffer::zeroed(len) }).collect();
    let before: Vec<_> = batch.iter().map(|get| get.buffer.bytes().as_ptr() as usize).collect();
    let done = store.get(batch).wait();
    let after: Vec<_> = done.iter().map(|done| done.buffer.bytes().as_ptr() as usize).collect();
    assert_eq!(before, after, "each buffer comes back, in order");
    let take = |GetDone { buffer, outcome }| {
        let with_bytes = |loaded: Loaded| (loaded, buffer.bytes()[..loaded.meta.size as usize].to_vec());
        outcome.map(|loaded: Option<Loaded>| loaded.map(with_bytes))
    };
    done.into_iter().map(take).collect()
}

/// Gets block `n`: whether it is there. Panics if what came is not what `block(n, size)` was.
pub fn holds(store: &dyn BlockStore, n: u64, size: u32) -> bool {
    match get_all(store, &[n], size as usize).remove(0) {
        Ok(None) => false,
        Ok(Some(found)) => {
            is_block(n, size, &found);
            true
        }
        Err(error) => panic!("get of block {n}: {error}"),
    }
}

pub fn remove(store: &dyn BlockStore, n: u64) -> Result<bool, TierError> {
    store.remove(vec![key(n)]).wait().remove(0)
}

/// Panics if `found` is not `block(n, size)`.
fn is_block(n: u64, size: u32, (loaded, bytes): &Found) {
    let expected = block(n, size);
    // A tier may have forgotten the parent.
    let parent = loaded.meta.parent.and(expected.meta.parent);
    assert_eq!(loaded.meta, BlockMeta { parent, ..expected.meta });
    assert_eq!(loaded.checksum, expected.checksum, "checksum of block {n}");
    assert!(expected.buffer.shared() == *bytes, "bytes of block {n} of {size} B");
}
