//! Hand-over of a request's blocks from prefill to decode, layer by layer, while they are produced.
//!
//! The sender pushes each layer as a batch of its own; when all of a layer's bytes are in the receiver's memory, a
//! notice says so. Layers may complete out of order on the way. The receiver waits for *the first n layers* and can
//! compute on layer 0 while later ones are still being produced.

use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::time::Instant;

use super::entry::{Batch, BatchTooLarge, Entry};
use super::plan::Class;
use super::submit::Engine;
use super::{Transfer, TransferError};
use crate::transport::node::Notice;

/// The most layers of a model, and the most requests that one receiver keeps track of.
pub const LAYERS_MAX: u32 = 1024;
pub const REQUESTS_MAX: usize = 1 << 16;
const MAGIC: [u8; 4] = *b"KVLY";
const NOTICE_LEN: usize = 20;

/// The sending side of one request.
pub struct HandOver<'a> {
    engine: &'a Engine,
    request: u64,
    layers: u32,
    sent: Vec<Transfer>,
}

impl<'a> HandOver<'a> {
    /// `request` names it on both sides; `layers` is how many will be pushed.
    pub fn new(engine: &'a Engine, request: u64, layers: u32) -> Self {
        Self { engine, request, layers: layers.min(LAYERS_MAX), sent: Vec::new() }
    }

    /// Pushes the next layer: writes of all its bytes into the receiver's memory.
    pub fn push(&mut self, entries: Vec<Entry>) -> Result<&Transfer, BatchTooLarge> {
        let layer = self.sent.len() as u32;
        let notice = encode(self.request, layer, self.layers);
        let batch = Batch { entries, notice: Some(notice), ..Batch::new(Class::DecodeCritical) };
        self.sent.push(self.engine.submit(batch)?);
        Ok(&self.sent[layer as usize])
    }

    /// Waits for all layers pushed so far and returns the first error. Returns `None` if `until` passes first.
    pub fn wait(&self, until: Instant) -> Option<Result<(), TransferError>> {
        for transfer in &self.sent {
            let status = transfer.wait(until);
            if !status.is_complete() {
                return None;
            }
            let error = (0..status.entries).find_map(|entry| transfer.poll_entry(entry)?.error);
            if let Some(error) = error.filter(|_| status.failed > 0) {
                return Some(Err(error));
            }
        }
        Some(Ok(()))
    }
}

/// The receiving side of all requests of a node.
#[derive(Default)]
pub struct Arrivals {
    requests: Mutex<HashMap<u64, Arrived>>,
    changed: Condvar,
}

#[derive(Default)]
struct Arrived {
    layers: u32,
    /// Whether each layer has arrived.
    here: Vec<bool>,
}

impl Arrived {
    /// Layers that arrived without a gap before them.
    fn leading(&self) -> u32 {
        self.here.iter().take_while(|&&here| here).count() as u32
    }
}

impl Arrivals {
    /// Takes in a notice. Returns false for a notice of another kind, for one that makes no sense, and when too many
    /// requests are tracked already.
    pub fn note(&self, notice: &Notice) -> bool {
        let Some((request, layer, layers)) = decode(&notice.message) else { return false };
        let mut requests = self.requests.lock();
        if requests.len() >= REQUESTS_MAX && !requests.contains_key(&request) {
            return false;
        }
        let arrived = requests.entry(request).or_default();
        if arrived.layers == 0 {
            *arrived = Arrived { layers, here: vec![false; layers as usize] };
        }
        let Some(here) = arrived.here.get_mut(layer as usize).filter(|_| arrived.layers == layers) else {
            return false;
        };
        *here = true;
        self.changed.notify_all();
        true
    }

    /// How many leading layers of a request have arrived whole, and how many it has; (0, 0) for an unknown request.
    pub fn progress(&self, request: u64) -> (u32, u32) {
        let requests = self.requests.lock();
        requests.get(&request).map_or((0, 0), |arrived| (arrived.leading(), arrived.layers))
    }

    /// Waits until the first `count` layers of a request are here. Returns false if `until` passes first.
    pub fn wait(&self, request: u64, count: u32, until: Instant) -> bool {
        let mut requests = self.requests.lock();
        loop {
            if requests.get(&request).is_some_and(|arrived| arrived.leading() >= count) {
                return true;
            }
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return false;
            };
            self.changed.wait_for(&mut requests, left);
        }
    }

    /// Forgets a request that was taken over or given up.
    pub fn forget(&self, request: u64) {
        self.requests.lock().remove(&request);
    }
}

/// The notice that says that a layer is there.
pub fn encode(request: u64, layer: u32, layers: u32) -> Vec<u8> {
    [&MAGIC[..], &request.to_le_bytes(), &layer.to_le_bytes(), &layers.to_le_bytes()].concat()
}

/// Request, layer and number of layers of such a notice. None if it is another, or makes no sense.
pub fn decode(message: &[u8]) -> Option<(u64, u32, u32)> {
    let message: &[u8; NOTICE_LEN] = message.try_into().ok()?;
    let (magic, rest) = message.split_first_chunk::<4>()?;
    let (request, rest) = rest.split_first_chunk()?;
    let (layer, rest) = rest.split_first_chunk()?;
    let (layers, _) = rest.split_first_chunk()?;
    let (layer, layers) = (u32::from_le_bytes(*layer), u32::from_le_bytes(*layers));
    let good = *magic == MAGIC && layer < layers && layers <= LAYERS_MAX;
    good.then(|| (u64::from_le_bytes(*request), layer, layers))
}
