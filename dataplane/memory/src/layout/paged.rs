//! From an engine's paged KV memory to a block and back: which bytes go where, as strided descriptors.
//!
//! A block keeps its planes layer by layer, so that layer *n* is complete while the engine still computes layer
//! *n + 1*; descriptors come in that order. Nothing here touches memory: a copy engine (memcpy, a CUDA kernel, a
//! NIC) walks the descriptors, in one direction to gather and in the other to scatter.

use super::{Error, KvShape};

/// Order of the vectors within one plane of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Order {
    /// All tokens of head 0, then of head 1, … A rank with fewer heads reads a range of it.
    HeadsTokens = 0,
    /// All heads of token 0, then of token 1, … Most engines keep pages this way, so that a page is one piece.
    TokensHeads = 1,
}

/// How an engine cuts its KV cache into separately allocated tensors, here *regions*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regions {
    /// All layers in one: region 0.
    One,
    /// One per layer: region = layer.
    PerLayer,
    /// Keys and values of each layer apart: region = layer × planes + plane.
    PerPlane,
}

/// Where vectors lie in an engine's paged cache; all strides in bytes.
///
/// The vector of (layer, plane, page, token, head) starts at the sum of index × stride in its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedLayout {
    pub regions: Regions,
    /// Bytes of each region; descriptors never leave it.
    pub region_bytes: u64,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Not used when layers are regions of their own.
    pub layer_stride: u64,
    /// From keys to values; not used when planes are regions of their own.
    pub plane_stride: u64,
    pub page_stride: u64,
    pub token_stride: u64,
    pub head_stride: u64,
}

impl PagedLayout {
    /// `[planes, pages, page_tokens, heads, head_dim]` per layer: vLLM with FlashAttention. Also its latent cache,
    /// `[pages, page_tokens, dim]`, which has one plane and one head.
    ///
    /// # Errors
    /// The shape is wrong, `page_tokens` is zero, or the sizes overflow.
    pub fn planes_then_pages(kv: &KvShape, pages: u32, page_tokens: u32) -> Result<Self, Error> {
        let mut layout = Self::page_in_one_piece(kv, page_tokens)?;
        layout.plane_stride = times(layout.page_stride, pages)?;
        layout.region_bytes = times(layout.plane_stride, kv.planes())?;
        Ok(layout)
    }

    /// `[pages, planes, page_tokens, heads, head_dim]` per layer: vLLM with FlashInfer.
    ///
    /// # Errors
    /// As [`planes_then_pages`](Self::planes_then_pages).
    pub fn pages_then_planes(kv: &KvShape, pages: u32, page_tokens: u32) -> Result<Self, Error> {
        let mut layout = Self::page_in_one_piece(kv, page_tokens)?;
        layout.plane_stride = layout.page_stride;
        layout.page_stride = times(layout.plane_stride, kv.planes())?;
        layout.region_bytes = times(layout.page_stride, pages)?;
        Ok(layout)
    }

    /// `[pages × page_tokens, heads, head_dim]` per layer and plane: SGLang's token pool.
    ///
    /// # Errors
    /// As [`planes_then_pages`](Self::planes_then_pages).
    pub fn separate_planes(kv: &KvShape, pages: u32, page_tokens: u32) -> Result<Self, Error> {
        let mut layout = Self::page_in_one_piece(kv, page_tokens)?;
        layout.regions = Regions::PerPlane;
        layout.region_bytes = times(layout.page_stride, pages)?;
        Ok(layout)
    }

    /// The same cache with `[heads, page_tokens, head_dim]` within a page (the "HND" order of FlashInfer).
    #[must_use]
    pub fn heads_first(self, kv: &KvShape) -> Self {
        let vector = kv.vector_bytes();
        // No overflow: both are at most the page stride, whose computation did not overflow.
        Self { token_stride: vector, head_stride: vector * u64::from(self.page_tokens), ..self }
    }

