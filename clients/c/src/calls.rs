//! Blocks in and out of a host, one call at a time.

use std::time::Duration;

use kvasir_client::data::{BlockKey, BlockMeta, ClientError, Put};

use crate::client::{ClientHandle, Key, client};
use crate::failure::{Failure, Status, call};
use crate::raw;

/// What became of a block that was put.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// It was stored.
    Stored = 0,
    /// It was there.
    AlreadyStored = 1,
    /// Another writer is storing it.
    InProgress = 2,
}

/// A question about keys with a yes or no for each.
///
/// # Safety
/// Each pointer is null or `count` long.
unsafe fn ask(
    keys: *const Key,
    count: usize,
    answers: *mut u8,
    ask: impl FnOnce(&[BlockKey]) -> Result<Vec<bool>, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's word, as above.
    let (keys, room) =
        unsafe { (raw::list("the keys", keys, count)?, raw::room("the answers", answers, count)?) };
    let keys: Vec<BlockKey> = keys.iter().map(BlockKey::from).collect();
    for (to, answer) in room.iter_mut().zip(ask(&keys)?) {
        *to = answer.into();
    }
    Ok(())
}

/// Writes 1 to `found` for each block that is there, and 0 for each other.
///
/// # Safety
/// Each pointer is null or what its type and `count` say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_exists(
    client: *const ClientHandle,
    keys: *const Key,
    count: usize,
    found: *mut u8,
) -> Status {
    // SAFETY: the caller's word, as above.
    call(|| unsafe { ask(keys, count, found, |keys| Ok(self::client(client)?.exists(keys)?)) })
}

/// Removes blocks. Writes 1 to `removed` for each that was there.
///
/// # Safety
/// Each pointer is null or what its type and `count` say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_remove(
    client: *const ClientHandle,
    keys: *const Key,
    count: usize,
    removed: *mut u8,
) -> Status {
    // SAFETY: the caller's word, as above.
    call(|| unsafe { ask(keys, count, removed, |keys| Ok(self::client(client)?.remove(keys)?)) })
}

/// Keeps blocks from being evicted until `kvasir_v1_release` was called for them as often, for `ms` at most, and no longer than
/// this client is open. Writes 1 to `held` for each that is there. The host refuses where its limit is reached; then some of
/// the blocks may be held.
///
/// # Safety
/// Each pointer is null or what its type and `count` say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_hold(
    client: *const ClientHandle,
    keys: *const Key,
    count: usize,
    ms: u32,
    held: *mut u8,
) -> Status {
    let hold = |keys: &[BlockKey]| {
        let held = self::client(client)?.hold(keys, Duration::from_millis(ms.into()))?;
        Ok(held.into_iter().collect::<Result<Vec<bool>, ClientError>>()?)
    };
    // SAFETY: the caller's word, as above.
    call(|| unsafe { ask(keys, count, held, hold) })
}

/// Takes back one `kvasir_v1_hold` of each block. Writes 1 to `released` for each that was held: it may have ended by its time.
///
/// # Safety
/// Each pointer is null or what its type and `count` say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_release(
    client: *const ClientHandle,
    keys: *const Key,
    count: usize,
    released: *mut u8,
) -> Status {
    // SAFETY: the caller's word, as above.
    call(|| unsafe { ask(keys, count, released, |keys| Ok(self::client(client)?.end_hold(keys)?)) })
}

/// Stores `len` bytes under `key`. `outcome` may be null.
///
/// # Safety
/// Each pointer is null or what its type and length say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_put(
    client: *const ClientHandle,
    key: *const Key,
    bytes: *const u8,
    len: usize,
    outcome: *mut PutOutcome,
) -> Status {
    call(|| {
        // SAFETY: the caller's word, as above.
        let (key, bytes) =
            unsafe { (&raw::list("the key", key, 1)?[0], raw::list("the block", bytes, len)?) };
        raw::check("where the outcome goes", outcome, 0)?;
        let size = u32::try_from(len).ok().filter(|&size| size > 0);
        let size =
            size.ok_or_else(|| Failure::invalid(format!("a block of {len} B; it has 1 B to 4 GiB")))?;
        let put = self::client(client)?.put(&BlockMeta::single(key.into(), size), bytes)?;
        if outcome.is_null() {
            return Ok(());
        }
        let put = match put {
            Put::Stored => PutOutcome::Stored,
            Put::AlreadyStored => PutOutcome::AlreadyStored,
            Put::InProgress => PutOutcome::InProgress,
        };
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the outcome goes", outcome, put) }
    })
}

/// Copies the block of `key` to the front of `buffer`, which has `len` bytes, and writes its size to `size`: 0 if there is no
/// such block. With `KVASIR_V1_STATUS_BUFFER` it does not fit, and `size` says how large it is. After any other error the buffer
/// is undefined.
///
/// # Safety
/// Each pointer is null or what its type and length say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_get(
    client: *const ClientHandle,
    key: *const Key,
    buffer: *mut u8,
    len: usize,
    size: *mut u32,
) -> Status {
    call(|| {
        // SAFETY: the caller's word, as above.
        let (key, buffer) =
            unsafe { (&raw::list("the key", key, 1)?[0], raw::room("the buffer", buffer, len)?) };
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the size goes", size, 0) }?;
        let client = self::client(client)?;
        let Some(block) = client.get(&[key.into()], 0)?.pop().flatten() else { return Ok(()) };
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the size goes", size, block.size()) }?;
        block.copy_to(buffer)?;
        Ok(client.release([block])?)
    })
}
