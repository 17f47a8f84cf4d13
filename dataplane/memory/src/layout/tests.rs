use super::cases::{cases, heads};
use super::paged::{Descriptor, Order, PagedLayout, Regions, descriptors};
use super::*;
use proptest::prelude::*;

const fn latent(rope_dtype: Dtype) -> Attention {
    Attention::Latent { latent_dim: 512, rope_dim: 64, rope_dtype }
}

/// Layers, KV heads and head size of published models, and what they come to in bf16.
#[test]
fn published_models_take_their_published_bytes() {
    let check = |layers, attention, bytes: u64| {
        let kv = KvShape::plain(layers, attention, Dtype::Bf16);
        assert_eq!(kv.bytes_per_token(), Ok(bytes), "{kv:?}");
        assert_eq!(kv.bytes_per_block(16), Ok(16 * bytes), "{kv:?}");
    };
    // Llama 3: arXiv:2407.21783, table 3.
    check(32, heads(8, 128), 131_072); // 8B
    check(80, heads(8, 128), 327_680); // 70B
    check(126, heads(8, 128), 516_096); // 405B; the figure itself is in arXiv:2505.09343, table 1
    // Qwen2-7B: arXiv:2407.10671, table 1.
    check(28, heads(4, 128), 57_344);
    // DeepSeek-V3: arXiv:2412.19437 §4.2; the figure itself is in arXiv:2505.09343, table 1.
    check(61, latent(Dtype::Bf16), 70_272);
    // Falcon-7B, multi-query: config.json of tiiuae/falcon-7b (71 query heads of 64, one KV head).
    check(32, heads(1, 64), 8_192);
    // GPT-3 175B, multi-head: arXiv:2005.14165, table 2.1.
    check(96, heads(96, 128), 4_718_592);
    // LLaMA-3-70B counted as if it had no grouped queries. It is half of the 5 MiB that seeds/003 states.
    check(80, heads(64, 128), 2_621_440);
}

#[test]
fn every_dtype_takes_its_bits_and_scales() {
    let check = |dtype, head_dim, scales, bytes| {
        let kv = KvShape { layers: 1, attention: heads(1, head_dim), dtype, scales };
        assert_eq!(kv.vector_bytes(), bytes, "{kv:?}");
        assert_eq!(kv.bytes_per_token(), Ok(2 * bytes), "{kv:?}");
    };
    check(Dtype::F32, 128, None, 512);
    check(Dtype::F16, 128, None, 256);
    check(Dtype::Bf16, 128, None, 256);
    check(Dtype::Fp8E4m3, 128, None, 128);
    check(Dtype::Fp8E5m2, 128, None, 128);
    check(Dtype::Int8, 128, Some(Scales { group: 128, bytes: 2 }), 130);
    check(Dtype::Int4, 128, Some(Scales { group: 32, bytes: 4 }), 64 + 16);
    check(Dtype::Int4, 128, None, 64);
    check(Dtype::Int4, 65, Some(Scales { group: 32, bytes: 4 }), 33 + 12); // padded byte, short last group

    // DeepSeek's fp8 latent cache: 512 fp8 + 4 f32 scales + 64 bf16 rotary (deepseek-ai/FlashMLA, README).
    let scales = Some(Scales { group: 128, bytes: 4 });
    let fp8 = KvShape { layers: 1, attention: latent(Dtype::Bf16), dtype: Dtype::Fp8E4m3, scales };
    assert_eq!(fp8.bytes_per_token(), Ok(656));
}

#[test]
fn a_rank_keeps_its_share() {
    let check = |attention, tp, kept: Result<u32, Error>, copies| {
        let kv = KvShape::plain(80, attention, Dtype::Bf16);
        assert_eq!(kv.on_rank(tp, 80).map(|rank| rank.heads()), kept, "{attention:?} on {tp}");
        assert_eq!(kv.copies(tp), copies, "{attention:?} on {tp}");
    };
    check(heads(8, 128), 1, Ok(8), 1);
    check(heads(8, 128), 4, Ok(2), 1);
    check(heads(8, 128), 8, Ok(1), 1);
    check(heads(8, 128), 16, Ok(1), 2); // replicated: two ranks keep the same head
    check(heads(1, 64), 8, Ok(1), 8);
    check(heads(8, 128), 3, Err(Error::UnevenHeads { kv_heads: 8, tp: 3 }), 1);
    check(heads(8, 128), 12, Err(Error::UnevenHeads { kv_heads: 8, tp: 12 }), 1);
    check(heads(8, 128), 0, Err(Error::Zero { what: "tensor-parallel ranks" }), 1);
    check(latent(Dtype::Bf16), 8, Ok(1), 8);

    let kv = KvShape::plain(61, latent(Dtype::Bf16), Dtype::Bf16);
    assert_eq!(kv.on_rank(8, 15).and_then(|rank| rank.bytes_per_token()), Ok(15 * 576 * 2));
    assert_eq!(kv.on_rank(1, 62), Err(Error::StageTooLong { stage_layers: 62, layers: 61 }));
    assert_eq!(kv.on_rank(1, 0), Err(Error::Zero { what: "layers of a stage" }));
}