    fn page_in_one_piece(kv: &KvShape, page_tokens: u32) -> Result<Self, Error> {
        kv.check()?;
        if page_tokens == 0 {
            return Err(Error::Zero { what: "tokens per page" });
        }
        let head_stride = kv.vector_bytes();
        let token_stride = times(head_stride, kv.heads())?;
        let page_stride = times(token_stride, page_tokens)?;
        Ok(Self {
            regions: Regions::PerLayer,
            region_bytes: 0,
            page_tokens,
            layer_stride: 0,
            plane_stride: 0,
            page_stride,
            token_stride,
            head_stride,
        })
    }

    fn plane_start(&self, kv: &KvShape, layer: u32, plane: u32) -> Result<(u32, u64), Error> {
        let sum = |a: u64, b: u64| a.checked_add(b).ok_or(OVERFLOW);
        match self.regions {
            Regions::One => Ok((0, sum(times(self.layer_stride, layer)?, times(self.plane_stride, plane)?)?)),
            Regions::PerLayer => Ok((layer, times(self.plane_stride, plane)?)),
            Regions::PerPlane => {
                let region = layer.checked_mul(kv.planes()).and_then(|first| first.checked_add(plane));
                Ok((region.ok_or(OVERFLOW)?, 0))
            }
        }
    }
}

const OVERFLOW: Error = Error::Overflow { what: "the engine's KV cache" };

fn times(stride: u64, count: u32) -> Result<u64, Error> {
    stride.checked_mul(u64::from(count)).ok_or(OVERFLOW)
}

/// `rows` runs of `run_bytes` each: one 2-D copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub layer: u32,
    /// Which tensor of the engine, as [`Regions`] numbers them.
    pub region: u32,
    /// Where the first run starts in that region.
    pub engine_offset: u64,
    /// Where the first run starts in the block, after its header.
    pub block_offset: u64,
    pub run_bytes: u64,
    pub rows: u32,
    /// From one run to the next; not used when there is one row.
    pub engine_stride: u64,
    pub block_stride: u64,
}

impl Descriptor {
    /// Bytes it moves.
    pub fn bytes(&self) -> u64 {
        self.run_bytes * u64::from(self.rows)
    }

    /// Takes in `next` if it continues where this one ends, on both sides.
    fn extend(&mut self, next: &Self) -> bool {
        let goes_on = self.rows == 1
            && next.rows == 1
            && (self.layer, self.region) == (next.layer, next.region)
            && self.engine_offset + self.run_bytes == next.engine_offset
            && self.block_offset + self.run_bytes == next.block_offset;
        if goes_on {
            self.run_bytes += next.run_bytes;
        }
        goes_on
    }
}

/// The copies between the engine's `pages`, in token order, and one block of `tokens` tokens. The last page may be
/// used in part. Sorted by layer; every byte of the block is in exactly one run.
///
/// # Errors
/// The shape is wrong, the number of pages is not what `tokens` needs, or a page lies outside its region.
pub fn descriptors(
    kv: &KvShape,
    engine: &PagedLayout,
    order: Order,
    pages: &[u32],
    tokens: u32,
) -> Result<Vec<Descriptor>, Error> {
    kv.bytes_per_block(tokens)?; // from here on, no offset into the block overflows
    if engine.page_tokens == 0 {
        return Err(Error::Zero { what: "tokens per page" });
    }
    let needed = tokens.div_ceil(engine.page_tokens);
    if pages.len() != needed as usize {
        let page_tokens = engine.page_tokens;
        return Err(Error::WrongPageCount { tokens, page_tokens, needed, given: pages.len() });
    }
    let mut found: Vec<Descriptor> = Vec::new();
    for layer in 0..kv.layers {
        for plane in 0..kv.planes() {
            for (nth, &page) in (0u32..).zip(pages) {
                let part = PagePart { layer, plane, nth, page, tokens };
                for next in part.copies(kv, engine, order)? {
                    if !found.last_mut().is_some_and(|last| last.extend(&next)) {
                        found.push(next);
                    }
                }
            }
        }
    }
    Ok(found)
}

/// The `nth` page of a block, in one plane.
struct PagePart {
    layer: u32,
    plane: u32,
    nth: u32,
    page: u32,
    /// Tokens of the whole block.
    tokens: u32,
}

