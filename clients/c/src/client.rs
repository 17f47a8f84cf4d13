//! Connections, and the names of blocks.

use std::ffi::c_char;

use kvasir_client::data::{BlockKey, Client, Endpoint, Namespace};

use crate::failure::{Failure, Status, call};
use crate::handles::Handles;
use crate::options::{self, Options};
use crate::raw;

/// A connection to a host. Calls take turns; use one client per thread for more.
pub struct ClientHandle {
    _opaque: (),
}

/// Names one block.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Key {
    pub low: u64,
    pub high: u64,
}

impl From<BlockKey> for Key {
    fn from(key: BlockKey) -> Self {
        Self { low: key.0 as u64, high: (key.0 >> 64) as u64 }
    }
}

impl From<&Key> for BlockKey {
    fn from(key: &Key) -> Self {
        Self(u128::from(key.high) << 64 | u128::from(key.low))
    }
}

static CLIENTS: Handles<Client> = Handles::new("client");

pub(crate) fn client(handle: *const ClientHandle) -> Result<std::sync::Arc<Client>, Failure> {
    CLIENTS.get(handle)
}

/// # Safety
/// Null or a text that ends with a zero.
pub(crate) unsafe fn endpoint(text: *const c_char) -> Result<Endpoint, Failure> {
    // SAFETY: the caller's word, as above.
    let text = unsafe { raw::text("the endpoint", text) }?;
    Ok(text
        .ok_or_else(|| Failure::invalid("the endpoint is null; write unix:/path or host:port"))?
        .parse()?)
}

/// The version of this library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_v1_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Connects to the host at `endpoint`, "unix:/path" or "host:port", and writes the new client to `client`. `options` may be
/// null.
///
/// # Safety
/// Each pointer is null or what its type says; texts end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_connect(
    endpoint: *const c_char,
    options: *const Options,
    client: *mut *mut ClientHandle,
) -> Status {
    call(|| {
        raw::check("where the client goes", client, 1)?;
        // SAFETY: the caller's word, as above.
        let (endpoint, options) = unsafe { (self::endpoint(endpoint)?, options::options(options)?) };
        let handle = CLIENTS.add(Client::connect(&endpoint, options)?);
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the client goes", client, std::ptr::without_provenance_mut(handle)) }
    })
}

/// Ends a connection. What the host holds for it ends too.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_v1_close(client: *mut ClientHandle) -> Status {
    call(|| CLIENTS.remove(client).map(drop))
}

/// Writes a random number of the host's run to `boot`. With another one, what a caller remembers of the host's blocks is
/// void.
///
/// # Safety
/// `boot` is null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_boot(client: *const ClientHandle, boot: *mut u64) -> Status {
    // SAFETY: the caller's word, as above.
    call(|| unsafe { raw::set("where the number goes", boot, self::client(client)?.boot()) })
}

/// Writes the key of the block that an engine names by `hash_len` bytes of hash to `key`. `name_space` has 32 bytes, a digest of
/// what the hash does not cover: model, dtype, layout, who holds which part of it.
///
/// # Safety
/// Each pointer is null or what its type and length say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_key_of(
    name_space: *const u8,
    hash: *const u8,
    hash_len: usize,
    key: *mut Key,
) -> Status {
    call(|| {
        // SAFETY: the caller's word, as above.
        let (name_space, hash) =
            unsafe { (self::name_space(name_space)?, raw::list("the hash", hash, hash_len)?) };
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the key goes", key, name_space.key(hash).into()) }
    })
}

/// # Safety
/// Null or 32 bytes.
pub(crate) unsafe fn name_space(digest: *const u8) -> Result<Namespace, Failure> {
    // SAFETY: the caller's word, as above.
    let digest = unsafe { raw::list("the namespace", digest, 32) }?;
    Ok(Namespace::new(std::array::from_fn(|at| digest[at])))
}
