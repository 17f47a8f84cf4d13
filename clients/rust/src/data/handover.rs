//! A request's blocks from a prefill instance to a decode instance, layer by layer, while they are produced.
//!
//! Prefill side, on its host's socket:
//!
//! ```no_run
//! # use kvasir_client::data::*; use kvasir_protocol::block::BlockMeta;
//! # fn prefill(client: &Client, metas: &[BlockMeta], layers: u32, kv: impl Fn(usize, u32) -> Vec<u8>) -> Result<(), ClientError> {
//! let mut handing = client.hand_over(4711, "decode-3", metas, layers)?;
//! for layer in 0..layers {
//!     for block in 0..metas.len() {
//!         handing.fill(block, layer, &kv(block, layer))?;
//!     }
//!     handing.layer_done(layer)?; // on its way; the next one can be computed
//! }
//! let checksums = handing.checksums();
//! handing.finish(&checksums)?; // compared, and kept on both hosts
//! # Ok(()) }
//! ```
//!
//! Decode side, on the socket of `decode-3`:
//!
//! ```no_run
//! # use kvasir_client::data::*; use std::time::Duration;
//! # fn decode(client: &Client, layers: u32, compute: impl Fn(u32, Shared<'_>)) -> Result<(), ClientError> {
//! let second = Duration::from_secs(1);
//! let arrivals = client.arrivals(4711, second)?;
//! for layer in 0..arrivals.layers() {
//!     arrivals.wait_layer(layer, second)?;
//!     for block in 0..arrivals.blocks().len() {
//!         compute(layer, arrivals.layer(block, layer)?);
//!     }
//! }
//! arrivals.finished(second)?; // only now is it sure that all of it was right
//! # Ok(()) }
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_memory::checksum::Checksum;
use kvasir_memory::shared::Shared;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::wire::{ArrivingBlock, HandOverCall, HandedPlace, Op, Outcome, Reply, Request};

use super::{Block, Client, ClientError, Local, wrong};

/// The longest that one call to the host waits; longer waits are several.
const STEP: Duration = Duration::from_millis(500);

impl Client {
    /// Begins to hand blocks over to `peer`, by the name that this client's host has for it. Each block is `layers` equal pieces, one
    /// after the other. The host reserves places in its pool and in the peer's; `request` is what [`arrivals`] is asked
    /// for there. A block that the host has already is handed over from where it is.
    ///
    /// [`arrivals`]: Self::arrivals
    ///
    /// # Errors
    /// The connection is not a Unix socket; the peer is unknown, down or has no room; a block has no place here, or is
    /// not a multiple of `layers`; too many blocks, layers or hand-overs at once. Nothing has begun then.
    pub fn hand_over(
        &self,
        request: u64,
        peer: &str,
        blocks: &[BlockMeta],
        layers: u32,
    ) -> Result<HandOver<'_>, ClientError> {
        self.check_batch(blocks.len())?;
        let local = self.local()?;
        let begun = Instant::now();
        let peer = peer.to_owned();
        let call = HandOverCall::Begin { request, layers, peer, blocks: blocks.to_vec() };
        match self.call(&Request::HandOver(call))? {
            Reply::HandOver { time_ms, places } if places.len() == blocks.len() => {
                let until = begun + Duration::from_millis(time_ms);
                let blocks = blocks.iter().copied().zip(places).collect();
                Ok(HandOver { client: self, local, request, layers, until, blocks, is_over: false })
            }
            other => Err(wrong(&self.endpoint, Op::HandOver, other)),
        }
    }

    /// The blocks that are being handed over to this client's host under `request`, as soon as that has begun. They can
    /// be read layer by layer.
    ///
    /// A wait takes the connection's turn for up to half a second at once: use a client of its own.
    ///
    /// # Errors
    /// [`ClientError::NotArrived`] when it has not begun in time; the connection is no Unix socket; it broke off.
    pub fn arrivals(&self, request: u64, timeout: Duration) -> Result<Arrivals<'_>, ClientError> {
        let local = self.local()?;
        let until = Instant::now() + timeout;
        loop {
            let asked = Instant::now();
            let call = HandOverCall::Arrivals { request, wait_ms: step(until) };
            match self.call(&Request::HandOver(call))? {
                Reply::Arrivals { layers: 0, .. } if Instant::now() < until => {}
                Reply::Arrivals { layers: 0, .. } => {
                    return Err(ClientError::NotArrived { what: "the beginning".to_owned(), request });
                }
                Reply::Arrivals { time_ms, layers, blocks } => {
                    let here = (0..layers).map(|_| AtomicBool::new(false)).collect();
                    // The host counts from later, so ours ends first.
                    let until = asked + Duration::from_millis(time_ms);
                    return Ok(Arrivals { client: self, local, request, until, blocks, here });
                }
                other => return Err(wrong(&self.endpoint, Op::Arrivals, other)),
            }
        }
    }

    fn local(&self) -> Result<Arc<Local>, ClientError> {
        self.local.clone().ok_or_else(|| ClientError::NotLocal { endpoint: self.endpoint.clone() })
    }

    /// Whether the host has closed the connection, which no call may have met yet. A call that is under way meets it itself.
    fn is_hung_up(&self) -> bool {
        self.wire.try_lock().is_some_and(|wire| wire.writer.is_hung_up())
    }

    /// Whether it is done, not yet, or refused.
    fn done(&self, call: HandOverCall) -> Result<bool, ClientError> {
        let request = Request::HandOver(call);
        match self.outcomes(&request, 1)?[..] {
            [Outcome::Done] => Ok(true),
            [Outcome::InProgress] => Ok(false),
            _ => Err(ClientError::WrongReply { endpoint: self.endpoint.clone(), op: request.op() }),
        }
    }
}

