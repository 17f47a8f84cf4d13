//! Layouts for property tests, here and in other crates.

use super::paged::{Order, PagedLayout, Regions};
use super::{Attention, Dtype, KvShape};
use proptest::prelude::*;

pub(super) const fn heads(kv_heads: u32, head_dim: u32) -> Attention {
    Attention::Heads { kv_heads, head_dim }
}

/// A shape, an engine layout for it with `PAGES` pages, distinct pages and a number of tokens that needs them.
pub fn cases() -> impl Strategy<Value = (KvShape, PagedLayout, Order, Vec<u32>, u32)> {
    let attention = prop_oneof![
        (1u32..4, 1u32..5).prop_map(|(kv_heads, head_dim)| heads(kv_heads, head_dim)),
        (1u32..5, 0u32..3).prop_map(|(latent_dim, rope_dim)| Attention::Latent {
            latent_dim,
            rope_dim,
            rope_dtype: Dtype::F16
        }),
    ];
    let dtype = prop_oneof![Just(Dtype::Int4), Just(Dtype::Int8), Just(Dtype::Bf16)];
    let order = prop_oneof![Just(Order::HeadsTokens), Just(Order::TokensHeads)];
    let pages = prop::sample::subsequence((0..PAGES).collect::<Vec<_>>(), 1..=4).prop_shuffle();
    (1u32..4, attention, dtype, order, 1u32..5, 0u32..4, any::<bool>(), pages, 0u32..5).prop_map(
        |(layers, attention, dtype, order, page_tokens, kind, turned, pages, short)| {
            let kv = KvShape::plain(layers, attention, dtype);
            let make = match kind {
                0 => PagedLayout::planes_then_pages,
                1 => PagedLayout::pages_then_planes,
                _ => PagedLayout::separate_planes,
            };
            let mut engine = make(&kv, PAGES, page_tokens).expect("small layouts fit");
            if kind == 3 {
                engine = all_layers_in_one(&kv, page_tokens);
            }
            if turned {
                engine = engine.heads_first(&kv);
            }
            let tokens = page_tokens * pages.len() as u32 - short.min(page_tokens - 1);
            (kv, engine, order, pages, tokens)
        },
    )
}

pub(super) const PAGES: u32 = 6;

/// `[pages, layers, planes, page_tokens, heads, head_dim]`: a page holds all its layers.
fn all_layers_in_one(kv: &KvShape, page_tokens: u32) -> PagedLayout {
    let base = PagedLayout::separate_planes(kv, PAGES, page_tokens).expect("small layouts fit");
    let plane_stride = base.page_stride;
    let layer_stride = plane_stride * u64::from(kv.planes());
    let page_stride = layer_stride * u64::from(kv.layers);
    let region_bytes = page_stride * u64::from(PAGES);
    PagedLayout { regions: Regions::One, plane_stride, layer_stride, page_stride, region_bytes, ..base }
}