#[test]
fn layers_are_split_over_stages() {
    let check = |layers, stages, expected: Result<&[u32], Error>| {
        assert_eq!(layers_per_stage(layers, stages).as_deref(), expected.as_ref().map(|split| *split));
    };
    check(80, 4, Ok(&[20, 20, 20, 20]));
    check(61, 4, Ok(&[15, 15, 16, 15]));
    check(62, 4, Ok(&[15, 16, 16, 15]));
    check(7, 3, Ok(&[2, 3, 2]));
    check(5, 5, Ok(&[1, 1, 1, 1, 1]));
    check(4, 5, Err(Error::TooManyStages { layers: 4, stages: 5 }));
    check(4, 0, Err(Error::Zero { what: "pipeline stages" }));
}

#[test]
fn impossible_shapes_are_refused() {
    let check = |kv: KvShape, expected| assert_eq!(kv.bytes_per_token(), Err(expected), "{kv:?}");
    let plain = |layers, attention| KvShape::plain(layers, attention, Dtype::Bf16);
    check(plain(0, heads(8, 128)), Error::Zero { what: "layers" });
    check(plain(1, heads(0, 128)), Error::Zero { what: "KV heads" });
    check(plain(1, heads(8, 0)), Error::Zero { what: "vector length" });
    check(plain(u32::MAX, heads(u32::MAX, u32::MAX)), Error::Overflow { what: "one token" });
    let no_latent = Attention::Latent { latent_dim: 0, rope_dim: 64, rope_dtype: Dtype::Bf16 };
    check(plain(1, no_latent), Error::Zero { what: "vector length" });
    let scaled = |dtype, group| KvShape {
        scales: Some(Scales { group, bytes: 2 }),
        ..KvShape::plain(1, heads(8, 128), dtype)
    };
    check(scaled(Dtype::Int8, 0), Error::Zero { what: "scale group" });
    let unquantized = Error::ScalesWithoutQuantization { dtype: Dtype::Bf16, group: 64 };
    check(scaled(Dtype::Bf16, 64), unquantized);
    assert_eq!(
        plain(1 << 20, heads(1 << 20, 1 << 20)).bytes_per_block(1 << 20),
        Err(Error::Overflow { what: "one block" })
    );
    assert_eq!(plain(1, heads(8, 128)).bytes_per_block(0), Err(Error::Zero { what: "tokens per block" }));
}

#[test]
fn a_page_in_the_blocks_order_is_one_run_per_plane() {
    let kv = KvShape::plain(2, heads(8, 128), Dtype::Bf16);
    let engine = PagedLayout::planes_then_pages(&kv, 100, 16).unwrap();
    let found = descriptors(&kv, &engine, Order::TokensHeads, &[7, 8, 3], 48).unwrap();
    // Pages 7 and 8 are neighbours and join; page 3 stands alone. 2 layers × 2 planes × 2 runs.
    assert_eq!(found.len(), 8);
    let page = 16 * 8 * 256;
    assert_eq!((found[0].engine_offset, found[0].run_bytes, found[0].rows), (7 * page, 2 * page, 1));
    // The other order needs a row per token: 2 layers × 2 planes × 3 pages × 8 heads.
    let turned = descriptors(&kv, &engine, Order::HeadsTokens, &[7, 8, 3], 48).unwrap();
    assert_eq!(turned.len(), 2 * 2 * 3 * 8);
    assert!(turned.iter().all(|d| d.rows == 16 && d.run_bytes == 256));
}

