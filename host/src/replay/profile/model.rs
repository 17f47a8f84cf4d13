//! The shape of a model, and what its operators compute and read.
//!
//! Counted as in Mooncake's talk ("Layer Computation Details"), with fewer heads for keys and values than for queries, three matrices in
//! the feed-forward network, and two operations for each product that is added.

use super::{Error, above_0};
use serde::Deserialize;

/// A decoder of like layers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    layers: u32,
    /// Width between layers.
    hidden: u32,
    vocabulary: u32,
    bytes_per_weight: u32,
    bytes_per_kv_value: u32,
    attention: Attention,
    feed_forward: FeedForward,
    experts: Option<Experts>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum Attention {
    /// Some heads of queries share one head of keys and values (arXiv 2305.13245).
    Grouped { heads: u32, kv_heads: u32, head_dim: u32 },
    /// All share one latent vector a token (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    Latent { heads: u32, query_rank: u32, kv_rank: u32, rope_dim: u32, nope_dim: u32, value_dim: u32 },
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct FeedForward {
    intermediate: u32,
}

/// They take the place of the feed-forward network from one layer on.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Experts {
    from_layer: u32,
    count: u32,
    active: u32,
    shared: u32,
    intermediate: u32,
}

impl Model {
    pub(super) fn check(&self, name: &str) -> Result<(), Error> {
        let mut values = vec![
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("vocabulary", self.vocabulary),
            ("bytes_per_weight", self.bytes_per_weight),
            ("bytes_per_kv_value", self.bytes_per_kv_value),
            ("feed_forward.intermediate", self.feed_forward.intermediate),
        ];
        match self.attention {
            Attention::Grouped { heads, kv_heads, head_dim } => values.extend([
                ("attention.heads", heads),
                ("attention.kv_heads", kv_heads),
                ("attention.head_dim", head_dim),
            ]),
            Attention::Latent { heads, query_rank, kv_rank, rope_dim, nope_dim, value_dim } => {
                values.extend([
                    ("attention.heads", heads),
                    ("attention.query_rank", query_rank),
                    ("attention.kv_rank", kv_rank),
                    ("attention.rope_dim", rope_dim),
                    ("attention.nope_dim", nope_dim),
                    ("attention.value_dim", value_dim),
                ])
            }
        }
        if let Some(experts) = &self.experts {
            values.extend([
                ("experts.count", experts.count),
                ("experts.active", experts.active),
                ("experts.intermediate", experts.intermediate),
            ]);
        }
        let values: Vec<_> = values.into_iter().map(|(field, value)| (field, f64::from(value))).collect();
        above_0(name, &values)?;
        let refuse = |what| Err(Error::Shape { name: name.to_owned(), what });
        match (&self.attention, &self.experts) {
            (Attention::Grouped { heads, kv_heads, .. }, _) if kv_heads > heads => {
                refuse("there are more kv_heads than heads")
            }
            (_, Some(experts)) if experts.active > experts.count => {
                refuse("more experts are active than there are")
            }
            (_, Some(experts)) if experts.from_layer > self.layers => {
                refuse("experts begin behind the last layer")
            }
            _ => Ok(()),
        }
    }

    pub(in crate::replay) fn layers(&self) -> u32 {
        self.layers
    }

    pub(super) fn is_8bit(&self) -> bool {
        self.bytes_per_weight == 1
    }

    /// All there are.
    pub(super) fn weights(&self) -> f64 {
        let all = |experts: &Experts| f64::from(experts.count) + f64::from(experts.shared);
        self.layer_weights(all) + 2.0 * self.vocabulary_weights()
    }

    pub(super) fn weight_bytes(&self) -> f64 {
        self.weights() * f64::from(self.bytes_per_weight)
    }

    /// What a step reads of them; of the first matrix it takes a row for each token.
    pub(super) fn step_bytes(&self) -> f64 {
        (self.weights() - self.vocabulary_weights()) * f64::from(self.bytes_per_weight)
    }

    /// Operations of one token in prefill: its products with the weights of the layers that are active for it. Only the last token of a
    /// prompt is asked for the next word, so the vocabulary does not count.
    pub(super) fn prefill_flop_per_token(&self) -> f64 {
        let active = |experts: &Experts| f64::from(experts.active) + f64::from(experts.shared);
        2.0 * self.layer_weights(active)
    }

    /// The same in decode, where each token is asked for the next word.
    pub(super) fn decode_flop_per_token(&self) -> f64 {
        self.prefill_flop_per_token() + 2.0 * self.vocabulary_weights()
    }

    /// Of a token's attention to one token, in prefill.
    pub(super) fn prefill_flop_per_pair(&self) -> f64 {
        let products = match self.attention {
            Attention::Grouped { heads, head_dim, .. } => f64::from(heads) * 2.0 * f64::from(head_dim),
            Attention::Latent { heads, rope_dim, nope_dim, value_dim, .. } => {
                f64::from(heads) * [rope_dim, nope_dim, value_dim].map(f64::from).iter().sum::<f64>()
            }
        };
        2.0 * f64::from(self.layers) * products
    }

    /// The same in decode, where latent vectors are attended to as they are.
    pub(super) fn decode_flop_per_pair(&self) -> f64 {
        let Attention::Latent { heads, kv_rank, rope_dim, .. } = self.attention else {
            return self.prefill_flop_per_pair();
        };
        let products = f64::from(heads) * (2.0 * f64::from(kv_rank) + f64::from(rope_dim));
        2.0 * f64::from(self.layers) * products
    }

    /// What the cache holds of a token.
    pub(super) fn kv_bytes_per_token(&self) -> f64 {
        let values = match self.attention {
            Attention::Grouped { kv_heads, head_dim, .. } => 2.0 * f64::from(kv_heads) * f64::from(head_dim),
            Attention::Latent { kv_rank, rope_dim, .. } => f64::from(kv_rank) + f64::from(rope_dim),
        };
        f64::from(self.layers) * values * f64::from(self.bytes_per_kv_value)
    }

    fn layer_weights(&self, count: impl Fn(&Experts) -> f64) -> f64 {
        let gated = |intermediate: u32| 3.0 * f64::from(self.hidden) * f64::from(intermediate);
        let layers = f64::from(self.layers);
        let dense = gated(self.feed_forward.intermediate);
        let feed_forward = self.experts.as_ref().map_or(layers * dense, |experts| {
            let first = f64::from(experts.from_layer);
            first * dense + (layers - first) * count(experts) * gated(experts.intermediate)
        });
        layers * self.attention_weights() + feed_forward
    }

    fn attention_weights(&self) -> f64 {
        let hidden = f64::from(self.hidden);
        match self.attention {
            Attention::Grouped { heads, kv_heads, head_dim } => {
                2.0 * hidden * f64::from(head_dim) * (f64::from(heads) + f64::from(kv_heads))
            }
            Attention::Latent { heads, query_rank, kv_rank, rope_dim, nope_dim, value_dim } => {
                let [heads, query_rank, kv_rank] = [heads, query_rank, kv_rank].map(f64::from);
                let [rope, nope, value] = [rope_dim, nope_dim, value_dim].map(f64::from);
                let query = hidden * query_rank + query_rank * heads * (nope + rope);
                let latent = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value);
                query + latent + heads * value * hidden
            }
        }
    }

    /// Of the first or the last matrix.
    fn vocabulary_weights(&self) -> f64 {
        f64::from(self.vocabulary) * f64::from(self.hidden)
    }
}