/// A hand-over that this client makes. Dropping it before it is finished ends it: nothing is kept on either host.
pub struct HandOver<'a> {
    client: &'a Client,
    local: Arc<Local>,
    request: u64,
    layers: u32,
    /// Tests let it be over.
    pub(super) until: Instant,
    blocks: Vec<(BlockMeta, HandedPlace)>,
    is_over: bool,
}

impl HandOver<'_> {
    /// When its time is over. What is not finished by then is given up.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Where a block lies in the host's pool, for callers that fill it by other means than [`fill`](Self::fill). Returns `None` if
    /// there is nothing to fill: the host has the block already. Nothing may be written there after [`until`](Self::until),
    /// nor after this is dropped: dropping it tells the host that nobody writes there any more.
    pub fn place(&self, block: usize) -> Option<u64> {
        self.blocks.get(block).filter(|(_, place)| place.to_fill).map(|(_, place)| place.offset)
    }

    /// Writes one layer of one block in place. Does nothing if the host has the block already.
    ///
    /// # Errors
    /// There is no such block or layer, or `bytes` is not as long as a layer of it. [`ClientError::TooLate`] when its time
    /// was over before the bytes were all there: drop it and begin again.
    pub fn fill(&self, block: usize, layer: u32, bytes: &[u8]) -> Result<(), ClientError> {
        self.fill_parts(block, layer, &[bytes.into()])
    }

    /// [`fill`](Self::fill) with bytes that lie in many places, one behind the other.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn fill_parts(&self, block: usize, layer: u32, parts: &[Shared<'_>]) -> Result<(), ClientError> {
        let (offset, size) = range(&self.place_of(block, layer)?, layer, self.layers);
        let len = parts.iter().map(Shared::len).fold(0, usize::saturating_add);
        if len as u64 != size {
            return Err(ClientError::Size { len, size: size as u32 });
        }
        if self.place(block).is_none() {
            return Ok(());
        }
        self.check_time()?;
        let mut place = self.local.mapping.place(offset, size).ok_or_else(|| self.outside())?;
        for part in parts {
            place.copy_in(*part);
        }
        self.check_time()
    }

    /// Adds a layer of each block to its sum, as it lies in the host's pool now. When all layers were added, in their order,
    /// the sums are the [`checksums`](Self::checksums).
    pub(super) fn sum_layer(&self, layer: u32, sums: &mut [Checksum]) {
        for ((meta, place), sum) in self.blocks.iter().zip(sums) {
            let block = ArrivingBlock { key: meta.key, size: meta.size, offset: place.offset };
            let (offset, len) = range(&block, layer, self.layers);
            // A place outside of the pool has no bytes to send either.
            if let Some(bytes) = self.local.mapping.bytes(offset, len) {
                bytes.add_to(sum);
            }
        }
    }

    /// When its time is over, the host may take its places back.
    fn check_time(&self) -> Result<(), ClientError> {
        let late = Instant::now() >= self.until;
        if late { Err(ClientError::TooLate { request: self.request }) } else { Ok(()) }
    }

    /// The layer is filled in all blocks: it goes to the peer now. Layers may be done in any order. Its bytes must not be
    /// changed any more.
    ///
    /// # Errors
    /// There is no such layer, or it was done before. The peer is lost, or the time is over: drop it and begin again.
    pub fn layer_done(&self, layer: u32) -> Result<(), ClientError> {
        let call = HandOverCall::LayerDone { request: self.request, layer };
        self.client.done(call).map(drop)
    }

    /// The checksums of the blocks as they are now.
    pub fn checksums(&self) -> Vec<u64> {
        let bytes = |(meta, place): &(BlockMeta, HandedPlace)| {
            self.local.mapping.bytes(place.offset, meta.size.into()).unwrap_or(Shared::from(&[][..]))
        };
        self.blocks.iter().map(|block| bytes(block).checksum()).collect()
    }

    /// Has the peer compare the blocks with their checksums, one each and in order; then both hosts keep them. The host
    /// answers when the peer has read all blocks: with many GB, let [`Options::timeout`](super::Options) be long.
    ///
    /// # Errors
    /// A layer is not done: do it and finish again. A checksum is not that of the bytes that arrived, or the peer is
    /// lost: nothing is kept.
    pub fn finish(&mut self, checksums: &[u64]) -> Result<(), ClientError> {
        let call = HandOverCall::Finish { request: self.request, checksums: checksums.to_vec() };
        self.client.done(call)?;
        self.is_over = true;
        Ok(())
    }

    fn place_of(&self, block: usize, layer: u32) -> Result<ArrivingBlock, ClientError> {
        let found = self.blocks.get(block).filter(|_| layer < self.layers);
        let place = |(meta, place): &(BlockMeta, HandedPlace)| {
            let BlockMeta { key, size, .. } = *meta;
            ArrivingBlock { key, size, offset: place.offset }
        };
        let (blocks, layers) = (self.blocks.len(), self.layers);
        found.map(place).ok_or(ClientError::NoLayer { block, layer, blocks, layers })
    }

    fn outside(&self) -> ClientError {
        ClientError::WrongReply { endpoint: self.client.endpoint.clone(), op: Op::HandOver }
    }
}

