//! Blocks that move layer by layer, while the engine computes.

use super::{CudaError, PageMover, Pages, Path, Stream, Underway, Way};
use crate::memory::event::Event;
use kvasir_memory::layout::paged::Descriptor;
use kvasir_memory::region::LocalRange;

/// The streams of a block that moves by layers: one for the pages and one for the bus, so that one layer is copied
/// while the next is gathered.
#[derive(Clone, Copy, Debug)]
pub struct LayerStreams<'a> {
    pub pages: &'a Stream,
    pub bus: &'a Stream,
}

/// The descriptors of one layer, and the part of the block that they fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layer<'a> {
    descriptors: &'a [Descriptor],
    offset: u64,
    len: u64,
}

/// Cuts descriptors, which are sorted by layer, into layers. Each is one piece of the block: all bytes of a layer come
/// before those of the next.
fn layers(descriptors: &[Descriptor]) -> impl Iterator<Item = Layer<'_>> {
    let mut offset = 0;
    descriptors.chunk_by(|a, b| a.layer == b.layer).map(move |descriptors| {
        let len = descriptors.iter().map(Descriptor::bytes).sum();
        let layer = Layer { descriptors, offset, len };
        offset += len;
        layer
    })
}

impl PageMover {
    /// Begins to move a block from an engine's pages to the host: gathers each layer into `pages.block`, on the GPU, and
    /// copies it from there to `host`, which is pinned. Layer *n* begins when the engine's `ready[n]` is complete, or
    /// at once if there is no such event. Returns one piece of work per layer to wait for: when it is complete, that
    /// layer is on the host. The call does not block.
    ///
    /// # Errors
    /// As [`begin`](Self::begin); layers that were begun are waited for.
    pub fn offload_layers(
        &mut self,
        streams: LayerStreams<'_>,
        pages: Pages<'_>,
        host: &LocalRange,
        ready: &[Event],
    ) -> Result<Vec<Underway>, CudaError> {
        let mut begun = Vec::new();
        for (nth, layer) in layers(pages.descriptors).enumerate() {
            if let Some(ready) = ready.get(nth) {
                streams.pages.after(ready)?;
            }
            let part = Pages { descriptors: layer.descriptors, ..pages };
            let gathered = self.begin(streams.pages, part, Way::Gather)?;
            streams.bus.after(gathered.event())?;
            let from = self.part(pages.block, layer)?;
            let copied = self.copy(streams.bus, &from, &self.part(host, layer)?)?;
            begun.push(copied.after(gathered));
        }
        Ok(begun)
    }

    /// Begins to move a block from the host, pinned, to an engine's pages: copies each layer to `pages.block`, on the
    /// GPU, and scatters it. Returns a piece of work per layer, in order: the engine computes layer *n*
    /// [after](Stream::after) its event. The call does not block.
    ///
    /// # Errors
    /// As [`begin`](Self::begin); layers that were begun are waited for.
    pub fn onboard_layers(
        &mut self,
        streams: LayerStreams<'_>,
        host: &LocalRange,
        pages: Pages<'_>,
    ) -> Result<Vec<Underway>, CudaError> {
        let mut begun = Vec::new();
        for layer in layers(pages.descriptors) {
            let to = self.part(pages.block, layer)?;
            let copied = self.copy(streams.bus, &self.part(host, layer)?, &to)?;
            streams.pages.after(copied.event())?;
            let part = Pages { descriptors: layer.descriptors, ..pages };
            let scattered = self.begin(streams.pages, part, Way::Scatter)?;
            begun.push(scattered.after(copied));
        }
        Ok(begun)
    }

    fn part(&self, block: &LocalRange, layer: Layer<'_>) -> Result<LocalRange, CudaError> {
        let shorter = || self.device.unsupported("move a layer", "the block is shorter than its layers");
        block.part(layer.offset, layer.len).ok_or_else(shorter)
    }

    /// Begins a copy of a range to another as long.
    fn copy(&mut self, stream: &Stream, from: &LocalRange, to: &LocalRange) -> Result<Underway, CudaError> {
        let whole = Descriptor {
            layer: 0,
            region: 0,
            engine_offset: from.offset(),
            block_offset: 0,
            run_bytes: from.len(),
            rows: 1,
            engine_stride: 0,
            block_stride: 0,
        };
        let engine = [from.region().clone()];
        let pages = Pages { engine: &engine, block: to, descriptors: &[whole] };
        // One long run: no kernel is needed for that, and the copy engines work independently of the multiprocessors.
        self.begin_by(Path::Copies2d, stream, pages, Way::Gather)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_pieces_of_the_block_in_order() {
        let descriptor = |layer, run_bytes, rows| Descriptor {
            layer,
            region: layer,
            engine_offset: 0,
            block_offset: 0,
            run_bytes,
            rows,
            engine_stride: run_bytes,
            block_stride: run_bytes,
        };
        let list = [descriptor(0, 10, 2), descriptor(0, 5, 1), descriptor(2, 7, 1)];
        let found: Vec<_> = layers(&list).map(|l| (l.descriptors.len(), l.offset, l.len)).collect();
        assert_eq!(found, [(2, 0, 25), (1, 25, 7)]);
        assert_eq!(layers(&[]).count(), 0);
    }
}