#[test]
fn page_numbers_from_the_engine_are_checked() {
    let kv = KvShape::plain(1, heads(2, 4), Dtype::Bf16);
    let engine = PagedLayout::pages_then_planes(&kv, 4, 16).unwrap();
    let ask = |pages: &[u32], tokens| descriptors(&kv, &engine, Order::HeadsTokens, pages, tokens);
    assert!(ask(&[3, 0], 17).is_ok());
    assert!(matches!(ask(&[4, 0], 17), Err(Error::OutOfRegion { page: 4, region: 0, .. })));
    assert!(matches!(ask(&[u32::MAX, 0], 17), Err(Error::OutOfRegion { page: u32::MAX, .. })));
    let wrong = Error::WrongPageCount { tokens: 17, page_tokens: 16, needed: 2, given: 1 };
    assert_eq!(ask(&[3], 17), Err(wrong));
    assert_eq!(ask(&[], 0), Err(Error::Zero { what: "tokens per block" }));
}

/// The slow obvious way: for each byte of the block, in its order, where it is in the engine.
fn by_hand(kv: &KvShape, e: &PagedLayout, order: Order, pages: &[u32], tokens: u32) -> Vec<(u32, u64)> {
    let mut sources = Vec::new();
    for layer in 0..kv.layers {
        for plane in 0..kv.planes() {
            let (outer, inner) = match order {
                Order::HeadsTokens => (kv.heads(), tokens),
                Order::TokensHeads => (tokens, kv.heads()),
            };
            for i in 0..outer {
                for j in 0..inner {
                    let (head, token) = if order == Order::HeadsTokens { (i, j) } else { (j, i) };
                    let page = pages[(token / e.page_tokens) as usize];
                    let (region, start) = match e.regions {
                        Regions::One => {
                            (0, u64::from(layer) * e.layer_stride + u64::from(plane) * e.plane_stride)
                        }
                        Regions::PerLayer => (layer, u64::from(plane) * e.plane_stride),
                        Regions::PerPlane => (layer * kv.planes() + plane, 0),
                    };
                    let at = start
                        + u64::from(page) * e.page_stride
                        + u64::from(token % e.page_tokens) * e.token_stride
                        + u64::from(head) * e.head_stride;
                    sources.extend((0..kv.vector_bytes()).map(|byte| (region, at + byte)));
                }
            }
        }
    }
    sources
}

/// What a copy engine does with the descriptors: for each byte of the block, where it came from.
fn walked(found: &[Descriptor], block_bytes: u64) -> Vec<Option<(u32, u64)>> {
    let mut sources = vec![None; block_bytes as usize];
    for d in found {
        for row in 0..u64::from(d.rows) {
            for byte in 0..d.run_bytes {
                let at = &mut sources[(d.block_offset + row * d.block_stride + byte) as usize];
                assert_eq!(*at, None, "a byte of the block is written twice");
                *at = Some((d.region, d.engine_offset + row * d.engine_stride + byte));
            }
        }
    }
    sources
}

proptest! {
    #[test]
    fn descriptors_move_every_byte_to_its_place((kv, engine, order, pages, tokens) in cases()) {
        let found = descriptors(&kv, &engine, order, &pages, tokens).unwrap();
        let expected: Vec<_> =
            by_hand(&kv, &engine, order, &pages, tokens).into_iter().map(Some).collect();
        prop_assert_eq!(walked(&found, kv.bytes_per_block(tokens).unwrap()), expected);
        prop_assert!(found.is_sorted_by_key(|d| d.layer), "layer by layer");
        let regions = engine.region_bytes;
        for d in &found {
            let last = u64::from(d.rows - 1) * d.engine_stride;
            prop_assert!(d.engine_offset + last + d.run_bytes <= regions);
        }
    }

    #[test]
    fn no_shape_panics(
        layers in any::<u32>(), kv_heads in any::<u32>(), dim in any::<u32>(), tokens in any::<u32>(),
        tp in any::<u32>(), group in any::<u32>(), bytes in any::<u16>(),
    ) {
        let kv = KvShape {
            layers,
            attention: heads(kv_heads, dim),
            dtype: Dtype::Int4,
            scales: Some(Scales { group, bytes }),
        };
        let _ = (kv.bytes_per_block(tokens), kv.on_rank(tp, layers), kv.copies(tp));
        let _ = PagedLayout::planes_then_pages(&kv, layers, tokens);
    }
}