impl Drop for HandOver<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            // The host notices by itself when the connection ends.
            let _ = self.client.done(HandOverCall::Drop { request: self.request });
        }
    }
}

/// Blocks that are being handed over to this client's host. Their places go to nobody else while this exists, at the
/// longest until [`until`](Self::until).
pub struct Arrivals<'a> {
    client: &'a Client,
    local: Arc<Local>,
    request: u64,
    until: Instant,
    blocks: Vec<ArrivingBlock>,
    here: Vec<AtomicBool>,
}

impl Arrivals<'_> {
    /// Until when the places stay. A reader that may take longer copies, and checks again afterwards.
    pub fn until(&self) -> Instant {
        self.until
    }

    pub fn layers(&self) -> u32 {
        self.here.len() as u32
    }

    /// The blocks, in the sender's order: names, sizes, and where they are in the host's pool.
    pub fn blocks(&self) -> &[ArrivingBlock] {
        &self.blocks
    }

    /// Waits until a layer is here, in all blocks.
    ///
    /// # Errors
    /// [`ClientError::NotArrived`] when `timeout` passes first; the hand-over broke off; there is no such layer.
    pub fn wait_layer(&self, layer: u32, timeout: Duration) -> Result<(), ClientError> {
        if self.here.get(layer as usize).is_some_and(|here| here.load(Ordering::Relaxed)) {
            return Ok(());
        }
        self.wait(Some(layer), timeout)?;
        if let Some(here) = self.here.get(layer as usize) {
            here.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// One layer of one block, in place. These are the bytes that the sender wrote; whether they are the ones that it
    /// meant is compared at the end, and [`finished`](Self::finished) says whether that held.
    ///
    /// # Errors
    /// The layer was not waited for, the places' time is over, the connection has ended, or there is no such block or layer.
    pub fn layer(&self, block: usize, layer: u32) -> Result<Shared<'_>, ClientError> {
        let (blocks, layers) = (self.blocks.len(), self.layers());
        let none = || ClientError::NoLayer { block, layer, blocks, layers };
        let place = self.blocks.get(block).ok_or_else(none)?;
        if !self.here.get(layer as usize).ok_or_else(none)?.load(Ordering::Relaxed) {
            return Err(self.not_here(Some(layer)));
        }
        if self.local.is_dead() || self.client.is_hung_up() {
            return Err(ClientError::LenderGone { key: place.key });
        }
        if Instant::now() >= self.until {
            return Err(ClientError::LeaseExpired { key: place.key });
        }
        let (offset, len) = range(place, layer, layers);
        let outside = || ClientError::WrongReply { endpoint: self.client.endpoint.clone(), op: Op::Arrivals };
        self.local.mapping.bytes(offset, len).ok_or_else(outside)
    }

    /// Waits until all blocks were compared with the sender's checksums and kept, and borrows them as
    /// [`get`](Client::get) does. From then on others find them as well.
    ///
    /// # Errors
    /// [`ClientError::NotArrived`] when `timeout` passes first. Otherwise the hand-over broke off: what was read of it
    /// must not be used.
    pub fn finished(&self, timeout: Duration) -> Result<Vec<Option<Block>>, ClientError> {
        self.settled(timeout)?;
        let keys: Vec<BlockKey> = self.blocks.iter().map(|block| block.key).collect();
        self.client.get(&keys, 0)
    }

    /// The wait of [`finished`](Self::finished) alone.
    pub(super) fn settled(&self, timeout: Duration) -> Result<(), ClientError> {
        self.wait(None, timeout)
    }

    fn wait(&self, layer: Option<u32>, timeout: Duration) -> Result<(), ClientError> {
        let until = Instant::now() + timeout;
        loop {
            let call = HandOverCall::Wait { request: self.request, layer, wait_ms: step(until) };
            if self.client.done(call)? {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(self.not_here(layer));
            }
        }
    }

    fn not_here(&self, layer: Option<u32>) -> ClientError {
        let what = layer.map_or_else(|| "the end".to_owned(), |layer| format!("layer {layer}"));
        ClientError::NotArrived { what, request: self.request }
    }
}

impl Drop for Arrivals<'_> {
    fn drop(&mut self) {
        // The host notices by itself when the connection ends.
        let _ = self.client.done(HandOverCall::Leave { request: self.request });
    }
}

/// Where a layer of a block lies, and how long it is.
fn range(block: &ArrivingBlock, layer: u32, layers: u32) -> (u64, u64) {
    let len = u64::from(block.size / layers);
    (block.offset + len * u64::from(layer), len)
}

/// Milliseconds that the next call waits.
fn step(until: Instant) -> u32 {
    until.saturating_duration_since(Instant::now()).min(STEP).as_millis() as u32
}
