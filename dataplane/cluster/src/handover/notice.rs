//! The notice that says that a layer of a hand-over is there. It travels behind the layer's bytes.

use super::LAYERS_MAX;

const MAGIC: [u8; 4] = *b"KVLY";
const LEN: usize = 20;

/// `id` is the number of the hand-over.
pub fn encode(id: u64, layer: u32, layers: u32) -> Vec<u8> {
    [&MAGIC[..], &id.to_le_bytes(), &layer.to_le_bytes(), &layers.to_le_bytes()].concat()
}

/// Number of the hand-over, layer and number of layers. Returns `None` if it is another notice, or makes no sense.
pub fn decode(message: &[u8]) -> Option<(u64, u32, u32)> {
    let message: &[u8; LEN] = message.try_into().ok()?;
    let (magic, rest) = message.split_first_chunk::<4>()?;
    let (id, rest) = rest.split_first_chunk()?;
    let (layer, rest) = rest.split_first_chunk()?;
    let (layers, _) = rest.split_first_chunk()?;
    let (layer, layers) = (u32::from_le_bytes(*layer), u32::from_le_bytes(*layers));
    let good = *magic == MAGIC && layer < layers && layers <= LAYERS_MAX;
    good.then(|| (u64::from_le_bytes(*id), layer, layers))
}