impl PagePart {
    fn copies(&self, kv: &KvShape, engine: &PagedLayout, order: Order) -> Result<Vec<Descriptor>, Error> {
        let vector = kv.vector_bytes();
        let (heads, tokens) = (u64::from(kv.heads()), u64::from(self.tokens));
        let first_token = u64::from(self.nth) * u64::from(engine.page_tokens);
        let here = (tokens - first_token).min(u64::from(engine.page_tokens)) as u32;
        let (region, start) = engine.plane_start(kv, self.layer, self.plane)?;
        let start = start.checked_add(times(engine.page_stride, self.page)?).ok_or(OVERFLOW)?;
        self.check_end(kv, engine, region, start, here)?;

        let (block_token, block_head) = match order {
            Order::HeadsTokens => (vector, vector * tokens),
            Order::TokensHeads => (vector * heads, vector),
        };
        let plane_index = u64::from(self.layer) * u64::from(kv.planes()) + u64::from(self.plane);
        let block_start = plane_index * vector * heads * tokens + first_token * block_token;
        let by_token = Dim { count: here, engine: engine.token_stride, block: block_token };
        let by_head = Dim { count: kv.heads(), engine: engine.head_stride, block: block_head };
        let first = Descriptor {
            layer: self.layer,
            region,
            engine_offset: start,
            block_offset: block_start,
            run_bytes: vector,
            rows: 1,
            engine_stride: 0,
            block_stride: 0,
        };
        Ok(walk(first, by_token, by_head))
    }

    /// The furthest byte of the page must lie in the region: page numbers come from the engine.
    fn check_end(
        &self,
        kv: &KvShape,
        engine: &PagedLayout,
        region: u32,
        start: u64,
        here: u32,
    ) -> Result<(), Error> {
        let last_token = times(engine.token_stride, here - 1)?;
        let last_head = times(engine.head_stride, kv.heads() - 1)?;
        let end = [last_token, last_head, kv.vector_bytes()].into_iter().try_fold(start, u64::checked_add);
        match end {
            Some(end) if end <= engine.region_bytes => Ok(()),
            _ => Err(Error::OutOfRegion {
                page: self.page,
                region,
                end: end.unwrap_or(u64::MAX),
                region_bytes: engine.region_bytes,
            }),
        }
    }
}

/// One dimension of a copy.
#[derive(Clone, Copy)]
struct Dim {
    count: u32,
    engine: u64,
    block: u64,
}

impl Dim {
    /// Whether stepping along it leaves no gap after runs of `run_bytes`, on both sides.
    fn dense(self, run_bytes: u64) -> bool {
        self.count == 1 || (self.engine == run_bytes && self.block == run_bytes)
    }
}

/// All runs of a 2-D grid of vectors, in as few descriptors as the strides allow.
fn walk(first: Descriptor, a: Dim, b: Dim) -> Vec<Descriptor> {
    // Whichever dimension is dense joins the run; the other one makes the rows.
    let (inner, outer) = if a.dense(first.run_bytes) { (a, b) } else { (b, a) };
    if inner.dense(first.run_bytes) {
        let run_bytes = first.run_bytes * u64::from(inner.count);
        return if outer.dense(run_bytes) {
            vec![Descriptor { run_bytes: run_bytes * u64::from(outer.count), ..first }]
        } else {
            vec![rows(Descriptor { run_bytes, ..first }, outer)]
        };
    }
    // Neither is dense: rows along the longer dimension, one descriptor per step of the shorter.
    let (long, short) = if a.count >= b.count { (a, b) } else { (b, a) };
    (0..u64::from(short.count))
        .map(|step| Descriptor {
            engine_offset: first.engine_offset + step * short.engine,
            block_offset: first.block_offset + step * short.block,
            ..first
        })
        .map(|start| rows(start, long))
        .collect()
}

fn rows(first: Descriptor, dim: Dim) -> Descriptor {
    Descriptor { rows: dim.count, engine_stride: dim.engine, block_stride: dim.block, ..first }
}
